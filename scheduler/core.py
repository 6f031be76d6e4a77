"""The daemon without its I/O: `Core.handle(now_ms, inputs) -> Batch`.

Inputs are what arrived (intake entries, outcomes of steps, workers that came or went); the batch is what follows: events to append,
replies to publish, plans to dispatch once the events are durable. The core gives each event its log id and folds it at once, so a
decision sees all that came before it, and a replay that folds the same log sees the same state at every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from scheduler.moves import has_room, is_kin, leaves
from scheduler.policy import POLICIES, Policy, expected_us
from scheduler.validation import Limits, Refusal, check_body, width_of, work_of
from state import log_id as ids
from state.errors import (
    AdapterExists,
    AdapterLost,
    BadBody,
    BadName,
    BadSignature,
    BodyTooLarge,
    Busy,
    ErrorInfo,
    ForeignAdapter,
    HotdeskError,
    MalformedRequest,
    NoGroup,
    NotCancellable,
    RequestConflict,
    ResultExpired,
    StepOutOfOrder,
    UnknownAdapter,
    UnknownOperation,
    WorkersLostError,
)
from state.events import (
    Event,
    LeaderElected,
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
from state.fair_queue import Share
from state.fleet import DAMAGED, Adapter, Fleet, Group, Queued, Tenant, apply, gap_error, gap_expired, needed_bodies, residency_of
from state.invariants import violated
from state.log import Commit, Entry, Result
from state.plan import Turn, joinable, plan, plan_leave, plan_move, plan_together
from state.requests import (
    CONTROL_OPS,
    INLINE_BODY_BYTES,
    Cancel,
    CreateAdapter,
    Description,
    Done,
    Envelope,
    Op,
    Recalled,
    Reply,
    adapter_key,
    decode_body,
    decode_envelope,
    digest_of,
    encode_body,
    is_lane,
    is_name,
)
from state.residency import ForbiddenMove
from workers.contract import Status, StepOutcome

MOST_HEADER_BYTES = 4096
MOST_BUCKETS = 65_536  # tenants whose rate is remembered
MOST_STEPS = 256  # of several turns planned together: workers remember twice as many outcomes
MOST_STEPS_AROUND = 2  # what a turn of training needs beside its requests, as a rule: an offload and a swap
MAX_FAILURES_IN_A_ROW = 3  # a step that cannot work fails its request after this many plans, instead of being planned for ever

# --- inputs -------------------------------------------------------------------------------------------------------


class Finished(msgspec.Struct, frozen=True, gc=False):
    group: str
    incarnation: str
    outcome: StepOutcome


class Joined(msgspec.Struct, frozen=True):
    group: str
    status: Status


class Lost(msgspec.Struct, frozen=True):
    group: str
    incarnation: str
    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time passed: deadlines are looked at."""


class Drain(msgspec.Struct, frozen=True):
    """Shutdown began: no new turn starts; once idle, groups are put to rest."""


class Kept(msgspec.Struct, frozen=True):
    """Digests of the bodies that the store keeps: those that no request in a queue or a history needs are forgotten."""

    bodies: frozenset[str]


Input = Entry | Finished | Joined | Lost | Tick | Drain | Kept

# --- outputs ------------------------------------------------------------------------------------------------------


class Dispatch(msgspec.Struct, frozen=True):
    """A plan for one incarnation of a group's workers. `requests`: of each `execute`, whose body the workers need."""

    group: str
    incarnation: str
    steps: tuple[Step, ...]
    requests: dict[str, Request]


class Batch(msgspec.Struct):
    """What one round decided. `commit` is one atomic step; `dispatches` go out only after it (write-ahead)."""

    commit: Commit
    dispatches: list[Dispatch] = []


