"""Snapshots of the daemon's own state: a start needs the newest one and the log's tail, not the whole history.

A snapshot is never trusted over the log: its log id says what it covers, and `load_fleet` refuses a log that does not hold that event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import anyio.lowlevel
import msgspec

from state import log_id as ids
from state.archive import History
from state.errors import LogTruncated
from state.events import LeaderElected, decode
from state.files import Files
from state.fleet import Fleet, apply
from state.fleet import decode as decode_fleet
from state.log import EventLog

MAGIC = b"hotdesk-state/2\n"  # another number where the fold makes something else of the same events: then they are folded again
KEPT = 3
READ_EVENTS = 4096


def write(files: Files, log_id: int, body: bytes) -> None:
    """`body`: the encoded fleet as of `log_id`. Durable once this returns; older ones beyond `KEPT` are removed. Raises `OSError`."""
    files.write(f"state-{log_id:020d}.msgpack", MAGIC + hashlib.sha256(body).digest() + body)
    for old in names(files)[:-KEPT]:
        files.remove(old)


def names(files: Files) -> list[str]:
    return [name for name in files.names() if name.startswith("state-") and name.endswith(".msgpack")]


def covered(files: Files) -> int:
    """The log id up to which every kept snapshot covers the log; 0 while fewer than two are kept."""
    kept = names(files)
    return int(kept[0].removeprefix("state-").removesuffix(".msgpack")) if len(kept) > 1 else 0


def read(files: Files, name: str) -> Fleet:
    """Raises `ValueError` where the file is torn or damaged, `OSError` where it cannot be read."""
    data = files.read(name)
    head, digest, body = data[: len(MAGIC)], data[len(MAGIC) : len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if head != MAGIC and head.startswith(MAGIC[:14]):
        raise ValueError("another version of the fold wrote it")
    if head != MAGIC or hashlib.sha256(body).digest() != digest:
        raise ValueError("its digest differs from its content")
    try:
        return decode_fleet(body)
    except msgspec.DecodeError as error:
        raise ValueError(f"it cannot be read: {error}") from error


def newest(files: Files, damaged: Callable[[str, Exception], None] = lambda name, error: None) -> Fleet | None:
    """The newest one that is whole; those after it are named to `damaged`."""
    for name in reversed(names(files)):
        try:
            return read(files, name)
        except (ValueError, OSError) as error:
            damaged(name, error)
    return None


async def load_fleet(
    files: Files | None, history: History, damaged: Callable[[str, Exception], None] = lambda name, error: None
) -> tuple[Fleet, int]:
    """Snapshot plus tail, and how many events the tail had. Raises `LogTruncated` where the two do not meet."""
    snapshot = newest(files, damaged) if files is not None else None
    log = history.log
    if snapshot is not None and log is not None and not await _holds(log, snapshot.log_id):
        _, last = await log.bounds()
        raise LogTruncated(
            f"this daemon has seen the log up to {ids.text(snapshot.log_id)}; it does not hold that event, and ends at {ids.text(last)}: "
            "the server lost data or is another one"
        )
    fleet = snapshot or Fleet()
    tail = 0
    while events := await history.read(fleet.log_id, READ_EVENTS):
        for log_id, data in events:
            event = decode(data)
            if fleet.events == 0 and not isinstance(event, LeaderElected):
                raise LogTruncated(f"the log begins at {ids.text(log_id)} in the middle of a history, and there is no snapshot")
            apply(fleet, log_id, event)
            tail += 1
        await anyio.lowlevel.checkpoint()  # an archive is read without a pause, and the lease must be kept meanwhile
    return fleet, tail


async def _holds(log: EventLog, log_id: int) -> bool:
    """Or held: a newer leader may have archived and trimmed what this one knew before it stood still; the archive goes on from there."""
    found = await log.read(log_id - 1, 1)
    return (bool(found) and found[0][0] == log_id) or log_id < await log.trimmed()
