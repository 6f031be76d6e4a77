"""What a request's body must satisfy before it is accepted: pure checks, each refusal saying which datum and which number."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from state.errors import BadBody, BadName, BadSignature
from state.events import GroupSpec
from state.requests import (
    DTYPE_BYTES,
    CreateAdapter,
    Datum,
    Forward,
    LoadState,
    Op,
    OptimStep,
    Sample,
    SaveState,
    SaveWeightsForSampler,
    Tensor,
    decode_body,
    is_name,
)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on one request."""

    body_bytes: int = 16 * 2**20
    datums: int = 1024
    samples: int = 128


#: Refusals of a body spend the request's seq: a corrected body goes under the next one.
Refusal = (BadBody, BadName, BadSignature)

LOSS_INPUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # loss_fn: (required float inputs, optional float inputs), beside target_tokens
    "cross_entropy": ((), ("weights",)),
    "importance_sampling": (("logprobs", "advantages"), ("weights",)),
    "ppo": (("logprobs", "advantages"), ("weights",)),
    "cispo": (("logprobs", "advantages"), ("weights",)),
    "gspo": (("logprobs", "advantages"), ("weights", "sequence_ratio_mask")),
    "dro": (("logprobs", "advantages"), ("weights",)),
}
MOST_TARGETS = 256  # of one token, and of `cross_entropy` only
MOST_TOP = 64  # tokens whose logprobs are told at each position
SMALLEST_EPS = 1e-37  # fp32 holds it; below, an element without gradient would become 0/0
LOSS_CONFIG = {"clip_low_threshold", "clip_high_threshold", "beta"}
_NUMPY = {"float32": "<f4", "int32": "<i4", "int64": "<i8"}


def check_body(op: Op, body: bytes, spec: GroupSpec, limits: Limits) -> Any:
    """The decoded body. Raises one of `Refusal`."""
    try:
        decoded = decode_body(op, body)
    except msgspec.DecodeError as error:
        raise BadBody(f"body of {op}: {error}") from error
    check = _CHECKS.get(op)
    if check is not None:
        check(decoded, spec, limits)
    return decoded


def array(tensor: Tensor, what: str, dtypes: tuple[str, ...], targets: bool = False) -> np.ndarray[Any, Any]:
    """The tensor's values, shape checked against its bytes. `targets`: there may be several a token."""
    if tensor.dtype not in dtypes:
        raise BadBody(f"{what} has dtype {tensor.dtype!r}, expected {' or '.join(dtypes)}")
    length, *more = tensor.shape or (-1,)
    if length < 0 or (more and not targets):
        raise BadBody(f"{what} has shape {list(tensor.shape)}, expected one dimension")
    if len(more) > 1 or not all(1 <= size <= MOST_TARGETS for size in more):
        raise BadBody(f"{what} has shape {list(tensor.shape)}, expected at most {MOST_TARGETS} a token")
    if math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] != len(tensor.data):
        raise BadBody(f"{what} has shape {list(tensor.shape)} but {len(tensor.data)} bytes")
    return np.frombuffer(tensor.data, dtype=_NUMPY[tensor.dtype]).reshape(tensor.shape)


def _create(body: CreateAdapter, spec: GroupSpec, limits: Limits) -> None:
    signature = body.signature
    if not 1 <= signature.rank <= spec.max_rank:
        raise BadSignature(f"rank {signature.rank} is outside 1..{spec.max_rank}")
    if not np.isfinite(signature.alpha) or signature.alpha <= 0:
        raise BadSignature(f"alpha {signature.alpha} is no positive number")
    unknown = sorted(set(signature.targets) - set(spec.targets))
    if unknown:
        raise BadSignature(f"targets {unknown} are not among {list(spec.targets)}")
    if not 0 <= signature.seed < 2**63:
        raise BadSignature(f"seed {signature.seed} is outside 0..2^63-1")


def _forward(body: Forward, spec: GroupSpec, limits: Limits) -> None:
    if body.loss_fn not in LOSS_INPUTS:
        raise BadBody(f"loss_fn {body.loss_fn!r} is none of {sorted(LOSS_INPUTS)}")
    unknown = sorted(set(body.loss_config) - LOSS_CONFIG)
    if unknown:
        raise BadBody(f"loss_config {unknown} is none of {sorted(LOSS_CONFIG)}")
    if not all(math.isfinite(value) and value >= 0 for value in body.loss_config.values()):
        raise BadBody("loss_config has a value that is negative or not finite")
    if not 1 <= len(body.data) <= limits.datums:
        raise BadBody(f"{len(body.data)} datums, expected 1..{limits.datums}")
    for index, datum in enumerate(body.data):
        _datum(datum, f"datum {index}", body.loss_fn, spec)


