"""A day of a fleet that no machine here could hold, on a virtual clock: the real fold, planner and policies, with costs fitted from a
recorded log. Each trace is decided by its seed.

    python -m ops.bench.fleet [--log FILE] [--trace NAME ...] [--tenants 10000] [--groups 1000] [--hours 24]

steady    supervised fine-tuning: a step, some hours of something else, the next step
rl        a sample, then a step on what it brought
bursty    nothing for about a day, then twenty steps as fast as answers come
whale     one tenant in a thousand keeps a hundred times as much under way as the others, in every group
mixed     sequences from tens to thousands of tokens, by tenant
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ops.bench import result
from ops.bench.scheduling import SPEC, settings
from ops.model import Costs, Fitted, Model, Recorded, quantile
from ops.tables import table
from state.events import Request, RequestAccepted, decode
from state.requests import Op
from state.segment_log import read_segment

RECORDED = Path(__file__).with_name("recorded") / "demo-cpu.hdlog"
SECOND, HOUR = 10**6, 3600 * 10**6


class Round(NamedTuple):
    """Requests that are sent together, and the pause after the last of them was answered."""

    requests: list[tuple[Op, int]]  # with their tokens
    then_us: int


Program = Iterator[Round]
STEP_TOKENS = 2048


def train(tokens: int = STEP_TOKENS) -> list[tuple[Op, int]]:
    return [(Op.FORWARD_BACKWARD, tokens), (Op.OPTIM_STEP, 0)]


def steady(rng: random.Random, number: int) -> Program:
    while True:
        yield Round(train(), int(rng.expovariate(1 / (2 * HOUR))))


def rl(rng: random.Random, number: int) -> Program:
    while True:
        yield Round([(Op.SAMPLE, 256)], 2 * SECOND)
        yield Round(train(), int(rng.expovariate(1 / (12 * HOUR))))


def bursty(rng: random.Random, number: int) -> Program:
    while True:
        yield Round([], int(rng.expovariate(1 / (24 * HOUR))))
        for _ in range(20):
            yield Round(train(), 0)


def whale(rng: random.Random, number: int) -> Program:
    if number % 1000 == 0:
        while True:
            yield Round(train(4 * STEP_TOKENS) * 25, 0)
    yield from steady(rng, number)


def mixed(rng: random.Random, number: int) -> Program:
    tokens = int(64 * 2 ** rng.uniform(0, 8))
    while True:
        yield Round(train(tokens), int(rng.expovariate(1 / (2 * HOUR))))


TRACES: dict[str, Callable[[random.Random, int], Program]] = {
    "steady": steady,
    "rl": rl,
    "bursty": bursty,
    "whale": whale,
    "mixed": mixed,
}


class Day(Model):
    """Closed loops over `hours`, begun at random within the first; whoever is in the middle of a round at the end finishes it."""

    def begin(self, trace: str, tenants: int, groups: int, hours: float, seed: int) -> None:
        self.end_us = self.now_us + int(hours * HOUR)
        self.programs: dict[str, Program] = {}
        self.seq: dict[str, int] = {}
        self.open: dict[str, int] = {}
        self.then_us: dict[str, int] = {}
        for number in range(tenants):
            rng = random.Random(f"{seed}/{trace}/{number}")
            tenant = f"t{number}"
            self.programs[tenant] = TRACES[trace](rng, number)
            self.seq[tenant], self.open[tenant], self.then_us[tenant] = 0, 0, 0
            self.at(self.now_us + rng.randrange(HOUR), lambda t=tenant, g=f"g{number % groups}": self._create(t, g))  # type: ignore[misc]

    def _create(self, tenant: str, group: str) -> None:
        self._send(tenant, [(Op.CREATE_ADAPTER, 0)], group)

    def _send(self, tenant: str, requests: list[tuple[Op, int]], group: str = "") -> None:
        self.open[tenant] += len(requests)
        for op, tokens in requests:
            request = Request(tenant, "poet", self.seq[tenant], op, f"{tenant}/poet", "", 100, b"", tokens)
            self.seq[tenant] += 1
            self.accept(RequestAccepted(request, group, (8, 16.0, (), 0)) if group else RequestAccepted(request))

    def completed(self, request_id: str) -> None:
        tenant = request_id.partition("/")[0]
        self.open[tenant] -= 1
        if not self.open[tenant]:
            self.at(self.now_us + self.then_us[tenant], lambda: self._next(tenant))

    def _next(self, tenant: str) -> None:
        if self.now_us >= self.end_us:
            return
        requests, self.then_us[tenant] = next(self.programs[tenant])
        if requests:
            self._send(tenant, requests)
        else:
            self.at(self.now_us + self.then_us[tenant], lambda: self._next(tenant))


def ordered(waits: dict[str, list[float]]) -> list[float]:
    return sorted(wait for each in waits.values() for wait in each)


def run(trace: str, costs: Costs, args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    model = Day(settings("fair"), {f"g{n}": SPEC for n in range(args.groups)}, costs)
    model.begin(trace, args.tenants, args.groups, args.hours, args.seed)
    summary = model.run()
    waits_s = {name: [wait / 1000 for wait in waits] for name, waits in summary.waits.items()}
    everyone, small = ordered(waits_s), ordered({name: waits for name, waits in waits_s.items() if int(name[1:]) % 1000})
    rows = summary.rows()
    return {
        "trace": trace,
        **{key: rows[key] for key in ("requests", "turns", "swaps", "of it switching")},
        "wait p50 s": f"{quantile(everyone, 0.5):.0f}",
        "wait p99 s": f"{quantile(everyone, 0.99):.0f}",
        "wait p99 s, no whales": f"{quantile(small, 0.99):.0f}",
        "Jain": rows["Jain index of accelerator time"],
        "utilisation": f"{100 * summary.busy_ms * 1000 / (args.hours * HOUR * args.groups):.1f} %",
        "took s": f"{time.perf_counter() - began:.0f}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=RECORDED, help="from `hotdesk replay --export` (default: a demo on a processor)")
    parser.add_argument("--trace", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--scale", type=float, default=2000.0, help="of all costs: the recorded model is tiny (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the result file")
    args = parser.parse_args()
    fitted = Fitted(Recorded((log_id, decode(data)) for log_id, data in read_segment(args.log)))
    print(table(["cost", "us", "us a token", "from", "error"], fitted.rows()))
    rows = []
    for trace in args.trace:
        rows.append(run(trace, lambda step, work: int(args.scale * fitted(step, work)), args))
        print(f"{rows[-1]}", file=sys.stderr)
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    found = {
        "tenants": args.tenants,
        "groups": args.groups,
        "hours": args.hours,
        "seed": args.seed,
        "scale": args.scale,
        "costs": fitted.rows(),
        "traces": rows,
    }
    result.write("fleet", found, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
