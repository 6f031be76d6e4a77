"""Faults that once got through, each with the trigger that found it."""

from __future__ import annotations

import msgspec
import pytest

from state.events import RequestRefused, Settings, StepKind, StepStarted, WorkersLost
from state.fleet import encode
from state.log import Entry
from state.requests import Cancel, CreateAdapter, LoadState, Op, OptimStep, SaveState, Signature, Unload
from tests.harness import SAMPLE, Synchronous, default_body, digests, forward_body
from workers.simulated import SIMULATED_SPEC, SimulatedEngine

FB, STEP = Op.FORWARD_BACKWARD, Op.OPTIM_STEP


@pytest.fixture
def bench():
    bench = Synchronous()
    bench.create("ada")
    return bench.settle()


def undisturbed(*ops, seed=0):
    control = Synchronous()
    control.create("ada", seed=seed)
    sent = control.program("ada", ops)
    control.settle()
    return digests(control, sent)


DEEP_JSON = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HEADER = msgspec.msgpack.encode({"tenant": "ada", "lane": "poet", "seq": 1, "op": "forward", "adapter": "poet"})


@pytest.mark.parametrize(
    "entry",
    [
        Entry("9-0", HEADER, DEEP_JSON),
        Entry("9-0", DEEP_JSON, b""),
        Entry("9-0", b"\x91" * 3000, b""),
        Entry("9-0", HEADER, b"\x91" * 100_000),
        Entry("9-0", bytes(10_000), b""),
    ],
    ids=["deep body", "deep header", "deep msgpack header", "deep msgpack body", "long header"],
)
def test_no_entry_stops_the_daemon(bench, entry):
    bench._pending.append(entry)
    bench.settle()
    assert len(bench.events(RequestRefused)) == 1
    good = bench.send("ada", "poet", bench.adapter("ada/poet").next_seq, Op.FORWARD, forward_body())
    bench.settle()
    assert bench.result(good)


def test_a_cancel_of_a_strange_number_is_refused(bench):
    for number, target in enumerate(("ada/poet/\u00b2", "ada/poet/", "ada/poet/-1", f"ada/poet/{'9' * 40}"), 1):
        bench.send("ada", "~s", number, Op.CANCEL, Cancel(target), adapter="poet")
    bench.settle()
    assert [bench.error(f"ada/~s/{n}") for n in (1, 2, 3, 4)] == ["NotCancellable"] * 4


def test_an_adapter_of_a_reused_name_is_sampled_with_its_own_weights(bench):
    bench.send("ada", "poet", 1, Op.SAMPLE, SAMPLE)
    bench.send("ada", "poet", 2, Op.UNLOAD, Unload())
    bench.settle()
    bench.send("ada", "poet:b", 0, Op.CREATE_ADAPTER, CreateAdapter(Signature(4, 8.0, (), 77)))
    bench.send("ada", "poet:b", 1, Op.SAMPLE, SAMPLE)
    bench.settle()
    control = Synchronous()
    control.create("ada", seed=77)
    alone = control.send("ada", "poet", 1, Op.SAMPLE, SAMPLE)
    control.settle()
    assert bench.result("ada/poet:b/1") == control.result(alone) != bench.result("ada/poet/1")


class Fragile(SimulatedEngine):
    """Raises once at the named call."""

    broken = ""

    def _break(self, where):
        if self.broken == where:
            self.broken = ""
            raise RuntimeError(f"planted in {where}")

    def bind(self, adapter):
        self._break("bind")
        super().bind(adapter)

    def unstage(self, adapter, **kinds):
        self._break("unstage")
        super().unstage(adapter, **kinds)

    def optim_step(self, body):
        self._break("optim_step")
        return super().optim_step(body)

    def forward(self, body, backward):
        self._break("forward")
        return super().forward(body, backward)


def fragile(spec=SIMULATED_SPEC) -> tuple[Synchronous, Fragile]:
    from workers.machine import Machine

    engine = Fragile(spec)
    bench = Synchronous(machine=Machine(engine))
    for tenant in ("ada", "brook"):
        bench.create(tenant, seed=ord(tenant[0]))
    return bench.settle(), engine


@pytest.mark.parametrize("where", ["bind", "unstage"])
def test_a_switch_that_fails_half_way_leaves_a_true_record(where):
    bench, engine = fragile(msgspec.structs.replace(SIMULATED_SPEC, device_slots=2))
    bench.create("cleo")
    sent = bench.program("ada", [FB])
    bench.settle()
    bench.program("brook", [FB])
    bench.settle()
    engine.broken = where
    bench.program("cleo", [FB])
    bench.settle()
    sent += bench.program("ada", [FB, STEP], first=2)
    bench.settle()
    assert digests(bench, sent) == undisturbed(FB, FB, STEP, seed=ord("a"))
    assert bench.events(WorkersLost) == []


