"""What a long history costs a start: a fleet folds ten million events, then a daemon begins from its last snapshot and the tail after it.

The history is one of 64 tenants that train, a thousand requests a second of the log's time; it is made while it is folded, so that the
memory told is the state's. Beside the start, in the same run: the fold of as many events as the tail has, which is what a start cannot do
without. The daemon's own code writes and reads the snapshot.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from ops.bench import result
from ops.bench.scheduling import SPEC, accepted, cost, settings
from ops.model import Model
from ops.tables import table
from scheduler import state_snapshots
from scheduler.config import Config
from scheduler.daemon import HOUSE_EVERY_EVENTS
from state import log_id as ids
from state.archive import History
from state.events import Event, RequestAccepted, RequestCompleted, StepFinished, StepStarted
from state.files import Directory
from state.fleet import Fleet, apply, encode
from state.log import Commit
from state.memory_log import MemoryLog
from state.requests import Op

TENANTS = 64
REQUESTS_PER_S = 1000


def history() -> Iterator[tuple[int, Event]]:
    """The first rounds by the scheduler's own model; then its last round again and again, each with the next seqs and steps."""
    bounds = {"outcomes": Config().limits.outcomes, "snapshot_after_requests": 2}  # of every turn, so that rounds are alike
    model = Model(settings("fair", **bounds), {"main": SPEC}, cost, keep=True)
    for number in range(TENANTS):
        model.accept(accepted(f"t{number}", 0, Op.CREATE_ADAPTER, "main"))
    events = model.kept or []
    first = 0
    for step in range(3):
        first = len(events)
        for number in range(TENANTS):
            model.accept(accepted(f"t{number}", 2 * step + 1, Op.FORWARD_BACKWARD, "main"))
            model.accept(accepted(f"t{number}", 2 * step + 2, Op.OPTIM_STEP, "main"))
        model.run()
    yield from events
    round_ = [event for _, event in events[first:]]
    seqs = 2  # of an adapter in a round
    steps = sum(isinstance(event, StepStarted) for event in round_)
    last = events[-1][0]
    every_ms = 1000 * 2 * TENANTS // REQUESTS_PER_S
    number = 0
    while True:
        number += 1
        for event in round_:
            last = ids.following(last, ids.ms_of(events[-1][0]) + number * every_ms)
            yield last, _later(event, number * seqs, number * steps)


def _later(event: Event, seqs: int, steps: int) -> Event:
    """The same, `seqs` requests of each adapter and `steps` steps of the group later."""
    replace = msgspec.structs.replace
    if isinstance(event, RequestAccepted):
        return replace(event, request=replace(event.request, seq=event.request.seq + seqs))
    if isinstance(event, RequestCompleted):
        return replace(event, request_id=_moved(event.request_id, seqs))
    if isinstance(event, StepStarted):
        return replace(event, step=replace(event.step, id=event.step.id + steps, request_id=_moved(event.step.request_id, seqs)))
    assert isinstance(event, StepFinished), event
    return replace(event, step_id=event.step_id + steps)


def _moved(request_id: str, seqs: int) -> str:
    lane, _, seq = request_id.rpartition("/")
    return f"{lane}/{int(seq) + seqs}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 10_000_000], help="after which to measure")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    args = parser.parse_args()
    rows = []
    made = history()
    fleet = Fleet()
    for many in args.events:
        while fleet.events < many:
            apply(fleet, *next(made))
        rows.append(measured(fleet, made))
        print(rows[-1], file=sys.stderr)
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    result.write("start", rows, args.out)
    return 0


def measured(fleet: Fleet, made: Iterator[tuple[int, Event]]) -> dict[str, float]:
    """A snapshot of `fleet`, the longest tail that a daemon lets grow after it, and a start from the two."""
    memory = psutil.Process().memory_info().rss
    began = time.perf_counter()
    body = encode(fleet)
    encoded_s = time.perf_counter() - began
    events, remembered = fleet.events, fleet.remembered
    with tempfile.TemporaryDirectory() as name:
        files = Directory(Path(name))
        state_snapshots.write(files, fleet.log_id, body)
        tail = [next(made) for _ in range(HOUSE_EVERY_EVENTS)]
        log = MemoryLog()
        encoder = msgspec.msgpack.Encoder()
        epoch = asyncio.run(log.fence())
        held = Commit(0, [(fleet.log_id, b""), *((log_id, encoder.encode(event)) for log_id, event in tail)])
        asyncio.run(log.commit(epoch, held))
        began = time.perf_counter()
        for log_id, event in tail:
            apply(fleet, log_id, event)
        folded_s = time.perf_counter() - began
        began = time.perf_counter()
        started, count = asyncio.run(state_snapshots.load_fleet(files, History(None, log)))
        start_s = time.perf_counter() - began
    assert count == len(tail)
    assert encode(started) == encode(fleet)
    return {
        "events": events,
        "state MiB": round(len(body) / 2**20, 1),
        "outcomes": remembered,
        "memory MiB": round(memory / 2**20),
        "encode s": round(encoded_s, 3),
        "tail": count,
        "fold of the tail s": round(folded_s, 3),
        "start s": round(start_s, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
