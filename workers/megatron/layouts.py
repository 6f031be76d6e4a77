"""Optimizer layouts: which tensors are the bound adapter's, of what kind, and where Megatron keeps them (megatron-core 0.16).

`adopt` finds them by walking each optimizer's parameter groups and state, materialises the state that Adam would create at its first step
(zero moments, no step; never a dummy step), and gathers tensors of one kind into one flat storage, of which the optimizer's own tensors
become views. A switch then touches a handful of storages. The enumerated set must equal the trainable set; a layout that is not known here
is refused by name.

    layout                              fp32 master                                   step
    FP32Optimizer                       the parameter                                 tensor per parameter, or int per group (FusedAdam)
    Float16OptimizerWithFloat16Params   fp32_from_float16_groups                      the same
    DistributedOptimizer fp32           the parameter's shard                         the same
    DistributedOptimizer bf16           shard_fp32_from_float16_groups                the same
      precision-aware                   state[shard]["master_param"], fp32            int per group
      with remainders                   bf16 weight + int16 state["master_param"]     int per group
    HybridDeviceOptimizer               the sub-optimizer's own parameter;            as its sub-optimizers keep it
                                        without precision-aware the device's shard too
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import nn

from state.errors import UnknownLayout


class Owned(NamedTuple):
    """What one optimizer masters of `parameter`: its flattened elements [start, end), under the optimizer's key `key` (in `param_groups`).
    `main`: the fp32 master that the Megatron optimizer keeps beside the key, where it does."""

    parameter: nn.Parameter
    start: int
    end: int
    key: torch.Tensor
    main: torch.Tensor | None


class Run(NamedTuple):
    """`length` elements at `offset` of weights storage `storage`, held at `flat` of the master storage."""

    storage: int
    offset: int
    length: int
    flat: int


class Master(NamedTuple):
    """Where a parameter's master lies: its elements [start, end) at `flat` of the storage `kind`."""

    parameter: nn.Parameter
    start: int
    end: int
    kind: str
    flat: int


class Live(NamedTuple):
    """Storages of the bound adapter, by kind, as flat tensors that own their storage. `weights`, `grads`: as the model and DDP use them.
    `state`: what only the optimizer sees. `runs`: where weights are exactly the cast of `state["master"]`, how the two correspond; empty
    where weights must be kept themselves."""

    weights: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]
    state: dict[str, torch.Tensor]
    masters: tuple[Master, ...]
    runs: tuple[Run, ...]


def members(optimizer: Any) -> list[Any]:
    """The Megatron optimizers that own parameters; stubs (ranks or kinds without any) are left out."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [member for member in chained if not getattr(member, "is_stub_optimizer", False) and member.optimizer is not None]


def workers(member: Any) -> list[torch.optim.Optimizer]:
    """The torch-like optimizers that really step: the inner one, or a hybrid's sub-optimizers."""
    inner = member.optimizer
    return list(inner.sub_optimizers) if isinstance(inner, HybridDeviceOptimizer) else [inner]


def group_steps(optimizer: Any) -> tuple[int | None, ...]:
    """The int steps of FusedAdam's parameter groups, None where absent: an adapter that never stepped has none."""
    return tuple(group.get("step") for member in members(optimizer) for worker in workers(member) for group in worker.param_groups)


def set_group_steps(optimizer: Any, steps: tuple[int | None, ...]) -> None:
    values = iter(steps)
    for member in members(optimizer):
        for worker in workers(member):
            for group in worker.param_groups:
                step = next(values)
                if step is None:
                    group.pop("step", None)
                else:
                    group["step"] = step
        for group in member.optimizer.param_groups if isinstance(member.optimizer, HybridDeviceOptimizer) else ():
            group.pop("step", None)  # a hybrid would copy a step left here over its sub-optimizers'


