"""The colocated sampler: a second copy of the model for inference, with a KV cache, asleep while the group trains.

Asleep, its storages are gone; awake, it holds the base weights (copied from the same host copy that the trainer uses) and the weights of
one published adapter version. What a request gets is decided by (weights, request) alone: each sequence draws from its own seeded
generator on the host, and is computed in a shape that follows from its own request, whoever is computed beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from state.errors import HotdeskError, WorkerFailed
from state.requests import Sample, SampleResult, Sequence, Tensor, TopK
from workers.megatron.decoding import Decoder, Repeated

SCAN_BLOCK = 256
COLDEST = 1e-5  # a temperature below it would overflow fp32, and is as good as greedy
SHORTEST = 64  # positions
SHORTEST_PROMPT = 16
PROMPT_TOKENS = 8192  # that are read side by side


class Shape(NamedTuple):
    """Of the batches that a request may be part of. `length`: positions of a sequence; `top`: most likely tokens told with each."""

    rows: int
    length: int
    top: int


class Sampler:
    """`base`, `lora`: flat storages of the frozen parameters and of the adapter's weights, laid out as the trainer's. `rows`: sequences
    computed side by side, fewer where they are so long that the cache would have more than `tokens` positions. `prompts`: that are read
    side by side, as long as the next power of two; 1 where that would gain nothing, and each is read at its own length. `ranks`: that sums
    go over; of more than two a ring adds each part of a batch in another order, so that bits depend on the place in it, and each request is
    computed alone."""

    def __init__(
        self,
        model: nn.Module,
        base: torch.Tensor,
        lora: tuple[torch.Tensor, ...],
        device: torch.device,
        rows: int,
        tokens: int,
        prompts: int,
        ranks: int,
    ) -> None:
        self.model = model.eval()
        self.together = ranks <= 2
        self.base, self.lora = base, lora
        self.device = device
        self.rows, self.tokens, self.prompts = rows, tokens, prompts
        self._batch: _Batch | None = None  # the last one's caches, and its graph: the next one is of the same shape as a rule

    def storages(self) -> list[torch.UntypedStorage]:
        return [tensor.untyped_storage() for tensor in (self.base, *self.lora)]

    def forget(self) -> None:
        """Gives back what was kept for the next batch: weights are about to be elsewhere, or scaled otherwise."""
        self._batch = None

    def shape(self, request: Sample) -> Shape:
        length = max(SHORTEST, 1 << (request.prompt.shape[0] + request.max_tokens - 1).bit_length())
        return Shape(min(self.rows, max(1, self.tokens // length)), length, request.topk_sample_logprobs)

    @torch.inference_mode()
    def sample(self, requests: Many[Sample]) -> list[SampleResult | HotdeskError]:
        """`num_samples` continuations of each prompt, computed side by side where their shape is the same. Logprobs are those of the
        distribution at temperature 1, before top-k and top-p."""
        try:
            parts = [requests] if self.together else [[one] for one in requests]
            return [result for part in parts for result in self._sample(part)]
        except Exception:
            self.forget()  # whatever it was, the next batch begins anew
            raise

    def _sample(self, requests: Many[Sample]) -> list[SampleResult | HotdeskError]:
        drawn: dict[tuple[int, int], Sequence | None] = {}
        waiting: dict[Shape, list[_Row]] = {}
        for number, request in enumerate(requests):
            waiting.setdefault(self.shape(request), []).extend(_Row(number, index, request) for index in range(request.num_samples))
        for shape, rows in waiting.items():
            for first in range(0, len(rows), shape.rows):
                some = rows[first : first + shape.rows]
                drawn |= zip(((row.number, row.continuation) for row in some), self._of(shape).run(some, self.prompts))
        return [
            self._result(request, [drawn[number, index] for index in range(request.num_samples)]) for number, request in enumerate(requests)
        ]

    def _of(self, shape: Shape) -> _Batch:
        if self._batch is None or self._batch.shape != shape:
            self._batch = None  # its memory first
            self._batch = _Batch(shape, self.model, self.device)
        return self._batch

    def _result(self, request: Sample, sequences: list[Sequence | None]) -> SampleResult | HotdeskError:
        found = tuple(sequence for sequence in sequences if sequence is not None)
        if len(found) < len(sequences):
            return WorkerFailed("the model's output is not finite: nothing can be drawn from it")
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return SampleResult(found)
        return self._of_prompt(_tokens(request.prompt).to(self.device), request, found)

    def _of_prompt(self, prompt: torch.Tensor, request: Sample, sequences: tuple[Sequence, ...]) -> SampleResult:
        """With the logprobs of the prompt's own tokens, NaN at position 0, and of the most likely ones in their places."""
        positions = torch.arange(len(prompt), device=self.device).unsqueeze(0)
        logits = self.model(prompt[None], positions, causal_mask(len(prompt), self.device), runtime_gather_output=True)[0].float()
        logp = torch.log_softmax(logits[:-1], -1)
        own = torch.cat([logp.new_full((1,), float("nan")), logp.gather(1, prompt[1:, None])[:, 0]])
        k = min(request.topk_prompt_logprobs, logp.shape[1])
        return SampleResult(sequences, _float32(own) if request.prompt_logprobs else None, _top(*logp.topk(k)) if k else None)


