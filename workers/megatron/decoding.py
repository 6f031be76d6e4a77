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
    """`count` continuations of one prompt, in at most `length` positions. Caches: [count, kv heads of this rank, length, head dim]."""

    def __init__(self, model: Any, count: int, length: int, device: torch.device) -> None:
        self.model = model
        self.count, self.length = count, length
        self.frequencies: torch.Tensor = self.model.rotary_pos_emb(length).to(device)
        self.places = torch.arange(length, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        """Reads `tokens` int64 [T] once, for all continuations. Logits fp32 [count, vocab] of what follows."""
        length = len(tokens)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
            mine = []
            for part in (key, value):
                whole = part.new_zeros(self.count, part.shape[1], self.length, part.shape[3])
                whole[:, :, :length] = part
                mine.append(whole)
            self.caches.append((mine[0], mine[1]))
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        logits = self._forward(tokens[None], self.places[:length], attend)
        self.position.fill_(length)
        return logits.expand(self.count, -1)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends `tokens` int64 [count], one to each continuation. Logits fp32 [count, vocab]. No shape depends on how far it is."""
        ahead = self.places > self.position

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
            keys, values = self.caches[layer]
            keys.index_copy_(2, self.position, key)
            values.index_copy_(2, self.position, value)
            grouped = query.reshape(self.count, keys.shape[1], -1, keys.shape[3])
            scores = (grouped @ keys.transpose(2, 3)).float() * keys.shape[3] ** -0.5
            weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
            return (weights.to(values.dtype) @ values).view(query.shape)

        logits = self._forward(tokens[:, None], self.position, attend)
        self.position += 1
        return logits

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Of the last position, fp32 [b, vocab]. `attend` gets [b, heads, T, head dim] and the layer's index."""
        model = self.model
        hidden = model.embedding(input_ids=tokens, position_ids=positions[None].expand_as(tokens))
        frequencies = self.frequencies.index_select(0, positions)
        for index, layer in enumerate(model.decoder.layers):
            attention = layer.self_attention
            query, key, value = attention.get_query_key_value_tensors(layer.input_layernorm(hidden), None)
            query, key = (apply_rotary_pos_emb(part, frequencies, attention.config) for part in (query, key))
            seen = attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)), index)
            hidden = hidden + attention.linear_proj(seen.permute(2, 0, 1, 3).flatten(2))[0]
            hidden = hidden + layer.mlp(layer.pre_mlp_layernorm(hidden))[0]
        last = model.decoder.final_layernorm(hidden[-1:])
        logits, _ = model.output_layer(last, runtime_gather_output=True)
        return logits[0].float()  # type: ignore[no-any-return]


def repeated(step: Callable[[], None], times: int, device: torch.device) -> Callable[[], None]:
    """`step`, to be called `times` times: the first time as it is, then, where that pays on this device, as a CUDA graph. A step over
    several ranks is not captured: what one rank does then must not depend on when another one captures."""
    if device.type != "cuda" or times < GRAPH_FROM or torch.distributed.get_world_size() > 1:
        return step
    graph: list[torch.cuda.CUDAGraph] = []
    done = 0

    def next_step() -> None:
        nonlocal done
        done += 1
        if done == 1:
            step()  # loads what is loaded lazily, which a capture must not
            return
        if not graph:
            graph.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graph[0], capture_error_mode="thread_local"):
                step()
        graph[0].replay()

    return next_step
