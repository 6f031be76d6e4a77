"""Adapters that move from a crowded group to one with less to do: when, which, and that no bit of them is lost."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from ops.replay import Verifier
from scheduler.moves import GUESS_US, leaves
from state import fleet as fold
from state import log_id as ids
from state.events import RequestAccepted, Settings, StepKind, StepStarted, decode
from state.fair_queue import EQUAL, FairQueue
from state.requests import CreateAdapter, Op, OptimStep, Signature
from tests.harness import Synchronous, digests
from workers import checkpoints
from workers.contract import Call
from workers.group_config import GroupConfig
from workers.simulated import SIMULATED_SPEC

FB, STEP = Op.FORWARD_BACKWARD, Op.OPTIM_STEP
TENANTS = [f"t{number}" for number in range(6)]
GAIN = 0.05  # of what a move costs: the first one comes in the third round
ROUNDS = 8


def cost_us(call: Call) -> int:
    return 1000


def crowd(group: str = "", move_gain: float = GAIN, snapshot_after: int = 256) -> Synchronous:
    """Six tenants on the one group that is there."""
    settings = Settings(move_gain=move_gain, policy="fair", plan_us=0, snapshot_after_requests=snapshot_after)
    bench = Synchronous(settings, groups=("left",), cost_us=cost_us)
    for tenant in TENANTS:
        bench.send(tenant, "poet", 0, Op.CREATE_ADAPTER, CreateAdapter(Signature(4, 8.0, (), ord(tenant[1])), group))
    bench.settle()
    return bench


def work(bench: Synchronous, rounds: int, first: int = 1, tenants=TENANTS, dies=lambda: False) -> dict[str, list[str]]:
    """Each round is sent when the one before it was answered."""
    sent: dict[str, list[str]] = {tenant: [] for tenant in tenants}
    for number in range(rounds):
        for tenant in tenants:
            sent[tenant] += bench.program(tenant, [FB, STEP], first=first + 2 * number)
        bench.settle(dies)
    return sent


def moves(bench: Synchronous) -> list[tuple[str, str]]:
    """(adapter, where to) of each."""
    return [(event.step.adapter, event.step.to) for event in bench.events(StepStarted) if event.step.kind is StepKind.MOVE]


def alone(tenant: str, rounds: int) -> list[str]:
    bench = crowd(move_gain=0.0)
    return digests(bench, work(bench, rounds, tenants=[tenant])[tenant])


@pytest.fixture(scope="module")
def control() -> dict[str, list[str]]:
    return {tenant: alone(tenant, ROUNDS) for tenant in TENANTS}


def test_a_crowded_group_gives_adapters_to_one_with_less_to_do(control):
    bench = crowd()
    bench.join("right")
    sent = work(bench, ROUNDS)
    assert len(moves(bench)) >= 2
    assert {tenant: digests(bench, sent[tenant]) for tenant in TENANTS} == control
    work(bench, 3 * ROUNDS, first=2 * ROUNDS + 1)
    homes = [adapter.group for adapter in bench.fleet.adapters.values()]
    assert sorted(homes) == ["left"] * 3 + ["right"] * 3
    assert len(moves(bench)) == 3  # nobody goes to and fro
    check(bench)


def check(bench: Synchronous) -> None:
    """The fold gives the same state, and every decision comes out the same."""
    assert bench.refold() == fold.encode(bench.fleet)
    verifier = Verifier()
    for log_id, data in bench.log:
        verifier.take(log_id, decode(data))
    assert verifier.problems == []


def test_it_waits_until_others_waited_for_what_a_move_costs():
    bench = crowd(move_gain=1.0)
    bench.join("right")
    work(bench, ROUNDS)
    assert moves(bench) == []
    assert 0 < bench.fleet.groups["left"].crowded_us < 2 * GUESS_US


def test_a_tenant_that_named_its_group_stays_there():
    bench = crowd(group="left")
    bench.join("right")
    work(bench, ROUNDS)
    assert moves(bench) == []
    assert bench.fleet.adapters["t0/poet"].pinned


@pytest.mark.parametrize("difference", [{"kin": "other"}, {"kin": ""}, {"host_slots": 0}, {"max_adapters": 0}])
def test_it_goes_only_where_it_has_room_and_the_same_bits(difference):
    bench = crowd()
    spec, bench.spec = bench.spec, msgspec.structs.replace(SIMULATED_SPEC, **difference)
    bench.join("right")
    bench.spec = spec
    work(bench, ROUNDS)
    assert moves(bench) == []


def pending(bench: Synchronous) -> dict[str, list[str]]:
    """Every tenant in the middle of a window when the second group joins, then more windows."""
    sent = work(bench, 4)
    for tenant in TENANTS:
        sent[tenant] += bench.program(tenant, [FB], first=9)
    bench.settle()
    bench.join("right")
    for tenant in TENANTS:
        sent[tenant] += bench.program(tenant, [FB, STEP], first=10)
    bench.settle()
    return sent


def test_pending_gradients_move_with_their_adapter():
    bench, control = crowd(), crowd(move_gain=0.0)
    sent = pending(bench)
    assert digests_of(bench, sent) == digests_of(control, pending(control))
    assert len(moves(bench)) >= 1
    check(bench)


def digests_of(bench: Synchronous, sent: dict[str, list[str]]) -> dict[str, list[str]]:
    return {tenant: digests(bench, requests) for tenant, requests in sent.items()}


def moved_and_killed(bench: Synchronous) -> dict[str, list[str]]:
    """The new group writes its first snapshots, then its workers die."""
    sent = work(bench, 5)
    bench.join("right")
    later = [work(bench, 1, first=11)]
    assert moves(bench)
    bench.kill("right")
    bench.join("right")
    later.append(work(bench, 2, first=13))
    return {tenant: [*first, *(request for more in later for request in more[tenant])] for tenant, first in sent.items()}


def test_snapshots_go_on_where_the_old_group_ended(control):
    bench = crowd(snapshot_after=2)
    seen = digests_of(bench, moved_and_killed(bench))
    assert seen == control


def test_snapshots_that_begin_anew_in_another_group_are_noticed(monkeypatch):
    whole = fold._change_group

    def without_going_on(old, new, *more):
        first = new.next_step
        whole(old, new, *more)
        new.next_step = first

    monkeypatch.setattr(fold, "_change_group", without_going_on)
    bench = crowd(snapshot_after=2)
    sent = moved_and_killed(bench)
    assert any(bench.error(request) for requests in sent.values() for request in requests)


def test_workers_that_die_in_a_move_lose_nothing(control):
    """At every point of the first moves: before and after each step."""
    for moment in range(10):
        bench = crowd()
        bench.join("right")
        died: list[int] = []
        sent = work(bench, ROUNDS, dies=dying(bench, moment, died))
        assert digests_of(bench, sent) == control, moment
        assert len(died) > moment
        assert moves(bench)
        check(bench)


def about_to_move(bench: Synchronous) -> bool:
    return any(step.kind is StepKind.MOVE for group in bench.fleet.groups.values() for step in group.steps.values())


def dying(bench: Synchronous, moment: int, asked: list[int]):
    """At the `moment`-th time that somebody could die while an adapter is about to move."""

    def dies() -> bool:
        if not about_to_move(bench):
            return False
        asked.append(moment)
        return len(asked) == moment + 1

    return dies


def test_a_wish_for_a_group_like_another_is_met_by_any_of_its_kin_that_has_room():
    bench = Synchronous(groups=())
    for name, kin, most in (("a", "small", 9), ("b", "large", 3), ("c", "large", 9)):
        bench.spec = msgspec.structs.replace(SIMULATED_SPEC, kin=kin, max_adapters=most)
        bench.join(name)
    for number in range(8):
        bench.send(f"t{number}", "poet", 0, Op.CREATE_ADAPTER, CreateAdapter(Signature(4, 8.0), like="b"))
    unmet = bench.send("t9", "poet", 0, Op.CREATE_ADAPTER, CreateAdapter(Signature(4, 8.0), like="d"))
    bench.settle()
    assert Counter(event.group for event in bench.events(RequestAccepted)) == {"b": 3, "c": 5}
    assert not bench.fleet.adapters["t0/poet"].pinned
    assert bench.error(unmet) == "NoGroup"


def test_an_idle_group_asks_nobody_to_leave():
    bench = crowd()
    bench.join("right")
    assert leaves(bench.fleet, bench.fleet.groups["left"]) is None
    bench.program("t0", [(STEP, OptimStep())])
    bench.settle()
    assert moves(bench) == []


def test_room_is_taken_by_an_adapter_that_is_on_its_way():
    """Else a create that comes during the move, or a second group's move, would make one adapter too many."""
    bench = crowd()
    bench.spec = msgspec.structs.replace(SIMULATED_SPEC, max_adapters=1)
    bench.join("right")
    for tenant in TENANTS:
        bench.program(tenant, 3 * [FB, STEP])
    inputs, bench._pending = bench._pending, []
    batch = bench.handle(*inputs)
    while batch.dispatches and not about_to_move(bench):
        batch = bench.one_turn(batch)
    right = bench.fleet.groups["right"]
    assert (right.arriving, len(right.adapters)) == (1, 0)
    bench.create("late")
    inputs, bench._pending = bench._pending, []
    bench.handle(*inputs)
    while batch.dispatches:
        batch = bench.one_turn(batch)
    assert (right.arriving, len(right.adapters)) == (0, 1)
    assert bench.adapter("late/poet").group == "left"


