"""A child that dies is started again after pauses that grow while it dies young."""

from __future__ import annotations

import sys

from ops import supervised


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_the_pause_grows_while_the_child_dies_young_and_is_short_again_after_it_lasted(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervised, "time", clock)
    child = supervised.Supervised([sys.executable, "-c", "pass"])

    def dies_after(seconds: float) -> float:
        """How long it then waits before it is started again."""
        child.keep_alive()
        assert child.process is not None
        child.process.wait()
        clock.now += seconds
        died, started = clock.now, child.process
        child.keep_alive()
        while child.process is started:
            clock.now += 0.5
            child.keep_alive()
        return clock.now - died

    assert [dies_after(0.1) for _ in range(3)] == [0.5, 1.0, 2.0]
    assert dies_after(supervised.LASTED_S) == 0.5
    child.stop()
