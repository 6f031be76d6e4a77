"""The queue producer: what a tenant's program holds.

    async with Producer.connect(url, fleet="demo", tenant="alice") as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=8)
        future = await poet.forward_backward([datum([1, 2, 3], [2, 3, 4])])
        result = await future

Every call appends one request to the intake and returns a future; awaiting the future waits for the outcome. However many futures wait,
there is one blocking reader and one connection for it. A request that is sent twice (a lost answer, a reconnect) is applied once: its
identity is (tenant, lane, seq). `SyncProducer` is the same without `await`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar, cast

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import redis
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal, start_blocking_portal

from state.errors import Busy, HotdeskError, ResultExpired, error_from
from state.log import Store
from state.redis_log import RedisLog, is_passing
from state.requests import (
    RESULTS,
    Cancel,
    CreateAdapter,
    Datum,
    Describe,
    Description,
    Done,
    Envelope,
    Forward,
    ForwardResult,
    LoadState,
    Op,
    OptimStep,
    OptimStepResult,
    Recall,
    Recalled,
    Reply,
    Sample,
    SampleResult,
    SaveResult,
    SaveState,
    SaveWeightsForSampler,
    Signature,
    Tensor,
    Unload,
    digest_of,
    encode_body,
)

READ_BLOCK_MS = 2000
REMIND_AFTER_S = 60.0
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 5.0
Result = TypeVar("Result")
Array = Sequence[int] | Sequence[float] | np.ndarray[Any, Any]


def tensor(values: Array, dtype: str) -> Tensor:
    array = np.ascontiguousarray(np.asarray(values, dtype={"int32": "<i4", "int64": "<i8", "float32": "<f4"}[dtype]))
    return Tensor(dtype, array.shape, array.tobytes())


def values(of: Tensor) -> np.ndarray[Any, Any]:
    """A result tensor as numpy, in its own shape."""
    return np.frombuffer(of.data, dtype={"int32": "<i4", "int64": "<i8", "float32": "<f4"}[of.dtype]).reshape(of.shape)


def datum(tokens: Array, target_tokens: Array, **inputs: Array) -> Datum:
    """One sequence: `tokens` and `target_tokens` [T], and further float inputs [T] by name (`weights`, `logprobs`, `advantages`)."""
    floats = {name: tensor(array, "float32") for name, array in inputs.items()}
    return Datum(tensor(tokens, "int32"), {"target_tokens": tensor(target_tokens, "int32"), **floats})


class Future(Generic[Result]):
    """The outcome of one request. Await it, from any number of tasks; it raises the request's typed error."""

    def __init__(self, request_id: str, op: Op, header: bytes, body: bytes) -> None:
        self.request_id = request_id
        self.op = op
        self._header, self._body = header, body
        self._durable = anyio.Event()
        self._settled = anyio.Event()
        self._sent_at = anyio.current_time()
        self._reply: Reply | None = None

    @property
    def done(self) -> bool:
        return self._reply is not None

    def __await__(self) -> Generator[Any, None, Result]:
        return self.outcome().__await__()

    async def outcome(self) -> Result:
        await self._settled.wait()
        assert self._reply is not None
        if self._reply.error is not None:
            raise error_from(self._reply.error)
        if not self._reply.result:
            raise ResultExpired(f"the result of {self.request_id} is not kept any more")
        return cast(Result, msgspec.msgpack.decode(self._reply.result, type=RESULTS[self.op]))

    @property
    def result_bytes(self) -> int:
        return len(self._reply.result) if self._reply is not None else 0

    def _settle(self, reply: Reply) -> None:
        self._reply = reply
        self._header = self._body = b""
        self._settled.set()


