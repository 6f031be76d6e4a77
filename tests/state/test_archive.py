"""Archived segments, and archive and log read as one history."""

from __future__ import annotations

import pytest

from state import log_id as ids
from state.archive import Archive, History
from state.errors import LogTruncated
from state.files import Directory
from state.log import Commit
from state.memory_log import MemoryLog

pytestmark = pytest.mark.anyio
EVENTS = [(ids.make(1000 + n), f"event {n}".encode()) for n in range(40)]


@pytest.fixture
async def log():
    store = MemoryLog()
    await store.commit(await store.fence(), Commit(0, EVENTS))
    return store


async def archived(archive, log, through):
    while segment := await archive.following(log, through):
        archive.add(segment)
    return archive


async def read_all(history):
    read, after = [], 0
    while events := await history.read(after, 7):
        read += events
        after = events[-1][0]
    return read


async def test_what_was_trimmed_reads_as_if_it_were_still_there(log, tmp_path):
    archive = await archived(Archive(Directory(tmp_path), segment_events=12), log, EVENTS[29][0])
    assert len(archive.spans()) == 3
    await log.trim(log.epoch, EVENTS[29][0])
    assert await log.bounds() == (EVENTS[29][0], EVENTS[39][0])
    assert await read_all(History(Archive(Directory(tmp_path)), log)) == EVENTS
    assert await read_all(History(Archive(Directory(tmp_path)), None)) == EVENTS[:30]


async def test_archiving_goes_on_where_it_stopped(log, tmp_path):
    await archived(Archive(Directory(tmp_path)), log, EVENTS[9][0])
    await log.trim(log.epoch, EVENTS[9][0])
    await archived(Archive(Directory(tmp_path)), log, EVENTS[20][0])
    await log.trim(log.epoch, EVENTS[20][0])
    assert await read_all(History(Archive(Directory(tmp_path)), log)) == EVENTS


async def test_segments_of_a_deposed_leader_and_its_successor_may_overlap(log, tmp_path):
    """Found by simulation: a segment that a deposed leader wrote late had replaced a longer one, whose events were trimmed already."""
    late = await Archive(Directory(tmp_path)).following(log, EVENTS[4][0])
    await archived(Archive(Directory(tmp_path)), log, EVENTS[9][0])
    await log.trim(log.epoch, EVENTS[9][0])
    Archive(Directory(tmp_path)).add(late)
    assert await read_all(History(Archive(Directory(tmp_path)), log)) == EVENTS


@pytest.mark.parametrize("harm", ["gone", "flipped", "torn"])
async def test_a_missing_or_damaged_segment_is_named(log, tmp_path, harm):
    archive = await archived(Archive(Directory(tmp_path), segment_events=12), log, EVENTS[29][0])
    await log.trim(log.epoch, EVENTS[29][0])
    victim = tmp_path / archive.files.names()[1]
    data = bytearray(victim.read_bytes())
    if harm == "gone":
        victim.unlink()
    elif harm == "torn":
        victim.write_bytes(data[:-9])
    else:
        data[len(data) // 2] ^= 16
        victim.write_bytes(data)
    with pytest.raises(LogTruncated, match="lacks the events" if harm == "gone" else victim.name):
        await read_all(History(Archive(Directory(tmp_path)), log))


async def test_a_trimmed_log_without_its_archive_is_refused(log, tmp_path):
    await log.trim(log.epoch, EVENTS[29][0])
    with pytest.raises(LogTruncated, match="no archive holds"):
        await read_all(History(Archive(Directory(tmp_path)), log))


async def test_a_trim_between_two_reads_is_noticed(log, tmp_path, monkeypatch):
    """Found by simulation: a standby that read the log while the leader trimmed it had folded across the hole."""
    history = History(await archived(Archive(Directory(tmp_path)), log, EVENTS[29][0]), log)
    read = await history.read(0, 10)
    await log.trim(log.epoch, EVENTS[29][0])
    assert await history.read(read[-1][0], 100) == EVENTS[10:30]


async def test_a_log_that_ends_before_the_archive_is_refused(log, tmp_path):
    await archived(Archive(Directory(tmp_path)), log, EVENTS[29][0])
    for survivors in ([], EVENTS[:10]):
        other = MemoryLog()
        await other.commit(await other.fence(), Commit(0, survivors))
        with pytest.raises(LogTruncated, match="lost data"):
            await read_all(History(Archive(Directory(tmp_path)), other))


async def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    import os

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Directory(tmp_path).write("one", b"data")
    assert list(tmp_path.iterdir()) == []
