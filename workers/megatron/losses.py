"""Losses over per-token log-probabilities, each a sum over tokens. All tensors are fp32 [batch, tokens].

cross_entropy         -sum(w * logp)
importance_sampling   -sum(w * A * exp(logp - old))
ppo                   -sum(w * min(A * r, A * clip(r, low, high)))          Schulman et al. 2017, r = exp(logp - old)
cispo                 -sum(w * A * stop_gradient(clip(r, low, high)) * logp)  MiniMax-M1 2025
"""

from __future__ import annotations

import torch

CLIP_LOW, CLIP_HIGH = 0.8, 1.2


def loss(name: str, logp: torch.Tensor, inputs: dict[str, torch.Tensor], config: dict[str, float]) -> torch.Tensor:
    """Scalar fp32. `inputs["weights"]` is 0 on padding and 1 where a request gave none."""
    weights = inputs["weights"]
    if name == "cross_entropy":
        return -(weights * logp).sum()
    advantages = inputs["advantages"]
    ratio = torch.exp(logp - inputs["logprobs"])
    if name == "importance_sampling":
        return -(weights * advantages * ratio).sum()
    clipped = ratio.clamp(config.get("clip_low_threshold", CLIP_LOW), config.get("clip_high_threshold", CLIP_HIGH))
    if name == "ppo":
        return -(weights * torch.minimum(advantages * ratio, advantages * clipped)).sum()
    if name == "cispo":
        return -(weights * advantages * clipped.detach() * logp).sum()
    raise ValueError(f"no loss {name!r}")
