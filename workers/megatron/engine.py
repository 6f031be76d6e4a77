"""The Megatron engine of one rank: the adapter store (host slots, device slots, live storages) and the computation.

The store moves bytes between three places, always as whole flat storages:
    live          the storages that the model, DDP's buffers and the optimizer use (`layouts.Live`)
    device slots  further copies on the device, exchanged with live by storage pointer: nothing is copied
    slots         pieces of one pinned host arena; pending gradients are there only while there are some
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from state.errors import BadCheckpoint, HotdeskError, UnknownLayout, WorkerFailed, error_from
from state.events import AdapterFacts, GroupSpec, Part
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
from workers.megatron import layouts, losses, shards
from workers.megatron.arena import Arena
from workers.megatron.exchange import exchange
from workers.megatron.model import DTYPES, LoraLinear, build, initial_value, lora_parameters, transformer_config
from workers.megatron.sampler import Sampler, causal_mask

MICROBATCH_TOKENS = 8192  # padded tokens of one forward; a request of more is cut into microbatches, in order


class Slot:
    """One adapter's host copy. `grads` is None while nothing is pending."""

    def __init__(self, signature: Signature, state: torch.Tensor) -> None:
        self.signature = signature
        self.state = state
        self.grads: torch.Tensor | None = None
        self.rng: torch.Tensor | None = None


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
        self.check_layout(config)
        distributed = config.optimizer == "distributed"
        self.ddp = DistributedDataParallel(
            transformer,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
            model,
        )
        self.optimizer = get_megatron_optimizer(self._optimizer_config(distributed), [self.ddp])
        self.live = layouts.adopt(self.ddp, self.optimizer)
        self.kept = (*self.live.weights, *self.live.state.values())  # what a slot holds, in this order
        self.bytes_of = {tensor: tensor.numel() * tensor.element_size() for tensor in (*self.kept, *self.live.grads)}
        self.state_bytes = sum(_aligned(self.bytes_of[t]) for t in self.kept)
        self.grad_bytes = sum(_aligned(self.bytes_of[t]) for t in self.live.grads)
        self.arena = Arena(config.host_slots * (self.state_bytes + self.grad_bytes), pinned=device.type == "cuda")
        self.slots: dict[str, Slot] = {}
        self.device_slots: dict[str, list[torch.Tensor]] = {}
        self.bound: Slot | None = None
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
            device_slots=config.device_slots,
            host_slots=config.host_slots,
        )

    @staticmethod
    def check_layout(config: GroupConfig) -> None:
        if config.optimizer not in ("distributed", "plain"):
            raise UnknownLayout(f"optimizer {config.optimizer!r} is no layout that the adapter store knows")

    def _optimizer_config(self, distributed: bool) -> OptimizerConfig:
        bf16 = self.config.dtype == "bfloat16"
        return OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            min_lr=0.0,
            weight_decay=0.0,
            bf16=bf16,
            params_dtype=DTYPES[self.config.dtype],
            use_distributed_optimizer=distributed,
            clip_grad=0.0,
        )

    def _build_sampler(self) -> Sampler:
        """Its LoRA parameters get the trainer's own layout, so that publishing is one copy per storage."""
        model, self.sampler_scale = build(self.config, transformer_config(self.config))
        model = model.to(self.device)
        base = _flatten([p for p in model.parameters() if not p.requires_grad])
        lora = tuple(torch.zeros_like(weights) for weights in self.live.weights)
        for name, parameter in lora_parameters(model).items():
            index, offset = self._place(self.parameters[name])
            parameter.data = lora[index][offset : offset + parameter.numel()].view(parameter.shape)
            parameter.requires_grad_(False)
        return Sampler(model, base, lora, self.device)

    def _place(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """(which of `live.weights`, element offset in it) of a trainable parameter: its data is a view of that storage."""
        for index, weights in enumerate(self.live.weights):
            if parameter.data.untyped_storage()._cdata == weights.untyped_storage()._cdata:
                return index, int(parameter.data.storage_offset() - weights.storage_offset())
        raise UnknownLayout("a trainable parameter lies outside the weights' storages")

    # --- slots ----------------------------------------------------------------------------------------------------

    def create(self, adapter: str, signature: Signature) -> None:
        slot = Slot(signature, self.arena.take(self.state_bytes))
        slot.state.zero_()
        pieces = self._pieces(slot.state, self.kept)
        values: dict[torch.nn.Parameter, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            module = self.loras[name.rpartition(".lora_")[0]]
            value = initial_value(name, parameter, module, signature, self.tp_rank, self.config.tp)
            index, offset = self._place(parameter)
            pieces[index][offset : offset + value.numel()] = value.flatten()
            values[parameter] = value.to(parameter.dtype).float()  # a master is the fp32 value of the weight that the model starts with
        if self.live.masters:
            master, offset = pieces[len(self.live.weights)], 0
            for owned in self.live.masters:
                length = owned.end - owned.start
                master[offset : offset + length] = values[owned.parameter].flatten()[owned.start : owned.end]
                offset += length
        if self.config.model.dropout:
            slot.rng = torch.Generator().manual_seed(signature.seed).get_state()
        self.slots[adapter] = slot

    def drop(self, adapter: str) -> None:
        slot = self.slots.pop(adapter)
        self._drop_grads(slot)
        self.arena.give(slot.state)
        self.device_slots.pop(adapter, None)
        if self.bound is slot:
            self.bound = None

    def bind(self, adapter: str) -> None:
        slot = self.slots[adapter]
        self._copy(self._pieces(slot.state, self.kept), self.kept)
        if slot.grads is not None:
            self._copy(self._pieces(slot.grads, self.live.grads), self.live.grads)
        else:
            self.discard()
        self._bound(slot)

    def store(self, adapter: str, *, state: bool, grads: bool) -> None:
        slot = self.slots[adapter]
        self._save(slot, self.kept if state else (), self.kept, self.live.grads if grads else ())

    def set_aside(self, adapter: str) -> None:
        mine = [torch.empty_like(tensor) for tensor in (*self.kept, *self.live.grads)]
        self._exchange(mine)
        self.device_slots[adapter] = mine
        self.bound = None

    def take_up(self, adapter: str) -> None:
        self._exchange(self.device_slots.pop(adapter))
        self._bound(self.slots[adapter])

    def exchange_live(self, outgoing: str, incoming: str) -> None:
        theirs = self.device_slots.pop(incoming)
        self._exchange(theirs)
        self.device_slots[outgoing] = theirs
        self._bound(self.slots[incoming])

    def stage(self, adapter: str) -> None:
        slot = self.slots[adapter]
        mine = [torch.empty_like(tensor) for tensor in (*self.kept, *self.live.grads)]
        self._copy(self._pieces(slot.state, self.kept), mine[: len(self.kept)])
        if slot.grads is not None:
            self._copy(self._pieces(slot.grads, self.live.grads), mine[len(self.kept) :])
        else:
            for tensor in mine[len(self.kept) :]:
                tensor.zero_()
        self.device_slots[adapter] = mine

    def unstage(self, adapter: str, *, state: bool, grads: bool) -> None:
        mine = self.device_slots.pop(adapter)
        kept, gradients = mine[: len(self.kept)], mine[len(self.kept) :]
        self._save(self.slots[adapter], kept if state else (), kept, gradients if grads else ())

    def _save(self, slot: Slot, state: Any, kept: Any, grads: Any) -> None:
        if state:
            self._copy(state, self._pieces(slot.state, self.kept))
        if grads:
            if slot.grads is None:
                slot.grads = self.arena.take(self.grad_bytes)
            self._copy(grads, self._pieces(slot.grads, self.live.grads))
        else:
            self._drop_grads(slot)
        self._synchronize()

    def _drop_grads(self, slot: Slot) -> None:
        if slot.grads is not None:
            self.arena.give(slot.grads)
            slot.grads = None

    def _bound(self, slot: Slot) -> None:
        self._synchronize()
        self.bound = slot
        self.scale.value = slot.signature.alpha / slot.signature.rank

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
        for storage in self.sampler.storages():
            storage.resize_(0)

    def publish(self, adapter: str) -> None:
        slot = self.slots[adapter]
        self._copy(self._pieces(slot.state, self.kept)[: len(self.live.weights)], self.sampler.lora)
        self.sampler_scale.value = slot.signature.alpha / slot.signature.rank
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
        with torch.set_grad_enabled(backward):
            for batch in _microbatches([body.data[index] for index in mine]):
                logp, loss = self._microbatch(body, batch)
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise WorkerFailed(f"the loss is {value}")
                if backward:
                    loss.backward()
                total += value
                rows = logp.detach().float().cpu()
                parts += [_tensor(rows[i, : datum.tokens.shape[0]]) for i, datum in enumerate(batch)]
        self._keep_rng()
        return parts, total

    def _microbatch(self, body: Forward, batch: list[Datum]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities of the targets fp32 [b, T], loss scalar). Right padding: causal attention keeps it from real tokens."""
        length = max(datum.tokens.shape[0] for datum in batch)
        tokens = self._padded([datum.tokens for datum in batch], length)
        targets = self._padded([datum.inputs["target_tokens"] for datum in batch], length)
        ones = [np.ones(datum.tokens.shape[0], np.float32) for datum in batch]
        inputs: dict[str, torch.Tensor] = {
            name: self._padded([datum.inputs[name] for datum in batch], length)
            for name in ("logprobs", "advantages")
            if name in batch[0].inputs
        }
        inputs["weights"] = self._padded([d.inputs.get("weights", one) for d, one in zip(batch, ones)], length)
        positions = torch.arange(length, device=self.device).unsqueeze(0).expand_as(tokens)
        logits = self.ddp(tokens, positions, causal_mask(length, self.device))
        logp = -vocab_parallel_cross_entropy(logits.transpose(0, 1).float().contiguous(), targets.transpose(0, 1).contiguous())
        logp = logp.transpose(0, 1)
        return logp, losses.loss(body.loss_fn, logp, inputs, body.loss_config)

    def _padded(self, rows: list[Tensor | np.ndarray[Any, Any]], length: int) -> torch.Tensor:
        """[b, length], int64 or fp32, zero-padded at the right."""
        arrays = [row if isinstance(row, np.ndarray) else _array(row) for row in rows]
        out = np.zeros((len(arrays), length), np.float32 if arrays[0].dtype == np.float32 else np.int64)
        for index, array in enumerate(arrays):
            out[index, : len(array)] = array
        return torch.from_numpy(out).to(self.device)

    def discard(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optim_step(self, body: OptimStep) -> OptimStepResult:
        """Reduces the pending gradients once, clips, and applies AdamW with this request's hyper-parameters alone."""
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
        self.discard()
        step = int(self.live.steps[0]) if self.live.steps.numel() else 0
        metrics = {"grad_norm": float(norm)} if body.grad_clip_norm and norm is not None else {}
        return OptimStepResult(step, metrics, self.digest())

    def digest(self) -> str:
        """Over the bound adapter's weights, masters, moments and step on all ranks."""
        own = [shards.fingerprint(tensor) for tensor in self.kept]
        return shards.combine(self._gather_world(own))

    def sample(self, body: Sample) -> SampleResult:
        return self.sampler.sample(body)

    def _restore_rng(self) -> None:
        if self.config.model.dropout and self.bound is not None and self.bound.rng is not None:
            shards.set_rng(self.bound.rng)

    def _keep_rng(self) -> None:
        if self.config.model.dropout and self.bound is not None:
            self.bound.rng = shards.get_rng()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, adapter: str, name: str, kind: str, overwrite: bool, facts: AdapterFacts) -> SaveResult:
        tensors = self._named(adapter) if kind == "sampler_weights" else self._whole(self.slots[adapter])
        path = self.root / adapter / kind / name
        digest = self._together(lambda: shards.save(self, facts, path, kind, tensors, overwrite))
        return SaveResult(f"hotdesk://{adapter}/{kind}/{name}", digest)

    def load(self, adapter: str, source: str, name: str, optimizer: bool) -> AdapterFacts:
        return self._fill(adapter, self.root / source / "weights" / name, optimizer=optimizer, pending=False)

    def snapshot(self, adapter: str, version: int, keep: int, facts: AdapterFacts) -> None:
        path = self.root / adapter / "snapshot" / str(version)
        self._together(lambda: shards.save(self, facts, path, "snapshot", self._whole(self.slots[adapter]), True))
        if dist.get_rank() == 0:
            checkpoints.forget_snapshots(path.parent, {str(version), str(keep)})

    def restore(self, adapter: str, version: int, *, pending: bool) -> AdapterFacts:
        return self._fill(adapter, self.root / adapter / "snapshot" / str(version), optimizer=True, pending=pending)

    def _fill(self, adapter: str, path: Path, *, optimizer: bool, pending: bool) -> AdapterFacts:
        """Checkpoint to slot, all or nothing: everything is verified, on every rank, before the slot changes."""
        manifest, tensors = self._together(lambda: shards.load(self, path))
        signature = Signature(**{**manifest.signature, "targets": tuple(manifest.signature.get("targets", ()))})
        old = self.slots.get(adapter)
        if old is not None and (signature.rank, signature.targets) != (old.signature.rank, old.signature.targets):
            raise BadCheckpoint(f"checkpoint {path.name!r} has rank {signature.rank} and targets {list(signature.targets)}")
        slot = old or Slot(signature, self.arena.take(self.state_bytes))
        self.slots[adapter] = slot
        names = self._names()
        pieces = dict(zip(names, self._pieces(slot.state, self.kept), strict=True))
        for piece_name, piece in pieces.items():
            if optimizer or piece_name.startswith(("weights", "master")):
                piece.copy_(tensors[piece_name])
            else:
                piece.zero_()
        self._drop_grads(slot)
        held = int(manifest.facts["pending"]) if pending else 0
        if held:
            slot.grads = self.arena.take(self.grad_bytes)
            for index, piece in enumerate(self._pieces(slot.grads, self.live.grads)):
                piece.copy_(tensors[f"grads.{index}"])
        slot.rng = tensors.get("rng")
        step, digest = manifest.facts["optimizer_step"], manifest.facts["digest"]
        return AdapterFacts(adapter, "offloaded", held, False, step if optimizer else 0, digest if optimizer else "")

    def _names(self) -> list[str]:
        return [*(f"weights.{i}" for i in range(len(self.live.weights))), *self.live.state]

    def _whole(self, slot: Slot) -> dict[str, torch.Tensor]:
        tensors = dict(zip(self._names(), self._pieces(slot.state, self.kept), strict=True))
        if slot.grads is not None:
            tensors |= {f"grads.{i}": piece for i, piece in enumerate(self._pieces(slot.grads, self.live.grads))}
        if slot.rng is not None:
            tensors["rng"] = slot.rng
        return tensors

    def _named(self, adapter: str) -> dict[str, torch.Tensor]:
        """The adapter's weights by parameter name, this rank's tensor-parallel shard."""
        pieces = self._pieces(self.slots[adapter].state, self.kept)
        named = {}
        for name, parameter in self.parameters.items():
            index, offset = self._place(parameter)
            named[name] = pieces[index][offset : offset + parameter.numel()].view(parameter.shape)
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
        for other in self._gather_world(failure):
            if other is not None:
                raise error_from(other)
        return result

    def _gather_world(self, value: Any) -> list[Any]:
        return _all_gather(value, dist.get_world_size(), None)

    def _gather_dp(self, value: Any) -> list[Any]:
        return _all_gather(value, self.dp, parallel_state.get_data_parallel_group())

    # --- gauges ---------------------------------------------------------------------------------------------------

    def device_bytes(self) -> int:
        tensors = [self.base, *self.kept, *self.live.grads, self.sampler.base, *self.sampler.lora]
        tensors += [tensor for slot in self.device_slots.values() for tensor in slot]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def host_bytes(self) -> int:
        return self.arena.taken_bytes

    def take_moved_bytes(self) -> int:
        moved, self.moved = self.moved, 0
        return moved


def _all_gather(value: Any, size: int, group: Any) -> list[Any]:
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


def _tensor(row: torch.Tensor) -> Tensor:
    return Tensor("float32", (row.numel(),), row.contiguous().numpy().tobytes())
