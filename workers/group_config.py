"""What a worker group is built from: the `[groups.NAME]` part of the configuration, which travels to the workers as data."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

LORA_TARGETS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"}


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A megatron-core GPT, its base drawn from `seed` and frozen. Zeros stand for: `init_std` 1/sqrt(hidden_size), `head_dim`
    hidden_size/heads, `kv_heads` as many as heads."""

    name: str = "tiny-gpt"
    layers: int = 2
    hidden_size: int = 96
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    ffn_hidden_size: int = 384
    vocab_size: int = 256
    max_sequence_tokens: int = 256
    gated: bool = False
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    dropout: float = 0.0
    embedding_init_std: float = 1.0
    init_std: float = 0.0
    seed: int = 0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An inference engine that samples instead of Megatron. `model`: the base model's name there. `patience_s`: how long a call waits for
    an engine that is away or busy; `timeout_s`: for one that computes."""

    url: str
    model: str
    dialect: Literal["vllm", "sglang"] = "vllm"
    key: str = ""
    connections: int = 64
    timeout_s: float = 600.0
    patience_s: float = 120.0


class GroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker group. `targets`: modules that may carry LoRA. `device_slots`: adapters on the device at once, the live one included;
    `device_bytes`, `host_bytes`: byte budgets a rank for adapters, instead of counting them; 0 means that the counts hold.
    Switching and prefetching use two further sets of an adapter's storages on the device, beside these.
    `sample_rows`: sequences that the sampler computes side by side, 0 for 64 on a GPU and 8 on a processor; `sample_tokens`: places in its
    cache, which long sequences fill with fewer rows. `engine`: samples on the group's own devices, asleep while the group trains."""

    backend: Literal["megatron", "simulated"] = "megatron"
    tp: int = 1
    dp: int = 1
    max_rank: int = 16
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: str = "distributed"
    overlap: bool = False
    bucket_size: int = 0
    device_slots: int = 2
    host_slots: int = 64
    device_bytes: int = 0
    host_bytes: int = 0
    max_adapters: int = 1024
    sample_rows: int = 0
    sample_tokens: int = 65_536
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    threads_per_rank: int = 1
    start_timeout_s: float = 180.0
    step_timeout_s: float = 600.0
    model: ModelConfig = ModelConfig()
    engine: EngineConfig | None = None
    simulated_cost_us: dict[str, int] = {}

    def kin(self, *more: str) -> str:
        """Groups in which an adapter has the same layout and every computation the same bits. `more`: what else decides that, such as the
        device, and where snapshots are kept."""
        layout = (self.tp, self.dp, self.max_rank, self.targets, self.dtype, self.optimizer, self.overlap, self.bucket_size)
        sampling = (self.sample_rows, self.sample_tokens, self.engine is not None)
        same = (self.backend, self.model, layout, sampling, more)
        return hashlib.sha256(msgspec.json.encode(same)).hexdigest()[:12]
