"""One test class for every store of the event log; more for those that also carry intake, results and the lease."""

from __future__ import annotations

import itertools
import os

import anyio
import pytest

from state import log_id as ids
from state import redis_log
from state.errors import Busy, Fenced, LogDiverged, LogTruncated
from state.log import Commit, Result
from state.memory_log import MemoryLog
from state.redis_log import RedisLog
from state.segment_log import SegmentLog, read_segment

pytestmark = pytest.mark.anyio
_fleet = itertools.count()


@pytest.fixture(params=["memory", "redis", "segments"])
async def log(request, server, tmp_path):
    if request.param == "memory":
        yield MemoryLog()
    elif request.param == "segments":
        yield SegmentLog(tmp_path, segment_bytes=200)
    else:
        store = RedisLog.connect(server.url, f"logs{next(_fleet)}")
        yield store
        await store.close()


@pytest.fixture(params=["memory", "redis"])
async def store(request, server):
    if request.param == "memory":
        yield MemoryLog()
    else:
        made = RedisLog.connect(server.url, f"stores{next(_fleet)}", result_retention_ms=1000)
        yield made
        await made.close()


def event(n: int) -> tuple[int, bytes]:
    return ids.make(1000 + n), f"event {n}".encode()


class TestEventLog:
    async def test_reads_by_position_what_was_committed(self, log):
        epoch = await log.fence()
        await log.commit(epoch, Commit(0, [event(1), event(2)]))
        await log.commit(epoch, Commit(event(2)[0], [event(3)]))
        assert await log.read(0, 10) == [event(1), event(2), event(3)]
        assert await log.read(event(1)[0], 1) == [event(2)]
        assert await log.read(event(3)[0], 10) == []
        assert await log.bounds() == (event(1)[0], event(3)[0])

    async def test_is_empty_at_first(self, log):
        assert await log.bounds() == (0, 0)
        assert await log.read(0, 10) == []

    async def test_an_older_epoch_can_append_nothing(self, log):
        old = await log.fence()
        new = await log.fence()
        assert new > old
        with pytest.raises(Fenced):
            await log.commit(old, Commit(0, [event(1)]))
        await log.commit(new, Commit(0, [event(1)]))
        assert await log.read(0, 10) == [event(1)]

    async def test_a_commit_that_does_not_continue_the_log_is_refused_whole(self, log):
        epoch = await log.fence()
        await log.commit(epoch, Commit(0, [event(1)]))
        with pytest.raises(LogDiverged):
            await log.commit(epoch, Commit(0, [event(2), event(3)]))
        assert await log.read(0, 10) == [event(1)]

    async def test_many_events_come_back_in_order(self, log):
        epoch = await log.fence()
        last = 0
        for start in range(0, 300, 50):
            events = [event(n) for n in range(start, start + 50)]
            await log.commit(epoch, Commit(last, events))
            last = events[-1][0]
        read, after = [], 0
        while chunk := await log.read(after, 37):
            read += chunk
            after = chunk[-1][0]
        assert read == [event(n) for n in range(300)]


