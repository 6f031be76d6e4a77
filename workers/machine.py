"""The worker's half of the residency machine: what each step does to a device, and what it refuses to do.

`Machine` keeps what it observes (what is live, where each adapter is, what is dirty or pending) and compares every call with it
before an `Engine` touches bytes. The same machine drives the simulated engine and each Megatron rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from state.errors import (
    ErrorInfo,
    HotdeskError,
    NotResident,
    PendingUnparked,
    StepRefused,
    UnknownSlot,
    WindowVoided,
    WorkerFailed,
    WrongLive,
)
from state.events import STALE, AdapterFacts, Facts, GroupSpec, Part, Step, StepKind, Written
from state.requests import (
    CreateAdapter,
    Done,
    Forward,
    ForwardResult,
    LoadState,
    Op,
    OptimStep,
    OptimStepResult,
    Sample,
    SampleResult,
    SaveResult,
    SaveState,
    SaveWeightsForSampler,
    Signature,
    decode_body,
    encode_body,
)
from state.residency import ALL_PARTS, NEEDS, STEP_NEEDS, Needs, Residency
from workers.checkpoints import Kept
from workers.contract import Call, Gate, StepOutcome


class Engine(Protocol):
    """Moves bytes and computes. Never decides: the machine has checked that what it is asked for is possible.

    "Slot" is an adapter's host copy; "device slot" its own place on the device while it is not live.
    """

    spec: GroupSpec

    def create(self, adapter: str, signature: Signature) -> None: ...
    def drop(self, adapter: str) -> None: ...
    def bind(self, adapter: str) -> None:
        """Slot to the live storages: weights, masters, moments, step, RNG, and pending gradients (or zeros)."""

    def store(self, adapter: str, *, state: bool, grads: bool) -> None:
        """The live adapter's dirty kinds to its slot; `grads` False leaves no pending gradients in the slot."""

    def switch(self, outgoing: str, incoming: str, *, state: bool, grads: bool) -> None:
        """`store` the live `outgoing` and `bind` `incoming` in one, both directions at once where the device can."""

    def prefetch(self, adapter: str) -> None:
        """A hint: `adapter` is next. Changes nothing that facts report."""

    def refresh(self, adapter: str, *, state: bool, grads: bool) -> None:
        """Device slot to slot, dirty kinds; the device slot stays."""

    def set_aside(self, adapter: str) -> None:
        """The live adapter to its own device slot."""

    def take_up(self, adapter: str) -> None:
        """From its own device slot to live."""

    def exchange_live(self, outgoing: str, incoming: str) -> None:
        """`set_aside` and `take_up` in one, without a third place."""

    def stage(self, adapter: str) -> None:
        """Slot to a device slot."""

    def unstage(self, adapter: str, *, state: bool, grads: bool) -> None:
        """Device slot to slot (dirty kinds), and the device slot is free again."""

    def offload(self, parts: tuple[Part, ...]) -> None: ...
    def backload(self, parts: tuple[Part, ...]) -> None: ...
    def wake_sampler(self) -> None: ...
    def sleep_sampler(self) -> None: ...
    def publish(self, adapter: str) -> None: ...
    def forward(self, body: Forward, backward: bool) -> ForwardResult: ...
    def discard(self) -> None:
        """Zeroes the live gradient buffer."""

    def optim_step(self, body: OptimStep) -> OptimStepResult: ...
    def sample(self, bodies: Sequence[Sample]) -> list[SampleResult | HotdeskError]:
        """Each as if it were alone, bit by bit."""
        ...

    def save(self, adapter: str, name: str, kind: str, overwrite: bool, facts: AdapterFacts, request_id: str) -> SaveResult:
        """Slot to a checkpoint. Done once for a `request_id`: a second call finds the first one's and says the same."""
        ...

    def load(self, adapter: str, source: str, kind: str, name: str, optimizer: bool) -> AdapterFacts:
        """Checkpoint to slot; the facts give optimizer_step, pending and digest. Of the kind `sampler_weights` it has no optimizer."""

    def snapshot(self, adapter: str, version: int, kept: Kept, facts: AdapterFacts, beside: bool) -> None:
        """Slot to the durable snapshot `version`; of the earlier ones those in `kept` stay.
        `beside`: the slot is copied, and written while steps go on."""

    def take_written(self) -> tuple[Written, ...]:
        """How writings beside the steps ended since the last call."""
        ...

    def restore(self, adapter: str, version: int, *, pending: bool) -> AdapterFacts:
        """Snapshot to slot, with or without the gradients that were pending in it."""
        ...

    def spill(self, adapter: str, facts: AdapterFacts) -> None:
        """Slot to disk, checksummed; its host memory is free again."""

    def fetch(self, adapter: str) -> None:
        """Back from disk to a slot."""

    def resident_parts(self) -> tuple[Part, ...]:
        """Observed, not remembered: which parts' storages are really on the device."""
        ...

    def device_bytes(self) -> int: ...
    def host_bytes(self) -> int: ...
    def take_moved_bytes(self) -> int:
        """Bytes moved between host and device since the last call."""
        ...


