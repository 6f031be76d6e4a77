"""A Megatron rank in this process (world of one), and small groups for the tests."""

from __future__ import annotations

import tempfile
from typing import Any

from workers.group_config import GroupConfig, ModelConfig

SMALL = ModelConfig(name="test-gpt", layers=2, hidden_size=32, heads=4, ffn_hidden_size=64, vocab_size=64, max_sequence_tokens=64)


def group(**options: Any) -> GroupConfig:
    return GroupConfig(**{"max_rank": 8, "model": SMALL, "host_slots": 48, "device_slots": 3, **options})


def rank(config: GroupConfig, root: str | None = None) -> Any:
    from workers.megatron.rank import Rank, free_port

    return Rank(config, 0, "127.0.0.1", free_port(), root or tempfile.mkdtemp(prefix="hd-"))


#: Every optimizer of `workers.megatron.optimizers.RECIPES`, by name, so that collecting the tests does not import torch.
RECIPE_NAMES = (
    "plain",
    "distributed",
    "plain_fused",
    "distributed_fused",
    "precision_aware",
    "precision_aware_remainders",
    "precision_aware_bf16_moments",
    "precision_aware_fp16_moments",
    "offload_0",
    "offload_50",
    "offload_100",
    "precision_aware_offload_0",
    "precision_aware_offload_50",
    "precision_aware_offload_100",
)