class TestStore:
    async def test_a_commit_takes_intake_entries_moves_bodies_and_publishes_results_at_once(self, store):
        epoch = await store.lead("me", 10_000)
        first = await store.submit(b"header 1", b"body 1")
        second = await store.submit(b"header 2", b"")
        entries = await store.read_intake("0-0", 10, 10)
        assert [(e.header, e.body) for e in entries] == [(b"header 1", b"body 1"), (b"header 2", b"")]
        await store.commit(epoch, Commit(0, [event(1)], [first], [("digest", first)], [Result("ada", event(1)[0], b"done")]))
        assert [e.intake_id for e in await store.read_intake("0-0", 10, 10)] == [second]
        assert await store.blob("digest") == b"body 1"
        assert await store.blob("other") is None
        assert await store.read_results("ada", 0, 10, 10) == [(event(1)[0], b"done")]
        assert await store.last_result("ada") == event(1)[0]

    async def test_a_fenced_commit_leaves_the_intake_alone(self, store):
        old = await store.fence()
        intake_id = await store.submit(b"header", b"body")
        await store.fence()
        with pytest.raises(Fenced):
            await store.commit(old, Commit(0, [event(1)], [intake_id], [("digest", intake_id)], [Result("ada", event(1)[0], b"x")]))
        assert len(await store.read_intake("0-0", 10, 10)) == 1
        assert await store.blob("digest") is None
        assert await store.read_results("ada", 0, 10, 10) == []

    async def test_a_first_result_is_repeated_under_a_new_id(self, store):
        epoch = await store.lead("me", 10_000)
        await store.commit(epoch, Commit(0, [event(1)], results=[Result("ada", event(1)[0], b"first")]))
        again = Result("ada", event(2)[0], b"fallback", first_at=event(1)[0])
        await store.commit(epoch, Commit(event(1)[0], results=[again]))
        unknown = Result("ada", event(3)[0], b"fallback", first_at=ids.make(7))
        await store.commit(epoch, Commit(event(1)[0], results=[unknown]))
        assert [payload for _, payload in await store.read_results("ada", 0, 10, 10)] == [b"first", b"first", b"fallback"]

    async def test_bodies_are_forgotten_with_a_commit_and_a_body_that_comes_with_it_stays(self, store):
        epoch = await store.lead("me", 10_000)
        first, second = await store.submit(b"header", b"old"), await store.submit(b"header", b"new")
        await store.commit(epoch, Commit(0, [event(1)], [first], [("one", first), ("two", first)]))
        assert await store.bodies() == {"one", "two"}
        await store.commit(epoch, Commit(event(1)[0], [event(2)], [second], [("two", second)], forget=["one", "two"]))
        assert await store.bodies() == {"two"}
        assert await store.blob("one") is None
        assert await store.blob("two") == b"new"

    async def test_only_the_leader_trims_and_the_log_says_where(self, store):
        old = await store.fence()
        epoch = await store.fence()
        await store.commit(epoch, Commit(0, [event(n) for n in range(5)]))
        assert await store.trimmed() == 0
        with pytest.raises(Fenced):
            await store.trim(old, event(3)[0])
        assert await store.read(0, 10) == [event(n) for n in range(5)]
        await store.trim(epoch, event(3)[0])
        assert await store.read(0, 10) == [event(3), event(4)]
        assert await store.trimmed() == event(3)[0]
        await store.commit(epoch, Commit(event(4)[0], [event(5)]))

    async def test_a_blocking_read_wakes_up(self, store):
        async def later():
            await anyio.sleep(0.05)
            await store.submit(b"header", b"")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            assert len(await store.read_intake("0-0", 10, 5000)) == 1

    async def test_the_lease_has_one_holder_and_each_term_fences_the_one_before(self, store):
        first = await store.lead("one", 10_000)
        assert await store.lead("two", 10_000) is None
        assert await store.leader() == "one"
        assert await store.renew(first, "one", 10_000)
        await store.resign("one")
        second = await store.lead("two", 10_000)
        assert second > first
        assert not await store.renew(first, "one", 10_000)


class TestSegments:
    async def test_a_torn_last_record_is_cut_off(self, tmp_path):
        log = SegmentLog(tmp_path)
        epoch = await log.fence()
        await log.commit(epoch, Commit(0, [event(1), event(2)]))
        (segment,) = tmp_path.glob("*.hdlog")
        os.truncate(segment, segment.stat().st_size - 3)
        reopened = SegmentLog(tmp_path)
        assert await reopened.read(0, 10) == [event(1)]
        await reopened.commit(epoch, Commit(event(1)[0], [event(2)]))
        assert await SegmentLog(tmp_path).read(0, 10) == [event(1), event(2)]

    async def test_damage_before_the_end_is_an_error_that_names_the_byte(self, tmp_path):
        log = SegmentLog(tmp_path)
        await log.commit(await log.fence(), Commit(0, [event(n) for n in range(5)]))
        (segment,) = tmp_path.glob("*.hdlog")
        data = bytearray(segment.read_bytes())
        data[40] ^= 1
        segment.write_bytes(bytes(data))
        with pytest.raises(LogTruncated, match="damaged at byte"):
            list(read_segment(segment))
        with pytest.raises(LogTruncated):
            SegmentLog(tmp_path)


class TestRedis:
    async def test_a_full_intake_answers_busy_until_the_daemon_took_some(self, server, monkeypatch):
        monkeypatch.setattr(redis_log, "MOST_INTAKE", 3)
        store = RedisLog.connect(server.url, f"full{next(_fleet)}")
        epoch = await store.lead("me", 10_000)
        taken = [await store.submit(b"header", b"") for _ in range(3)]
        with pytest.raises(Busy, match="wait for the daemon"):
            await store.submit(b"header", b"")
        await store.commit(epoch, Commit(0, [event(1)], taken[:1]))
        await store.submit(b"header", b"")
        await store.close()

    async def test_a_server_that_forgot_the_epoch_lost_data(self, server):
        store = RedisLog.connect(server.url, f"emptied{next(_fleet)}")
        epoch = await store.lead("me", 10_000)
        await store.client.delete(store.epoch_key)
        for write in (store.commit(epoch, Commit(0, [event(1)])), store.trim(epoch, event(1)[0])):
            with pytest.raises(LogTruncated, match="lost data"):
                await write
        await store.close()