def test_a_move_that_fails_is_not_tried_again_at_once():
    bench = crowd()
    bench.join("right")
    refused = []
    machine = bench.machines["left"]
    machine.engine.snapshot = lambda *args, **more: refused.append(1) or (_ for _ in ()).throw(OSError("disk full"))
    sent = work(bench, ROUNDS)
    assert 0 < len(refused) < ROUNDS * len(TENANTS) / 2  # turns; at once would be after every one
    assert moves(bench) != []
    assert {adapter.group for adapter in bench.fleet.adapters.values()} == {"left"}
    assert all(not bench.error(request) for requests in sent.values() for request in requests)


def test_a_tenant_that_waits_in_the_group_already_goes_on_waiting_there():
    """Found by simulation: its tag changed with the second adapter that came, and nothing stood for it in the order any more."""
    queue, old = FairQueue(), FairQueue(tags={"ada": 5000})
    queue.wait("ada", "ada/critic", 1, EQUAL)
    queue.come("ada", old, EQUAL)
    queue.wait("ada", "ada/poet", 2, EQUAL)
    assert list(queue.in_order(9)) == ["ada"]


def test_waiting_of_long_ago_counts_less_and_then_nothing():
    group = fold.Group("left", crowded_us=1000, crowded_at=ids.make(7))
    assert [fold.crowded_us(group, ids.make(7 + passed)) for passed in (0, fold.CROWDED_MS // 2, 2 * fold.CROWDED_MS)] == [1000, 500, 0]


@pytest.mark.parametrize(("capped", "virtual_time"), [(True, 10), (False, 1000)])
def test_who_is_served_out_of_order_takes_nobodys_claim(capped, virtual_time):
    queue = FairQueue(tags={"ada": 10, "brook": 1000})
    for tenant in ("ada", "brook"):
        queue.wait(tenant, f"{tenant}/poet", 1, EQUAL)
    queue.open_turn("brook", capped)
    assert queue.virtual_time == virtual_time


def test_groups_are_of_one_kind_only_where_they_share_storage(tmp_path):
    here, there = (checkpoints.storage_id(tmp_path / name) for name in ("here", "there"))
    assert checkpoints.storage_id(tmp_path / "here") == here != there
    assert GroupConfig().kin(here) == GroupConfig(host_slots=3).kin(here) != GroupConfig().kin(there)
    assert GroupConfig().kin(here) != GroupConfig(max_rank=3).kin(here)
