"""The event log as files: segments of checksummed records, for archives, golden logs and reading a log without a server.

A segment `FIRST.hdlog` is a magic line, then records of `<crc32:4><length:4><id:8><event>`, little-endian. A torn last record (a crash
while writing) is cut off at the next open; damage anywhere else is an error that names the byte.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from state import log_id as ids
from state.errors import Fenced, LogDiverged, LogTruncated
from state.files import Directory
from state.log import Commit

MAGIC = b"hotdesk-log/1\n"
SEGMENT_BYTES = 64 * 2**20
_RECORD = struct.Struct("<IIQ")


class SegmentLog:
    """A directory of segments. Writes are synced before `commit` returns. Takes events only: no intake, no results."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES, *, read_only: bool = False) -> None:
        """`read_only`: raises `LogTruncated` where there is nothing to read, and changes nothing."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        segments = self._segments()
        if read_only and not segments:
            raise LogTruncated(f"{directory} holds no log segments")
        if not read_only:
            directory.mkdir(parents=True, exist_ok=True)
        if segments and not read_only:
            _cut_torn_tail(segments[-1])
        self.last = max((log_id for path in segments[-1:] for log_id, _ in read_segment(path)), default=0)

    async def commit(self, epoch: int, commit: Commit) -> None:
        if epoch != self._epoch():
            raise Fenced(f"epoch {epoch} tried to append, epoch {self._epoch()} leads")
        if self.last != commit.after:
            raise LogDiverged(f"the log ends at {ids.text(self.last)}, this daemon's at {ids.text(commit.after)}")
        if not commit.events:
            return
        segments = self._segments()
        fresh = not segments or segments[-1].stat().st_size >= self.segment_bytes
        path = self.directory / f"{commit.events[0][0]:020d}.hdlog" if fresh else segments[-1]
        with open(path, "ab") as file:
            if fresh:
                file.write(MAGIC)
            file.write(b"".join(_record(log_id, data) for log_id, data in commit.events))
            file.flush()
            os.fsync(file.fileno())
        self.last = commit.events[-1][0]

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        segments = self._segments()
        for path, following in zip(segments, [*segments[1:], None]):
            if following is not None and int(following.stem) <= after + 1:
                continue
            for log_id, data in read_segment(path):
                if log_id > after:
                    found.append((log_id, data))
                if len(found) == limit:
                    return found
        return found

    async def bounds(self) -> tuple[int, int]:
        segments = self._segments()
        return (int(segments[0].stem), self.last) if segments else (0, 0)

    async def trimmed(self) -> int:
        return 0

    async def fence(self) -> int:
        epoch = self._epoch() + 1
        aside = self.directory / ".epoch"
        aside.write_text(str(epoch))
        aside.rename(self.directory / "epoch")
        return epoch

    def _epoch(self) -> int:
        path = self.directory / "epoch"
        return int(path.read_text()) if path.exists() else 0

    def _segments(self) -> list[Path]:
        return sorted(self.directory.glob("*.hdlog"))


def write_segment(path: Path, events: list[tuple[int, bytes]]) -> None:
    """One finished segment, written aside and renamed."""
    Directory(path.parent).write(path.name, MAGIC + b"".join(_record(log_id, data) for log_id, data in events))


def read_segment(path: Path) -> Iterator[tuple[int, bytes]]:
    """Events of one segment. Raises `LogTruncated` with the byte where a record is damaged."""
    data = path.read_bytes()
    for _, log_id, event in _records(path, data):
        yield log_id, event


def _record(log_id: int, data: bytes) -> bytes:
    head = struct.pack("<IQ", len(data), log_id)
    return struct.pack("<I", zlib.crc32(head + data)) + head + data


def _records(path: Path, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(offset behind the record, id, event)."""
    if not data.startswith(MAGIC):
        raise LogTruncated(f"{path} is no Hotdesk log segment")
    offset = len(MAGIC)
    while offset < len(data):
        if offset + _RECORD.size > len(data):
            raise LogTruncated(f"{path} breaks off at byte {offset}")
        crc, length, log_id = _RECORD.unpack_from(data, offset)
        end = offset + _RECORD.size + length
        if end > len(data) or zlib.crc32(data[offset + 4 : end]) != crc:
            raise LogTruncated(f"{path} is damaged at byte {offset}")
        yield end, log_id, data[offset + _RECORD.size : end]
        offset = end


def _cut_torn_tail(path: Path) -> None:
    """Cuts a record that a crash left half-written at the very end; a damaged record before the end is no torn tail."""
    data = path.read_bytes()
    good = len(MAGIC)
    try:
        for end, _, _ in _records(path, data):
            good = end
    except LogTruncated:
        if len(data) - good >= _RECORD.size:
            _, length, _ = _RECORD.unpack_from(data, good)
            if good + _RECORD.size + length < len(data):
                raise
        os.truncate(path, good)
