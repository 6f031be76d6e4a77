"""Optimizer layouts: which tensors are the bound adapter's, of what kind, and where Megatron keeps them (megatron-core 0.16).

`adopt` finds them by walking `inner.param_groups` and `inner.state`, materialises the state that Adam would create at its first step
(zeros and step 0, never a dummy step), and gathers tensors of one kind into one flat storage, of which the optimizer's own tensors
become views. A switch then touches a handful of storages. A layout that is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import nn

from state.errors import UnknownLayout


class Master(NamedTuple):
    """An fp32 master: `parameter`'s flattened elements [start, end), as tensor `value`. The source of the layout facts: the classes'
    own group lists (`fp32_from_float16_groups`, `shard_fp32_from_float16_groups`)."""

    parameter: nn.Parameter
    start: int
    end: int
    value: torch.Tensor


class Live(NamedTuple):
    """Storages of the bound adapter, by kind. `weights`, `grads`: as the model and DDP use them. `state`: what only the optimizer sees.
    All are flat tensors that own their storage. `masters` is empty where the weights are fp32 themselves."""

    weights: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]
    state: dict[str, torch.Tensor]
    masters: tuple[Master, ...]
    steps: torch.Tensor


def members(optimizer: Any) -> list[Any]:
    """The Megatron optimizers that own parameters; stubs (ranks or kinds without any) are left out."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [member for member in chained if not getattr(member, "is_stub_optimizer", False) and member.optimizer is not None]


def adopt(ddp: Any, optimizer: Any) -> Live:
    """Raises `UnknownLayout`, also where the enumerated parameters are not exactly the trainable ones."""
    masters: list[Master] = []
    keys: list[tuple[dict[str, Any], torch.Tensor]] = []
    covered: set[nn.Parameter] = set()
    for member in members(optimizer):
        layout = _LAYOUTS.get(type(member))
        inner = member.optimizer
        if layout is None or not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            raise UnknownLayout(f"optimizer layout {type(member).__name__} over {type(inner).__name__}")
        for parameter, start, end, master in layout(member):
            covered.add(parameter)
            if master is not None:
                masters.append(Master(parameter, start, end, master))
        for group in inner.param_groups:
            keys.extend((_materialised(inner, key), key) for key in group["params"])
    trainable = {parameter for parameter in ddp.parameters() if parameter.requires_grad}
    owned = {p for p in trainable if _owned(members(optimizer), p)}
    if covered != owned:
        raise UnknownLayout(f"{len(covered)} parameters enumerated, {len(owned)} are trained: the layout hides some")
    weights = _weights(ddp)
    grads = tuple(buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers))
    state: dict[str, torch.Tensor] = {}
    if masters:
        state["master"] = _gather([master.value for master in masters], _rebind)
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        entries = [(entry, entry[kind]) for entry, _ in keys]
        views = iter(entries)

        def put(old: torch.Tensor, view: torch.Tensor, kind: str = kind, views: Any = views) -> None:
            next(views)[0][kind] = view

        state[kind] = _gather([tensor for _, tensor in entries], put)
    return Live(weights, grads, state, tuple(masters), state["step"])


def _materialised(inner: torch.optim.Optimizer, key: torch.Tensor) -> dict[str, Any]:
    """Adam's state for `key` as before the first step: torch creates the same zeros then (`torch.optim.adam.Adam._init_group`)."""
    entry = inner.state[key]
    if not entry:
        entry["step"] = torch.zeros((), dtype=torch.float32)
        entry["exp_avg"], entry["exp_avg_sq"] = torch.zeros_like(key), torch.zeros_like(key)
    if set(entry) != {"step", "exp_avg", "exp_avg_sq"}:
        raise UnknownLayout(f"Adam state {sorted(entry)}")
    return entry


def _plain_fp32(member: FP32Optimizer) -> Iterable[tuple[nn.Parameter, int, int, torch.Tensor | None]]:
    """FP32Optimizer: the parameter is its own master."""
    for group in member.optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, 0, parameter.numel(), None


def _plain_float16(member: Float16OptimizerWithFloat16Params) -> Iterable[tuple[nn.Parameter, int, int, torch.Tensor | None]]:
    """Float16OptimizerWithFloat16Params: full-shape masters beside the bf16 parameters; fp32 parameters master themselves."""
    for parameters, mains in zip(member.float16_groups, member.fp32_from_float16_groups):
        for parameter, main in zip(parameters, mains):
            yield parameter, 0, parameter.numel(), main
    for parameters in member.fp32_from_fp32_groups:
        for parameter in parameters:
            yield parameter, 0, parameter.numel(), None


def _distributed(member: DistributedOptimizer) -> Iterable[tuple[nn.Parameter, int, int, torch.Tensor | None]]:
    """DistributedOptimizer: each rank masters a range of each parameter it owns; fp32 shards are views of the parameter buffer."""
    if member.config.use_precision_aware_optimizer:
        raise UnknownLayout("DistributedOptimizer with use_precision_aware_optimizer")
    for parameters, mains in zip(member.model_float16_groups, member.shard_fp32_from_float16_groups):
        for parameter, main in zip(parameters, mains):
            span = member._get_model_param_range_map(parameter)["param"]
            yield parameter, span.start, span.end, main
    for parameters in member.model_fp32_groups:
        for parameter in parameters:
            span = member._get_model_param_range_map(parameter)["param"]
            yield parameter, span.start, span.end, None


_LAYOUTS: dict[type, Callable[[Any], Iterable[tuple[nn.Parameter, int, int, torch.Tensor | None]]]] = {
    FP32Optimizer: _plain_fp32,
    Float16OptimizerWithFloat16Params: _plain_float16,
    DistributedOptimizer: _distributed,
}


def _owned(optimizers: list[Any], parameter: nn.Parameter) -> bool:
    """Whether this rank masters any part of `parameter`: all of it, unless a distributed optimizer gave it to other ranks."""
    for member in optimizers:
        if isinstance(member, DistributedOptimizer):
            try:
                member._get_model_param_range_map(parameter)
            except KeyError:
                continue
            return True
        return True
    return False


def _weights(ddp: Any) -> tuple[torch.Tensor, ...]:
    """The parameter buffers of a distributed optimizer; else one flat storage that the parameters become views of."""
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    if all(buffer.param_data is not None for buffer in buffers):
        return tuple(buffer.param_data for buffer in buffers)
    return (_gather([p for p in ddp.parameters() if p.requires_grad], _rebind),)


def _rebind(tensor: torch.Tensor, view: torch.Tensor) -> None:
    tensor.data = view


def _gather(tensors: list[torch.Tensor], put: Callable[[torch.Tensor, torch.Tensor], None]) -> torch.Tensor:
    """One flat tensor with the values of `tensors` (one dtype); `put(old, view)` makes each owner use its view of it."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise UnknownLayout(f"tensors of one kind in dtypes {sorted(map(str, dtypes))}")
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    offset = 0
    for tensor in tensors:
        view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        view.copy_(tensor.detach())
        put(tensor, view)
        offset += tensor.numel()
    return flat
