"""What a tenant can ask for: operations, their bodies, and the envelope that travels through the intake.

Bodies are msgpack with declared types; tensors are raw little-endian bytes with dtype and shape. No pickle.
"""

from __future__ import annotations

import enum
import hashlib
import re
from typing import Any

import msgspec

from state.errors import ErrorInfo

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
INLINE_BODY_BYTES = 4096  # larger bodies live beside the log as blobs, so that reading the log stays cheap


def is_name(text: str) -> bool:
    """Whether `text` may name a tenant, an adapter, a checkpoint or a group: it is also safe as one path segment."""
    return NAME.fullmatch(text) is not None and ".." not in text


class Op(enum.StrEnum):
    CREATE_ADAPTER = "create_adapter"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAMPLE = "sample"
    SAVE_STATE = "save_state"
    LOAD_STATE = "load_state"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    UNLOAD = "unload"
    # Answered by the daemon itself, in a session lane; no worker sees them.
    CANCEL = "cancel"
    DESCRIBE = "describe"
    RECALL = "recall"


CONTROL_OPS = frozenset({Op.CANCEL, Op.DESCRIBE, Op.RECALL})
#: What changes an adapter's training state, hence what recovery re-executes after the last snapshot.
MUTATING_OPS = frozenset({Op.CREATE_ADAPTER, Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.LOAD_STATE})
#: What leaves something behind that outlives the workers.
CHECKPOINT_OPS = frozenset({Op.SAVE_STATE, Op.SAVE_WEIGHTS_FOR_SAMPLER})
#: What runs on the live adapter and leaves the device as it found it, but for that adapter's state.
TRAINING_OPS = frozenset({Op.FORWARD, Op.FORWARD_BACKWARD, Op.OPTIM_STEP})

DTYPE_BYTES = {"float32": 4, "int32": 4, "int64": 8, "bfloat16": 2}


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """Raw little-endian bytes with dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Datum(msgspec.Struct, frozen=True, gc=False):
    """One sequence. `tokens` int32 [T]; `inputs`: what the loss needs, each [T]: `target_tokens` int32/int64, `weights`, `logprobs`,
    `advantages`, `sequence_ratio_mask` float32. Of cross_entropy targets and weights may be [T, K]."""

    tokens: Tensor
    inputs: dict[str, Tensor]


class Signature(msgspec.Struct, frozen=True, omit_defaults=True):
    """What shape an adapter has. `targets`: LoRA target modules; empty means all that the group offers."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    seed: int = 0


class CreateAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """`unordered`: its requests do not depend on each other. They run as they come, and their seqs are identities and nothing else: what a
    sampler of one fixed version needs, whose clients do not know of each other."""

    signature: Signature
    group: str = ""  # a wish, which it then never leaves; empty lets the daemon choose
    unordered: bool = False
    like: str = ""  # a wish too: a group in which the adapter has the same layout and the same bits as in the one named here


