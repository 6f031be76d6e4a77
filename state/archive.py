"""The archive: what the log held before it was trimmed, as compressed segments, and the two read as one history.

Each segment says which event it continues, so a missing one is noticed by name. The newest archived event stays in the log when that is
trimmed: archive and log overlap by at least one event, which proves that they belong together.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right

import msgspec

from state import log_id as ids
from state.errors import LogTruncated
from state.files import Files
from state.log import EventLog

MAGIC = b"hotdesk-archive/1\n"
SUFFIX = ".hdlogz"
SEGMENT_EVENTS = 50_000
READ_EVENTS = 4096


class Segment(msgspec.Struct, array_like=True):
    """`continues`: id of the event before the first; 0 at the beginning of the history."""

    continues: int
    events: list[tuple[int, bytes]]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Segment)


def pack(segment: Segment) -> bytes:
    return MAGIC + zlib.compress(_ENCODER.encode(segment))


def unpack(name: str, data: bytes) -> Segment:
    """Raises `LogTruncated` where the file `name` is damaged."""
    if not data.startswith(MAGIC):
        raise LogTruncated(f"{name} is no archived segment")
    try:
        return _DECODER.decode(zlib.decompress(data[len(MAGIC) :]))
    except (zlib.error, msgspec.DecodeError) as error:
        raise LogTruncated(f"archived segment {name} is damaged: {error}") from error


class Archive:
    """Reading keeps one unpacked segment, so memory is bounded whatever the history's length."""

    def __init__(self, files: Files, segment_events: int = SEGMENT_EVENTS) -> None:
        self.files = files
        self.segment_events = segment_events
        self._opened: tuple[str, Segment] | None = None

    def first_ids(self) -> list[int]:
        return [int(name.removesuffix(SUFFIX)) for name in self.files.names() if name.endswith(SUFFIX)]

    def last(self) -> int:
        """Id of the newest archived event; 0 for none."""
        firsts = self.first_ids()
        return self._open(firsts[-1]).events[-1][0] if firsts else 0

    def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` events after `after`, from one segment. Raises `LogTruncated` where the archive has a hole or damage."""
        firsts = self.first_ids()
        start = max(0, bisect_right(firsts, after) - 1)
        for first in firsts[start : start + 2]:
            segment = self._open(first)
            if segment.events[-1][0] <= after:
                continue
            if segment.continues > after:
                raise LogTruncated(f"the archive lacks the events from {ids.text(after)} to {ids.text(segment.continues)}")
            at = bisect_right(segment.events, after, key=lambda event: event[0])
            return segment.events[at : at + limit]
        return []

    async def following(self, log: EventLog, through: int) -> Segment | None:
        """The next segment to `add`: what `log` holds up to `through` and is not archived yet."""
        last = self.last()
        events: list[tuple[int, bytes]] = []
        while len(events) < self.segment_events:
            read = await log.read(events[-1][0] if events else last, min(READ_EVENTS, self.segment_events - len(events)))
            events += [event for event in read if event[0] <= through]
            if not read or read[-1][0] >= through:
                break
        return Segment(last, events) if events else None

    def add(self, segment: Segment) -> None:
        """Durable once this returns. Raises `OSError`."""
        self.files.write(f"{segment.events[0][0]:020d}{SUFFIX}", pack(segment))

    def _open(self, first: int) -> Segment:
        name = f"{first:020d}{SUFFIX}"
        if self._opened is None or self._opened[0] != name:
            self._opened = name, unpack(name, self.files.read(name))
        return self._opened[1]


class History:
    """Archive and log as one `read`. Where both hold an event, the log's copy is read. `log` None: the archive alone."""

    def __init__(self, archive: Archive | None, log: EventLog | None) -> None:
        self.archive, self.log = archive, log

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Raises `LogTruncated` where the two do not meet."""
        if self.log is None:
            return self._archived(after, limit)
        first, last = await self.log.bounds()
        if after >= first:
            events = await self.log.read(after, limit)
            if not events and self._archived(after, 1):
                raise LogTruncated(f"the log ends at {ids.text(last)}, and the archive holds events after that: the server lost data")
            return events
        events = self._archived(after, limit)
        if not events and (after or await self.log.trimmed()):
            raise LogTruncated(f"the log begins at {ids.text(first)}, and no archive holds what was after {ids.text(after)}")
        return events or await self.log.read(after, limit)

    def _archived(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        return self.archive.read(after, limit) if self.archive is not None else []
