"""What tenants ask for, and what each must be answered: a program decided by a seed, and its meaning when run alone, one request after
the other, on an engine without scheduler, planner, log or worker machine around it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import msgspec
import numpy as np

from scheduler.producer import AdapterHandle, Future, Producer
from state.errors import HotdeskError, WindowVoided, WorkerFailed
from state.events import AdapterFacts
from state.requests import (
    CreateAdapter,
    Datum,
    Done,
    Forward,
    LoadState,
    Op,
    OptimStep,
    Sample,
    SaveState,
    Signature,
    Tensor,
    Unload,
    encode_body,
)
from workers.simulated import SimulatedEngine

#: (operation, how often). `failing` is a forward_backward that raises in the worker.
MIX = (
    (Op.FORWARD, 2),
    (Op.FORWARD_BACKWARD, 6),
    (Op.OPTIM_STEP, 4),
    (Op.SAMPLE, 2),
    (Op.SAVE_STATE, 1),
    (Op.LOAD_STATE, 1),
    ("failing", 1),
)


class Answer(NamedTuple):
    """`error`: its code, or empty."""

    result: bytes
    error: str


Program = list[tuple[Op, msgspec.Struct]]


def program(seed: int, tenant: str, adapter: str, length: int) -> Program:
    """Begins with create_adapter, ends with an update, and sometimes with an unload."""
    rng = random.Random(f"{seed}/{tenant}/{adapter}")
    requests: Program = [(Op.CREATE_ADAPTER, CreateAdapter(Signature(rng.randint(1, 8), 8.0, (), rng.randrange(1000))))]
    kinds, weights = zip(*MIX)
    saved: list[str] = []
    for number in range(length):
        kind = rng.choices(kinds, weights)[0]
        if kind == Op.SAVE_STATE:
            saved.append(f"state{number}")
            requests.append((Op.SAVE_STATE, SaveState(saved[-1])))
        elif kind == Op.LOAD_STATE:
            requests.append((Op.LOAD_STATE, LoadState(rng.choice([*saved, "none"]), optimizer=rng.random() < 0.8)))
        elif kind == "failing":
            requests.append((Op.FORWARD_BACKWARD, failing(number)))
        else:
            requests.append((Op(kind), _body(Op(kind), number, rng)))
    requests += [(Op.FORWARD_BACKWARD, _forward(length, rng)), (Op.OPTIM_STEP, OptimStep())]
    if rng.random() < 0.2:
        requests.append((Op.UNLOAD, Unload()))
    return requests


def sampler(seed: int, tenant: str, adapter: str, length: int) -> Program:
    """Of an unordered adapter, loaded once: its later requests run in any order, and each must be answered as if it were the only one."""
    rng = random.Random(f"{seed}/{tenant}/{adapter}")
    signature = Signature(rng.randint(1, 8), 8.0, (), rng.randrange(1000))
    requests: Program = [(Op.CREATE_ADAPTER, CreateAdapter(signature, unordered=True))]
    requests += [(Op.SAVE_STATE, SaveState("version")), (Op.LOAD_STATE, LoadState("version"))]
    return requests + [(op, _body(op, number, rng)) for number, op in enumerate(rng.choices((Op.FORWARD, Op.SAMPLE), (1, 4), k=length))]


def _body(op: Op, number: int, rng: random.Random) -> msgspec.Struct:
    if op is Op.OPTIM_STEP:
        return OptimStep(learning_rate=rng.random())
    if op is Op.SAMPLE:
        return Sample(_int32([1, 2, number % 256]), max_tokens=3, seed=number)
    return _forward(number, rng)


def _forward(number: int, rng: random.Random) -> Forward:
    tokens = 1200 if rng.random() < 0.1 else 3  # some bodies are large enough to live beside the log
    return Forward((Datum(_int32([number % 256] * tokens), {"target_tokens": _int32([1] * tokens)}),))


def failing(number: int) -> Forward:
    """What the simulated engine raises on."""
    return Forward((Datum(_int32([number % 256]), {"target_tokens": _int32([1])}),), loss_config={"clip_high_threshold": 13.0})


def _int32(values: list[int]) -> Tensor:
    return Tensor("int32", (len(values),), np.asarray(values, "<i4").tobytes())


# --- what it means ------------------------------------------------------------------------------------------------


def alone(adapter: str, requests: Program) -> list[Answer]:
    """The answers of a tenant that has the fleet to itself. `adapter`: qualified."""
    meaning = _Alone(adapter)
    return [meaning.answer(op, body) for op, body in requests]


class _Alone:
    def __init__(self, adapter: str) -> None:
        self.adapter = adapter
        self.engine = SimulatedEngine()
        self.voided = False

    def answer(self, op: Op, body: msgspec.Struct) -> Answer:
        try:
            return Answer(encode_body(_MEANING[op](self, body)), "")
        except HotdeskError as error:
            return Answer(b"", error.info.code)

    def create(self, body: CreateAdapter) -> msgspec.Struct:
        self.engine.create(self.adapter, body.signature)
        self.engine.bind(self.adapter)
        return Done(self.adapter)

    def forward(self, body: Forward) -> msgspec.Struct:
        return self.engine.forward(body, backward=False)

    def forward_backward(self, body: Forward) -> msgspec.Struct:
        try:
            return self.engine.forward(body, backward=True)
        except WorkerFailed:
            self.voided = True
            self.engine.discard()
            raise

    def optim_step(self, body: OptimStep) -> msgspec.Struct:
        if self.voided:  # a window with a failed part is never applied
            self.voided = False
            self.engine.discard()
            raise WindowVoided("a forward_backward of this window failed")
        return self.engine.optim_step(body)

    def sample(self, body: Sample) -> msgspec.Struct:
        self._to_slot()
        self.engine.publish(self.adapter)
        [result] = self.engine.sample([body])
        assert not isinstance(result, HotdeskError)
        return result

    def save_state(self, body: SaveState) -> msgspec.Struct:
        self._to_slot()
        facts = AdapterFacts(self.adapter, "live")
        return self.engine.save(self.adapter, body.name, "weights", body.overwrite, facts, "")

    def load_state(self, body: LoadState) -> msgspec.Struct:
        seen = self.engine.load(self.adapter, self.adapter, "weights", body.name, body.optimizer)
        self.engine.bind(self.adapter)
        self.voided = False
        return Done(self.adapter, f"optimizer step {seen.optimizer_step}")

    def unload(self, body: Unload) -> msgspec.Struct:
        return Done(self.adapter)

    def _to_slot(self) -> None:
        self.engine.store(self.adapter, state=True, grads=True)


_MEANING: dict[Op, Callable[[_Alone, Any], msgspec.Struct]] = {
    Op.CREATE_ADAPTER: _Alone.create,
    Op.FORWARD: _Alone.forward,
    Op.FORWARD_BACKWARD: _Alone.forward_backward,
    Op.OPTIM_STEP: _Alone.optim_step,
    Op.SAMPLE: _Alone.sample,
    Op.SAVE_STATE: _Alone.save_state,
    Op.LOAD_STATE: _Alone.load_state,
    Op.UNLOAD: _Alone.unload,
}


# --- asking -------------------------------------------------------------------------------------------------------


async def ask(producer: Producer, adapter: str, requests: Program, rng: random.Random) -> list[Answer]:
    """Sends a program through a real producer, some requests ahead of their answers, cancelling some that change nothing."""
    handle = AdapterHandle(producer, adapter, adapter, 0)
    answers: list[Answer] = [Answer(b"", "unanswered")] * len(requests)
    created = requests[0][1]
    unordered = isinstance(created, CreateAdapter) and created.unordered
    ahead = anyio.Semaphore(rng.choice((1, 3, 10)))

    async def wait(index: int, future: Future[msgspec.Struct]) -> None:
        try:
            answers[index] = Answer(encode_body(await future), "")
        except HotdeskError as error:
            answers[index] = Answer(b"", error.info.code)
        ahead.release()

    async with anyio.create_task_group() as waiting:
        for index, (op, body) in enumerate(requests):
            await ahead.acquire()
            future = await handle.send(op, body)
            waiting.start_soon(wait, index, future)
            if op is Op.CREATE_ADAPTER or (unordered and op in (Op.SAVE_STATE, Op.LOAD_STATE)):
                # what comes before it is there would be refused, as it should; an unordered adapter's requests wait for nothing
                with contextlib.suppress(HotdeskError):
                    await future
            if op in (Op.FORWARD, Op.SAMPLE) and rng.random() < 0.1:
                waiting.start_soon(_cancel, producer, future.request_id)
            if rng.random() < 0.2:
                await anyio.sleep(rng.random() * 3)
    return answers


async def _cancel(producer: Producer, request_id: str) -> None:
    try:
        await producer.cancel(request_id)
    except HotdeskError:
        pass  # it runs, or ended
