"""Every reachable state of small fleets: two tenants, one worker group, every interleaving of what they send with what fails.

A state is a fleet as folded, the workers as they are, and what is under way between them. From each one, every move is made: a tenant's
next request arrives, an earlier one arrives again, one comes late, one is cancelled, the workers do the next step of their plan, they die
before or after it, new ones join, another leader takes over and asks what became of the steps in doubt. The core, planner, policies and
worker machine are the real ones; the histories in `test_histories` are longer and have a network and a daemon around them, but are drawn.

Equal states are visited once. Two are equal where nothing that is decided from here on can tell them apart: ids and times count by their
order only, gauges and totals not at all. A move of the workers and the news of it are one move, unless a fault comes between the two: what
workers do unheard touches nothing that the core reads, so every other order of the two ends in a state that is visited anyway.

`HOTDESK_EVERY_STATE=large` explores longer programs with more faults (minutes).
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest

from ops.simulation import tenants
from ops.simulation.tenants import Answer, Program
from scheduler.core import Batch, Core, Drain, Finished, Input, Joined, Lost, Tick
from scheduler.validation import Limits
from state import fleet as state_fleet
from state import log_id as ids
from state.events import GroupSpec, RequestCancelled, RequestCompleted, RequestFailed, Settings, Step, StepKind, WorkersLost
from state.events import decode as decode_event
from state.fleet import Adapter, Device, Fleet, Group, Tenant, apply, decode, encode
from state.invariants import violated
from state.log import Entry
from state.requests import Cancel, CreateAdapter, Envelope, LoadState, Op, OptimStep, Reply, SaveState, Signature, Unload, encode_body
from state.residency import Residency
from tests.harness import FAILING, SAMPLE, sequence
from tests.simulation.test_histories import no_asking, no_dedupe, no_order, no_repetition_check, no_watermark
from workers.checkpoints import Kept
from workers.contract import Call, Gate, Status, StepOutcome
from workers.machine import Machine
from workers.simulated import SIMULATED_SPEC, Copy, SimulatedDisk, SimulatedEngine

MAIN, LANE = "main", "poet"
LIMITS = Limits()
LARGE = os.environ.get("HOTDESK_EVERY_STATE") == "large"
GAP_MS, FOREVER_MS = 10**6, 10**9  # a deadline that passes where a move says so; and answers are kept for ever


# --- what is explored ---------------------------------------------------------------------------------------------


def forward_backward(number: int) -> tuple[Op, msgspec.Struct]:
    return Op.FORWARD_BACKWARD, msgspec.structs.replace(FAILING, data=(sequence(number, 2, 3),), loss_config={})


def program(first: int, *operations: str) -> Program:
    """Bodies differ with the tenant (`first`) and with each request's place."""
    bodies: dict[str, Callable[[int], tuple[Op, msgspec.Struct]]] = {
        "create": lambda number: (Op.CREATE_ADAPTER, CreateAdapter(Signature(rank=4, alpha=8.0, seed=number))),
        "forward_backward": forward_backward,
        "failing": lambda number: (Op.FORWARD_BACKWARD, FAILING),
        "optim_step": lambda number: (Op.OPTIM_STEP, OptimStep(learning_rate=0.001 * number)),
        "sample": lambda number: (Op.SAMPLE, SAMPLE),
        "save": lambda number: (Op.SAVE_STATE, SaveState("kept")),
        "load": lambda number: (Op.LOAD_STATE, LoadState("kept")),
        "unload": lambda number: (Op.UNLOAD, Unload()),
    }
    return [bodies[operation](first + place) for place, operation in enumerate(operations)]


class Bounds(NamedTuple):
    """Faults on one path: at most `together`, and at most so many of each kind."""

    together: int
    deaths: int = 0
    elections: int = 0
    repeats: int = 0
    lates: int = 0
    cancels: int = 0
    damages: int = 0  # deaths that leave an adapter's newest snapshot unreadable, where the log has something to fall back on
    drains: int = 0  # a leader leaves in peace, and another follows
    expiries: int = 0  # what waits behind a late request is given up

    def less(self, kind: str) -> Bounds | None:
        left = getattr(self, kind)
        return self._replace(together=self.together - 1, **{kind: left - 1}) if left and self.together else None

    def covers(self, other: Bounds) -> bool:
        return all(mine >= its for mine, its in zip(self, other))


class Setting(NamedTuple):
    name: str
    policy: str
    device_slots: int
    snapshot_after: int
    programs: tuple[Program, Program]
    bounds: Bounds
    ahead: int = 64  # most requests that a tenant sends before the first of them is answered
    host_slots: int = 64
    parking: bool = True  # test seam
    beside: bool = False  # snapshots are written while steps go on

    @property
    def settings(self) -> Settings:
        return Settings(
            policy=self.policy,
            gap_deadline_ms=GAP_MS,
            result_retention_ms=FOREVER_MS,
            snapshot_after_requests=self.snapshot_after,
            snapshot_fallback=True,
            parking=self.parking,
            snapshot_beside=self.beside,
        )

    @property
    def spec(self) -> GroupSpec:
        return msgspec.structs.replace(SIMULATED_SPEC, device_slots=self.device_slots, host_slots=self.host_slots)


