"""Logs recorded by earlier versions replay in this one: every event is read, every recorded decision comes out the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ops.readable import kind_of, line
from ops.replay import Verifier
from state.events import ALL_KINDS, StepKind, StepStarted, decode
from state.segment_log import read_segment
from tests.golden.record import scenes

LOGS = sorted(Path(__file__).parent.glob("*.hdlog"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_golden_log_replays(path):
    verifier = Verifier()
    for log_id, data in read_segment(path):
        event = decode(data)
        assert kind_of(event) in line(log_id, event)
        verifier.take(log_id, event)
    assert verifier.decisions > 10
    assert verifier.problems == []


def test_together_they_hold_every_kind_of_event():
    kinds = Counter(type(decode(data)) for path in LOGS for _, data in read_segment(path))
    assert set(kinds) == set(ALL_KINDS)


def test_together_they_hold_every_kind_of_step_that_a_planner_plans():
    events = [decode(data) for path in LOGS for _, data in read_segment(path)]
    steps = {event.step.kind for event in events if isinstance(event, StepStarted)}
    assert set(StepKind) - steps == {StepKind.FETCH, StepKind.SPILL, StepKind.BACKLOAD} - steps


def test_the_recorder_still_works():
    bench = scenes()
    assert not bench.fleet.groups["main"].broken
    assert bench.core.at_rest