class Producer:
    """One tenant's connection to a fleet. Use `connect`."""

    def __init__(self, store: Store, tenant: str, tasks: TaskGroup) -> None:
        self.store = store
        self.tenant = tenant
        self._tasks = tasks
        self._futures: dict[str, Future[Any]] = {}
        self._session = f"~{secrets.token_hex(6)}"
        self._session_seq = 0

    @staticmethod
    @asynccontextmanager
    async def connect(url: str, *, fleet: str, tenant: str, wait_aof_ms: int = 0) -> AsyncIterator[Producer]:
        """`wait_aof_ms`: see `RedisLog.connect`; not needed with `appendfsync always`."""
        store = RedisLog.connect(url, fleet, wait_aof_ms=wait_aof_ms)
        try:
            async with Producer.over(store, tenant) as producer:
                yield producer
        finally:
            await store.close()

    @staticmethod
    @asynccontextmanager
    async def over(store: Store, tenant: str) -> AsyncIterator[Producer]:
        """A producer over any store, such as the in-memory one in a test."""
        failure: Exception | None = None
        after = await _patiently(lambda: store.last_result(tenant))
        async with anyio.create_task_group() as tasks:
            producer = Producer(store, tenant, tasks)
            tasks.start_soon(producer._read_results, after)
            tasks.start_soon(producer._remind)
            try:
                yield producer
            except Exception as error:  # raised again outside the task group, so that callers catch it by its own class
                failure = error
            finally:
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    # --- adapters ---------------------------------------------------------------------------------------------------

    async def create_adapter(
        self,
        name: str,
        *,
        rank: int,
        alpha: float | None = None,
        targets: Sequence[str] = (),
        seed: int = 0,
        group: str = "",
        instance: str | None = None,
    ) -> AdapterHandle:
        """Creates an adapter and waits for it. `alpha` defaults to twice the rank. `instance` tells it from an earlier, unloaded one of
        the same name; a fixed one makes the call itself repeatable."""
        lane = f"{name}:{secrets.token_hex(3) if instance is None else instance}".rstrip(":")
        handle = AdapterHandle(self, name, lane, next_seq=0)
        signature = Signature(rank, float(alpha if alpha is not None else 2 * rank), tuple(targets), seed)
        created: Future[Done] = await handle.send(Op.CREATE_ADAPTER, CreateAdapter(signature, group))
        await created
        return handle

    async def adapter(self, name: str) -> AdapterHandle:
        """A handle on an existing adapter, going on after the last request the daemon knows of."""
        description = await self.describe(name)
        return AdapterHandle(self, name, description.adapter, description.next_seq)

    async def describe(self, name: str) -> Description:
        """An adapter's standing. Raises `UnknownAdapter`."""
        described: Future[Description] = await self._send_control(Op.DESCRIBE, name, Describe())
        return await described

    async def cancel(self, request_id: str) -> Done:
        """Cancels a queued request. Raises `NotCancellable` for a running or ended one."""
        adapter = request_id.split("/")[1].partition(":")[0]
        future: Future[Done] = await self._send_control(Op.CANCEL, adapter, Cancel(request_id))
        return await future

    async def send(self, lane: str, seq: int, op: Op, body: msgspec.Struct | bytes, *, refused: str = "") -> Future[Any]:
        """Any operation under an identity of the caller's choice; one that is on its way already is not sent again. `refused`: see
        `state.requests.Envelope`."""
        waiting = self._futures.get(f"{self.tenant}/{lane}/{seq}")
        if waiting is None:
            return await self._send(lane, seq, op, lane.partition(":")[0], body, refused)
        await waiting._durable.wait()
        return waiting

    async def recall(self, request_id: str) -> Future[Any] | None:
        """The future of a request that another process sent. None where the log does not know it."""
        if request_id in self._futures:
            return self._futures[request_id]
        future: Future[Any] = Future(request_id, Op.RECALL, b"", b"")
        future._durable.set()
        self._futures[request_id] = future
        known = False
        try:
            recalled = await self._ask_again(request_id)
            known = recalled.status != "unknown"
        finally:
            if not known:
                self._futures.pop(request_id, None)
        if not known:
            return None
        future.op = Op(recalled.op)
        return future

    async def _ask_again(self, request_id: str) -> Recalled:
        lane = request_id.split("/")[1]
        asked: Future[Recalled] = await self._send_control(Op.RECALL, lane.partition(":")[0], Recall(request_id))
        return await asked

    # --- sending and receiving --------------------------------------------------------------------------------------

    async def _send_control(self, op: Op, adapter: str, body: msgspec.Struct) -> Future[Any]:
        self._session_seq += 1
        return await self._send(self._session, self._session_seq, op, adapter, body)

    async def _send(self, lane: str, seq: int, op: Op, adapter: str, body: msgspec.Struct | bytes, refused: str = "") -> Future[Any]:
        """Returns once the request is durable in the intake. A lost answer from the server is met by sending it again."""
        envelope = Envelope(self.tenant, lane, seq, op, adapter, refused=refused)
        content = body if isinstance(body, bytes) else encode_body(body)
        future: Future[Any] = Future(envelope.request_id, op, msgspec.msgpack.encode(envelope), content)
        self._futures[future.request_id] = future
        try:
            await self._submit(future, 0)
        except anyio.get_cancelled_exc_class():
            self._tasks.start_soon(self._submit, future, 0)  # a caller that is cancelled leaves no hole in its lane
            raise
        except Exception:
            self._futures.pop(future.request_id, None)  # the server will not have it: nobody is to remind it
            future._durable.set()
            raise
        return future

    async def _submit(self, future: Future[Any], delay_ms: int) -> None:
        if delay_ms:
            await anyio.sleep(delay_ms / 1000)
        if future.done:
            return
        header, body = future._header, future._body
        await _patiently(lambda: self.store.submit(header, body))
        future._sent_at = anyio.current_time()
        future._durable.set()

    async def _remind(self) -> None:
        """Sends again what had no answer for long: it is applied once anyway, and an answer that got lost is repeated."""
        while True:
            await anyio.sleep(REMIND_AFTER_S / 4)
            for future in list(self._futures.values()):
                if anyio.current_time() - future._sent_at > REMIND_AFTER_S:
                    if future._header:
                        await self._submit(future, 0)
                    else:  # another process sent it
                        future._sent_at = anyio.current_time()
                        self._tasks.start_soon(self._ask_again, future.request_id)

    async def _read_results(self, after: int) -> None:
        while True:
            entries = await _patiently(partial(self.store.read_results, self.tenant, after, 512, READ_BLOCK_MS))
            for log_id, payload in entries:
                after = log_id
                reply = msgspec.msgpack.decode(payload, type=Reply)
                future = self._futures.get(reply.request_id)
                if future is None or (reply.digest and future._header and reply.digest != digest_of(future._body)):
                    continue  # another program of this tenant waits for it
                if reply.status == "busy" and reply.error is not None:
                    self._tasks.start_soon(self._submit, future, reply.error.retry_after_ms)
                else:
                    del self._futures[reply.request_id]
                    future._settle(reply)


