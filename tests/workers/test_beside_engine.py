"""A Megatron group whose samples an engine draws on the same device: the contract, and what only another process can do wrong. The engine
is a stand-in (`standin_engine`), which answers what comes while it sleeps with an error, and remembers."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import anyio
import httpx
import msgspec
import numpy as np
import pytest

from state.errors import WorkerFailed
from state.events import StepKind
from state.requests import Op, Sample, Tensor
from tests.gateway.running import StandInEngine, free_port
from tests.harness import int32
from tests.workers.conformance import PROMPT, Conformance, code
from tests.workers.megatron_rank import group, rank
from tests.workers.test_megatron import fresh_device
from workers.group_config import EngineConfig
from workers.inference.client import InferenceEngine
from workers.megatron import beside_engine

CONNECTIONS = 3


@pytest.fixture(scope="module")
def standin():
    made = StandInEngine(free_port())
    yield made
    made.kill()


@pytest.fixture(scope="module")
def hosted(standin):
    assert not standin.standin()["asleep"], "an engine begins awake, and the group puts it to sleep before it takes any memory"
    made = rank(group(engine=EngineConfig(standin.url, "base", connections=CONNECTIONS, patience_s=10.0)))
    yield made
    made.leave()
    seen = standin.standin()
    assert (seen["asleep"], seen["disturbed"]) == (True, 0)


@pytest.fixture
def device(hosted):
    return fresh_device(hosted)


class TestBesideEngine(Conformance):
    @pytest.fixture
    def device(self, hosted):
        return fresh_device(hosted)


def in_turns(device) -> list:
    """Samples of two adapters with training in between: each turn wakes the engine, which was asleep with nothing loaded."""
    results = []
    for seed, adapter in enumerate(("t/a", "t/b")):
        device.create(adapter, seed)
    for turn in range(2):
        for adapter in ("t/a", "t/b"):
            device.give_away()
            results.append(device.sample(adapter, turn + 1))
            device.take_back(adapter)
    return results


def test_what_is_sampled_after_a_sleep_is_what_was_published_after_it(device, standin):
    first, second, third, fourth = in_turns(device)
    assert (first, second) == (third, fourth)
    assert first != second
    assert standin.standin()["adapters"] == ["base"]


def test_a_name_that_outlives_a_sleep_would_be_another_adapter(device, standin, monkeypatch):
    """The partner: names that are used again, of adapters that stay loaded."""

    async def stays(engine, name):
        engine._paths.pop(name, None)

    unload = InferenceEngine.unload
    monkeypatch.setattr(InferenceEngine, "unload", stays)
    name = uuid.uuid4()
    monkeypatch.setattr(beside_engine, "uuid", SimpleNamespace(uuid4=lambda: name))
    first, second, third, fourth = in_turns(device)
    assert (first, second) != (third, fourth)
    monkeypatch.setattr(InferenceEngine, "unload", unload)
    standin.kill()
    standin.start()
    standin.standin()
    device.apply.__self__.engine.sleep_sampler()


def test_an_engine_that_comes_back_awake_is_put_to_sleep_before_the_device_is_used(device, standin):
    device.create("t/a", 1)
    device.give_away()
    device.ok(StepKind.SLEEP_SAMPLER)
    standin.kill()
    standin.start()
    assert not standin.standin()["asleep"]
    device.ok(StepKind.BACKLOAD, parts=("weights", "grads", "optimizer"))
    assert standin.standin()["asleep"]


def test_nothing_of_what_was_published_stays(device, standin, hosted):
    """Neither on disk, nor in the engine, where an earlier process may have left something."""
    engine = hosted.machine.engine
    device.create("t/a", 1)
    device.give_away()
    device.sample("t/a")
    assert len(list(engine.published.iterdir())) == 1
    device.sample("t/a", 2)
    [path] = engine.published.iterdir()
    httpx.post(f"{standin.url}/v1/load_lora_adapter", json={"lora_name": "left", "lora_path": str(path)}).raise_for_status()
    device.take_back("t/a")
    assert not engine.published.exists()
    assert standin.standin()["adapters"] == ["base"]


def test_what_no_engine_understands_is_refused(device):
    device.create("t/a", 1)
    device.give_away()
    device.ok(StepKind.PUBLISH, "t/a", version=1)
    stops = Sample(int32([1]), max_tokens=2, stop=((3, 4),))
    assert code(device.do(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=stops)) == "BadBody"
    narrow = device.run("t/a", Op.SAMPLE, PROMPT)
    wide = Tensor("int64", (3,), np.asarray([1, 2, 3], "<i8").tobytes())
    assert device.run("t/a", Op.SAMPLE, msgspec.structs.replace(PROMPT, prompt=wide)) == narrow
    device.take_back("t/a")


def test_an_engine_that_takes_too_long_is_told_before_the_step_is_lost(device, standin, hosted, monkeypatch):
    device.create("t/a", 1)
    device.give_away()
    device.ok(StepKind.PUBLISH, "t/a", version=1)
    monkeypatch.setattr(hosted.machine.engine, "most_s", 0.2)
    standin.standin(delay_s=1.0)
    outcome = device.do(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=PROMPT)
    standin.standin(delay_s=0.0)
    assert code(outcome) == "WorkerFailed"
    assert "took longer than" in outcome.error.message
    monkeypatch.undo()
    while standin.standin()["running"]:
        pass
    device.take_back("t/a")


def test_samples_that_wait_together_are_asked_for_at_once_within_the_bound(device, standin):
    device.create("t/a", 1)
    device.give_away()
    device.ok(StepKind.PUBLISH, "t/a", version=1)
    asked = [Sample(int32([number, 2]), max_tokens=2, seed=number) for number in range(8)]
    alone = [device.run("t/a", Op.SAMPLE, one) for one in asked]
    assert standin.standin(delay_s=0.1)["most_running"] == 1
    together = [device.run("t/a", Op.SAMPLE, asked[0], ahead=tuple(asked[1:])), *(device.run("t/a", Op.SAMPLE, one) for one in asked[1:])]
    assert standin.standin(delay_s=0.0)["most_running"] == CONNECTIONS
    assert together == alone
    device.take_back("t/a")


def test_an_engine_that_was_started_again_is_given_the_adapter_again(device, standin):
    device.create("t/a", 1)
    device.give_away()
    before = device.sample("t/a")
    standin.kill()
    standin.start()
    assert device.run("t/a", Op.SAMPLE, PROMPT) == before
    device.take_back("t/a")


def test_a_sample_that_the_engine_refuses_fails_alone(device):
    device.create("t/a", 1)
    device.give_away()
    device.ok(StepKind.PUBLISH, "t/a", version=1)
    long = Sample(int32([1]), max_tokens=1000)
    assert code(device.do(StepKind.EXECUTE, "t/a", op=Op.SAMPLE, body=long, ahead=(PROMPT,))) == "BadBody"
    device.run("t/a", Op.SAMPLE, PROMPT)
    device.take_back("t/a")


def test_an_engine_that_is_away_is_waited_for_and_then_named(device, standin, hosted, monkeypatch):
    engine = hosted.machine.engine
    device.create("t/a", 1)
    device.swap("t/a")
    digest = device.train("t/a", 1)
    monkeypatch.setattr(engine.client, "config", EngineConfig(standin.url, "base", patience_s=0.3))
    standin.kill()
    device.ok(StepKind.PARK, "t/a")
    device.ok(StepKind.OFFLOAD, parts=("weights", "grads", "optimizer"))
    outcome = device.do(StepKind.WAKE_SAMPLER)
    assert code(outcome) == "WorkersLostError"
    assert standin.url in outcome.error.message
    standin.start()
    standin.standin()
    engine.sleep_sampler()
    device.ok(StepKind.BACKLOAD, parts=("weights", "grads", "optimizer"))
    device.ok(StepKind.UNPARK, "t/a")
    control = fresh_device(hosted)
    control.create("t/a", 1)
    control.swap("t/a")
    assert control.train("t/a", 1) == digest


def test_training_waits_until_the_devices_memory_is_really_back(hosted, monkeypatch):
    device = fresh_device(hosted)
    engine = hosted.machine.engine
    device.create("t/a", 1)
    device.give_away()
    looks = iter([0, 0, 2**40])
    monkeypatch.setattr(engine, "_free_bytes", lambda: next(looks))
    device.ok(StepKind.SLEEP_SAMPLER)
    assert next(looks, None) is None
    device.ok(StepKind.WAKE_SAMPLER)
    monkeypatch.setattr(engine, "_free_bytes", lambda: 0)
    monkeypatch.setattr(engine, "engine", EngineConfig(hosted.machine.engine.engine.url, "base", patience_s=0.2))
    outcome = device.do(StepKind.SLEEP_SAMPLER)
    assert code(outcome) == "WorkerFailed"
    assert "0 bytes of the device are free" in outcome.error.message
    monkeypatch.undo()
    device.take_back("t/a")


def test_an_engine_that_cannot_sleep_says_what_it_was_not_started_with(standin, monkeypatch):
    async def sleep():
        engine = InferenceEngine(EngineConfig(standin.url, "base"))
        monkeypatch.setattr(type(engine.dialect), "asleep", "/nowhere")
        try:
            with pytest.raises(WorkerFailed, match="does not say whether it sleeps") as raised:
                await engine.sleep()
        finally:
            await engine.close()
        assert "--enable-sleep-mode" in raised.value.info.way_out

    anyio.run(sleep)


def test_a_call_ends_before_its_step_is_taken_for_lost():
    engine = beside_engine.within(EngineConfig("http://e", "base"), 100.0)
    assert engine.timeout_s + engine.patience_s < 100.0
