"""The fold: `apply(fleet, log_id, event)` is the only thing that changes a fleet's state.

No I/O, no clock, no randomness: time is the event's own log id. `apply` takes over the state it is given and returns it
(the running daemon and a replay both hold one state and fold into it); `encode` is canonical, so equal states are equal
bytes (invariant 8).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from state.errors import ErrorInfo, GapExpired, StepOutOfOrder, WindowVoided
from state.events import (
    STALE,
    AdapterFacts,
    Event,
    Facts,
    GroupSpec,
    LeaderElected,
    Part,
    Request,
    RequestAccepted,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestRefused,
    Settings,
    Step,
    StepFailed,
    StepFinished,
    StepKind,
    StepStarted,
    WorkersJoined,
    WorkersLost,
)
from state.fair_queue import FairQueue, Share
from state.log_id import ms_of
from state.requests import CHECKPOINT_OPS, MUTATING_OPS, Op, Signature, adapter_key
from state.residency import ALL_PARTS, OP_MOVES, STEP_MOVES, ForbiddenMove, Move, Residency, moved

ENDED_LANES = 4096  # a tenant's; a duplicate that comes after as many newer adapters ended is taken for a new request
DAMAGED = ("BadCheckpoint", "UnknownCheckpoint")  # why a snapshot cannot be restored, ever
#: Steps that a change of adapter, or of who has the device, costs.
SWITCHING = frozenset(
    {
        StepKind.SWAP,
        StepKind.PARK,
        StepKind.UNPARK,
        StepKind.BACKLOAD,
        StepKind.OFFLOAD,
        StepKind.WAKE_SAMPLER,
        StepKind.SLEEP_SAMPLER,
        StepKind.PUBLISH,
        StepKind.FETCH,
        StepKind.SPILL,
        StepKind.MOVE,
    }
)
CROWDED_MS = 300_000  # within about that time waiting is forgotten
OUTCOME_BUCKET_MS = 60_000  # outcomes are forgotten a bucket at a time, so that forgetting costs nothing per event


class Queued(msgspec.Struct, array_like=True, gc=False):
    """An accepted request that has no terminal state yet. `at`: log id of its acceptance."""

    request: Request
    at: int
    doubtful: bool = False  # its checkpoint may be written: the workers were lost before they said so


class Outcome(msgspec.Struct, array_like=True, gc=False):
    """How a request ended. `at` is also the id of its entry in the tenant's results stream."""

    status: str
    op: str
    adapter: str
    digest: str
    at: int
    error: ErrorInfo | None = None


class Redo(msgspec.Struct, array_like=True, gc=False):
    """A training request applied since the last snapshot, and the adapter's digest right after it."""

    request: Request
    digest: str


class Adapter(msgspec.Struct, array_like=True):
    """What the fleet knows of one adapter. `next_seq`: the next to run; `queue` holds later ones too, and a gap is simply
    a missing `next_seq`. `settled`: seqs past `next_seq` that ended early; True where that voids the window."""

    key: str
    tenant: str
    lane: str
    group: str
    signature: Signature
    residency: Residency = Residency.NEW
    next_seq: int = 0
    queue: dict[int, Queued] = {}
    settled: dict[int, bool] = {}
    gap_since: int = 0
    pending: int = 0
    voided: bool = False
    dirty: bool = False
    spilled: bool = False
    optimizer_step: int = 0
    digest: str = ""
    version: int = 0  # counts what a sampler could see: create, optim_step, load_state
    last_turn: int = 0
    history: list[Redo] = []
    redone: int = 0
    snapshot: int = 0  # id of the step that wrote the last durable snapshot; 0 for none
    snapshot_voided: bool = False  # the snapshot holds gradients of a window that was voided after it
    divergence: str = ""
    previous: int = 0  # the snapshot before `snapshot`, and what was applied between the two: what is left when the newer is damaged
    previous_voided: bool = False
    older: list[Redo] = []
    redo_us: int = 0  # what re-executing `history` would cost, and the bytes of bodies kept for it
    redo_bytes: int = 0
    damaged: str = ""
    writing: int = 0  # the snapshot that is being written beside the steps, and what it covers: so many of `history`, and their cost
    writing_at: int = 0
    writing_us: int = 0
    writing_bytes: int = 0
    writing_voided: bool = False
    unordered: bool = False  # its requests run as they come; `next_seq` and `settled` mean nothing
    pinned: bool = False  # its tenant chose the group
    moving: bool = False  # it left its old group, and the new one has not restored it yet

    @property
    def head(self) -> Queued | None:
        """The request that is next."""
        return next(iter(self.queue.values()), None) if self.unordered else self.queue.get(self.next_seq)

    @property
    def falls_back(self) -> bool:
        """Whether there is something to rebuild it from without its newest snapshot."""
        return bool(self.snapshot and (self.previous or self.older))

    @property
    def recovering(self) -> bool:
        """Whether its state on the workers is behind what the log says was applied."""
        return self.residency is Residency.LOST or self.redone < len(self.history)


