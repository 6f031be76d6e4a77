"""`hotdesk replay`: rebuilds the state at any log id or time, and checks every recorded decision against today's planner."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import anyio
import msgspec

from ops import readable
from ops.cli import common_arguments
from ops.fleet import configuration, open_history, segments
from ops.model import Recorded
from ops.tables import table
from scheduler import state_snapshots
from scheduler.core import decide
from scheduler.policy import POLICIES
from state import log_id as ids
from state.errors import ConfigError, LogTruncated
from state.events import Event, LeaderElected, Step, StepStarted, decode
from state.files import Directory
from state.fleet import Fleet, Group, apply, encode
from state.fleet import decode as decode_fleet
from state.log import EventReader
from state.plan import plan_leave
from state.residency import ForbiddenMove
from state.segment_log import write_segment

READ_EVENTS = 4096


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--segments", type=Path, metavar="DIR", help="read archived segments instead of a server")
    parser.add_argument("--at", default="", metavar="ID|TIME", help="stop at this log id or UTC time (2026-11-30T10:00:00)")
    parser.add_argument("--verify", action="store_true", help="check every recorded decision, and every state the daemon wrote")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME", help="what this policy would have done; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the rebuilt state as JSON")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the log that was read as one segment file")


def run(args: argparse.Namespace) -> int:
    return anyio.run(_run, args)


async def _run(args: argparse.Namespace) -> int:
    if args.segments:
        return await _replay(segments(args.segments), args, None)
    config = configuration(args)
    async with open_history(config) as log:
        return await _replay(log, args, config.data_dir)


async def _replay(log: EventReader, args: argparse.Namespace, data_dir: Path | None) -> int:
    verifier = Verifier(written_states(data_dir) if data_dir is not None else {})
    kept: list[tuple[int, bytes]] = []
    unknown = sorted(set(args.policy) - set(POLICIES))
    if unknown:
        raise ConfigError(f"--policy {unknown[0]}: there is no such policy", way_out=f"one of {', '.join(sorted(POLICIES))}")
    async for log_id, data in history(log, _until(args.at)):
        verifier.take(log_id, decode(data))
        if args.export or args.policy:
            kept.append((log_id, data))
    if args.policy:
        return _compare(kept, args.policy)
    if args.export:
        write_segment(args.export, kept)
    fleet = verifier.fleet
    if args.json:
        print(json.dumps(msgspec.to_builtins(fleet), indent=1, default=str))
    totals = f"epoch {fleet.epoch}; {len(fleet.adapters)} adapters; {fleet.queued} requests open"
    print(f"{fleet.events} events to {ids.text(fleet.log_id)}; {totals}")
    if not args.verify:
        return 0
    for problem in verifier.problems:
        print(problem)
    print(
        f"{verifier.decisions} decisions checked, {verifier.differences} different; "
        f"{verifier.compared} states written by the daemon compared, {verifier.unequal} different"
    )
    return 1 if verifier.problems else 0


def _compare(events: list[tuple[int, bytes]], policies: list[str]) -> int:
    """The recorded requests, at their times and costs, under each policy on the same model; the recorded policy first."""
    recorded = Recorded((log_id, decode(data)) for log_id, data in events)
    columns = list(dict.fromkeys([recorded.settings.policy, *policies]))
    summaries = [recorded.under(policy).rows() for policy in columns]
    heads = ["", *(f"{name} (recorded)" if name == recorded.settings.policy else name for name in columns)]
    print(table(heads, [[key, *(summary[key] for summary in summaries)] for key in summaries[0]]))
    return 0


async def history(log: EventReader, until: int | None = None) -> AsyncIterator[tuple[int, bytes]]:
    after = 0
    while events := await log.read(after, READ_EVENTS):
        for log_id, data in events:
            if until is not None and log_id > until:
                return
            yield log_id, data
        after = events[-1][0]


def _until(at: str) -> int | None:
    """The last id that counts: an id itself, or the end of a time's millisecond."""
    if not at:
        return None
    try:
        return ids.parse(at)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(at)
    except ValueError as error:
        raise ConfigError(f"--at {at!r} is neither a log id nor a time", way_out="copy an id from `hotdesk log`") from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return ids.make(int(moment.timestamp() * 1000) + 1) - 1


