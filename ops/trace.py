"""`hotdesk trace`: the fleet's time as a file for Perfetto (ui.perfetto.dev) or chrome://tracing.

A row a worker group, with its steps, one after the other; a row a tenant's adapter, with its requests from acceptance to end. Read from the
log: a step ends when the log says so, and began as long before as the workers measured.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from ops import readable
from ops.cli import common_arguments
from ops.fleet import configuration, open_history, segments
from ops.replay import history
from ops.why import decoded
from state import log_id as ids
from state.events import (
    Event,
    LeaderElected,
    Request,
    RequestAccepted,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    Step,
    StepFailed,
    StepFinished,
    StepKind,
    StepStarted,
    WorkersJoined,
    WorkersLost,
)

Span = dict[str, Any]
GROUPS, TENANTS = "worker groups", "tenants"  # the two processes of the picture


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--segments", type=Path, metavar="DIR", help="read archived segments instead of a server")
    parser.add_argument("--last", type=float, default=60.0, metavar="SECONDS", help="of the log's end; 0: all of it (default 60)")
    parser.add_argument("--out", type=Path, default=Path("hotdesk-trace.json"), metavar="FILE", help="(default hotdesk-trace.json)")


def run(args: argparse.Namespace) -> int:
    spans = anyio.run(_read, args)
    if args.last and spans:
        end = max(span["ts"] + span.get("dur", 0) for span in spans)
        spans = [span for span in spans if span["ts"] + span.get("dur", 0) >= end - 1e6 * args.last]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.encode({"traceEvents": placed(spans), "displayTimeUnit": "ms"}))
    print(f"{args.out}: {len(spans)} steps, requests and marks; open it in ui.perfetto.dev")
    return 0


async def _read(args: argparse.Namespace) -> list[Span]:
    if args.segments:
        return await spans_of(decoded(history(segments(args.segments))))
    async with open_history(configuration(args)) as log:
        return await spans_of(decoded(history(log)))


async def spans_of(events: AsyncIterable[tuple[int, Event]]) -> list[Span]:
    """In the form of the trace event format, but with names for `pid` and `tid`; `ts` and `dur` in microseconds since 1970.

    Steps of one group never overlap: the log's milliseconds are coarser than steps may be, so a step that would begin before the last one
    ended is moved behind it."""
    spans: list[Span] = []
    steps: dict[tuple[str, int], Step] = {}
    requests: dict[str, tuple[int, Request]] = {}
    free_at: dict[str, int] = {}
    async for log_id, event in events:
        at = 1000 * ids.ms_of(log_id)
        match event:
            case StepStarted(group=group, step=step):
                steps[group, step.id] = step
            case StepFinished(group=group, step_id=step_id) | StepFailed(group=group, step_id=step_id):
                step = steps.pop((group, step_id), Step(step_id, StepKind.EXECUTE))
                began = max(free_at.get(group, 0), at - event.cost_us)
                free_at[group] = began + event.cost_us
                spans.append(_step(group, step, began, event))
            case RequestAccepted(request=request):
                requests[request.request_id] = at, request
            case RequestCompleted() | RequestFailed() | RequestCancelled():
                known = requests.pop(event.request_id, None)
                if known is not None:
                    spans.append(_request(*known, at, readable.kind_of(event).removeprefix("request_")))
            case WorkersJoined() | WorkersLost():
                spans.append(_mark(event.group, f"{readable.kind_of(event)} {event.incarnation}", at))
            case LeaderElected():
                spans.append(_mark("leader", f"epoch {event.epoch}: {event.leader}", at))
            case _:
                pass
    return spans


def _step(group: str, step: Step, began: int, event: StepFinished | StepFailed) -> Span:
    told = {"step": step.id, "adapter": step.adapter, "request": step.request_id, "redo": step.redo}
    if isinstance(event, StepFinished):
        told |= {"moved_bytes": event.facts.moved_bytes, "device_bytes": event.facts.device_bytes, "live": event.facts.live}
    else:
        told |= {"error": event.error.code}
    name = f"{step.op or step.kind} {step.adapter}".strip()
    return {"ph": "X", "name": name, "cat": str(step.kind), "pid": GROUPS, "tid": group, "ts": began, "dur": event.cost_us, "args": told}


def _request(began: int, request: Request, ended: int, status: str) -> Span:
    told = {"request": request.request_id, "status": status, "bytes": request.size, "tokens": request.work}
    row = request.adapter or f"{request.tenant}/{request.lane}"
    where = {"pid": TENANTS, "tid": row, "ts": began, "dur": ended - began}
    return {"ph": "X", "name": request.op, "cat": "request", **where, "args": told}


def _mark(row: str, name: str, at: int) -> Span:
    return {"ph": "i", "s": "p", "name": name, "cat": "fleet", "pid": GROUPS, "tid": row, "ts": at}


def placed(spans: list[Span]) -> list[Span]:
    """With numbers for `pid` and `tid`, and their names told. Requests of one adapter overlap, which rows of complete events cannot show:
    they become pairs of asynchronous ones."""
    processes: dict[str, int] = {}
    rows: dict[tuple[str, str], int] = {}
    events: list[Span] = []
    for number, span in enumerate(sorted(spans, key=lambda span: span["ts"])):
        pid = processes.setdefault(span["pid"], 1 + len(processes))
        tid = rows.setdefault((span["pid"], span["tid"]), 1 + len(rows))
        if span["pid"] == TENANTS:
            both = {**span, "pid": pid, "tid": tid, "id": number}
            duration = both.pop("dur")
            events += [{**both, "ph": "b"}, {**both, "ph": "e", "ts": span["ts"] + duration}]
        else:
            events.append({**span, "pid": pid, "tid": tid})
    names = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for name, pid in processes.items()]
    names += [
        {"ph": "M", "name": "thread_name", "pid": processes[of], "tid": tid, "args": {"name": name}} for (of, name), tid in rows.items()
    ]
    return names + events
