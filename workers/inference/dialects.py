"""What engines that serve LoRA adapters by path are asked, and how they answer: routes, bodies, parsing. No I/O.

vllm     OpenAI's completions with token ids (`return_token_ids`, vLLM >= 0.10.2); an adapter is the model's name
sglang   its native `/generate`, whose `lora_path` is an adapter's name; seeds count with `--enable-deterministic-inference`
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from state.errors import BadBody, WorkerFailed
from state.requests import NO_LOGPROB, Sample, SampleResult, Sequence, Tensor, TopK


class Said(NamedTuple):
    """An HTTP answer, as far as a dialect looks at it."""

    status: int
    text: str


class Dialect(Protocol):
    load: str  # routes
    unload: str
    sample: str
    sleep: str  # gives the device's memory back, and `wake` takes it again; empty where it cannot be asked which of the two it did last
    wake: str
    asleep: str
    models: str
    way_out: str  # where its answer cannot be read

    def is_loaded(self, said: Said) -> bool:
        """Whether the adapter is there after that answer to `load`."""
        ...

    def is_unloaded(self, said: Said) -> bool: ...
    def is_forgotten(self, said: Said) -> bool:
        """Whether a sample failed because the engine does not know the adapter (any more)."""
        ...

    def body(self, adapter: str, model: str, asked: Sample) -> dict[str, Any]:
        """`adapter` empty: the base model, which is called `model` there."""
        ...

    def result(self, content: bytes, asked: Sample) -> SampleResult:
        """Raises `ValueError`, `KeyError` or `msgspec.DecodeError` for what is no answer, or of other lengths than asked for."""
        ...


# --- vLLM -----------------------------------------------------------------------------------------------------------------


class Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[dict[str, Logprob] | None] | None = None


class Completion(msgspec.Struct):
    choices: list[Choice]


class VLLM:
    load, unload, sample = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
    sleep, wake, asleep = "/sleep?level=1", "/wake_up", "/is_sleeping"  # level 1: the base weights stay in the host's memory
    models = "/v1/models"
    way_out = "it must know return_token_ids and return_tokens_as_token_ids (vLLM >= 0.10.2)"

    def is_loaded(self, said: Said) -> bool:
        return said.status == 200 or "already been loaded" in said.text

    def is_unloaded(self, said: Said) -> bool:
        return said.status in (200, 404)

    def is_forgotten(self, said: Said) -> bool:
        return said.status == 404

    def body(self, adapter: str, model: str, asked: Sample) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": adapter or model,
            "prompt": tokens_of(asked.prompt),
            "n": 1 if asked.temperature == 0 else asked.num_samples,  # greedy ones are equal, and the engine makes one only
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "seed": asked.seed,
            "stop_token_ids": stop_tokens(asked),
            "ignore_eos": asked.ignore_eos,
            "logprobs": asked.topk_sample_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if asked.prompt_logprobs or asked.topk_prompt_logprobs:
            body["prompt_logprobs"] = max(1, asked.topk_prompt_logprobs)
        return body

    def result(self, content: bytes, asked: Sample) -> SampleResult:
        choices = sorted(msgspec.json.decode(content, type=Completion).choices, key=lambda choice: choice.index)
        sequences = [self._sequence(choice, asked.topk_sample_logprobs) for choice in choices]
        if asked.temperature == 0:
            sequences *= asked.num_samples
        prompt = choices[0].prompt_logprobs if choices else None
        own, ranked = None, None
        if prompt is not None:
            own = [row[str(token)].logprob if row else None for row, token in zip(prompt, tokens_of(asked.prompt))]
            ranked = [_best_first((int(token), seen.logprob) for token, seen in (row or {}).items()) for row in prompt[1:]]
        return _result(asked, sequences, own, ranked)

    @staticmethod
    def _sequence(choice: Choice, k: int) -> Sequence:
        if choice.logprobs is None:
            raise ValueError("a sequence without logprobs")
        rows = choice.logprobs.top_logprobs or []
        ranked = [_best_first((int(name.removeprefix("token_id:")), value) for name, value in (row or {}).items()) for row in rows]
        return _sequence(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason, ranked, k)


# --- SGLang ---------------------------------------------------------------------------------------------------------------

Row = tuple[float | None, int, str | None]  # logprob, token, its text


class FinishReason(msgspec.Struct):
    type: str


class Meta(msgspec.Struct):
    output_token_logprobs: list[Row]
    finish_reason: FinishReason | None = None
    output_top_logprobs: list[list[Row] | None] | None = None
    input_token_logprobs: list[Row] | None = None
    input_top_logprobs: list[list[Row] | None] | None = None


class Generated(msgspec.Struct):
    meta_info: Meta


class SGLang:
    load, unload, sample = "/load_lora_adapter", "/unload_lora_adapter", "/generate"
    sleep = wake = asleep = models = ""
    way_out = "it must be an SGLang server, started with --enable-lora"

    def is_loaded(self, said: Said) -> bool:
        return said.status == 200 or any(words in said.text for words in ("already loaded", "already been loaded", "already exists"))

    def is_unloaded(self, said: Said) -> bool:
        return said.status == 200 or any(words in said.text for words in ("not loaded", "not found", "does not exist"))

    def is_forgotten(self, said: Said) -> bool:
        return said.status == 400 and "not loaded" in said.text

    def body(self, adapter: str, model: str, asked: Sample) -> dict[str, Any]:
        """A batch of one prompt: `n` would draw every continuation from one seed."""
        params = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k if asked.top_k > 0 else -1,
            "max_new_tokens": asked.max_tokens,
            "stop_token_ids": stop_tokens(asked),
            "ignore_eos": asked.ignore_eos,
        }
        wants_prompt = asked.prompt_logprobs or asked.topk_prompt_logprobs
        body: dict[str, Any] = {
            "input_ids": [tokens_of(asked.prompt)] * asked.num_samples,
            "sampling_params": [{**params, "sampling_seed": (asked.seed + index) % 2**31} for index in range(asked.num_samples)],
            "return_logprob": True,
            "logprob_start_len": 0 if wants_prompt else -1,
            "top_logprobs_num": max(asked.topk_sample_logprobs, asked.topk_prompt_logprobs),
        }
        return body | {"lora_path": [adapter] * asked.num_samples} if adapter else body

    def result(self, content: bytes, asked: Sample) -> SampleResult:
        metas = [one.meta_info for one in msgspec.json.decode(content, type=list[Generated])]
        sequences = []
        for meta in metas:
            tokens, values = [row[1] for row in meta.output_token_logprobs], [row[0] for row in meta.output_token_logprobs]
            reason = meta.finish_reason.type if meta.finish_reason is not None else None
            sequences.append(_sequence(tokens, values, reason, _ranked(meta.output_top_logprobs or []), asked.topk_sample_logprobs))
        own, ranked = None, None
        if metas and metas[0].input_token_logprobs is not None:
            own = [row[0] for row in metas[0].input_token_logprobs]
            ranked = _ranked((metas[0].input_top_logprobs or [])[1:])
        return _result(asked, sequences, own, ranked)


def _ranked(rows: Rows[list[Row] | None]) -> list[list[tuple[int, float]]]:
    return [_best_first((token, value) for value, token, _ in row or [] if value is not None) for row in rows]


DIALECTS: dict[str, Dialect] = {"vllm": VLLM(), "sglang": SGLang()}

# --- what both have in common ---------------------------------------------------------------------------------------------


def parsed(dialect: Dialect, content: bytes, asked: Sample) -> SampleResult:
    """Raises `WorkerFailed` for what is no answer."""
    try:
        return dialect.result(content, asked)
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise WorkerFailed(f"the engine's answer is none: {error}", way_out=dialect.way_out) from error


def tokens_of(tensor: Tensor) -> list[int]:
    return np.frombuffer(tensor.data, "<i8" if tensor.dtype == "int64" else "<i4").tolist()  # type: ignore[no-any-return]


def stop_tokens(asked: Sample) -> list[int]:
    """Raises `BadBody` for stops that are no single tokens: engines take words for those, and have a tokenizer of their own."""
    if any(len(stop) != 1 for stop in asked.stop):
        raise BadBody("a stop of several tokens: the engine that samples here knows single ones")
    return [stop[0] for stop in asked.stop]


def _best_first(cells: Any) -> list[tuple[int, float]]:
    return sorted(cells, key=lambda cell: -cell[1])


def _result(
    asked: Sample, sequences: list[Sequence], own: list[float | None] | None, ranked: list[list[tuple[int, float]]] | None
) -> SampleResult:
    """`own`: logprobs of the prompt's tokens, none for the first; `ranked`: the most likely ones from the second place on."""
    if len(sequences) != asked.num_samples:
        raise ValueError(f"{len(sequences)} sequences of {asked.num_samples}")
    if (asked.prompt_logprobs or asked.topk_prompt_logprobs) and (own is None or len(own) != asked.prompt.shape[0]):
        raise ValueError("the prompt's logprobs are missing")
    return SampleResult(
        tuple(sequences),
        _float32(own or []) if asked.prompt_logprobs else None,
        _top(ranked or [], asked.topk_prompt_logprobs) if asked.topk_prompt_logprobs else None,
    )


def _sequence(
    token_ids: list[int], logprobs: list[float | None], reason: str | None, ranked: list[list[tuple[int, float]]], k: int
) -> Sequence:
    if len(logprobs) != len(token_ids):
        raise ValueError("a sequence without a logprob a token")
    tokens = np.asarray(token_ids, "<i4")
    ends = "stop" if reason == "stop" else "length"
    return Sequence(Tensor("int32", tokens.shape, tokens.tobytes()), _float32(logprobs), ends, _top(ranked, k) if k else None)


def _float32(values: list[float | None]) -> Tensor:
    """NaN where there is none."""
    return Tensor("float32", (len(values),), np.asarray([np.nan if one is None else one for one in values], "<f4").tobytes())


def _top(rows: list[list[tuple[int, float]]], k: int) -> TopK:
    tokens = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), NO_LOGPROB, "<f4")
    for index, row in enumerate(rows):
        for column, (token, value) in enumerate(row[:k]):
            tokens[index, column], logprobs[index, column] = token, value
    return TopK(Tensor("int32", tokens.shape, tokens.tobytes()), Tensor("float32", logprobs.shape, logprobs.tobytes()))