def adopt(ddp: Any, optimizer: Any) -> Live:
    """Raises `UnknownLayout`, also where the enumerated parameters are not exactly the trainable ones."""
    owned = [(member, one) for member in members(optimizer) for one in _owned(member)]
    _check_complete(ddp, [one for _, one in owned], members(optimizer))
    weights = _weights(ddp)
    grads = tuple(buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers))
    places = _Places(ddp, weights, any(isinstance(member, DistributedOptimizer) for member in members(optimizer)))
    state: dict[str, torch.Tensor] = {}
    masters: list[Master] = []
    entries = [_entry(member, one) for member, one in owned]
    for kind, slots in _by_kind((one, entry.masters) for (_, one), entry in zip(owned, entries)).items():
        found = [Master(one.parameter, one.start, one.end, kind, places.flat_of(one)) for one, _ in slots]
        state[kind] = _gather_at([slot for _, slot in slots], [master.flat for master in found], places.flat_numel)
        masters += found
    for kind, slots in _by_kind((one, entry.rest) for (_, one), entry in zip(owned, entries)).items():
        state[kind] = _gather([slot for _, slot in slots])
    for member in members(optimizer):
        if isinstance(member.optimizer, HybridDeviceOptimizer):
            member.optimizer._sync_sub_optimizers_state_to_hdo()
    whole = len([master for master in masters if master.kind == "master"]) == len(owned)
    exact = whole and state["master"].dtype is torch.float32 and all(tensor.dtype is not torch.float32 for tensor in weights)
    return Live(weights, grads, state, tuple(masters), places.runs if exact else ())


def _by_kind(found: Iterable[tuple[Owned, dict[str, _Slot]]]) -> dict[str, list[tuple[Owned, _Slot]]]:
    """Slots by kind; those of one kind that lie on the host while others lie on the device are a kind of their own."""
    everything = [(kind, one, slot) for one, slots in found for kind, slot in slots.items()]
    devices = {kind: {slot.tensor.device for k, _, slot in everything if k == kind} for kind in {kind for kind, _, _ in everything}}
    grouped: dict[str, list[tuple[Owned, _Slot]]] = {}
    for kind, one, slot in everything:
        name = f"{kind}.host" if len(devices[kind]) > 1 and slot.tensor.device.type == "cpu" else kind
        grouped.setdefault(name, []).append((one, slot))
    return dict(sorted(grouped.items(), key=lambda item: (not item[0].startswith("master"), item[0])))


# --- what one optimizer owns, by layout ---------------------------------------------------------------------------------


def _plain_fp32(member: FP32Optimizer) -> Iterator[Owned]:
    for group in member.optimizer.param_groups:
        for parameter in group["params"]:
            yield Owned(parameter, 0, parameter.numel(), parameter, None)


def _plain_float16(member: Float16OptimizerWithFloat16Params) -> Iterator[Owned]:
    for parameters, mains in zip(member.float16_groups, member.fp32_from_float16_groups):
        for parameter, main in zip(parameters, mains):
            yield Owned(parameter, 0, parameter.numel(), main, main)
    for parameters in member.fp32_from_fp32_groups:
        for parameter in parameters:
            yield Owned(parameter, 0, parameter.numel(), parameter, None)


def _distributed(member: DistributedOptimizer) -> Iterator[Owned]:
    """Each rank masters a range of each parameter it owns. Precision-aware, the bf16 shard itself is the key and no main is kept."""
    mains = member.shard_fp32_from_float16_groups
    for parameters, shards, masters in zip(member.model_float16_groups, member.shard_float16_groups, mains):
        for parameter, shard, main in zip(parameters, shards, masters):
            span = member._get_model_param_range_map(parameter)["param"]
            yield Owned(parameter, span.start, span.end, shard if main is None else main, main)
    for parameters, shards in zip(member.model_fp32_groups, member.shard_fp32_groups):
        for parameter, shard in zip(parameters, shards):
            span = member._get_model_param_range_map(parameter)["param"]
            yield Owned(parameter, span.start, span.end, shard, None)


