"""The heart: the fold, the planner, and the tables they read."""

from __future__ import annotations

import msgspec
import pytest

from state import events, residency
from state import log_id as ids
from state.errors import LogVersion
from state.events import ALL_KINDS, AdapterFacts, Facts, LeaderElected, Part, Settings, StepFinished, StepKind, StepStarted
from state.fleet import Fleet, apply, decode, encode
from state.requests import CONTROL_OPS, Op, SaveState, Unload
from state.residency import EDGES, NEEDS, ForbiddenMove, Move, Residency, moved
from tests.harness import FAILING, Synchronous, default_body, digests
from workers.simulated import SIMULATED_SPEC

FB, STEP, SAMPLE, FORWARD = Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.SAMPLE, Op.FORWARD


def kinds(bench: Synchronous, since: int = 0) -> list[str]:
    return [e.step.op if e.step.kind is StepKind.EXECUTE else str(e.step.kind) for e in bench.events(StepStarted)][since:]


# --- tables -------------------------------------------------------------------------------------------------------


def test_every_move_without_an_edge_is_refused_by_name():
    for where in Residency:
        for move in Move:
            if (where, move) not in EDGES:
                with pytest.raises(ForbiddenMove, match=f"{where} cannot {move}"):
                    moved(where, move)


def test_the_docstring_of_the_machine_is_the_table():
    """A reader checks the machine in the module's docstring; each of its lines is an edge."""
    for line in residency.__doc__.splitlines():
        words = line.split()
        if len(words) > 2 and words[1].startswith("--"):
            where, move, to = words[0], words[1].strip("->"), words[2]
            sources = [w for w in Residency if (w, Move(move)) in EDGES] if where == "any" else [Residency(where)]
            assert sources
            for source in sources:
                assert EDGES[source, Move(move)] in (Residency(to), Residency.NEW)


def test_every_worker_operation_has_needs():
    assert set(NEEDS) == set(Op) - CONTROL_OPS


# --- plans --------------------------------------------------------------------------------------------------------


def test_a_first_forward_backward_needs_one_swap():
    bench = Synchronous()
    bench.create("ada")
    bench.program("ada", [FB, STEP])
    bench.settle()
    assert kinds(bench) == ["create_adapter", "swap", "forward_backward", "optim_step"]


def test_the_live_adapter_needs_nothing():
    bench = Synchronous()
    bench.create("ada")
    bench.program("ada", [FB])
    bench.settle()
    before = len(kinds(bench))
    bench.program("ada", [FB, STEP, FORWARD], first=2)
    bench.settle()
    assert kinds(bench, before) == ["forward_backward", "optim_step", "forward"]


def test_a_sample_parks_offloads_wakes_and_publishes_and_the_next_training_step_brings_all_back():
    bench = Synchronous()
    bench.create("ada")
    bench.program("ada", [FB])
    bench.settle()
    before = len(kinds(bench))
    bench.program("ada", [SAMPLE, STEP], first=2)
    bench.settle()
    assert kinds(bench, before) == [
        *("park", "offload", "wake_sampler", "publish", "sample"),
        *("sleep_sampler", "backload", "unpark", "optim_step"),
    ]


def test_a_second_sample_of_the_same_version_only_samples():
    bench = Synchronous()
    bench.create("ada")
    bench.program("ada", [FB, STEP, SAMPLE])
    bench.settle()
    before = len(kinds(bench))
    bench.program("ada", [SAMPLE], first=4)
    bench.settle()
    assert kinds(bench, before) == ["sample"]


def test_unpark_restores_whichever_adapter_is_live_when_the_group_comes_back():
    """Invariant 4: ada was parked, brook comes back."""
    bench = Synchronous()
    for tenant in ("ada", "brook"):
        bench.create(tenant)
    bench.program("ada", [FB, SAMPLE])
    bench.settle()
    assert bench.adapter("ada/poet").residency is Residency.PARKED
    bench.program("brook", [FB])
    bench.settle()
    assert bench.adapter("brook/poet").residency is Residency.LIVE
    assert bench.adapter("ada/poet").residency is Residency.OFFLOADED
    assert bench.adapter("ada/poet").pending == 1


def test_save_state_flushes_first_and_swaps_nothing():
    bench = Synchronous()
    bench.create("ada")
    bench.program("ada", [FB, STEP])
    bench.settle()
    before = len(kinds(bench))
    bench.send("ada", "poet", 3, Op.SAVE_STATE, SaveState("one"))
    bench.settle()
    assert kinds(bench, before)[:2] == ["flush", "save_state"]
    assert bench.adapter("ada/poet").residency is Residency.LIVE


def test_adapters_stay_resident_where_the_device_has_slots_and_the_oldest_makes_room():
    bench = Synchronous(spec=msgspec.structs.replace(SIMULATED_SPEC, device_slots=2))
    for tenant in ("ada", "brook", "cleo"):
        bench.create(tenant)
        bench.program(tenant, [FB])
        bench.settle()
    where = {key: a.residency for key, a in bench.fleet.adapters.items()}
    assert where == {"ada/poet": "offloaded", "brook/poet": "resident", "cleo/poet": "live"}
    before = len(kinds(bench))
    bench.program("brook", [STEP], first=2)
    bench.settle()
    assert kinds(bench, before) == ["swap", "optim_step"]
    assert bench.adapter("cleo/poet").residency is Residency.RESIDENT
    bench.program("ada", [SAMPLE], first=2)
    bench.settle()
    assert {a.residency for a in bench.fleet.adapters.values()} == {"offloaded", "parked"}