class Forward(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Body of `forward` and `forward_backward`. The loss is a sum over tokens; gradients of several requests add up."""

    data: tuple[Datum, ...]
    loss_fn: str = "cross_entropy"
    loss_config: dict[str, float] = {}


class OptimStep(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """AdamW (Loshchilov and Hutter 2019): decoupled decay; `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Sample(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """`prompt` int32 [T]. `stop`: token sequences that end a sample. `top_k` -1 and `top_p` 1 switch the filter off;
    `temperature` 0 is greedy."""

    prompt: Tensor
    num_samples: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0  # so many most likely tokens at each position of the prompt, with their logprobs
    topk_sample_logprobs: int = 0  # and of each sampled token
    ignore_eos: bool = False  # of a sampler that knows the model's end of sequence: Megatron's ends at `stop` only


class SaveState(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    overwrite: bool = False


class SaveWeightsForSampler(msgspec.Struct, frozen=True):
    name: str


class LoadState(msgspec.Struct, frozen=True, omit_defaults=True):
    """`adapter` may name another adapter of the same tenant; empty means the adapter's own checkpoint. `sampler_weights`: what
    `save_weights_for_sampler` wrote, which has no optimizer."""

    name: str
    adapter: str = ""
    optimizer: bool = True
    sampler_weights: bool = False


class Unload(msgspec.Struct, frozen=True):
    pass


class Cancel(msgspec.Struct, frozen=True):
    request_id: str


class Describe(msgspec.Struct, frozen=True):
    """Asks for an adapter's next `seq` and standing, so that a restarted program can go on."""


class Recall(msgspec.Struct, frozen=True):
    """Asks for a request's outcome, by whoever has lost it: if it ended, it is published again."""

    request_id: str


BODIES: dict[Op, type[msgspec.Struct]] = {
    Op.CREATE_ADAPTER: CreateAdapter,
    Op.FORWARD: Forward,
    Op.FORWARD_BACKWARD: Forward,
    Op.OPTIM_STEP: OptimStep,
    Op.SAMPLE: Sample,
    Op.SAVE_STATE: SaveState,
    Op.LOAD_STATE: LoadState,
    Op.SAVE_WEIGHTS_FOR_SAMPLER: SaveWeightsForSampler,
    Op.UNLOAD: Unload,
    Op.CANCEL: Cancel,
    Op.DESCRIBE: Describe,
    Op.RECALL: Recall,
}
_DECODERS = {op: msgspec.msgpack.Decoder(body) for op, body in BODIES.items()}
_JSON_DECODERS = {op: msgspec.json.Decoder(body) for op, body in BODIES.items()}
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")  # equal bodies have equal bytes, hence equal digests


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One intake entry: fields `h` (this, without the body) and `b` (the body).

    `lane` orders work on an adapter: `name` or `name:instance`, in `seq` order from 0 (`create_adapter`). An instance tells an
    adapter from an unloaded one of the same name. Control operations use a lane of `~` and a session's name, without order.
    (tenant, lane, seq) is the request's identity.
    """

    tenant: str
    lane: str
    seq: int
    op: str
    adapter: str = ""
    body: bytes = b""
    v: int = 1
    refused: str = ""  # why a front end found that this cannot be done: the request is refused with these words, and its seq is spent

    @property
    def request_id(self) -> str:
        return f"{self.tenant}/{self.lane}/{self.seq}"


def adapter_key(tenant: str, lane: str) -> str:
    """The qualified name `tenant/name` of the adapter whose requests `lane` orders."""
    return f"{tenant}/{lane.partition(':')[0]}"


def is_lane(lane: str) -> bool:
    name, colon, instance = lane.removeprefix("~").partition(":")
    return is_name(name) and (not colon or is_name(instance))


_ENVELOPE = msgspec.msgpack.Decoder(Envelope)
_JSON_ENVELOPE = msgspec.json.Decoder(Envelope)


def encode_body(body: msgspec.Struct) -> bytes:
    return _ENCODER.encode(body)


def decode_body(op: Op, body: bytes) -> Any:
    """From msgpack, or from JSON (tensors' bytes in base64).

    Raises `msgspec.DecodeError` (its subclass `ValidationError` names the field).
    """
    return (_JSON_DECODERS if body.startswith(b"{") else _DECODERS)[op].decode(body)


def digest_of(body: bytes) -> str:
    """sha256 of a body: what makes a retry a retry, and the name of the blob that holds it."""
    return hashlib.sha256(body).hexdigest()


def decode_envelope(header: bytes) -> Envelope:
    """From msgpack, or from JSON for clients that have no msgpack. Raises `msgspec.DecodeError`."""
    return _JSON_ENVELOPE.decode(header) if header.startswith(b"{") else _ENVELOPE.decode(header)


# --- results -----------------------------------------------------------------------------------------------------


class ForwardResult(msgspec.Struct, frozen=True, gc=False):
    """`logprobs` float32 [T] per datum, of its target tokens; `metrics` include `loss:sum` and `tokens:sum`."""

    logprobs: tuple[Tensor, ...]
    metrics: dict[str, float]


class OptimStepResult(msgspec.Struct, frozen=True, gc=False):
    optimizer_step: int
    metrics: dict[str, float]
    digest: str  # of the adapter's masters, moments and step after the update


NO_LOGPROB = -99999.0  # fills an empty cell of a `TopK`, with token 0


class TopK(msgspec.Struct, frozen=True):
    """The `k` most likely tokens at each of T positions, best first: `tokens` int32 and `logprobs` float32, both [T, k]."""

    tokens: Tensor
    logprobs: Tensor


class Sequence(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """`tokens` int32 [n], `logprobs` float32 [n]; `stop_reason` is `stop` or `length`."""

    tokens: Tensor
    logprobs: Tensor
    stop_reason: str
    topk: TopK | None = None


class SampleResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """`prompt_logprobs` float32 [T], NaN at position 0; `topk_prompt_logprobs` of the positions from 1 on."""

    sequences: tuple[Sequence, ...]
    prompt_logprobs: Tensor | None = None
    topk_prompt_logprobs: TopK | None = None


class SaveResult(msgspec.Struct, frozen=True):
    path: str
    digest: str


class Done(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of `create_adapter`, `load_state`, `unload`, `cancel`."""

    adapter: str = ""
    detail: str = ""


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    adapter: str
    next_seq: int
    optimizer_step: int
    residency: str
    queued: int


class Recalled(msgspec.Struct, frozen=True):
    """`status`: how the request ended, or `queued`, or `unknown` where it never came or its result was given up."""

    request_id: str
    status: str
    op: str = ""


RESULTS: dict[Op, type[msgspec.Struct]] = {
    Op.CREATE_ADAPTER: Done,
    Op.FORWARD: ForwardResult,
    Op.FORWARD_BACKWARD: ForwardResult,
    Op.OPTIM_STEP: OptimStepResult,
    Op.SAMPLE: SampleResult,
    Op.SAVE_STATE: SaveResult,
    Op.LOAD_STATE: Done,
    Op.SAVE_WEIGHTS_FOR_SAMPLER: SaveResult,
    Op.UNLOAD: Done,
    Op.CANCEL: Done,
    Op.DESCRIBE: Description,
    Op.RECALL: Recalled,
}


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How a request ended, as the producer reads it.

    `status`: completed, failed, cancelled, refused, or busy (not accepted: send again). `result`: encoded struct of `RESULTS`.
    """

    request_id: str
    status: str
    result: bytes = b""
    error: ErrorInfo | None = None
    digest: str = ""  # of the body that this answers: another program of the tenant may have sent another one under the same identity
