"""Futures in memory, truth in the log: what this process was asked for, and the answers, for a stated time after they came.

A poll waits on an event of its future; however many wait, no connection and no call to the server goes with them. A future that this
process did not see begin is recalled from the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, Protocol

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from scheduler.producer import Producer
from state.errors import HotdeskError, RequestError, UnknownRequest
from state.requests import Op

JSON, PROTOBUF = "application/json", "application/x-protobuf"
KEPT_BYTES = 64 * 2**20  # of one tenant's answers; what is beyond that is recalled from the log when it is asked for again
LARGE_BYTES = 64 * 1024  # encoding more than this leaves the event loop


class Encoded(NamedTuple):
    content: bytes
    media_type: str


Encode = Callable[[Any], "bytes | dict[str, Any]"]  # a result to protobuf, or to JSON
Then = Callable[["Exception | None"], Awaitable[None]]  # what follows an outcome before it is told


class Outcome(Protocol):
    """What a request comes to: awaited once, and then how large it was."""

    @property
    def result_bytes(self) -> int: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class Answer:
    """One request's, once it is there. `settled` is what polls wait for."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.encoded = Encoded(b"", JSON)
        self.ended_at = 0.0


def failed(error: Exception) -> Encoded:
    """The protocol's way to report a failed operation: polled successfully, and an error."""
    category = "user" if isinstance(error, RequestError) else "server"
    return Encoded(msgspec.json.encode({"error": str(error), "category": category, "code": type(error).__name__}), JSON)


class Answers:
    """One tenant's."""

    def __init__(self, producer: Producer, tasks: TaskGroup, kept_s: float) -> None:
        self.producer = producer
        self.kept_s = kept_s
        self._tasks = tasks
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._bytes = 0  # of answers that are there
        self._recalling: dict[str, anyio.Event] = {}

    def get(self, request_id: str) -> Answer | None:
        return self._answers.get(request_id)

    def expect(self, request_id: str, outcome: Outcome, encode: Encode, then: Then | None = None) -> Answer:
        answer = self._answers[request_id] = Answer()
        self._tasks.start_soon(self._settle, answer, outcome, encode, then)
        return answer

    async def _settle(self, answer: Answer, outcome: Outcome, encode: Encode, then: Then | None) -> None:
        error: Exception | None = None
        try:
            result = await outcome
        except HotdeskError as failure:
            result, error = None, failure
        try:
            if then is not None:
                await then(error)
            answer.encoded = failed(error) if error is not None else await _encoded(encode, result, outcome.result_bytes)
        except Exception as unforeseen:  # a poll must never wait for ever
            answer.encoded = failed(unforeseen)
        answer.ended_at = anyio.current_time()
        answer.settled.set()
        self._bytes += len(answer.encoded.content)
        if self._bytes > KEPT_BYTES:
            self._drop(lambda answer: self._bytes > KEPT_BYTES)

    async def recall(self, request_id: str, how: Callable[[str, Op], tuple[Encode, Then | None]]) -> Answer | None:
        """A future of an earlier process. None where the log knows nothing of it, or no longer. However many ask at once, it is looked up
        once."""
        while (asked := self._recalling.get(request_id)) is not None:
            await asked.wait()
            if request_id in self._answers:
                return self._answers[request_id]
        done = self._recalling[request_id] = anyio.Event()
        try:
            future = await self.producer.recall(request_id)
            if future is None:
                return None
            return self.expect(request_id, future, *how(request_id, future.op))
        except UnknownRequest:
            return None
        finally:
            del self._recalling[request_id]
            done.set()

    def reclaim(self) -> None:
        """Forgets what ended long ago; the log has it for as long as it keeps results."""
        before = anyio.current_time() - self.kept_s
        self._drop(lambda answer: answer.ended_at < before)

    def _drop(self, due: Callable[[Answer], bool]) -> None:
        """Those that ended and are `due`, the oldest first, up to the first that is not."""
        dropped = []
        for request_id, answer in self._answers.items():
            if not answer.settled.is_set():
                continue
            if not due(answer):
                break
            dropped.append(request_id)
            self._bytes -= len(answer.encoded.content)
        for request_id in dropped:
            del self._answers[request_id]

    @property
    def open(self) -> int:
        return sum(not answer.settled.is_set() for answer in self._answers.values())


async def _encoded(encode: Encode, result: Any, size: int) -> Encoded:
    content = await anyio.to_thread.run_sync(encode, result) if size > LARGE_BYTES else encode(result)
    return Encoded(content, PROTOBUF) if isinstance(content, bytes) else Encoded(msgspec.json.encode(content), JSON)
