"""The fair policy's promises, in virtual time on random traces: accelerator time by weight, waiting, switches, phases, limits.

Costs are declared, so "accelerator time" is what the trace says and no clock is involved. Seeds are in the tests' names.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from scheduler.policy import POLICIES, Fair
from state.events import Settings, StepFinished, StepKind, StepStarted, decode
from state.fair_queue import Cost, FairQueue, Share
from state.fleet import Fleet, apply
from state.requests import CreateAdapter, Forward, Op, OptimStep, Sample, Signature, Unload
from tests.harness import FAILING, Synchronous, int32, sequence
from workers.simulated import SIMULATED_SPEC

FB, STEP = Op.FORWARD_BACKWARD, Op.OPTIM_STEP
SWITCH_US = {StepKind.SWAP: 2_000, StepKind.PARK: 3_000, StepKind.WAKE_SAMPLER: 5_000, StepKind.BACKLOAD: 4_000}
US_A_TOKEN = 50


def batch(tokens: int) -> Forward:
    return Forward((sequence(*[1] * (tokens + 1)),))


def cost_us(bench: Synchronous, call) -> int:
    """What a step costs in this world: switches by kind, computing by tokens."""
    if call.step.kind is not StepKind.EXECUTE:
        return SWITCH_US.get(call.step.kind, 100)
    found = bench.fleet.queued_request(call.step.request_id)
    work = found[1].request.work if found is not None else 0
    return 400 + US_A_TOKEN * work


def fleet_of(shares: dict[str, float] | None = None, **settings) -> Synchronous:
    made = Settings(
        "fair",
        shares={name: Share(weight=weight) for name, weight in (shares or {}).items()},
        tenant_queue=1000,
        turn_least_us=5_000,
        turn_switches=10.0,
        turn_most_us=60_000,
        **settings,
    )
    bench = Synchronous(made)
    bench.cost_us = lambda call: cost_us(bench, call)
    return bench


class Turns:
    """A recorded log as turns: (tenant, accelerator microseconds, of which switching, the fleet's charges at its end)."""

    def __init__(self, bench: Synchronous) -> None:
        self.rows: list[tuple[str, int, int, dict[str, int], set[str]]] = []
        fleet, begun = Fleet(), ("", 0, 0)
        for log_id, data in bench.log:
            event = decode(data)
            if isinstance(event, StepStarted) and not fleet.groups["main"].steps:
                if begun[0]:
                    self._close(fleet, begun)
                begun = event.step.request_id.partition("/")[0], 0, 0
            if isinstance(event, StepFinished):
                step = fleet.groups["main"].steps[event.step_id]
                switching = event.cost_us if step.kind is not StepKind.EXECUTE else 0
                begun = begun[0], begun[1] + event.cost_us, begun[2] + switching
            apply(fleet, log_id, event)
        self._close(fleet, begun)

    def _close(self, fleet: Fleet, turn: tuple[str, int, int]) -> None:
        used = {name: tenant.used_us for name, tenant in fleet.tenants.items()}
        self.rows.append((*turn, used, set(fleet.groups["main"].queue.waiting)))

    @property
    def longest_us(self) -> int:
        return max(row[1] for row in self.rows)

    def always_waiting(self, tenants: list[str]) -> list[dict[str, int]]:
        """Charges at the end of each turn while every one of `tenants` had work, from the first such turn on."""
        return [used for _, _, _, used, waiting in self.rows if waiting >= set(tenants)]


def backlog(bench: Synchronous, rng: random.Random, tenants: list[str], requests: int) -> None:
    for tenant in tenants:
        bench.create(tenant)
    bench.settle()
    for tenant in tenants:
        heavy = rng.choice((40, 100, 400))
        ops = [(FB, batch(rng.randint(1, heavy))) if rng.random() < 0.7 else (STEP, OptimStep()) for _ in range(requests)]
        bench.program(tenant, ops)
    bench.settle()


def check_shares(turns: Turns, weights: dict[str, float]) -> float:
    """The design's bound, for each pair; returns the largest part of it that was used."""
    first, *rest = turns.always_waiting(list(weights))
    most = 0.0
    for used in rest:
        served = {name: (used[name] - first[name]) / weight for name, weight in weights.items()}
        for one in weights:
            for other in weights:
                bound = turns.longest_us * (1 / weights[one] + 1 / weights[other])
                most = max(most, abs(served[one] - served[other]) / bound)
    assert most <= 1.0
    return most


@pytest.mark.parametrize("seed", range(60))
def test_backlogged_tenants_get_accelerator_time_by_weight(seed):
    rng = random.Random(seed)
    weights = {f"t{n}": rng.choice((0.5, 1.0, 2.0, 4.0)) for n in range(rng.randint(2, 5))}
    bench = fleet_of(weights)
    backlog(bench, rng, list(weights), 60)
    turns = Turns(bench)
    assert len(turns.always_waiting(list(weights))) > 3
    check_shares(turns, weights)


@pytest.mark.parametrize("seed", range(20))
def test_an_adversary_cannot_break_the_bound(seed):
    """Floods, giant batches, create and unload storms, failures, alternating forward and optim_step, from a tenant with many adapters."""
    rng = random.Random(seed)
    bench = fleet_of()
    names = ["honest", "other"]
    for name in names:
        bench.create(name)
    bench.settle()
    for name in names:
        bench.program(name, [(FB, batch(20)), (STEP, OptimStep())] * 40)
    for number in range(12):
        lane = f"evil{number}"
        bench.send("evil", lane, 0, Op.CREATE_ADAPTER, CreateAdapter(Signature(4, 8.0, (), number)))
        storm = rng.choice(("flood", "giant", "churn", "alternate", "fail"))
        ops = {
            "flood": [(Op.FORWARD, batch(1))] * 60,
            "giant": [(FB, batch(1500))] * 4,
            "churn": [(Op.UNLOAD, Unload())],
            "alternate": [(Op.FORWARD, batch(3)), (STEP, OptimStep())] * 10,
            "fail": [(FB, FAILING), (STEP, OptimStep())] * 5,
        }[storm]
        for seq, (op, body) in enumerate(ops, 1):
            bench.send("evil", lane, seq, op, body)
    bench.settle()
    turns = Turns(bench)
    check_shares(turns, {"honest": 1.0, "other": 1.0})
    # against the adversary: while the honest one waits, the adversary gets no more than the bound ahead of it
    first, *rest = turns.always_waiting(["honest"])
    ahead = max(used.get("evil", 0) - first.get("evil", 0) - used["honest"] + first["honest"] for used in rest)
    assert ahead <= 2 * turns.longest_us


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_longer_than_one_turn_of_each_other(seed):
    rng = random.Random(seed)
    heavy = [f"heavy{n}" for n in range(rng.randint(2, 6))]
    bench = fleet_of()
    for tenant in [*heavy, "tiny"]:
        bench.create(tenant)
    bench.settle()
    for tenant in heavy:
        bench.program(tenant, [(FB, batch(rng.choice((50, 300)))) for _ in range(40)])
    inputs, bench._pending = bench._pending, []
    batch_ = bench.handle(*inputs)
    for number in range(1, 6):
        for _ in range(rng.randint(1, 4)):
            batch_ = bench.one_turn(batch_)
        bench.send("tiny", "poet", number, Op.FORWARD, batch(1))
        inputs, bench._pending = bench._pending, []
        assert bench.handle(*inputs).dispatches == []
        others: list[str] = []
        while f"tiny/poet/{number}" not in bench.replies:
            others.append(batch_.dispatches[0].steps[-1].adapter)
            batch_ = bench.one_turn(batch_)
        assert others.pop() == "tiny/poet"
        waited_for = others[1:]  # after the turn that ran when it came
        assert len(set(waited_for)) == len(waited_for), f"seed {seed}: waited for {others}"


def test_idle_time_is_not_banked():
    bench = fleet_of()
    bench.create("idle")
    bench.create("busy")
    bench.settle()
    bench.program("busy", [(FB, batch(100))] * 50)
    bench.settle()
    before = bench.fleet.tenants["busy"].used_us
    bench.program("busy", [(FB, batch(100))] * 50, first=51)
    bench.program("idle", [(FB, batch(100))] * 50)
    bench.settle()
    turns = Turns(bench)
    together = turns.always_waiting(["busy", "idle"])
    served = together[-1]["busy"] - before, together[-1]["idle"] - together[0]["idle"]
    assert abs(served[0] - served[1]) <= 2 * turns.longest_us


def test_a_turn_is_worth_its_switch():
    bench = fleet_of()
    for tenant in ("a", "b"):
        bench.create(tenant)
    bench.settle()
    for tenant in ("a", "b"):
        bench.program(tenant, [(Op.FORWARD, batch(10))] * 200)  # 900 us each, against switches of 2 ms
    bench.settle()
    rows = Turns(bench).rows[4:-1]
    assert sum(row[2] for row in rows) / sum(row[1] for row in rows) < 0.12, "10 switches' worth a turn: a tenth goes to switching"


@pytest.mark.parametrize(("rows", "places", "sampled"), [(8, 2000, 2), (8, 1000, 1), (1, 2000, 1)])
def test_a_turn_of_samples_fills_the_rows_that_are_computed_together(rows, places, sampled):
    spec = msgspec.structs.replace(SIMULATED_SPEC, sample_rows=rows, sample_tokens=places)
    bench = Synchronous(Settings("fair", turn_least_us=5_000, turn_switches=1.0), spec=spec)
    bench.cost_us = lambda call: cost_us(bench, call)
    bench.create("a")
    bench.send("a", "poet", 1, Op.SAMPLE, Sample(int32([1]), max_tokens=200))
    bench.settle()
    entries = [bench.entry("a", "poet", number + 2, Op.SAMPLE, Sample(int32([1]), num_samples=3, max_tokens=200)) for number in range(9)]
    [dispatch] = bench.handle(*entries).dispatches
    assert len(dispatch.steps) == sampled, "each is worth more than a turn, but those that share its rows cost nothing more"


def test_training_and_sampling_come_in_phases():
    def sampler_moves(policy: str) -> int:
        bench = Synchronous(Settings(policy, tenant_queue=1000, turn_requests=1, turn_switches=4.0, turn_least_us=1000))
        bench.cost_us = lambda call: cost_us(bench, call)
        for tenant in ("t0", "t1", "s0", "s1"):
            bench.create(tenant)
        bench.settle()
        for number in range(40):
            for tenant in ("t0", "t1"):
                bench.send(tenant, "poet", number + 1, FB, batch(20))
            for tenant in ("s0", "s1"):
                bench.send(tenant, "poet", number + 1, Op.SAMPLE, Sample(int32([1, 2, 3]), max_tokens=20))
        bench.settle()
        return sum(step.step.kind is StepKind.WAKE_SAMPLER for step in bench.events(StepStarted))

    assert sampler_moves("fair") * 4 < sampler_moves("round_robin")


def test_a_higher_priority_goes_first_and_weights_count_within_one():
    bench = Synchronous(Settings("fair", shares={"urgent": Share(priority=1)}, tenant_queue=1000))
    bench.cost_us = lambda call: cost_us(bench, call)
    for tenant in ("common", "urgent"):
        bench.create(tenant)
    bench.settle()
    for tenant in ("common", "urgent"):
        bench.program(tenant, [(FB, batch(300))] * 20)
    bench.settle()
    order = [row[0] for row in Turns(bench).rows[2:]]
    assert order == sorted(order, reverse=True), "urgent is through before common begins"


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (Share(queued=3), "requests of this tenant are queued"),
        (Share(queued_bytes=500), "bytes of this tenant are queued"),
        (Share(per_second=2.0), "2 requests a second"),
    ],
)
def test_a_tenants_own_limits_answer_busy_and_touch_nobody_else(share, words):
    bench = Synchronous(Settings("fair", shares={"small": share}))
    bench.create("small")
    bench.create("large")
    bench.settle()
    bench.now_ms += 10_000
    for seq in range(2, 12):  # behind a gap, so that they stay queued
        bench.send("small", "poet", seq, Op.FORWARD, batch(30))
        bench.send("large", "poet", seq, Op.FORWARD, batch(30))
    bench.settle()
    busy = [reply for reply in bench.all_replies if reply.status == "busy"]
    assert busy
    assert all(words in reply.error.message and reply.request_id.startswith("small/") for reply in busy)


