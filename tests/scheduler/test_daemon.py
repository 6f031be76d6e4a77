"""The daemon's shell: real server, real producers, simulated workers; what happens when parts come, go and die."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
import msgspec
import pytest
import redis

from ops.replay import Verifier, history, written_states
from scheduler import state_snapshots
from scheduler.daemon import Daemon
from scheduler.embedded import EmbeddedServer
from scheduler.producer import Producer, SyncProducer, datum, values
from scheduler.validation import Limits
from state.archive import Archive, History
from state.errors import BadBody, Fenced, LogDiverged, LogTruncated, RequestConflict, UnknownAdapter
from state.events import LeaderElected, Settings, StepStarted, WorkersLost, decode
from state.files import Directory, directory_disk
from state.fleet import Fleet, apply, encode
from state.log import Commit
from state.memory_log import MemoryLog
from state.redis_log import RedisLog
from state.requests import Forward, Op, encode_body
from workers.simulated import SIMULATED_SPEC, SimulatedEngine, SimulatedGroup

pytestmark = pytest.mark.anyio
_fleet = itertools.count()
DATA = [datum([1, 2, 3], [2, 3, 4])]


@pytest.fixture
def fleet():
    return f"daemon{next(_fleet)}"


@asynccontextmanager
async def daemon(store, *, data_dir=None, group=None, settings=None, lease_ms=2000, **options):
    """A leading daemon; drained at the end."""
    made = Daemon(
        store,
        [group or SimulatedGroup("main")],
        settings=settings or Settings(),
        limits=Limits(),
        disk=directory_disk(data_dir) if data_dir is not None else None,
        lease_ms=lease_ms,
        **options,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        with anyio.fail_after(10):
            await made.ready.wait()
        yield made
        made.drain()


async def train(adapter, steps, first=0):
    digests = []
    for step in range(first, first + steps):
        await adapter.forward_backward([datum([step, 2, 3], [2, 3, 4])])
        digests.append((await (await adapter.optim_step(learning_rate=0.1))).digest)
    return digests


async def control(steps):
    """The same program on a fleet of its own, in memory."""
    store = MemoryLog()
    async with daemon(store), Producer.over(store, "ada") as hotdesk:
        return await train(await hotdesk.create_adapter("poet", rank=4, seed=1), steps)


async def verified(store, data_dir=None):
    verifier = Verifier(written_states(data_dir) if data_dir else {})
    async for log_id, data in history(store):
        verifier.take(log_id, decode(data))
    assert verifier.problems == []
    assert verifier.decisions > 0
    return verifier


async def folded(store, disk=None):
    """The encoded state, from the whole history."""
    archive = Archive(disk("archive")) if disk is not None else None
    fleet, _ = await state_snapshots.load_fleet(None, History(archive, store))
    return encode(fleet)


async def test_samples_that_wait_together_are_computed_together(server, fleet, tmp_path, monkeypatch):
    calls = []
    real = SimulatedEngine.sample
    monkeypatch.setattr(SimulatedEngine, "sample", lambda self, bodies: calls.append(len(bodies)) or real(self, bodies))
    store = RedisLog.connect(server.url, fleet)
    spec = msgspec.structs.replace(SIMULATED_SPEC, sample_rows=3)
    group = SimulatedGroup("main", spec, cost_us={Op.FORWARD_BACKWARD: 300_000}, sleep=True)
    async with daemon(store, data_dir=tmp_path, group=group), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
        alone = [await (await poet.sample([1, 2], max_tokens=3, seed=number)) for number in range(5)]
        trained = await poet.forward_backward(DATA)  # they come while it computes
        sampled = [await poet.sample([1, 2], max_tokens=3, seed=number) for number in range(5)]
        await trained
        assert [await one for one in sampled] == alone
    assert calls == [1] * 5 + [3, 2]
    await verified(store, tmp_path)
    await store.close()


async def test_a_tenants_program_from_create_to_unload(server, fleet, tmp_path):
    store = RedisLog.connect(server.url, fleet)
    async with daemon(store, data_dir=tmp_path, group=SimulatedGroup("main", root=tmp_path / "adapters")) as leading:
        async with Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
            poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
            forward = await (await poet.forward_backward(DATA))
            assert values(forward.logprobs[0]).shape == (3,)
            assert (await (await poet.optim_step(learning_rate=0.1))).optimizer_step == 1
            sampled = await (await poet.sample([1, 2], max_tokens=3, num_samples=2))
            assert [values(s.tokens).shape for s in sampled.sequences] == [(3,), (3,)]
            assert (await (await poet.save_state("one"))).path == "hotdesk://ada/poet/weights/one"
            assert (await (await poet.save_weights_for_sampler("one"))).path == "hotdesk://ada/poet/sampler_weights/one"
            await (await poet.load_state("one"))
            again = await hotdesk.adapter("poet")
            assert (again.lane, again.next_seq) == (poet.lane, poet.next_seq)
            with pytest.raises(BadBody, match="learning_rate -1"):
                await (await again.optim_step(learning_rate=-1.0))
            await (await again.unload())
            with pytest.raises(UnknownAdapter):
                await hotdesk.adapter("poet")
        leading.dump()
    await verified(store, tmp_path)
    written = state_snapshots.newest(Directory(tmp_path / "snapshots"))
    assert encode(written) == await folded(store)
    await store.close()


async def test_large_bodies_live_beside_the_log(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    tokens = list(range(200)) * 10
    async with daemon(store), Producer.over(store, "ada") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4)
        assert values((await (await poet.forward([datum(tokens, tokens)]))).logprobs[0]).shape == (2000,)
        events = [data async for _, data in history(store)]
        assert max(map(len, events)) < 2000
        keys = [key async for key in store.client.scan_iter(f"{{{fleet}}}:blob:*")]
        assert len(keys) == 1
    await store.close()


async def test_thousands_of_waiting_futures_cost_one_connection(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    settings = Settings(tenant_queue=5000)
    async with daemon(store, settings=settings), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4)
        poet.next_seq += 1  # seq 1 is missing: everything below is held
        settings_held = Settings().held_requests
        futures = [await poet.forward(DATA) for _ in range(settings_held)]
        before = len(await store.client.client_list())

        async def wait(future):
            await future

        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                for future in futures:
                    tasks.start_soon(wait, future)
            await anyio.sleep(0.2)
            assert len(await store.client.client_list()) <= before + 1
            late = poet.next_seq
            poet.next_seq = 1
            await poet.forward(DATA)
            poet.next_seq = late
    await store.close()


async def test_a_restarted_daemon_goes_on_where_the_last_one_stopped(server, fleet, tmp_path):
    store = RedisLog.connect(server.url, fleet)

    def group():
        return SimulatedGroup("main", root=tmp_path / "adapters")

    async with Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        async with daemon(store, data_dir=tmp_path, group=group()):
            poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
            seen = await train(poet, 2)
        waiting = await poet.forward_backward([datum([2, 2, 3], [2, 3, 4])])  # nobody leads: it stays in the intake
        async with daemon(store, data_dir=tmp_path, group=group()):
            await waiting
            seen.append((await (await poet.optim_step(learning_rate=0.1))).digest)
            seen += await train(poet, 1, first=3)
    assert seen == await control(4)
    await verified(store, tmp_path)
    await store.close()


async def test_a_standby_takes_over_and_the_old_leader_is_fenced(server, fleet):
    class Detached(SimulatedGroup):
        async def close(self, kill=False):
            """Workers on a cluster outlive the daemon that started them."""

    store = RedisLog.connect(server.url, fleet)
    workers = Detached("main")
    async with Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        first = Daemon(store, [workers], settings=Settings(), limits=Limits(), lease_ms=600)
        first.holder = "first"
        with pytest.raises(BaseExceptionGroup) as fenced:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first.run)
                await first.ready.wait()
                poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
                seen = await train(poet, 2)
                await store.client.set(store.lease, "second")  # the lease ran out while the leader was not looking
                second = Daemon(store, [workers], settings=Settings(), limits=Limits(), lease_ms=600)
                second.holder = "second"

                async def take_over():
                    async with anyio.create_task_group() as inner:
                        inner.start_soon(second.run)
                        await second.ready.wait()
                        nonlocal seen
                        seen += await train(poet, 2, first=2)
                        second.drain()

                with anyio.CancelScope(shield=True):
                    await take_over()
                await anyio.sleep(1)
        assert fenced.group_contains(Fenced) or fenced.group_contains(LogDiverged)
    assert seen == await control(4)
    terms = [decode(data) async for _, data in history(store)]
    assert [event.epoch for event in terms if isinstance(event, LeaderElected)] == [1, 2]
    await verified(store)
    await store.close()


async def test_a_group_that_dies_is_rebuilt_and_the_tenant_sees_only_latency(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    group = SimulatedGroup("main")
    async with daemon(store, group=group), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
        seen = await train(poet, 2)
        group.dead = True
        seen += await train(poet, 2, first=2)
    assert seen == await control(4)
    assert any([isinstance(decode(data), WorkersLost) async for _, data in history(store)])
    await verified(store)
    await store.close()


async def test_a_killed_and_restarted_server_loses_nothing(short_tmp):
    embedded = EmbeddedServer(short_tmp)
    await anyio.to_thread.run_sync(embedded.start)
    store = RedisLog.connect(embedded.url, "fleet")
    seen = []
    try:
        async with daemon(store, data_dir=short_tmp), Producer.connect(embedded.url, fleet="fleet", tenant="ada") as hotdesk:
            poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
            for first in range(0, 6, 2):
                futures = [await poet.forward_backward([datum([first, 2, 3], [2, 3, 4])]), await poet.optim_step(learning_rate=0.1)]
                os.kill(embedded.process.pid, signal.SIGKILL)
                embedded.process.wait()
                await anyio.sleep(0.2)
                await anyio.to_thread.run_sync(embedded.start)
                with anyio.fail_after(20):
                    await futures[0]
                    seen.append((await futures[1]).digest)
                    seen += await train(poet, 1, first=first + 1)
        assert seen == await control(6)
        await verified(store, short_tmp)
    finally:
        await store.close()
        embedded.stop()


async def test_a_server_that_comes_back_empty_is_refused_with_words(server, fleet, tmp_path):
    store = RedisLog.connect(server.url, fleet)
    async with daemon(store, data_dir=tmp_path), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        await hotdesk.create_adapter("poet", rank=4)
    await store.client.delete(store.log)
    with pytest.raises(BaseExceptionGroup) as refused:
        async with daemon(store, data_dir=tmp_path):
            pass
    assert refused.group_contains(LogTruncated, match="has seen the log up to")
    await store.close()


async def test_a_log_that_begins_in_the_middle_is_refused_with_words(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    async with daemon(store), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        await hotdesk.create_adapter("poet", rank=4)
    await store.client.xtrim(store.log, maxlen=2, approximate=False)
    with pytest.raises(LogTruncated, match="in the middle of a history"):
        await folded(store)
    await store.close()


async def test_the_log_is_archived_and_trimmed_while_tenants_train(server, fleet, tmp_path):
    store = RedisLog.connect(server.url, fleet)
    tokens = list(range(200)) * 10
    settings = Settings(snapshot_after_requests=4, snapshot_fallback=True)
    options = {"data_dir": tmp_path, "settings": settings, "house_every_s": 0.05}
    seen = []
    for _ in range(2):
        group = SimulatedGroup("main", root=tmp_path / "adapters")
        async with daemon(store, group=group, **options), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
            poet = await (hotdesk.adapter("poet") if seen else hotdesk.create_adapter("poet", rank=4, seed=1))
            for _ in range(12):
                await poet.forward_backward([datum(tokens, tokens)])
                seen.append((await (await poet.optim_step(learning_rate=0.1))).digest)
                await anyio.sleep(0.02)
    first, _ = await store.bounds()
    assert first == await store.trimmed() > 0
    assert len(await store.bodies()) <= 2
    disk = directory_disk(tmp_path)
    history = History(Archive(disk("archive")), store)
    assert (await verified(history, tmp_path)).compared >= 3
    fleet_now, tail = await state_snapshots.load_fleet(disk("snapshots"), history)
    assert tail < fleet_now.events / 4
    assert encode(fleet_now) == await folded(store, disk)
    for path in (tmp_path / "snapshots").iterdir():
        path.unlink()
    assert (await state_snapshots.load_fleet(disk("snapshots"), history))[1] == fleet_now.events
    old = Fleet()
    for log_id, data in await history.read(0, 10):
        apply(old, log_id, decode(data))
    assert old.log_id < first  # as one who stood still while a newer leader trimmed knows it; found by simulation
    state_snapshots.write(disk("snapshots"), old.log_id, encode(old))
    assert encode((await state_snapshots.load_fleet(disk("snapshots"), history))[0]) == encode(fleet_now)
    await store.close()


async def test_a_full_disk_stops_no_tenant_and_trims_nothing(server, fleet, tmp_path):
    class Full:
        def __init__(self, name):
            self.files = Directory(tmp_path / name)

        def __getattr__(self, name):
            return getattr(self.files, name)

        def write(self, name, data):
            raise OSError(28, "No space left on device")

    store = RedisLog.connect(server.url, fleet)
    made = Daemon(store, [SimulatedGroup("main")], settings=Settings(), limits=Limits(), disk=Full, house_every_s=0.02)
    async with anyio.create_task_group() as tasks, Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        tasks.start_soon(made.run)
        poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
        assert len(await train(poet, 10)) == 10
        await anyio.sleep(0.1)
        made.drain()
    assert await store.trimmed() == 0
    await verified(store)
    await store.close()


async def test_a_server_that_is_emptied_under_a_daemon_ends_it_with_words(server, fleet, tmp_path):
    store = RedisLog.connect(server.url, fleet)
    with pytest.raises(BaseExceptionGroup) as refused:
        async with daemon(store, data_dir=tmp_path), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
            poet = await hotdesk.create_adapter("poet", rank=4)
            await store.client.delete(store.log, store.epoch_key, store.lease)
            await (await poet.optim_step())
    assert refused.group_contains(LogTruncated, match="lost data")
    with pytest.raises(BaseExceptionGroup) as again:  # what the ended daemon left behind still knows better
        async with daemon(store, data_dir=tmp_path):
            pass
    assert again.group_contains(LogTruncated, match="has seen the log up to")
    await store.close()


async def test_a_read_only_server_is_waited_for(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    async with daemon(store), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4, seed=1)
        await store.client.config_set("maxmemory", "1")  # every write is answered with OOM
        try:
            with anyio.move_on_after(0.5):
                await poet.forward_backward(DATA)
                raise AssertionError("the server took a write")
        finally:
            await store.client.config_set("maxmemory", "0")
        assert await (await poet.optim_step())
    await store.close()


async def test_a_damaged_snapshot_is_passed_over(tmp_path, server, fleet):
    store = RedisLog.connect(server.url, fleet)
    async with daemon(store, data_dir=tmp_path), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        await hotdesk.create_adapter("poet", rank=4)
    paths = sorted((tmp_path / "snapshots").glob("state-*"))
    paths[-1].write_bytes(paths[-1].read_bytes()[:-1])
    named = []
    files = Directory(tmp_path / "snapshots")
    fleet, _ = await state_snapshots.load_fleet(files, History(None, store), lambda name, error: named.append(name))
    assert named == [paths[-1].name]
    assert encode(fleet) == await folded(store)
    await store.close()


async def test_other_programs_of_a_tenant_do_not_disturb_and_other_tenants_see_nothing(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    async with (
        daemon(store),
        Producer.connect(server.url, fleet=fleet, tenant="ada") as one,
        Producer.connect(server.url, fleet=fleet, tenant="ada") as two,
        Producer.connect(server.url, fleet=fleet, tenant="brook") as other,
    ):
        poet = await one.create_adapter("poet", rank=4)
        writer = await two.create_adapter("writer", rank=4)
        await (await poet.forward(DATA))
        await (await writer.forward(DATA))
        with pytest.raises(UnknownAdapter):
            await other.adapter("poet")
    await store.close()


async def test_a_producer_may_wait_until_its_request_is_on_disk(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    async with daemon(store), Producer.connect(server.url, fleet=fleet, tenant="ada", wait_aof_ms=1000) as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4)
        assert await (await poet.forward(DATA))
        assert (await store.client.info("commandstats"))["cmdstat_waitaof"]["calls"] >= 2
    await store.close()


async def test_large_bodies_wait_in_the_intake_while_the_core_is_busy(monkeypatch):
    """The daemon holds `INBOX_BYTES` of them and one read; without that bound it would hold all."""
    monkeypatch.setattr("scheduler.daemon.INBOX_BYTES", 200_000)
    large = [datum([1] * 2000, [2] * 2000)] * 2
    held, busy = [], True

    async def hold(self, batch):
        while busy:
            held.append(made._inbox_bytes)
            await anyio.sleep(0.01)
        await Daemon._commit(self, batch)

    async with daemon(MemoryLog()) as made, Producer.over(made.store, "t") as hotdesk:
        adapter = await hotdesk.create_adapter("a", rank=4)
        monkeypatch.setattr(made, "_commit", partial(hold, made))
        futures = [await adapter.forward(large) for _ in range(40)]
        await anyio.sleep(0.5)
        size = len(encode_body(Forward(tuple(large))))
        assert 200_000 < max(held) < 200_000 + 2 * size < 40 * size
        busy = False
        for future in futures:
            await future
    assert made._inbox_bytes == 0


async def test_a_cancelled_request_ends_once(server, fleet):
    store = RedisLog.connect(server.url, fleet)
    async with daemon(store), Producer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4)
        poet.next_seq += 1
        held = await poet.forward(DATA)
        assert "cancelled" in (await hotdesk.cancel(held.request_id)).detail
        with pytest.raises(Exception, match="cancelled"):
            await held
    await store.close()


async def test_every_step_is_in_the_log_before_a_worker_sees_it():
    class Slow(MemoryLog):
        """A server that takes its time: whoever does not wait for it is seen."""

        async def commit(self, epoch, commit):
            await anyio.sleep(0.02)
            await super().commit(epoch, commit)

    store = Slow()
    unlogged = []

    class Suspicious(SimulatedGroup):
        def apply(self, call):
            logged = [decode(data) for _, data in store.events]
            if not any(isinstance(e, StepStarted) and e.step == call.step for e in logged):
                unlogged.append(call.step)
            return super().apply(call)

    async with daemon(store, group=Suspicious("main")), Producer.over(store, "ada") as hotdesk:
        await train(await hotdesk.create_adapter("poet", rank=4), 2)
    assert unlogged == []
    assert not any(isinstance(decode(data), WorkersLost) for _, data in store.events)


async def test_a_group_has_its_next_step_before_the_last_ones_outcome_arrived():
    """And no more than one of them waits: what is on its way cannot be taken back."""

    class Counting(SimulatedGroup):
        under_way, most, order = 0, 0, ()

        def apply(self, call):
            self.under_way += 1
            self.most, self.order = max(self.most, self.under_way), (*self.order, call.step.id)
            coming = super().apply(call)
            coming.add_done_callback(self._ended)
            return coming

        def _ended(self, coming):
            self.under_way -= 1

    group = Counting("main", cost_us={Op.FORWARD_BACKWARD: 20_000}, sleep=True)
    async with daemon(MemoryLog(), group=group) as made, Producer.over(made.store, "ada") as hotdesk:
        adapter = await hotdesk.create_adapter("poet", rank=4)
        futures = [await adapter.forward_backward(DATA) for _ in range(6)]
        for future in futures:
            await future
    assert group.most == 2
    assert list(group.order) == sorted(group.order)


async def test_two_programs_with_one_seq_get_an_answer_each():
    store = MemoryLog()
    async with daemon(store), Producer.over(store, "ada") as one, Producer.over(store, "ada") as two:
        first = await one.create_adapter("poet", rank=4)
        second = await two.adapter("poet")
        won = await first.forward([datum([1, 2], [2, 3])])
        lost = await second.forward([datum([7, 8], [8, 9])])
        assert await won
        with pytest.raises(RequestConflict):
            await lost


async def test_a_cancelled_caller_leaves_no_hole_in_its_lane():
    class Stuck(MemoryLog):
        stuck = False

        async def submit(self, header, body):
            while self.stuck:
                await anyio.sleep(0.01)
            return await super().submit(header, body)

    store = Stuck()
    async with daemon(store), Producer.over(store, "ada") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=4)
        store.stuck = True
        with anyio.move_on_after(0.05):
            await poet.forward(DATA)
        store.stuck = False
        with anyio.fail_after(5):
            assert await (await poet.forward(DATA))


def test_the_sync_face(server, fleet):
    async def serve(started, stop):
        store = RedisLog.connect(server.url, fleet)
        async with daemon(store):
            started.set()
            await anyio.to_thread.run_sync(stop.wait)
        await store.close()

    import threading

    started, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: anyio.run(serve, started, stop))
    thread.start()
    try:
        assert started.wait(10)
        with SyncProducer.connect(server.url, fleet=fleet, tenant="ada") as hotdesk:
            poet = hotdesk.create_adapter("poet", rank=4)
            futures = [poet.forward_backward(DATA), poet.optim_step(learning_rate=0.1)]
            assert futures[1].result(10).optimizer_step == 1
            with pytest.raises(BadBody):
                poet.optim_step(learning_rate=-1.0).result(10)
            assert hotdesk.adapter("poet").name == "poet"
    finally:
        stop.set()
        thread.join()


def test_the_embedded_server_syncs_every_write_and_listens_on_no_port(short_tmp):
    embedded = EmbeddedServer(short_tmp)
    embedded.start()
    try:
        with redis.Redis(unix_socket_path=str(embedded.socket)) as client:
            settings = client.config_get("*")
            assert settings["appendfsync"] == "always"
            assert settings["appendonly"] == "yes"
            assert settings["port"] == "0"
        again = EmbeddedServer(short_tmp)
        again.start()
        assert again.process is None  # the running one is used
    finally:
        embedded.stop()


class LosesAnAnswer(MemoryLog):
    """The first commit is applied and its answer lost; before the log is looked at, `then` happens."""

    def __init__(self, then: Callable[[LosesAnAnswer], Awaitable[None]]) -> None:
        super().__init__()
        self.then, self.commits = then, 0

    async def commit(self, epoch: int, commit: Commit) -> None:
        self.commits += 1
        await super().commit(epoch, commit)
        if self.commits == 1:
            raise redis.ConnectionError("the answer got lost")

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        await self.then(self)
        return await super().read(after, limit)


async def a_newer_leader_goes_on(store: LosesAnAnswer) -> None:
    await MemoryLog.commit(store, await store.fence(), Commit(1, [(2, b"elected")]))


async def somebody_else_wrote_there(store: LosesAnAnswer) -> None:
    store.events[:] = [(1, b"another")]


async def test_a_commit_whose_answer_was_lost_counts_also_where_a_newer_leader_went_on_behind_it():
    """Found by simulation: the old leader called the log another one, instead of giving way."""
    store = LosesAnAnswer(a_newer_leader_goes_on)
    old = Daemon(store, [], settings=Settings(), limits=Limits())
    old.epoch = await store.fence()
    await old._commit(Commit(0, [(1, b"mine")]))
    with pytest.raises(Fenced):
        await old._commit(Commit(1, [(2, b"more")]))


async def test_a_log_that_holds_something_else_is_told():
    store = LosesAnAnswer(somebody_else_wrote_there)
    daemon = Daemon(store, [], settings=Settings(), limits=Limits())
    daemon.epoch = await store.fence()
    with pytest.raises(LogDiverged):
        await daemon._commit(Commit(0, [(1, b"mine")]))


async def test_the_lease_is_kept_while_a_long_log_is_folded(monkeypatch):
    """Else a standby would take it, fold as long, and lose it in turn."""
    store, load = MemoryLog(), state_snapshots.load_fleet
    leading = Daemon(store, [], settings=Settings(), limits=Limits(), lease_ms=150)

    async def slowly(*args):
        await anyio.sleep(0.5)
        assert await store.lead("standby", 150) is None
        return await load(*args)

    monkeypatch.setattr(state_snapshots, "load_fleet", slowly)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leading.run)
        await leading.ready.wait()
        leading.drain()
