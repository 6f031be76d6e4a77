"""A stand-in for TransformerEngine's FusedAdam where TransformerEngine cannot exist (no CUDA): the same keywords, the same state layout
(`exp_avg`, `exp_avg_sq`, `master_param` in configurable dtypes, `_scales`, the step as an int in each parameter group, int16 remainders),
plain torch arithmetic. It stands in for the layout, not for the kernel: bits need not equal TransformerEngine's.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

TE_VERSION = "2.9.0"  # whose FusedAdam this imitates


class FusedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) in fp32 over states kept in `exp_avg_dtype`, `exp_avg_sq_dtype` and `master_weight_dtype`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        set_grad_none: bool | None = None,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        fused: bool = True,
    ) -> None:
        if amsgrad or capturable or not adam_w_mode or not bias_correction:
            raise NotImplementedError("the stand-in for FusedAdam does AdamW with bias correction, not captured")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Zero moments; the master from the parameter's present value. No step is taken."""
        names = ["exp_avg", "exp_avg_sq", *(["master_param"] if self.master_weights else [])]
        for name in names:
            remainder = name == "master_param" and self._keeps_remainder(param)
            dtype = torch.int16 if remainder else self.name_to_dtype_map[name]
            self.state[param][name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
            if dtype in (torch.float16, torch.uint8):
                self._scales.setdefault(param, {})[name] = torch.ones(1, device=param.device)
        if self.master_weights and not self._keeps_remainder(param):
            self.set_scaled_state(param, "master_param", param.detach().float())

    def _keeps_remainder(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype is torch.bfloat16

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        stored = self.state[param][name]
        if stored.dtype is torch.int16:
            return stored
        scale = self._scales.get(param, {}).get(name)
        return stored.float() if scale is None else stored.float() * scale

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """fp16 states carry one scale per tensor, chosen so that the largest value is half of what fp16 can hold."""
        stored = self.state[param][name]
        scale = self._scales.get(param, {}).get(name)
        if scale is not None:
            largest = value.abs().max()
            scale.copy_(torch.where(largest > 0, largest / (torch.finfo(torch.float16).max / 2), torch.ones_like(largest)))
            value = value / scale
        stored.copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    if not self.state[param]:
                        self.initialize_state(param)
                    self._update(param, grad.detach().float(), group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        exp_avg = self.get_unscaled_state(param, "exp_avg").mul(beta1).add(grad, alpha=1 - beta1)
        exp_avg_sq = self.get_unscaled_state(param, "exp_avg_sq").mul(beta2).addcmul(grad, grad, value=1 - beta2)
        master = self._master(param)
        direction = (exp_avg / (1 - beta1 ** group["step"])) / ((exp_avg_sq / (1 - beta2 ** group["step"])).sqrt() + group["eps"])
        master = master - group["lr"] * (direction + group["weight_decay"] * master)
        self.set_scaled_state(param, "exp_avg", exp_avg)
        self.set_scaled_state(param, "exp_avg_sq", exp_avg_sq)
        if self._keeps_remainder(param):
            high, low = split(master)
            param.data.copy_(high)
            self.state[param]["master_param"].copy_(low)
            return
        if self.master_weights:
            self.set_scaled_state(param, "master_param", master)
        param.data.copy_(master)

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        if self._keeps_remainder(param):
            return join(param.detach(), self.state[param]["master_param"])
        return self.get_unscaled_state(param, "master_param") if self.master_weights else param.detach().float()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None
                if self.use_decoupled_grad:
                    param.decoupled_grad = None


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 as (bf16 rounded half up on its bits, int16 difference of the low halves): `join` gives back every bit."""
    bits = master.contiguous().view(torch.int32)
    low = (bits << 16) >> 16  # the low half, sign-extended
    high = (bits - low) >> 16
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return ((high.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Megatron's optimizer modules find this class where they look for TransformerEngine's, while an optimizer is being built. The
    flags of the distributed optimizer stay set: it reads them again when its state is saved or loaded."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.utils as utils
    from packaging.version import Version

    package, torch_part, module = (types.ModuleType(name) for name in _MODULES)
    package.__path__ = torch_part.__path__ = []
    package.__version__ = TE_VERSION  # type: ignore[attr-defined]
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in _MODULES}
    kept = utils._te_version, optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER
    sys.modules.update(zip(_MODULES, (package, torch_part, module)))
    utils._te_version = Version(TE_VERSION)
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_TE_OPTIMIZER = FusedAdam, True, True
    try:
        yield
    finally:
        utils._te_version, optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = kept
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


_MODULES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
