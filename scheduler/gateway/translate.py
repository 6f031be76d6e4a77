"""The Tinker protocol's bodies from and to `state.requests`. Pure. What Hotdesk cannot do is a `BadBody`: such a request is refused
in the log, under its own seq, so that its model goes on."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from scheduler.gateway import wire
from state.errors import BadBody, MalformedRequest
from state.requests import (
    NO_LOGPROB,
    Datum,
    Forward,
    ForwardResult,
    OptimStep,
    OptimStepResult,
    Sample,
    SampleResult,
    Sequence,
    Tensor,
    TopK,
)

SEED_BITS = 2**63 - 1


# --- requests, JSON -------------------------------------------------------------------------------------------------


class AdamParams(msgspec.Struct):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def body(self) -> OptimStep:
        return OptimStep(**msgspec.structs.asdict(self))


class InputChunk(msgspec.Struct):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(msgspec.Struct):
    chunks: list[InputChunk] = []


class SamplingParams(msgspec.Struct):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(msgspec.Struct):
    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool | None = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


def sample_body(request: SampleRequest, most_tokens: int, seed: int) -> Sample:
    """`most_tokens`: of a whole sequence, which decides `max_tokens` where the request gives none. `seed`: where it gives none."""
    params = request.sampling_params
    if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
        raise BadBody("a prompt of anything but text tokens")
    if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k:
        raise BadBody("target_prompt_logprobs and prompt_alt_tokens_k")
    tokens = [token for chunk in request.prompt.chunks for token in chunk.tokens]
    if any(not 0 <= token < 2**31 for token in tokens):
        raise MalformedRequest("the prompt has a token id outside 0..2^31-1")
    array = np.asarray(tokens, "<i4")
    return Sample(
        Tensor("int32", array.shape, array.tobytes()),
        num_samples=request.num_samples,
        max_tokens=params.max_tokens if params.max_tokens is not None else max(1, most_tokens - len(tokens)),
        temperature=params.temperature,
        top_k=params.top_k if params.top_k > 0 else -1,
        top_p=params.top_p,
        seed=(params.seed if params.seed is not None else seed) & SEED_BITS,
        stop=_stops(params.stop),
        prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        ignore_eos=params.stop == [],
    )


def _stops(stop: str | list[str | int] | None) -> tuple[tuple[int, ...], ...]:
    if not stop:
        return ()
    if isinstance(stop, str) or any(isinstance(one, str) for one in stop):
        raise BadBody("stop strings: workers have no tokenizer; give token ids")
    return tuple((int(token),) for token in stop)


# --- requests, protobuf ---------------------------------------------------------------------------------------------


MOST_DENSE = 4_000_000  # values of a request's tensors that came sparse


def decompressed(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """Raises `MalformedRequest` for a frame that is broken, or larger than `most_bytes` once unpacked."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise MalformedRequest(f"content-encoding {encoding!r} is not known here")
    try:
        unpacked = zstandard.ZstdDecompressor().stream_reader(body).read(most_bytes + 1)
    except zstandard.ZstdError as error:
        raise MalformedRequest(f"the body is no zstd frame: {error}") from error
    if len(unpacked) > most_bytes:
        raise MalformedRequest(f"the body has more than {most_bytes} bytes once unpacked")
    return unpacked