TENANTS = ("ada", "brook")
KEYS = tuple(f"{tenant}/{LANE}" for tenant in TENANTS)
SHORT = (program(10, "create", "forward_backward", "optim_step"), program(20, "create", "forward_backward", "sample"))
TRAINING = (
    program(10, "create", "forward_backward", "optim_step", "sample", "forward_backward", "optim_step"),
    program(20, "create", "forward_backward", "sample", "optim_step", "unload"),
)
VOIDED = (
    program(10, "create", "forward_backward", "failing", "optim_step"),
    program(20, "create", "forward_backward", "sample"),
)
CHECKPOINTS = (
    program(10, "create", "forward_backward", "save", "load"),
    program(20, "create", "forward_backward", "unload"),
)
SAMPLED_CHECKPOINTS = (
    program(10, "create", "forward_backward", "save", "sample", "load"),
    program(20, "create", "forward_backward", "unload"),
)
#: Asked for at the end where the workers' death left nothing to look at: forces the recovery, and shows weights and pending gradients.
PROBE = program(90, "forward_backward", "optim_step")


# --- a state ------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """Of one tenant: seqs below `following` arrived, but for `late`."""

    following: int = 0
    late: int = -1

    def has(self, seq: int) -> bool:
        return seq < self.following and seq != self.late


class Plan(NamedTuple):
    """What a leader's runner has still to send to the workers; it goes on with it after another leader was elected."""

    epoch: int
    steps: tuple[Step, ...]
    bodies: dict[str, bytes]
    after: int = 0

    @property
    def call(self) -> Call:
        step = self.steps[0]
        return Call(self.epoch, step, self.after, self.bodies[step.request_id] if step.kind is StepKind.EXECUTE else b"")

    def rest(self) -> Plan | None:
        return self._replace(steps=self.steps[1:], after=self.steps[0].id) if len(self.steps) > 1 else None


class End(NamedTuple):
    status: str
    at: int


class Point(NamedTuple):
    """One state. Nothing in it is ever changed; `machine` is None between a death and the next workers."""

    fleet: bytes
    machine: Machine | None
    disk: SimulatedDisk
    left: Bounds
    born: int = 0
    plan: Plan | None = None
    sent: tuple[Sent, ...] = (Sent(), Sent())
    ended: Mapping[str, End] = MappingProxyType({})
    controls: int = 0
    draining: bool = False  # of the leader, which has it in no log
    resting: bool = False

    @property
    def incarnation(self) -> str:
        return f"born-{self.born}"

    def core(self) -> Core:
        """The leader's, as it is."""
        core = Core(decode(self.fleet), LIMITS)
        core.draining, core.resting = self.draining, {MAIN} if self.resting else set()
        return core


def clone_disk(disk: SimulatedDisk) -> SimulatedDisk:
    twin = SimulatedDisk()
    twin.snapshots = {adapter: dict(kept) for adapter, kept in disk.snapshots.items()}
    twin.checkpoints = dict(disk.checkpoints)
    return twin


def clone(machine: Machine) -> Machine:
    """What a step may change is copied, with the disk; copies of adapters are values and are shared."""
    twin = copy.copy(machine)
    twin.held = {adapter: copy.copy(held) for adapter, held in machine.held.items()}
    twin.lost, twin.written, twin.untold = set(machine.lost), dict(machine.written), dict(machine.untold)
    twin.gate = copy.copy(machine.gate)
    twin.gate.outcomes = machine.gate.outcomes.copy()
    engine = machine.engine
    assert isinstance(engine, SimulatedEngine)
    other = twin.engine = copy.copy(engine)
    other.slots, other.device_slots, other.spilled = dict(engine.slots), dict(engine.device_slots), dict(engine.spilled)
    other.parts = set(engine.parts)
    other.disk = clone_disk(engine.disk)
    return twin


# --- when two states are the same ---------------------------------------------------------------------------------


OF_SNAPSHOTS = (StepKind.SNAPSHOT, StepKind.RESTORE)  # their version is a step's number, and not an adapter's


def ranks(values: Iterable[int]) -> dict[int, int]:
    """Zero stays zero: it stands for none."""
    return {value: rank for rank, value in enumerate(sorted({0, *values}))}


