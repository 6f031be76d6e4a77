"""Writes adapter snapshots beside the steps: one thread, and what it finished until somebody asks.

The step that takes a snapshot only copies. Ranks write their shards without a collective, which a thread must not enter: each leaves
its shard's digest beside the shard, and rank 0 makes the snapshot visible once it has seen all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from state.events import Written
from workers import checkpoints

PEERS_TIMEOUT_S = 600.0  # a rank that died takes the group with it long before
POLL_S = 0.02


class SnapshotWriter:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._under_way: list[tuple[str, int, Future[int]]] = []

    def begin(self, adapter: str, version: int, write: Callable[[], None]) -> None:
        """`write` runs after those that were begun before it. What it raises is told by `take`."""
        self._under_way.append((adapter, version, self._thread.submit(_timed, write)))

    def take(self) -> tuple[Written, ...]:
        """What ended since the last call."""
        ended = [one for one in self._under_way if one[2].done()]
        self._under_way = [one for one in self._under_way if not one[2].done()]
        return tuple(_told(adapter, version, future) for adapter, version, future in ended)

    def settle(self) -> None:
        """Waits for all that was begun."""
        for _, _, future in self._under_way:
            future.exception()


def _timed(write: Callable[[], None]) -> int:
    began = time.perf_counter_ns()
    write()
    return (time.perf_counter_ns() - began) // 1000


def _told(adapter: str, version: int, future: Future[int]) -> Written:
    error = future.exception()
    if error is not None:
        return Written(adapter, version, error=f"{type(error).__name__}: {error}")
    return Written(adapter, version, cost_us=future.result())


def leave_digest(aside: Path, shard: str, digest: str) -> None:
    """Tells rank 0 that `shard` is durable."""
    note = aside / f".{shard}.part"
    note.write_text(digest)
    note.rename(aside / f".{shard}.sha256")


def collect_digests(aside: Path, shards: list[str]) -> dict[str, str]:
    """The digests that all ranks left. Raises `TimeoutError`."""
    deadline = time.monotonic() + PEERS_TIMEOUT_S
    notes = {shard: aside / f".{shard}.sha256" for shard in shards}
    while missing := [shard for shard, note in notes.items() if not note.exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"shards {missing} did not come")
        time.sleep(POLL_S)
    digests = {shard: note.read_text() for shard, note in notes.items()}
    for note in notes.values():
        note.unlink()
    return digests


def finish(aside: Path, final: Path, manifest: checkpoints.Manifest, kept: checkpoints.Kept) -> None:
    """Makes the snapshot visible and forgets those that nothing needs any more."""
    checkpoints.commit(aside, final, manifest)
    checkpoints.forget_snapshots(final.parent, kept)
