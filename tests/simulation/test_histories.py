"""Seeded histories of whole fleets (`ops.simulation`), in CI; the soak is `hotdesk simulate`. And what each protection is for: without it,
the same histories break.

A failing seed is in the test's message; `hotdesk simulate --seed N --steps 1` shrinks it.
"""

from __future__ import annotations

import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

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

IN_CI, CHUNK = 800, 50
#: Histories that broke something once. What broke has tests of its own; a seed decides another history once programs change.
FOUND = (5, 9, 188, 289, 487, 533, 637, 693, 928, 1074, 1719, 10181)


@pytest.fixture(autouse=True)
def _quiet():
    _log_nothing()
    yield
    structlog.reset_defaults()


def _log_nothing():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.mark.timeout(400)
def test_nothing_is_lost_and_nothing_is_applied_twice():
    """On all cores: one history knows nothing of another."""
    chunks = [range(first, first + CHUNK) for first in range(0, IN_CI, CHUNK)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as cores:
        broken = [words for words in cores.map(first_broken, chunks) if words]
    assert broken == []


def first_broken(seeds: range) -> str:
    _log_nothing()
    for seed in seeds:
        found = attempt(seed, DRAWN)
        if not isinstance(found, Report):
            return f"seed {seed}: {found}"
    return ""


@pytest.mark.parametrize("seed", FOUND)
def test_histories_that_broke_once_hold(seed):
    assert isinstance(run_seed(seed), Report)


def test_a_history_is_decided_by_its_seed():
    first, second = run_seed(77, Size(faults=20)), run_seed(77, Size(faults=20))
    assert [log_id for log_id, _ in first.log] == [log_id for log_id, _ in second.log]
    assert first._replace(log=[]) == second._replace(log=[])  # a producer's session has a random name, which its cancels carry


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
    assert (size.tenants, size.requests) != (-1, -1) or size.faults < HOSTILE.faults
    print(f"seed {seed} shrinks to {size}: {error}")
