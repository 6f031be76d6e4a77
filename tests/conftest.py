"""Fixtures, and two reports: which edges of the residency machine the suite never took, and which checks CUDA alone could make."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from state import events, fleet, residency
from state.residency import EDGES


class Recording(dict):
    """`EDGES` that remembers which of its keys were asked for."""

    def __init__(self, edges):
        super().__init__(edges)
        self.taken = set()
        self.folding = False

    def __getitem__(self, key):
        value = super().__getitem__(key)
        if self.folding:
            self.taken.add(key)
        return value

    def while_folding(self, handler):
        """A step that a worker finished, or workers that were lost, took an edge; a planner that looks ahead did not."""

        def handle(state, log_id, event):
            self.folding = True
            try:
                handler(state, log_id, event)
            finally:
                self.folding = False

        return handle


RECORDING = Recording(EDGES)
residency.EDGES = RECORDING
for kind in (events.StepFinished, events.WorkersLost, events.WorkersJoined):
    fleet._HANDLERS[kind] = RECORDING.while_folding(fleet._HANDLERS[kind])


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of several processes: the first one tells
        session.config.workeroutput["edges"] = [f"{where} {move}" for where, move in RECORDING.taken]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    told = set(getattr(node, "workeroutput", {}).get("edges", ()))
    RECORDING.taken |= {(where, move) for where, move in RECORDING if f"{where} {move}" in told}


def pytest_terminal_summary(terminalreporter):
    never = [f"{where} --{move}--> {to}" for (where, move), to in RECORDING.items() if (where, move) not in RECORDING.taken]
    terminalreporter.section("residency machine")
    terminalreporter.line(f"{len(RECORDING) - len(never)} of {len(RECORDING)} edges taken by this run")
    for edge in never:
        terminalreporter.line(f"never taken: {edge}")


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def short_tmp():
    """A directory with a short path: unix sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def server():
    """A real embedded server for the whole run; tests use a fleet name each."""
    from scheduler.embedded import EmbeddedServer

    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        embedded = EmbeddedServer(Path(directory))
        embedded.start()
        yield embedded
        embedded.stop()
