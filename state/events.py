"""The log's vocabulary: what happened, as small frozen values with a schema version in their tag.

An event never changes once logged. A new schema gets a new tag (`request_accepted/2`) and an entry in `UPCASTS` that lifts
the old form, so that old logs always replay. Steps and facts live here too because events carry them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from state.errors import ErrorInfo, LogVersion
from state.fair_queue import EQUAL, Share

STALE = "!stale"  # what is live when the bound adapter was deleted: its leftovers belong to nobody


class Part(enum.StrEnum):
    """What a worker group can hold on, or take off, its device as a whole."""

    WEIGHTS = "weights"
    GRADS = "grads"
    OPTIMIZER = "optimizer"


class StepKind(enum.StrEnum):
    BACKLOAD = "backload"  # parts of the group, or one adapter into a device slot
    OFFLOAD = "offload"  # the reverse
    PARK = "park"  # save the live adapter's pending gradients and dirty state: the device is about to be given away
    UNPARK = "unpark"  # the device is back: restore the live adapter from its slot
    SWAP = "swap"  # bind another adapter
    FLUSH = "flush"  # write dirty state to the slot, binding unchanged
    FETCH = "fetch"  # disk to host slot
    SPILL = "spill"  # host slot to disk
    SNAPSHOT = "snapshot"  # slot to a durable snapshot
    RESTORE = "restore"  # durable snapshot to slot
    MOVE = "move"  # let go of an adapter whose snapshot holds all of it: another group restores it
    WAKE_SAMPLER = "wake_sampler"
    SLEEP_SAMPLER = "sleep_sampler"
    PUBLISH = "publish"  # slot's weights to the sampler
    EXECUTE = "execute"


# What is of values only can be in no reference cycle: `gc=False` spares the collector looking at the hundred thousands of them that a state
# and a long log hold, which was a fifth of what folding costs.


class Step(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One thing for a worker group to do. `id` counts per group; `live` is the live slot that the planner expects when the step
    begins; `request_id` is the request that made the step necessary."""

    id: int
    kind: StepKind
    adapter: str = ""
    request_id: str = ""
    op: str = ""
    live: str = ""
    parts: tuple[Part, ...] = ()
    keep: bool = False  # swap: the outgoing adapter stays resident in its own device slot
    discard: bool = False  # a voided window. optim_step: drop the pending gradients and fail; restore: leave them out
    version: int = 0  # publish: the adapter's version; restore: the snapshot; snapshot: the last one, kept with later ones
    before: int = 0  # snapshot: the one before the last, kept as well
    next: str = ""  # a hint: the adapter whose turn comes after this one
    redo: bool = False  # re-execution after a loss: its outcome was given out before
    to: str = ""  # move: the group that the adapter goes to
    beside: bool = False  # snapshot: copied in the step, written beside those after it; `Facts.written` says when it is durable


class AdapterFacts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a worker observed of one adapter. `pending` counts forward_backwards whose gradients await an optim_step;
    `digest` covers masters, moments and step, as of the last optim_step."""

    adapter: str
    residency: str
    pending: int = 0
    dirty: bool = False
    optimizer_step: int = 0
    digest: str = ""
    spilled: bool = False  # offloaded further, from its host slot to disk


class Written(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How the writing of a snapshot beside the steps ended: it is durable, or `error` says why not. `cost_us`: of the writing."""

    adapter: str
    version: int
    cost_us: int = 0
    error: str = ""


class Facts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a worker group observed of its device after a step. Bytes are summed over ranks."""

    live: str = ""
    weights: bool = False
    grads: bool = False
    optimizer: bool = False
    sampler: bool = False
    published: str = ""
    adapters: tuple[AdapterFacts, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0
    written: tuple[Written, ...] = ()


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker group offers. `device_slots`: adapters that fit on the device at once, the live one included;
    `host_slots`: in host memory, beyond which they are spilled to disk."""

    backend: str
    max_rank: int
    targets: tuple[str, ...]
    vocab_size: int
    max_sequence_tokens: int
    base_model: str = ""
    tp: int = 1
    dp: int = 1
    device_slots: int = 1
    host_slots: int = 64
    max_adapters: int = 1024
    sample_rows: int = 1  # sequences that the sampler computes side by side, for little more than the cost of one,
    sample_tokens: int = 0  # where they take no more places than this
    kin: str = ""  # groups of equal kin hold and compute the same bits, so that an adapter may move from one to the other