def test_after_the_live_adapter_is_unloaded_a_new_one_starts_pristine():
    bench = Synchronous()
    bench.create("ada")
    bench.program("ada", [FB, (Op.UNLOAD, Unload())])
    bench.settle()
    assert bench.fleet.groups["main"].device.live == events.STALE
    assert "ada/poet" not in bench.fleet.adapters
    bench.create("brook")
    after = bench.program("brook", [FB, STEP])
    bench.settle()
    control = Synchronous()
    control.create("brook")
    alone = control.program("brook", [FB, STEP])
    control.settle()
    assert digests(bench, after) == digests(control, alone) != []


def test_a_failed_forward_backward_voids_the_window_and_the_next_optim_step_fails_clean():
    bench = Synchronous()
    bench.create("ada")
    sent = bench.program("ada", [FB, (FB, FAILING), STEP, FB, STEP])
    bench.settle()
    assert [bench.error(q) for q in sent] == ["", "WorkerFailed", "WindowVoided", "", ""]
    control = Synchronous()
    control.create("ada")
    alone = [control.send("ada", "poet", 1, FB, default(4)), control.send("ada", "poet", 2, STEP, step_body(5))]
    control.settle()
    assert digests(bench, sent) == digests(control, alone) != []


def default(seq):
    from tests.harness import default_body

    return default_body(FB, seq)


def step_body(seq):
    from tests.harness import default_body

    return default_body(STEP, seq)


# --- the fold -----------------------------------------------------------------------------------------------------


def test_the_fold_of_the_log_equals_the_running_state_byte_for_byte():
    bench = Synchronous()
    for tenant in ("ada", "brook"):
        bench.create(tenant)
        bench.program(tenant, [FB, STEP, SAMPLE, FB])
    bench.settle()
    assert bench.refold() == encode(bench.fleet) == encode(decode(encode(bench.fleet)))


def test_facts_that_differ_from_what_the_step_should_have_made_break_the_group():
    bench = Synchronous()
    bench.create("ada")
    bench.settle()
    bench.send("ada", "poet", 1, FB, default(1))
    bench.core.handle(bench.now_ms + 1, bench._pending)
    group = bench.fleet.groups["main"]
    step = next(iter(group.steps.values()))
    assert step.kind is StepKind.SWAP
    facts = Facts(live="ada/poet", weights=True, grads=False, optimizer=True, adapters=(AdapterFacts("ada/poet", "live"),))
    apply(bench.fleet, bench.fleet.log_id + 1, StepFinished("main", step.id, facts))
    assert "parts is" in group.broken
    assert "grads" in group.broken


def test_a_log_id_is_applied_once():
    fleet = Fleet()
    event = LeaderElected(1, "me", Settings())
    apply(fleet, ids.make(5), event)
    with pytest.raises(AssertionError, match="does not come after"):
        apply(fleet, ids.make(5), event)


def test_ids_follow_the_clock_and_never_step_back_with_it():
    first = ids.following(0, 1000)
    assert ids.text(first) == "1000-0"
    assert ids.text(ids.following(first, 900)) == "1000-1"
    assert ids.parse("1000-1") == ids.following(first, 900)


# --- events -------------------------------------------------------------------------------------------------------


def test_an_unknown_event_is_refused_by_name():
    with pytest.raises(LogVersion, match="request_dreamt/9"):
        events.decode(msgspec.msgpack.encode({"type": "request_dreamt/9"}))


def test_an_old_event_is_lifted(monkeypatch):
    def lift(raw):
        raw["leader"] = raw.pop("host")

    monkeypatch.setitem(events.UPCASTS, "leader_elected/0", ("leader_elected/1", lift))
    old = msgspec.msgpack.encode({"type": "leader_elected/0", "epoch": 3, "host": "old", "settings": {}})
    assert events.decode(old) == LeaderElected(3, "old", Settings())


def test_every_kind_of_event_survives_its_encoding():
    bench = Synchronous()
    bench.create("ada")
    bench.program("ada", [FB, STEP, SAMPLE])
    bench.settle()
    for _, data in bench.log:
        assert events.encode(events.decode(data)) == data
    assert {type(e) for e in bench.events()} <= set(ALL_KINDS)


def test_parts_are_named_in_one_order():
    assert tuple(Part) == residency.ALL_PARTS


def test_outcomes_are_remembered_within_a_bound_and_the_oldest_minutes_go_first():
    bench = Synchronous(Settings(outcomes=40, result_retention_ms=10**9))
    bench.create("ada")
    for minute in range(5):
        bench.program("ada", [Op.OPTIM_STEP] * 20, first=1 + 20 * minute)
        bench.settle()
        bench.now_ms += 60_000
    remembered = [request_id for bucket in bench.fleet.outcomes.values() for request_id in bucket]
    assert len(remembered) == bench.fleet.remembered == 40
    assert remembered[-1] == "ada/poet/100"
    late = bench.send("ada", "poet", 3, Op.OPTIM_STEP, default_body(Op.OPTIM_STEP, 3))
    bench.settle()
    assert bench.error(late) == "ResultExpired"
