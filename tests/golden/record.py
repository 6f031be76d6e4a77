"""Records a golden log: `python -m tests.golden.record NAME [SEED]`; with a seed, of a hostile simulated history.

A recorded log is never edited and never recorded again: every later version must replay it. Record a new one, under a new name,
when the vocabulary of events or steps grows."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from ops.simulation.history import Size, run_seed
from scheduler.core import Drain
from state.events import Settings
from state.requests import Cancel, Op, Unload
from state.segment_log import write_segment
from tests.harness import FAILING, Synchronous, forward_body
from workers.simulated import SIMULATED_SPEC

FB, STEP, SAMPLE = Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.SAMPLE


def scenes() -> Synchronous:
    """Every kind of event and step once or more: training, sampling, residents, failures, refusals, a cancel, a death, a drain."""
    spec = msgspec.structs.replace(SIMULATED_SPEC, device_slots=2)
    bench = Synchronous(Settings(snapshot_after_requests=3), spec=spec)
    for tenant in ("ada", "brook", "cleo"):
        bench.create(tenant, seed=ord(tenant[0]))
    bench.settle()
    for tenant in ("ada", "brook", "cleo"):
        bench.program(tenant, [FB, STEP, FB])
    bench.settle()
    bench.program("brook", [SAMPLE, STEP], first=4)
    bench.program("ada", [(FB, FAILING), STEP, FB, STEP], first=4)
    bench.settle()
    bench.send("cleo", "poet", 6, FB, forward_body(6))
    bench.send("eve", "poet", 1, FB, forward_body())
    bench.send("cleo", "poet", 7, STEP, b"nonsense")
    bench.settle()
    bench.send("cleo", "~shell", 1, Op.CANCEL, Cancel("cleo/poet/6"), adapter="poet")
    bench.settle()
    bench.kill()
    bench.join()
    bench.program("cleo", [FB, STEP], first=4)
    bench.program("ada", [FB, STEP, SAMPLE], first=8)
    bench.settle()
    bench.program("ada", [FB], first=11)
    bench.settle()
    bench.send("brook", "poet", 6, Op.UNLOAD, Unload())
    bench.settle()
    bench._pending.append(Drain())
    return bench.settle()


if __name__ == "__main__":
    name, *seed = sys.argv[1:]
    recorded = run_seed(int(seed[0]), Size(faults=30)).log if seed else scenes().log
    write_segment(Path(__file__).with_name(f"{name}.hdlog"), recorded)