def fingerprint(point: Point, fleet: Fleet) -> bytes:
    group, machine = fleet.groups[MAIN], point.machine
    adapters = fleet.adapters.values()
    arrival = ranks(queued.at for adapter in adapters for queued in adapter.queue.values())
    turn = ranks(adapter.last_turn for adapter in adapters)
    step = ranks(
        (
            *group.steps,
            *(due.version for due in group.steps.values() if due.kind in OF_SNAPSHOTS),
            *(number for adapter in adapters for number in (adapter.snapshot, adapter.previous, adapter.writing)),
            *(number for kept in point.disk.snapshots.values() for number in kept),
            *((due.version for due in machine.engine.writing) if machine is not None else ()),
            *((told.version for told in machine.written.values()) if machine is not None else ()),
        )
    )
    parts = (
        (point.sent, point.draining, point.resting),
        sorted((request_id, end.status) for request_id, end in point.ended.items()),
        sorted((name, *_tenant_parts(tenant)) for name, tenant in fleet.tenants.items()),
        [_adapter_parts(fleet.adapters[key], arrival, turn, step) for key in KEYS if key in fleet.adapters],
        _group_parts(fleet, group, step),
        (len(point.plan.steps), point.plan.epoch == fleet.epoch) if point.plan is not None else 0,
        [(adapter, sorted((step[number], kept[number]) for number in kept)) for adapter, kept in sorted(point.disk.snapshots.items())],
        sorted(point.disk.checkpoints.items()),
        _machine_parts(machine, group, step, point) if machine is not None else 0,
    )
    return hashlib.blake2b(_PARTS.encode(parts), digest_size=16).digest()


def _adapter_parts(adapter: Adapter, arrival: dict[int, int], turn: dict[int, int], step: dict[int, int]) -> Any:
    return (
        (adapter.key, adapter.residency, adapter.next_seq, sorted(adapter.settled.items()), bool(adapter.gap_since)),
        sorted((seq, arrival[queued.at]) for seq, queued in adapter.queue.items()),
        (adapter.pending, adapter.voided, adapter.dirty, adapter.spilled, adapter.optimizer_step, adapter.digest, adapter.version),
        (turn[adapter.last_turn], step[adapter.snapshot], adapter.snapshot_voided, step[adapter.previous], adapter.previous_voided),
        [(redo.request.seq, redo.digest) for redo in (*adapter.older, *adapter.history)],
        (len(adapter.older), adapter.redone, adapter.damaged),
        (step[adapter.writing], adapter.writing_at, adapter.writing_voided),
    )


def _tenant_parts(tenant: Tenant) -> Any:
    return tenant.accepted, tenant.queued, tenant.completed, tenant.failed, tenant.cancelled, list(tenant.ended)


def _group_parts(fleet: Fleet, group: Group, step: dict[int, int]) -> Any:
    return (
        (bool(group.incarnation), group.joined_epoch == fleet.epoch, group.failures, group.device),
        (group.writing, sorted(group.residents), sorted(key for key, _ in group.queue.runnable()), list(group.adapters)),
        [
            msgspec.structs.replace(due, id=step[due.id], version=_version(due, step), before=step.get(due.before, -1))
            for due in group.steps.values()
        ],
    )


def _version(due: Step, step: dict[int, int]) -> int:
    return step[due.version] if due.kind in OF_SNAPSHOTS else due.version


def _machine_parts(machine: Machine, group: Group, step: dict[int, int], point: Point) -> Any:
    """Of the gate's memory counts what may be asked for again: the steps that the log has in doubt, and the order of the next."""
    engine, gate = machine.engine, machine.gate
    unheard = [(step[number], _outcome_parts(gate.outcomes[number], step)) for number in group.steps if number in gate.outcomes]
    return (
        (machine.live, machine.sampler, machine.published, sorted(machine.lost), sorted(machine.held.items())),
        (sorted(engine.slots.items()), sorted(engine.device_slots.items()), sorted(engine.spilled.items()), sorted(engine.parts)),
        (engine.live, engine.sampler),
        [
            msgspec.structs.replace(due, version=step[due.version], kept=Kept(*(step.get(v, -1) for v in due.kept)))
            for due in engine.writing
        ],
        [(told.adapter, step[told.version], told.error) for told in machine.written.values()],
        sorted(machine.untold),
        (group.incarnation == point.incarnation, unheard, point.plan is not None and gate.finished == point.plan.after),
    )


def _outcome_parts(outcome: StepOutcome, step: dict[int, int]) -> Any:
    facts = outcome.facts
    if facts is not None:
        written = tuple(msgspec.structs.replace(told, version=step.get(told.version, -1)) for told in facts.written)
        facts = msgspec.structs.replace(facts, moved_bytes=0, written=written)
    return facts, outcome.result, outcome.error.code if outcome.error is not None else ""


_PARTS = msgspec.msgpack.Encoder()


# --- what each tenant must be answered ----------------------------------------------------------------------------