_LAYOUTS: dict[type, Callable[[Any], Iterator[Owned]]] = {
    FP32Optimizer: _plain_fp32,
    Float16OptimizerWithFloat16Params: _plain_float16,
    DistributedOptimizer: _distributed,
}


def _owned(member: Any) -> Iterator[Owned]:
    layout = _LAYOUTS.get(type(member))
    if layout is None:
        raise UnknownLayout(f"optimizer layout {type(member).__name__}")
    return layout(member)


def _check_complete(ddp: Any, owned: list[Owned], optimizers: list[Any]) -> None:
    """The enumerated keys are the optimizers' keys, and their parameters the trainable ones (those of this rank, where sharded)."""
    keys = {id(key) for member in optimizers for group in member.optimizer.param_groups for key in group["params"]}
    if keys != {id(one.key) for one in owned}:
        raise UnknownLayout(f"{len(owned)} keys enumerated, the optimizers hold {len(keys)}: the layout hides some")
    trainable = {parameter for parameter in ddp.parameters() if parameter.requires_grad}
    covered = {one.parameter for one in owned}
    sharded = parallel_state.get_data_parallel_world_size() > 1 and any(isinstance(m, DistributedOptimizer) for m in optimizers)
    if not covered <= trainable or (not sharded and covered != trainable):
        raise UnknownLayout(f"{len(covered)} parameters enumerated, {len(trainable)} are trainable")


# --- one parameter's optimizer state ------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """A tensor and how its owner is made to use another one in its place."""

    tensor: torch.Tensor
    put: Callable[[torch.Tensor], None]


class _Entry(NamedTuple):
    """`masters`: kind -> slot, "master" and, where a layout keeps it twice, "master_copy"."""

    masters: dict[str, _Slot]
    rest: dict[str, _Slot]


def _entry(member: Any, one: Owned) -> _Entry:
    inner = member.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        return _hybrid_entry(inner, one)
    state = _materialised(inner, one.key)
    rest = {kind: _in_dict(state, kind) for kind in state if kind != "master_param"}
    for kind, scale in getattr(inner, "_scales", {}).get(one.key, {}).items():
        rest[f"scale_{kind}"] = _Slot(scale, _setter(inner._scales[one.key], kind))
    if "master_param" in state:
        return _Entry({"master": _in_dict(state, "master_param")}, rest)
    return _Entry({"master": _as_data(one.main)} if one.main is not None else {}, rest)


def _hybrid_entry(hybrid: HybridDeviceOptimizer, one: Owned) -> _Entry:
    """The sub-optimizer's own parameter is the master it steps; it is `hybrid.state[key]["master_param"]` too, by identity. Where
    the key is the device's fp32 shard (not precision-aware) and was offloaded, that shard is a second copy of the same master."""
    stepped = hybrid.param_to_inner_param[one.key]
    worker = next(w for w in hybrid.sub_optimizers if any(p is stepped for g in w.param_groups for p in g["params"]))
    state = _materialised(worker, stepped)
    rest = {kind: _in_dict(state, kind) for kind in state if kind != "master_param"}
    if one.main is not None and stepped is not one.key:
        return _Entry({"master": _as_data(one.main), "master_copy": _as_data(stepped)}, rest)
    return _Entry({"master": _as_data(stepped)}, rest)


