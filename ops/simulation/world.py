"""What fails: server, network, disk, clock, workers and the daemons' own processes.

A daemon meets the world at its calls to store, workers and disk only; at each of them it may die, before or after the call took effect,
or stand still for longer than its lease. So every point at which a crash could show is one at which a crash can happen.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec
from redis.exceptions import ConnectionError as ServerAway

from state.errors import WorkersLostError
from state.events import GroupSpec, StepKind
from state.files import Files
from state.log import Commit, Entry
from state.memory_log import MemoryLog
from workers.contract import Call, Status, StepOutcome, under_way
from workers.machine import Machine
from workers.simulated import SimulatedDisk, SimulatedEngine

T = TypeVar("T")
LEASE_MS = 2000
EPOCH_MS = 1_700_000_000_000  # when the virtual clock starts

#: What can go wrong -> how much likelier than the rest, each time it could.
FAULTS = {
    "daemon_dies": 2.0,
    "daemon_stands_still": 1.0,
    "call_lost": 1.0,
    "answer_lost": 2.0,
    "server_away": 0.5,
    "entry_twice": 6.0,
    "entry_late": 6.0,
    "workers_die_before": 4.0,
    "workers_die_after": 4.0,
    "workers_slow": 4.0,
    "disk_full": 20.0,
    "adapter_snapshot_fails": 4.0,
    "state_snapshot_damaged": 20.0,
    "adapter_snapshot_damaged": 8.0,
    "clock_steps": 1.0,
}


class Crashed(BaseException):
    """This process is gone: nothing in it may catch this, and nothing it does from here on has an effect."""


class World:
    """`faults`: how many happen at most; `likelihood`: of each, each time it could happen."""

    def __init__(self, seed: int, faults: int, likelihood: float) -> None:
        self.random = random.Random(seed)
        self.faults_left = faults
        self.likelihood = likelihood
        self.happened: Counter[str] = Counter()
        self.server = Server(self)
        self.disks: dict[str, SimulatedFiles] = {}
        self.workers: dict[str, Workers] = {}
        self.adapters = SimulatedDisk()  # all groups' snapshots and checkpoints; outlives their processes
        self.adapters.refuses = lambda: self.strikes("adapter_snapshot_fails")
        self.damaged: dict[str, int] = {}  # adapter -> its newest damaged snapshot
        self.over = False

    def strikes(self, fault: str) -> bool:
        if self.over or self.faults_left <= 0 or self.random.random() >= self.likelihood * FAULTS[fault]:
            return False
        self.faults_left -= 1
        self.happened[fault] += 1
        return True

    def disk(self, name: str) -> Files:
        return self.disks.setdefault(name, SimulatedFiles(self))

    async def latency(self) -> None:
        if self.random.random() < 0.4:
            await anyio.sleep(self.random.random() * 0.02)


class Host:
    """One process: a daemon's, or a tenant's program (which never dies here)."""

    def __init__(self, world: World, name: str, mortal: bool = True) -> None:
        self.world, self.name, self.mortal = world, name, mortal
        self.dead = False
        self.frozen_until = 0.0
        self.clock_skew_ms = world.random.randint(-3000, 3000)

    def now_ms(self) -> int:
        if self.world.strikes("clock_steps"):
            self.clock_skew_ms += self.world.random.randint(-20_000, 5000)
        return EPOCH_MS + self.clock_skew_ms + int(anyio.current_time() * 1000)

    async def point(self) -> None:
        """A point at which this process may end or stand still."""
        if self.mortal:
            if self.world.strikes("daemon_stands_still"):
                self.frozen_until = anyio.current_time() + self.world.random.random() * 3 * LEASE_MS / 1000
            if self.world.strikes("daemon_dies"):
                self.dead = True
        while not self.dead and self.frozen_until > anyio.current_time():
            await anyio.sleep(self.frozen_until - anyio.current_time())
        if self.dead:
            raise Crashed(self.name)

    async def run_blocking(self, call: Callable[[], T]) -> T:
        await self.point()
        result = call()
        await self.point()
        return result


class Server(MemoryLog):
    """The server: synced at every write, so that its death is an absence. `everything` is what was ever appended."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.away_until = 0.0
        self.everything: list[tuple[int, bytes]] = []

    async def commit(self, epoch: int, commit: Commit) -> None:
        await super().commit(epoch, commit)
        self.everything += commit.events

    def check_away(self) -> None:
        if self.world.strikes("server_away"):
            self.away_until = anyio.current_time() + self.world.random.random() * 20
        if anyio.current_time() < self.away_until:
            raise ServerAway("the server is away")