class Alone:
    """A tenant's program run alone, without the requests that were cancelled. `programs` have the probe behind them. Of the seqs asked for,
    an inverted one (`~seq`) expired: it never ran, and where it was part of a window the window is void."""

    def __init__(self, programs: Iterable[Program]) -> None:
        self.programs = {tenant: [*requests, *PROBE] for tenant, requests in zip(TENANTS, programs)}
        self._known: dict[tuple[str, tuple[int, ...]], tuple[Answer, Copy | None]] = {}

    def after(self, tenant: str, seqs: tuple[int, ...]) -> tuple[Answer, Copy | None]:
        """The answer to the last of `seqs`, and the adapter as it then is."""
        if (tenant, seqs) not in self._known:
            meaning = tenants._Alone(f"{tenant}/{LANE}")
            answer = Answer(b"", "")
            for seq in seqs:
                op, body = self.programs[tenant][seq if seq >= 0 else ~seq]
                answer = meaning.answer(op, body) if seq >= 0 else Answer(b"", "GapExpired")
                meaning.voided = meaning.voided or (seq < 0 and op is Op.FORWARD_BACKWARD)
            self._known[tenant, seqs] = answer, meaning.engine.live
        return self._known[tenant, seqs]


def executed(point: Point, tenant: str, through: int | None = None) -> tuple[int, ...]:
    """What is in the adapter's state, in the order of the lane, for `Alone.after`."""
    sent = point.sent[TENANTS.index(tenant)].following if through is None else through + 1
    ends = ((seq, point.ended.get(f"{tenant}/{LANE}/{seq}")) for seq in range(sent))
    return tuple(~seq if end.status == "expired" else seq for seq, end in ends if end is not None and end.status != "cancelled")


# --- the exploration ----------------------------------------------------------------------------------------------


class Found(Exception):
    """What must always hold did not. The message ends with the path there."""


class Move(NamedTuple):
    """`fault`: the bound it counts against; empty for what must happen in the end anyway. `make`: None where nothing changed."""

    name: str
    fault: str
    make: Callable[..., tuple[Point, Fleet] | None]
    arguments: tuple[Any, ...] = ()


class Counts(NamedTuple):
    states: int
    transitions: int
    ends: int


