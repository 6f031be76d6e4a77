"""Logs recorded by earlier versions replay in this one: every event is read, every recorded decision comes out the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ops.readable import kind_of, line
from ops.replay import Verifier
from state import plan
from state.events import ALL_KINDS, StepKind, StepStarted, decode
from state.fleet import Fleet, apply, encode
from state.fleet import decode as decode_fleet
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


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_changed_planner_is_caught_by_verify_which_names_the_first_differing_decision(path, monkeypatch):
    monkeypatch.setattr(plan._Planner, "keeps_outgoing", lambda self: True)
    monkeypatch.setattr(plan._Planner, "snapshot_if_due", lambda self, turn: None)
    monkeypatch.setattr(plan._Planner, "recover", lambda self, request_id: None)
    verifier = Verifier()
    for log_id, data in read_segment(path):
        verifier.take(log_id, decode(data))
    assert verifier.differences > 0
    assert "the planner" in verifier.problems[0]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_folds_to_the_same_bytes_from_any_state_on_the_way(path):
    events = [(log_id, decode(data)) for log_id, data in read_segment(path)]
    whole, half = Fleet(), Fleet()
    for log_id, event in events:
        apply(whole, log_id, event)
    for log_id, event in events[: len(events) // 2]:
        apply(half, log_id, event)
    resumed = decode_fleet(encode(half))
    for log_id, event in events[len(events) // 2 :]:
        apply(resumed, log_id, event)
    assert encode(resumed) == encode(whole)
