"""The event log as an interface. Three stores implement it and pass one test class: Redis, memory, file segments.

A commit is one atomic step: it appends events only if the caller's epoch still leads and the log ends where the caller believes it ends,
and in the same step removes accepted intake entries, moves their large bodies to blobs and publishes results. So a crash can neither
lose a request nor apply it twice (invariant 7).
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Result(msgspec.Struct, frozen=True):
    """An entry for `tenant`'s results stream under `log_id`. `first_at` set: repeat the entry of that id if it is still kept."""

    tenant: str
    log_id: int
    payload: bytes
    first_at: int = 0


class Commit(msgspec.Struct):
    """`after`: the id of the last event this leader knows. `forget`: digests of bodies that nothing needs any more; then `blobs`: (digest,
    intake id) of bodies that stay beside the log."""

    after: int
    events: list[tuple[int, bytes]] = []
    taken: list[str] = []
    blobs: list[tuple[str, str]] = []
    results: list[Result] = []
    forget: list[str] = []

    @property
    def empty(self) -> bool:
        return not (self.events or self.taken or self.results or self.forget)


class Entry(msgspec.Struct, frozen=True):
    """One intake entry: its id in the intake stream, the encoded envelope, and the body."""

    intake_id: str
    header: bytes
    body: bytes = b""


class EventReader(Protocol):
    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` events with ids over `after`, in order."""
        ...


class EventLog(EventReader, Protocol):
    async def commit(self, epoch: int, commit: Commit) -> None:
        """Raises `Fenced` where another epoch leads, `LogDiverged` where the log does not end at `commit.after`."""
        ...

    async def bounds(self) -> tuple[int, int]:
        """(first, last) id held; zeros when empty."""
        ...

    async def trimmed(self) -> int:
        """Id of the first event that was left when the log was trimmed last; 0 if it never was."""
        ...

    async def fence(self) -> int:
        """A new epoch, higher than any before; older ones can append nothing from here on."""
        ...


class Store(EventLog, Protocol):
    """An event log with its intake, blobs, results and lease: what a daemon and its producers share."""

    async def submit(self, header: bytes, body: bytes) -> str:
        """Appends to the intake; durable as far as the server is once this returns. Returns the intake id. Raises `Busy` while too many
        entries wait there."""
        ...

    async def read_intake(self, after: str, limit: int, block_ms: int) -> list[Entry]: ...

    async def read_results(self, tenant: str, after: int, limit: int, block_ms: int) -> list[tuple[int, bytes]]: ...

    async def last_result(self, tenant: str) -> int: ...

    async def blob(self, digest: str) -> bytes | None: ...

    async def bodies(self) -> set[str]:
        """Digests of the large bodies kept beside the log."""
        ...

    async def trim(self, epoch: int, first: int) -> None:
        """Drops the events before `first`, which are archived. Raises `Fenced` where another epoch leads."""
        ...

    async def lead(self, holder: str, lease_ms: int) -> int | None:
        """Takes the lease if nobody holds it, and fences older epochs. None while another holds it."""
        ...

    async def renew(self, epoch: int, holder: str, lease_ms: int) -> bool: ...

    async def resign(self, holder: str) -> None: ...

    async def leader(self) -> str: ...

    async def close(self) -> None: ...
