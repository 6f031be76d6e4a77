"""`hotdesk why` accounts for all of a request's time; `hotdesk replay --policy` decides a recorded log again under another policy."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from ops.cli import main
from ops.model import Recorded, jain, predicted
from ops.trace import GROUPS, TENANTS, spans_of
from ops.why import RUNNING, explain
from scheduler.core import Finished, Lost
from state import log_id as ids
from state.errors import UnknownRequest
from state.events import RequestAccepted, Settings, StepFailed, StepFinished, StepStarted
from state.events import decode as decode_event
from state.fleet import Fleet, apply
from state.requests import Op, OptimStep
from tests.harness import Synchronous, forward_body
from workers.contract import Call

pytestmark = pytest.mark.anyio
FB, STEP = Op.FORWARD_BACKWARD, Op.OPTIM_STEP


class Stepwise(Synchronous):
    """Tells the core of each step as it finishes, some milliseconds after the one before."""

    def _work_off(self, batch, dies):
        (dispatch,) = batch.dispatches
        after = 0
        for step in dispatch.steps:
            if dies():
                return self.handle(Lost(dispatch.group, self.incarnations[dispatch.group], "killed"), self.reborn(dispatch.group))
            outcome = self.machines[dispatch.group].apply(Call(1, step, after, self.bodies.get(step.request_id, b"")))
            after = step.id
            self.now_ms += 3
            batch = self.handle(Finished(dispatch.group, self.incarnations[dispatch.group], outcome))
        return batch


def fleet_under(policy: str, seed: int = 1) -> Synchronous:
    """Three tenants that train and sample, some requests late, and one death of the workers."""
    rng = random.Random(seed)
    bench = Stepwise(Settings(policy, turn_requests=2, tenant_queue=1000, snapshot_after_requests=6))
    for tenant in ("ada", "brook", "cleo"):
        bench.create(tenant)
    bench.settle()
    for round_ in range(6):
        for tenant in ("ada", "brook", "cleo"):
            first = 1 + 4 * round_
            bench.program(tenant, [(FB, forward_body(round_)), (STEP, OptimStep()), Op.FORWARD, Op.SAMPLE], first=first)
        bench.now_ms += rng.randrange(20)
        bench.settle(dies=lambda: rng.random() < 0.01)
    bench.send("ada", "poet", 26, Op.FORWARD, forward_body(2))
    bench.handle(*bench._pending)
    bench._pending.clear()
    bench.now_ms += 500
    bench.send("ada", "poet", 25, Op.FORWARD, forward_body(1))
    bench.settle()
    return bench


def events(bench: Synchronous) -> list:
    return [(log_id, decode_event(data)) for log_id, data in bench.log]


async def stream(items):
    for item in items:
        yield item


async def test_the_parts_of_every_request_sum_to_its_whole():
    bench = fleet_under("round_robin")
    accepted = {e.request.request_id: log_id for log_id, e in events(bench) if isinstance(e, RequestAccepted)}
    assert len(accepted) > 70
    for request_id, at in accepted.items():
        account = await explain(request_id, stream(events(bench)))
        outcome = bench.fleet.outcome(request_id)
        assert account.status == outcome.status
        assert account.total_ms == ids.ms_of(outcome.at) - ids.ms_of(at) == sum(part.ms for part in account.parts)


async def test_each_cause_is_named():
    bench = fleet_under("round_robin")
    held = await explain("ada/poet/26", stream(events(bench)))
    assert any(part.cause == "held: seq 25 has not come" and part.ms >= 500 for part in held.parts)
    causes = set()
    for tenant in ("ada", "brook", "cleo"):
        for seq in range(1, 25):
            account = await explain(f"{tenant}/poet/{seq}", stream(events(bench)))
            causes |= {part.cause.partition(":")[0] for part in account.parts}
            for part in account.parts:
                assert part.cause != "behind another tenant" or not part.who.startswith(f"{tenant}/")
    assert {RUNNING, "made ready", "behind another tenant", "behind its own adapter"} <= causes


async def test_a_request_that_never_was_is_an_error_with_words():
    with pytest.raises(UnknownRequest, match="never accepted"):
        await explain("ada/poet/99", stream(events(fleet_under("fifo"))))


@pytest.mark.parametrize("policy", ["fair", "fifo", "round_robin"])
async def test_the_model_repeats_what_a_real_fleet_did(policy):
    """Under the recorded policy, with all requests there from the start, the model takes the same turns."""
    bench = Synchronous(Settings(policy, turn_requests=2, tenant_queue=1000))
    bench.cost_us = lambda call: 1000
    for tenant in ("ada", "brook", "cleo"):
        bench.create(tenant)
        bench.program(tenant, [(FB, forward_body(1)), (STEP, OptimStep()), Op.SAMPLE] * 5)
    bench.settle()
    summary = Recorded(events(bench)).under(policy)
    group = bench.fleet.groups["main"]
    assert (summary.requests, summary.turns, summary.swaps) == (48, group.turns, group.swaps)
    assert summary.busy_ms == group.busy_us / 1000


async def test_another_policy_is_compared_on_the_same_work():
    recorded = Recorded(events(fleet_under("round_robin")))
    summaries = {policy: recorded.under(policy) for policy in ("fair", "fifo", "round_robin")}
    assert len({summary.requests for summary in summaries.values()}) == 1
    assert summaries["fifo"].turns != summaries["round_robin"].turns
    assert 0.3 < jain(list(summaries["fair"].used_us.values())) <= 1.0


def test_what_the_model_predicts_is_what_workers_report():
    bench = fleet_under("round_robin", seed=3)
    fleet, steps, compared = Fleet(), {}, 0
    for log_id, event in events(bench):
        if isinstance(event, StepStarted):
            steps[event.step.id] = event.step
        if isinstance(event, StepFinished):
            step = steps[event.step_id]
            if not step.redo and step.kind not in ("restore", "snapshot"):
                guess = predicted(fleet, fleet.groups["main"], step)
                compared += 1
                assert (guess.live, guess.sampler, guess.published) == (event.facts.live, event.facts.sampler, event.facts.published)
                said = {seen.adapter: (seen.residency, seen.pending, seen.dirty) for seen in guess.adapters}
                assert said == {seen.adapter: (seen.residency, seen.pending, seen.dirty) for seen in event.facts.adapters}
        apply(fleet, log_id, event)
    assert compared > 100


GOLDEN = Path(__file__).parents[1] / "golden" / "0.1-scenes.hdlog"


@pytest.fixture
def recorded(tmp_path):
    shutil.copy(GOLDEN, tmp_path)
    return str(tmp_path)


def test_from_the_command_line(recorded, capsys):
    assert main(["why", "brook/poet/5", "--segments", recorded]) == 0
    assert "brook/poet/5 optim_step: completed" in capsys.readouterr().out
    assert main(["why", "brook/poet/99", "--segments", recorded]) == 3
    assert "never accepted" in capsys.readouterr().err
    assert main(["replay", "--segments", recorded, "--policy", "fair", "--policy", "fifo"]) == 0
    assert "round_robin (recorded)" in capsys.readouterr().out
    assert main(["replay", "--segments", recorded, "--policy", "best"]) == 2
    assert "no such policy" in capsys.readouterr().err


# --- trace ------------------------------------------------------------------------------------------------------------


async def test_a_trace_shows_every_step_and_every_request_once():
    bench = fleet_under("round_robin")
    spans = await spans_of(stream(events(bench)))
    told = [event for _, event in events(bench)]
    steps = [span for span in spans if span["pid"] == GROUPS and span["ph"] == "X"]
    assert len(steps) == sum(isinstance(event, StepFinished | StepFailed) for event in told)
    assert sum(span["dur"] for span in steps) == sum(event.cost_us for event in told if isinstance(event, StepFinished | StepFailed))
    for one, following in itertools.pairwise(steps):
        assert one["ts"] + one["dur"] <= following["ts"], "steps of one group overlap"
    requests = {span["args"]["request"]: span for span in spans if span["pid"] == TENANTS}
    assert set(requests) == {event.request.request_id for event in told if isinstance(event, RequestAccepted)}
    for request_id, span in requests.items():
        account = await explain(request_id, stream(events(bench)))
        assert (span["dur"], span["args"]["status"]) == (1000 * account.total_ms, account.status)


def test_a_trace_file_has_a_name_for_every_row(recorded, tmp_path, capsys):
    out = tmp_path / "deep" / "trace.json"
    assert main(["trace", "--segments", str(recorded), "--last", "0", "--out", str(out)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    found = json.loads(out.read_bytes())["traceEvents"]
    named = {(event["pid"], event.get("tid")) for event in found if event["ph"] == "M"}
    assert {(event["pid"], event["tid"]) for event in found if event["ph"] != "M"} <= named
    begun = Counter(event["id"] for event in found if event["ph"] == "b")
    assert begun == Counter(event["id"] for event in found if event["ph"] == "e")