_PARTS = {
    here: tuple(part for part, is_here in zip(ALL_PARTS, here) if is_here)
    for here in itertools.product((False, True), repeat=len(ALL_PARTS))
}


class Device(msgspec.Struct, array_like=True, gc=False):
    """What a group's device holds, as its worker last reported it."""

    live: str = ""
    parts: tuple[Part, ...] = ()
    sampler: bool = False
    published: str = ""

    @staticmethod
    def observed(facts: Facts) -> Device:
        return Device(facts.live, _PARTS[facts.weights, facts.grads, facts.optimizer], facts.sampler, facts.published)


class Group(msgspec.Struct, array_like=True):
    """One worker group. `steps`: in flight, in order."""

    name: str
    incarnation: str = ""
    lost: str = ""  # the incarnation that was lost last: its processes may be there still, their state counts for nothing
    spec: GroupSpec | None = None
    device: Device = msgspec.field(default_factory=Device)
    residents: dict[str, int] = {}  # adapters in a device slot but not live -> their last turn
    steps: dict[int, Step] = {}
    next_step: int = 1
    turn: int = 0
    turn_adapter: str = ""
    queue: FairQueue = msgspec.field(default_factory=FairQueue)  # tenants and adapters with work that can run now
    adapters: dict[str, None] = {}
    failures: int = 0  # steps failed in a row without a finished one
    broken: str = ""
    busy_us: int = 0
    swaps: int = 0
    parks: int = 0
    turns: int = 0
    moved_bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    snapshot_us: int = 0  # what the last snapshot cost to write
    joined_epoch: int = 0  # the term in which its workers last reported: a new leader plans nothing before it has asked them
    writing: str = ""  # the adapter whose snapshot is being written: one at a time, since its copy takes an adapter's memory
    crowded_us: int = 0  # how long tenants waited for each other lately, since an adapter last left or came, added up over all who waited
    crowded_at: int = 0  # the log id as of which
    arriving: int = 0  # adapters that other groups' plans will move here
    moves: int = 0


class Tenant(msgspec.Struct, array_like=True):
    """Counters of one tenant. `queued`: accepted without a terminal state."""

    queued: int = 0
    accepted: int = 0
    completed: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    used_us: int = 0
    queued_bytes: int = 0
    adapters: int = 0
    ended: dict[str, None] = {}  # lanes of adapters that are gone, the newest `ENDED_LANES`: a late duplicate must not bring one back


class Fleet(msgspec.Struct, array_like=True):
    """Everything that is true of a fleet as of `log_id`."""

    log_id: int = 0
    events: int = 0
    epoch: int = 0
    leader: str = ""
    settings: Settings = msgspec.field(default_factory=Settings)
    queued: int = 0
    tenants: dict[str, Tenant] = {}
    adapters: dict[str, Adapter] = {}
    groups: dict[str, Group] = {}
    outcomes: dict[int, dict[str, Outcome]] = {}  # bucket of time -> request id -> outcome
    gaps: dict[str, None] = {}  # adapters that wait for a missing seq
    remembered: int = 0  # outcomes

    def outcome(self, request_id: str) -> Outcome | None:
        for bucket in reversed(self.outcomes.values()):
            if request_id in bucket:
                return bucket[request_id]
        return None

    def queued_request(self, request_id: str) -> tuple[Adapter, Queued] | None:
        tenant, lane, seq = request_id.split("/")
        adapter = self.adapters.get(adapter_key(tenant, lane))
        if adapter is None or adapter.lane != lane or int(seq) not in adapter.queue:
            return None
        return adapter, adapter.queue[int(seq)]

    def running(self, request_id: str) -> Step | None:
        """The step in flight that executes `request_id`, if any."""
        for group in self.groups.values():
            for step in group.steps.values():
                if step.request_id == request_id and step.kind is StepKind.EXECUTE and not step.redo:
                    return step
        return None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Fleet)


