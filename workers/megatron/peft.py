"""The sampler's copy of an adapter in the form that HF PEFT and the engines that follow it (vLLM, SGLang) load: `adapter_config.json` and
`adapter_model.safetensors`, named as for the Llama and Qwen families.

Megatron fuses what those families keep apart; the fused low-rank update splits by rows of B, with A repeated:
    linear_qkv   rows come in query groups: the group's query heads, then its key head, then its value head
    linear_fc1   gated: gate rows, then up rows, in each tensor-parallel shard
"""

from __future__ import annotations

import json
import re

import torch
from safetensors.torch import save as to_bytes

from state.requests import Signature
from workers.group_config import GroupConfig

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:self_attention|mlp)\.(\w+)$")


def files(per_rank: list[dict[str, torch.Tensor]], config: GroupConfig, signature: Signature, rows: set[str]) -> dict[str, bytes]:
    """`per_rank`: LoRA weights by Megatron's parameter name, a dict a tensor-parallel rank. `rows`: modules around a row-parallel base."""
    tensors: dict[str, torch.Tensor] = {}
    modules: list[str] = []
    for name in sorted({name.rpartition(".lora_")[0] for name in per_rank[0]}):
        target = name.rpartition(".")[2]
        if signature.targets and target not in signature.targets:
            continue
        a = torch.cat([rank[f"{name}.lora_a.weight"] for rank in per_rank], dim=1 if name in rows else 0)[: signature.rank]
        b = _whole_b([rank[f"{name}.lora_b.weight"] for rank in per_rank], target, config)[:, : signature.rank]
        for module, part in split(target, b, config).items():
            modules.append(module)
            path = _path(name, module)
            tensors[f"{path}.lora_A.weight"] = a.clone().contiguous()
            tensors[f"{path}.lora_B.weight"] = part.clone().contiguous()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.name,
        "r": signature.rank,
        "lora_alpha": signature.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(set(modules)),
    }
    return {"adapter_config.json": json.dumps(settings, indent=2).encode(), "adapter_model.safetensors": to_bytes(tensors)}


def _whole_b(shards: list[torch.Tensor], target: str, config: GroupConfig) -> torch.Tensor:
    if target == "linear_fc1" and config.model.gated:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
    return torch.cat(shards)


def split(target: str, b: torch.Tensor, config: GroupConfig) -> dict[str, torch.Tensor]:
    """B [out, r] of a fused linear as the parts that HF keeps apart, by module name."""
    model = config.model
    if target == "linear_qkv":
        groups = model.kv_heads or model.heads
        width = model.head_dim or model.hidden_size // model.heads
        per_group = b.view(groups, (model.heads // groups + 2) * width, b.shape[1])
        query, key, value = per_group.split([model.heads // groups * width, width, width], dim=1)
        return {name: part.reshape(-1, b.shape[1]) for name, part in (("q_proj", query), ("k_proj", key), ("v_proj", value))}
    if target == "linear_fc1" and model.gated:
        gate, up = b.chunk(2)
        return {"gate_proj": gate, "up_proj": up}
    return {{"linear_proj": "o_proj", "linear_fc1": "up_proj", "linear_fc2": "down_proj", "output_layer": "lm_head"}[target]: b}


def _path(name: str, module: str) -> str:
    if module == "lm_head":
        return "base_model.model.lm_head"
    found = _LAYER.search(name)
    assert found is not None, name
    block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"base_model.model.model.layers.{found.group(1)}.{block}.{module}"
