"""Seeded histories of whole fleets (`ops.simulation`), in CI; the soak is `hotdesk simulate`. And what each protection is for: without it,
the same histories break.

A failing seed is in the test's message; `hotdesk simulate --seed N --steps 1` shrinks it.
"""

from __future__ import annotations

import logging

import pytest
import structlog

from ops.simulate import attempt, shrink
from ops.simulation import world
from ops.simulation.history import DRAWN, Report, Size, run_seed
from scheduler import policy
from scheduler.core import Core
from scheduler.daemon import Daemon
from state import fleet as state_fleet
from state import memory_log
from state.events import Settings, StepFinished, StepKind
from workers.contract import Gate

FIRST, IN_CI, A_TEST = 0, 2000, 250
#: Histories that broke something while this was built; what, in `ops/RUNBOOK.md`.
FOUND = (5, 9, 188, 289, 487, 533, 637, 693, 928, 1074, 1719, 10181)


@pytest.fixture(autouse=True)
def _quiet():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("first", range(FIRST, FIRST + IN_CI, A_TEST))
def test_nothing_is_lost_and_nothing_is_applied_twice(first):
    for seed in range(first, first + A_TEST):
        found = attempt(seed, DRAWN)
        assert isinstance(found, Report), f"seed {seed}: {found}"


@pytest.mark.parametrize("seed", FOUND)
def test_histories_that_broke_once_hold(seed):
    assert isinstance(run_seed(seed), Report)


def test_a_history_is_decided_by_its_seed():
    assert run_seed(77, Size(faults=20)) == run_seed(77, Size(faults=20))


# --- sensitivity --------------------------------------------------------------------------------------------------


def no_fencing(monkeypatch):
    """A deposed leader's writes and calls are taken."""

    async def commit(self, epoch, commit):
        await memory_log.MemoryLog.commit(self, self.epoch, commit)
        self.everything += commit.events

    monkeypatch.setattr(world.Server, "commit", commit)
    monkeypatch.setattr(Gate, "fence", lambda self, epoch: None)


def no_dedupe(monkeypatch):
    """A request that comes again is a new one."""
    monkeypatch.setattr(Core, "_seen_before", lambda self, request: False)


def no_write_ahead(monkeypatch):
    """Workers are sent steps before the log has them."""

    async def round_(self, batch):
        await self._send_out(batch)
        if not batch.commit.empty:
            await self._commit(batch.commit)

    monkeypatch.setattr(Daemon, "_round", round_)


def no_watermark(monkeypatch):
    """A snapshot does not say what it covers: all is re-executed on top of it."""
    handlers = dict(state_fleet._HANDLERS)

    def finished(fleet, log_id, event):
        step = fleet.groups[event.group].steps[event.step_id]
        adapter = fleet.adapters.get(step.adapter)
        history = list(adapter.history) if adapter is not None else []
        handlers[StepFinished](fleet, log_id, event)
        if step.kind is StepKind.SNAPSHOT and adapter is not None:
            adapter.history, adapter.redone = history, len(history)

    monkeypatch.setitem(state_fleet._HANDLERS, StepFinished, finished)


def no_order(monkeypatch):
    """What is there runs, whether or not what was sent before it is."""

    def ready(adapter, limit):
        return tuple(adapter.queue[seq].request for seq in list(adapter.queue)[:1])

    def reindex(fleet, adapter, log_id):
        group = fleet.groups[adapter.group]
        if adapter.queue and group.incarnation:
            at = min(queued.at for queued in adapter.queue.values())
            group.queue.wait(adapter.tenant, adapter.key, at, fleet.settings.share(adapter.tenant))
        else:
            group.queue.leave(adapter.tenant, adapter.key)

    monkeypatch.setattr(policy, "ready", ready)
    monkeypatch.setattr(state_fleet, "_reindex", reindex)


def no_asking(monkeypatch):
    """A new leader commands workers before they told what they did for the last one."""
    monkeypatch.setattr(Core, "_commands", lambda self, group: bool(group.incarnation))


def no_repetition_check(monkeypatch):
    """A worker that is told a step again does it again, and a plan may go on after a step that failed."""
    monkeypatch.setattr(Gate, "run", lambda self, call, act: act(call))


def no_archive(monkeypatch):
    """House-keeping trims what it did not archive."""

    async def following(self, log, through):
        return None

    monkeypatch.setattr("state.archive.Archive.following", following)


PROTECTIONS = {
    "fencing": no_fencing,
    "dedupe": no_dedupe,
    "write-ahead": no_write_ahead,
    "snapshot watermark": no_watermark,
    "seq order": no_order,
    "asking before commanding": no_asking,
    "step order and repetition": no_repetition_check,
    "archive before trim": no_archive,
}
MOST_HISTORIES = 100
HOSTILE = Size(faults=30)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_protection_that_is_switched_off_is_noticed(protection, monkeypatch):
    monkeypatch.setattr("ops.simulation.history.PATIENCE_S", 300.0)
    PROTECTIONS[protection](monkeypatch)
    broken = ((seed, found) for seed in range(MOST_HISTORIES) if isinstance(found := attempt(seed, HOSTILE), BaseException))
    seed, error = next(broken, (0, None))
    assert error is not None, f"{MOST_HISTORIES} histories did not notice"
    print(f"without {protection}: seed {seed}: {type(error).__name__}: {str(error)[:200]}")


def test_lost_gradients_are_noticed(monkeypatch):
    """Parking switched off in planner and worker."""
    settings = Settings(parking=False, gap_deadline_ms=10**9, result_retention_ms=10**9)
    for seed in range(MOST_HISTORIES):
        try:
            run_seed(seed, Size(faults=0), settings, guard_pending=False)
        except BaseException as error:
            print(f"without parking: seed {seed}: {error}")
            return
    pytest.fail("no history noticed")


def test_a_broken_history_shrinks(monkeypatch):
    no_asking(monkeypatch)
    seed = next(seed for seed in range(MOST_HISTORIES) if isinstance(attempt(seed, HOSTILE), BaseException))
    size, error = shrink(seed, HOSTILE)
    assert isinstance(error, BaseException)
    assert 1 <= size.faults <= 10
    print(f"seed {seed} shrinks to {size}: {error}")