def encode(fleet: Fleet) -> bytes:
    return _ENCODER.encode(fleet)


def decode(data: bytes) -> Fleet:
    return _DECODER.decode(data)


# --- what a step makes of a device: used by the planner to look ahead and by the fold to check facts ----------------


class Expected(msgspec.Struct):
    """A device and the residencies of the adapters a step touches, after the step."""

    device: Device
    residency: dict[str, Residency]


def advance(expected: Expected, step: Step) -> None:
    """Moves `expected` across `step`. Raises `ForbiddenMove` where the machine has no edge."""
    device, where = expected.device, expected.residency
    if step.kind is StepKind.SWAP:
        if device.live and device.live != STALE:
            where[device.live] = moved(where[device.live], Move.SET_ASIDE if step.keep else Move.SWAP_OUT)
        device.live = step.adapter
    if step.adapter and step.kind in STEP_MOVES:
        where[step.adapter] = moved(where[step.adapter], STEP_MOVES[step.kind])
        if step.kind is StepKind.MOVE:
            _leave_device(device, step.adapter)
    elif step.parts and step.kind is StepKind.BACKLOAD:
        device.parts = tuple(p for p in ALL_PARTS if p in device.parts or p in step.parts)
    elif step.parts and step.kind is StepKind.OFFLOAD:
        device.parts = tuple(p for p in device.parts if p not in step.parts)
    elif step.kind is StepKind.WAKE_SAMPLER:
        device.sampler = True
    elif step.kind is StepKind.SLEEP_SAMPLER:
        device.sampler, device.published = False, ""
    elif step.kind is StepKind.PUBLISH:
        device.published = f"{step.adapter}@{step.version}"
    elif step.kind is StepKind.EXECUTE and step.op in OP_MOVES:
        where[step.adapter] = moved(where[step.adapter], OP_MOVES[Op(step.op)])
        if where[step.adapter] is Residency.GONE:
            _leave_device(device, step.adapter)


def _leave_device(device: Device, adapter: str) -> None:
    device.live = STALE if device.live == adapter else device.live
    device.published = "" if device.published.rpartition("@")[0] == adapter else device.published


# --- the fold -----------------------------------------------------------------------------------------------------


def apply(fleet: Fleet, log_id: int, event: Event) -> Fleet:
    """The state after `event`. Takes over `fleet`. Log ids only grow; events are applied once each, in order."""
    assert log_id > fleet.log_id, f"log id {log_id} does not come after {fleet.log_id}"
    _HANDLERS[type(event)](fleet, log_id, event)
    fleet.log_id = log_id
    fleet.events += 1
    return fleet


def _leader_elected(fleet: Fleet, log_id: int, event: LeaderElected) -> None:
    fleet.epoch, fleet.leader, fleet.settings = event.epoch, event.leader, event.settings


def _request_accepted(fleet: Fleet, log_id: int, event: RequestAccepted) -> None:
    request = event.request
    tenant = fleet.tenants.setdefault(request.tenant, Tenant())
    tenant.accepted += 1
    tenant.queued += 1
    tenant.queued_bytes += request.size
    fleet.queued += 1
    if event.signature is not None:
        adapter = Adapter(request.adapter, request.tenant, request.lane, event.group, Signature(*event.signature))
        adapter.unordered, adapter.pinned = event.unordered, event.pinned
        fleet.adapters[request.adapter] = adapter
        fleet.groups[event.group].adapters[request.adapter] = None
        tenant.adapters += 1
    else:
        adapter = fleet.adapters[request.adapter]
    adapter.queue[request.seq] = Queued(request, log_id)
    _reindex(fleet, adapter, log_id)