async def _patiently(call: Callable[[], Any]) -> Any:
    """`call()` again, with growing pauses, while the server is away or the intake is full."""
    pause = RETRY_FIRST_S
    while True:
        try:
            return await call()
        except Busy as busy:
            await anyio.sleep(busy.info.retry_after_ms / 1000)
        except (redis.RedisError, OSError) as error:
            await anyio.lowlevel.checkpoint()  # the client turns a cancelled read into a connection error
            if not is_passing(error):
                raise
            await anyio.sleep(pause)
            pause = min(2 * pause, RETRY_MOST_S)


class AdapterHandle:
    """One adapter. Calls take effect in the order in which they are made."""

    def __init__(self, producer: Producer, name: str, lane: str, next_seq: int) -> None:
        self.producer = producer
        self.name = name
        self.lane = lane
        self.next_seq = next_seq

    async def send(self, op: Op, body: msgspec.Struct) -> Future[Any]:
        """Any operation of the adapter's own lane."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        return await self.producer._send(self.lane, seq, op, self.name, body)

    async def forward(self, data: Sequence[Datum], loss_fn: str = "cross_entropy", **loss_config: float) -> Future[ForwardResult]:
        return await self.send(Op.FORWARD, Forward(tuple(data), loss_fn, loss_config))

    async def forward_backward(self, data: Sequence[Datum], loss_fn: str = "cross_entropy", **loss_config: float) -> Future[ForwardResult]:
        """Adds the gradients of the summed loss to the adapter's pending ones."""
        return await self.send(Op.FORWARD_BACKWARD, Forward(tuple(data), loss_fn, loss_config))

    async def optim_step(self, **adam: float) -> Future[OptimStepResult]:
        """`adam`: fields of `state.requests.OptimStep`."""
        return await self.send(Op.OPTIM_STEP, OptimStep(**adam))

    async def sample(self, prompt: Array, **params: Any) -> Future[SampleResult]:
        """Samples from the adapter as of its requests before this one. `params`: fields of `state.requests.Sample`."""
        return await self.send(Op.SAMPLE, Sample(tensor(prompt, "int32"), **params))

    async def save_state(self, name: str, *, overwrite: bool = False) -> Future[SaveResult]:
        return await self.send(Op.SAVE_STATE, SaveState(name, overwrite))

    async def load_state(self, name: str, *, adapter: str = "", optimizer: bool = True) -> Future[Done]:
        return await self.send(Op.LOAD_STATE, LoadState(name, adapter, optimizer))

    async def save_weights_for_sampler(self, name: str) -> Future[SaveResult]:
        return await self.send(Op.SAVE_WEIGHTS_FOR_SAMPLER, SaveWeightsForSampler(name))

    async def unload(self) -> Future[Done]:
        return await self.send(Op.UNLOAD, Unload())


