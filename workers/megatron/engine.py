"""The Megatron engine of one rank: the adapter store (host slots, device slots, live storages) and the computation.

The store moves bytes between three places, always as whole flat storages:
    live          the storages that the model, DDP's buffers and the optimizer use (`layouts.Live`)
    device slots  further copies on the device, exchanged with live by storage pointer: nothing is copied
    slots         pieces of one pinned host arena; pending gradients are there only while there are some
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from state.errors import BadCheckpoint, HotdeskError, OutOfMemory, WorkerFailed, error_from
from state.events import AdapterFacts, GroupSpec, Part, Written
from state.requests import (
    Datum,
    Forward,
    ForwardResult,
    OptimStep,
    OptimStepResult,
    Sample,
    SampleResult,
    SaveResult,
    Signature,
    Tensor,
)
from workers import checkpoints
from workers.group_config import GroupConfig
from workers.megatron import layouts, losses, optimizers, peft, shards
from workers.megatron.arena import Arena, aligned
from workers.megatron.exchange import exchange
from workers.megatron.model import LoraLinear, build, initial_value, lora_parameters, transformer_config
from workers.megatron.sampler import Sampler, causal_mask
from workers.snapshot_writer import SnapshotWriter

MICROBATCH_TOKENS = 8192  # padded tokens of one forward; a request of more is cut into microbatches, in order

WEIGHTS = ("weights", "master")  # what a piece of a slot is called that decides the weights; the rest is the optimizer's


class Slot:
    """One adapter's host copy. `grads` is None while nothing is pending."""

    def __init__(self, signature: Signature, state: torch.Tensor, group_steps: tuple[int | None, ...]) -> None:
        self.signature = signature
        self.state = state
        self.group_steps = group_steps  # FusedAdam's; absent is not zero
        self.grads: torch.Tensor | None = None
        self.fresh = False  # nothing was written yet: its state is what the seed says
        self.written: torch.cuda.Event | None = None  # a copy into the slot that may still be under way
        self.rng: dict[str, torch.Tensor] | None = None

    def settle(self) -> None:
        """Waits until what was last written to the slot is there."""
        if self.written is not None:
            self.written.synchronize()
            self.written = None


