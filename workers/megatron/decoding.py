"""Computing one token after the other: the model with a key-value cache whose shapes never change, so that on a GPU one step is one CUDA
graph. Without it a step is some thousand kernel launches from Python, many times what the GPU needs for them.

megatron-core's own static context slices its cache by Python numbers and cannot be captured; its dynamic one needs flash-attn. The modules
are Megatron's; what is done here is the order of a layer without dropout, and attention over the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch.nn import functional

GRAPH_FROM = 8  # steps; capturing a graph costs about as much as one step without


class Decoder:
    """`rows` sequences side by side, each in at most `length` positions and at a place of its own. Caches: [rows, kv heads of this rank,
    length, head dim]. However many rows are in use, all are computed: a kernel that was chosen for another shape would add in another
    order, and a sequence's bits would depend on its neighbours."""

    def __init__(self, model: Any, rows: int, length: int, device: torch.device) -> None:
        self.model = model
        self.rows, self.length = rows, length
        self.frequencies: torch.Tensor = self.model.rotary_pos_emb(length).to(device)
        self.places = torch.arange(length, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.first = torch.zeros(rows, dtype=torch.int64, device=device)
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def clear(self) -> None:
        """Nothing of earlier sequences stays."""
        self.positions.zero_()
        for cache in self.caches:
            for part in cache:
                part.zero_()

    def prompts(self, tokens: torch.Tensor, lengths: list[int], rows: list[slice]) -> torch.Tensor:
        """Reads prompts, int64 [b, T], of which the first ones have `lengths` tokens and the others are nobody's, each into all of its
        `rows`. Logits fp32 [b, vocab] of what follows them."""

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
            if layer == len(self.caches):
                empty = (part.new_zeros(self.rows, part.shape[1], self.length, part.shape[3]) for part in (key, value))
                self.caches.append((next(empty), next(empty)))
            for kept, part in zip(self.caches[layer], (key, value)):
                for prompt, (length, into) in enumerate(zip(lengths, rows)):
                    kept[into, :, :length] = part[prompt, :, :length]
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        ends = torch.tensor([length - 1 for length in lengths] + [0] * (len(tokens) - len(lengths)), device=tokens.device)
        logits = self._forward(tokens, self.frequencies[: tokens.shape[1]], attend, ends)
        for length, into in zip(lengths, rows):
            self.positions[into] = length
        return logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends `tokens` int64 [rows], one to each sequence. Logits fp32 [rows, vocab]. No shape depends on how far they are."""
        ahead = (self.places > self.positions[:, None])[:, None, None]
        heads = self.caches[0][0].shape[1]
        flat = torch.arange(self.rows * heads, device=tokens.device) * self.length + self.positions.repeat_interleave(heads)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
            keys, values = self.caches[layer]
            for kept, part in ((keys, key), (values, value)):
                kept.view(-1, kept.shape[3]).index_copy_(0, flat, part.reshape(-1, kept.shape[3]))
            grouped = query.reshape(self.rows, heads, -1, keys.shape[3])
            scores = (grouped @ keys.transpose(2, 3)).float() * keys.shape[3] ** -0.5
            weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
            return (weights.to(values.dtype) @ values).view(query.shape)

        logits = self._forward(tokens[:, None], self.frequencies.index_select(0, self.positions).transpose(0, 1), attend, self.first)
        self.positions += 1
        self.positions.clamp_(max=self.length - 1)  # a sequence that ended goes on computing, into nothing
        return logits

    def _forward(
        self, tokens: torch.Tensor, frequencies: torch.Tensor, attend: Callable[..., torch.Tensor], ends: torch.Tensor
    ) -> torch.Tensor:
        """Of each row's position `ends` int64 [b], fp32 [b, vocab]. `frequencies`: [T, 1 or b, 1, dim]; `attend` gets
        [b, heads, T, head dim] and the layer's index."""
        model = self.model
        hidden = model.embedding(input_ids=tokens, position_ids=torch.zeros_like(tokens))  # rotary: the embedding knows no positions
        for index, layer in enumerate(model.decoder.layers):
            attention = layer.self_attention
            query, key, value = attention.get_query_key_value_tensors(layer.input_layernorm(hidden), None)
            query, key = (apply_rotary_pos_emb(part, frequencies, attention.config) for part in (query, key))
            seen = attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)), index)
            hidden = hidden + attention.linear_proj(seen.permute(2, 0, 1, 3).flatten(2))[0]
            hidden = hidden + layer.mlp(layer.pre_mlp_layernorm(hidden))[0]
        last = model.decoder.final_layernorm(hidden[ends, torch.arange(len(ends), device=ends.device)][None])
        logits, _ = model.output_layer(last, runtime_gather_output=True)
        return logits[0].float()  # type: ignore[no-any-return]


class Repeated:
    """`step`, to be called again and again: the first time as it is, then, where that pays on this device, as a CUDA graph. A step over
    several ranks is not captured: what one rank does then must not depend on when another one captures."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step = step
        self.captures = device.type == "cuda" and torch.distributed.get_world_size() == 1
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0

    def __call__(self, left: int) -> None:
        """`left`: so many calls are still to come, this one included."""
        self.done += 1
        if self.graph is None and self.done > 1 and self.captures and left >= GRAPH_FROM:  # the first call loads what is loaded lazily
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
            self.graph = graph
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()
