"""One connection for many callers: who gets which answer when callers leave, the server is silent, or the connection goes."""

from __future__ import annotations

import anyio
import pytest
import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from state.wire import Wire

pytestmark = pytest.mark.anyio
SILENT = "BLPOP", "nobody pushes here"  # and how many seconds it waits


@pytest.fixture
async def client(server):
    made = redis.Redis.from_url(server.url)
    yield made
    await made.aclose()


@pytest.fixture
async def wire(client):
    made = Wire(client.connection_pool)
    yield made
    await made.close()


async def test_each_caller_gets_its_own_answer(wire):
    answers = {}

    async def ask(number):
        answers[number] = await wire.calls([("ECHO", number), ("ECHO", -number)])

    async with anyio.create_task_group() as tasks:
        for number in range(1, 50):
            tasks.start_soon(ask, number)
    assert answers == {number: [b"%d" % number, b"%d" % -number] for number in range(1, 50)}


async def test_many_callers_share_one_connection(wire, client):
    before = len(await client.client_list())
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(wire.call, "ECHO", number)
    assert len(await client.client_list()) == before + 1


async def test_an_error_is_one_answer_among_others(wire):
    first, wrong, last = await wire.calls([("ECHO", 1), ("NO-SUCH-COMMAND",), ("ECHO", 2)])
    assert (first, last) == (b"1", b"2")
    assert isinstance(wrong, ResponseError)
    with pytest.raises(ResponseError, match="unknown command"):
        await wire.call("NO-SUCH-COMMAND")
    assert await wire.call("ECHO", 3) == b"3"


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_a_caller_that_leaves_takes_nobody_elses_answer_with_it(wire, leaver):
    scopes = [anyio.CancelScope() for _ in range(3)]
    answers = {}

    async def ask(number):
        with scopes[number]:
            answers[number] = await wire.calls([(*SILENT, 0.2), ("ECHO", number)])

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(ask, number)
            await anyio.wait_all_tasks_blocked()
        scopes[leaver].cancel()
    assert answers == {number: [None, b"%d" % number] for number in range(3) if number != leaver}
    assert await wire.call("ECHO", "after") == b"after"


async def test_the_answers_of_callers_that_all_left_are_nobodys(wire):
    with anyio.move_on_after(0.05):
        await wire.call(*SILENT, 0.2)
    assert await wire.call("ECHO", "mine") == b"mine"


async def test_a_lost_connection_fails_all_that_wait_and_the_next_call_connects_again(wire, client):
    failed = []

    async def ask():
        with pytest.raises(RedisConnectionError):
            await wire.call(*SILENT, 0)
        failed.append(True)

    async with anyio.create_task_group() as tasks:
        number = await wire.call("CLIENT", "ID")
        for _ in range(3):
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
        await client.client_kill_filter(_id=number)
    assert len(failed) == 3
    assert await wire.call("ECHO", "again") == b"again"


async def test_a_server_that_says_nothing_is_taken_for_gone(wire):
    with pytest.raises(RedisTimeout, match="did not answer within"):
        await wire.call(*SILENT, 0, within_s=0.05)
    assert await wire.call("ECHO", "again") == b"again"
