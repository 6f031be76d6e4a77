"""Typed errors that cross a boundary: from intake to a tenant, from a worker to the daemon, from the log to an operator.

An error says what happened, whose request it was and what the caller can do. `ErrorInfo` is its form on the wire and in
the log; `raise_error` turns it back into the class that was raised on the other side.
"""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An error as data. `code` is the class name in `ERRORS`."""

    code: str
    message: str
    tenant: str = ""
    adapter: str = ""
    request_id: str = ""
    way_out: str = ""
    retry_after_ms: int = 0


class HotdeskError(Exception):
    """Base of every error that Hotdesk raises on purpose."""

    way_out = "see the message"

    def __init__(
        self,
        message: str,
        *,
        tenant: str = "",
        adapter: str = "",
        request_id: str = "",
        way_out: str = "",
        retry_after_ms: int = 0,
    ) -> None:
        self.info = ErrorInfo(type(self).__name__, message, tenant, adapter, request_id, way_out or type(self).way_out, retry_after_ms)
        super().__init__(message)

    def __str__(self) -> str:
        info = self.info
        whose = ", ".join(
            f"{name} {value!r}"
            for name, value in (("tenant", info.tenant), ("adapter", info.adapter), ("request", info.request_id))
            if value
        )
        return f"{info.message}{f' ({whose})' if whose else ''}. Way out: {info.way_out}"


# --- what a tenant got wrong -------------------------------------------------------------------------------------


class RequestError(HotdeskError):
    """The request cannot be served as sent."""


class MalformedRequest(RequestError):
    way_out = "send a request in the documented msgpack form (state/requests.py)"


class UnknownOperation(RequestError):
    way_out = "use one of the operations listed in state/requests.py"


class BadName(RequestError):
    way_out = "use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit, without '..'"


class UnknownRequest(RequestError):
    way_out = "copy the request's id from `hotdesk log`; ids are tenant/lane/seq"


class UnknownAdapter(RequestError):
    way_out = "create the adapter first, or check its name"


class ForeignAdapter(RequestError):
    way_out = "a tenant can use only its own adapters"


class AdapterExists(RequestError):
    way_out = "choose another name, or unload the adapter first"


class BadSignature(RequestError):
    way_out = "keep rank, alpha and targets within what the worker group offers"


class BadBody(RequestError):
    way_out = "correct the request's data and send it under the next seq"


class BodyTooLarge(RequestError):
    way_out = "split the batch: gradients of several forward_backward requests add up"


class RequestConflict(RequestError):
    way_out = "a request identity is used once: send the new body under the next seq"


class ResultExpired(RequestError):
    way_out = "the request was applied; results are kept for [limits] result_retention_s only"


class Busy(RequestError):
    way_out = "send the same request again after retry_after_ms; nothing was accepted"


class GapExpired(RequestError):
    way_out = "the seq before this request never came: send the missing requests, then this work under new seqs"


class Cancelled(RequestError):
    way_out = "the request was cancelled before it ran"


class NotCancellable(RequestError):
    way_out = "only a queued request can be cancelled; await the running one"


class WindowVoided(RequestError):
    way_out = "an earlier forward_backward failed, so the pending gradients were discarded: send the batch again"


class CheckpointExists(RequestError):
    way_out = "choose another name, or save with overwrite"


class UnknownCheckpoint(RequestError):
    way_out = "check the checkpoint's name and kind (training and sampler names are separate)"


class BadCheckpoint(RequestError):
    way_out = "the checkpoint is incomplete, damaged or of another signature: load another one"


# --- what went wrong on our side ---------------------------------------------------------------------------------


class WorkerFailed(HotdeskError):
    way_out = "the worker reported an error for this request only; correct the request or ask the operator"


class WorkersLostError(HotdeskError):
    way_out = "the worker group died while this request ran; send it again once the group is back"


class AdapterLost(HotdeskError):
    way_out = "its state died with the worker group: create it again and load its last checkpoint"


class NoGroup(HotdeskError):
    way_out = "no worker group has joined; try again when one has"


# --- what a worker refuses (nothing was touched) -----------------------------------------------------------------


class StepRefused(HotdeskError):
    """The worker compared the call with what it observes and did not act."""


class StaleEpoch(StepRefused):
    way_out = "a newer leader commands this worker; stop this daemon"


class StepOutOfOrder(StepRefused):
    way_out = "an earlier step of this plan failed or never came; plan again from the worker's facts"


class WrongLive(StepRefused):
    way_out = "plan again from the worker's facts: another adapter is live"


class NotResident(StepRefused):
    way_out = "backload the named parts first: their storage is not on the device"


class PendingUnparked(StepRefused):
    way_out = "park the live adapter first: its pending gradients would be lost"


class UnknownSlot(StepRefused):
    way_out = "create or restore the adapter first: the worker has no slot for it"


class OutOfMemory(StepRefused):
    way_out = "raise the byte budget, or spill or unload adapters"


class UnknownLayout(StepRefused):
    way_out = "use an optimizer layout that the adapter store knows"


# --- what an operator has to settle ------------------------------------------------------------------------------


class OperatorError(HotdeskError):
    """Stops a command or the daemon, with words."""


class ServerFault(OperatorError):
    way_out = "look at the server's own log; nothing acknowledged is lost while its data directory is intact"


class ConfigError(OperatorError):
    way_out = "correct the configuration"


class Fenced(OperatorError):
    way_out = "another daemon leads this fleet now; nothing was written"


class LogDiverged(OperatorError):
    way_out = "the log is not the one this daemon wrote: stop everything, compare the snapshot with the server's data"


class LogTruncated(OperatorError):
    way_out = "restore the server's data, or name an archive that covers the gap; Hotdesk never starts over silently"


class LogVersion(OperatorError):
    way_out = "this log was written by a newer Hotdesk: upgrade before reading it"


ERRORS: dict[str, type[HotdeskError]] = {}


def _register(cls: type[HotdeskError]) -> None:
    ERRORS[cls.__name__] = cls
    for sub in cls.__subclasses__():
        _register(sub)


_register(HotdeskError)


def error_from(info: ErrorInfo) -> HotdeskError:
    """The exception that `info` was made from; an unknown code becomes a plain `HotdeskError`."""
    cls = ERRORS.get(info.code, HotdeskError)
    return cls(
        info.message,
        tenant=info.tenant,
        adapter=info.adapter,
        request_id=info.request_id,
        way_out=info.way_out,
        retry_after_ms=info.retry_after_ms,
    )