class Exploration:
    def __init__(self, setting: Setting, *, guard_pending: bool = True) -> None:
        self.setting, self.guard_pending = setting, guard_pending
        self.alone = Alone(setting.programs)
        self.transitions = self.ends = 0
        self.numbers: dict[bytes, int] = {}
        self.explored: list[list[Bounds]] = []  # of each state, by its number: with which bounds left
        self.came_from: list[tuple[int, str]] = []
        self.onwards: list[set[int]] = []  # by moves that are no faults

    def run(self) -> Counts:
        """States with fewer faults behind them first: with the same or less left, there is nothing new to find in them."""
        first, fleet = self._begin()
        frontiers: list[deque[tuple[int, Point]]] = [deque() for _ in range(self.setting.bounds.together + 1)]
        frontiers[0].append((self._enter(first, fleet, -1, "begin"), first))
        for frontier in frontiers:
            while frontier:
                number, point = frontier.popleft()
                for child, child_number in self._expand(number, point):
                    frontiers[self.setting.bounds.together - child.left.together].append((child_number, child))
        self._check_that_it_ends()
        return Counts(len(self.numbers), self.transitions, self.ends)

    def _begin(self) -> tuple[Point, Fleet]:
        core = Core(Fleet(), LIMITS)
        core.lead(1_000_000, 1, "first", self.setting.settings)
        point = Point(encode(core.fleet), None, SimulatedDisk(), self.setting.bounds)
        made = self._join(point)
        assert made is not None
        return made

    def _expand(self, number: int, point: Point) -> Iterator[tuple[Point, int]]:
        fleet = decode(point.fleet)
        moves = list(self._moves(point, fleet))
        if all(move.fault for move in moves):
            self.ends += 1
            self._guarded(number, "at the end", self._check_end, point, fleet)
        for move in moves:
            left = point.left.less(move.fault) if move.fault else point.left
            if left is None:
                continue
            self.transitions += 1
            made = self._guarded(number, move.name, move.make, point, *move.arguments)
            if made is None:
                continue
            child, after = made[0]._replace(left=left), made[1]
            known = len(self.numbers)
            child_number = self._enter(child, after, number, move.name)
            if child_number == known:
                self._guarded(number, move.name, self._check, child, after)
            if not move.fault:
                self.onwards[number].add(child_number)
            if child_number < known and any(bounds.covers(left) for bounds in self.explored[child_number]):
                continue
            self.explored[child_number].append(left)
            yield child, child_number

    def _enter(self, point: Point, fleet: Fleet, parent: int, name: str) -> int:
        number = self.numbers.setdefault(fingerprint(point, fleet), len(self.numbers))
        if number == len(self.came_from):
            self.came_from.append((parent, name))
            self.explored.append([])
            self.onwards.append(set())
        return number

    def _guarded(self, number: int, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            what = (str(error) or "no message").splitlines()[0]  # the rest is pytest's, and long
            raise Found(f"{type(error).__name__}: {what}; after: {' > '.join([*self.path(number), name])}") from error

    def path(self, number: int) -> list[str]:
        names: list[str] = []
        while number >= 0:
            number, name = self.came_from[number]
            names.append(name)
        return names[::-1]

    # --- moves ----------------------------------------------------------------------------------------------------

    def _moves(self, point: Point, fleet: Fleet) -> Iterator[Move]:
        for place, tenant in enumerate(TENANTS):
            yield from self._arrivals(point, place, tenant)
        if point.machine is None:
            yield Move("workers join", "", self._join)
        else:
            yield from self._of_workers(point, fleet)
        left_in_peace = point.draining and point.core().at_rest
        yield Move("another leader", "" if left_in_peace else "elections", self._elect)
        if not point.draining:
            yield Move("the leader is asked to leave", "drains", self._drain)
        if any(adapter.gap_since for adapter in fleet.adapters.values()):
            yield Move("the gap's deadline passes", "expiries", self._expire)

    def _arrivals(self, point: Point, place: int, tenant: str) -> Iterator[Move]:
        sent, length = point.sent[place], len(self.setting.programs[place])
        following, late = sent
        if late >= 0:
            yield Move(f"{tenant}/{late} arrives late", "", self._arrive, (place, late, Sent(following)))
        unanswered = following - sum(request_id.startswith(tenant) for request_id in point.ended)
        if following < length and unanswered < self.setting.ahead:
            yield Move(f"{tenant}/{following} arrives", "", self._arrive, (place, following, Sent(following + 1, late)))
        if 0 < following < length - 1 and late < 0 and unanswered + 1 < self.setting.ahead:
            ahead = Sent(following + 2, following)
            yield Move(f"{tenant}/{following + 1} arrives before {following}", "lates", self._arrive, (place, following + 1, ahead))
        for seq in filter(sent.has, range(following)):
            yield Move(f"{tenant}/{seq} arrives again", "repeats", self._arrive, (place, seq, sent))
            if f"{tenant}/{LANE}/{seq}" not in point.ended:
                yield Move(f"{tenant}/{seq} is cancelled", "cancels", self._cancel, (tenant, seq))

    def _of_workers(self, point: Point, fleet: Fleet) -> Iterator[Move]:
        if point.plan is not None:
            if point.plan.epoch == fleet.epoch:
                yield Move("a step", "", self._step)
                yield Move("a step, called twice", "repeats", self._step, (2,))
                yield Move("a step, and the workers die unheard", "deaths", self._die, (1,))
            else:
                yield Move("a step for the leader before", "", self._step_unheard)
        yield Move("the workers die", "deaths", self._die)
        for key, kept in point.disk.snapshots.items():
            adapter = fleet.adapters.get(key)
            if adapter is not None and (len(kept) > 1 or (adapter.falls_back and adapter.snapshot in kept)):
                yield Move(f"the workers die, and the newest snapshot of {key} is damaged", "damages", self._die, (0, key))
        if fleet.groups[MAIN].joined_epoch != fleet.epoch:
            yield Move("the leader asks the workers", "", self._ask)

    def _arrive(self, point: Point, place: int, seq: int, sent: Sent) -> tuple[Point, Fleet] | None:
        tenant = TENANTS[place]
        op, body = self.alone.programs[tenant][seq]
        entry = _entry(Envelope(tenant, LANE, seq, op, LANE), encode_body(body))
        return self._handle(point, entry, sent=tuple(sent if at == place else other for at, other in enumerate(point.sent)))

    def _cancel(self, point: Point, tenant: str, seq: int) -> tuple[Point, Fleet] | None:
        body = encode_body(Cancel(f"{tenant}/{LANE}/{seq}"))
        entry = _entry(Envelope(tenant, "~session", point.controls, Op.CANCEL, LANE), body)
        return self._handle(point, entry, controls=point.controls + 1)

    def _step(self, point: Point, times: int = 1) -> tuple[Point, Fleet] | None:
        assert point.machine is not None
        assert point.plan is not None
        machine = clone(point.machine)
        for _ in range(times):
            outcome = machine.apply(point.plan.call)
        ran = outcome.error is None or outcome.facts is not None or outcome.error.code == "StepOutOfOrder"
        assert ran, f"the workers refused what was planned: {outcome.error}"
        finished = Finished(MAIN, point.incarnation, outcome)
        return self._handle(point, finished, machine=machine, disk=machine.engine.disk, plan=point.plan.rest())

    def _step_unheard(self, point: Point) -> tuple[Point, Fleet]:
        assert point.machine is not None
        assert point.plan is not None
        machine = clone(point.machine)
        machine.apply(point.plan.call)
        return point._replace(machine=machine, disk=machine.engine.disk, plan=point.plan.rest()), decode(point.fleet)

    def _die(self, point: Point, steps: int = 0, damaged: str = "") -> tuple[Point, Fleet] | None:
        if steps:
            point, _ = self._step_unheard(point)
        if damaged:
            point = point._replace(disk=clone_disk(point.disk))
            kept = point.disk.snapshots[damaged]
            del kept[max(kept)]
        lost = Lost(MAIN, point.incarnation, "killed")
        fleet = decode(point.fleet)
        if fleet.groups[MAIN].joined_epoch == fleet.epoch:
            return self._handle(point, lost, machine=None, plan=None)
        return point._replace(machine=None, plan=None), fleet  # a leader that never met them has nothing to tell

    def _join(self, point: Point) -> tuple[Point, Fleet] | None:
        machine = Machine(SimulatedEngine(self.setting.spec, disk=clone_disk(point.disk)), guard_pending=self.guard_pending)
        joining = point._replace(machine=machine, disk=machine.engine.disk, born=point.born + 1)
        return self._ask(joining)

    def _elect(self, point: Point) -> tuple[Point, Fleet] | None:
        core = Core(decode(point.fleet), LIMITS)
        batch = core.lead(_later(core.fleet), core.fleet.epoch + 1, "next", self.setting.settings)
        return self._taken(point._replace(draining=False, resting=False), core, batch, {})

    def _drain(self, point: Point) -> tuple[Point, Fleet] | None:
        return self._handle(point, Drain())

    def _expire(self, point: Point) -> tuple[Point, Fleet] | None:
        core = point.core()
        return self._taken(point, core, core.handle(_later(core.fleet) + GAP_MS, [Tick()]), {})

    def _ask(self, point: Point) -> tuple[Point, Fleet] | None:
        """The workers' answer to a leader; a call that the leader before sent comes right after it."""
        assert point.machine is not None
        machine, epoch = clone(point.machine), decode(point.fleet).epoch
        machine.gate.fence(epoch)
        status = Status(point.incarnation, self.setting.spec, machine.facts(), tuple(machine.gate.outcomes.values()))
        if point.plan is not None:
            machine.apply(point.plan.call)
        return self._handle(point, Joined(MAIN, status), machine=machine, disk=machine.engine.disk, plan=None)

    # --- what follows from a move ---------------------------------------------------------------------------------

    def _handle(self, point: Point, item: Input, **changes: Any) -> tuple[Point, Fleet] | None:
        core = point.core()
        return self._taken(point, core, core.handle(_later(core.fleet), [item]), changes)

    def _taken(self, point: Point, core: Core, batch: Batch, changes: dict[str, Any]) -> tuple[Point, Fleet] | None:
        """The state after a batch was committed and sent out, its log folded a second time."""
        self._check_replies(point, batch)
        ended = self._ended(point, batch)
        data = encode(core.fleet)
        if batch.commit.events:
            again = decode(point.fleet)
            for log_id, event in batch.commit.events:
                apply(again, log_id, decode_event(event))
            assert encode(again) == data, "folding the log gives another state"
        else:
            assert data == point.fleet, "the state changed without an event"
            if core.draining == point.draining and ("machine" not in changes) and changes.get("sent", point.sent) == point.sent:
                return None
        for dispatch in batch.dispatches:
            assert changes.get("plan", point.plan) is None, "a plan was made while another one runs"
            assert dispatch.incarnation == changes.get("incarnation", point.incarnation)
            bodies = {request_id: request.body for request_id, request in dispatch.requests.items()}
            changes["plan"] = Plan(core.fleet.epoch, dispatch.steps, bodies)
        changes |= {"draining": core.draining, "resting": MAIN in core.resting}
        return point._replace(fleet=data, ended=ended, **changes), core.fleet

    def _ended(self, point: Point, batch: Batch) -> dict[str, End]:
        """What has an end now; each request has one, and an answer with it."""
        results = [result for result in batch.commit.results if not result.first_at]
        replies = {result.log_id: msgspec.msgpack.decode(result.payload, type=Reply) for result in results}
        ended = dict(point.ended)
        for log_id, data in batch.commit.events:
            event = decode_event(data)
            if isinstance(event, WorkersLost):
                assert event.reason == "killed", event.reason
            if not isinstance(event, RequestCompleted | RequestFailed | RequestCancelled):
                continue
            reply = replies.pop(log_id)
            assert reply.request_id == event.request_id
            assert event.request_id not in ended, f"{event.request_id} ended before: {ended[event.request_id]}, and now {reply.status}"
            expired = reply.error is not None and reply.error.code == "GapExpired"
            ended[event.request_id] = End("expired" if expired else reply.status, log_id)
            if reply.status != "cancelled":
                self._check_answer(point._replace(ended=ended), reply)
        for reply in replies.values():
            assert "/~session/" in reply.request_id, f"{reply.request_id} was answered {reply.status} {reply.error}"
        return ended

    # --- what must hold -------------------------------------------------------------------------------------------

    def _check_replies(self, point: Point, batch: Batch) -> None:
        """A request that came again is answered with what it was answered first."""
        for result in batch.commit.results:
            if result.first_at:
                reply = msgspec.msgpack.decode(result.payload, type=Reply)
                status, at = point.ended[reply.request_id]
                assert (status.replace("expired", "failed"), at) == (reply.status, result.first_at)

    def _check_answer(self, point: Point, reply: Reply) -> None:
        tenant, _, seq = reply.request_id.split("/")
        expired = point.ended[reply.request_id].status == "expired"
        before = [other for other in range(int(seq)) if f"{tenant}/{LANE}/{other}" not in point.ended]
        assert expired or not before, f"{reply.request_id} ran before {before}"
        due, _ = self.alone.after(tenant, executed(point, tenant, int(seq)))
        got = Answer(reply.result, reply.error.code if reply.error is not None else "")
        assert got == due, f"{reply.request_id} was answered {got}, alone it is {due}"

    def _check(self, point: Point, fleet: Fleet) -> None:
        group = fleet.groups[MAIN]
        wrong = violated(fleet, group)
        assert not wrong, wrong
        assert not group.broken, group.broken
        on_device = [key for key in group.adapters if fleet.adapters[key].residency in (Residency.LIVE, Residency.PARKED)]
        assert len(on_device) <= 1, f"{on_device} are live at once"
        queued = {tenant: sum(len(a.queue) for a in fleet.adapters.values() if a.tenant == tenant) for tenant in fleet.tenants}
        assert queued == {name: tenant.queued for name, tenant in fleet.tenants.items()}
        assert fleet.queued == sum(queued.values())
        for name, tenant in fleet.tenants.items():
            assert tenant.accepted == tenant.queued + tenant.completed + tenant.failed + tenant.cancelled, name
        for adapter in fleet.adapters.values():
            assert not adapter.divergence, adapter.divergence
        if point.machine is not None:
            self._check_machine(point, fleet, group, point.machine)

    def _check_machine(self, point: Point, fleet: Fleet, group: Group, machine: Machine) -> None:
        """The bytes are what the machine says they are; and, where nothing is unheard, what the log says and the run alone has."""
        for key, held in machine.held.items():
            found = held_copy(machine, key)
            assert found.pending == held.pending, f"{key} has {found.pending} gradients pending where {held.pending} are due"
            assert not held.optimizer_step or held.digest == found.weights[:16]
        if group.joined_epoch != fleet.epoch or group.incarnation != point.incarnation:
            return
        assert group.device == Device.observed(machine.facts(()))
        for tenant, key in zip(TENANTS, KEYS):
            adapter, known = fleet.adapters.get(key), machine.held.get(key)
            if adapter is None or known is None:
                absent = (Residency.NEW, Residency.LOST, Residency.GONE)
                assert known is None, f"the workers hold {key}, which is gone"
                assert adapter is None or adapter.residency in absent, f"the workers lack {key}, which is {adapter.residency}"
                continue
            facts = machine._adapter_facts(key)
            believed = (adapter.residency, adapter.pending, adapter.dirty, adapter.optimizer_step, adapter.digest, adapter.spilled)
            assert believed == msgspec.structs.astuple(facts)[1:], f"{believed} is believed, {facts} is true"
            if not adapter.recovering:
                _, due = self.alone.after(tenant, executed(point, tenant))
                assert held_copy(machine, key) == due, f"{key} is {held_copy(machine, key)}, alone it is {due}"

    def _check_end(self, point: Point, fleet: Fleet) -> None:
        """Nothing is left to do: everything was answered, and the adapters are what they are alone."""
        assert not fleet.queued, f"{fleet.queued} requests have no end"
        for place, (tenant, requests) in enumerate(zip(TENANTS, self.setting.programs)):
            unanswered = [seq for seq in range(len(requests)) if f"{tenant}/{LANE}/{seq}" not in point.ended]
            assert not unanswered, f"{tenant}'s {unanswered} have no end"
            adapter = fleet.adapters.get(KEYS[place])
            if adapter is not None and adapter.recovering:
                self._probe(point, place, len(requests))

    def _probe(self, point: Point, place: int, first: int) -> None:
        """The answers to what is asked now are compared with those of the run alone, as all answers are."""
        for seq in range(first, first + len(PROBE)):
            made = self._arrive(point, place, seq, Sent(seq + 1))
            while made is not None and made[0].plan is not None:
                self._check(*made)
                made = self._step(made[0])
            assert made is not None
            point = made[0]
            assert f"{TENANTS[place]}/{LANE}/{seq}" in point.ended

    def _check_that_it_ends(self) -> None:
        """Without more faults every path ends: no state is its own successor. And no end has open requests, see `_check_end`."""
        waiting = [0] * len(self.onwards)
        for successors in self.onwards:
            for number in successors:
                waiting[number] += 1
        ready = [number for number, count in enumerate(waiting) if not count]
        seen = 0
        while ready:
            number = ready.pop()
            seen += 1
            for successor in self.onwards[number]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    ready.append(successor)
        if seen != len(self.onwards):
            turning = next(number for number, count in enumerate(waiting) if count)
            raise Found(f"a circle, so it may go on for ever; after: {' > '.join(self.path(turning))}")


def _later(fleet: Fleet) -> int:
    return ids.ms_of(fleet.log_id) + 1


def _entry(envelope: Envelope, body: bytes) -> Entry:
    return Entry("1-0", encode_body(envelope), body)


def held_copy(machine: Machine, adapter: str) -> Copy:
    """The adapter's newest copy, from where its residency says that it is."""
    engine, held = machine.engine, machine.held[adapter]
    assert isinstance(engine, SimulatedEngine)
    if held.spilled:
        return engine.spilled[adapter]
    if held.residency is Residency.LIVE:
        assert machine.live == adapter
        assert engine.live is not None
        return engine.live
    return engine.device_slots[adapter] if held.residency is Residency.RESIDENT else engine.slots[adapter]


# --- tests --------------------------------------------------------------------------------------------------------

EACH = Bounds(1, deaths=1, elections=1, repeats=1, lates=1, cancels=1, damages=1, drains=1)
TWO = Bounds(2, deaths=2, elections=2, repeats=1, lates=1, cancels=1, damages=1, drains=1, expiries=1)
#: Every pair of policy, device slots and snapshot distance is there; with one host slot adapters are spilled as well.
SETTINGS = (
    Setting("first update", "fifo", 1, 256, SHORT, EACH._replace(drains=0), ahead=2),
    Setting("first update, snapshots", "round_robin", 1, 2, SHORT, EACH, ahead=1),
    Setting("first update, snapshots written beside", "round_robin", 1, 2, SHORT, EACH._replace(drains=0, cancels=0), ahead=1, beside=True),
    Setting("voided window, two device slots", "round_robin", 2, 256, VOIDED, EACH, ahead=1),
    Setting("checkpoints, snapshots, spilled", "fifo", 2, 2, CHECKPOINTS, EACH, ahead=1, host_slots=1),
    Setting("late requests given up", "fifo", 1, 2, SHORT, Bounds(2, lates=1, expiries=1), ahead=3),
)
LARGE_SETTINGS = tuple(
    Setting(f"{name}, {policy}, {slots} device slots, snapshots every {after}", policy, slots, after, programs, bounds, ahead, hosts)
    for policy, slots, after, hosts in (
        ("fifo", 1, 2, 64),
        ("fifo", 2, 256, 1),
        ("round_robin", 1, 256, 64),
        ("round_robin", 2, 2, 1),
    )
    for name, programs, bounds, ahead in (
        ("first update, two faults", SHORT, TWO, 64),
        ("training", TRAINING, EACH, 2),
        ("training, two faults", TRAINING, TWO, 1),
        ("voided window", VOIDED, EACH, 3),
        ("checkpoints, two faults", SAMPLED_CHECKPOINTS, TWO, 1),
    )
)


@pytest.fixture(autouse=True)
def _no_collection():
    """Nothing here is garbage in circles, and looking for it takes a fifth of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("setting", LARGE_SETTINGS if LARGE else SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.timeout(0 if LARGE else 120)
def test_every_state_holds(setting):
    counts = Exploration(setting).run()
    print(f"{setting.name}: {counts.states} states, {counts.transitions} transitions, {counts.ends} of the states are ends")
    assert counts.ends


# --- sensitivity --------------------------------------------------------------------------------------------------


def no_fence(monkeypatch):
    """A leader that was followed by another one still commands the workers."""
    monkeypatch.setattr(Gate, "fence", lambda self, epoch: None)


def all_covered(monkeypatch):
    """A snapshot that was written beside the steps passes for one of what was there when it was done."""
    durable = state_fleet._durable

    def forgetful(group, adapter):
        adapter.writing_at = len(adapter.history)
        durable(group, adapter)

    monkeypatch.setattr(state_fleet, "_durable", forgetful)


BY_NAME = {setting.name: setting for setting in SETTINGS}
#: What is switched off, and the setting of the test above that notices.
PROTECTIONS = {
    "fencing of workers": (no_fence, "first update"),
    "dedupe": (no_dedupe, "first update"),
    "snapshot watermark": (no_watermark, "first update, snapshots"),
    "watermark of what was copied": (all_covered, "first update, snapshots written beside"),
    "seq order": (no_order, "late requests given up"),
    "asking before commanding": (no_asking, "first update"),
    "step repetition": (no_repetition_check, "first update"),
}


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_protection_that_is_switched_off_is_noticed(protection, monkeypatch):
    switch_off, name = PROTECTIONS[protection]
    switch_off(monkeypatch)
    with pytest.raises(Found) as found:
        Exploration(BY_NAME[name]).run()
    print(f"without {protection}: {found.value}")


def test_lost_gradients_are_noticed():
    """Parking switched off in planner and worker."""
    with pytest.raises(Found) as found:
        Exploration(BY_NAME["first update"]._replace(parking=False), guard_pending=False).run()
    print(f"without parking: {found.value}")
