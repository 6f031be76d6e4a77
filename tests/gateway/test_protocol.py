"""The protocol itself, request by request, against `hotdesk up` with a simulated group: order, retries, refusals, what others may see, what
hostile bodies do, and what is left after a gateway was killed."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import zstandard

from scheduler.gateway import wire
from tests.gateway.running import SIMULATED, Running

GATEWAY = "session_timeout_s = 4.0\nsampler_idle_s = 2.0\nhold_s = 2.0\nbody_bytes = 4000000\nunnamed_kept = 3"


@pytest.fixture(scope="module")
def running():
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        started = Running(Path(directory), SIMULATED, GATEWAY)
        started.wait()
        yield started
        code = started.stop()
        assert code == 0, started.log[-3000:]


class Client:
    """A tenant that speaks the protocol by hand."""

    def __init__(self, running: Running, key: str = "tml-ada") -> None:
        self.running = running
        self.http = httpx.Client(base_url=f"{running.url}/api/v1/", headers={"x-api-key": key}, timeout=40)

    def post(self, path: str, /, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def ok(self, path: str, /, **body: object) -> dict:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self) -> str:
        return self.ok("create_session", tags=[], sdk_version="0.38.0")["session_id"]

    def model(self, session: str, number: int = 0, **lora: object) -> str:
        promise = self.ok("create_model", session_id=session, model_seq_id=number, base_model=self.base(), lora_config={"rank": 4, **lora})
        return json.loads(self.result(promise["request_id"]).content)["model_id"]

    def base(self) -> str:
        return self.http.get("get_server_capabilities").json()["supported_models"][0]["model_name"]

    def forward_backward(self, model: str, seq: int, number: int = 0, compress: bool = False, **fields: object) -> httpx.Response:
        body = message(model, seq, number, **fields).SerializeToString()
        headers = {"content-type": "application/x-protobuf"}
        if compress:
            body, headers["content-encoding"] = zstandard.compress(body), "zstd"
        return self.http.post("forward_backward", content=body, headers=headers)

    def result(self, request_id: str, seconds: float = 30) -> httpx.Response:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = self.http.post("retrieve_future", json={"request_id": request_id}, headers={"accept": "application/x-protobuf"})
            if b"try_again" not in answer.content[:40]:
                return answer
        raise AssertionError(f"{request_id} had no answer")

    def loss(self, request_id: str) -> float:
        output = wire.ForwardBackwardOutput()
        output.ParseFromString(self.result(request_id).content)
        return output.metrics["loss:sum"]

    def step(self, model: str, seq: int) -> str:
        return self.ok("optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": 0.01})["request_id"]

    def error(self, request_id: str) -> dict:
        answer = self.result(request_id).json()
        assert "error" in answer, answer
        return answer


def message(model: str, seq: int, number: int = 0, **fields: object):
    asked = wire.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = asked.data.add()
    tokens = np.arange(8, dtype="<i4") + number
    datum.model_input.add().encoded_text.tokens = tokens[:3].tobytes()
    datum.model_input.add().encoded_text.tokens = b""
    datum.model_input.add().encoded_text.tokens = tokens[3:].tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = (tokens + 1).astype("<i8").tobytes(), 2
    targets.shape.append(8)
    for name, value in fields.items():
        setattr(asked, name, value)
    return asked


@pytest.fixture
def ada(running):
    return Client(running)


@pytest.fixture
def brook(running):
    return Client(running, "tml-brook")


# --- order and retries ------------------------------------------------------------------------------------------------


def test_later_requests_are_held_for_the_one_that_comes_last(ada):
    model = ada.model(ada.session())
    others = [ada.forward_backward(model, seq, seq).json()["request_id"] for seq in (3, 2)]
    update = ada.step(model, 4)
    assert b"try_again" in ada.http.post("retrieve_future", json={"request_id": update}).content
    first = ada.forward_backward(model, 1, 1).json()["request_id"]
    assert all(ada.loss(request_id) > 0 for request_id in (*others, first))
    assert ada.result(update).json()["metrics"]["optimizer_step"] == 1


def test_a_retry_has_the_first_ones_id_and_answer_also_later(ada):
    session = ada.session()
    model = ada.model(session)
    first = ada.forward_backward(model, 1).json()["request_id"]
    assert ada.forward_backward(model, 1, compress=True).json()["request_id"] == first
    answer = ada.result(first)
    assert ada.forward_backward(model, 1).json()["request_id"] == first
    assert ada.result(first).content == answer.content
    assert ada.model(session) == model


def test_a_gateway_that_is_killed_is_missed_by_nobody(running, ada):
    session = ada.session()
    model = ada.model(session)
    early = ada.forward_backward(model, 1).json()["request_id"]
    answer = ada.result(early).content
    late = ada.step(model, 3)  # held for number 2
    running.kill_gateway()
    while not running.answers():
        time.sleep(0.05)
    assert ada.result(early).content == answer
    assert b"try_again" in ada.http.post("retrieve_future", json={"request_id": late}).content
    again = ada.forward_backward(model, 1).json()["request_id"]
    assert again == early
    ada.forward_backward(model, 2)
    assert ada.result(late).json()["metrics"]["optimizer_step"] == 1


def test_a_refused_request_spends_its_seq_and_its_model_goes_on(ada):
    model = ada.model(ada.session())
    refusals = [
        ada.forward_backward(model, 1, loss_fn="no_such_loss").json()["request_id"],
        ada.forward_backward(model, 2, number=10**6).json()["request_id"],
        ada.ok("save_weights", model_id=model, seq_id=3, path="../../etc/passwd")["request_id"],
        ada.ok("optim_step", model_id=model, seq_id=4, optimizer_params={"type": "muon"})["request_id"],
        ada.ok("load_weights", model_id=model, seq_id=5, path=f"tinker://{model}/weights/none", optimizer=True)["request_id"],
    ]
    image = message(model, 6)
    image.data[0].model_input.add().image.data = b"png"
    refusals.append(ada.http.post("forward_backward", content=image.SerializeToString()).json()["request_id"])
    assert [ada.error(request_id)["category"] for request_id in refusals] == ["user"] * 6
    assert "no_such_loss" in ada.error(refusals[0])["error"]
    assert ada.loss(ada.forward_backward(model, 7).json()["request_id"]) > 0


def test_a_retried_save_for_a_sampler_is_one_save(ada):
    model = ada.model(ada.session())
    ask = {"model_id": model, "seq_id": 1, "kind": "snapshot"}
    first = ada.ok("save_weights_for_sampler", sampling_session_seq_id=0, **ask)["request_id"]
    assert ada.ok("save_weights_for_sampler", sampling_session_seq_id=1, **ask)["request_id"] == first
    assert ada.result(first).json()["sampling_session_id"]


# --- samplers ---------------------------------------------------------------------------------------------------------


def sample(client: Client, sampler: str, seq: int, **params: object) -> httpx.Response:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 9]}, {"type": "encoded_text", "tokens": [7]}]}
    asked = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 2, "prompt": prompt}
    return client.post("asample", sampling_params={"max_tokens": 4, **params}, **asked)


def sampled(client: Client, answer: httpx.Response) -> list[bytes]:
    response = wire.SampleResponse()
    assert answer.status_code == 200, answer.text
    response.ParseFromString(client.result(answer.json()["request_id"]).content)
    return [sequence.tokens for sequence in response.sequences]


def saved_sampler(client: Client, model: str, seq: int, kind: str = "snapshot") -> str:
    promise = client.ok("save_weights_for_sampler", model_id=model, seq_id=seq, kind=kind, sampling_session_seq_id=seq)
    return client.result(promise["request_id"]).json()["sampling_session_id"]


def test_a_snapshot_sampler_stays_and_an_inflight_one_follows(ada):
    model = ada.model(ada.session())
    frozen, following = saved_sampler(ada, model, 1), saved_sampler(ada, model, 2, "inflight")
    before = sampled(ada, sample(ada, frozen, 0, seed=3))
    assert sampled(ada, sample(ada, following, 0, seed=3)) == before
    ada.forward_backward(model, 3)
    ada.result(ada.step(model, 4))
    assert saved_sampler(ada, model, 5, "inflight") == following
    assert sampled(ada, sample(ada, frozen, 1, seed=3)) == before
    assert sampled(ada, sample(ada, following, 1, seed=3)) != before


def test_a_sampler_that_was_freed_comes_back_when_it_is_used(running, ada):
    model = ada.model(ada.session())
    sampler = saved_sampler(ada, model, 1)
    before = sampled(ada, sample(ada, sampler, 0, seed=3))
    freed = running.log.count("sampler_freed")
    deadline = time.monotonic() + 20
    while running.log.count("sampler_freed") == freed:
        assert time.monotonic() < deadline
        ada.ok("session_heartbeat", session_id=model.partition(":")[0])
        time.sleep(0.2)
    assert sampled(ada, sample(ada, sampler, 1, seed=3)) == before


def test_samples_need_no_order_and_a_retry_is_no_second_sample(ada):
    session = ada.session()
    sampler = ada.ok("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=ada.base())["sampling_session_id"]
    assert (
        ada.ok("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=ada.base())["sampling_session_id"]
        == sampler
    )
    answers = {seq: sample(ada, sampler, seq).json() for seq in (7_000_000_001, 3, 0)}
    assert all(len(set(answer["sample_sequence_ids"])) == 2 for answer in answers.values())
    assert sample(ada, sampler, 3).json() == answers[3]
    assert len({answer["request_id"] for answer in answers.values()}) == 3
    for seq in answers:
        assert len(sampled(ada, sample(ada, sampler, seq))) == 2
    assert ada.http.get(f"samplers/{sampler}").json()["base_model"] == ada.base()


def test_a_sample_that_cannot_be_is_refused_at_once(ada):
    session = ada.session()
    sampler = ada.ok("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=ada.base())["sampling_session_id"]
    assert sample(ada, sampler, 1, stop="words").status_code == 400
    assert sample(ada, "nobody:sample:0", 1).status_code == 404
    empty = {"sampling_session_id": sampler, "seq_id": 2, "prompt": {"chunks": []}, "sampling_params": {"max_tokens": 2}}
    assert ada.error(ada.ok("asample", **empty)["request_id"])["category"] == "user"


# --- sessions, checkpoints, tenants -----------------------------------------------------------------------------------


def test_a_session_that_ends_or_falls_silent_frees_its_models_and_keeps_their_state(running, ada):
    ended, silent = ada.session(), ada.session()
    models = [ada.model(ended), ada.model(silent)]
    for model in models:
        ada.forward_backward(model, 1)
        ada.result(ada.step(model, 2))
    assert ada.http.post(f"sessions/{ended}/finish", json={"reason": {"type": "success"}}).status_code == 200
    deadline = time.monotonic() + 30
    while not all(f'"session": "{session}"' in running.log for session in (ended, silent)):
        assert time.monotonic() < deadline, running.log[-2000:]
        time.sleep(0.2)
    session = ada.session()
    for number, model in enumerate(models):
        path = f"tinker://{model}/weights/at-session-end"
        promise = ada.ok("load_weights", session_id=session, model_seq_id=number, path=path, optimizer=True)
        again = ada.result(promise["request_id"]).json()["model_id"]
        ada.forward_backward(again, 1)
        assert ada.result(ada.step(again, 2)).json()["metrics"]["optimizer_step"] == 2
    assert ada.post("session_heartbeat", session_id=ended).status_code == 410


def test_checkpoints_are_listed_expire_and_go(ada):
    model = ada.model(ada.session())
    named = {"model_id": model, "ttl_seconds": 1, "user_metadata": {"k": "v"}}
    for seq, name in enumerate(("short", "long"), 1):
        ada.result(ada.ok("save_weights", seq_id=seq, path=name, **named)["request_id"])
    assert ada.http.put(f"training_runs/{model}/checkpoints/weights/long/ttl", json={"ttl_seconds": None}).status_code == 200
    listed = {one["tinker_path"]: one for one in ada.http.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]}
    assert listed[f"tinker://{model}/weights/long"]["user_metadata"] == {"k": "v"}
    assert listed[f"tinker://{model}/weights/long"]["expires_at"] is None
    assert listed[f"tinker://{model}/weights/long"]["size_bytes"] > 0
    deadline = time.monotonic() + 20
    while len(ada.http.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert ada.http.delete(f"training_runs/{model}/checkpoints/weights/long").status_code == 204
    assert ada.http.delete(f"training_runs/{model}/checkpoints/weights/long").status_code == 404


def test_unnamed_checkpoints_of_a_model_are_bounded_and_those_in_use_stay(running, ada):
    session = ada.session()
    model = ada.model(session)
    samplers = []
    for number in range(7):
        samplers.append(saved_sampler(ada, model, number + 1))
        sampled(ada, sample(ada, samplers[0], number))
    mine = [f"unnamed.{seq}" for seq in range(8, 12)]  # of training, and called so by the tenant: theirs to delete
    for seq, name in enumerate(mine, 8):
        ada.result(ada.ok("save_weights", model_id=model, seq_id=seq, path=name)["request_id"])

    def names() -> set[str]:
        return {path.name for path in running.directory.glob(f"adapters/*/{session}-0/sampler_weights/*")}

    deadline = time.monotonic() + 20
    while names() != {"unnamed.1", "unnamed.5", "unnamed.6", "unnamed.7"}:
        assert time.monotonic() < deadline, names()
        ada.ok("session_heartbeat", session_id=session)
        sampled(ada, sample(ada, samplers[0], 7))
        time.sleep(0.2)
    assert sample(ada, samplers[1], 0).status_code == 404
    sampled(ada, sample(ada, samplers[4], 0))
    listed = ada.http.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert sorted(one["checkpoint_id"] for one in listed) == sorted(f"weights/{name}" for name in mine)


def test_what_is_another_tenants_does_not_exist(ada, brook):
    session = ada.session()
    model = ada.model(session)
    request_id = ada.forward_backward(model, 1).json()["request_id"]
    ada.result(request_id)
    ada.result(ada.ok("save_weights", model_id=model, seq_id=2, path="mine")["request_id"])
    sampler = saved_sampler(ada, model, 3)
    theirs = brook.session()
    path = f"tinker://{model}/weights/mine"
    assert brook.post("get_info", model_id=model).status_code == 404
    assert brook.forward_backward(model, 1).status_code == 404
    assert brook.post("retrieve_future", request_id=request_id).status_code == 410
    assert brook.post("weights_info", tinker_path=path).status_code == 404
    assert brook.post("load_weights", session_id=theirs, model_seq_id=0, path=path, optimizer=True).status_code == 404
    assert brook.post("create_sampling_session", session_id=theirs, sampling_session_seq_id=0, model_path=path).status_code == 404
    assert sample(brook, sampler, 0).status_code == 404
    assert brook.http.get(f"sessions/{session}").status_code == 404
    assert brook.http.delete(f"training_runs/{model}/checkpoints/weights/mine").status_code == 404
    assert all(run["training_run_id"] != model for run in brook.http.get("training_runs").json()["training_runs"])
    assert httpx.post(f"{ada.running.url}/api/v1/create_session", json={}).status_code == 401


# --- hostile bodies ---------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_404_and_never_5xx(ada):
    for method, path in (("POST", "create_custom_loss"), ("POST", "retrieve_futures"), ("GET", "audit"), ("POST", "auth/token")):
        assert ada.http.request(method, path, json={}).status_code in (404, 405)
    assert ada.post("telemetry", events=[]).status_code == 200


def test_bodies_have_a_limit_packed_or_not(ada):
    assert ada.http.post("forward_backward", content=bytes(5_000_000)).status_code == 400
    bomb = zstandard.compress(bytes(500_000_000))
    assert len(bomb) < 100_000
    answer = ada.http.post("forward_backward", content=bomb, headers={"content-encoding": "zstd"})
    assert (answer.status_code, answer.json()["code"]) == (400, "MalformedRequest")


def test_random_bodies_get_a_refusal_and_nothing_breaks(running, ada):
    seed = int(os.environ.get("HOTDESK_SEED", time.time_ns() % 100_000))
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = ada.model(ada.session())
    good = message(model, 1).SerializeToString()
    paths = ("create_model", "optim_step", "asample", "save_weights", "load_weights", "retrieve_future", "create_sampling_session")
    values = (None, -1, 2**70, "", "x" * 300, [], {}, [[[]]], "../..", 1.5, True, "tinker://a/b/c", model)
    fields = ("model_id", "seq_id", "session_id", "model_seq_id", "path", "prompt", "sampling_params", "request_id", "base_model")
    for _ in range(150):
        body = {field: rng.choice(values) for field in rng.sample(fields, rng.randint(0, 6))}
        answer = ada.post(rng.choice(paths), **body)
        assert answer.status_code < 500, (body, answer.text)
    for _ in range(150):
        torn = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            torn[rng.randrange(len(torn))] = rng.randrange(256)
        answer = ada.http.post("forward_backward", content=bytes(torn[: rng.randint(0, len(torn))]))
        assert answer.status_code < 500, answer.text
    for content in (b"", b"{", b"[]", b"\xff\xfe", b'{"model_id": ' + b"[" * 10_000, b"null"):
        assert ada.http.post("optim_step", content=content).status_code == 400
    fresh = ada.model(ada.session())
    assert ada.loss(ada.forward_backward(fresh, 1).json()["request_id"]) > 0
