"""The daemon: the shell around `core`. Everything here awaits something; nothing here decides anything.

    intake reader ─┐
    worker groups ─┼─> inbox ─> core.handle ─> commit (one atomic step) ─> dispatch to worker groups
    clock ─────────┘

Write-ahead: a step is in the log before a worker sees it, an outcome before its future resolves. While the server is away the loop
waits with back-off and sends the same commit again; a commit that was applied although its answer was lost is recognised.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from redis.exceptions import RedisError

from scheduler import state_snapshots
from scheduler.core import Batch, Core, Dispatch, Drain, Finished, Input, Joined, Kept, Lost, Tick
from scheduler.validation import Limits
from state import log_id as ids
from state.archive import Archive, History
from state.errors import Fenced, HotdeskError, LogDiverged, LogTruncated, StaleEpoch, WorkerFailed, WorkersLostError, error_from
from state.events import Request, Settings, Step, StepKind
from state.files import Disk
from state.fleet import encode as encode_fleet
from state.log import Commit, Entry, Store
from state.plan import fit_together
from state.redis_log import is_passing
from state.requests import Op
from workers.contract import Call, StepOutcome, WorkerGroup, under_way

log = structlog.get_logger("hotdesk")
T = TypeVar("T")

INBOX = 1024  # inputs that wait for the core; beyond it the readers pause, and the intake keeps the rest
ROUND = 1024  # most inputs of one round, hence of one commit
INBOX_BYTES = 64 * 2**20  # of bodies among them; one read of the intake may lie beyond it
INTAKE_READ = 64  # entries; fewer where the last ones were large
INTAKE_BLOCK_MS = 1000
TICK_S = 0.5
BODY_CACHE_BYTES = 64 * 2**20
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 5.0
AHEAD = 2  # calls that a group has at once: one that runs, and one that waits
HEARTBEAT_S = 2.0  # how often an idle group is asked whether it lives
HOUSE_EVERY_S = 60.0  # between two snapshots of the state, and what follows them
HOUSE_EVERY_EVENTS = 20_000  # so that a start takes less than a second, however busy the fleet was
DUMP = "state-dump.msgpack"


class Daemon:
    """One candidate for leading a fleet. `run` returns after a clean shutdown and raises `OperatorError` for what it cannot settle."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[WorkerGroup],
        *,
        settings: Settings,
        limits: Limits,
        disk: Disk | None = None,
        lease_ms: int = 10_000,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        holder: str = "",
        house_every_s: float = HOUSE_EVERY_S,
        run_blocking: Callable[[Callable[[], Any]], Awaitable[Any]] = anyio.to_thread.run_sync,
    ) -> None:
        """`disk`: where `snapshots` and `archive` are kept; without one, nothing is kept and the log is never trimmed."""
        self.store = store
        self.groups = {group.name: group for group in groups}
        self.settings = settings
        self.limits = limits
        self.disk = disk
        self.lease_ms = lease_ms
        self.now_ms = now_ms
        self.holder = holder or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"  # containers share names and pids
        self.house_every_s = house_every_s
        self.run_blocking = run_blocking
        self.epoch = 0
        self.ready = anyio.Event()
        self.core: Core
        self._tasks: TaskGroup
        self._inbox_in: MemoryObjectSendStream[Input]
        self._inbox_out: MemoryObjectReceiveStream[Input]
        self._plans: dict[str, MemoryObjectSendStream[Dispatch]] = {}
        self._bodies: OrderedDict[str, bytes] = OrderedDict()
        self._body_bytes = 0
        self._inbox_bytes = 0
        self._inbox_has_room = anyio.Event()
        self._intake_scope = anyio.CancelScope()
        self._runner_scopes: dict[str, tuple[anyio.CancelScope, str]] = {}
        self._server_away = False
        self._committed = 0  # log id up to which `core.fleet` is known to be in the log
        self._house_busy = False

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, handle_signals: bool = False) -> None:
        self._inbox_in, self._inbox_out = anyio.create_memory_object_stream[Input](INBOX)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            if handle_signals:
                tasks.start_soon(self._signals)
            await self._lead()
            tasks.start_soon(self._keep_lease)
            tasks.start_soon(self._read_intake)
            tasks.start_soon(self._ticks)
            for name in self.groups:
                sender, receiver = anyio.create_memory_object_stream[Dispatch](1)
                self._plans[name] = sender
                tasks.start_soon(self._run_group, name, receiver)
            self.ready.set()
            try:
                await self._rounds()
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(10):
                    await self._leave()
            tasks.cancel_scope.cancel()

    def drain(self) -> None:
        """Begins a clean shutdown: running turns finish, groups are put to rest, then `run` returns. The intake keeps what is new."""
        self._intake_scope.cancel()
        self._tasks.start_soon(self._inbox_in.send, Drain())

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) as signals:
            draining = False
            async for number in signals:
                if number == signal.SIGUSR1:
                    self.dump()
                elif draining and number == signal.SIGINT:
                    log.warning("forced", detail="second interrupt: leaving without parking; the log has everything that was acknowledged")
                    self._tasks.cancel_scope.cancel()
                elif not self.ready.is_set() or self._server_away:
                    self._tasks.cancel_scope.cancel()  # nothing can be committed, so nothing can be put to rest
                elif not draining:
                    draining = True
                    log.info("draining", signal=signal.Signals(number).name, detail="interrupt again to force")
                    self.drain()

    def dump(self) -> None:
        """Writes the running state where `hotdesk replay` compares it with a fold of the log."""
        if self.disk is not None:
            self.disk("").write(DUMP, encode_fleet(self.core.fleet))
            log.info("state_dumped", file=DUMP, log_id=ids.text(self.core.fleet.log_id))

    async def _lead(self) -> None:
        """Takes the lease (waiting as a standby while another daemon holds it), folds snapshot and tail, opens the term."""
        waiting = False
        while True:
            epoch = await self._patiently(lambda: self.store.lead(self.holder, self.lease_ms))
            if epoch is not None:
                break
            if not waiting:
                log.warning(
                    "standby",
                    leader=await self._patiently(self.store.leader),
                    detail="another daemon leads this fleet; waiting for its lease to end",
                )
                waiting = True
            await anyio.sleep(self.lease_ms / 4000)
        self.epoch = epoch
        began = anyio.current_time()
        snapshots = self.disk("snapshots") if self.disk is not None else None
        history = History(Archive(self.disk("archive")) if self.disk is not None else None, self.store)
        async with anyio.create_task_group() as holding:  # a long tail takes longer to fold than a lease lasts
            holding.start_soon(self._keep_lease)
            fleet, tail = await self._patiently(lambda: state_snapshots.load_fleet(snapshots, history, _damaged))
            holding.cancel_scope.cancel()
        self.core = Core(fleet, self.limits)
        events = fleet.events
        await self._commit(self.core.lead(self.now_ms(), epoch, self.holder, self.settings).commit)
        took_ms = round(1000 * (anyio.current_time() - began))
        log.info(
            "leading",
            epoch=epoch,
            holder=self.holder,
            events_before=events,
            events_folded=tail,
            took_ms=took_ms,
            log_id=ids.text(fleet.log_id),
        )
        self._begin_house_keeping()

    async def _leave(self) -> None:
        if self.epoch and self._committed == self.core.fleet.log_id:
            await self._write_snapshot(self._committed, encode_fleet(self.core.fleet))
        for group in self.groups.values():
            try:
                await group.close()
            except Exception as error:
                log.warning("group_close_failed", group=group.name, error=str(error))
        try:
            await self.store.resign(self.holder)
        except RedisError as error:
            log.warning("resign_failed", error=str(error))

    # --- house-keeping ------------------------------------------------------------------------------------------------

    def _begin_house_keeping(self) -> None:
        """Between two rounds, while the state is exactly what the log holds: it is encoded here and now, and written beside the rounds."""
        if self.disk is None or self._house_busy:
            return
        assert self.core.fleet.log_id == self._committed, "the state is ahead of the log"
        self._house_busy = True
        self._tasks.start_soon(self._keep_house, self.disk, self._committed, encode_fleet(self.core.fleet))

    async def _keep_house(self, disk: Disk, log_id: int, body: bytes) -> None:
        """Snapshot, archive, trim, forget, in this order: nothing is dropped before what replaces it is durable.

        Beside the rounds, so that a slow disk stops nobody; what fails is named and tried again next time."""
        try:
            if await self._write_snapshot(log_id, body):
                covered = state_snapshots.covered(disk("snapshots"))
                archive = Archive(disk("archive"))
                while segment := await archive.following(self.store, covered):
                    await self.run_blocking(partial(archive.add, segment))
                if covered:
                    await self.store.trim(self.epoch, covered)
                await self._inbox_in.send(Kept(frozenset(await self.store.bodies())))
        except (OSError, RedisError, LogTruncated) as error:
            log.error("house_keeping_failed", error=str(error), detail="nothing was dropped; tried again next time")
        finally:
            self._house_busy = False

    async def _write_snapshot(self, log_id: int, body: bytes) -> bool:
        if self.disk is None:
            return False
        try:
            await self.run_blocking(partial(state_snapshots.write, self.disk("snapshots"), log_id, body))
        except OSError as error:
            log.error("snapshot_failed", error=str(error), detail="the log still has everything; a start will take longer")
            return False
        return True

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def _rounds(self) -> None:
        due, events = anyio.current_time() + self.house_every_s, self.core.fleet.events
        while True:
            inputs: list[Input] = [await self._inbox_out.receive()]
            while len(inputs) < ROUND:
                try:
                    inputs.append(self._inbox_out.receive_nowait())
                except anyio.WouldBlock:
                    break
            self._inbox_bytes -= sum(len(item.body) for item in inputs if isinstance(item, Entry))
            self._inbox_has_room.set()
            batch = self.core.handle(self.now_ms(), inputs)
            self._remember_bodies(batch.commit, inputs)
            await self._round(batch)
            self._replace_broken()
            if self.core.at_rest:
                return
            if anyio.current_time() >= due or self.core.fleet.events - events >= HOUSE_EVERY_EVENTS:
                self._begin_house_keeping()
                due, events = anyio.current_time() + self.house_every_s, self.core.fleet.events

    async def _round(self, batch: Batch) -> None:
        """Write-ahead: what the workers are sent is in the log before."""
        if not batch.commit.empty:
            await self._commit(batch.commit)
        await self._send_out(batch)

    async def _commit(self, commit: Commit) -> None:
        """Until it is in the log. Raises `Fenced` or `LogDiverged`: then this daemon's state is worth nothing and it ends."""
        first = True

        async def attempt() -> None:
            nonlocal first
            try:
                await self.store.commit(self.epoch, commit)
            except LogDiverged:
                # That a newer leader has gone on behind it is no divergence: the next commit is told so, as Fenced.
                if first or not commit.events or await self.store.read(commit.after, len(commit.events)) != commit.events:
                    raise
            finally:
                first = False

        await self._patiently(attempt)
        if commit.events:
            self._committed = commit.events[-1][0]

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call()` again with growing pauses while the server is away, loading, read-only or out of memory; says so once."""
        pause = RETRY_FIRST_S
        while True:
            try:
                result = await call()
            except (RedisError, OSError) as error:
                await anyio.lowlevel.checkpoint()  # the client turns a cancelled read into a connection error
                if not is_passing(error):
                    raise
                if not self._server_away:
                    self._server_away = True
                    log.warning("server_away", error=str(error), detail="waiting with back-off; nothing acknowledged is lost")
                await anyio.sleep(pause)
                pause = min(2 * pause, RETRY_MOST_S)
            else:
                if self._server_away:
                    self._server_away = False
                    log.info("server_back")
                return result

    async def _send_out(self, batch: Batch) -> None:
        for dispatch in batch.dispatches:
            await self._plans[dispatch.group].send(dispatch)

    def _replace_broken(self) -> None:
        """Ends the runner of a group whose workers reported what cannot be: it kills them and starts new ones."""
        for group in self.core.fleet.groups.values():
            scope, incarnation = self._runner_scopes.get(group.name, (None, ""))
            given_up = group.lost == incarnation and not group.incarnation
            if scope is not None and not scope.cancel_called and (group.broken or given_up):
                log.error("group_diverged", group=group.name, difference=group.broken, detail="its workers are replaced")
                scope.cancel()

    # --- readers ----------------------------------------------------------------------------------------------------

    async def _read_intake(self) -> None:
        after = "0-0"  # what is in the intake was not taken yet: taken entries are removed with the commit that takes them
        most = INTAKE_READ
        with self._intake_scope:
            while True:
                entries = await self._patiently(partial(self.store.read_intake, after, most, INTAKE_BLOCK_MS))
                for entry in entries:
                    while self._inbox_bytes > INBOX_BYTES:
                        self._inbox_has_room = anyio.Event()
                        await self._inbox_has_room.wait()
                    after = entry.intake_id
                    self._inbox_bytes += len(entry.body)
                    await self._put(entry)
                if entries:
                    largest = max(len(entry.body) for entry in entries)
                    most = max(1, min(INTAKE_READ, INBOX_BYTES // max(1, largest)))

    async def _put(self, item: Input) -> None:
        """Without a pause where there is room: what one read of the intake brought, or steps that took no time, share a round and so a
        commit. A pause after each would begin the round with the first."""
        try:
            self._inbox_in.send_nowait(item)
        except anyio.WouldBlock:
            await self._inbox_in.send(item)

    async def _ticks(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            await self._inbox_in.send(Tick())

    async def _keep_lease(self) -> None:
        while True:
            await anyio.sleep(self.lease_ms / 3000)
            try:
                kept = await self.store.renew(self.epoch, self.holder, self.lease_ms)
            except (RedisError, OSError):
                continue  # the commit loop says that the server is away; fencing decides who leads afterwards
            if not kept:
                raise Fenced(f"epoch {self.epoch} of {self.holder} lost the lease to another daemon")

    # --- worker groups ------------------------------------------------------------------------------------------------

    async def _run_group(self, name: str, plans: MemoryObjectReceiveStream[Dispatch]) -> None:
        """Starts a group, works off its plans, and starts it again when it died or diverged."""
        group = self.groups[name]
        pause = RETRY_FIRST_S
        while True:
            incarnation = ""
            reason = "its device differed from what its steps should have made of it"
            with anyio.CancelScope() as scope:
                try:
                    status = await group.start(self.epoch)
                    known = self.core.fleet.groups.get(name)
                    if known is not None and known.lost == status.incarnation:
                        raise WorkersLostError("the workers that answer were given up before: their state counts for nothing")
                    incarnation, pause = status.incarnation, RETRY_FIRST_S
                    log.info("workers_joined", group=name, incarnation=incarnation, backend=status.spec.backend)
                    await self._inbox_in.send(Joined(name, status))
                    self._runner_scopes[name] = (scope, incarnation)
                    await self._work(group, incarnation, plans)
                except StaleEpoch as error:
                    raise Fenced(f"epoch {self.epoch} of {self.holder}: a newer leader commands the workers of {name!r}") from error
                except HotdeskError as error:
                    reason = str(error)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
            self._runner_scopes.pop(name, None)
            log.error("workers_lost", group=name, incarnation=incarnation, reason=reason, retry_in_s=pause)
            if incarnation:
                await self._inbox_in.send(Lost(name, incarnation, reason))
            with anyio.move_on_after(10):
                await group.close(kill=True)
            await anyio.sleep(pause)
            pause = min(2 * pause, RETRY_MOST_S)

    async def _work(self, group: WorkerGroup, incarnation: str, plans: MemoryObjectReceiveStream[Dispatch]) -> None:
        while True:
            dispatch = None
            with anyio.move_on_after(HEARTBEAT_S):
                dispatch = await plans.receive()
            if dispatch is None:
                await group.status(self.epoch)
                continue
            if dispatch.incarnation != incarnation:
                continue  # planned for workers that are gone
            after = covered = 0
            ahead: deque[asyncio.Future[StepOutcome]] = deque()
            for index, step in enumerate(dispatch.steps):
                body = await self._body(dispatch.requests.get(step.request_id)) if step.kind is StepKind.EXECUTE else b""
                if body is None:
                    missing = WorkerFailed(f"the body of {step.request_id} is not beside the log any more")
                    ahead.append(under_way(_at_once(StepOutcome(step.id, error=missing.info))))
                else:
                    beside: tuple[bytes, ...] = ()
                    if index >= covered and _samples(step):
                        beside = await self._sampled_with(dispatch, index)
                        covered = index + 1 + len(beside)
                    ahead.append(group.apply(Call(self.epoch, step, after, body, beside)))
                after = step.id
                if len(ahead) == AHEAD:
                    await self._tell(group, incarnation, ahead.popleft())
            while ahead:
                await self._tell(group, incarnation, ahead.popleft())

    async def _sampled_with(self, dispatch: Dispatch, index: int) -> tuple[bytes, ...]:
        """Bodies of the samples right behind the one at `index` in a plan that the sampler computes side by side with it."""
        first, *others = dispatch.steps[index:]
        spec = self.core.fleet.groups[dispatch.group].spec
        assert spec is not None
        together = [dispatch.requests[first.request_id]]
        bodies: list[bytes] = []
        for step in takewhile(lambda step: _samples(step) and step.adapter == first.adapter, others):
            together.append(dispatch.requests[step.request_id])
            body = await self._body(together[-1]) if fit_together(spec, together) else None
            if body is None:
                break
            bodies.append(body)
        return tuple(bodies)

    async def _tell(self, group: WorkerGroup, incarnation: str, coming: asyncio.Future[StepOutcome]) -> None:
        outcome = await coming
        if outcome.error is not None and outcome.error.code == StaleEpoch.__name__:
            raise error_from(outcome.error)
        await self._put(Finished(group.name, incarnation, outcome))

    async def _body(self, request: Request | None) -> bytes | None:
        """None where it is lost, which must not happen: blobs stay while the log may need them."""
        if request is None or request.body or not request.size:
            return request.body if request is not None else b""
        cached = self._bodies.get(request.digest)
        return cached if cached is not None else await self._patiently(lambda: self.store.blob(request.digest))

    def _remember_bodies(self, commit: Commit, inputs: Sequence[Input]) -> None:
        """Keeps recent large bodies at hand, within `BODY_CACHE_BYTES`, so that running them needs no read from the server."""
        if not commit.blobs:
            return
        bodies = {item.intake_id: item.body for item in inputs if isinstance(item, Entry)}
        for digest, intake_id in commit.blobs:
            if digest not in self._bodies:
                self._bodies[digest] = bodies[intake_id]
                self._body_bytes += len(bodies[intake_id])
            self._bodies.move_to_end(digest)
        while self._body_bytes > BODY_CACHE_BYTES:
            _, body = self._bodies.popitem(last=False)
            self._body_bytes -= len(body)


def _samples(step: Step) -> bool:
    return step.kind is StepKind.EXECUTE and step.op == Op.SAMPLE and not step.redo


async def _at_once(outcome: StepOutcome) -> StepOutcome:
    return outcome


def _damaged(name: str, error: Exception) -> None:
    log.error("snapshot_damaged", file=name, error=str(error), detail="the one before it is used, and the log from there")
