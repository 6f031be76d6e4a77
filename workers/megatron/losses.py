"""Losses over per-token log-probabilities, each a sum over tokens. All tensors are fp32 [batch, tokens]; of cross_entropy also
[batch, tokens, targets], where a token has several.

cross_entropy         -sum(w * logp)
importance_sampling   -sum(w * A * r)                                       r = exp(logp - old)
ppo                   -sum(w * min(A * r, A * clip(r, low, high)))          Schulman et al. 2017
cispo                 -sum(w * A * stop_gradient(clip(r, low, high)) * logp)  MiniMax-M1 2025
gspo                  ppo with s instead of r: the value exp(mean of logp - old over the sequence) and each token's own gradient
                      (GSPO-token, Zheng et al. 2025)
dro                   -sum(w * (A * logp - beta / 2 * (logp - old)^2))      Richemond et al. 2024
"""

from __future__ import annotations

from collections.abc import Callable

import torch

CLIP_LOW, CLIP_HIGH, BETA = 0.8, 1.2, 0.05
Inputs = dict[str, torch.Tensor]
Config = dict[str, float]


def loss(name: str, logp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Scalar fp32. `inputs["weights"]` is 0 on padding and 1 where a request gave none; `inputs["sequence_ratio_mask"]` equals it where a
    request gave none."""
    return -(inputs["weights"] * _OBJECTIVES[name](logp, inputs, config)).sum()


def _ratio(logp: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(logp - inputs["logprobs"])


def _sequence_ratio(logp: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The mean is over the tokens that `sequence_ratio_mask` marks."""
    marked = inputs["sequence_ratio_mask"] != 0
    fixed = logp.detach()
    mean = torch.where(marked, fixed - inputs["logprobs"], 0.0).sum(-1, keepdim=True) / marked.sum(-1, keepdim=True).clamp(min=1)
    return torch.exp(mean + logp - fixed)


def _clipped(ratio: torch.Tensor, config: Config) -> torch.Tensor:
    return ratio.clamp(config.get("clip_low_threshold", CLIP_LOW), config.get("clip_high_threshold", CLIP_HIGH))


def _ppo(ratio: Callable[[torch.Tensor, Inputs], torch.Tensor]) -> Callable[[torch.Tensor, Inputs, Config], torch.Tensor]:
    def objective(logp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
        of, advantages = ratio(logp, inputs), inputs["advantages"]
        return torch.minimum(advantages * of, advantages * _clipped(of, config))

    return objective


def _cispo(logp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return inputs["advantages"] * _clipped(_ratio(logp, inputs), config).detach() * logp


def _dro(logp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return inputs["advantages"] * logp - 0.5 * config.get("beta", BETA) * (logp - inputs["logprobs"]) ** 2


_OBJECTIVES: dict[str, Callable[[torch.Tensor, Inputs, Config], torch.Tensor]] = {
    "cross_entropy": lambda logp, inputs, config: logp,
    "importance_sampling": lambda logp, inputs, config: inputs["advantages"] * _ratio(logp, inputs),
    "ppo": _ppo(_ratio),
    "cispo": _cispo,
    "gspo": _ppo(_sequence_ratio),
    "dro": _dro,
}