def _request_refused(fleet: Fleet, log_id: int, event: RequestRefused) -> None:
    if event.error.tenant in fleet.tenants:  # made-up names must not grow the state
        fleet.tenants[event.error.tenant].refused += 1
    request = event.request
    if request is None or not event.consumed:
        return
    _remember(fleet, request.request_id, Outcome("refused", request.op, request.adapter, request.digest, log_id, event.error))
    adapter = fleet.adapters.get(request.adapter)
    if adapter is not None and request.lane == adapter.lane and request.seq >= adapter.next_seq and not adapter.unordered:
        adapter.settled[request.seq] = request.op == Op.FORWARD_BACKWARD
        _reindex(fleet, adapter, log_id)


def _request_cancelled(fleet: Fleet, log_id: int, event: RequestCancelled) -> None:
    error = ErrorInfo("Cancelled", f"cancelled by {event.by}", request_id=event.request_id)
    _terminal(fleet, log_id, event.request_id, "cancelled", error)


def _request_completed(fleet: Fleet, log_id: int, event: RequestCompleted) -> None:
    _terminal(fleet, log_id, event.request_id, "completed", None)


def _request_failed(fleet: Fleet, log_id: int, event: RequestFailed) -> None:
    tenant, lane, _ = event.request_id.split("/")
    fleet.groups[fleet.adapters[adapter_key(tenant, lane)].group].failures = 0
    _terminal(fleet, log_id, event.request_id, "failed", event.error)


def _terminal(fleet: Fleet, log_id: int, request_id: str, status: str, error: ErrorInfo | None) -> None:
    tenant_name, lane, seq_text = request_id.split("/")
    seq = int(seq_text)
    adapter = fleet.adapters[adapter_key(tenant_name, lane)]
    request = adapter.queue.pop(seq).request
    tenant = fleet.tenants[tenant_name]
    tenant.queued -= 1
    tenant.queued_bytes -= request.size
    fleet.queued -= 1
    setattr(tenant, status, getattr(tenant, status) + 1)
    _remember(fleet, request_id, Outcome(status, request.op, request.adapter, request.digest, log_id, error))
    void = status == "failed" and request.op == Op.FORWARD_BACKWARD
    if error is not None and error.code == WindowVoided.__name__:
        adapter.voided = False
    if not adapter.unordered:
        adapter.settled[seq] = void
    gone = adapter.residency is Residency.GONE or (request.op == Op.CREATE_ADAPTER and status != "completed")
    if gone and not adapter.queue:
        group = fleet.groups[adapter.group]
        group.adapters.pop(adapter.key, None)
        group.queue.leave(adapter.tenant, adapter.key)
        _stop_writing(group, adapter)
        fleet.gaps.pop(adapter.key, None)
        tenant.adapters -= 1
        del fleet.adapters[adapter.key]
        tenant.ended[adapter.lane] = None
        if len(tenant.ended) > ENDED_LANES:
            del tenant.ended[next(iter(tenant.ended))]
        return
    if gone:
        adapter.residency = Residency.GONE
    _reindex(fleet, adapter, log_id)


def _step_started(fleet: Fleet, log_id: int, event: StepStarted) -> None:
    group, step = fleet.groups[event.group], event.step
    assert step.id == group.next_step, f"step {step.id} started where {group.next_step} was due"
    if not group.steps:
        group.turn += 1
        group.queue.open_turn(_payer(step), capped=fleet.settings.move_gain > 0)
        adapter = fleet.adapters.get(step.adapter)
        if step.adapter and step.adapter != group.turn_adapter:
            group.turn_adapter = step.adapter
            group.turns += 1
        if adapter is not None:
            adapter.last_turn = group.turn
    if step.kind is StepKind.EXECUTE and not step.redo and step.adapter in fleet.adapters:
        fleet.adapters[step.adapter].last_turn = group.turn
    group.steps[step.id] = step
    group.next_step += 1
    _expect(fleet, step, 1)


