"""The model: megatron-core's GPT with a frozen base and LoRA on chosen linears.

Every adapter of a group is padded to the group's largest rank. Padding is exact: a zero row of A against a zero column of B has a zero
gradient for ever. A module outside an adapter's targets has A and B zero. What differs between adapters is therefore only bytes, and the
scale alpha/rank, which the bound adapter sets on `LoraScale`.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import nn

from state.requests import Signature
from workers.group_config import GroupConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoraScale:
    """alpha/rank of the bound adapter, shared by all LoRA modules of one model."""

    def __init__(self) -> None:
        self.value = 1.0


class LoraLinear(nn.Module):
    """`base(x) + scale * B(A(x))` around a Megatron parallel linear.

    Shapes (full): A [max_rank, in], B [out, max_rank]. Around a column-parallel base, A is sharded by its rank and gathered, B by its
    output like the base; around a row-parallel base, A is sharded by its input and reduced, B by its output and gathered.
    """

    def __init__(self, base: nn.Module, max_rank: int, scale: LoraScale) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.row = isinstance(base, RowParallelLinear)
        config = base.config
        keep = {"config": config, "init_method": nn.init.zeros_, "bias": False}
        if self.row:
            self.lora_a = RowParallelLinear(base.input_size, max_rank, input_is_parallel=True, skip_bias_add=True, **keep)
        else:
            self.lora_a = ColumnParallelLinear(base.input_size, max_rank, gather_output=True, **keep)
        self.lora_b = ColumnParallelLinear(max_rank, base.output_size, gather_output=self.row, **keep)

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, bias = self.base(x, *args, **options)
        low, _ = self.lora_a(x)
        delta, _ = self.lora_b(low)
        if options.get("runtime_gather_output"):
            delta = gather_from_tensor_model_parallel_region(delta)
        return out + delta * self.scale.value, bias


def transformer_config(group: GroupConfig) -> TransformerConfig:
    model, dtype = group.model, DTYPES[group.dtype]
    std = model.init_std or 1 / math.sqrt(model.hidden_size)
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads or None,
        kv_channels=model.head_dim or None,
        ffn_hidden_size=model.ffn_hidden_size,
        gated_linear_unit=model.gated,
        activation_func=nn.functional.silu if model.gated else nn.functional.gelu,
        normalization=model.normalization,
        attention_dropout=model.dropout,
        hidden_dropout=model.dropout,
        init_method_std=std,
        embedding_init_method_std=model.embedding_init_std,
        tensor_model_parallel_size=group.tp,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,  # gradients are sums over tokens: DDP must not average them over ranks
        deterministic_mode=False,
    )


def build(group: GroupConfig, config: TransformerConfig) -> tuple[GPTModel, LoraScale]:
    """The model, drawn from the group's seed, base frozen, LoRA weights zero. Every rank draws the full tensors and keeps its shard."""
    torch.manual_seed(group.model.seed)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=group.model.normalization),
        vocab_size=group.model.vocab_size,
        max_sequence_length=group.model.max_sequence_tokens,
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=False,
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    scale = LoraScale()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in group.targets and isinstance(child, ColumnParallelLinear | RowParallelLinear):
                setattr(module, name, LoraLinear(child, group.max_rank, scale))
    return model.to(DTYPES[group.dtype]), scale


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def initial_value(
    name: str, parameter: nn.Parameter, module: LoraLinear, signature: Signature, tp_rank: int, tp: int, device: torch.device
) -> torch.Tensor:
    """fp32 value of one LoRA parameter's shard for a new adapter: A gaussian with std 1/sqrt(in), B zero (Hu et al. 2021), drawn at the
    adapter's own rank from (seed, name), so that it depends neither on the group's largest rank nor on other adapters."""
    is_a = ".lora_a." in name
    base: Any = module.base
    max_rank = int(module.lora_b.input_size)
    full = torch.zeros((max_rank, int(base.input_size)) if is_a else (int(base.output_size), max_rank), device=device)
    target = name.split(".lora_")[0].rpartition(".")[2]
    if is_a and (not signature.targets or target in signature.targets):
        seed = int.from_bytes(hashlib.sha256(f"{signature.seed}/{name}".encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(device).manual_seed(seed)
        full[: signature.rank] = torch.randn(signature.rank, full.shape[1], generator=generator, device=device) / math.sqrt(full.shape[1])
    dimension = 1 if is_a and module.row else 0
    shard = full.chunk(tp, dim=dimension)[tp_rank]
    assert shard.shape == parameter.shape, (name, shard.shape, parameter.shape)
    return shard