def _datum(datum: Datum, what: str, loss_fn: str, spec: GroupSpec) -> None:
    tokens = _tokens(datum.tokens, f"tokens of {what}", spec, spec.max_sequence_tokens)
    required, optional = LOSS_INPUTS[loss_fn]
    names = {"target_tokens", *required}
    missing = sorted(names - set(datum.inputs))
    if missing:
        raise BadBody(f"{what} lacks {missing}, which {loss_fn} needs")
    unknown = sorted(set(datum.inputs) - names - set(optional))
    if unknown:
        raise BadBody(f"{what} has inputs {unknown}, which {loss_fn} does not take")
    several = loss_fn == "cross_entropy"
    shape = datum.inputs["target_tokens"].shape
    for name, tensor in datum.inputs.items():
        if name == "target_tokens":
            values = _tokens(tensor, f"target_tokens of {what}", spec, spec.max_sequence_tokens, several)
        else:
            values = array(tensor, f"{name} of {what}", ("float32",), several)
            if not np.isfinite(values).all():
                raise BadBody(f"{name} of {what} has a value that is not finite, at position {int(np.argmin(np.isfinite(values)))}")
        if len(values) != len(tokens):
            raise BadBody(f"{name} of {what} has length {len(values)}, tokens have {len(tokens)}")
        if values.shape != shape:
            raise BadBody(f"{name} of {what} has shape {list(values.shape)}, target_tokens have {list(shape)}")


def _tokens(tensor: Tensor, what: str, spec: GroupSpec, most: int, targets: bool = False) -> np.ndarray[Any, Any]:
    tokens = array(tensor, what, ("int32", "int64"), targets)
    if not 1 <= len(tokens) <= most:
        raise BadBody(f"{what}: {len(tokens)} tokens, expected 1..{most}")
    if tokens.view(f"<u{tokens.itemsize}").max() >= spec.vocab_size:  # as unsigned, a negative one is larger than any vocabulary
        bad = int(np.argmax((tokens < 0) | (tokens >= spec.vocab_size)))
        raise BadBody(f"{what}: token id {int(tokens.flat[bad])} at position {bad} is outside 0..{spec.vocab_size - 1}")
    return tokens


def _optim_step(body: OptimStep, spec: GroupSpec, limits: Limits) -> None:
    for name, value, low, high in (
        ("learning_rate", body.learning_rate, 0.0, float("inf")),
        ("beta1", body.beta1, 0.0, 1.0),
        ("beta2", body.beta2, 0.0, 1.0),
        ("eps", body.eps, SMALLEST_EPS, float("inf")),
        ("weight_decay", body.weight_decay, 0.0, float("inf")),
        ("grad_clip_norm", body.grad_clip_norm, 0.0, float("inf")),
    ):
        if not (math.isfinite(value) and low <= value < high):
            raise BadBody(f"{name} {value} is outside [{low}, {high})")


def _sample(body: Sample, spec: GroupSpec, limits: Limits) -> None:
    prompt = _tokens(body.prompt, "prompt", spec, spec.max_sequence_tokens)
    if body.max_tokens < 1 or len(prompt) + body.max_tokens > spec.max_sequence_tokens:
        raise BadBody(f"prompt of {len(prompt)} and max_tokens {body.max_tokens} exceed {spec.max_sequence_tokens} tokens")
    if not 1 <= body.num_samples <= limits.samples:
        raise BadBody(f"num_samples {body.num_samples} is outside 1..{limits.samples}")
    if not (np.isfinite(body.temperature) and body.temperature >= 0):
        raise BadBody(f"temperature {body.temperature} is negative or not finite")
    if body.top_k < -1 or body.top_k == 0:
        raise BadBody(f"top_k {body.top_k} is neither -1 nor positive")
    if not 0 < body.top_p <= 1:
        raise BadBody(f"top_p {body.top_p} is outside (0, 1]")
    if not 0 <= body.seed < 2**63:
        raise BadBody(f"seed {body.seed} is outside 0..2^63-1")
    for name, k in (("topk_prompt_logprobs", body.topk_prompt_logprobs), ("topk_sample_logprobs", body.topk_sample_logprobs)):
        if not 0 <= k <= min(MOST_TOP, spec.vocab_size):
            raise BadBody(f"{name} {k} is outside 0..{min(MOST_TOP, spec.vocab_size)}")
    if any(not stop for stop in body.stop):
        raise BadBody("an empty stop sequence")


def _name(body: SaveState | SaveWeightsForSampler | LoadState, spec: GroupSpec, limits: Limits) -> None:
    if not is_name(body.name):
        raise BadName(f"checkpoint name {body.name!r} is not allowed")
    if isinstance(body, LoadState) and body.adapter and not is_name(body.adapter):
        raise BadName(f"adapter name {body.adapter!r} is not allowed")


def work_of(op: Op, body: Any) -> int:
    """Tokens that a checked body computes on: what its cost is in proportion to."""
    if op in (Op.FORWARD, Op.FORWARD_BACKWARD):
        return sum(datum.tokens.shape[0] for datum in body.data)
    if op is Op.SAMPLE:
        return int(body.prompt.shape[0] + body.num_samples * body.max_tokens)
    return 0


def width_of(op: Op, body: Any) -> tuple[int, int]:
    """(sequences, places) of a sample."""
    return (body.num_samples, body.num_samples * (body.prompt.shape[0] + body.max_tokens)) if op is Op.SAMPLE else (0, 0)


_CHECKS: dict[Op, Any] = {
    Op.CREATE_ADAPTER: _create,
    Op.FORWARD: _forward,
    Op.FORWARD_BACKWARD: _forward,
    Op.OPTIM_STEP: _optim_step,
    Op.SAMPLE: _sample,
    Op.SAVE_STATE: _name,
    Op.SAVE_WEIGHTS_FOR_SAMPLER: _name,
    Op.LOAD_STATE: _name,
}