def _expect(fleet: Fleet, step: Step, by: int) -> None:
    """Room for an adapter is taken while its move is on its way."""
    if step.kind is StepKind.MOVE:
        fleet.groups[step.to].arriving += by


def _step_finished(fleet: Fleet, log_id: int, event: StepFinished) -> None:
    group = fleet.groups[event.group]
    step = group.steps.pop(event.step_id)
    _expect(fleet, step, -1)
    group.failures = 0
    _charge(fleet, group, step, event.cost_us, event.facts)
    touched = (group.device.live, step.adapter, *(seen.adapter for seen in event.facts.adapters))
    where = {key: fleet.adapters[key].residency for key in touched if key in fleet.adapters}
    expected = Expected(msgspec.structs.replace(group.device), where)
    try:
        advance(expected, step)
    except ForbiddenMove as error:
        group.broken = group.broken or f"after {step.kind} {step.id}: {error}"
    _observe(fleet, group, event.facts)
    _hold_against(fleet, group, step, expected)
    _counters(group, step)
    adapter = fleet.adapters.get(step.adapter)
    if adapter is None:
        return
    if step.kind is StepKind.EXECUTE:
        _executed(adapter, step, event.cost_us)
    elif step.kind is StepKind.SNAPSHOT:
        _stop_writing(group, adapter)
        adapter.writing, adapter.writing_at, adapter.writing_voided = step.id, len(adapter.history), False
        adapter.writing_us, adapter.writing_bytes = adapter.redo_us, adapter.redo_bytes
        if step.beside:
            group.writing = adapter.key
        else:
            group.snapshot_us = event.cost_us
            _durable(group, adapter)
    elif step.kind is StepKind.RESTORE:
        adapter.redone = 0
    elif step.kind is StepKind.MOVE:
        _change_group(group, fleet.groups[step.to], adapter, fleet.settings.share(adapter.tenant))
        _reindex(fleet, adapter, log_id)
    _heard(fleet, group, event.facts)


def _change_group(old: Group, new: Group, adapter: Adapter, share: Share) -> None:
    """Versions of its snapshots are ids of steps, and must go on growing: so the new group's steps go on from the old one's."""
    old.crowded_us = new.crowded_us = 0
    old.moves += 1
    del old.adapters[adapter.key]
    old.queue.leave(adapter.tenant, adapter.key)
    new.adapters[adapter.key] = None
    new.next_step = max(new.next_step, old.next_step)
    new.queue.come(adapter.tenant, old.queue, share)
    adapter.group, adapter.last_turn, adapter.moving = new.name, new.turn, True


def _heard(fleet: Fleet, group: Group, facts: Facts) -> None:
    """Snapshots that were written beside the steps. What is told twice, or of an adapter that was lost since, counts for nothing."""
    for written in facts.written:
        adapter = fleet.adapters.get(written.adapter)
        if adapter is None or adapter.writing != written.version:
            continue
        group.snapshot_us = written.cost_us or group.snapshot_us
        if written.error:
            adapter.damaged = f"snapshot {written.version}: {written.error}"
            _stop_writing(group, adapter)
        else:
            _durable(group, adapter)


def _durable(group: Group, adapter: Adapter) -> None:
    """The snapshot being written is there: recovery begins from it, and what it covers is kept only for its own failing."""
    covered, rest = adapter.history[: adapter.writing_at], adapter.history[adapter.writing_at :]
    adapter.previous, adapter.previous_voided, adapter.older = adapter.snapshot, adapter.snapshot_voided, covered
    adapter.snapshot, adapter.snapshot_voided, adapter.history = adapter.writing, adapter.writing_voided, rest
    adapter.redone = max(0, adapter.redone - len(covered))
    adapter.redo_us -= adapter.writing_us
    adapter.redo_bytes -= adapter.writing_bytes
    _stop_writing(group, adapter)


def _stop_writing(group: Group, adapter: Adapter) -> None:
    if group.writing == adapter.key:
        group.writing = ""
    adapter.writing = adapter.writing_at = adapter.writing_us = adapter.writing_bytes = 0
    adapter.writing_voided = False


