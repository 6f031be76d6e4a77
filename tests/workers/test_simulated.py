"""The simulated group against the contract."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from state.errors import OutOfMemory, WorkerFailed
from state.events import StepKind
from state.requests import Op, Sample
from tests.harness import int32
from tests.workers.conformance import Conformance, Device, code
from workers import machine
from workers.machine import Machine
from workers.simulated import SIMULATED_SPEC, SimulatedEngine


class TestSimulated(Conformance):
    @pytest.fixture
    def device(self, tmp_path):
        spec = msgspec.structs.replace(SIMULATED_SPEC, device_slots=3)
        return Device(Machine(SimulatedEngine(spec, tmp_path)).apply)


def sampling(monkeypatch, sample) -> tuple[Device, SimulatedEngine]:
    engine = SimulatedEngine()
    monkeypatch.setattr(engine, "sample", partial(sample, engine.sample))
    device = Device(Machine(engine).apply)
    device.create("t/a", 1)
    device.give_away()
    device.ok(StepKind.PUBLISH, "t/a", version=1)
    return device, engine


def asked(number: int) -> Sample:
    return Sample(int32([number, 2]), max_tokens=4)


def test_of_samples_computed_together_one_that_fails_fails_alone(monkeypatch):
    calls = []

    def sample(real, bodies):
        calls.append(len(bodies))
        return [WorkerFailed("planted") if body == asked(2) else result for body, result in zip(bodies, real(bodies))]

    device, _ = sampling(monkeypatch, sample)
    first = device.do(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=asked(1), ahead=(asked(2), asked(3)))
    others = [device.do(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=asked(number), after=device.last) for number in (2, 3)]
    codes = [code(first), *map(code, others)]
    assert codes == ["", "WorkerFailed", ""]
    assert calls == [3], "computed once, and each told in its own step"


def test_samples_that_are_too_many_at_once_are_computed_one_by_one(monkeypatch):
    calls = []

    def sample(real, bodies):
        calls.append(len(bodies))
        if len(bodies) > 1:
            raise OutOfMemory("planted")
        return real(bodies)

    device, _ = sampling(monkeypatch, sample)
    device.run("t/a", Op.SAMPLE, asked(1), ahead=(asked(2),))
    device.run("t/a", Op.SAMPLE, asked(2))
    assert calls == [2, 1, 1]


def test_a_publish_that_fails_leaves_nothing_published(monkeypatch):
    device, engine = sampling(monkeypatch, lambda real, bodies: real(bodies))

    def publish(adapter):
        raise WorkerFailed("planted")

    device.create("t/b", 2)
    monkeypatch.setattr(engine, "publish", publish)
    outcome = device.do(StepKind.PUBLISH, "t/b", version=1)
    assert (code(outcome), outcome.facts.published) == ("WorkerFailed", "")
    assert code(device.do(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=asked(1))) == "WrongLive"


def test_what_samples_cost_together_is_told_in_equal_parts(monkeypatch):
    now_ns = [0]

    def sample(real, bodies):
        now_ns[0] += 60_000_000
        return real(bodies)

    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns[0]))
    device, _ = sampling(monkeypatch, sample)
    first = device.ok(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=asked(1), ahead=(asked(2), asked(3)))
    others = [device.ok(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=asked(number)) for number in (2, 3)]
    assert [outcome.cost_us for outcome in (first, *others)] == [20_000] * 3


def test_a_snapshot_that_a_status_told_of_is_told_again_by_the_next_step():
    """An idle group is asked whether it lives, and nobody keeps the answer: the log hears of a snapshot by a step's outcome."""
    hosted = Machine(SimulatedEngine())
    device = Device(hosted.apply)
    device.create("t/a", 1)
    device.ok(StepKind.SNAPSHOT, "t/a", beside=True)
    version = device.last
    told = [hosted.facts().written for _ in range(5)]
    assert [one.version for one in told[-1]] == [version]
    device.swap("t/a")
    assert [one.version for one in device.written] == [version]
    device.ok(StepKind.FLUSH, "t/a")
    assert len(device.written) == 1