class Held(msgspec.Struct):
    """What the machine knows of one adapter."""

    residency: Residency = Residency.OFFLOADED
    pending: int = 0
    state_dirty: bool = False
    grads_dirty: bool = False
    optimizer_step: int = 0
    digest: str = ""
    spilled: bool = False


class Drawn(NamedTuple):
    """A sample that was computed with others, and its part of what that cost."""

    result: SampleResult | HotdeskError
    cost_us: int


class Machine:
    """One device. `apply` never raises: what went wrong is in the outcome."""

    def __init__(self, engine: Engine, *, guard_pending: bool = True) -> None:
        self.engine = engine
        self.gate = Gate()
        self.held: dict[str, Held] = {}
        self.live = ""
        self.sampler = False
        self.published = ""
        self.guard_pending = guard_pending  # test seam: False plants the lost-gradient fault
        self.written: dict[str, Written] = {}  # the last one of each adapter: a new leader may not have heard of it
        self.untold: dict[str, Written] = {}  # what no step's outcome has told yet: nobody keeps what a status says of an idle group
        self.lost: set[str] = set()  # adapters whose state a failure spoiled: to be rebuilt from snapshot and log
        self._touched: list[str] = []
        self._ahead: tuple[bytes, ...] = ()
        self._drawn: dict[int, Drawn] = {}  # samples of the steps to come, which were computed with the one before them
        self._shared_us = 0  # what of this step's time is another step's, or the reverse

    # --- the contract ---------------------------------------------------------------------------------------------

    def apply(self, call: Call) -> StepOutcome:
        return self.gate.run(call, self._act)

    def facts(self, adapters: tuple[str, ...] | None = None) -> Facts:
        """`adapters` None reports all of them, and each one's last snapshot; else only what is new."""
        keys = tuple(self.held) if adapters is None else adapters
        parts = self.engine.resident_parts()
        new = {one.adapter: one for one in self.engine.take_written() if one.adapter in self.held}
        self.written |= new
        self.untold |= new
        written = tuple((self.written if adapters is None else self.untold).values())
        if adapters is not None:
            self.untold = {}
        return Facts(
            live=self.live,
            weights=Part.WEIGHTS in parts,
            grads=Part.GRADS in parts,
            optimizer=Part.OPTIMIZER in parts,
            sampler=self.sampler,
            published=self.published,
            adapters=tuple(self._adapter_facts(key) for key in dict.fromkeys(keys)),
            device_bytes=self.engine.device_bytes(),
            host_bytes=self.engine.host_bytes(),
            moved_bytes=self.engine.take_moved_bytes(),
            written=written,
        )

    def _adapter_facts(self, key: str) -> AdapterFacts:
        held = self.held.get(key)
        if held is None:
            return AdapterFacts(key, Residency.LOST if key in self.lost else Residency.GONE)
        dirty = held.state_dirty or held.grads_dirty
        return AdapterFacts(key, held.residency, held.pending, dirty, held.optimizer_step, held.digest, held.spilled)

    def _act(self, call: Call) -> StepOutcome:
        step = call.step
        started = time.perf_counter_ns()
        self._touched = [step.adapter] if step.adapter else []
        self._ahead, self._shared_us = call.ahead, 0
        if step.id not in self._drawn:
            self._drawn = {}
        result, error, untouched = b"", None, False
        try:
            self._check(step)
            result = _STEPS[step.kind](self, step, call.body)
        except StepRefused as refusal:
            error, untouched = refusal.info, True
        except HotdeskError as failure:
            error = failure.info
        except Exception as failure:
            error = WorkerFailed(f"{step.op or step.kind}: {type(failure).__name__}: {failure}").info
        if error is not None and step.redo and not untouched:
            self._lose(step.adapter)  # a re-execution that fails half way is begun again from the snapshot
        cost_us = (time.perf_counter_ns() - started) // 1000 + self._shared_us
        outcome = self._outcome(step, result, error, untouched, cost_us)
        if step.kind is StepKind.MOVE:
            self.lost.discard(step.adapter)  # it was told
        return outcome

    def _lose(self, adapter: str) -> None:
        if adapter in self.held:
            self.engine.drop(adapter)
            del self.held[adapter]
        self._forget_written(adapter)
        self.lost.add(adapter)
        self.live = STALE if self.live == adapter else self.live

    def _forget_written(self, adapter: str) -> None:
        self.written.pop(adapter, None)
        self.untold.pop(adapter, None)

    def _outcome(self, step: Step, result: bytes, error: ErrorInfo | None, untouched: bool, cost_us: int) -> StepOutcome:
        if error is not None:
            error = msgspec.structs.replace(error, adapter=step.adapter, request_id=step.request_id)
        facts = (
            None if untouched else self.facts(tuple(key for key in self._touched if key in self.held or key in self.lost or error is None))
        )
        return StepOutcome(step.id, facts, cost_us, result, error)

    # --- checks before anything is touched --------------------------------------------------------------------------

    def _check(self, step: Step) -> None:
        if step.live != self.live:
            raise WrongLive(f"{step.kind}: the plan expects {step.live or 'nothing'!r} live, {self.live or 'nothing'!r} is")
        needs = NEEDS[Op(step.op)] if step.kind is StepKind.EXECUTE else STEP_NEEDS.get(step.kind, Needs())
        missing = [part for part in needs.parts if part not in self.engine.resident_parts()]
        if missing:
            raise NotResident(f"{step.op or step.kind} needs {', '.join(missing)} on the device")
        if needs.sampler is not None and needs.sampler != self.sampler:
            raise NotResident(f"{step.op or step.kind} needs the sampler {'awake' if needs.sampler else 'asleep'}")
        creates = step.op == Op.CREATE_ADAPTER or step.kind is StepKind.RESTORE
        gone_anyway = step.op == Op.UNLOAD
        if step.adapter and not creates and not gone_anyway and step.adapter not in self.held:
            raise UnknownSlot(f"{step.op or step.kind}: there is no slot for {step.adapter}")
        spilled = step.adapter in self.held and self.held[step.adapter].spilled
        if spilled and step.kind not in (StepKind.FETCH, StepKind.SPILL) and step.op != Op.UNLOAD:
            raise NotResident(f"{step.op or step.kind}: {step.adapter} is spilled to disk; fetch it first")
        if needs.live and (self.live != step.adapter or self.held[step.adapter].residency is not Residency.LIVE):
            raise WrongLive(f"{step.op}: {step.adapter} is {self.held[step.adapter].residency}, not live")

    def _expect(self, step: Step, *residencies: Residency) -> Held:
        held = self.held[step.adapter]
        if held.residency not in residencies:
            raise WrongLive(f"{step.kind}: {step.adapter} is {held.residency}, expected {' or '.join(residencies)}")
        return held

    # --- steps --------------------------------------------------------------------------------------------------------

    def _backload(self, step: Step, body: bytes) -> bytes:
        if step.adapter:
            held = self._expect(step, Residency.OFFLOADED, Residency.RESIDENT)
            if held.residency is Residency.OFFLOADED:
                self.engine.stage(step.adapter)
                held.residency = Residency.RESIDENT
            return b""
        missing = tuple(part for part in step.parts if part not in self.engine.resident_parts())
        self.engine.backload(missing)
        return b""

    def _offload(self, step: Step, body: bytes) -> bytes:
        if step.adapter:
            held = self._expect(step, Residency.RESIDENT, Residency.OFFLOADED)
            if held.residency is Residency.RESIDENT:
                self.engine.unstage(step.adapter, state=held.state_dirty, grads=held.pending > 0)
                self._clean(held, Residency.OFFLOADED)
            return b""
        live = self.held.get(self.live)
        if live is not None and live.residency is Residency.LIVE and self.guard_pending:
            raise PendingUnparked(f"{self.live} is live with {live.pending} pending forward_backwards and is not parked")
        if any(held.residency is Residency.RESIDENT for held in self.held.values()):
            raise PendingUnparked("an adapter is resident: offload it before the parts")
        self.engine.offload(tuple(part for part in step.parts if part in self.engine.resident_parts()))
        return b""

    def _store(self, adapter: str, held: Held, residency: Residency) -> None:
        self.engine.store(adapter, state=held.state_dirty, grads=held.pending > 0)
        self._clean(held, residency)

    @staticmethod
    def _clean(held: Held, residency: Residency) -> None:
        held.state_dirty = held.grads_dirty = False
        held.residency = residency

    def _park(self, step: Step, body: bytes) -> bytes:
        held = self._expect(step, Residency.LIVE, Residency.PARKED)
        if held.residency is Residency.LIVE:
            self._store(step.adapter, held, Residency.PARKED)
        return b""

    def _unpark(self, step: Step, body: bytes) -> bytes:
        held = self._expect(step, Residency.PARKED, Residency.LIVE)
        if held.residency is Residency.PARKED:
            self.engine.bind(step.adapter)
            held.residency = Residency.LIVE
        return b""

    def _swap(self, step: Step, body: bytes) -> bytes:
        incoming = self._expect(step, Residency.OFFLOADED, Residency.RESIDENT)
        outgoing = self.held.get(self.live)
        live = self.live
        if outgoing is not None:
            self._touched.append(live)
            if outgoing.residency is Residency.PARKED:
                outgoing.residency = Residency.OFFLOADED
            elif not step.keep and incoming.residency is Residency.OFFLOADED:
                self.engine.switch(live, step.adapter, state=outgoing.state_dirty, grads=outgoing.pending > 0)
                self._clean(outgoing, Residency.OFFLOADED)
                incoming.residency = Residency.LIVE
            elif not step.keep:
                self._store(live, outgoing, Residency.OFFLOADED)
            elif incoming.residency is Residency.RESIDENT:
                self.engine.exchange_live(live, step.adapter)
                outgoing.residency, incoming.residency = Residency.RESIDENT, Residency.LIVE
            else:
                self.engine.set_aside(live)
                outgoing.residency = Residency.RESIDENT
        if incoming.residency is not Residency.LIVE:
            self.live = STALE  # the outgoing one is away: should the incoming one fail to come, nothing is bound
        if incoming.residency is Residency.RESIDENT:
            self.engine.take_up(step.adapter)
        elif incoming.residency is Residency.OFFLOADED:
            self.engine.bind(step.adapter)
        incoming.residency = Residency.LIVE
        self.live = step.adapter
        return b""

    def _flush(self, step: Step, body: bytes) -> bytes:
        held = self._expect(step, Residency.LIVE, Residency.RESIDENT)
        if held.residency is Residency.LIVE:
            self._store(step.adapter, held, Residency.LIVE)
        else:
            self.engine.refresh(step.adapter, state=held.state_dirty, grads=held.pending > 0)
            self._clean(held, Residency.RESIDENT)
        return b""

    def _spill(self, step: Step, body: bytes) -> bytes:
        held = self._expect(step, Residency.OFFLOADED)
        if not held.spilled:
            self.engine.spill(step.adapter, self._adapter_facts(step.adapter))
            held.spilled = True
        return b""

    def _fetch(self, step: Step, body: bytes) -> bytes:
        held = self._expect(step, Residency.OFFLOADED)
        if held.spilled:
            self.engine.fetch(step.adapter)
            held.spilled = False
        return b""

    def _snapshot(self, step: Step, body: bytes) -> bytes:
        held = self.held[step.adapter]
        if held.state_dirty or held.grads_dirty:
            raise PendingUnparked(f"snapshot: the slot of {step.adapter} is behind the device; flush first")
        kept = Kept(step.version, step.before)
        self.engine.snapshot(step.adapter, step.id, kept, self._adapter_facts(step.adapter), step.beside)
        return b""

    def _restore(self, step: Step, body: bytes) -> bytes:
        self._take(step.adapter, self.engine.restore(step.adapter, step.version, pending=not step.discard))
        return b""

    def _move(self, step: Step, body: bytes) -> bytes:
        """Lets go of what the snapshot before this step holds: another group restores it."""
        self._slot_is_current(step)
        self._lose(step.adapter)
        if self.published.rpartition("@")[0] == step.adapter:
            self.published = ""
        return b""

    def _take(self, adapter: str, seen: AdapterFacts) -> None:
        self.lost.discard(adapter)
        self.held[adapter] = Held(Residency.OFFLOADED, pending=seen.pending, optimizer_step=seen.optimizer_step, digest=seen.digest)

    def _wake_sampler(self, step: Step, body: bytes) -> bytes:
        if self.engine.resident_parts():
            raise NotResident("the sampler needs the training state off the device first")
        if not self.sampler:
            self.engine.wake_sampler()
            self.sampler = True
        return b""

    def _sleep_sampler(self, step: Step, body: bytes) -> bytes:
        if self.sampler:
            self.engine.sleep_sampler()
            self.sampler, self.published = False, ""
        return b""

    def _publish(self, step: Step, body: bytes) -> bytes:
        held = self.held[step.adapter]
        if not self.sampler:
            raise NotResident("publish: the sampler is asleep")
        if held.state_dirty:
            raise PendingUnparked(f"publish: the slot of {step.adapter} is behind the device; flush first")
        self.published = ""  # should it fail, nobody knows what is there
        self.engine.publish(step.adapter)
        self.published = f"{step.adapter}@{step.version}"
        return b""

    def _execute(self, step: Step, body: bytes) -> bytes:
        if step.next:
            self.engine.prefetch(step.next)
        return encode_body(_OPS[Op(step.op)](self, step, body))

    # --- operations -------------------------------------------------------------------------------------------------

    def _create(self, step: Step, body: bytes) -> msgspec.Struct:
        request: CreateAdapter = decode_body(Op.CREATE_ADAPTER, body)
        if step.adapter not in self.held:
            self.engine.create(step.adapter, request.signature)
            self.held[step.adapter] = Held()
            self.lost.discard(step.adapter)
        return Done(step.adapter)

    def _unload(self, step: Step, body: bytes) -> msgspec.Struct:
        if self.live == step.adapter:
            self.live = STALE
        if self.published.rpartition("@")[0] == step.adapter:
            self.published = ""
        if step.adapter in self.held:
            self.engine.drop(step.adapter)
            del self.held[step.adapter]
        self._forget_written(step.adapter)
        self.lost.discard(step.adapter)
        return Done(step.adapter)

    def _forward(self, step: Step, body: bytes) -> msgspec.Struct:
        return self.engine.forward(decode_body(Op.FORWARD, body), backward=False)

    def _forward_backward(self, step: Step, body: bytes) -> msgspec.Struct:
        """A failure voids the whole window: a half-poisoned accumulation must not reach an update (invariant 2)."""
        held = self.held[step.adapter]
        held.grads_dirty = True
        try:
            result = self.engine.forward(decode_body(Op.FORWARD_BACKWARD, body), backward=True)
        except Exception:
            self.engine.discard()
            held.pending = 0
            raise
        held.pending += 1
        return result

    def _optim_step(self, step: Step, body: bytes) -> msgspec.Struct:
        held = self.held[step.adapter]
        held.grads_dirty = True
        if step.discard:
            self.engine.discard()
            held.pending = 0
            raise WindowVoided("a forward_backward of this window failed, so its gradients were discarded and nothing was applied")
        held.state_dirty = True
        try:
            result = self.engine.optim_step(decode_body(Op.OPTIM_STEP, body))
        except HotdeskError:  # refused before anything was applied: the window is discarded
            self.engine.discard()
            held.pending = 0
            raise
        except Exception:  # perhaps half applied
            self._lose(step.adapter)
            raise
        held.pending = 0
        held.optimizer_step, held.digest = result.optimizer_step, result.digest
        return result

    def _sample(self, step: Step, body: bytes) -> msgspec.Struct:
        if self.published.rpartition("@")[0] != step.adapter:
            raise WrongLive(f"sample: the sampler holds {self.published or 'nothing'!r}, not {step.adapter}")
        if step.id not in self._drawn:
            self._draw(step.id, (body, *self._ahead))
        drawn = self._drawn.pop(step.id)
        self._shared_us += drawn.cost_us
        if isinstance(drawn.result, HotdeskError):
            raise drawn.result
        return drawn.result

    def _draw(self, step_id: int, bodies: Sequence[bytes]) -> None:
        """What comes right behind the step is computed with it, and each still is a step with an outcome of its own. Where that fails as a
        whole, each is computed alone: one that cannot be computed must not fail the others."""
        asked = [decode_body(Op.SAMPLE, body) for body in bodies]
        began = time.perf_counter_ns()
        try:
            results = self.engine.sample(asked)
        except Exception:
            if len(asked) == 1:
                raise
            results = self.engine.sample(asked[:1])
        took_us = (time.perf_counter_ns() - began) // 1000
        self._shared_us -= took_us
        self._drawn = {step_id + index: Drawn(result, took_us // len(results)) for index, result in enumerate(results)}

    def _save_state(self, step: Step, body: bytes) -> msgspec.Struct:
        request: SaveState = decode_body(Op.SAVE_STATE, body)
        self._slot_is_current(step)
        facts = self._adapter_facts(step.adapter)
        return self.engine.save(step.adapter, request.name, "weights", request.overwrite, facts, step.request_id)

    def _save_weights(self, step: Step, body: bytes) -> msgspec.Struct:
        request: SaveWeightsForSampler = decode_body(Op.SAVE_WEIGHTS_FOR_SAMPLER, body)
        self._slot_is_current(step)
        return self.engine.save(step.adapter, request.name, "sampler_weights", False, self._adapter_facts(step.adapter), step.request_id)

    def _slot_is_current(self, step: Step) -> None:
        held = self.held[step.adapter]
        if held.state_dirty or held.grads_dirty:
            raise PendingUnparked(f"{step.op or step.kind}: the slot of {step.adapter} is behind the device; flush first")

    def _load_state(self, step: Step, body: bytes) -> msgspec.Struct:
        """Slot first; a live or resident adapter's device copy follows in the same step, so neither is ever behind."""
        request: LoadState = decode_body(Op.LOAD_STATE, body)
        source = f"{step.adapter.rpartition('/')[0]}/{request.adapter}" if request.adapter else step.adapter
        residency = self.held[step.adapter].residency
        if residency is Residency.LIVE and set(self.engine.resident_parts()) != set(ALL_PARTS):
            raise NotResident("load_state: the live adapter's storages are off the device")
        kind = "sampler_weights" if request.sampler_weights else "weights"
        seen = self.engine.load(step.adapter, source, kind, request.name, request.optimizer and not request.sampler_weights)
        self._take(step.adapter, seen)
        if residency is Residency.LIVE:
            self.engine.bind(step.adapter)
        elif residency is Residency.RESIDENT:
            self.engine.stage(step.adapter)
        self.held[step.adapter].residency = residency
        return Done(step.adapter, f"optimizer step {seen.optimizer_step}")


_STEPS: dict[StepKind, Callable[[Machine, Step, bytes], bytes]] = {
    StepKind.BACKLOAD: Machine._backload,
    StepKind.OFFLOAD: Machine._offload,
    StepKind.PARK: Machine._park,
    StepKind.UNPARK: Machine._unpark,
    StepKind.SWAP: Machine._swap,
    StepKind.FLUSH: Machine._flush,
    StepKind.FETCH: Machine._fetch,
    StepKind.SPILL: Machine._spill,
    StepKind.SNAPSHOT: Machine._snapshot,
    StepKind.RESTORE: Machine._restore,
    StepKind.MOVE: Machine._move,
    StepKind.WAKE_SAMPLER: Machine._wake_sampler,
    StepKind.SLEEP_SAMPLER: Machine._sleep_sampler,
    StepKind.PUBLISH: Machine._publish,
    StepKind.EXECUTE: Machine._execute,
}
_OPS: dict[Op, Callable[[Machine, Step, bytes], Any]] = {
    Op.CREATE_ADAPTER: Machine._create,
    Op.UNLOAD: Machine._unload,
    Op.FORWARD: Machine._forward,
    Op.FORWARD_BACKWARD: Machine._forward_backward,
    Op.OPTIM_STEP: Machine._optim_step,
    Op.SAMPLE: Machine._sample,
    Op.SAVE_STATE: Machine._save_state,
    Op.SAVE_WEIGHTS_FOR_SAMPLER: Machine._save_weights,
    Op.LOAD_STATE: Machine._load_state,
}