def _step_failed(fleet: Fleet, log_id: int, event: StepFailed) -> None:
    group = fleet.groups[event.group]
    step = group.steps.pop(event.step_id)
    _expect(fleet, step, -1)
    if step.kind is StepKind.MOVE:
        group.crowded_us = 0  # or it would be tried again and again, on a full disk for example
    if event.error.code != StepOutOfOrder.__name__:
        group.failures += 1
    if event.facts is not None:
        _charge(fleet, group, step, event.cost_us, event.facts)
        _observe(fleet, group, event.facts)
        _heard(fleet, group, event.facts)
    adapter = fleet.adapters.get(step.adapter)
    if adapter is not None and step.kind is StepKind.RESTORE and event.error.code in DAMAGED and fleet.settings.snapshot_fallback:
        _fall_back(adapter, event.error)
    if adapter is None or step.kind is not StepKind.EXECUTE or step.redo or event.facts is None:
        return
    if step.op == Op.FORWARD_BACKWARD:
        adapter.voided = True
        _drop_window(adapter)
    elif step.op == Op.OPTIM_STEP:  # a discard, or an update that could not be made: the window is gone either way
        _drop_window(adapter)
    _reindex(fleet, adapter, log_id)


def _fall_back(adapter: Adapter, error: ErrorInfo) -> None:
    """Its newest snapshot cannot be used: the one before it and all that was applied since (or all since its creation) rebuild it."""
    if not adapter.falls_back:
        return
    adapter.damaged = f"snapshot {adapter.snapshot}: {error.message}"
    adapter.snapshot, adapter.snapshot_voided = adapter.previous, adapter.previous_voided
    adapter.history = adapter.older + adapter.history
    adapter.previous, adapter.older, adapter.redone = 0, [], 0


def _executed(adapter: Adapter, step: Step, cost_us: int) -> None:
    if step.redo:
        was = adapter.history[adapter.redone]
        if was.digest != adapter.digest and not adapter.divergence:
            adapter.divergence = f"re-executing {was.request.request_id} gave digest {adapter.digest}, the first run gave {was.digest}"
        adapter.redone += 1
        return
    if step.op in MUTATING_OPS:
        seq = int(step.request_id.rpartition("/")[2])
        adapter.history.append(Redo(adapter.queue[seq].request, adapter.digest))
        adapter.redone = len(adapter.history)
        adapter.redo_us += cost_us
        adapter.redo_bytes += adapter.queue[seq].request.size
    if step.op in (Op.CREATE_ADAPTER, Op.OPTIM_STEP, Op.LOAD_STATE):
        adapter.version += 1
    if step.op == Op.LOAD_STATE:
        adapter.voided = False


def _drop_window(adapter: Adapter) -> None:
    """A voided window's forward_backwards are no part of the adapter's state any more: nothing re-executes them."""
    _pop_window(adapter.history)
    if not adapter.history:
        adapter.snapshot_voided = True
        _pop_window(adapter.older)
        adapter.previous_voided = adapter.previous_voided or not adapter.older
    adapter.redone = min(adapter.redone, len(adapter.history))
    if adapter.writing and len(adapter.history) < adapter.writing_at:
        adapter.writing_at, adapter.writing_voided = len(adapter.history), True


def _pop_window(history: list[Redo]) -> None:
    while history and history[-1].request.op == Op.FORWARD_BACKWARD:
        history.pop()


def _observe(fleet: Fleet, group: Group, facts: Facts) -> None:
    """Facts replace what was believed; the fold never infers what a device looks like."""
    group.device = Device.observed(facts)
    group.device_bytes, group.host_bytes = facts.device_bytes, facts.host_bytes
    for seen in facts.adapters:
        adapter = fleet.adapters.get(seen.adapter)
        if adapter is not None:
            _observe_adapter(group, adapter, seen)
    live = group.device.live
    if live not in ("", STALE):
        bound = fleet.adapters.get(live)
        if bound is None or bound.group != group.name or bound.residency not in (Residency.LIVE, Residency.PARKED):
            group.broken = group.broken or f"{live!r} is reported live, and cannot be"


