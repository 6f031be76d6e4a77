"""One connection to the server for many callers: commands go out as they come, answers come back in the same order.

The client of `redis` takes a connection out of its pool for a command and keeps it until the answer is there. Here nobody waits for
another's round trip, and a call takes less processor time. Addresses, TLS, users and the handshake stay the client's.
"""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import anyio
import hiredis
import redis.asyncio as redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

ANSWER_WITHIN_S = 5.0  # beside what a command itself waits for; a server that is silent for longer is taken for gone

Argument = bytes | str | int
Command = tuple[Argument, ...]


class Wire:
    """Connects at the first call, and again after a loss. What was under way then fails: whether it was done is not known.

    A caller that is cancelled leaves a command behind whose answer nobody wants: a command that blocks needs a wire of its own.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._link: _Link | None = None
        self._connecting = anyio.Lock()

    async def call(self, *command: Argument, within_s: float = ANSWER_WITHIN_S) -> Any:
        """The answer. Raises `RedisError`, for an answer that is an error too."""
        (answer,) = await self.calls([command], within_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def calls(self, commands: list[Command], within_s: float = ANSWER_WITHIN_S) -> list[Any]:
        """Several commands in one write. Answers that are errors are returned as they are."""
        mine = _Call(len(commands))
        link = self._link
        with anyio.move_on_after(within_s):
            if link is None or not link.connection.is_connected:
                link = await self._connect()
            await link.answer(mine, [hiredis.pack_command(cast(Any, command)) for command in commands])
            return mine.answers
        if link is not None:
            await link.lose()
        raise RedisTimeout(f"the server did not answer within {within_s:g} s")

    async def _connect(self) -> _Link:
        async with self._connecting:
            if self._link is None or not self._link.connection.is_connected:
                connection: AbstractConnection = cast(Any, self._pool).make_connection()
                connection.socket_timeout = None  # `calls` has one limit for everything
                await cast(Any, connection).connect()
                self._link = _Link(connection)
            return self._link

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.lose()


class _Call:
    """Commands on their way, and their answers so far."""

    def __init__(self, commands: int) -> None:
        self.missing = commands
        self.answers: list[Any] = []
        self.woken: anyio.Event | None = None  # where its caller waits for another to read


class _Link:
    """One life of the connection. No task stands behind it: of the callers that wait one reads, gives the others their answers, and leaves
    the reading to the next when it has its own."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.under_way: deque[_Call] = deque()
        self.reading = False

    async def answer(self, mine: _Call, packed: list[bytes]) -> None:
        self.under_way.append(mine)
        try:
            await self.connection.send_packed_command(packed, check_health=False)
            while mine.missing and self.reading:
                mine.woken = anyio.Event()
                await mine.woken.wait()
            if mine.missing:
                await self._read_until(mine)
        except (RedisConnectionError, OSError):
            await self.lose()
            raise
        finally:
            mine.woken = None
            if not self.reading:
                self._wake_next()

    async def _read_until(self, mine: _Call) -> None:
        self.reading = True
        try:
            while mine.missing:
                try:
                    answer = await self.connection.read_response(disconnect_on_error=False)  # a read that is cancelled loses nothing
                except ResponseError as error:
                    answer = error
                call = self.under_way[0]
                call.answers.append(answer)
                call.missing -= 1
                if not call.missing:
                    self.under_way.popleft()
                    if call.woken is not None:
                        call.woken.set()
        finally:
            self.reading = False

    def _wake_next(self) -> None:
        for call in self.under_way:
            if call.woken is not None:
                call.woken.set()
                return

    async def lose(self) -> None:
        """Whoever waits reads on, and is told by the connection that it is gone."""
        await self.connection.disconnect(nowait=True)
        self._wake_next()