# --- the sync face ------------------------------------------------------------------------------------------------


class SyncFuture(Generic[Result]):
    def __init__(self, portal: BlockingPortal, future: Future[Result]) -> None:
        self._portal, self._future = portal, future
        self.request_id = future.request_id

    def result(self, timeout_s: float | None = None) -> Result:
        """Raises the request's typed error, or `TimeoutError`; the request goes on either way."""

        async def wait() -> Result:
            with anyio.fail_after(timeout_s):
                return await self._future

        return self._portal.call(wait)


class SyncAdapter:
    """Every method of `AdapterHandle`, returning `SyncFuture`."""

    def __init__(self, portal: BlockingPortal, handle: AdapterHandle) -> None:
        self._portal, self._handle = portal, handle
        self.name = handle.name

    def __getattr__(self, method: str) -> Callable[..., SyncFuture[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        call = getattr(self._handle, method)

        def send(*args: Any, **kwargs: Any) -> SyncFuture[Any]:
            async def submit() -> Future[Any]:
                future: Future[Any] = await call(*args, **kwargs)
                return future

            return SyncFuture(self._portal, self._portal.call(submit))

        return send


class SyncProducer:
    def __init__(self, portal: BlockingPortal, producer: Producer) -> None:
        self._portal, self._producer = portal, producer

    @staticmethod
    @contextmanager
    def connect(url: str, *, fleet: str, tenant: str) -> Iterator[SyncProducer]:
        with contextlib.ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            manager: AbstractContextManager[Producer] = portal.wrap_async_context_manager(Producer.connect(url, fleet=fleet, tenant=tenant))
            yield SyncProducer(portal, stack.enter_context(manager))

    def create_adapter(self, name: str, **options: Any) -> SyncAdapter:
        async def create() -> AdapterHandle:
            return await self._producer.create_adapter(name, **options)

        return SyncAdapter(self._portal, self._portal.call(create))

    def adapter(self, name: str) -> SyncAdapter:
        return SyncAdapter(self._portal, self._portal.call(self._producer.adapter, name))

    def cancel(self, request_id: str) -> Done:
        return self._portal.call(self._producer.cancel, request_id)


__all__ = ["AdapterHandle", "Future", "HotdeskError", "Producer", "SyncProducer", "datum", "tensor", "values"]