def forward_backward(body: bytes) -> Any:
    """The message. Raises `MalformedRequest`."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise MalformedRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    if not message.model_id:
        raise MalformedRequest("model_id is missing")
    return message


def forward_body(message: Any) -> Forward:
    """Raises `BadBody`."""
    config = {name: value.number for name, value in message.loss_fn_config_v2.items() if value.WhichOneof("value") == "number"}
    texts = [name for name, value in message.loss_fn_config_v2.items() if value.WhichOneof("value") == "text"]
    if texts:
        raise BadBody(f"loss_fn_config {texts} of text")
    config = config or dict(message.loss_fn_config)
    sparse = sum(_size(tensor) for datum in message.data for tensor in datum.loss_fn_inputs.values() if _is_sparse(tensor))
    if sparse > MOST_DENSE:
        raise BadBody(f"sparse tensors of {sparse} values in all, at most {MOST_DENSE} are taken")
    return Forward(tuple(_datum(datum, index) for index, datum in enumerate(message.data)), message.loss_fn, config)


def _datum(datum: Any, index: int) -> Datum:
    if any(chunk.WhichOneof("kind") not in ("encoded_text", None) for chunk in datum.model_input):
        raise BadBody(f"datum {index} has input that is no text")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    inputs = {name: _tensor(tensor, f"{name} of datum {index}") for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(Tensor("int32", (len(tokens) // 4,), tokens), inputs)


def _tensor(tensor: Any, what: str) -> Tensor:
    shape, dtype = tuple(tensor.shape), wire.DTYPES.get(tensor.dtype, "unspecified")
    data = _dense(tensor.sparse_csr, shape, dtype, what) if _is_sparse(tensor) else tensor.dense
    return Tensor(dtype, shape[:1] if len(shape) == 2 and shape[1] == 1 else shape, data)


def _is_sparse(tensor: Any) -> bool:
    return bool(tensor.WhichOneof("layout") == "sparse_csr")


def _size(tensor: Any) -> int:
    """Values once it is dense; an absurd shape counts as too many."""
    shape = tuple(tensor.shape)
    return math.prod(shape) if all(0 < size <= MOST_DENSE for size in shape) else MOST_DENSE + 1


def _dense(csr: Any, shape: tuple[int, ...], dtype: str, what: str) -> bytes:
    """Of compressed sparse rows, whose parts are held against each other before anything is made of them. Raises `BadBody`."""
    if dtype not in ("float32", "int64") or len(shape) != 2:
        raise BadBody(f"{what}: a sparse tensor of shape {list(shape)} and dtype {dtype}")
    try:
        starts, columns = (np.frombuffer(data, "<i8") for data in (csr.crow_indices, csr.col_indices))
        values = np.frombuffer(csr.values, {"float32": "<f4", "int64": "<i8"}[dtype])
    except ValueError as error:
        raise BadBody(f"{what}: no sparse tensor: {error}") from error
    ends_fit = len(starts) == shape[0] + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(values)
    if not ends_fit or (np.diff(starts) < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise BadBody(f"{what}: no sparse tensor: its parts do not fit each other")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense.tobytes()


# --- results --------------------------------------------------------------------------------------------------------


def forward_output(result: ForwardResult) -> bytes:
    output = wire.ForwardBackwardOutput(loss_fn_output_type="TensorData")
    for trailing, tensors in groupby(result.logprobs, lambda tensor: tensor.shape[1:]):
        mine = list(tensors)
        record = output.loss_fn_outputs.add(type_tag="TensorData", num_datums=len(mine))
        field = record.fields["logprobs"]
        field.data = b"".join(tensor.data for tensor in mine)
        field.offsets = np.cumsum([0, *(len(tensor.data) for tensor in mine)], dtype="<i8").tobytes()
        field.dtype = wire.FLOAT32
        field.trailing_shape.extend(trailing)
    for name, value in result.metrics.items():
        output.metrics[name if name.count(":") == 1 else f"{name}:mean"] = value
    return bytes(output.SerializeToString(deterministic=True))


def optim_step_output(result: OptimStepResult) -> dict[str, Any]:
    return {"metrics": {**result.metrics, "optimizer_step": float(result.optimizer_step)}, "type": "optim_step"}


def sample_output(result: SampleResult, last_n: int | None = None) -> bytes:
    """`last_n`: only so many of the prompt's logprobs, at its end, were asked for."""
    response = wire.SampleResponse()
    for sequence in result.sequences:
        _add_sequence(response, sequence)
    if result.prompt_logprobs is not None:
        values = np.frombuffer(result.prompt_logprobs.data, "<f4").copy()
        if last_n is not None:
            values[: max(0, len(values) - last_n)] = np.nan
        response.prompt_logprobs = values.astype("<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        top = result.topk_prompt_logprobs
        k = top.tokens.shape[1]
        empty = TopK(
            Tensor("int32", (1, k), np.zeros(k, "<i4").tobytes()), Tensor("float32", (1, k), np.full(k, NO_LOGPROB, "<f4").tobytes())
        )
        _fill(response.topk_prompt_logprobs, empty, top)
    return bytes(response.SerializeToString(deterministic=True))


def _add_sequence(response: Any, sequence: Sequence) -> None:
    added = response.sequences.add(stop_reason=wire.STOP if sequence.stop_reason == "stop" else wire.LENGTH, tokens=sequence.tokens.data)
    added.logprobs = sequence.logprobs.data
    if sequence.topk is not None:
        _fill(added.topk_sampled_logprobs, sequence.topk)


def _fill(target: Any, *parts: TopK) -> None:
    """Rows of several tables one after the other."""
    target.token_ids = b"".join(part.tokens.data for part in parts)
    target.logprobs = b"".join(part.logprobs.data for part in parts)
    target.k = parts[0].tokens.shape[1]
    target.length = sum(part.tokens.shape[0] for part in parts)
