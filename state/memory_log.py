"""The in-memory store: the Redis store's twin for tests, simulation and policy work. Nothing survives the process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import anyio

from state import log_id as ids
from state.errors import Fenced, LogDiverged
from state.log import Commit, Entry


class MemoryLog:
    """`lead` and `renew` need a running event loop: the lease ends by its clock."""

    def __init__(self) -> None:
        self.epoch = 0
        self.events: list[tuple[int, bytes]] = []
        self.intake: dict[str, Entry] = {}
        self.results: dict[str, list[tuple[int, bytes]]] = {}
        self.blobs: dict[str, bytes] = {}
        self.holder = ""
        self.lease_until = 0.0
        self._submitted = 0
        self._trimmed = 0
        self._changed = anyio.Event()

    async def commit(self, epoch: int, commit: Commit) -> None:
        if epoch != self.epoch:
            raise Fenced(f"epoch {epoch} tried to append, epoch {self.epoch} leads")
        last = self.events[-1][0] if self.events else 0
        if last != commit.after:
            raise LogDiverged(f"the log ends at {ids.text(last)}, this daemon's at {ids.text(commit.after)}")
        for digest in commit.forget:
            self.blobs.pop(digest, None)
        for digest, intake_id in commit.blobs:
            self.blobs[digest] = self.intake[intake_id].body
        self.events.extend(commit.events)
        for intake_id in commit.taken:
            self.intake.pop(intake_id, None)
        for result in commit.results:
            stream = self.results.setdefault(result.tenant, [])
            first = dict(stream).get(result.first_at) if result.first_at else None
            stream.append((result.log_id, first or result.payload))
        self._wake()

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        start = bisect_right(self.events, after, key=lambda event: event[0])
        return self.events[start : start + limit]

    async def bounds(self) -> tuple[int, int]:
        return (self.events[0][0], self.events[-1][0]) if self.events else (0, 0)

    async def trimmed(self) -> int:
        return self._trimmed

    async def fence(self) -> int:
        self.epoch += 1
        return self.epoch

    async def submit(self, header: bytes, body: bytes) -> str:
        self._submitted += 1
        intake_id = f"{self._submitted}-0"
        self.intake[intake_id] = Entry(intake_id, header, body)
        self._wake()
        return intake_id

    async def read_intake(self, after: str, limit: int, block_ms: int) -> list[Entry]:
        def newer() -> list[Entry]:
            return [entry for entry in self.intake.values() if ids.parse(entry.intake_id) > ids.parse(after)][:limit]

        with anyio.move_on_after(block_ms / 1000):
            while not newer():
                await self._changed.wait()
        return newer()

    async def read_results(self, tenant: str, after: int, limit: int, block_ms: int) -> list[tuple[int, bytes]]:
        def newer() -> list[tuple[int, bytes]]:
            return [entry for entry in self.results.get(tenant, []) if entry[0] > after][:limit]

        with anyio.move_on_after(block_ms / 1000):
            while not newer():
                await self._changed.wait()
        return newer()

    async def last_result(self, tenant: str) -> int:
        stream = self.results.get(tenant)
        return stream[-1][0] if stream else 0

    async def blob(self, digest: str) -> bytes | None:
        return self.blobs.get(digest)

    async def bodies(self) -> set[str]:
        return set(self.blobs)

    async def trim(self, epoch: int, first: int) -> None:
        if epoch != self.epoch:
            raise Fenced(f"epoch {epoch} tried to trim, epoch {self.epoch} leads")
        self._trimmed = first
        del self.events[: bisect_left(self.events, first, key=lambda event: event[0])]

    async def lead(self, holder: str, lease_ms: int) -> int | None:
        if self.holder not in ("", holder) and anyio.current_time() < self.lease_until:
            return None
        self.holder, self.lease_until = holder, anyio.current_time() + lease_ms / 1000
        return await self.fence()

    async def renew(self, epoch: int, holder: str, lease_ms: int) -> bool:
        if self.epoch != epoch:
            return False
        self.holder, self.lease_until = holder, anyio.current_time() + lease_ms / 1000
        return True

    async def resign(self, holder: str) -> None:
        if self.holder == holder:
            self.holder = ""

    async def leader(self) -> str:
        return self.holder

    async def close(self) -> None:
        pass

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
