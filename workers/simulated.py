"""The simulated group: the contract without a model. Deterministic, in-process, with declared costs.

A stand-in for tests of the scheduler, for replays and for machines without torch. "Weights" are a digest that every update folds
its gradients and hyper-parameters into, so a lost gradient, a leaked step or a wrong order shows in the bits just as it would in a
real adapter. Device copies and slots are separate values: what is offloaded unsaved is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import msgspec
import numpy as np

from state.errors import BadCheckpoint, CheckpointExists, HotdeskError, UnknownCheckpoint, WorkerFailed, WorkersLostError
from state.events import AdapterFacts, GroupSpec, Part, StepKind, Written
from state.requests import (
    Forward,
    ForwardResult,
    OptimStep,
    OptimStepResult,
    Sample,
    SampleResult,
    SaveResult,
    Sequence,
    Signature,
    Tensor,
    TopK,
    encode_body,
)
from state.residency import ALL_PARTS
from workers import checkpoints
from workers.contract import Call, Status, StepOutcome, under_way
from workers.machine import Machine
from workers.snapshot_writer import SnapshotWriter

SIMULATED_SPEC = GroupSpec(
    backend="simulated",
    max_rank=32,
    targets=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    vocab_size=256,
    max_sequence_tokens=2048,
    base_model="simulated",
    sample_rows=8,
    kin="simulated",
)
SLOT_BYTES = 1000  # declared, so that byte gauges move


class Copy(msgspec.Struct, frozen=True):
    """One adapter's whole state: `weights` stands for weights, masters, moments and RNG; `grads` for the pending sum."""

    signature: Signature
    weights: str
    grads: str = ""
    pending: int = 0
    optimizer_step: int = 0


def _hash(*parts: object) -> str:
    return hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)).hexdigest()


class Writing(msgspec.Struct, frozen=True):
    """A snapshot on its way to the simulated disk, where it is after some more steps."""

    adapter: str
    version: int
    kept: checkpoints.Kept
    copy: Copy
    steps: int = 2


class SimulatedDisk:
    """Snapshots and checkpoints of engines that have no directory; outlives them."""

    def __init__(self) -> None:
        self.snapshots: dict[str, dict[int, Copy]] = {}
        self.refuses: Callable[[], bool] = lambda: False  # whether the next snapshot that is written beside the steps fails
        self.checkpoints: dict[tuple[str, str, str], tuple[str, Copy]] = {}  # (adapter, kind, name) -> the request that asked, the copy