class MegatronEngine:
    """See `workers.machine.Engine`. Built on every rank alike; collectives run inside `forward`, `optim_step`, `save` and `load`."""

    def __init__(self, config: GroupConfig, root: Path, device: torch.device) -> None:
        self.config, self.root, self.device = config, root, device
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.dp_rank, self.dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        transformer = transformer_config(config)
        model, self.scale = build(config, transformer)
        model = model.to(device)
        self.loras = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
        self.parameters = lora_parameters(model)
        self.base = _flatten([p for p in model.parameters() if not p.requires_grad])
        self.base_host = self.base.cpu().pin_memory() if device.type == "cuda" else self.base.clone()
        chosen = optimizers.recipe(config)
        self.ddp = DistributedDataParallel(
            transformer,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=chosen.distributed,
                overlap_grad_reduce=config.overlap,
                overlap_param_gather=config.overlap and chosen.distributed,
                bucket_size=config.bucket_size or None,
            ),
            model,
        )
        if config.overlap and chosen.distributed:
            # A rank without a datum runs no forward: gathering in forward hooks would leave the others waiting for it.
            self.ddp.disable_forward_pre_hook(param_sync=False)
        self.sharded = chosen.distributed and self.dp > 1
        self.optimizer = optimizers.build(config, self.ddp)
        self.live = layouts.adopt(self.ddp, self.optimizer)
        # What a slot holds, in this order. Weights that are the cast of their masters are derived, not kept.
        self.kept = (*(() if self.live.runs else self.live.weights), *self.live.state.values())
        self.bytes_of = {tensor: tensor.numel() * tensor.element_size() for tensor in (*self.kept, *self.live.grads)}
        self.state_bytes = sum(_aligned(self.bytes_of[t]) for t in self.kept)
        self.grad_bytes = sum(_aligned(self.bytes_of[t]) for t in self.live.grads)
        set_bytes = self.state_bytes + self.grad_bytes
        self.device_slots_most = self._within("device_bytes", config.device_bytes, set_bytes) or config.device_slots
        host_slots = self._within("host_bytes", config.host_bytes, aligned(self.state_bytes) + aligned(self.grad_bytes))
        self.arena = Arena(self.state_bytes, self.grad_bytes, host_slots or config.host_slots, pinned=device.type == "cuda")
        self.staged: dict[str, list[torch.Tensor]] = {}
        self.spare: list[torch.Tensor] | None = None
        self.copying_out, self.copying_in = torch.cuda.Stream(), torch.cuda.Stream()
        self.never_stepped = layouts.group_steps(self.optimizer)
        self.slots: dict[str, Slot] = {}
        self.spilled: dict[str, Slot] = {}
        self.device_slots: dict[str, list[torch.Tensor]] = {}
        self.bound: Slot | None = None
        self.writer = SnapshotWriter()
        self.aside: dict[str, torch.Tensor] = {}  # a copy of the slot whose snapshot is being written
        self.sampler = self._build_sampler()
        self.sleep_sampler()
        self.moved = 0
        self.spec = GroupSpec(
            backend="megatron",
            max_rank=config.max_rank,
            targets=config.targets,
            vocab_size=config.model.vocab_size,
            max_sequence_tokens=config.model.max_sequence_tokens,
            base_model=config.model.name,
            tp=config.tp,
            dp=self.dp,
            device_slots=self.device_slots_most,
            host_slots=self.arena.states.count,
            max_adapters=config.max_adapters,
            sample_rows=self.sampler.rows if self.sampler.together else 1,
            sample_tokens=self.sampler.tokens,
            kin=config.kin(self._arithmetic(), checkpoints.storage_id(root)),
        )

    def _arithmetic(self) -> str:
        """What decides in which order sums are made: the GPU's model, or on a processor the threads."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if on_gpu else f"cpu, {self.config.threads_per_rank} threads"

    @staticmethod
    def _within(key: str, budget_bytes: int, adapter_bytes: int) -> int:
        """How many adapters a byte budget holds; 0 where there is none. Raises `OutOfMemory` where it holds not even one."""
        if budget_bytes and budget_bytes < adapter_bytes:
            raise OutOfMemory(f"{key} {budget_bytes} is less than one adapter's {adapter_bytes} bytes")
        return budget_bytes // adapter_bytes

    def _build_sampler(self) -> Sampler:
        """Its LoRA parameters get the trainer's own layout, so that publishing is one copy per storage."""
        model, self.sampler_scale = build(self.config, transformer_config(self.config))
        model = model.to(self.device)
        base = _flatten([p for p in model.parameters() if not p.requires_grad])
        lora = tuple(torch.zeros_like(weights) for weights in self.live.weights)
        for name, parameter in lora_parameters(model).items():
            index, offset = layouts.place(self.parameters[name], self.live.weights)
            parameter.data = lora[index][offset : offset + parameter.numel()].view(parameter.shape)
            parameter.requires_grad_(False)
        on_gpu = self.device.type == "cuda"
        rows = self.config.sample_rows or (64 if on_gpu else 8)
        return Sampler(
            model, base, lora, self.device, rows=rows, tokens=self.config.sample_tokens, prompts=8 if on_gpu else 1, ranks=self.config.tp
        )

    # --- slots ----------------------------------------------------------------------------------------------------

    def create(self, adapter: str, signature: Signature) -> None:
        """Takes memory from the arena and writes none: a fresh adapter is its seed until something has to be kept."""
        slot = Slot(signature, self.arena.states.take(), self.never_stepped)
        slot.fresh = True
        if self.config.model.dropout:
            slot.rng = shards.seeded_rng(signature.seed, self.tp_rank)
        self.slots[adapter] = slot

    def _materialise(self, slot: Slot) -> None:
        slot.settle()
        if slot.fresh:
            self._draw(slot.signature, self._pieces(slot.state, self.kept))
            slot.fresh = False

    def _draw(self, signature: Signature, pieces: list[torch.Tensor]) -> None:
        """A new adapter's state: weights and masters from the seed, everything else as before a first step."""
        named = dict(zip(self._names(), pieces, strict=True))
        for name, piece in named.items():
            piece.fill_(1) if name.startswith("scale_") else piece.zero_()
        values = self._initial_values(signature)
        if not self.live.runs:
            for parameter, value in values.items():
                index, offset = layouts.place(parameter, self.live.weights)
                named[f"weights.{index}"][offset : offset + value.numel()] = value.flatten()
        for master in self.live.masters:
            piece = named[master.kind]
            if piece.dtype is not torch.int16:  # a remainder of a value that bf16 holds exactly is zero
                length = master.end - master.start
                piece[master.flat : master.flat + length] = values[master.parameter].flatten()[master.start : master.end]

    def _initial_values(self, signature: Signature) -> dict[torch.nn.Parameter, torch.Tensor]:
        """fp32 shard of each trainable parameter, on the device, rounded to the weights' dtype: a master is its weight's fp32 value."""
        values = {}
        for name, parameter in self.parameters.items():
            module = self.loras[name.rpartition(".lora_")[0]]
            value = initial_value(name, parameter, module, signature, self.tp_rank, self.config.tp, self.device)
            values[parameter] = value.to(parameter.dtype).float()
        return values

    def drop(self, adapter: str) -> None:
        slot = self.slots.pop(adapter, None)
        if slot is None:
            self.spilled.pop(adapter, None)
            return
        self._forget_staged(slot)
        slot.settle()
        self._drop_grads(slot)
        self.arena.states.give(slot.state)
        self.device_slots.pop(adapter, None)
        if self.bound is slot:
            self.bound = None

    def bind(self, adapter: str) -> None:
        slot = self.slots[adapter]
        self._fill_set(slot, [*self.kept, *self.live.grads])
        self._bound(slot)

    def store(self, adapter: str, *, state: bool, grads: bool) -> None:
        self._save(self.slots[adapter], [*self.kept, *self.live.grads], state=state, grads=grads)
        self._synchronize()

    def switch(self, outgoing: str, incoming: str, *, state: bool, grads: bool) -> None:
        """`store` and `bind` in one: the two directions run at once, on two streams, through a spare set on the device. Where the incoming
        adapter was prefetched, nothing is copied in."""
        slot, leaving = self.slots[incoming], self.slots[outgoing]
        if grads and leaving.grads is None:
            leaving.grads = self.arena.grads.take()  # what can be refused is refused before anything moves
        mine = self.staged.pop(incoming, None)
        fetched = mine is not None
        mine = mine or self.spare or self._new_set()
        self.spare = mine
        torch.cuda.current_stream().wait_stream(self.copying_out)  # the spare set may still be read by the copy out before
        self._exchange(mine)  # `mine` now holds the outgoing adapter
        with self._beside(self.copying_out):
            self._save(leaving, mine, state=state, grads=grads)
            leaving.written = torch.cuda.Event()
            leaving.written.record()
        if not fetched:
            with self._beside(self.copying_in):
                self._fill_set(slot, [*self.kept, *self.live.grads])
        self._bound(slot)

    def prefetch(self, adapter: str) -> None:
        """Copies a slot into a spare set on the device beside whatever computes now. A hint: the slot stays what is true."""
        if adapter not in self.slots or adapter in self.device_slots or adapter in self.staged:
            return
        mine = self.staged.popitem()[1] if self.staged else self._new_set()
        with self._beside(self.copying_in):
            self._fill_set(self.slots[adapter], mine)
        self.staged[adapter] = mine

    def set_aside(self, adapter: str) -> None:
        mine = self.spare or self._new_set()
        self.spare = None
        torch.cuda.current_stream().wait_stream(self.copying_out)  # the spare set may still be read by a copy out
        self._exchange(mine)
        self.device_slots[adapter] = mine
        self.bound = None

    def take_up(self, adapter: str) -> None:
        mine = self.device_slots.pop(adapter)
        self._exchange(mine)
        self.spare = self.spare or mine
        self._bound(self.slots[adapter])

    def exchange_live(self, outgoing: str, incoming: str) -> None:
        theirs = self.device_slots.pop(incoming)
        self._exchange(theirs)
        self.device_slots[outgoing] = theirs
        self._bound(self.slots[incoming])

    def stage(self, adapter: str) -> None:
        mine = self.staged.pop(adapter, None)
        if mine is None:
            mine = self._new_set()
            self._fill_set(self.slots[adapter], mine)
        self._synchronize()
        self.device_slots[adapter] = mine

    def unstage(self, adapter: str, *, state: bool, grads: bool) -> None:
        self._save(self.slots[adapter], self.device_slots[adapter], state=state, grads=grads)
        self._synchronize()
        del self.device_slots[adapter]

    def refresh(self, adapter: str, *, state: bool, grads: bool) -> None:
        self._save(self.slots[adapter], self.device_slots[adapter], state=state, grads=grads)
        self._synchronize()

    def _new_set(self) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for tensor in (*self.kept, *self.live.grads)]

    @contextlib.contextmanager
    def _beside(self, stream: Any) -> Iterator[None]:
        """Work on `stream`, after all that the computing stream was given so far."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _fill_set(self, slot: Slot, mine: list[torch.Tensor]) -> None:
        if slot.fresh:
            self._draw(slot.signature, mine[: len(self.kept)])
        else:
            slot.settle()
            self._copy(self._pieces(slot.state, self.kept), mine[: len(self.kept)])
        gradients = mine[len(self.kept) :]
        if slot.grads is not None:
            self._copy(self._pieces(slot.grads, self.live.grads), gradients)
        else:
            for tensor in gradients:
                tensor.zero_()

    def _save(self, slot: Slot, mine: list[torch.Tensor], *, state: bool, grads: bool) -> None:
        self._forget_staged(slot)
        slot.settle()
        if state:
            slot.fresh = False
            self._copy(mine[: len(self.kept)], self._pieces(slot.state, self.kept))
        if grads:
            if slot.grads is None:
                slot.grads = self.arena.grads.take()
            self._copy(mine[len(self.kept) :], self._pieces(slot.grads, self.live.grads))
        else:
            self._drop_grads(slot)

    def _forget_staged(self, slot: Slot) -> None:
        """A slot that changes makes its prefetched copy worthless."""
        worthless = [adapter for adapter in self.staged if self.slots.get(adapter) in (slot, None)]
        if worthless:
            self.copying_in.synchronize()  # memory must not be reused under a copy that is still under way
        for adapter in worthless:
            del self.staged[adapter]

    def _drop_grads(self, slot: Slot) -> None:
        if slot.grads is not None:
            self.arena.grads.give(slot.grads)
            slot.grads = None

    def _bound(self, slot: Slot) -> None:
        """The live storages hold `slot`'s adapter, as soon as the copies in are done: what is not a storage follows. Gradient views of the
        adapter before are gone: `discard` ends every step."""
        torch.cuda.current_stream().wait_stream(self.copying_in)
        self.bound = slot
        if self.live.runs:
            self._derive(self.live.state["master"], self.live.weights)
        layouts.set_group_steps(self.optimizer, slot.group_steps)
        self.scale.value = slot.signature.alpha / slot.signature.rank

    def _derive(self, masters: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> None:
        """Weights from their masters: a cast, and where masters are sharded over data-parallel ranks, a gather of the casts."""
        group = parallel_state.get_data_parallel_group() if self.sharded else None
        for run in self.live.runs:
            mine = masters[run.flat : run.flat + run.length].to(weights[run.storage].device)
            if group is None:
                weights[run.storage][run.offset : run.offset + run.length].copy_(mine)
            else:
                first = run.offset - self.dp_rank * run.length
                whole = weights[run.storage][first : first + self.dp * run.length]
                dist.all_gather_into_tensor(whole, mine.to(whole.dtype), group=group)

    def _weights_of(self, slot: Slot) -> tuple[torch.Tensor, ...]:
        """A slot's weights, whole, on the device: kept or derived."""
        self._materialise(slot)
        pieces = dict(zip(self._names(), self._pieces(slot.state, self.kept), strict=True))
        if not self.live.runs:
            return tuple(pieces[f"weights.{index}"] for index in range(len(self.live.weights)))
        weights = tuple(torch.zeros(t.numel(), dtype=t.dtype, device=self.device) for t in self.live.weights)
        self._derive(pieces["master"].to(self.device), weights)
        return weights

    def _exchange(self, mine: list[torch.Tensor]) -> None:
        for live, other in zip((*self.kept, *self.live.grads), mine):
            exchange(live, other)

    def _pieces(self, area: torch.Tensor, like: Any) -> list[torch.Tensor]:
        """`area` (uint8) as one view per tensor of `like`: same dtype and length, each aligned."""
        pieces, offset = [], 0
        for tensor in like:
            nbytes = self.bytes_of[tensor]
            pieces.append(area[offset : offset + nbytes].view(tensor.dtype))
            offset += _aligned(nbytes)
        return pieces

    def _copy(self, sources: Any, targets: Any) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
            self.moved += source.numel() * source.element_size()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- residency --------------------------------------------------------------------------------------------------

    def _storages(self, part: Part) -> list[tuple[torch.UntypedStorage, int]]:
        tensors = {
            Part.WEIGHTS: (self.base, *self.live.weights),
            Part.GRADS: self.live.grads,
            Part.OPTIMIZER: tuple(self.live.state.values()),
        }[part]
        return [(t.untyped_storage(), t.numel() * t.element_size()) for t in tensors]

    def resident_parts(self) -> tuple[Part, ...]:
        """The size of a storage is the only reliable probe: a freed one keeps its shape and views."""
        return tuple(part for part in Part if all(storage.nbytes() >= nbytes for storage, nbytes in self._storages(part)))

    def offload(self, parts: tuple[Part, ...]) -> None:
        """Frees; what must survive was parked before (machine), and the base weights are on the host anyway."""
        self._synchronize()
        self.spare, self.staged = None, {}
        for part in parts:
            for storage, _ in self._storages(part):
                storage.resize_(0)

    def backload(self, parts: tuple[Part, ...]) -> None:
        """Storages come back zeroed, the base weights from their host copy. An adapter comes with `bind`."""
        for part in parts:
            for storage, nbytes in self._storages(part):
                storage.resize_(nbytes)
                storage.fill_(0)  # type: ignore[attr-defined]
        if Part.WEIGHTS in parts:
            self._copy([self.base_host], [self.base])
        self._synchronize()

    def wake_sampler(self) -> None:
        for storage, tensor in zip(self.sampler.storages(), (self.sampler.base, *self.sampler.lora)):
            storage.resize_(tensor.numel() * tensor.element_size())
        self._copy([self.base_host], [self.sampler.base])
        self._synchronize()

    def sleep_sampler(self) -> None:
        self.sampler.forget()
        for storage in self.sampler.storages():
            storage.resize_(0)

    def publish(self, adapter: str) -> None:
        slot = self.slots[adapter]
        self._copy(self._weights_of(slot), self.sampler.lora)
        scale = slot.signature.alpha / slot.signature.rank
        if scale != self.sampler_scale.value:
            self.sampler.forget()  # a captured step has it in it
        self.sampler_scale.value = scale
        self._synchronize()

    # --- computation ----------------------------------------------------------------------------------------------

    def forward(self, body: Forward, backward: bool) -> ForwardResult:
        """Each data-parallel rank takes every dp-th datum; all ranks learn all results, and fail together."""
        mine = list(range(self.dp_rank, len(body.data), self.dp))
        try:
            done: Any = self._forward_mine(body, mine, backward)
        except Exception as error:
            if self.dp == 1:
                raise
            done = WorkerFailed(f"{type(error).__name__}: {error}").info
        everyone = self._gather_dp(done)
        failed = [part for part in everyone if not isinstance(part, tuple)]
        if failed:
            raise error_from(failed[0])
        logprobs: list[Tensor | None] = [None] * len(body.data)
        for rank, (parts, _) in enumerate(everyone):
            for index, tensor in zip(range(rank, len(body.data), self.dp), parts):
                logprobs[index] = tensor
        total = math.fsum(loss for _, loss in everyone)
        tokens = sum(datum.tokens.shape[0] for datum in body.data)
        return ForwardResult(tuple(t for t in logprobs if t is not None), {"loss:sum": total, "tokens:sum": float(tokens)})

    def _forward_mine(self, body: Forward, mine: list[int], backward: bool) -> tuple[list[Tensor], float]:
        self._restore_rng()
        self.ddp.train(backward)
        parts: list[Tensor] = []
        total = 0.0
        with torch.set_grad_enabled(backward), self.ddp.no_sync():
            for batch in _microbatches([body.data[index] for index in mine]):
                logp, loss = self._microbatch(body, batch)
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise WorkerFailed(f"the loss is {value}")
                if backward:
                    loss.backward()
                total += value
                rows = logp.detach().float().cpu()
                parts += [_tensor(_unpadded(rows[i], datum.inputs["target_tokens"].shape)) for i, datum in enumerate(batch)]
        self._keep_rng()
        return parts, total

    def _microbatch(self, body: Forward, batch: list[Datum]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities of the targets fp32 [b, T] or [b, T, K], loss scalar). Right padding: causal attention keeps it from real
        tokens."""
        length = max(datum.tokens.shape[0] for datum in batch)
        tokens = self._padded([datum.tokens for datum in batch])
        targets = self._padded([datum.inputs["target_tokens"] for datum in batch])
        weights = [d.inputs.get("weights", np.ones(d.inputs["target_tokens"].shape, np.float32)) for d in batch]
        inputs: dict[str, torch.Tensor] = {
            name: self._padded([datum.inputs[name] for datum in batch]) for name in ("logprobs", "advantages") if name in batch[0].inputs
        }
        inputs["weights"] = self._padded(weights)
        inputs["sequence_ratio_mask"] = self._padded([d.inputs.get("sequence_ratio_mask", own) for d, own in zip(batch, weights)])
        positions = torch.arange(length, device=self.device).unsqueeze(0).expand_as(tokens)
        logits = self.ddp(tokens, positions, causal_mask(length, self.device))
        if targets.dim() == 3:
            whole = gather_from_tensor_model_parallel_region(logits).float()
            logp = torch.log_softmax(whole, -1).gather(-1, targets)
        else:
            logp = -vocab_parallel_cross_entropy(logits.transpose(0, 1).float().contiguous(), targets.transpose(0, 1).contiguous())
            logp = logp.transpose(0, 1)
        return logp, losses.loss(body.loss_fn, logp, inputs, body.loss_config)

    def _padded(self, rows: list[Tensor | np.ndarray[Any, Any]]) -> torch.Tensor:
        """[b, T], or [b, T, K] where any row is [T, K]; int64 or fp32, as large as the largest, zero-padded at the right."""
        arrays = [row if isinstance(row, np.ndarray) else _array(row).reshape(row.shape) for row in rows]
        if any(array.ndim == 2 for array in arrays):
            arrays = [array.reshape(len(array), -1) for array in arrays]
        shape = (len(arrays), *(max(sizes) for sizes in zip(*(array.shape for array in arrays))))
        out = np.zeros(shape, np.float32 if arrays[0].dtype == np.float32 else np.int64)
        for index, array in enumerate(arrays):
            out[index][tuple(slice(size) for size in array.shape)] = array
        return torch.from_numpy(out).to(self.device)

    def discard(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optim_step(self, body: OptimStep) -> OptimStepResult:
        """Reduces the pending gradients once, clips, and applies AdamW with this request's hyper-parameters alone."""
        if self.config.overlap:
            self.ddp.start_grad_sync()
        self.ddp.finish_grad_sync()
        finite = torch.tensor([float(all(bool(torch.isfinite(grads).all()) for grads in self.live.grads))], device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite.item():
            self.discard()
            raise WorkerFailed("the pending gradients are not finite: they were discarded and nothing was applied")
        for member in layouts.members(self.optimizer):
            member.config.clip_grad = body.grad_clip_norm
            for group in member.optimizer.param_groups:
                group.update(lr=body.learning_rate, betas=(body.beta1, body.beta2), eps=body.eps, weight_decay=body.weight_decay)
        if getattr(self.optimizer, "config", None) is not None:
            self.optimizer.config.clip_grad = body.grad_clip_norm
        _, norm, _ = self.optimizer.step()
        if self.config.overlap and self.sharded:
            self.ddp.start_param_sync(force_sync=True)
        self.discard()
        assert self.bound is not None
        self.bound.group_steps = layouts.group_steps(self.optimizer)
        step = self._optimizer_step(self.bound)
        metrics = {"grad_norm": float(norm)} if body.grad_clip_norm and norm is not None else {}
        return OptimStepResult(step, metrics, self.digest())

    def _optimizer_step(self, slot: Slot) -> int:
        steps = [step for step in slot.group_steps if step is not None]
        tensors = [tensor for kind, tensor in self.live.state.items() if kind.startswith("step") and tensor.numel()]
        return max([*steps, *(int(tensor[0]) for tensor in tensors)], default=0)

    def digest(self) -> str:
        """Over the bound adapter's weights, masters, moments and step on all ranks."""
        assert self.bound is not None
        own = [shards.fingerprint(tensor) for tensor in (*self.live.weights, *self.live.state.values())]
        own += [step or 0 for step in self.bound.group_steps]
        return shards.combine(self._gather_world(own))

    def sample(self, bodies: Sequence[Sample]) -> list[SampleResult | HotdeskError]:
        def sample() -> list[SampleResult | HotdeskError]:
            try:
                return self.sampler.sample(bodies)
            except torch.OutOfMemoryError as error:
                words = str(error).splitlines()[0]
                raise WorkerFailed(f"sampling does not fit on the device: {words}", way_out="lower the group's sample_tokens") from error

        return self._together(sample)  # type: ignore[no-any-return]

    def _restore_rng(self) -> None:
        if self.config.model.dropout and self.bound is not None and self.bound.rng is not None:
            shards.set_rng(self.bound.rng)

    def _keep_rng(self) -> None:
        if self.config.model.dropout and self.bound is not None:
            self.bound.rng = shards.get_rng()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, adapter: str, name: str, kind: str, overwrite: bool, facts: AdapterFacts, request_id: str) -> SaveResult:
        path = self.root / adapter / kind / name

        def write() -> str:
            before = shards.written_by(path, request_id)
            if before:
                return before
            if kind == "sampler_weights":
                return self._export(adapter, path, facts, request_id)
            return shards.save(self, facts, path, kind, self._whole(self.slots[adapter]), overwrite, request_id)

        return SaveResult(f"hotdesk://{adapter}/{kind}/{name}", self._together(write))

    def _export(self, adapter: str, path: Path, facts: AdapterFacts, request_id: str) -> str:
        """The sampler's copy: what HF PEFT and the engines that follow it load, gathered to rank 0, and the weights as this group keeps
        them, each rank's shard of its own."""
        files = self._peft_files(adapter)
        weights = {name: tensor for name, tensor in self._whole(self.slots[adapter]).items() if name.startswith(WEIGHTS)}
        return shards.save(self, facts, path, "sampler_weights", weights, False, request_id, files)

    def _peft_files(self, adapter: str) -> dict[str, bytes]:
        """By name; on rank 0."""
        named = self._named(adapter)  # on every rank: sharded masters are gathered for it
        everyone = [one for one in self._gather_world(named if self.dp_rank == 0 else {}) if one]
        return peft.files(everyone, self.config, self.slots[adapter].signature, self.rows()) if dist.get_rank() == 0 else {}

    def rows(self) -> set[str]:
        """Modules around a row-parallel base: their A is sharded by its input."""
        return {name for name, module in self.loras.items() if module.row}

    def load(self, adapter: str, source: str, kind: str, name: str, optimizer: bool) -> AdapterFacts:
        return self._fill(adapter, self.root / source / kind / name, optimizer=optimizer, pending=False)

    def snapshot(self, adapter: str, version: int, kept: checkpoints.Kept, facts: AdapterFacts, beside: bool) -> None:
        path = self.root / adapter / "snapshot" / str(version)
        if beside:
            tensors = self._copied(self._whole(self.slots[adapter]))
            write = self._together(lambda: shards.save_beside(self, facts, path, tensors, kept))
            self.writer.begin(adapter, version, write)
            return
        self.writer.settle()
        self._together(lambda: shards.save(self, facts, path, "snapshot", self._whole(self.slots[adapter]), True))
        if dist.get_rank() == 0:
            checkpoints.forget_snapshots(path.parent, kept)

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Into memory that is kept for it: fresh pages would cost several times the copy. One writing at a time uses it."""
        self.writer.settle()
        for name, tensor in tensors.items():
            mine = self.aside.get(name)
            if mine is None or mine.shape != tensor.shape:
                mine = self.aside[name] = torch.empty_like(tensor)
            mine.copy_(tensor)
        return {name: self.aside[name] for name in tensors}

    def take_written(self) -> tuple[Written, ...]:
        """Rank 0's are the group's: they are there once every rank's shard is."""
        written = self.writer.take()
        return written if dist.get_rank() == 0 else ()

    def spill(self, adapter: str, facts: AdapterFacts) -> None:
        slot = self.slots[adapter]
        path = self.root / adapter / "spill"
        self._together(lambda: shards.save(self, facts, path, "spill", self._whole(slot), True))
        self._forget_staged(slot)
        self._drop_grads(slot)
        self.arena.states.give(slot.state)
        self.spilled[adapter] = self.slots.pop(adapter)

    def fetch(self, adapter: str) -> None:
        slot = self.spilled[adapter]
        slot.state = self.arena.states.take()
        self.slots[adapter] = slot
        try:
            self._fill(adapter, self.root / adapter / "spill", optimizer=True, pending=True)
        except BaseException:
            self._drop_grads(slot)
            self.arena.states.give(self.slots.pop(adapter).state)
            raise
        del self.spilled[adapter]

    def restore(self, adapter: str, version: int, *, pending: bool) -> AdapterFacts:
        return self._fill(adapter, self.root / adapter / "snapshot" / str(version), optimizer=True, pending=pending)

    def _fill(self, adapter: str, path: Path, *, optimizer: bool, pending: bool) -> AdapterFacts:
        """Checkpoint to slot, all or nothing: everything is verified, on every rank, before the slot changes."""
        manifest, tensors = self._together(lambda: shards.load(self, path))
        signature = Signature(**{**manifest.signature, "targets": tuple(manifest.signature.get("targets", ()))})
        old = self.slots.get(adapter)
        if old is not None and (signature.rank, signature.targets) != (old.signature.rank, old.signature.targets):
            raise BadCheckpoint(f"checkpoint {path.name!r} has rank {signature.rank} and targets {list(signature.targets)}")
        slot = old or Slot(signature, self.arena.states.take(), self.never_stepped)
        self.slots[adapter] = slot
        slot.settle()
        slot.fresh = False
        self._forget_staged(slot)
        names = self._names()
        pieces = dict(zip(names, self._pieces(slot.state, self.kept), strict=True))
        for piece_name, piece in pieces.items():
            if optimizer or piece_name.startswith(WEIGHTS):
                piece.copy_(tensors[piece_name])
            else:
                piece.fill_(1 if piece_name.startswith("scale_") else 0)
        self._drop_grads(slot)
        held = int(manifest.facts["pending"]) if pending else 0
        if held:
            slot.grads = self.arena.grads.take()
            for index, piece in enumerate(self._pieces(slot.grads, self.live.grads)):
                piece.copy_(tensors[f"grads.{index}"])
        slot.rng = {name[4:]: tensor for name, tensor in tensors.items() if name.startswith("rng.")} or None
        steps = tuple(manifest.facts["group_steps"])
        slot.group_steps = steps if optimizer else self.never_stepped
        step, digest = manifest.facts["optimizer_step"], manifest.facts["digest"]
        return AdapterFacts(adapter, "offloaded", held, False, step if optimizer else 0, digest if optimizer else "")

    def _names(self) -> list[str]:
        return [*(() if self.live.runs else (f"weights.{i}" for i in range(len(self.live.weights)))), *self.live.state]

    def _whole(self, slot: Slot) -> dict[str, torch.Tensor]:
        self._materialise(slot)
        tensors = dict(zip(self._names(), self._pieces(slot.state, self.kept), strict=True))
        if slot.grads is not None:
            tensors |= {f"grads.{i}": piece for i, piece in enumerate(self._pieces(slot.grads, self.live.grads))}
        if slot.rng is not None:
            tensors |= {f"rng.{name}": state for name, state in slot.rng.items()}
        return tensors

    def _named(self, adapter: str) -> dict[str, torch.Tensor]:
        """The adapter's weights by parameter name, this rank's tensor-parallel shard."""
        weights = self._weights_of(self.slots[adapter])
        named = {}
        for name, parameter in self.parameters.items():
            index, offset = layouts.place(parameter, self.live.weights)
            mine = weights[index][offset : offset + parameter.numel()].view(parameter.shape)
            named[name] = mine.to("cpu", copy=True)  # a view would be sent to the other ranks with the whole storage behind it
        return named

    # --- ranks together -----------------------------------------------------------------------------------------------

    def _together(self, work: Any) -> Any:
        """`work()` on every rank; if it failed on one it fails on all, so that no rank runs ahead with other state."""
        try:
            result, failure = work(), None
        except HotdeskError as error:
            result, failure = None, error.info
        except OSError as error:
            result, failure = None, WorkerFailed(f"disk: {error}").info
        except Exception as error:
            result, failure = None, WorkerFailed(f"{type(error).__name__}: {error}").info
        for other in self._gather_world(failure):
            if other is not None:
                raise error_from(other)
        return result

    def _gather_world(self, value: Any) -> list[Any]:
        return all_gather(value, dist.get_world_size(), None)

    def _gather_dp(self, value: Any) -> list[Any]:
        return all_gather(value, self.dp, parallel_state.get_data_parallel_group())

    # --- gauges ---------------------------------------------------------------------------------------------------

    def device_bytes(self) -> int:
        tensors = [self.base, *self.kept, *self.live.grads, self.sampler.base, *self.sampler.lora]
        sets = [*self.device_slots.values(), *self.staged.values(), *([self.spare] if self.spare else [])]
        tensors = [*self.live.weights, *tensors, *(tensor for one in sets for tensor in one)]
        tensors = [tensor for tensor in dict.fromkeys(tensors) if tensor.device.type == self.device.type]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def host_bytes(self) -> int:
        return self.arena.taken_bytes

    def take_moved_bytes(self) -> int:
        moved, self.moved = self.moved, 0
        return moved


def all_gather(value: Any, size: int, group: Any) -> list[Any]:
    if size == 1:
        return [value]
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _flatten(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """One flat tensor that the parameters become views of."""
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return flat


def _microbatches(data: list[Datum]) -> list[list[Datum]]:
    """Consecutive datums, cut where padding to the longest would exceed `MICROBATCH_TOKENS`."""
    batches: list[list[Datum]] = []
    longest = 0
    for datum in data:
        longest = max(longest, datum.tokens.shape[0])
        if not batches or longest * (len(batches[-1]) + 1) > MICROBATCH_TOKENS:
            batches.append([])
            longest = datum.tokens.shape[0]
        batches[-1].append(datum)
    return batches


def _array(of: Tensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(of.data, dtype={"int32": "<i4", "int64": "<i8", "float32": "<f4"}[of.dtype])


def _unpadded(row: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    width = shape[1] if len(shape) == 2 else 1
    return (row[: shape[0], :width] if row.dim() == 2 else row[: shape[0]]).reshape(shape)


def _tensor(row: torch.Tensor) -> Tensor:
    return Tensor("float32", tuple(row.shape), row.contiguous().numpy().tobytes())
