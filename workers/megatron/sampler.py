"""The colocated sampler: a second copy of the model for inference, with a KV cache, asleep while the group trains.

Asleep, its storages are gone; awake, it holds the base weights (copied from the same host copy that the trainer uses) and the weights of
one published adapter version. Sampling is decided by (weights, request): each sequence draws from its own seeded generator on the host.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from state.errors import WorkerFailed
from state.requests import Sample, SampleResult, Sequence, Tensor, TopK
from workers.megatron.decoding import Decoder, repeated

SCAN_BLOCK = 256
COLDEST = 1e-5  # a temperature below it would overflow fp32, and is as good as greedy


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
        """`num_samples` continuations of one prompt. Logprobs are those of the distribution at temperature 1, before top-k and top-p."""
        prompt = _tokens(request.prompt).to(self.device)
        drawn = _Drawn(request, self.device)
        decoder = Decoder(self.model, request.num_samples, len(prompt) + request.max_tokens, self.device)
        drawn.append(decoder.prompt(prompt))
        step = repeated(lambda: drawn.append(decoder.step(drawn.last)), request.max_tokens - 1, self.device)
        count = 1
        while count < request.max_tokens and not (request.stop and drawn.all_stopped()):
            step()
            count += 1
        sequences = drawn.sequences(count)
        if not bool(drawn.logprobs.isfinite().all()):
            raise WorkerFailed("the model's output is not finite: nothing can be drawn from it")
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return SampleResult(sequences)
        return self._of_prompt(prompt, request, sequences)

    def _of_prompt(self, prompt: torch.Tensor, request: Sample, sequences: tuple[Sequence, ...]) -> SampleResult:
        """With the logprobs of the prompt's own tokens, NaN at position 0, and of the most likely ones in their places."""
        positions = torch.arange(len(prompt), device=self.device).unsqueeze(0)
        logits = self.model(prompt[None], positions, causal_mask(len(prompt), self.device), runtime_gather_output=True)[0].float()
        logp = torch.log_softmax(logits[:-1], -1)
        own = torch.cat([logp.new_full((1,), float("nan")), logp.gather(1, prompt[1:, None])[:, 0]])
        k = min(request.topk_prompt_logprobs, logp.shape[1])
        return SampleResult(sequences, _float32(own) if request.prompt_logprobs else None, _top(*logp.topk(k)) if k else None)


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, length, length], True where attention is forbidden (Megatron's convention)."""
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=device), 1)


