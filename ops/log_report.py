"""What a log says about its tenants: turns, swaps, parks and waits, counted from the events themselves."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from state import log_id as ids
from state.events import Event, RequestAccepted, StepKind, StepStarted


class TenantReport(msgspec.Struct):
    """`waits_ms`: from a request's acceptance to the start of its own step, one per request that ran."""

    turns: int = 0
    swaps: int = 0
    parks: int = 0
    samples: int = 0
    waits_ms: list[int] = []


def by_tenant(events: Iterable[tuple[int, Event]]) -> dict[str, TenantReport]:
    """`swaps` and `turns` count for the tenant that got the device, `parks` for the one that was parked."""
    reports: dict[str, TenantReport] = {}
    accepted: dict[str, int] = {}
    turn_of: dict[str, str] = {}
    for log_id, event in events:
        if isinstance(event, RequestAccepted):
            accepted[event.request.request_id] = log_id
            reports.setdefault(event.request.tenant, TenantReport())
        elif isinstance(event, StepStarted) and event.step.adapter:
            step = event.step
            report = reports.setdefault(step.adapter.partition("/")[0], TenantReport())
            if step.kind is StepKind.SWAP:
                report.swaps += 1
            elif step.kind is StepKind.PARK:
                report.parks += 1
            elif step.kind is StepKind.EXECUTE and not step.redo:
                report.samples += step.op == "sample"
                if turn_of.get(event.group) != step.adapter:
                    turn_of[event.group] = step.adapter
                    report.turns += 1
                if step.request_id in accepted:
                    report.waits_ms.append(ids.ms_of(log_id) - ids.ms_of(accepted.pop(step.request_id)))
    return reports
