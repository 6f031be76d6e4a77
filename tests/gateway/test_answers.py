"""What a gateway remembers of answers has a bound, and forgetting costs nobody an answer."""

from __future__ import annotations

from functools import partial

import anyio
import msgspec
import pytest

from scheduler.gateway import answers
from scheduler.gateway.answers import Answers
from scheduler.producer import Future, Producer
from state.errors import UnknownAdapter
from state.memory_log import MemoryLog
from state.requests import Done, Op, Reply, encode_body

pytestmark = pytest.mark.anyio


def future(number: int, **reply: object) -> Future:
    made: Future = Future(f"ada/poet/{number}", Op.UNLOAD, b"", b"")
    made._settle(Reply(made.request_id, "completed", **reply))
    return made


async def test_answers_beyond_the_bound_are_forgotten_the_oldest_first(monkeypatch):
    monkeypatch.setattr(answers, "KEPT_BYTES", 1000)
    async with Producer.over(MemoryLog(), "ada") as producer, anyio.create_task_group() as tasks:
        mine = Answers(producer, tasks, kept_s=600)
        for number in range(20):
            made = future(number, result=encode_body(Done("poet")))
            await mine.expect(made.request_id, made, lambda done: b"x" * 100).settled.wait()
        await anyio.lowlevel.checkpoint()
        kept = [number for number in range(20) if mine.get(f"ada/poet/{number}") is not None]
        assert kept == list(range(10, 20))
        mine.kept_s = -1
        mine.reclaim()
        assert (mine._bytes, len(mine._answers)) == (0, 0)


async def test_a_failure_is_an_answer_that_says_whose_fault_it_is():
    async with Producer.over(MemoryLog(), "ada") as producer, anyio.create_task_group() as tasks:
        mine = Answers(producer, tasks, kept_s=600)
        heard: list[Exception | None] = []

        async def then(error: Exception | None) -> None:
            heard.append(error)

        made = future(1, error=UnknownAdapter("adapter 'poet' does not exist").info)
        answer = mine.expect(made.request_id, made, partial(bytes), then)
        await answer.settled.wait()
        said = msgspec.json.decode(answer.encoded.content)
        assert (said["category"], said["code"]) == ("user", "UnknownAdapter")
        assert isinstance(heard[0], UnknownAdapter)


async def test_an_encoding_that_fails_is_answered_too():
    """A poll must never wait for ever."""
    async with Producer.over(MemoryLog(), "ada") as producer, anyio.create_task_group() as tasks:
        mine = Answers(producer, tasks, kept_s=600)
        made = future(1, result=encode_body(Done("poet")))
        answer = mine.expect(made.request_id, made, lambda done: 1 / 0)
        await answer.settled.wait()
        assert msgspec.json.decode(answer.encoded.content)["category"] == "server"