def _materialised(inner: torch.optim.Optimizer, key: torch.Tensor) -> dict[str, Any]:
    """The state that the first step would create (`torch.optim.adam.Adam._init_group`, `FusedAdam.initialize_state`)."""
    state = inner.state[key]
    if not state:
        initialize = getattr(inner, "initialize_state", None)
        if initialize is not None:
            wants = "store_param_remainders" in inspect.signature(initialize).parameters
            initialize(key, *([getattr(inner, "store_param_remainders", False)] if wants else []))
        elif isinstance(inner, torch.optim.Adam):
            group = next(group for group in inner.param_groups if any(one is key for one in group["params"]))
            on_device = group.get("capturable") or group.get("fused")
            state["step"] = torch.zeros((), dtype=torch.float32, device=key.device if on_device else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(key), torch.zeros_like(key)
    state = inner.state[key]
    if set(state) - {"step", "master_param"} != {"exp_avg", "exp_avg_sq"}:
        raise UnknownLayout(f"{type(inner).__name__} with state {sorted(state)}")
    return state


def _setter(owner: dict[str, Any], kind: str) -> Callable[[torch.Tensor], None]:
    def put(view: torch.Tensor) -> None:
        owner[kind] = view

    return put


def _in_dict(state: dict[str, Any], kind: str) -> _Slot:
    return _Slot(state[kind], _setter(state, kind))


def _as_data(tensor: torch.Tensor) -> _Slot:
    """A tensor whose identity is a key somewhere: it stays, and its data becomes the view."""

    def put(view: torch.Tensor) -> None:
        tensor.data = view

    return _Slot(tensor, put)


# --- storages -------------------------------------------------------------------------------------------------------------


class _Places:
    """Where masters lie in the flat master storage: bucket after bucket, each this rank's shard of it, padding included, so that
    weights and masters correspond in one run a bucket."""

    def __init__(self, ddp: Any, weights: tuple[torch.Tensor, ...], sharded: bool) -> None:
        self.weights = weights
        size = parallel_state.get_data_parallel_world_size() if sharded else 1
        rank = parallel_state.get_data_parallel_rank() if sharded else 0
        runs: list[Run] = []
        self.flat_numel = 0
        for index, tensor in enumerate(weights):
            buckets = [(0, tensor.numel())]
            if sharded:
                buffer = (*ddp.buffers, *ddp.expert_parallel_buffers)[index]
                buckets = [(bucket.offset, bucket.grad_data.numel()) for bucket in buffer.buckets]
            for offset, numel in buckets:
                length = numel // size
                runs.append(Run(index, offset + rank * length, length, self.flat_numel))
                self.flat_numel += length
        self.runs = tuple(runs)

    def flat_of(self, one: Owned) -> int:
        index, offset = place(one.parameter, self.weights)
        first = offset + one.start
        for run in self.runs:
            if run.storage == index and run.offset <= first and first + one.end - one.start <= run.offset + run.length:
                return run.flat + first - run.offset
        raise UnknownLayout("a master lies outside this rank's shards of the weights")


def place(parameter: nn.Parameter, weights: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """(which of `weights`, element offset in it) of a trainable parameter: its data is a view of that storage."""
    for index, tensor in enumerate(weights):
        if parameter.data.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            return index, int(parameter.data.storage_offset() - tensor.storage_offset())
    raise UnknownLayout("a trainable parameter lies outside the weights' storages")


def _weights(ddp: Any) -> tuple[torch.Tensor, ...]:
    """The parameter buffers of a distributed optimizer; else one flat storage that the parameters become views of."""
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    if all(buffer.param_data is not None for buffer in buffers):
        return tuple(buffer.param_data for buffer in buffers)
    return (_gather([_as_data(parameter) for parameter in ddp.parameters() if parameter.requires_grad]),)


def _gather(slots: list[_Slot]) -> torch.Tensor:
    """One flat tensor with the values of tensors of one kind; each owner then uses its view of it."""
    offsets, numel = [], 0
    for slot in slots:
        offsets.append(numel)
        numel += slot.tensor.numel()
    return _gather_at(slots, offsets, numel)


def _gather_at(slots: list[_Slot], offsets: list[int], numel: int) -> torch.Tensor:
    dtypes = {(slot.tensor.dtype, slot.tensor.device) for slot in slots}
    if len(dtypes) != 1:
        raise UnknownLayout(f"tensors of one kind in {sorted(map(str, dtypes))}")
    ((dtype, device),) = dtypes
    flat = torch.zeros(numel, dtype=dtype, device=device)
    for slot, offset in zip(slots, offsets):
        view = flat[offset : offset + slot.tensor.numel()].view(slot.tensor.shape)
        view.copy_(slot.tensor.detach())
        slot.put(view)
    return flat