def _observe_adapter(group: Group, adapter: Adapter, seen: AdapterFacts) -> None:
    adapter.residency = Residency(seen.residency)
    adapter.pending, adapter.dirty, adapter.spilled = seen.pending, seen.dirty, seen.spilled
    if adapter.residency is not Residency.LOST:
        adapter.optimizer_step, adapter.digest, adapter.moving = seen.optimizer_step, seen.digest, False
    if adapter.residency is Residency.RESIDENT:
        group.residents[adapter.key] = adapter.last_turn
    else:
        group.residents.pop(adapter.key, None)
    if adapter.residency is Residency.LOST:
        adapter.redone = 0
        _stop_writing(group, adapter)


def _hold_against(fleet: Fleet, group: Group, step: Step, expected: Expected) -> None:
    """Facts against expectation. A difference breaks the group: it gets no work until its workers are replaced."""
    differences = [
        f"{what} is {seen!r}, expected {due!r}"
        for what, seen, due in (
            ("live", group.device.live, expected.device.live),
            ("parts", group.device.parts, expected.device.parts),
            ("sampler", group.device.sampler, expected.device.sampler),
            ("published", group.device.published, expected.device.published),
        )
        if seen != due
    ]
    for key, due in expected.residency.items():
        adapter = fleet.adapters.get(key)
        if adapter is not None and adapter.residency is not due:
            differences.append(f"{key} is {adapter.residency}, expected {due}")
    if differences and not group.broken:
        group.broken = f"after {step.kind} {step.id}: " + "; ".join(differences)


def _charge(fleet: Fleet, group: Group, step: Step, cost_us: int, facts: Facts) -> None:
    group.busy_us += cost_us
    group.moved_bytes += facts.moved_bytes
    payer = _payer(step)
    tenant = fleet.tenants.get(payer)
    if tenant is None:
        return
    tenant.used_us += cost_us
    queue = group.queue
    queue.charge(payer, cost_us, fleet.settings.share(payer))
    group.crowded_us = crowded_us(group, fleet.log_id) + cost_us * (len(queue.waiting) - (payer in queue.waiting))
    group.crowded_at = fleet.log_id
    queue.phase_us = 0 if step.kind in (StepKind.WAKE_SAMPLER, StepKind.SLEEP_SAMPLER) else queue.phase_us + cost_us
    if step.kind in SWITCHING:
        queue.moved_us += cost_us
    elif step.kind is StepKind.EXECUTE and not step.redo:
        found = fleet.queued_request(step.request_id)
        work = found[1].request.work if found is not None else 0
        queue.computed(step.op, cost_us, work)


def crowded_us(group: Group, log_id: int) -> int:
    """`group.crowded_us` as of `log_id`: what was long ago counts less and less."""
    passed_ms = min(CROWDED_MS, ms_of(log_id) - ms_of(group.crowded_at))
    return group.crowded_us - group.crowded_us * passed_ms // CROWDED_MS


def _payer(step: Step) -> str:
    """The tenant whose request made the step necessary: it pays for the switches that it causes."""
    return (step.request_id or step.adapter).partition("/")[0]


def _counters(group: Group, step: Step) -> None:
    if step.kind is StepKind.SWAP:
        group.swaps += 1
    elif step.kind is StepKind.PARK:
        group.parks += 1


def _workers_joined(fleet: Fleet, log_id: int, event: WorkersJoined) -> None:
    group = fleet.groups.setdefault(event.group, Group(event.group))
    group.spec, group.broken, group.failures, group.joined_epoch = event.spec, "", 0, fleet.epoch
    if event.incarnation != group.incarnation:
        _lose_all(fleet, group)
        _doubt(fleet, group)
        group.incarnation = event.incarnation
    _forget_steps(fleet, group)
    _observe(fleet, group, event.facts)
    _heard(fleet, group, event.facts)
    for key in group.adapters:
        _reindex(fleet, fleet.adapters[key], log_id)


def _workers_lost(fleet: Fleet, log_id: int, event: WorkersLost) -> None:
    group = fleet.groups[event.group]
    _lose_all(fleet, group)
    _doubt(fleet, group)
    group.lost = group.incarnation
    group.broken = ""
    _forget_steps(fleet, group)
    group.incarnation, group.device = "", Device()
    group.queue.clear()