class SimulatedEngine:
    """`root`: writes real checkpoint directories there; without it, to `disk`."""

    def __init__(self, spec: GroupSpec = SIMULATED_SPEC, root: Path | None = None, disk: SimulatedDisk | None = None) -> None:
        self.spec = spec
        self.root = root
        self.disk = disk or SimulatedDisk()
        self.slots: dict[str, Copy] = {}
        self.device_slots: dict[str, Copy] = {}
        self.live: Copy | None = None
        self.sampler: Copy | None = None
        self.parts: set[Part] = set(ALL_PARTS)
        self.moved = 0
        self.spilled: dict[str, Copy] = {}
        self.writer = SnapshotWriter()
        self.writing: tuple[Writing, ...] = ()  # of engines without a directory

    def create(self, adapter: str, signature: Signature) -> None:
        self.slots[adapter] = Copy(signature, _hash("seed", encode_body(signature)))

    def drop(self, adapter: str) -> None:
        self.slots.pop(adapter, None)
        self.spilled.pop(adapter, None)
        self.device_slots.pop(adapter, None)

    def bind(self, adapter: str) -> None:
        self.live = self.slots[adapter]
        self.moved += SLOT_BYTES

    def store(self, adapter: str, *, state: bool, grads: bool) -> None:
        assert self.live is not None
        self.slots[adapter] = self.live
        self.moved += SLOT_BYTES * (state + grads)

    def set_aside(self, adapter: str) -> None:
        assert self.live is not None
        self.device_slots[adapter], self.live = self.live, None

    def take_up(self, adapter: str) -> None:
        self.live = self.device_slots.pop(adapter)

    def switch(self, outgoing: str, incoming: str, *, state: bool, grads: bool) -> None:
        self.store(outgoing, state=state, grads=grads)
        self.bind(incoming)

    def prefetch(self, adapter: str) -> None:
        pass

    def refresh(self, adapter: str, *, state: bool, grads: bool) -> None:
        self.slots[adapter] = self.device_slots[adapter]

    def exchange_live(self, outgoing: str, incoming: str) -> None:
        self.set_aside(outgoing)
        self.take_up(incoming)

    def stage(self, adapter: str) -> None:
        self.device_slots[adapter] = self.slots[adapter]
        self.moved += SLOT_BYTES

    def unstage(self, adapter: str, *, state: bool, grads: bool) -> None:
        self.slots[adapter] = self.device_slots.pop(adapter)
        self.moved += SLOT_BYTES * (state + grads)

    def offload(self, parts: tuple[Part, ...]) -> None:
        """Discards what was on the device, as the real thing does: only slots survive."""
        self.parts -= set(parts)
        if self.live is not None and Part.GRADS in parts:
            self.live = msgspec.structs.replace(self.live, grads="", pending=0)

    def backload(self, parts: tuple[Part, ...]) -> None:
        self.parts |= set(parts)

    def wake_sampler(self) -> None:
        pass

    def sleep_sampler(self) -> None:
        self.sampler = None

    def publish(self, adapter: str) -> None:
        self.sampler = self.slots[adapter]

    def forward(self, body: Forward, backward: bool) -> ForwardResult:
        assert self.live is not None
        if body.loss_config.get("clip_high_threshold") == 13.0:  # how a test makes a worker raise in mid-batch
            raise WorkerFailed("planted failure")
        digest = _hash(self.live.weights, encode_body(body))
        if backward:
            grads = _hash(self.live.grads, digest)
            self.live = msgspec.structs.replace(self.live, grads=grads, pending=self.live.pending + 1)
        shapes = [datum.inputs["target_tokens"].shape for datum in body.data]
        lengths = [math.prod(shape) for shape in shapes]
        noise = _noise(digest, sum(lengths))
        ends = itertools.accumulate(lengths)
        logprobs = tuple(
            Tensor("float32", shape, noise.data[4 * (end - length) : 4 * end]) for shape, length, end in zip(shapes, lengths, ends)
        )
        loss = -float(np.frombuffer(noise.data, "<f4").sum())
        return ForwardResult(logprobs, {"loss:sum": loss, "tokens:sum": float(sum(datum.tokens.shape[0] for datum in body.data))})

    def discard(self) -> None:
        assert self.live is not None
        self.live = msgspec.structs.replace(self.live, grads="", pending=0)

    def optim_step(self, body: OptimStep) -> OptimStepResult:
        assert self.live is not None
        weights = _hash(self.live.weights, self.live.grads, encode_body(body))
        self.live = Copy(self.live.signature, weights, "", 0, self.live.optimizer_step + 1)
        return OptimStepResult(self.live.optimizer_step, {}, weights[:16])

    def sample(self, bodies: Iterable[Sample]) -> list[SampleResult | HotdeskError]:
        return [self._sample(body) for body in bodies]

    def _sample(self, body: Sample) -> SampleResult:
        assert self.sampler is not None
        sequences = []
        for index in range(body.num_samples):
            seed = int(_hash(self.sampler.weights, encode_body(body), index)[:8], 16)
            tokens = np.random.default_rng(seed).integers(0, self.spec.vocab_size, body.max_tokens, dtype=np.int32)
            topk = self._top(body.max_tokens, body.topk_sample_logprobs)
            tokens32 = Tensor("int32", (body.max_tokens,), tokens.tobytes())
            sequences.append(Sequence(tokens32, _noise(str(seed), body.max_tokens), "length", topk))
        length = body.prompt.shape[0]
        prompt = np.frombuffer(_noise("prompt", length).data, "<f4").copy()
        prompt[0] = np.nan
        logprobs = Tensor("float32", (length,), prompt.tobytes()) if body.prompt_logprobs else None
        return SampleResult(tuple(sequences), logprobs, self._top(length - 1, body.topk_prompt_logprobs))

    def _top(self, length: int, k: int) -> TopK | None:
        """The same tokens everywhere."""
        tokens = np.tile(np.arange(k, dtype=np.int32), (length, 1))
        logprobs = (-1.0 - tokens).astype(np.float32)
        return TopK(Tensor("int32", (length, k), tokens.tobytes()), Tensor("float32", (length, k), logprobs.tobytes())) if k else None

    def save(self, adapter: str, name: str, kind: str, overwrite: bool, facts: AdapterFacts, request_id: str) -> SaveResult:
        path = f"hotdesk://{adapter}/{kind}/{name}"
        if self.root is None:
            asked, there = self.disk.checkpoints.get((adapter, kind, name), ("", None))
            if there is not None and not overwrite and (not request_id or asked != request_id):
                raise CheckpointExists(f"checkpoint {name!r} exists")
            self.disk.checkpoints[adapter, kind, name] = request_id, self.slots[adapter]
            return SaveResult(path, _hash(msgspec.msgpack.encode(self.slots[adapter])))
        final = self._path(adapter, kind, name)
        before = checkpoints.written_by(final, request_id)
        return SaveResult(
            path, before or self._write(checkpoints.begin(final, overwrite), final, adapter, kind, self.slots[adapter], request_id)
        )

    def load(self, adapter: str, source: str, kind: str, name: str, optimizer: bool) -> AdapterFacts:
        copy = self._read_checkpoint(source, kind, name)
        if copy.signature.rank != self.slots[adapter].signature.rank:
            raise BadCheckpoint(f"checkpoint {name!r} has rank {copy.signature.rank}")
        copy = msgspec.structs.replace(copy, signature=self.slots[adapter].signature, grads="", pending=0)
        self.slots[adapter] = copy if optimizer else msgspec.structs.replace(copy, optimizer_step=0)
        return self._facts(adapter)

    def snapshot(self, adapter: str, version: int, kept: checkpoints.Kept, facts: AdapterFacts, beside: bool) -> None:
        copy = self.slots[adapter]
        if self.root is None:
            writing = Writing(adapter, version, kept, copy)
            if beside:
                self.writing += (writing,)
            else:
                self._keep(writing)
            return
        final = self._path(adapter, "snapshot", str(version))

        def write() -> None:
            self._write(checkpoints.begin(final, overwrite=True), final, adapter, "snapshot", copy)
            checkpoints.forget_snapshots(final.parent, kept)

        if beside:
            self.writer.begin(adapter, version, write)
        else:
            self.writer.settle()
            write()

    def _keep(self, writing: Writing) -> None:
        there = self.disk.snapshots.setdefault(writing.adapter, {})
        there[writing.version] = writing.copy
        for old in set(there) - writing.kept.of(there):
            del there[old]

    def take_written(self) -> tuple[Written, ...]:
        ended = [writing for writing in self.writing if not writing.steps]
        self.writing = tuple(msgspec.structs.replace(w, steps=w.steps - 1) for w in self.writing if w.steps)
        told = []
        for writing in ended:
            if self.disk.refuses():
                told.append(Written(writing.adapter, writing.version, error="the disk is full"))
            else:
                self._keep(writing)
                told.append(Written(writing.adapter, writing.version, cost_us=1))
        return (*told, *self.writer.take())

    def restore(self, adapter: str, version: int, *, pending: bool) -> AdapterFacts:
        if self.root is None:
            if version not in self.disk.snapshots.get(adapter, {}):
                raise UnknownCheckpoint(f"snapshot {version} does not exist")
            self.slots[adapter] = self.disk.snapshots[adapter][version]
        else:
            self.slots[adapter] = self._read(self._path(adapter, "snapshot", str(version)))
        if not pending:
            self.slots[adapter] = msgspec.structs.replace(self.slots[adapter], grads="", pending=0)
        return self._facts(adapter)

    def spill(self, adapter: str, facts: AdapterFacts) -> None:
        self.spilled[adapter] = self.slots.pop(adapter)

    def fetch(self, adapter: str) -> None:
        self.slots[adapter] = self.spilled.pop(adapter)

    def resident_parts(self) -> tuple[Part, ...]:
        return tuple(part for part in ALL_PARTS if part in self.parts)

    def device_bytes(self) -> int:
        return SLOT_BYTES * (len(self.parts) + len(self.device_slots))

    def host_bytes(self) -> int:
        return SLOT_BYTES * len(self.slots)

    def take_moved_bytes(self) -> int:
        moved, self.moved = self.moved, 0
        return moved

    def _facts(self, adapter: str) -> AdapterFacts:
        copy = self.slots[adapter]
        digest = copy.weights[:16] if copy.optimizer_step else ""
        return AdapterFacts(adapter, "offloaded", copy.pending, False, copy.optimizer_step, digest)

    def _path(self, adapter: str, kind: str, name: str) -> Path:
        assert self.root is not None
        return self.root / adapter / kind / name

    def _read_checkpoint(self, adapter: str, kind: str, name: str) -> Copy:
        if self.root is not None:
            return self._read(self._path(adapter, kind, name))
        _, copy = self.disk.checkpoints.get((adapter, kind, name), ("", None))
        if copy is None:
            raise UnknownCheckpoint(f"checkpoint {name!r} does not exist")
        return copy

    def _write(self, aside: Path, final: Path, adapter: str, kind: str, copy: Copy, request_id: str = "") -> str:
        data = msgspec.msgpack.encode(copy)
        shards = {"shard-0.msgpack": checkpoints.write_shard(aside, "shard-0.msgpack", data)}
        signature = msgspec.to_builtins(copy.signature)
        return checkpoints.commit(aside, final, checkpoints.Manifest(adapter, kind, signature, {}, {}, shards, request_id=request_id))

    def _read(self, path: Path) -> Copy:
        manifest = checkpoints.read_manifest(path)
        return msgspec.msgpack.decode(checkpoints.read_shard(path, manifest, "shard-0.msgpack"), type=Copy)


