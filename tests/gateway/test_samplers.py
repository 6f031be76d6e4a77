"""The samplers behind the gateway do the same: the Megatron group's own, and an external engine's, in two dialects. The engine is a
stand-in (`standin_engine`, which says what it stands in for); the adapters that it loads were trained and exported by the Megatron group.
Then what only an engine outside the log can do wrong.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
import httpx
import numpy as np
import pytest

from scheduler.gateway import wire
from state.errors import WorkerFailed
from state.requests import Sample, Tensor
from tests.gateway.running import Process, StandInEngine, free_port, wait_for
from tests.gateway.test_protocol import Client, saved_sampler
from workers.group_config import EngineConfig
from workers.inference.client import InferenceEngine
from workers.inference.dialects import DIALECTS, Said

CONNECTIONS = 4
ENGINE = """
[gateway.engines.main]
url = "{url}"
model = "base"
dialect = "{dialect}"
connections = {connections}
patience_s = 20.0
"""


class WithEngine:
    """A second gateway of the same fleet, which samples on an engine."""

    def __init__(self, fleet, dialect: str) -> None:
        ports = free_port(), free_port()
        self.url, self.engine_url = (f"http://127.0.0.1:{port}" for port in ports)
        config = fleet.directory / f"with-{dialect}.toml"
        own = fleet.config.read_text().replace(f"port = {fleet.port}", f"port = {ports[0]}")
        config.write_text(own + ENGINE.format(url=self.engine_url, connections=CONNECTIONS, dialect=dialect))
        self.engine = StandInEngine(ports[1])
        self.gateway = Process("ops.cli", "gateway", "--config", config, "--data-dir", fleet.directory)
        self.wait()

    def wait(self) -> None:
        for url in (f"{self.url}/api/v1/healthz", f"{self.engine_url}/standin"):
            wait_for(url)

    def standin(self, **settings: object) -> dict:
        return self.engine.standin(**settings)


@pytest.fixture(scope="module")
def with_engine(megatron):
    yield from running(megatron, "vllm")


@pytest.fixture(scope="module")
def with_sglang(megatron):
    yield from running(megatron, "sglang")


def running(megatron, dialect: str):
    made = WithEngine(megatron, dialect)
    yield made
    made.gateway.kill()
    made.engine.kill()


@pytest.fixture
def at_engine(with_engine):
    return trained(with_engine)


@pytest.fixture(params=["megatron", "with_engine", "with_sglang"])
def trained_at(request):
    return trained(request.getfixturevalue(request.param))


class Sampling:
    """A tenant with a model of one step, and a sampler of it."""

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model, self.seq = client, model, 0
        self.step()
        self.sampler = self.saved()

    def step(self) -> None:
        self.client.forward_backward(self.model, self.seq + 1, self.seq)
        self.client.result(self.client.step(self.model, self.seq + 2))
        self.seq += 2

    def saved(self) -> str:
        self.seq += 1
        return saved_sampler(self.client, self.model, self.seq)

    def send(self, seq: int, prompt: list[int], sampler: str = "", /, params: dict | None = None, **more: object) -> httpx.Response:
        body = {
            "sampling_session_id": sampler or self.sampler,
            "seq_id": seq,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": 6, "seed": 7, "stop": [], **(params or {})},
            **more,
        }
        return self.client.post("asample", **body)

    def ask(self, *args: object, **more: object) -> wire.SampleResponse:
        answer = self.send(*args, **more)
        assert answer.status_code == 200, answer.text
        return self.response(answer.json()["request_id"])

    def response(self, request_id: str):
        response = wire.SampleResponse()
        response.ParseFromString(self.client.result(request_id).content)
        return response


def trained(gateway) -> Sampling:
    client = Client(gateway, f"tml-{os.urandom(4).hex()}")
    return Sampling(client, client.model(client.session()))


def tokens_of(response, index: int = 0) -> list[int]:
    return np.frombuffer(response.sequences[index].tokens, "<i4").tolist()


def logprobs_of(response, index: int = 0) -> np.ndarray:
    return np.frombuffer(response.sequences[index].logprobs, "<f4")


# --- what all of them must do ------------------------------------------------------------------------------------------------


def test_a_sample_is_decided_by_its_seed_and_its_logprobs_are_the_models(trained_at):
    prompt = [5, 9, 3]
    first = trained_at.ask(1, prompt, num_samples=3)
    again = trained_at.ask(2, prompt, num_samples=3)
    other = trained_at.ask(3, prompt, params={"seed": 8}, num_samples=3)
    assert [tokens_of(first, index) for index in range(3)] == [tokens_of(again, index) for index in range(3)]
    assert [tokens_of(first, index) for index in range(3)] != [tokens_of(other, index) for index in range(3)]
    assert len({tuple(tokens_of(first, index)) for index in range(3)}) > 1
    scored = trained_at.ask(4, prompt + tokens_of(first), params={"max_tokens": 1}, prompt_logprobs=True)
    values = np.frombuffer(scored.prompt_logprobs, "<f4")
    assert np.isnan(values[0])
    assert np.isfinite(values[1:]).all()
    np.testing.assert_allclose(values[len(prompt) :], logprobs_of(first), atol=1e-4)


def test_the_most_likely_tokens_are_told_best_first(trained_at):
    seen = trained_at.ask(1, [5, 9, 3], params={"temperature": 0.0}, topk_sample_logprobs=4, topk_prompt_logprobs=2, num_samples=2)
    top = seen.sequences[0].topk_sampled_logprobs
    values = np.frombuffer(top.logprobs, "<f4").reshape(top.length, top.k)
    assert (top.length, top.k) == (6, 4)
    assert (np.diff(values, axis=1) <= 0).all()
    assert np.frombuffer(top.token_ids, "<i4").reshape(6, 4)[:, 0].tolist() == tokens_of(seen) == tokens_of(seen, 1)
    np.testing.assert_allclose(values[:, 0], logprobs_of(seen), atol=1e-5)
    assert (seen.topk_prompt_logprobs.length, seen.topk_prompt_logprobs.k) == (3, 2)


def test_a_stop_token_ends_a_sample(trained_at):
    whole = tokens_of(trained_at.ask(1, [5, 9, 3]))
    stopped = trained_at.ask(2, [5, 9, 3], params={"stop": [whole[2]]})
    assert tokens_of(stopped) == whole[: whole.index(whole[2]) + 1]
    assert stopped.sequences[0].stop_reason == wire.STOP


def test_a_version_stays_what_it_was(trained_at):
    before = trained_at.ask(1, [5, 9, 3], params={"max_tokens": 1}, prompt_logprobs=True).prompt_logprobs
    trained_at.step()
    later = trained_at.saved()
    assert trained_at.ask(2, [5, 9, 3], params={"max_tokens": 1}, prompt_logprobs=True).prompt_logprobs == before
    assert trained_at.ask(3, [5, 9, 3], later, params={"max_tokens": 1}, prompt_logprobs=True).prompt_logprobs != before


def test_a_retry_is_no_second_sample_and_another_body_changes_nothing(trained_at):
    first = trained_at.send(1, [5, 9, 3]).json()["request_id"]
    assert trained_at.send(1, [5, 9, 3]).json()["request_id"] == first
    answer = trained_at.client.result(first).content
    assert trained_at.send(1, [5, 9, 3]).json()["request_id"] == first
    assert trained_at.client.result(first).content == answer
    trained_at.send(1, [5, 9, 4])
    assert trained_at.client.result(first).content == answer


def test_a_sample_that_cannot_be_is_an_error_with_words(trained_at):
    told = trained_at.client.error(trained_at.send(1, [5] * 100).json()["request_id"])
    assert told["category"] == "user"
    assert "64" in told["error"]


# --- what only an engine outside the log can do wrong -------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["with_engine", "with_sglang"])
def test_an_engine_that_was_started_again_is_given_its_adapters_again(request, engine):
    with_engine = request.getfixturevalue(engine)
    at_engine = trained(with_engine)
    before = tokens_of(at_engine.ask(1, [5, 9, 3]))
    with_engine.standin(delay_s=3.0)
    interrupted = at_engine.send(2, [5, 9, 3]).json()["request_id"]
    time.sleep(0.3)
    with_engine.engine.kill()
    with_engine.engine.start()
    assert tokens_of(at_engine.response(interrupted)) == before
    assert tokens_of(at_engine.ask(3, [5, 9, 3])) == before


def test_a_gateway_that_was_killed_asks_the_engine_again_for_those_who_wait(with_engine, at_engine):
    with_engine.standin(delay_s=1.0)
    waiting = at_engine.send(1, [5, 9, 3]).json()["request_id"]
    with_engine.gateway.kill()
    with_engine.gateway.start()
    with_engine.wait()
    answer = at_engine.client.result(waiting).content
    assert at_engine.send(1, [5, 9, 3]).json()["request_id"] == waiting
    with_engine.standin(delay_s=0.0)
    assert tokens_of(at_engine.ask(2, [5, 9, 3])) == tokens_of(at_engine.response(waiting))
    assert at_engine.client.result(waiting).content == answer


def test_connections_are_bounded_and_every_sample_is_answered(with_engine, at_engine):
    with_engine.standin(delay_s=0.1)
    requests = [at_engine.send(seq, [5, 9, seq]).json()["request_id"] for seq in range(20)]
    assert all(len(tokens_of(at_engine.response(request))) == 6 for request in requests)
    assert with_engine.standin(delay_s=0.0)["most_running"] == CONNECTIONS


def test_a_busy_engine_is_waited_for_and_a_broken_one_is_told(with_engine, at_engine):
    with_engine.standin(fault=503, times=4)
    assert len(tokens_of(at_engine.ask(1, [5, 9, 3]))) == 6
    with_engine.standin(fault=500, times=3)
    told = at_engine.client.error(at_engine.send(2, [5, 9, 3]).json()["request_id"])
    assert (told["category"], told["code"]) == ("server", "WorkerFailed")
    assert len(tokens_of(at_engine.ask(3, [5, 9, 3]))) == 6


def named(at: Sampling, name: str) -> tuple[str, str]:
    """A checkpoint by name, and a sampler that was opened on it: (path, sampler)."""
    at.seq += 1
    saved = at.client.ok("save_weights_for_sampler", model_id=at.model, seq_id=at.seq, path=name, kind="snapshot")
    path = json.loads(at.client.result(saved["request_id"]).content)["path"]
    opened = at.client.ok("create_sampling_session", session_id=at.model.partition(":")[0], sampling_session_seq_id=at.seq, model_path=path)
    return path, opened["sampling_session_id"]


def delete(at: Sampling, path: str) -> None:
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    assert at.client.http.delete(f"training_runs/{model_id}/checkpoints/{kind}/{name}").status_code == 204


def unloaded(with_engine, before: int) -> list[str]:
    return [line for line in with_engine.standin()["seen"][before:] if line.startswith("unload")]


def test_an_adapter_is_unloaded_once_its_samples_have_ended(with_engine, at_engine):
    path, sampler = named(at_engine, "gone")
    at_engine.ask(1, [5, 9, 3], sampler)
    before = len(with_engine.standin(delay_s=1.0)["seen"])
    running = at_engine.send(2, [5, 9, 3], sampler).json()["request_id"]
    time.sleep(0.3)
    assert with_engine.standin()["running"] == 1
    delete(at_engine, path)
    with_engine.standin(delay_s=0.0)
    assert len(tokens_of(at_engine.response(running))) == 6
    assert [line.partition(" while ")[2] for line in unloaded(with_engine, before)] == ["0 run"]
    assert at_engine.send(3, [5, 9, 3], sampler).status_code == 404


def test_a_damaged_export_is_refused_before_the_engine_sees_it(megatron, with_engine, at_engine):
    at_engine.seq += 1
    saved = at_engine.client.ok("save_weights_for_sampler", model_id=at_engine.model, seq_id=at_engine.seq, path="torn", kind="snapshot")
    path = json.loads(at_engine.client.result(saved["request_id"]).content)["path"]
    [file] = megatron.directory.glob("**/sampler_weights/torn/adapter_model.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    session = at_engine.model.partition(":")[0]
    refused = at_engine.client.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, model_path=path)
    assert refused.status_code == 400
    assert "BadCheckpoint" in refused.text


def test_an_adapter_that_is_unloaded_while_its_engine_starts_again_keeps_nobody_waiting(with_engine, at_engine):
    """The sample loads it again, and the unloading waits for the sample, not each for the other."""
    path, sampler = named(at_engine, "both")
    at_engine.ask(1, [5, 9, 3], sampler)
    with_engine.standin(delay_s=1.0)
    running = at_engine.send(2, [5, 9, 3], sampler).json()["request_id"]
    time.sleep(0.3)
    with_engine.engine.kill()
    with ThreadPoolExecutor(1) as beside:  # the answer comes once the adapter is unloaded
        deleted = beside.submit(delete, at_engine, path)
        time.sleep(0.3)
        with_engine.engine.start()
        deleted.result(30)
    assert len(tokens_of(at_engine.response(running))) == 6


@pytest.mark.parametrize(("forgetful", "left"), [(False, ["0 run", "sampled"]), (True, ["1 run", "lost"])])
def test_what_draining_is_for(with_engine, at_engine, forgetful, left):
    """The engine's client by itself; one that forgets what runs unloads under a sample, and that is seen."""
    ends = []
    others = set(with_engine.standin()["adapters"])
    at_engine.ask(1, [5, 9, 3])
    [name] = set(with_engine.standin()["adapters"]) - others
    asked = Sample(Tensor("int32", (1,), np.asarray([5], "<i4").tobytes()), max_tokens=2)
    before = len(with_engine.standin(delay_s=1.0)["seen"])

    async def sample(engine: InferenceEngine) -> None:
        try:
            await engine.sample(name, asked)
            ends.append("sampled")
        except WorkerFailed:
            ends.append("lost")

    async def unload_while_sampling() -> None:
        engine = InferenceEngine(EngineConfig(with_engine.engine_url, "base"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample, engine)
            while not (await anyio.to_thread.run_sync(with_engine.standin))["running"]:
                await anyio.sleep(0.02)
            if forgetful:
                engine._running.clear()
            await engine.unload(name)
        await engine.close()

    anyio.run(unload_while_sampling)
    with_engine.standin(delay_s=0.0)
    assert [line.partition(" while ")[2] for line in unloaded(with_engine, before)] + ends == left


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_what_an_engine_says_of_a_repetition_counts_as_done(dialect):
    engine = DIALECTS[dialect]
    assert engine.is_loaded(Said(400, "The lora adapter 'v' has already been loaded."))
    assert engine.is_unloaded(Said(404, "The lora adapter 'v' cannot be found, it is not loaded."))
    for refusal in (Said(400, "it could not be done: all slots are already taken"), Said(500, "not now")):
        assert not engine.is_loaded(refusal)
        assert not engine.is_unloaded(refusal)
