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

    def spans(self) -> list[tuple[int, int]]:
        """(first, last) id of each segment, in order. Those of a deposed leader and its successor may overlap; none replaces another."""
        names = [name.removesuffix(SUFFIX).split("-") for name in self.files.names() if name.endswith(SUFFIX)]
        return sorted((int(first), int(last)) for first, last in names)

    def last(self) -> int:
        """Id of the newest archived event; 0 for none."""
        return max((last for _, last in self.spans()), default=0)

    def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` events after `after`, from one segment. Raises `LogTruncated` where the archive has a hole or damage."""
        span = next((span for span in self.spans() if span[1] > after), None)
        if span is None:
            return []
        segment = self._open(*span)
        if segment.continues > after:
            raise LogTruncated(f"the archive lacks the events from {ids.text(after)} to {ids.text(segment.continues)}")
        at = bisect_right(segment.events, after, key=lambda event: event[0])
        return segment.events[at : at + limit]

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
        self.files.write(_name(segment.events[0][0], segment.events[-1][0]), pack(segment))

    def _open(self, first: int, last: int) -> Segment:
        name = _name(first, last)
        if self._opened is None or self._opened[0] != name:
            self._opened = name, unpack(name, self.files.read(name))
        return self._opened[1]


def _name(first: int, last: int) -> str:
    return f"{first:020d}-{last:020d}{SUFFIX}"


class History:
    """Archive and log as one `read`. Where both hold an event, the log's copy is read. `log` None: the archive alone."""

    def __init__(self, archive: Archive | None, log: EventLog | None) -> None:
        self.archive, self.log = archive, log

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Raises `LogTruncated` where the two do not meet."""
        if self.log is None:
            return self._archived(after, limit)
        held = await self.log.read(after - 1 if after else 0, limit + 1)
        # The event at `after` itself proves that nothing between is missing: a leader may trim between any two reads.
        if held and (held[0][0] == after or not (after or await self.log.trimmed())):
            events = held[1:] if after else held[:limit]
            if not events and self._archived(after, 1):
                raise LogTruncated(f"the log ends at {ids.text(after)}, and the archive holds events after that: the server lost data")
            return events
        archived = self._archived(after, limit)
        if not held and not after and archived and any(await self.log.bounds()):
            return await self.read(after, limit)  # the fleet's first leader began, and archived, between the two looks
        if not held and (after or archived):
            raise LogTruncated(f"the log holds nothing from {ids.text(after)} on, and it or its archive did before: the server lost data")
        if held and not archived:
            raise LogTruncated(f"the log begins at {ids.text(held[0][0])}, and no archive holds what was after {ids.text(after)}")
        return archived

    def _archived(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        return self.archive.read(after, limit) if self.archive is not None else []
