"""`hotdesk why REQUEST`: where all of a request's time went, from acceptance to end, and who caused it. The parts sum to the whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterable
from pathlib import Path

import anyio
import msgspec

from ops.cli import common_arguments
from ops.fleet import configuration, open_history, segments
from ops.replay import history
from ops.tables import table
from state import log_id as ids
from state.errors import UnknownRequest
from state.events import Event, RequestAccepted, Step, StepKind, decode
from state.fleet import Fleet, apply
from state.requests import adapter_key

RUNNING = "running"


class Part(msgspec.Struct):
    """`cause`: what kept the request from its end; `who`: whose work that was; `requests`: of whose, in order."""

    cause: str
    who: str = ""
    ms: int = 0
    requests: list[str] = []


class Account(msgspec.Struct):
    request_id: str
    op: str = ""
    status: str = "open"
    accepted: str = ""
    total_ms: int = 0
    parts: list[Part] = []

    def add(self, cause: str, who: str, request_id: str, ms: int) -> None:
        if not ms:
            return
        part = next((part for part in self.parts if (part.cause, part.who) == (cause, who)), None)
        if part is None:
            part = Part(cause, who)
            self.parts.append(part)
        part.ms += ms
        if request_id and request_id not in part.requests:
            part.requests.append(request_id)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="REQUEST", help="tenant/lane/seq, as in `hotdesk log`")
    common_arguments(parser)
    parser.add_argument("--segments", type=Path, metavar="DIR", help="read archived segments instead of a server")
    parser.add_argument("--json", action="store_true", help="print the account as JSON")


def run(args: argparse.Namespace) -> int:
    account = anyio.run(_read, args)
    if args.json:
        print(json.dumps(msgspec.to_builtins(account), indent=1))
        return 0
    print(f"{account.request_id} {account.op}: {account.status}, {account.total_ms} ms from its acceptance at {account.accepted}")
    rows = [[f"{part.ms} ms", part.cause, part.who, _few(part.requests)] for part in account.parts]
    print(table(["took", "why", "whose", "requests"], [*rows, [f"{sum(part.ms for part in account.parts)} ms", "in all", "", ""]]))
    return 0


async def _read(args: argparse.Namespace) -> Account:
    if args.segments:
        return await explain(args.request, decoded(history(segments(args.segments))))
    async with open_history(configuration(args)) as log:
        return await explain(args.request, decoded(history(log)))


async def decoded(events: AsyncIterable[tuple[int, bytes]]) -> AsyncIterable[tuple[int, Event]]:
    async for log_id, data in events:
        yield log_id, decode(data)


async def explain(request_id: str, events: AsyncIterable[tuple[int, Event]]) -> Account:
    """Between two events nothing changes, so each stretch of time has one cause: what the state before the later event says. Raises
    `UnknownRequest` where the log never accepted it."""
    fleet = Fleet()
    account = Account(request_id)
    accepted = last = 0
    async for log_id, event in events:
        if accepted and account.status == "open":
            account.add(*_cause(fleet, request_id), ids.ms_of(log_id) - ids.ms_of(last))
        apply(fleet, log_id, event)
        last = log_id
        if not accepted and isinstance(event, RequestAccepted) and event.request.request_id == request_id:
            accepted = log_id
            account.op, account.accepted = event.request.op, ids.text(log_id)
        elif accepted and account.status == "open":
            outcome = fleet.outcome(request_id)
            if outcome is not None:
                account.status = outcome.status
                account.total_ms = ids.ms_of(log_id) - ids.ms_of(accepted)
    if not accepted:
        raise UnknownRequest(f"request {request_id!r} was never accepted in this log", request_id=request_id)
    if account.status == "open":
        account.total_ms = ids.ms_of(last) - ids.ms_of(accepted)
    return account


def _cause(fleet: Fleet, request_id: str) -> tuple[str, str, str]:
    """(cause, whose, by which request) of the time that passes in this state."""
    found = fleet.queued_request(request_id)
    assert found is not None
    adapter, _ = found
    group = fleet.groups[adapter.group]
    if adapter.gap_since:
        return f"held: seq {adapter.next_seq} has not come", adapter.key, ""
    if not group.incarnation or group.joined_epoch != fleet.epoch:
        return "no workers, or no leader", group.name, ""
    step = next(iter(group.steps.values()), None)
    if step is None:
        return "log and daemon", "", ""
    moves = step.adapter in fleet.adapters and fleet.adapters[step.adapter].moving
    return _of_step(step, request_id, adapter.key, moves)


def _of_step(step: Step, request_id: str, adapter: str, moves: bool) -> tuple[str, str, str]:
    if not step.request_id:
        return "shutdown: parked and snapshotted", step.adapter, ""
    if step.redo or (step.kind is StepKind.RESTORE and not moves):
        return "rebuilding after a loss", step.adapter, ""
    if step.request_id == request_id:
        return (RUNNING if step.kind is StepKind.EXECUTE else f"made ready: {step.kind}"), adapter, request_id
    cause = "behind its own adapter" if step.request_id.partition("/")[0] == adapter.partition("/")[0] else "behind another tenant"
    tenant, lane, _ = step.request_id.split("/")
    return cause, adapter_key(tenant, lane), step.request_id


def _few(requests: list[str]) -> str:
    return ", ".join(requests[:3]) + (f" and {len(requests) - 3} more" if len(requests) > 3 else "")
