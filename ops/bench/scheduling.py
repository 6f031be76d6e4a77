"""What scheduling itself costs and saves, on the model of `ops.model`: counts that no machine changes, and ratios within one run.

- switches: 8 tenants x 50 steps, all queued, under each policy, beside the fewest that the fairness bound allows.
- decisions: microseconds a decision against waiting and idle tenants.
- replay: events a second of the fold, and of the fold with every decision decided again.

Many tenants on many groups: `ops.bench.fleet`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ops.bench import result
from ops.model import IDLE, Model
from ops.replay import Verifier
from ops.tables import table
from scheduler.policy import POLICIES, turn_worth_us
from state import log_id as ids
from state.events import Event, LeaderElected, Request, RequestAccepted, Settings, Step, StepKind, WorkersJoined
from state.fleet import Fleet, apply
from state.requests import Op
from workers.simulated import SIMULATED_SPEC

STEP_US = {Op.CREATE_ADAPTER: 200, Op.FORWARD_BACKWARD: 20_000, Op.OPTIM_STEP: 5_000}
SWITCH_US = {StepKind.SWAP: 2_000}
PEERS = "multi-tenant servers that take the oldest request switch 795 times for these 800 requests"
SPEC = msgspec.structs.replace(SIMULATED_SPEC, host_slots=1_000_000, max_adapters=1_000_000)


def cost(step: Step, work: int) -> int:
    return STEP_US.get(Op(step.op), 1000) if step.kind is StepKind.EXECUTE else SWITCH_US.get(step.kind, 100)


def settings(policy: str, **more: Any) -> Settings:
    return Settings(policy, **{"tenant_queue": 10**6, "total_queue": 10**9, "snapshot_after_requests": 10**9, **more})


def accepted(tenant: str, seq: int, op: Op, group: str) -> RequestAccepted:
    request = Request(tenant, "poet", seq, op, f"{tenant}/poet", "", 100, b"", 512 if op is Op.FORWARD_BACKWARD else 0)
    return RequestAccepted(request, group, (8, 16.0, (), 0)) if op is Op.CREATE_ADAPTER else RequestAccepted(request)


def switches() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for policy in ("fair", "round_robin", "fifo"):
        model = Model(settings(policy), {"main": SPEC}, cost)
        for number in range(8):
            model.accept(accepted(f"t{number}", 0, Op.CREATE_ADAPTER, "main"))
        for step in range(50):  # as tenants send them: everybody's first step, then everybody's second
            for number in range(8):
                model.accept(accepted(f"t{number}", 2 * step + 1, Op.FORWARD_BACKWARD, "main"))
                model.accept(accepted(f"t{number}", 2 * step + 2, Op.OPTIM_STEP, "main"))
        summary = model.run()
        group = model.fleet.groups["main"]
        each_us = 50 * (STEP_US[Op.FORWARD_BACKWARD] + STEP_US[Op.OPTIM_STEP])
        fewest = 8 * math.ceil(each_us / turn_worth_us(model.fleet, group))
        rows.append({"policy": policy, "swaps": summary.swaps, "fewest by the bound": fewest, "ratio": round(summary.swaps / fewest, 2)})
    return rows


def waiting_fleet(waiting: int, idle: int) -> Fleet:
    """`waiting` tenants with work and `idle` ones with an adapter and nothing to do."""
    fleet, last = Fleet(), 0

    def emit(event: Event) -> None:
        nonlocal last
        last = ids.following(last, 1)
        apply(fleet, last, event)

    emit(LeaderElected(1, "bench", settings("fair")))
    emit(WorkersJoined("main", "bench", SPEC, IDLE))
    for number in range(waiting + idle):
        emit(accepted(f"t{number}", 0, Op.CREATE_ADAPTER, "main"))
        if number >= waiting:
            adapter = fleet.adapters[f"t{number}/poet"]
            fleet.groups["main"].queue.leave(adapter.tenant, adapter.key)
    return fleet


def decisions() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    policy = POLICIES["fair"]
    for waiting, idle in ((10, 0), (10, 100_000), (100, 0), (1_000, 0), (10_000, 0), (100_000, 0)):
        fleet = waiting_fleet(waiting, idle)
        group = fleet.groups["main"]
        best = min(_timed(partial(policy.turn, fleet, group), 200) for _ in range(5))
        charged = min(_timed(partial(group.queue.charge, "t0", 10, fleet.settings.share("t0")), 200) for _ in range(3))
        rows.append({"waiting": waiting, "idle": idle, "decision_us": round(best, 1), "charge_us": round(charged, 1)})
    return rows


def _timed(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


def replay() -> list[dict[str, object]]:
    model = Model(settings("fair"), {"main": SPEC}, cost, keep=True)
    for number in range(64):
        model.accept(accepted(f"t{number}", 0, Op.CREATE_ADAPTER, "main"))
        for step in range(200):
            model.accept(accepted(f"t{number}", 2 * step + 1, Op.FORWARD_BACKWARD, "main"))
            model.accept(accepted(f"t{number}", 2 * step + 2, Op.OPTIM_STEP, "main"))
    model.run()
    events = model.kept or []
    fleet = Fleet()
    began = time.perf_counter()
    for log_id, event in events:
        apply(fleet, log_id, event)
    folded_s = time.perf_counter() - began
    verifier = Verifier()
    began = time.perf_counter()
    for log_id, event in events:
        verifier.take(log_id, event)
    verified_s = time.perf_counter() - began
    assert verifier.problems == []
    return [{"events": len(events), "fold_per_s": round(len(events) / folded_s), "verify_per_s": round(len(events) / verified_s)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    found: dict[str, Any] = {"switches": switches(), "decisions": decisions(), "replay": replay()}
    for name, rows in found.items():
        print(f"\n{name}")
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"\n{PEERS}")
    print(result.write("scheduling", found))


if __name__ == "__main__":
    main()
