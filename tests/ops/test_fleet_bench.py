"""The large fleet's simulator: costs fitted from a log, and traces that a seed decides."""

from __future__ import annotations

import argparse

import pytest

from ops.bench import fleet
from ops.model import Fitted, Recorded
from state.events import Step, StepKind, decode
from state.requests import Op
from state.segment_log import read_segment

ARGS = argparse.Namespace(tenants=24, groups=3, hours=6.0, seed=3)


@pytest.fixture(scope="module")
def fitted():
    return Fitted(Recorded((log_id, decode(data)) for log_id, data in read_segment(fleet.RECORDED)))


def test_costs_that_lie_on_a_line_are_found_again():
    recorded = Recorded([])
    recorded.samples[Op.FORWARD] = [(tokens, 700 + 3 * tokens) for tokens in (10, 500, 2000)]
    recorded.kinds[StepKind.SWAP] = [100, 300]
    costs = Fitted(recorded)
    assert costs(Step(1, StepKind.EXECUTE, op=Op.FORWARD), 1000) == pytest.approx(3700, abs=1)
    assert costs(Step(1, StepKind.SWAP), 0) == 200


def test_neither_part_of_a_cost_is_negative():
    recorded = Recorded([])
    recorded.samples[Op.FORWARD] = [(10, 900), (1000, 100)]
    assert Fitted(recorded)(Step(1, StepKind.EXECUTE, op=Op.FORWARD), 5000) == 500


def test_the_recorded_log_has_a_cost_for_what_the_traces_send(fitted):
    for op in (Op.CREATE_ADAPTER, Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.SAMPLE):
        assert fitted(Step(1, StepKind.EXECUTE, op=op), 2048) > 0
    assert fitted(Step(1, StepKind.SWAP), 0) > 0


@pytest.mark.parametrize("trace", fleet.TRACES)
def test_a_trace_is_decided_by_its_seed_and_every_request_ends(fitted, trace):
    first, again = (fleet.run(trace, lambda step, work: 2000 * fitted(step, work), ARGS) for _ in range(2))
    first.pop("took s")
    again.pop("took s")
    assert first == again
    assert int(first["requests"]) > ARGS.tenants