def _forget_steps(fleet: Fleet, group: Group) -> None:
    for step in group.steps.values():
        _expect(fleet, step, -1)
    group.steps = {}


def _lose_all(fleet: Fleet, group: Group) -> None:
    group.residents = {}
    for key in group.adapters:
        adapter = fleet.adapters[key]
        if adapter.residency is Residency.GONE:
            continue
        adapter.residency = moved(adapter.residency, Move.LOSE)
        adapter.redone, adapter.pending, adapter.dirty, adapter.spilled, adapter.moving = 0, 0, False, False, False
        _stop_writing(group, adapter)


def _doubt(fleet: Fleet, group: Group) -> None:
    """What lived in the workers died with them, but a checkpoint outlives them: its request may have run, and must run to its end."""
    for step in group.steps.values():
        found = fleet.queued_request(step.request_id) if step.op in CHECKPOINT_OPS and not step.redo else None
        if found is not None:
            found[1].doubtful = True


def _remember(fleet: Fleet, request_id: str, outcome: Outcome) -> None:
    bucket = ms_of(outcome.at) // OUTCOME_BUCKET_MS
    fleet.outcomes.setdefault(bucket, {})[request_id] = outcome
    fleet.remembered += 1
    oldest, most = bucket - 1 - fleet.settings.result_retention_ms // OUTCOME_BUCKET_MS, fleet.settings.outcomes
    while (first := next(iter(fleet.outcomes))) < oldest or (most and fleet.remembered > most and first < bucket):
        fleet.remembered -= len(fleet.outcomes.pop(first))


def _reindex(fleet: Fleet, adapter: Adapter, log_id: int) -> None:
    """Settles what `next_seq` passes over, and keeps the group's index of runnable adapters true."""
    while adapter.next_seq in adapter.settled:
        adapter.voided = adapter.settled.pop(adapter.next_seq) or adapter.voided
        adapter.next_seq += 1
    group = fleet.groups[adapter.group]
    head = adapter.head
    if head is not None and group.incarnation:
        group.queue.wait(adapter.tenant, adapter.key, head.at, fleet.settings.share(adapter.tenant))
    else:
        group.queue.leave(adapter.tenant, adapter.key)
    if head is None and adapter.queue:
        adapter.gap_since = adapter.gap_since or log_id
        fleet.gaps[adapter.key] = None
    elif adapter.gap_since:
        adapter.gap_since = 0
        fleet.gaps.pop(adapter.key, None)


def residency_of(adapter: Adapter) -> str:
    """In words for people: what moves is not lost."""
    return "moving" if adapter.moving else str(adapter.residency)


def gap_expired(adapter: Adapter, settings: Settings, now_ms: int) -> bool:
    return bool(adapter.gap_since) and now_ms - ms_of(adapter.gap_since) >= settings.gap_deadline_ms


def needed_bodies(fleet: Fleet) -> set[str]:
    """Digests of the bodies that a worker may still be sent: of queued requests, and of what a recovery would re-execute."""
    return {
        request.digest
        for adapter in fleet.adapters.values()
        for request in (
            *(queued.request for queued in adapter.queue.values()),
            *(redo.request for redo in adapter.history),
            *(redo.request for redo in adapter.older),
        )
        if request.size and not request.body
    }


def gap_error(adapter: Adapter, request: Request) -> ErrorInfo:
    return GapExpired(
        f"seq {adapter.next_seq} never came, so seq {request.seq} cannot run",
        tenant=request.tenant,
        adapter=adapter.key,
        request_id=request.request_id,
    ).info


_HANDLERS: dict[type, Callable[[Fleet, int, Any], None]] = {
    LeaderElected: _leader_elected,
    RequestAccepted: _request_accepted,
    RequestRefused: _request_refused,
    RequestCancelled: _request_cancelled,
    RequestCompleted: _request_completed,
    RequestFailed: _request_failed,
    StepStarted: _step_started,
    StepFinished: _step_finished,
    StepFailed: _step_failed,
    WorkersJoined: _workers_joined,
    WorkersLost: _workers_lost,
}
