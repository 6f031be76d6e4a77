"""The three colocated cases that started this project, on a real Megatron rank under the real core and planner.

A sample for an adapter that is not live; pending gradients that survive another tenant's sample; two adapters that train and sample.
Each has an undisturbed control, and the mechanism is switched off once to show that the comparison would notice.
"""

from __future__ import annotations

import pytest

from scheduler.producer import values
from state.events import Settings, StepKind, StepStarted
from state.requests import Op, OptimStep, Sample
from tests.gateway.running import StandInEngine, free_port
from tests.harness import Synchronous, digests, int32
from tests.workers.conformance import batch
from tests.workers.megatron_rank import group, rank
from workers.group_config import EngineConfig
from workers.machine import Machine

FB, STEP = Op.FORWARD_BACKWARD, Op.OPTIM_STEP
PROMPT = Sample(int32([1, 2, 3]), max_tokens=6, seed=3)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "engine"])
def hosted(request):
    """Sampled by Megatron itself, or by an engine beside it."""
    if request.param == "engine":
        standin = StandInEngine(free_port())
        made = rank(group(device_slots=1, engine=EngineConfig(standin.url, "base")))
    else:
        made = rank(group(dtype=request.param, device_slots=1))
    yield made
    made.leave()
    if request.param == "engine":
        seen = standin.standin()
        standin.kill()
        assert seen["disturbed"] == 0
        assert {line for line in seen["seen"] if line.startswith("sleep")} == {"sleep with 0 loaded"}


@pytest.fixture
def fleet(hosted):
    """A fleet over the one rank; call it for each run, the store is emptied in between."""

    def make(**options) -> Synchronous:
        engine = hosted.machine.engine
        if hosted.machine.sampler:
            engine.sleep_sampler()
        engine.backload(tuple(part for part in ("weights", "grads", "optimizer") if part not in engine.resident_parts()))
        for adapter in list(hosted.machine.held):
            engine.drop(adapter)
        guard = options.pop("guard_pending", True)
        hosted.machine = Machine(engine, guard_pending=guard)
        return Synchronous(machine=hosted.machine, **options)

    return make


def train(bench, tenant, step, *, number):
    """Queues the `step`-th forward_backward and optim_step of a tenant."""
    fb = bench.send(tenant, "poet", 2 * step - 1, FB, batch(number))
    return fb, bench.send(tenant, "poet", 2 * step, STEP, OptimStep(learning_rate=0.02, eps=1e-8))


def test_a_sample_for_an_adapter_that_is_not_live(fleet):
    bench = fleet()
    bench.create("ada", seed=1)
    bench.create("brook", seed=2)
    bench.settle()
    train(bench, "ada", 1, number=1)
    bench.settle()
    train(bench, "brook", 1, number=2)
    bench.settle()
    assert bench.fleet.groups["main"].device.live == "brook/poet"
    sampled = bench.send("ada", "poet", 3, Op.SAMPLE, PROMPT)
    bench.settle()
    control = fleet()
    control.create("ada", seed=1)
    train(control, "ada", 1, number=1)
    alone = control.send("ada", "poet", 3, Op.SAMPLE, PROMPT)
    control.settle()
    assert bench.result(sampled) == control.result(alone)


def pending_across_a_sample(bench) -> list[str]:
    bench.create("ada", seed=1)
    bench.create("brook", seed=2)
    sent = [bench.send("ada", "poet", 1, FB, batch(1))]
    bench.settle()
    bench.send("brook", "poet", 1, Op.SAMPLE, PROMPT)
    bench.settle()
    sent.append(bench.send("ada", "poet", 2, FB, batch(2)))
    sent.append(bench.send("ada", "poet", 3, STEP, OptimStep(learning_rate=0.02, eps=1e-8)))
    bench.settle()
    return digests(bench, sent)


def undisturbed(bench) -> list[str]:
    bench.create("ada", seed=1)
    sent = [bench.send("ada", "poet", seq, FB, batch(seq)) for seq in (1, 2)]
    sent.append(bench.send("ada", "poet", 3, STEP, OptimStep(learning_rate=0.02, eps=1e-8)))
    bench.settle()
    return digests(bench, sent)


def test_pending_gradients_survive_another_tenants_sample(fleet):
    bench = fleet()
    disturbed = pending_across_a_sample(bench)
    parks = [e for e in bench.events(StepStarted) if e.step.kind is StepKind.PARK]
    assert len(parks) == 1
    assert disturbed == undisturbed(fleet())
    assert len(disturbed) == 1


def test_without_parking_the_worker_refuses_to_offload(fleet):
    bench = fleet(settings=Settings(parking=False))
    bench.create("ada", seed=1)
    bench.create("brook", seed=2)
    bench.send("ada", "poet", 1, FB, batch(1))
    bench.settle()
    sampled = bench.send("brook", "poet", 1, Op.SAMPLE, PROMPT)
    bench.settle()
    assert bench.error(sampled) == "PendingUnparked"


def test_without_parking_and_without_the_workers_guard_the_comparison_notices(fleet):
    """The partner: both protections off, the planted fault must show in the bits."""
    disturbed = pending_across_a_sample(fleet(settings=Settings(parking=False), guard_pending=False))
    assert disturbed != undisturbed(fleet())


def test_two_adapters_train_and_sample(fleet):
    def program(bench, tenants):
        sent = {tenant: [] for tenant in tenants}
        for tenant in tenants:
            bench.create(tenant, seed=ord(tenant[0]))
        bench.settle()
        for step in range(1, 5):
            for tenant in tenants:
                first = 3 * step - 2
                sent[tenant].append(bench.send(tenant, "poet", first, FB, batch(step)))
                bench.settle()
            for tenant in tenants:
                first = 3 * step - 2
                sent[tenant].append(bench.send(tenant, "poet", first + 1, STEP, OptimStep(learning_rate=0.02, eps=1e-8)))
                sent[tenant].append(bench.send(tenant, "poet", first + 2, Op.SAMPLE, PROMPT))
            bench.settle()
        return {tenant: [bench.result(q) for q in sent[tenant]] for tenant in tenants}

    together = program(fleet(), ("ada", "brook"))
    for tenant in ("ada", "brook"):
        assert program(fleet(), (tenant,))[tenant] == together[tenant]
    losses = [r.metrics["loss:sum"] for r in together["ada"] if hasattr(r, "metrics") and "loss:sum" in r.metrics]
    assert len(losses) == 4
    tokens = [values(r.sequences[0].tokens).tolist() for r in together["ada"] if hasattr(r, "sequences")]
    assert len(tokens) == 4