class Request(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An accepted request. `adapter` is qualified (`tenant/name`); `body` is empty when it lives in the blob `digest`."""

    tenant: str
    lane: str
    seq: int
    op: str
    adapter: str
    digest: str
    size: int
    body: bytes = b""
    work: int = 0  # tokens that it computes on, known once its body was checked
    sequences: int = 0  # continuations that a sample asks for,
    places: int = 0  # and the places in a sampler's cache that they take

    @property
    def request_id(self) -> str:
        return f"{self.tenant}/{self.lane}/{self.seq}"


class Settings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decisions depend on beside the log's events: logged with each leader, so that a replay decides alike."""

    policy: str = "round_robin"
    turn_requests: int = 8  # most requests of one adapter in one turn
    held_requests: int = 64  # most requests of one adapter held for a missing seq
    gap_deadline_ms: int = 30_000
    tenant_queue: int = 256
    total_queue: int = 8192
    result_retention_ms: int = 600_000
    outcomes: int = 0  # that are remembered, the oldest minute being forgotten sooner beyond it; 0: all within the retention
    snapshot_after_requests: int = 256  # re-execution after a loss is bounded by this many requests of one adapter
    snapshot_fallback: bool = False  # a damaged snapshot: rebuild from the one before it
    snapshot_share: float = 0.0  # snapshot once this share of the re-execution time pays for writing one; 0: by count only
    snapshot_after_bytes: int = 2**60  # of bodies kept for a re-execution of one adapter
    snapshot_beside: bool = False  # snapshots are written while the group computes on, one at a time
    turn_least_us: int = 50_000  # fair: a turn is worth so much accelerator time, or
    turn_switches: float = 20.0  # so many times what a switch costs, whichever is more,
    turn_most_us: int = 2_000_000  # but no more than this, while there is work for it
    shares: dict[str, Share] = {}
    plan_us: int = 0  # turns are planned together, as one commit, while they are expected to take no longer than this; 0: one by one
    resident_turns: int = 0  # a resident that had work in so many turns keeps its device slot; 0: the oldest gives way
    move_gain: float = 0.0  # an adapter leaves once what others waited for in its group is so many times what the move costs; 0: never
    parking: bool = True  # test seam: False plants the lost-gradient fault that the suite must notice

    def share(self, tenant: str) -> Share:
        return (self.shares.get(tenant) or self.shares.get("default", EQUAL)) if self.shares else EQUAL


# --- events ------------------------------------------------------------------------------------------------------


class RequestAccepted(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="request_accepted/1"):
    request: Request
    group: str = ""  # create_adapter: the adapter's home
    signature: tuple[int, float, tuple[str, ...], int] | None = None  # create_adapter: rank, alpha, targets, seed
    unordered: bool = False  # create_adapter: seqs are identities, not an order
    pinned: bool = False  # create_adapter: its tenant named the group, which it does not leave


class RequestRefused(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="request_refused/1"):
    """`request` is absent when not even an identity could be read. `consumed`: the seq is spent, the next one may run."""

    error: ErrorInfo
    request: Request | None = None
    consumed: bool = False
    intake_id: str = ""


class RequestCancelled(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="request_cancelled/1"):
    request_id: str
    by: str


class RequestCompleted(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="request_completed/1"):
    """The body itself went to the tenant's results stream under this event's log id."""

    request_id: str
    result_digest: str = ""
    result_bytes: int = 0


class RequestFailed(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="request_failed/1"):
    request_id: str
    error: ErrorInfo


class StepStarted(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="step_started/1"):
    group: str
    step: Step


class StepFinished(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="step_finished/1"):
    """`cost_us`: accelerator time of the step, measured by the worker."""

    group: str
    step_id: int
    facts: Facts
    cost_us: int = 0


class StepFailed(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="step_failed/1"):
    group: str
    step_id: int
    error: ErrorInfo
    facts: Facts | None = None
    cost_us: int = 0


class WorkersJoined(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="workers_joined/1"):
    """`incarnation` differs for every set of worker processes; a known one means that the daemon, not the workers, was away."""

    group: str
    incarnation: str
    spec: GroupSpec
    facts: Facts


class WorkersLost(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="workers_lost/1"):
    group: str
    incarnation: str
    reason: str


class LeaderElected(msgspec.Struct, frozen=True, omit_defaults=True, tag="leader_elected/1"):
    epoch: int
    leader: str
    settings: Settings


ALL_KINDS = (
    RequestAccepted,
    RequestRefused,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    StepStarted,
    StepFinished,
    StepFailed,
    WorkersJoined,
    WorkersLost,
    LeaderElected,
)
Event = (
    RequestAccepted
    | RequestRefused
    | RequestCancelled
    | RequestCompleted
    | RequestFailed
    | StepStarted
    | StepFinished
    | StepFailed
    | WorkersJoined
    | WorkersLost
    | LeaderElected
)

#: old tag -> (new tag, function that lifts the old fields in place). Empty while every kind is at its first version.
UPCASTS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {}

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    return _ENCODER.encode(event)


def decode(data: bytes) -> Event:
    """Raises `LogVersion` where the event's kind or version is unknown here."""
    try:
        return _DECODER.decode(data)
    except msgspec.ValidationError as error:
        return _upcast(data, error)


def _upcast(data: bytes, error: msgspec.ValidationError) -> Event:
    raw = msgspec.msgpack.decode(data)
    tag = raw.get("type") if isinstance(raw, dict) else None
    if tag not in UPCASTS:
        raise LogVersion(f"event {tag!r} cannot be read: {error}") from error
    while tag in UPCASTS:
        tag, lift = UPCASTS[tag]
        lift(raw)
        raw["type"] = tag
    event: Event = msgspec.convert(raw, Event)
    return event