class SimulatedStore:
    """A `Store`: one process's connection to the server."""

    def __init__(self, host: Host) -> None:
        self.host, self.world, self.server = host, host.world, host.world.server

    async def _call(self, effect: Callable[..., Awaitable[T]], *args: Any) -> T:
        await self.host.point()
        await self.world.latency()
        self.server.check_away()
        if self.world.strikes("call_lost"):
            raise ServerAway("the call got lost")
        result = await effect(*args)
        await self.world.latency()
        await self.host.point()
        if self.world.strikes("answer_lost"):
            raise ServerAway("the answer got lost")
        return result

    async def submit(self, header: bytes, body: bytes) -> str:
        if self.world.strikes("entry_twice"):
            await self._call(self.server.submit, header, body)
        if self.world.strikes("entry_late"):
            await anyio.sleep(self.world.random.random() * 5)
        return await self._call(self.server.submit, header, body)

    async def commit(self, epoch: int, commit: Commit) -> None:
        await self._call(self.server.commit, epoch, commit)

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        return await self._call(self.server.read, after, limit)

    async def bounds(self) -> tuple[int, int]:
        return await self._call(self.server.bounds)

    async def trimmed(self) -> int:
        return await self._call(self.server.trimmed)

    async def fence(self) -> int:
        return await self._call(self.server.fence)

    async def read_intake(self, after: str, limit: int, block_ms: int) -> list[Entry]:
        return await self._call(self.server.read_intake, after, limit, block_ms)

    async def read_results(self, tenant: str, after: int, limit: int, block_ms: int) -> list[tuple[int, bytes]]:
        return await self._call(self.server.read_results, tenant, after, limit, block_ms)

    async def last_result(self, tenant: str) -> int:
        return await self._call(self.server.last_result, tenant)

    async def blob(self, digest: str) -> bytes | None:
        return await self._call(self.server.blob, digest)

    async def bodies(self) -> set[str]:
        return await self._call(self.server.bodies)

    async def trim(self, epoch: int, first: int) -> None:
        await self._call(self.server.trim, epoch, first)

    async def lead(self, holder: str, lease_ms: int) -> int | None:
        return await self._call(self.server.lead, holder, lease_ms)

    async def renew(self, epoch: int, holder: str, lease_ms: int) -> bool:
        return await self._call(self.server.renew, epoch, holder, lease_ms)

    async def resign(self, holder: str) -> None:
        await self._call(self.server.resign, holder)

    async def leader(self) -> str:
        return await self._call(self.server.leader)

    async def close(self) -> None:
        pass


