"""Stand-ins that let megatron-core 0.16 run on a machine without CUDA. Each is named after the call that it answers, and none is
installed where CUDA works. They change where tensors live, never what is computed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

HOST = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange", "zeros_like", "empty_like", "ones_like", "full_like")


def _names_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and str(device).startswith("cuda")


def current_device() -> None:
    """Megatron asks for `torch.cuda.current_device()` wherever it allocates."""
    torch.cuda.current_device = lambda: HOST  # type: ignore[assignment,return-value]


def factories() -> None:
    """Literals `device="cuda"` and `pin_memory=True` in the optimizer, clipping and buffers."""

    def on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def call(*args: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            if _names_cuda(options.get("device")):
                options["device"] = HOST
            return factory(*args, **options)

        return call

    for name in _FACTORIES:
        setattr(torch, name, on_host(getattr(torch, name)))


def tensor_methods() -> None:
    """`.type()` is compared with "torch.cuda.FloatTensor"; `.cuda()` is called on host tensors; `.pin_memory()` must copy, because
    `.cpu()` is an alias on the host and an offload would then free what it saved."""
    plain_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return plain_type(self, dtype, *args, **options)

    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *args, **options: self.detach().clone()  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]


def compiler() -> None:
    """megatron-core decorates its fused functions with `torch.compile` when it is imported, and loading the compiler is a third of a rank's
    start. None of them is used: every fusion is off (`model.transformer_config`)."""
    compile_, torch.compile = torch.compile, lambda function, **options: function  # type: ignore[assignment]
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = compile_


def random_states() -> None:
    """The CUDA RNG tracker on the host generator."""
    import megatron.core.tensor_parallel.random as tracker

    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None  # type: ignore[assignment,misc,return-value]
    tracker._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(tracker.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def streams() -> None:
    """Streams, events and synchronisation: the host runs everything in order already."""

    class Ordered:
        cuda_stream = 0

        def __init__(self, *args: Any, **options: Any) -> None: ...
        def record(self, *args: Any) -> None: ...
        def wait(self, *args: Any) -> None: ...
        def synchronize(self) -> None: ...
        def wait_stream(self, other: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def record_event(self, event: Any = None) -> Any:
            return Ordered()

        def query(self) -> bool:
            return True

    only = Ordered()
    torch.cuda.Stream = torch.cuda.Event = Ordered  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **options: only  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **options: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: 0  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


_installed = False


def install() -> bool:
    """Whether the stand-ins are in place. Does nothing, and says False, where CUDA works."""
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        for shim in (current_device, factories, tensor_methods, compiler, random_states, streams):
            shim()
        _installed = True
    return True


@contextlib.contextmanager
def some_transformer_engine_version() -> Iterator[None]:
    """megatron-core compares TransformerEngine's version while it builds an offloaded optimizer, also where there is none."""
    import megatron.core.utils as utils
    from packaging.version import Version

    kept = utils._te_version
    if kept is None:
        utils._te_version = Version("2.9.0")
    try:
        yield
    finally:
        utils._te_version = kept


def hybrid_device_optimizer() -> None:
    """`HybridDeviceOptimizer` splits parameters by `is_cuda`. On the host every parameter counts as the device's until the offload
    fraction is reached; what is offloaded gets a copy, as on a GPU. Nothing is changed where CUDA works."""
    if not _installed:
        return
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def split(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        total = sum(param.numel() for group in self.param_groups for param in group["params"])
        offloaded = 0
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        copies: dict[Any, Any] = {}
        masters: dict[Any, Any] = {}
        for group in self.param_groups:
            parts: dict[bool, list[Any]] = {True: [], False: []}
            for param in group["params"]:
                inner, on_host = param, offloaded < total * offload_fraction
                if on_host:
                    inner = inner.detach().clone()
                    offloaded += param.numel()
                if self.param_update_in_fp32 and param.dtype != torch.float32:
                    inner = masters[param] = inner.detach().clone().float()
                if on_host:
                    copies[param] = inner
                parts[on_host].append(inner)
            for on_host, params in parts.items():
                if params:
                    groups[on_host].append({**group, "params": params})
        return groups[True], groups[False], copies, {copy: param for param, copy in copies.items()}, masters

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = split
