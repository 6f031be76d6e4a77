"""Log ids: `<milliseconds>-<n>` on the server, one integer here, so that order is `<` and time is a shift."""

from __future__ import annotations

_BITS = 20  # a million events in one millisecond; 43 bits of milliseconds reach the year 2248


def make(ms: int, n: int = 0) -> int:
    return (ms << _BITS) | n


def ms_of(log_id: int) -> int:
    return log_id >> _BITS


def text(log_id: int) -> str:
    return f"{log_id >> _BITS}-{log_id & ((1 << _BITS) - 1)}"


def parse(value: str | bytes) -> int:
    """Raises `ValueError` where `value` is no log id."""
    ms, _, n = (value.decode() if isinstance(value, bytes) else value).partition("-")
    return make(int(ms), int(n or 0))


def following(last: int, now_ms: int) -> int:
    """The id of the next event: the clock's, or one more than the last where the clock stood still or stepped back."""
    return max(last + 1, make(now_ms))
