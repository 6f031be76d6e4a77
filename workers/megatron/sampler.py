"""The colocated sampler: a second copy of the model for inference, with a KV cache, asleep while the group trains.

Asleep, its storages are gone; awake, it holds the base weights (copied from the same host copy that the trainer uses) and the weights of
one published adapter version. Sampling is decided by (weights, request): each sequence draws from its own seeded generator on the host.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import nn

from state.requests import Sample, SampleResult, Sequence, Tensor, TopK

Top = tuple[torch.Tensor, torch.Tensor]  # (values, indices) of `torch.topk`


class Sampler:
    """`base`, `lora`: flat storages of the frozen parameters and of the adapter's weights, laid out as the trainer's."""

    def __init__(self, model: nn.Module, base: torch.Tensor, lora: tuple[torch.Tensor, ...], device: torch.device) -> None:
        self.model = model.eval()
        self.base, self.lora = base, lora
        self.device = device

    def storages(self) -> list[torch.UntypedStorage]:
        return [tensor.untyped_storage() for tensor in (self.base, *self.lora)]

    @torch.inference_mode()
    def sample(self, request: Sample) -> SampleResult:
        """`num_samples` continuations of one prompt. Logprobs are those of the distribution at temperature 1 (or at the request's
        temperature's own scale where it is 0: greedy), before top-k and top-p."""
        prompt = _tokens(request.prompt)
        count = request.num_samples
        generators = [torch.Generator().manual_seed(_seed(request.seed, index)) for index in range(count)]
        context = StaticInferenceContext(max_batch_size=count, max_sequence_length=len(prompt) + request.max_tokens)
        tokens: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        likely: list[list[Top]] = [[] for _ in range(count)]
        reasons = ["length"] * count
        running = set(range(count))
        current = prompt.unsqueeze(0).expand(count, -1).contiguous()
        for position in range(request.max_tokens):
            last = self._logits(current, context)[:, -1].float().cpu()
            if position == 0:
                context.enable_decode_mode()
            logp = torch.log_softmax(last, -1)
            chosen = torch.zeros(count, dtype=torch.long)
            for index in sorted(running):
                token = _choose(last[index], request, generators[index])
                chosen[index] = token
                tokens[index].append(token)
                logprobs[index].append(float(logp[index, token]))
                if request.topk_sample_logprobs:
                    likely[index].append(logp[index].topk(min(request.topk_sample_logprobs, logp.shape[1])))
                if _stops(tokens[index], request.stop):
                    reasons[index] = "stop"
                    running.discard(index)
            if not running:
                break
            current = chosen.unsqueeze(1)
        sequences = tuple(
            Sequence(_int32(torch.tensor(own)), _float32(torch.tensor(their)), reason, _stacked(top))
            for own, their, reason, top in zip(tokens, logprobs, reasons, likely)
        )
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return SampleResult(sequences)
        return self._of_prompt(prompt, request, sequences)

    def _logits(self, tokens: torch.Tensor, context: StaticInferenceContext) -> torch.Tensor:
        """[batch, 1, vocab] of the last position; advances the KV cache."""
        length, offset = tokens.shape[1], context.sequence_len_offset
        tokens = tokens.to(self.device)
        positions = torch.arange(offset, offset + length, device=self.device).unsqueeze(0).expand_as(tokens)
        mask = causal_mask(length, self.device) if length > 1 else None
        logits = self.model(tokens, positions, mask, inference_context=context, runtime_gather_output=True)
        context.sequence_len_offset += length
        return logits

    def _of_prompt(self, prompt: torch.Tensor, request: Sample, sequences: tuple[Sequence, ...]) -> SampleResult:
        """With the logprobs of the prompt's own tokens, NaN at position 0, and of the most likely ones in their places."""
        tokens = prompt.unsqueeze(0).to(self.device)
        positions = torch.arange(len(prompt), device=self.device).unsqueeze(0)
        logits = self.model(tokens, positions, causal_mask(len(prompt), self.device), runtime_gather_output=True)[0].float().cpu()
        logp = torch.log_softmax(logits[:-1], -1)
        own = torch.cat([torch.tensor([float("nan")]), logp.gather(1, prompt[1:, None])[:, 0]])
        k = min(request.topk_prompt_logprobs, logp.shape[1])
        return SampleResult(sequences, _float32(own) if request.prompt_logprobs else None, _stacked([logp.topk(k)]) if k else None)


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, length, length], True where attention is forbidden (Megatron's convention)."""
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=device), 1)


def _choose(logits: torch.Tensor, request: Sample, generator: torch.Generator) -> int:
    """Temperature, then top-k, then top-p, then one draw; greedy at temperature 0. `logits` fp32 [vocab]."""
    if request.temperature == 0:
        return int(logits.argmax())
    logits = logits / request.temperature
    if 0 < request.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(request.top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits, -1)
    if request.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        outside = ordered.cumsum(0) - ordered >= request.top_p
        probabilities = probabilities.index_fill(0, order[outside], 0.0)
    return _drawn(probabilities, float(torch.rand((), generator=generator, dtype=torch.float64)))


def _drawn(probabilities: torch.Tensor, uniform: float) -> int:
    """By the inverse of the cumulative distribution: one number is drawn, not one a token. `uniform` in [0, 1)."""
    cumulative = probabilities.double().cumsum(0)
    index = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return min(index, int(probabilities.nonzero()[-1])) if index == len(probabilities) else index


def _stops(tokens: list[int], stop: tuple[tuple[int, ...], ...]) -> bool:
    return any(tuple(tokens[-len(end) :]) == end for end in stop)


def _seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little") >> 1


def _tokens(of: Tensor) -> torch.Tensor:
    """int64 [T]."""
    import numpy as np

    return torch.from_numpy(np.frombuffer(of.data, dtype="<i4" if of.dtype == "int32" else "<i8").astype(np.int64))


def _stacked(rows: list[Top]) -> TopK | None:
    """Of single positions, or of many in one."""
    if not rows:
        return None
    k = rows[0][0].shape[-1]
    logprobs = torch.cat([values.reshape(-1, k) for values, _ in rows])
    return TopK(_int32(torch.cat([indices.reshape(-1, k) for _, indices in rows])), _float32(logprobs))


def _int32(tokens: torch.Tensor) -> Tensor:
    return Tensor("int32", tuple(tokens.shape), tokens.to(torch.int32).contiguous().numpy().tobytes())


def _float32(values: Any) -> Tensor:
    return Tensor("float32", tuple(values.shape), values.float().contiguous().numpy().tobytes())
