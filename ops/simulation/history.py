"""One simulated history: a seed decides the fleet, its tenants, and everything that goes wrong; afterwards everything is checked."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import anyio
import msgspec

from ops.replay import Verifier
from ops.simulation import virtual_time
from ops.simulation.tenants import Answer, Program, alone, ask, program, sampler
from ops.simulation.world import LEASE_MS, Crashed, Host, RemoteGroup, SimulatedStore, Workers, World
from scheduler import state_snapshots
from scheduler.daemon import Daemon
from scheduler.producer import Producer
from scheduler.validation import Limits
from state.archive import Archive, History
from state.errors import Fenced
from state.events import RequestCancelled, RequestCompleted, RequestFailed, RequestRefused, Settings, decode
from state.fleet import Fleet, encode
from state.invariants import violated
from state.requests import Op
from state.residency import Residency
from workers.simulated import SIMULATED_SPEC

PATIENCE_S = 3600.0  # of virtual time: far beyond what any bounded number of faults can cost


class Size(NamedTuple):
    """How large a history may be; shrinking lowers these. Negative: decided by the seed."""

    tenants: int = -1
    requests: int = -1
    faults: int = -1


DRAWN = Size()


class Broken(Exception):
    """What must always hold did not."""


class Report(NamedTuple):
    seed: int
    size: Size
    events: int
    decisions: int
    terms: int
    faults: dict[str, int]
    log: list[tuple[int, bytes]]


def run_seed(seed: int, size: Size = DRAWN, settings: Settings | None = None, guard_pending: bool = True) -> Report:
    """Raises `Broken`, or whatever broke, for a history that must not be. `settings` and `guard_pending` plant faults."""
    return virtual_time.run(_history, seed, size, settings, guard_pending)


async def _history(seed: int, size: Size, settings: Settings | None, guard_pending: bool) -> Report:
    rng = random.Random(seed)
    faults = _drawn(rng.choice((0, 3, 10, 30)), size.faults)
    world = World(seed, faults, rng.choice((0.002, 0.005, 0.02)))
    programs = _programs(seed, size, rng)
    slots = rng.choice((1, 2, 3))
    spec = msgspec.structs.replace(SIMULATED_SPEC, device_slots=slots, host_slots=rng.choice((slots + 1, 64)))
    for name in ("left", "right") if rng.random() < 0.5 else ("main",):
        world.workers[name] = Workers(world, name, spec, guard_pending)
    if "right" in world.workers and rng.random() < 0.7:
        world.workers["right"].late_s = 3 * rng.random()  # adapters begin on the other group, and may move
    settings = settings or _settings(rng)
    candidates, attached = rng.choice((1, 1, 2)), rng.random() < 0.3
    with anyio.move_on_after(PATIENCE_S) as patience:
        async with anyio.create_task_group() as tasks:
            leading: dict[int, Daemon] = {}
            for number in range(candidates):
                tasks.start_soon(_supervise, world, number, settings, attached, leading)
            answers = await _ask_all(world, programs, rng)
            world.over = True
            await _drained(world, leading)
            tasks.cancel_scope.cancel()
    if patience.cancelled_caught:
        raise Broken(f"some request had no answer after {PATIENCE_S:.0f} s")
    for (tenant, adapter), got in answers.items():
        _compare(f"{tenant}/{adapter}", programs[tenant, adapter], got)
    verifier = await _check_log(world)
    return Report(
        seed, size, len(world.server.everything), verifier.decisions, verifier.fleet.epoch, dict(world.happened), world.server.everything
    )


def _programs(seed: int, size: Size, rng: random.Random) -> dict[tuple[str, str], Program]:
    tenants = _drawn(rng.randint(1, 4), size.tenants)
    found = {}
    for number in range(tenants):
        for adapter in ("poet", "critic")[: rng.choice((1, 1, 2))]:
            length = _drawn(rng.randint(2, 16), size.requests)
            found[f"t{number}", adapter] = program(seed, f"t{number}", adapter, length)
    own = random.Random(f"{seed}/samplers")
    if tenants and own.random() < 0.3:
        found["t0", "voice"] = sampler(seed, "t0", "voice", _drawn(own.randint(2, 12), size.requests))
    return found


def _drawn(value: int, wanted: int) -> int:
    """Drawn in any case, so that what is drawn afterwards stays the same."""
    return value if wanted < 0 else wanted


def _settings(rng: random.Random) -> Settings:
    return Settings(
        policy=rng.choice(("fair", "fifo", "round_robin")),
        turn_requests=rng.choice((1, 3, 8)),
        gap_deadline_ms=10**9,  # a tenant's missing request comes in the end, however long the server is away
        tenant_queue=rng.choice((4, 256)),
        held_requests=rng.choice((3, 64)),
        result_retention_ms=10**9,
        snapshot_after_requests=rng.choice((2, 5, 256)),
        snapshot_fallback=True,
        plan_us=rng.choice((0, 20_000)),
        snapshot_share=rng.choice((0.0, 0.3)),
        snapshot_beside=rng.choice((False, True)),
        resident_turns=rng.choice((0, 2, 64)),
        move_gain=rng.choice((0.0, 0.001, 0.1)),
    )


async def _supervise(world: World, number: int, settings: Settings, attached: bool, leading: dict[int, Daemon]) -> None:
    """Starts a daemon again whenever it ended, as a service manager would."""
    life = 0
    while True:
        life += 1
        host = Host(world, f"host{number}.{life}")
        daemon = Daemon(
            SimulatedStore(host),
            [RemoteGroup(host, workers, attached) for workers in world.workers.values()],
            settings=settings,
            limits=Limits(),
            disk=world.disk,
            lease_ms=LEASE_MS,
            now_ms=host.now_ms,
            holder=host.name,
            house_every_s=3.0,
            run_blocking=host.run_blocking,
        )
        leading[number] = daemon
        with _expected_ends():
            await daemon.run()
        del leading[number]
        await anyio.sleep(world.random.random() * 3)


@contextlib.contextmanager
def _expected_ends() -> Iterator[None]:
    """A crash, or another daemon that leads; whatever else ends a daemon is a fault of its own."""
    try:
        yield
    except BaseExceptionGroup as group:
        _, rest = group.split((Crashed, Fenced))
        if rest is not None:
            raise rest from None


async def _ask_all(world: World, programs: dict[tuple[str, str], Program], rng: random.Random) -> dict[tuple[str, str], list[Answer]]:
    answers: dict[tuple[str, str], list[Answer]] = {}

    async def of_tenant(tenant: str) -> None:
        async with Producer.over(SimulatedStore(Host(world, tenant, mortal=False)), tenant) as producer, anyio.create_task_group() as mine:
            for owner, adapter in programs:
                if owner == tenant:
                    mine.start_soon(of_adapter, producer, tenant, adapter)

    async def of_adapter(producer: Producer, tenant: str, adapter: str) -> None:
        own = random.Random(rng.random())
        answers[tenant, adapter] = await ask(producer, adapter, programs[tenant, adapter], own)

    async with anyio.create_task_group() as tasks:
        for tenant in dict.fromkeys(owner for owner, _ in programs):
            tasks.start_soon(of_tenant, tenant)
    return answers


async def _drained(world: World, leading: dict[int, Daemon]) -> None:
    """Asks whoever leads to leave, until somebody did so in peace."""
    while True:
        for daemon in leading.values():
            if daemon.ready.is_set() and daemon.epoch == world.server.epoch:
                daemon.drain()
                while world.server.holder == daemon.holder:
                    await anyio.sleep(0.1)
                return
        await anyio.sleep(0.1)


def _compare(adapter: str, requests: Program, got: list[Answer]) -> None:
    for seq, ((op, _), mine, due) in enumerate(zip(requests, got, alone(adapter, requests))):
        cancelled = mine.error == "Cancelled" and op in (Op.FORWARD, Op.SAMPLE)
        if mine != due and not cancelled:
            raise Broken(f"{adapter}/{seq} ({op}) was answered {_words(mine)}, alone it is {_words(due)}")


def _words(answer: Answer) -> str:
    return answer.error or f"{len(answer.result)} bytes {answer.result[:80]!r}"


async def _check_log(world: World) -> Verifier:
    """Folds every event, with the invariants after each, and decides every decision again; archive and log must be one history."""
    server = world.server
    events = [event async for event in _everything(world)]
    if events != server.everything:
        raise Broken(f"archive and log give {len(events)} events, {len(server.everything)} were appended")
    verifier = Verifier(_written(world))
    ends: dict[str, str] = {}
    for log_id, data in events:
        event = decode(data)
        verifier.take(log_id, event)
        _check_fleet(verifier.fleet)
        if isinstance(event, RequestCompleted | RequestFailed | RequestCancelled):
            request_id = event.request_id
        elif isinstance(event, RequestRefused) and event.consumed and event.request is not None:
            request_id = event.request.request_id
        else:
            continue
        if request_id in ends:
            raise Broken(f"{request_id} ended as {ends[request_id]} and again as {type(event).__name__}")
        ends[request_id] = type(event).__name__
    if verifier.problems:
        raise Broken("; ".join(verifier.problems[:3]))
    if verifier.fleet.queued:
        raise Broken(f"{verifier.fleet.queued} requests have no end")
    diverged = [a.divergence for a in verifier.fleet.adapters.values() if a.divergence]
    if diverged:
        raise Broken("; ".join(diverged))
    return verifier


async def _everything(world: World) -> AsyncIterator[tuple[int, bytes]]:
    history = History(Archive(world.disk("archive")), world.server)
    after = 0
    while events := await history.read(after, 1000):
        for event in events:
            yield event
        after = events[-1][0]


def _written(world: World) -> dict[int, tuple[str, bytes]]:
    files = world.disk("snapshots")
    found = {}
    for name in state_snapshots.names(files):
        with contextlib.suppress(ValueError):
            fleet = state_snapshots.read(files, name)
            found[fleet.log_id] = (name, encode(fleet))
    return found


def _check_fleet(fleet: Fleet) -> None:
    for group in fleet.groups.values():
        wrong = violated(fleet, group)
        if wrong:
            raise Broken("; ".join(wrong))
        on_device = [key for key in group.adapters if fleet.adapters[key].residency in (Residency.LIVE, Residency.PARKED)]
        if len(on_device) > 1:
            raise Broken(f"invariant 1: {on_device} are live at once")
    queued = sum(len(adapter.queue) for adapter in fleet.adapters.values())
    if not fleet.queued == queued == sum(tenant.queued for tenant in fleet.tenants.values()):
        raise Broken(f"{fleet.queued} requests are counted as queued, {queued} are")