class SimulatedFiles:
    """A directory that outlives its writers. A write is whole or not there; of what is there, only the newest file is ever damaged."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.contents: dict[str, bytes] = {}

    def names(self) -> list[str]:
        return sorted(self.contents)

    def read(self, name: str) -> bytes:
        return self.contents[name]

    def write(self, name: str, data: bytes) -> None:
        if self.world.strikes("disk_full"):
            raise OSError(errno.ENOSPC, "No space left on device")
        damaged = name.startswith("state-") and len(self.contents) > 1 and self.world.strikes("state_snapshot_damaged")
        self.contents[name] = data[: len(data) // 2] if damaged else data

    def remove(self, name: str) -> None:
        self.contents.pop(name, None)


class Workers:
    """The processes of one group."""

    def __init__(self, world: World, name: str, spec: GroupSpec, guard_pending: bool = True) -> None:
        self.world, self.name, self.spec, self.guard_pending = world, name, spec, guard_pending
        self.born = 0
        self.late_s = 0.0  # how long they take to be there for the first time
        self.dead = True
        self.machine: Machine

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self.born}"

    def be_born(self) -> None:
        self.born += 1
        self.dead = False
        self.machine = Machine(SimulatedEngine(self.spec, disk=self.world.adapters), guard_pending=self.guard_pending)

    def die(self) -> None:
        """What a process leaves behind may be damaged: of each adapter's snapshots the newest, and no other until there are two more."""
        self.dead = True
        for adapter, kept in self.world.adapters.snapshots.items():
            whole = [version for version in kept if version > self.world.damaged.get(adapter, 0)]
            if len(whole) > 1 and self.world.strikes("adapter_snapshot_damaged"):
                self.world.damaged[adapter] = max(kept)
                kept.pop(max(kept))

    def check(self, incarnation: str) -> None:
        if self.dead or incarnation != self.incarnation:
            raise WorkersLostError(f"workers {incarnation} are gone")


class RemoteGroup:
    """A `WorkerGroup`: one daemon's hands on the workers. `attached` workers die with the daemon that started them."""

    def __init__(self, host: Host, workers: Workers, attached: bool) -> None:
        self.host, self.world, self.workers, self.attached = host, host.world, workers, attached
        self.name = workers.name
        self.incarnation = ""
        self.last: asyncio.Future[StepOutcome] | None = None

    async def start(self, epoch: int) -> Status:
        await self.host.point()
        if not self.workers.born:
            await anyio.sleep(self.workers.late_s)
        if self.workers.dead or (self.attached and self.workers.incarnation != self.incarnation):
            self.workers.die()
            self.workers.be_born()
        self.incarnation = self.workers.incarnation
        return await self.status(epoch)

    def apply(self, call: Call) -> asyncio.Future[StepOutcome]:
        """On its way from now on, whether or not its daemon lives to hear the outcome."""
        self.last = under_way(self._carry_out(call, self.incarnation, self.last))
        return under_way(self._hear(self.last))

    async def _hear(self, coming: asyncio.Future[StepOutcome]) -> StepOutcome:
        await self.host.point()
        outcome = await asyncio.shield(coming)
        await self.world.latency()
        self.workers.check(self.incarnation)
        await self.host.point()
        return outcome

    async def _carry_out(self, call: Call, incarnation: str, before: asyncio.Future[StepOutcome] | None) -> StepOutcome:
        await self.world.latency()
        if before is not None:
            await asyncio.wait([before])
        if self.world.strikes("workers_slow"):
            await anyio.sleep(self.world.random.random() * 10)
        if self.world.strikes("workers_die_before"):
            self.workers.die()
        self.workers.check(incarnation)
        outcome = self.workers.machine.apply(call)
        if self.world.strikes("workers_die_after"):
            self.workers.die()
        return msgspec.structs.replace(outcome, cost_us=COST_US.get(call.step.kind, 1000))

    async def status(self, epoch: int) -> Status:
        await self.host.point()
        self.workers.check(self.incarnation)
        machine = self.workers.machine
        machine.gate.fence(epoch)
        status = Status(self.workers.incarnation, self.workers.spec, machine.facts(), tuple(machine.gate.outcomes.values()))
        await self.world.latency()
        return status

    async def close(self, kill: bool = False) -> None:
        await self.host.point()
        if (kill or self.attached) and self.workers.incarnation == self.incarnation:
            self.workers.die()


COST_US = {StepKind.SNAPSHOT: 4000, StepKind.SWAP: 300}