class _Drawn:
    """What was drawn so far, on the device: nothing of it depends on how far it is but a counter there, so that a step can be captured."""

    def __init__(self, request: Sample, device: torch.device) -> None:
        self.request = request
        count, most, top = request.num_samples, request.max_tokens, request.topk_sample_logprobs
        generators = [torch.Generator().manual_seed(_seed(request.seed, index)) for index in range(count)]
        self.uniform = torch.stack([torch.rand(most, generator=one, dtype=torch.float64) for one in generators], 1).to(device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.last = torch.zeros(count, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(most, count, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(most, count, device=device)
        self.top = torch.zeros(most, count, top, device=device), torch.zeros(most, count, top, dtype=torch.int64, device=device)
        self.seen: list[list[int]] = []  # the tokens that were looked at for an end, a step each
        self.ended: dict[int, int] = {}  # continuations that stopped -> their length

    def append(self, logits: torch.Tensor) -> None:
        """Draws from `logits`, fp32 [count, vocab]."""
        logp = torch.log_softmax(logits, -1)
        chosen = _chosen(logits, self.uniform.index_select(0, self.at)[0], self.request)
        self.tokens.index_copy_(0, self.at, chosen[None])
        self.logprobs.index_copy_(0, self.at, logp.gather(1, chosen[:, None]).T)
        if top := min(self.top[0].shape[2], logp.shape[1]):
            for kept, found in zip(self.top, logp.topk(top)):
                kept[..., :top].index_copy_(0, self.at, found[None])
        self.last.copy_(chosen)
        self.at += 1

    def all_stopped(self) -> bool:
        """Looks at the newest tokens, which waits for the device."""
        self.seen.append(self.last.tolist())
        for index in range(self.request.num_samples):
            if index not in self.ended and any(self._ends_in(index, stop) for stop in self.request.stop):
                self.ended[index] = len(self.seen)
        return len(self.ended) == self.request.num_samples

    def _ends_in(self, index: int, stop: tuple[int, ...]) -> bool:
        return tuple(step[index] for step in self.seen[-len(stop) :]) == stop

    def sequences(self, count: int) -> tuple[Sequence, ...]:
        if self.request.stop and len(self.seen) < count:
            self.all_stopped()
        found = []
        width = min(self.top[0].shape[2], self.request.topk_sample_logprobs)
        for index in range(self.request.num_samples):
            own = slice(0, self.ended.get(index, count)), index
            top = _top(*(kept[own] for kept in self.top)) if width else None
            reason = "stop" if index in self.ended else "length"
            found.append(Sequence(_int32(self.tokens[own]), _float32(self.logprobs[own]), reason, top))
        return tuple(found)


def _chosen(logits: torch.Tensor, uniform: torch.Tensor, request: Sample) -> torch.Tensor:
    """int64 [b]. Temperature, then top-k, then top-p, then one draw; greedy at 0. `logits` fp32 [b, vocab], `uniform` fp64 [b]."""
    if request.temperature == 0:
        return logits.argmax(-1)
    logits = logits / max(request.temperature, COLDEST)
    if 0 < request.top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(request.top_k).values[:, -1:], float("-inf"))
    probabilities = torch.softmax(logits, -1)
    if request.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        outside = _prefix_sums(ordered) - ordered >= request.top_p
        probabilities = torch.zeros_like(ordered).scatter(1, order, ordered.masked_fill(outside, 0.0))
    return _drawn(probabilities, uniform)


def _drawn(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """By the inverse of the cumulative distribution: one number is drawn, not one a token. `uniform` fp64 [b] in [0, 1)."""
    cumulative = _prefix_sums(probabilities)
    size = probabilities.shape[1]
    places = torch.arange(size, device=probabilities.device)
    possible = probabilities > 0
    above = possible & (cumulative > (uniform * cumulative[:, -1])[:, None])
    return torch.minimum(places.where(above, size).amin(1), places.where(possible, 0).amax(1))


def _prefix_sums(values: torch.Tensor) -> torch.Tensor:
    """fp64 [b, n], of each row. By products with triangles of ones: the order in which a GPU's own scan adds is not fixed."""
    rows, size = values.shape
    blocks = functional.pad(values.double(), (0, -size % SCAN_BLOCK)).view(rows, -1, SCAN_BLOCK)
    within = blocks @ torch.ones(SCAN_BLOCK, SCAN_BLOCK, dtype=torch.float64, device=values.device).triu()
    count = blocks.shape[1]
    before = within[:, :, -1] @ torch.ones(count, count, dtype=torch.float64, device=values.device).triu(1)
    return (within + before[:, :, None]).view(rows, -1)[:, :size]


def _seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little") >> 1


def _tokens(of: Tensor) -> torch.Tensor:
    """int64 [T]."""
    import numpy as np

    return torch.from_numpy(np.frombuffer(of.data, dtype="<i4" if of.dtype == "int32" else "<i8").astype(np.int64))


def _top(logprobs: torch.Tensor, tokens: torch.Tensor) -> TopK:
    return TopK(_int32(tokens), _float32(logprobs))


def _int32(tokens: torch.Tensor) -> Tensor:
    return Tensor("int32", tuple(tokens.shape), tokens.to(torch.int32).contiguous().cpu().numpy().tobytes())


def _float32(values: Any) -> Tensor:
    return Tensor("float32", tuple(values.shape), values.float().contiguous().cpu().numpy().tobytes())