def test_a_failed_optim_step_voids_its_window_and_nothing_comes_back_at_a_loss():
    bench, engine = fragile()
    sent = bench.program("ada", [FB])
    bench.settle()
    engine.broken = "optim_step"
    failed = bench.program("ada", [STEP], first=2)
    bench.settle()
    assert bench.error(failed[0]) == "WorkerFailed"
    after = [bench.send("ada", "poet", 3, FB, default_body(FB, 1)), bench.send("ada", "poet", 4, STEP, default_body(STEP, 2))]
    bench.settle()
    assert digests(bench, after) == undisturbed(FB, STEP, seed=ord("a"))
    assert sent


def test_a_re_execution_that_fails_once_is_begun_again():
    bench, engine = fragile()
    sent = bench.program("ada", [FB, FB])
    bench.settle()
    bench.machines["main"].held.clear()
    bench.machines["main"].live = ""
    engine.slots.clear()
    bench.kill()
    bench.join()
    bench.machines["main"].engine.broken = "forward"
    sent += bench.program("ada", [STEP], first=3)
    bench.settle()
    assert digests(bench, sent) == undisturbed(FB, FB, STEP, seed=ord("a"))
    assert bench.refold() == encode(bench.fleet)


def test_what_fills_a_gap_is_never_refused_for_lack_of_room():
    bench = Synchronous(Settings(tenant_queue=4))
    bench.create("ada")
    bench.settle()
    held = [bench.send("ada", "poet", seq, Op.FORWARD, forward_body(seq)) for seq in (2, 3, 4, 5)]
    bench.settle()
    bench.send("ada", "poet", 1, Op.FORWARD, forward_body(1))
    bench.settle()
    assert all(bench.result(request) for request in held)


def test_an_adapter_whose_snapshot_is_gone_says_so_and_can_be_unloaded():
    bench = Synchronous(Settings(snapshot_after_requests=1))
    bench.create("ada")
    bench.program("ada", [FB, STEP])
    bench.settle()
    bench.kill()
    bench.disk.snapshots.clear()
    bench.join()
    lost = bench.send("ada", "poet", 3, Op.FORWARD, forward_body())
    bench.settle()
    assert bench.error(lost) == "AdapterLost"
    unloaded = bench.send("ada", "poet", 4, Op.UNLOAD, Unload())
    bench.settle()
    assert bench.result(unloaded)
    assert bench.fleet.adapters == {}


def test_a_load_ends_a_voided_window(tmp_path):
    from tests.harness import FAILING
    from workers.machine import Machine

    bench = Synchronous(machine=Machine(SimulatedEngine(SIMULATED_SPEC, tmp_path)))
    bench.create("ada")
    bench.program("ada", [(Op.SAVE_STATE, SaveState("one")), (FB, FAILING), (Op.LOAD_STATE, LoadState("one"))])
    after = bench.program("ada", [FB, (STEP, OptimStep())], first=4)
    bench.settle()
    assert [bench.error(request) for request in after] == ["", ""]


def test_workers_that_report_what_cannot_be_are_given_up(bench):
    bench.send("ada", "poet", 1, FB, forward_body())
    inputs, bench._pending = bench._pending, []
    bench.handle(*inputs)
    from scheduler.core import Finished
    from state.errors import WorkerFailed
    from workers.contract import StepOutcome

    step = next(iter(bench.fleet.groups["main"].steps.values()))
    facts = msgspec.structs.replace(bench.machines["main"].facts(()), live="!ranks differ")
    outcome = StepOutcome(step.id, facts, error=WorkerFailed("one rank only").info)
    for _ in range(len(bench.fleet.groups["main"].steps)):
        bench.handle(Finished("main", bench.incarnations["main"], outcome))
    assert bench.fleet.groups["main"].broken


def test_made_up_tenants_do_not_grow_the_state(bench):
    before = len(encode(bench.fleet))
    for number in range(50):
        bench.send(f"nobody{number}", "poet", 1, FB, forward_body())
    bench.settle()
    assert len(encode(bench.fleet)) < before + 100


def test_a_drain_snapshots_what_changed_and_a_second_start_needs_no_re_execution(bench):
    from scheduler.core import Drain

    bench.program("ada", [FB, STEP])
    bench.settle()
    bench._pending.append(Drain())
    bench.settle()
    kinds = [e.step.kind for e in bench.events(StepStarted)]
    assert kinds[-2:] == [StepKind.PARK, StepKind.SNAPSHOT]
    assert bench.adapter("ada/poet").history == []