class Core:
    """Holds the one running state."""

    def __init__(self, fleet: Fleet, limits: Limits) -> None:
        self.fleet = fleet
        self.limits = limits
        self.draining = False
        self.resting: set[str] = set()
        self._buckets: dict[str, tuple[float, int]] = {}
        self._now_ms = 0
        self._last_id = fleet.log_id
        self._batch = Batch(Commit(fleet.log_id))

    # --- the round ------------------------------------------------------------------------------------------------

    def lead(self, now_ms: int, epoch: int, leader: str, settings: Settings) -> Batch:
        """The first batch of a leader's term."""
        self._open(now_ms)
        self._emit(LeaderElected(epoch, leader, settings))
        return self._batch

    def handle(self, now_ms: int, inputs: Iterable[Input]) -> Batch:
        self._open(now_ms)
        for item in inputs:
            _INPUTS[type(item)](self, item)
        self._expire_gaps()
        for group in self.fleet.groups.values():
            self._schedule(group)
            wrong = violated(self.fleet, group)
            assert not wrong, f"group {group.name}: {'; '.join(wrong)}"
        return self._batch

    @property
    def at_rest(self) -> bool:
        """Whether a drain is over: every joined group was put to rest and has no step in flight."""
        return self.draining and all(
            not group.steps and (group.name in self.resting or group.broken)
            for group in self.fleet.groups.values()
            if self._commands(group)
        )

    def _commands(self, group: Group) -> bool:
        """Whether the group's workers told this leader what they did: before that, a step in doubt could be done twice."""
        return bool(group.incarnation) and group.joined_epoch == self.fleet.epoch

    def _open(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._batch = Batch(Commit(self.fleet.log_id))

    def _next_id(self) -> int:
        self._last_id = ids.following(self._last_id, self._now_ms)
        return self._last_id

    def _emit(self, event: Event) -> int:
        log_id = self._next_id()
        self._batch.commit.events.append((log_id, _EVENT_ENCODER.encode(event)))
        apply(self.fleet, log_id, event)
        return log_id

    def _publish(self, tenant: str, log_id: int, reply: Reply, first_at: int = 0) -> None:
        self._batch.commit.results.append(Result(tenant, log_id, encode_body(reply), first_at))

    # --- intake ---------------------------------------------------------------------------------------------------

    def _entry(self, entry: Entry) -> None:
        self._batch.commit.taken.append(entry.intake_id)
        try:
            if len(entry.header) > MOST_HEADER_BYTES:
                raise ValueError(f"its header has {len(entry.header)} bytes")
            envelope = msgspec.structs.replace(decode_envelope(entry.header), body=entry.body)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            self._refuse(entry, None, None, MalformedRequest(f"intake entry {entry.intake_id} is no request: {error}"))
            return
        request = None
        try:
            request = self._identify(envelope)
            if envelope.op in CONTROL_OPS:
                self._control(envelope)
            elif not self._seen_before(request):
                self._accept(entry, envelope, request)
        except HotdeskError as error:
            self._refuse(entry, envelope, request, error)
        except Exception as error:  # an entry that nobody foresaw must not stop everybody: it is taken, journaled, and answered
            unforeseen = MalformedRequest(f"the request could not be read: {type(error).__name__}: {error}")
            self._refuse(entry, envelope, request, unforeseen)

    def _identify(self, envelope: Envelope) -> Request:
        if envelope.v != 1:
            raise MalformedRequest(f"request version {envelope.v} is not known here")
        if not is_name(envelope.tenant):
            raise BadName(f"tenant name {envelope.tenant!r} is not allowed")
        if not is_lane(envelope.lane):
            raise BadName(f"lane {envelope.lane!r} is not allowed")
        if envelope.op not in _OPS:
            raise UnknownOperation(f"operation {envelope.op!r} does not exist")
        if (envelope.op in CONTROL_OPS) != envelope.lane.startswith("~"):
            raise MalformedRequest(f"operation {envelope.op!r} does not belong into lane {envelope.lane!r}")
        if envelope.seq < 0 or (envelope.op == Op.CREATE_ADAPTER) != (envelope.seq == 0 and not envelope.lane.startswith("~")):
            raise MalformedRequest(f"seq {envelope.seq} is not one of {envelope.op!r}: a lane begins with create_adapter as seq 0")
        key = self._adapter_key(envelope)
        size = len(envelope.body)
        if size > self.limits.body_bytes:
            raise BodyTooLarge(f"the body has {size} bytes, the limit is {self.limits.body_bytes}")
        inline = envelope.body if size <= INLINE_BODY_BYTES else b""
        return Request(envelope.tenant, envelope.lane, envelope.seq, envelope.op, key, digest_of(envelope.body), size, inline)

    def _adapter_key(self, envelope: Envelope) -> str:
        owner, slash, name = envelope.adapter.rpartition("/")
        if slash and owner != envelope.tenant:
            raise ForeignAdapter(f"adapter {envelope.adapter!r} belongs to another tenant")
        if not is_name(name):
            raise BadName(f"adapter name {name!r} is not allowed")
        key = f"{envelope.tenant}/{name}"
        if not envelope.lane.startswith("~") and key != adapter_key(envelope.tenant, envelope.lane):
            raise MalformedRequest(f"lane {envelope.lane!r} orders another adapter's requests than {name!r}")
        return key

    def _seen_before(self, request: Request) -> bool:
        """Whether this is a retry, which then gets (or will get) the first outcome. Raises `RequestConflict` for another body."""
        found = self.fleet.queued_request(request.request_id)
        if found is not None:
            first = found[1].request
            if (first.op, first.digest) != (request.op, request.digest):
                raise RequestConflict(f"{request.request_id} is queued with another body")
            return True
        outcome = self.fleet.outcome(request.request_id)
        if outcome is None:
            return False
        if (outcome.op, outcome.digest) != (request.op, request.digest):
            raise RequestConflict(f"{request.request_id} was {outcome.status} with another body")
        reply = Reply(request.request_id, outcome.status, error=outcome.error)
        self._publish(request.tenant, self._next_id(), reply, first_at=outcome.at)
        return True

    def _accept(self, entry: Entry, envelope: Envelope, request: Request) -> None:
        adapter = self.fleet.adapters.get(request.adapter)
        self._check_room(request, adapter)
        if envelope.op == Op.CREATE_ADAPTER:
            event = self._creation(envelope, request, adapter)
        else:
            if adapter is None or adapter.lane != request.lane:
                raise UnknownAdapter(f"adapter {request.adapter!r} does not exist")
            if not adapter.unordered and (request.seq < adapter.next_seq or request.seq in adapter.settled):
                raise ResultExpired(f"seq {request.seq} ended before; the next is {adapter.next_seq}")
            spec = self.fleet.groups[adapter.group].spec
            assert spec is not None
            _heed(envelope)
            op = Op(envelope.op)
            body = check_body(op, envelope.body, spec, self.limits)
            sequences, places = width_of(op, body)
            event = RequestAccepted(msgspec.structs.replace(request, work=work_of(op, body), sequences=sequences, places=places))
        if not request.body and request.size:
            self._batch.commit.blobs.append((request.digest, entry.intake_id))
        self._emit(event)

    def _check_room(self, request: Request, adapter: Adapter | None) -> None:
        settings = self.fleet.settings
        tenant = self.fleet.tenants.get(request.tenant)
        share = settings.share(request.tenant)
        if share.per_second:
            self._check_rate(request.tenant, share.per_second)
        if adapter is not None and request.seq == adapter.next_seq:
            return  # what fills a gap lets others leave; there is one such request an adapter
        if self.fleet.queued >= settings.total_queue:
            raise Busy(f"{self.fleet.queued} requests are queued", retry_after_ms=1000)
        if tenant is not None:
            self._check_share(request, tenant, share)
        if adapter is not None and adapter.unordered:
            return
        if adapter is not None and request.seq > adapter.next_seq + settings.tenant_queue:
            raise Busy(f"seq {request.seq} is too far ahead of {adapter.next_seq}", retry_after_ms=500)
        if adapter is not None and adapter.gap_since and request.seq != adapter.next_seq and len(adapter.queue) >= settings.held_requests:
            raise Busy(f"{len(adapter.queue)} requests are held for seq {adapter.next_seq}", retry_after_ms=500)

    def _check_share(self, request: Request, tenant: Tenant, share: Share) -> None:
        most = share.queued or self.fleet.settings.tenant_queue
        if tenant.queued >= most:
            raise Busy(f"{tenant.queued} requests of this tenant are queued", retry_after_ms=500)
        if share.queued_bytes and tenant.queued and tenant.queued_bytes + request.size > share.queued_bytes:
            raise Busy(f"{tenant.queued_bytes} bytes of this tenant are queued", retry_after_ms=500)
        if share.adapters and request.op == Op.CREATE_ADAPTER and tenant.adapters >= share.adapters:
            raise Busy(f"this tenant has {tenant.adapters} adapters", retry_after_ms=5000)

    def _check_rate(self, tenant: str, per_second: float) -> None:
        """A bucket that holds one second's requests. Not part of the state: a new leader begins with full ones."""
        tokens, at_ms = self._buckets.get(tenant, (max(1.0, per_second), self._now_ms))
        tokens = min(max(1.0, per_second), tokens + max(0, self._now_ms - at_ms) * per_second / 1000)
        if tokens < 1:
            raise Busy(f"this tenant may send {per_second:g} requests a second", retry_after_ms=int(1000 * (1 - tokens) / per_second) + 1)
        if len(self._buckets) >= MOST_BUCKETS and tenant not in self._buckets:
            self._buckets.clear()  # made-up names must not grow it; the others begin with full ones again
        self._buckets[tenant] = tokens - 1, self._now_ms

    def _creation(self, envelope: Envelope, request: Request, adapter: Adapter | None) -> RequestAccepted:
        if adapter is not None:
            raise AdapterExists(f"adapter {request.adapter!r} exists")
        if request.lane in self.fleet.tenants.get(request.tenant, Tenant()).ended:
            raise ResultExpired(f"lane {request.lane!r} ended with its adapter; a new one needs an instance of its own, as in 'name:2'")
        _heed(envelope)
        group = self._home(envelope)
        spec = group.spec
        assert spec is not None
        body: CreateAdapter = check_body(Op.CREATE_ADAPTER, envelope.body, spec, self.limits)
        if not has_room(group):
            raise Busy(f"group {group.name!r} holds {len(group.adapters)} adapters", retry_after_ms=5000)
        signature = body.signature
        settled = (signature.rank, signature.alpha, signature.targets, signature.seed)
        return RequestAccepted(request, group.name, settled, body.unordered, pinned=bool(body.group))

    def _home(self, envelope: Envelope) -> Group:
        """The group named in the body, else the one with the least load of those that joined (and are of the kin named there)."""
        joined = [g for g in self.fleet.groups.values() if g.spec is not None]
        if not joined:
            raise NoGroup("no worker group has joined yet", retry_after_ms=1000)
        try:
            body: CreateAdapter = decode_body(Op.CREATE_ADAPTER, envelope.body)
        except msgspec.DecodeError as error:
            raise MalformedRequest(f"body of create_adapter: {error}") from error
        if body.group:
            joined = [g for g in joined if g.name == body.group]
            if not joined:
                raise BadSignature(f"there is no group {body.group!r}")
        if body.like:
            joined = [g for g in joined if g.name == body.like or is_kin(self.fleet.groups.get(body.like), g)]
            if not joined:
                raise NoGroup(f"no group like {body.like!r} has joined yet", retry_after_ms=1000)
        return min(joined, key=lambda g: (not has_room(g), not g.incarnation, len(g.queue.waiting), len(g.adapters) + g.arriving, g.name))

    def _refuse(self, entry: Entry, envelope: Envelope | None, request: Request | None, error: HotdeskError) -> None:
        """Journals the refusal. A refusal of the body spends the seq, so that what was sent behind it can run."""
        tenant = envelope.tenant if envelope is not None and is_name(envelope.tenant) else ""
        request_id = envelope.request_id if envelope is not None else ""
        info = msgspec.structs.replace(
            error.info, tenant=tenant, adapter=envelope.adapter if envelope is not None else "", request_id=request_id
        )
        consumed = request is not None and isinstance(error, Refusal)
        log_id = self._emit(RequestRefused(info, request if consumed else None, consumed, entry.intake_id))
        if tenant:
            status = "busy" if info.retry_after_ms else "refused"
            digest = digest_of(entry.body) if isinstance(error, RequestConflict) else ""
            self._publish(tenant, log_id, Reply(request_id, status, error=info, digest=digest))

    # --- control operations -----------------------------------------------------------------------------------------

    def _control(self, envelope: Envelope) -> None:
        if envelope.op == Op.CANCEL:
            self._cancel(envelope)
            return
        if envelope.op == Op.RECALL:
            self._recall(envelope)
            return
        adapter = self.fleet.adapters.get(self._adapter_key(envelope))
        if adapter is None:
            raise UnknownAdapter(f"adapter {envelope.adapter!r} does not exist")
        next_seq = max([adapter.next_seq, *(seq + 1 for seq in adapter.queue), *(seq + 1 for seq in adapter.settled)])
        description = Description(adapter.lane, next_seq, adapter.optimizer_step, residency_of(adapter), len(adapter.queue))
        self._reply_control(envelope, description)

    def _cancel(self, envelope: Envelope) -> None:
        try:
            body: Cancel = decode_body(Op.CANCEL, envelope.body)
        except msgspec.DecodeError as error:
            raise MalformedRequest(f"body of cancel: {error}") from error
        target = body.request_id
        if not _is_request_of(envelope.tenant, target):
            raise NotCancellable(f"{target!r} is no request of this tenant")
        found = self.fleet.queued_request(target)
        outcome = self.fleet.outcome(target)
        if found is not None and not self._may_have_run(found[1]):
            log_id = self._emit(RequestCancelled(target, envelope.request_id))
            outcome = self.fleet.outcome(target)
            assert outcome is not None
            self._publish(envelope.tenant, log_id, Reply(target, "cancelled", error=outcome.error))
        elif outcome is None or outcome.status != "cancelled":
            raise NotCancellable(f"{target!r} is {'running' if found else 'not queued'}")
        self._reply_control(envelope, Done(envelope.adapter, f"{target} is cancelled"))

    def _recall(self, envelope: Envelope) -> None:
        """Says how a request ended, after publishing its outcome once more under its own id."""
        try:
            target = decode_body(Op.RECALL, envelope.body).request_id
        except msgspec.DecodeError as error:
            raise MalformedRequest(f"body of recall: {error}") from error
        if not _is_request_of(envelope.tenant, target):
            raise MalformedRequest(f"{target!r} is no request of this tenant")
        outcome = self.fleet.outcome(target)
        if outcome is not None:
            self._publish(envelope.tenant, self._next_id(), Reply(target, outcome.status, error=outcome.error), first_at=outcome.at)
        found = self.fleet.queued_request(target)
        if outcome is not None:
            recalled = Recalled(target, outcome.status, outcome.op)
        else:
            recalled = Recalled(target, "queued", found[1].request.op) if found is not None else Recalled(target, "unknown")
        self._reply_control(envelope, recalled)

    def _may_have_run(self, queued: Queued) -> bool:
        request = queued.request
        return queued.doubtful or request.op == Op.CREATE_ADAPTER or self.fleet.running(request.request_id) is not None

    def _reply_control(self, envelope: Envelope, result: msgspec.Struct) -> None:
        reply = Reply(envelope.request_id, "completed", encode_body(result))
        self._publish(envelope.tenant, self._next_id(), reply)

    # --- workers --------------------------------------------------------------------------------------------------

    def _joined(self, joined: Joined) -> None:
        group = self.fleet.groups.get(joined.group)
        status = joined.status
        if group is not None and group.incarnation == status.incarnation:
            self._settle(group, status)
        self._emit(WorkersJoined(joined.group, status.incarnation, status.spec, status.facts))

    def _settle(self, group: Group, status: Status) -> None:
        """Steps in doubt after a change of leader: the worker's own record says what became of them."""
        known = {outcome.step_id: outcome for outcome in status.outcomes}
        for step_id in list(group.steps):
            outcome = known.get(step_id)
            if outcome is None:
                error = StepOutOfOrder(f"step {step_id} never reached the workers").info
                outcome = StepOutcome(step_id, error=error)
            self._finished(Finished(group.name, group.incarnation, outcome))

    def _lost(self, lost: Lost) -> None:
        group = self.fleet.groups.get(lost.group)
        if group is None or group.incarnation != lost.incarnation:
            return
        self._emit(WorkersLost(lost.group, lost.incarnation, lost.reason))
        self.resting.discard(lost.group)

    def _finished(self, finished: Finished) -> None:
        group = self.fleet.groups[finished.group]
        outcome = finished.outcome
        if finished.incarnation != group.incarnation or outcome.step_id not in group.steps:
            return  # of workers that are gone, or told twice
        step = group.steps[outcome.step_id]
        if outcome.error is None:
            assert outcome.facts is not None
            self._emit(StepFinished(group.name, step.id, outcome.facts, outcome.cost_us))
            if step.kind is StepKind.EXECUTE and not step.redo:
                self._complete(step, outcome)
        else:
            self._emit(StepFailed(group.name, step.id, outcome.error, outcome.facts, outcome.cost_us))
            self._step_failed(group, step, outcome.error)

    def _complete(self, step: Step, outcome: StepOutcome) -> None:
        tenant = step.request_id.partition("/")[0]
        found = self.fleet.queued_request(step.request_id)
        assert found is not None
        log_id = self._emit(RequestCompleted(step.request_id, digest_of(outcome.result), len(outcome.result)))
        self._publish(tenant, log_id, Reply(step.request_id, "completed", outcome.result, digest=found[1].request.digest))
        if step.op == Op.UNLOAD:
            self._orphans(step.adapter)

    def _step_failed(self, group: Group, step: Step, error: ErrorInfo) -> None:
        """An `execute` that ran and failed fails its request. What was refused untouched is planned again, a few times."""
        if error.code == StepOutOfOrder.__name__ or not step.request_id:
            return
        ran = step.kind is StepKind.EXECUTE and not step.redo and error.code not in _REFUSED
        if step.kind is StepKind.RESTORE and error.code in DAMAGED:
            adapter = self.fleet.adapters.get(step.adapter)
            if adapter is not None and adapter.snapshot != step.version:
                return  # the fold fell back to the one before: it is planned again from there
            ran, error = True, AdapterLost(f"its snapshot cannot be restored: {error.message}").info
        if ran or group.failures >= MAX_FAILURES_IN_A_ROW:
            request_id = self._cause(group, step)
            if request_id:
                self._fail(request_id, error)

    def _cause(self, group: Group, step: Step) -> str:
        """The request to answer for a failed step: its own, or (a re-execution) the one that waited for it."""
        if self.fleet.queued_request(step.request_id) is not None:
            return step.request_id
        adapter = self.fleet.adapters.get(step.adapter)
        head = adapter.head if adapter is not None else None
        return head.request.request_id if head is not None else ""

    def _fail(self, request_id: str, error: ErrorInfo) -> None:
        tenant = request_id.partition("/")[0]
        found = self.fleet.queued_request(request_id)
        assert found is not None
        adapter, queued = found
        error = msgspec.structs.replace(error, tenant=tenant, adapter=queued.request.adapter, request_id=request_id)
        log_id = self._emit(RequestFailed(request_id, error))
        self._publish(tenant, log_id, Reply(request_id, "failed", error=error, digest=queued.request.digest))
        if queued.request.op == Op.CREATE_ADAPTER:
            self._orphans(adapter.key)

    def _orphans(self, key: str) -> None:
        """What is still queued for an adapter that is gone fails now, each with its own answer."""
        adapter = self.fleet.adapters.get(key)
        if adapter is None:
            return
        for queued in list(adapter.queue.values()):
            self._fail(queued.request.request_id, UnknownAdapter(f"adapter {key!r} is gone").info)

    # --- time -----------------------------------------------------------------------------------------------------

    def _tick(self, tick: Tick) -> None:
        pass

    def _drain(self, drain: Drain) -> None:
        self.draining = True

    def _kept(self, kept: Kept) -> None:
        """Forgetting goes with a commit, before the bodies that the commit itself brings: none that is needed again can be lost."""
        self._batch.commit.forget += sorted(kept.bodies - needed_bodies(self.fleet))

    def _expire_gaps(self) -> None:
        for key in list(self.fleet.gaps):
            adapter = self.fleet.adapters[key]
            if gap_expired(adapter, self.fleet.settings, self._now_ms):
                for queued in list(adapter.queue.values()):
                    self._fail(queued.request.request_id, gap_error(adapter, queued.request))

    # --- turns ----------------------------------------------------------------------------------------------------

    def _schedule(self, group: Group) -> None:
        if group.steps or not self._commands(group) or group.broken:
            return
        try:
            steps = self._rest(group) if self.draining else decide(self.fleet, group)
        except (ForbiddenMove, KeyError) as error:
            # What the workers reported fits no plan: their state is worth nothing, and is rebuilt.
            self._emit(WorkersLost(group.name, group.incarnation, f"no plan is possible from what they report: {error}"))
            return
        for step in steps:
            self._emit(StepStarted(group.name, step))
        if steps:
            requests = {step.request_id: self._request_of(step) for step in steps if step.kind is StepKind.EXECUTE}
            self._batch.dispatches.append(Dispatch(group.name, group.incarnation, tuple(steps), requests))

    def _request_of(self, step: Step) -> Request:
        adapter = self.fleet.adapters[step.adapter]
        if step.redo:
            return next(redo.request for redo in adapter.history if redo.request.request_id == step.request_id)
        return adapter.queue[int(step.request_id.rpartition("/")[2])].request

    def _rest(self, group: Group) -> list[Step]:
        if group.name in self.resting:
            return []
        self.resting.add(group.name)
        return plan_leave(self.fleet, group)


def _is_request_of(tenant: str, text: str) -> bool:
    owner, lane, seq = (*text.split("/"), "", "", "")[:3]
    return text.count("/") == 2 and owner == tenant and is_lane(lane) and seq.isascii() and seq.isdigit() and len(seq) < 20


def _heed(envelope: Envelope) -> None:
    """A front end's own refusal. Raises `BadBody`."""
    if envelope.refused:
        raise BadBody(envelope.refused)


def decide(fleet: Fleet, group: Group, policy: Policy | None = None) -> list[Step]:
    """What an idle group does next: the policy's turn, planned. Pure; `replay --verify` calls it at every recorded decision."""
    leaving = leaves(fleet, group)
    if leaving is not None:
        return plan_move(fleet, group, *leaving)
    chosen = policy or POLICIES[fleet.settings.policy]
    turn = chosen.turn(fleet, group)
    if turn is None:
        return []
    if fleet.settings.plan_us and joinable(fleet, group, turn):
        turns, following = _short_turns(fleet, group, chosen, turn)
        return plan_together(fleet, group, turns, following)
    following = chosen.turn(fleet, group, but=turn.adapter)
    return plan(fleet, group, turn, following)


def _short_turns(fleet: Fleet, group: Group, policy: Policy, first: Turn) -> tuple[list[Turn], Turn | None]:
    """`first` and the turns after it that are expected to be over within `plan_us`, one an adapter, and the one after them.

    A commit costs a sync of the disk. Where that is longer than a turn, turns wait for commits, unless one commit begins many of them."""
    turns = [first]
    left_us = fleet.settings.plan_us - expected_us(group, first.requests)
    steps = len(first.requests) + MOST_STEPS_AROUND
    for turn in policy.order(fleet, group):
        if turn.adapter == first.adapter:
            continue
        left_us -= group.queue.switch_us + expected_us(group, turn.requests)
        steps += len(turn.requests) + MOST_STEPS_AROUND
        if left_us < 0 or steps > MOST_STEPS or not joinable(fleet, group, turn):
            return turns, turn
        turns.append(turn)
    return turns, None


_EVENT_ENCODER = msgspec.msgpack.Encoder()
_OPS = frozenset(Op)
_REFUSED = frozenset({"StaleEpoch", "WrongLive", "NotResident", "PendingUnparked", "UnknownSlot", WorkersLostError.__name__})
_INPUTS: dict[type, Callable[[Core, Any], None]] = {
    Entry: Core._entry,
    Finished: Core._finished,
    Joined: Core._joined,
    Lost: Core._lost,
    Tick: Core._tick,
    Drain: Core._drain,
    Kept: Core._kept,
}