def written_states(data_dir: Path) -> dict[int, tuple[Path, bytes]]:
    """States that the daemon wrote itself, by the log id they are of."""
    found: dict[int, tuple[Path, bytes]] = {}
    files = Directory(data_dir / "snapshots")
    for name in state_snapshots.names(files):
        with contextlib.suppress(ValueError, OSError):  # a damaged one proves nothing
            fleet = state_snapshots.read(files, name)
            found[fleet.log_id] = (data_dir / "snapshots" / name, encode(fleet))
    dump = data_dir / "state-dump.msgpack"
    if dump.exists():
        found[decode_fleet(dump.read_bytes()).log_id] = (dump, dump.read_bytes())
    return found


class Verifier:
    """Folds a log and holds each recorded decision against what `decide` says on the replayed state (invariant 8)."""

    def __init__(self, written: Mapping[int, tuple[object, bytes]] | None = None) -> None:
        self.fleet = Fleet()
        self.written = written or {}
        self.problems: list[str] = []
        self.decisions = self.differences = self.compared = self.unequal = 0
        self._due: dict[str, list[Step]] = {}
        self._idle: dict[str, int] = {}

    def take(self, log_id: int, event: Event) -> None:
        """Raises `LogTruncated` where the first event is not the one that every log begins with."""
        if not self.fleet.events and not isinstance(event, LeaderElected):
            raise LogTruncated(f"the log's beginning is missing: it starts at {ids.text(log_id)} with {readable.kind_of(event)}")
        if ids.ms_of(log_id) > ids.ms_of(self.fleet.log_id):
            self._note_idle()
        self._check_finished_plans(log_id, event)
        if isinstance(event, LeaderElected):
            self._idle = {}
        if isinstance(event, StepStarted):
            self._check(log_id, event)
        self.fleet = apply(self.fleet, log_id, event)
        if log_id in self.written:
            path, body = self.written[log_id]
            self.compared += 1
            if encode(self.fleet) != body:
                self.unequal += 1
                self.problems.append(f"the fold at {ids.text(log_id)} differs from {path}")

    def _check_finished_plans(self, log_id: int, event: Event) -> None:
        """A plan is logged whole, its steps next to each other."""
        for name, due in self._due.items():
            if due and not (isinstance(event, StepStarted) and event.group == name):
                self.differences += 1
                self.problems.append(f"{ids.text(log_id)}: {name} stopped before {readable.step_text(due[0])}, which the planner says")
                due.clear()

    def _note_idle(self) -> None:
        """Groups that had work and did nothing: right in a drain, which ends with the leader; wrong if they decide later in its term."""
        for name, group in self.fleet.groups.items():
            joined = group.incarnation and group.joined_epoch == self.fleet.epoch
            if group.queue.waiting and not group.steps and joined and not group.broken:
                self._idle.setdefault(name, self.fleet.log_id)

    def _decide(self, log_id: int, group: Group, recorded: Step) -> list[Step]:
        """A step that no request caused belongs to a shutdown: the group was put to rest."""
        try:
            return decide(self.fleet, group) if recorded.request_id else plan_leave(self.fleet, group)
        except ForbiddenMove as error:
            self.problems.append(f"{ids.text(log_id)}: the planner cannot go on for {group.name}: {error}")
            return []

    def _check(self, log_id: int, event: StepStarted) -> None:
        group = self.fleet.groups[event.group]
        if not group.steps:
            late = self._idle.pop(group.name, None)
            if late is not None and event.step.request_id:
                self.differences += 1
                self.problems.append(f"{ids.text(log_id)}: {group.name} decided what was due after {ids.text(late)}")
            self._due[group.name] = self._decide(log_id, group, event.step)
            self.decisions += 1
        due = self._due.get(group.name, [])
        expected = due.pop(0) if due else None
        if expected != event.step:
            self.differences += 1
            said = readable.step_text(expected) if expected else "nothing more"
            self.problems.append(f"{ids.text(log_id)}: {group.name} did {readable.step_text(event.step)}, the planner says {said}")