def _padded(length: int) -> int:
    return max(SHORTEST_PROMPT, 1 << (length - 1).bit_length())


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, length, length], True where attention is forbidden (Megatron's convention)."""
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=device), 1)


class _Row(NamedTuple):
    """A continuation of request `number`."""

    number: int
    continuation: int
    request: Sample


class Filters(NamedTuple):
    """What narrows the choice of each row, [rows] each, and which of it any row asks for: a step without is a shorter one, with the same
    bits. `top_k` is the vocabulary's size where all may be chosen."""

    temperature: torch.Tensor
    greedy: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    by_k: bool
    by_p: bool

    @staticmethod
    def of(requests: Many[Sample], rows: int, vocab: int, device: torch.device) -> Filters:
        idle = rows - len(requests)

        def each(values: list[Any], filling: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([*values, *[filling] * idle], dtype=dtype, device=device)

        ks = [one.top_k if 0 < one.top_k < vocab else vocab for one in requests]
        return Filters(
            each([max(one.temperature, COLDEST) if one.temperature else 1.0 for one in requests], 1.0, torch.float32),
            each([one.temperature == 0 for one in requests], False, torch.bool),
            each(ks, vocab, torch.int64),
            each([one.top_p for one in requests], 1.0, torch.float64),
            min(ks) < vocab,
            min(one.top_p for one in requests) < 1,
        )


class _Batch:
    """Caches and outputs of one shape, on the device: nothing of a step depends on how far it is but a counter there, so that it can be
    captured once and used by later batches."""

    def __init__(self, shape: Shape, model: Any, device: torch.device) -> None:
        self.shape, self.device = shape, device
        rows, length, top = shape
        self.decoder = Decoder(model, rows, length, device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.last = torch.zeros(rows, dtype=torch.int64, device=device)
        self.uniform = torch.zeros(length, rows, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(length, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(length, rows, device=device)
        self.top = torch.zeros(length, rows, top, device=device), torch.zeros(length, rows, top, dtype=torch.int64, device=device)
        self.filters: Filters | None = None
        self.step: Repeated

    def run(self, rows: list[_Row], prompts: int) -> list[Sequence | None]:
        """None for a sequence whose logprobs are not finite."""
        most = max(row.request.max_tokens for row in rows)
        ends = _Ends([row.request for row in rows])
        self.at.zero_()
        self._draw_ahead(rows)
        logits = self._read(rows, prompts)
        self._filter([row.request for row in rows], logits.shape[1])
        self._append(logits)
        count = 1
        while count < most and not ends.look(self.last, count):
            self.step(most - count)
            count += 1
        ends.look(self.last, count)
        return self._sequences(rows, ends.lengths, ends.stopped)

    def _draw_ahead(self, rows: list[_Row]) -> None:
        ahead = torch.zeros(self.uniform.shape, dtype=torch.float64)
        for place, row in enumerate(rows):
            generator = torch.Generator().manual_seed(_seed(row.request.seed, row.continuation))
            ahead[: row.request.max_tokens, place] = torch.rand(row.request.max_tokens, generator=generator, dtype=torch.float64)
        self.uniform.copy_(ahead)

    def _read(self, rows: list[_Row], prompts: int) -> torch.Tensor:
        """Logits fp32 [rows, vocab] of what follows each row's prompt, which is read once for all of its continuations."""
        self.decoder.clear()
        waiting: dict[int, list[tuple[torch.Tensor, slice]]] = {}
        first = 0
        while first < len(rows):
            end = first + sum(row.number == rows[first].number for row in rows[first:])
            tokens = _tokens(rows[first].request.prompt)
            waiting.setdefault(_padded(len(tokens)) if prompts > 1 else len(tokens), []).append((tokens, slice(first, end)))
            first = end
        logits: torch.Tensor | None = None
        for length, those in waiting.items():
            beside = max(1, min(prompts, PROMPT_TOKENS // length))
            for begin in range(0, len(those), beside):
                some = those[begin : begin + beside]
                padded = torch.zeros(beside, length, dtype=torch.int64)
                for place, (tokens, _) in enumerate(some):
                    padded[place, : len(tokens)] = tokens
                read = self.decoder.prompts(padded.to(self.device), [len(tokens) for tokens, _ in some], [into for _, into in some])
                logits = read.new_zeros(self.shape.rows, read.shape[1]) if logits is None else logits
                for place, (_, into) in enumerate(some):
                    logits[into] = read[place]
        assert logits is not None
        return logits

    def _filter(self, requests: list[Sample], vocab: int) -> None:
        wanted = Filters.of(requests, self.shape.rows, vocab, self.device)
        before = self.filters
        if before is None or (before.by_k, before.by_p) != (wanted.by_k, wanted.by_p):
            self.filters = wanted
            self.step = Repeated(lambda: self._append(self.decoder.step(self.last)), self.device)
            return
        for kept, new in zip(before[:4], wanted[:4]):  # a captured step reads them where they are
            kept.copy_(new)

    def _append(self, logits: torch.Tensor) -> None:
        """Draws from `logits`, fp32 [rows, vocab]."""
        assert self.filters is not None
        logp = torch.log_softmax(logits, -1)
        chosen = _chosen(logits, self.uniform.index_select(0, self.at)[0], self.filters)
        self.tokens.index_copy_(0, self.at, chosen[None])
        self.logprobs.index_copy_(0, self.at, logp.gather(1, chosen[:, None]).T)
        if top := min(self.shape.top, logp.shape[1]):
            for kept, found in zip(self.top, logp.topk(top)):
                kept[..., :top].index_copy_(0, self.at, found[None])
        self.last.copy_(chosen)
        self.at += 1

    def _sequences(self, rows: list[_Row], lengths: list[int], stopped: list[bool]) -> list[Sequence | None]:
        longest = max(lengths)
        tokens, logprobs = self.tokens[:longest].cpu(), self.logprobs[:longest].cpu()
        top = tuple(kept[:longest].cpu() for kept in self.top) if self.shape.top else None
        found: list[Sequence | None] = []
        for place, (length, stop) in enumerate(zip(lengths, stopped)):
            own = slice(0, length), place
            if not bool(logprobs[own].isfinite().all()):
                found.append(None)
                continue
            likely = _top(*(kept[own] for kept in top)) if top is not None else None
            found.append(Sequence(_int32(tokens[own]), _float32(logprobs[own]), "stop" if stop else "length", likely))
        return found


class _Ends:
    """Where each row's sequence ends: at its last token, or at a stop that it came to."""

    def __init__(self, requests: list[Sample]) -> None:
        self.stops = [request.stop for request in requests]
        self.lengths = [request.max_tokens for request in requests]
        self.stopped = [False] * len(requests)
        self.seen: list[list[int]] = []

    def look(self, newest: torch.Tensor, count: int) -> bool:
        """Whether all have ended after `count` tokens. Waits for the device only where a stop was asked for."""
        if not any(self.stops):
            return False
        if len(self.seen) < count:
            self.seen.append(newest.tolist())
            for place, stops in enumerate(self.stops):
                if count <= self.lengths[place] and not self.stopped[place] and any(self._ends_in(place, stop) for stop in stops):
                    self.lengths[place], self.stopped[place] = count, True
        return all(count >= length for length in self.lengths)

    def _ends_in(self, place: int, stop: tuple[int, ...]) -> bool:
        return tuple(step[place] for step in self.seen[-len(stop) :]) == stop


def _chosen(logits: torch.Tensor, uniform: torch.Tensor, filters: Filters) -> torch.Tensor:
    """int64 [rows]. Temperature, then top-k, then top-p, then one draw; greedy at 0. `logits` fp32 [rows, vocab], `uniform` fp64 [rows]."""
    scaled = logits / filters.temperature[:, None]
    if filters.by_k:
        least = scaled.sort(descending=True).values.gather(1, filters.top_k[:, None] - 1)
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = torch.softmax(scaled, -1)
    if filters.by_p:
        ordered, order = probabilities.sort(descending=True, stable=True)
        outside = (_prefix_sums(ordered) - ordered >= filters.top_p[:, None]) & (filters.top_p < 1)[:, None]
        probabilities = torch.zeros_like(ordered).scatter(1, order, ordered.masked_fill(outside, 0.0))
    return torch.where(filters.greedy, logits.argmax(-1), _drawn(probabilities, uniform))


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