def test_made_up_tenants_do_not_grow_what_is_remembered_of_rates(monkeypatch):
    monkeypatch.setattr("scheduler.core.MOST_BUCKETS", 3)
    bench = Synchronous(Settings("fair", shares={"default": Share(per_second=1000.0)}))
    for number in range(20):
        bench.send(f"nobody{number}", "poet", 1, Op.FORWARD, batch(3))
    bench.settle()
    assert 1 <= len(bench.core._buckets) <= 3


def test_adapters_of_one_tenant_are_limited():
    bench = Synchronous(Settings("fair", shares={"default": Share(adapters=2)}))
    for name in ("one", "two", "three"):
        bench.create("ada", name)
        bench.settle()
    assert [bench.replies[f"ada/{name}/0"].status for name in ("one", "two", "three")] == ["completed", "completed", "busy"]
    bench.send("ada", "one", 1, Op.UNLOAD, Unload())
    bench.settle()
    bench.create("ada", "three")
    bench.settle()
    assert bench.replies["ada/three/0"].status == "completed"


def test_costs_are_learnt_by_work():
    cost = Cost()
    assert cost.of(100) == 0
    for _ in range(50):
        cost.add(5_000, 0)
    assert abs(cost.of(0) - 5_000) < 20
    for work in (10, 100, 1000) * 20:
        cost.add(20 * (work + 1), work)
    assert abs(cost.of(500) - 20 * 501) < 100


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_yields_tenants_in_the_order_of_their_tags(seed):
    rng = random.Random(seed)
    queue = FairQueue()
    shares = {f"t{n}": Share(rng.choice((0.5, 1.0, 3.0)), rng.choice((0, 0, 1))) for n in range(12)}
    for _ in range(400):
        tenant = rng.choice(list(shares))
        act = rng.random()
        if act < 0.4:
            queue.wait(tenant, f"{tenant}/a{rng.randrange(2)}", rng.randrange(1000), shares[tenant])
        elif act < 0.6:
            queue.leave(tenant, f"{tenant}/a{rng.randrange(2)}")
        elif act < 0.9:
            queue.charge(tenant, rng.randrange(5000), shares[tenant])
        elif queue.waiting:
            queue.open_turn(next(queue.in_order(1)))
        due = sorted(queue.waiting, key=lambda name: (-shares[name].priority, queue.tags[name], name))
        assert list(queue.in_order(100)) == due
        assert len(queue.order) <= 16 + 2 * len(queue.waiting) + 1


def test_without_charging_switches_the_bound_breaks(monkeypatch):
    """The partner: time that nobody is charged for goes to whoever causes it."""
    monkeypatch.setattr(FairQueue, "charge", lambda self, tenant, cost_us, share: None)
    bench = fleet_of({"t0": 1.0, "t1": 4.0})
    for tenant in ("t0", "t1"):
        bench.create(tenant)
    bench.settle()
    for tenant in ("t0", "t1"):
        bench.program(tenant, [(FB, batch(20))] * 150)
    bench.settle()
    with pytest.raises(AssertionError):
        check_shares(Turns(bench), {"t0": 1.0, "t1": 4.0})


def test_fair_is_what_a_fleet_gets():
    from scheduler.config import Config

    assert isinstance(POLICIES[Config().settings().policy], Fair)
