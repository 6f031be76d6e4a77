"""Optimizers by name: what `groups.*.optimizer` may say, and how each is built with megatron-core."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from state.errors import UnknownLayout
from workers.group_config import GroupConfig
from workers.megatron import cpu, fused_adam
from workers.megatron.model import DTYPES


class Recipe(NamedTuple):
    """`fused`: wants TransformerEngine's FusedAdam. `bf16`: exists for bfloat16 models only."""

    options: dict[str, Any] = {}  # noqa: RUF012  a default of an immutable tuple, never written to
    distributed: bool = True
    fused: bool = False
    bf16: bool = False


_AWARE = {"use_precision_aware_optimizer": True}
_OFFLOAD = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": False}


def _offload(percent: int, aware: bool) -> Recipe:
    return Recipe({**_OFFLOAD, "optimizer_offload_fraction": percent / 100, **(_AWARE if aware else {})}, fused=aware, bf16=True)


RECIPES: dict[str, Recipe] = {
    "plain": Recipe(distributed=False),
    "distributed": Recipe(),
    "plain_fused": Recipe(distributed=False, fused=True),
    "distributed_fused": Recipe(fused=True),
    "precision_aware": Recipe({**_AWARE, "store_param_remainders": False}, fused=True, bf16=True),
    "precision_aware_remainders": Recipe(dict(_AWARE), fused=True, bf16=True),
    "precision_aware_bf16_moments": Recipe(
        {**_AWARE, "store_param_remainders": False, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
        fused=True,
        bf16=True,
    ),
    "precision_aware_fp16_moments": Recipe(
        {**_AWARE, "store_param_remainders": False, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        fused=True,
        bf16=True,
    ),
    **{f"offload_{percent}": _offload(percent, aware=False) for percent in (0, 50, 100)},
    **{f"precision_aware_offload_{percent}": _offload(percent, aware=True) for percent in (0, 50, 100)},
}


def recipe(config: GroupConfig) -> Recipe:
    """Raises `UnknownLayout` with the name."""
    found = RECIPES.get(config.optimizer)
    if found is None:
        raise UnknownLayout(f"optimizer {config.optimizer!r} is none of {sorted(RECIPES)}")
    if found.bf16 and config.dtype != "bfloat16":
        raise UnknownLayout(f"optimizer {config.optimizer!r} keeps masters beside bfloat16 weights; dtype is {config.dtype}")
    return found


def build(config: GroupConfig, ddp: Any) -> Any:
    """Megatron's optimizer over the trainable parameters of `ddp`, with every hyper-parameter at zero: each `optim_step` brings its own."""
    chosen = recipe(config)
    options = OptimizerConfig.__dataclass_fields__
    with contextlib.ExitStack() as stack:
        if chosen.fused and not _have_transformer_engine():
            stack.enter_context(fused_adam.standing_in())
        elif chosen.options.get("optimizer_cpu_offload"):
            stack.enter_context(cpu.some_transformer_engine_version())
        if chosen.options.get("optimizer_cpu_offload"):
            cpu.hybrid_device_optimizer()
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.0,
                min_lr=0.0,
                weight_decay=0.0,
                clip_grad=0.0,
                bf16=config.dtype == "bfloat16",
                params_dtype=DTYPES[config.dtype],
                use_distributed_optimizer=chosen.distributed,
                **{name: value for name, value in chosen.options.items() if name in options},
            ),
            [ddp],
        )


def _have_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch.optimizers  # noqa: F401
    except ImportError:
        return False
    return True
