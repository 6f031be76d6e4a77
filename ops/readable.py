"""Events as text: one line each, in the log's own words."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from state import log_id as ids
from state.events import (
    Event,
    LeaderElected,
    RequestAccepted,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestRefused,
    Step,
    StepFailed,
    StepFinished,
    StepKind,
    StepStarted,
    WorkersJoined,
    WorkersLost,
)


def kind_of(event: Event) -> str:
    """`request_accepted`, without the schema version."""
    return str(event.__struct_config__.tag).partition("/")[0]


def time_of(log_id: int) -> str:
    return datetime.fromtimestamp(ids.ms_of(log_id) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def line(log_id: int, event: Event) -> str:
    return f"{time_of(log_id)} {ids.text(log_id):<18} {kind_of(event):<17} {detail(event)}"


def as_json(log_id: int, event: Event) -> bytes:
    return msgspec.json.encode({"id": ids.text(log_id), "time": time_of(log_id), "event": event})


def step_text(step: Step) -> str:
    what = f"{step.kind} {step.op}" if step.kind is StepKind.EXECUTE else str(step.kind)
    extras = [*step.parts, *(name for name in ("keep", "discard", "redo") if getattr(step, name))]
    return " ".join(part for part in (f"#{step.id}", what, step.adapter, *extras, step.to and f"to {step.to}") if part)


def detail(event: Event) -> str:
    match event:
        case RequestAccepted(request=request):
            return f"{request.request_id} {request.op} {request.adapter} {request.size} B"
        case RequestRefused(error=error):
            return f"{error.request_id or '(no identity)'} {error.code}: {error.message}"
        case RequestCancelled(request_id=request_id, by=by):
            return f"{request_id} by {by}"
        case RequestCompleted():
            return f"{event.request_id} {event.result_bytes} B"
        case RequestFailed(request_id=request_id, error=error):
            return f"{request_id} {error.code}: {error.message}"
        case StepStarted(group=group, step=step):
            return f"{group} {step_text(step)}{f' for {step.request_id}' if step.request_id else ''}"
        case StepFinished():
            facts = event.facts
            return f"{event.group} #{event.step_id} {event.cost_us / 1000:.1f} ms live={facts.live or '-'} moved={facts.moved_bytes} B"
        case StepFailed():
            return f"{event.group} #{event.step_id} {event.error.code}: {event.error.message}"
        case WorkersJoined():
            return f"{event.group} {event.incarnation} {event.spec.backend} tp={event.spec.tp} dp={event.spec.dp}"
        case WorkersLost():
            return f"{event.group} {event.incarnation} {event.reason}"
        case LeaderElected():
            return f"epoch {event.epoch} {event.leader} policy={event.settings.policy}"


def names(event: Event) -> str:
    """What a filter by tenant, adapter or request looks at."""
    match event:
        case RequestAccepted(request=request):
            return f"{request.request_id} {request.adapter}"
        case RequestRefused(error=error):
            return f"{error.request_id} {error.tenant}/{error.adapter}"
        case StepStarted(step=step):
            return f"{step.request_id} {step.adapter} {step.live}"
        case StepFinished(facts=facts):
            return " ".join(seen.adapter for seen in facts.adapters)
        case RequestCancelled() | RequestCompleted() | RequestFailed():
            return event.request_id
        case _:
            return ""