def _noise(seed: str, length: int) -> Tensor:
    """float32 [length], negative, decided by `seed`. From a hash that is as long as it is asked for: seeding a generator costs ten times as
    much, and would be most of what a simulated operation takes."""
    bits = np.frombuffer(hashlib.shake_128(seed.encode()).digest(4 * length), "<u4")
    values = (bits >> 8).astype("<f4") * np.float32(-(2.0**-24))
    return Tensor("float32", (length,), values.tobytes())


class SimulatedGroup:
    """A `WorkerGroup` in this process. `cost_us`: declared cost by step kind or operation, instead of the measured one."""

    def __init__(
        self,
        name: str,
        spec: GroupSpec = SIMULATED_SPEC,
        root: Path | None = None,
        cost_us: dict[str, int] | None = None,
        sleep: bool = False,
        guard_pending: bool = True,
    ) -> None:
        self.name = name
        self.spec, self.root, self.guard_pending = spec, root, guard_pending
        self.cost_us = cost_us
        self.sleep = sleep
        self._be_born()

    def _be_born(self) -> None:
        self.last: asyncio.Future[StepOutcome] | None = None
        self.machine = Machine(SimulatedEngine(self.spec, self.root), guard_pending=self.guard_pending)
        self.incarnation = uuid.uuid4().hex[:12]
        self.dead = False

    async def start(self, epoch: int) -> Status:
        if self.dead:
            self._be_born()
        return await self.status(epoch)

    def apply(self, call: Call) -> asyncio.Future[StepOutcome]:
        self.last = under_way(self._carry_out(call, self.last if self.sleep else None))
        return self.last

    async def _carry_out(self, call: Call, before: asyncio.Future[StepOutcome] | None) -> StepOutcome:
        if before is not None:
            await asyncio.wait([before])
        self._alive()
        if self.sleep and self.cost_us:
            await anyio.sleep(self.declared(call) / 1e6)
        self._alive()
        outcome = self.machine.apply(call)
        if self.cost_us is not None:
            outcome = msgspec.structs.replace(outcome, cost_us=self.declared(call))
        return outcome

    async def status(self, epoch: int) -> Status:
        self._alive()
        self.machine.gate.fence(epoch)
        outcomes = tuple(self.machine.gate.outcomes.values())
        return Status(self.incarnation, self.spec, self.machine.facts(), outcomes)

    async def close(self, kill: bool = False) -> None:
        self.dead = True

    def declared(self, call: Call) -> int:
        assert self.cost_us is not None
        name = call.step.op if call.step.kind is StepKind.EXECUTE else call.step.kind
        return self.cost_us.get(name, 0)

    def _alive(self) -> None:
        if self.dead:
            raise WorkersLostError(f"group {self.name!r} is gone")
