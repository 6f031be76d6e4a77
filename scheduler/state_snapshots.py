"""Snapshots of the daemon's own state: a start needs the newest one and the log's tail, not the whole history.

A snapshot is never trusted over the log: its log id says what it covers, and `load_fleet` refuses a log that begins after it or ends
before it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from state import log_id as ids
from state.errors import LogTruncated
from state.events import LeaderElected, decode
from state.fleet import Fleet, apply
from state.fleet import decode as decode_fleet
from state.fleet import encode as encode_fleet
from state.log import EventLog

MAGIC = b"hotdesk-state/1\n"
KEPT = 3
READ_EVENTS = 4096


def write(directory: Path, fleet: Fleet) -> Path:
    """Durable once this returns; older ones beyond `KEPT` are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    body = encode_fleet(fleet)
    path = directory / f"state-{fleet.log_id:020d}.msgpack"
    aside = path.with_suffix(".aside")
    with open(aside, "wb") as file:
        file.write(MAGIC + hashlib.sha256(body).digest() + body)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    for old in sorted(directory.glob("state-*.msgpack"))[:-KEPT]:
        old.unlink()
    return path


def read(path: Path) -> Fleet | None:
    """None where the file is torn or damaged: the one before it is used then."""
    data = path.read_bytes()
    head, digest, body = data[: len(MAGIC)], data[len(MAGIC) : len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if head != MAGIC or hashlib.sha256(body).digest() != digest:
        return None
    try:
        return decode_fleet(body)
    except msgspec.DecodeError:
        return None


def newest(directory: Path) -> Fleet | None:
    for path in sorted(directory.glob("state-*.msgpack"), reverse=True):
        fleet = read(path)
        if fleet is not None:
            return fleet
    return None


async def load_fleet(directory: Path | None, log: EventLog) -> Fleet:
    """Snapshot plus tail. Raises `LogTruncated` where the two do not meet."""
    snapshot = newest(directory) if directory is not None else None
    first, last = await log.bounds()
    if snapshot is not None and last < snapshot.log_id:
        raise LogTruncated(
            f"the log ends at {ids.text(last)}, but this daemon has seen it up to {ids.text(snapshot.log_id)}: "
            "the server lost data or is another one"
        )
    if snapshot is not None and first > snapshot.log_id:
        raise LogTruncated(f"the log begins at {ids.text(first)}, after the newest snapshot at {ids.text(snapshot.log_id)}")
    fleet = snapshot or Fleet()
    while events := await log.read(fleet.log_id, READ_EVENTS):
        for log_id, data in events:
            event = decode(data)
            if fleet.events == 0 and not isinstance(event, LeaderElected):
                raise LogTruncated(f"the log begins at {ids.text(log_id)} in the middle of a history, and there is no snapshot")
            apply(fleet, log_id, event)
    return fleet
