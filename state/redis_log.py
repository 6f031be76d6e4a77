"""The Redis store (Redis 7+ or Valkey). Keys share the hash tag `{fleet}`, so a fleet lives on one cluster slot:

    {fleet}:requests          intake stream: producers append, the leader takes
    {fleet}:log               the event log: only the leader appends, through `_COMMIT`
    {fleet}:results:TENANT    results stream: what a tenant's producers read
    {fleet}:blob:SHA256       large request bodies; {fleet}:bodies is the set of their digests
    {fleet}:trimmed           where the log was trimmed last
    {fleet}:epoch             the fencing epoch; {fleet}:leader the lease

Positions are our own (log ids, intake ids); no consumer groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Iterator
from typing import Any, NoReturn, cast

import anyio
import anyio.lowlevel
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from state import log_id as ids
from state.errors import Busy, Fenced, LogDiverged, LogTruncated
from state.log import Commit, Entry
from state.wire import ANSWER_WITHIN_S, Command, Wire

# ARGV: epoch, after, retention floor id, retention ms, then five counted lists: events (id, data), taken (intake id),
# forget (digest), blobs (digest, intake id), results (tenant, id, payload, first id). One script, so that a crash of anybody cannot split
# "the request's event is in the log" from "its intake entry is gone" or "its result can be read".
_COMMIT = """
local epoch = redis.call('GET', KEYS[1]) or '0'
if epoch ~= ARGV[1] then return {'fenced', epoch} end
local tail = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local last = tail[1] and tail[1][1] or '0-0'
if last ~= ARGV[2] then return {'diverged', last} end
local at = 5
local function list(width, act)
  local count = tonumber(ARGV[at])
  at = at + 1
  for _ = 1, count do act(at); at = at + width end
end
local events = at
at = at + 1 + 2 * tonumber(ARGV[at])
local taken = at
at = at + 1 + tonumber(ARGV[at])
list(1, function(i)
  redis.call('UNLINK', KEYS[4] .. ARGV[i])
  redis.call('SREM', KEYS[6], ARGV[i])
end)
list(2, function(i)
  local entry = redis.call('XRANGE', KEYS[3], ARGV[i + 1], ARGV[i + 1])
  if entry[1] then
    local fields = entry[1][2]
    for f = 1, #fields, 2 do
      if fields[f] == 'b' then
        redis.call('SET', KEYS[4] .. ARGV[i], fields[f + 1])
        redis.call('SADD', KEYS[6], ARGV[i])
      end
    end
  end
end)
list(4, function(i)
  local key, payload = KEYS[5] .. ARGV[i], ARGV[i + 2]
  if ARGV[i + 3] ~= '' then
    local first = redis.call('XRANGE', key, ARGV[i + 3], ARGV[i + 3])
    if first[1] then payload = first[1][2][2] end
  end
  -- a commit that is sent again after its answer was lost finds its results already there; an id behind the stream's end (a clock that
  -- stepped back between two leaders) is replaced by the server's own
  local added = redis.pcall('XADD', key, 'MINID', '~', ARGV[3], ARGV[i + 1], 'r', payload)
  if added.err and not redis.call('XRANGE', key, ARGV[i + 1], ARGV[i + 1])[1] then
    redis.call('XADD', key, 'MINID', '~', ARGV[3], '*', 'r', payload)
  end
  redis.call('PEXPIRE', key, 2 * tonumber(ARGV[4]))
end)
at = events
list(2, function(i) redis.call('XADD', KEYS[2], ARGV[i], 'e', ARGV[i + 1]) end)
at = taken
list(1, function(i) redis.call('XDEL', KEYS[3], ARGV[i]) end)
return {'ok', last}
"""
# KEYS: epoch, lease. ARGV: holder, lease ms.
_LEAD = """
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return redis.call('INCR', KEYS[1])
"""
# KEYS: epoch, lease. ARGV: epoch, holder, lease ms.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""
# KEYS: epoch, log, trimmed. ARGV: epoch, first id that stays.
_TRIM = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[3], ARGV[2])
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
return 1
"""
_RESIGN = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


MOST_INTAKE = 65_536  # entries that wait for a daemon that is away or slow; beyond it a producer is told to wait
_Entries = list[tuple[bytes, dict[bytes, bytes]]]
#: Answers of a server that is there but cannot serve now; anything else it answers is a fault of ours.
PASSING = ("READONLY", "OOM", "LOADING", "MISCONF", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "BUSY")


def is_passing(error: Exception) -> bool:
    """Whether waiting may help: no connection, or an answer of the kinds in `PASSING`."""
    if isinstance(error, OutOfMemoryError | ReadOnlyError | MasterDownError | ClusterDownError | TryAgainError):
        return True
    if isinstance(error, ResponseError):
        return any(word in str(error)[:200] for word in PASSING)
    return isinstance(error, RedisError | OSError)


class _Append:
    """One entry on its way to the intake."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.sent: anyio.Event | None = None  # set once the round trip that it goes with is over
        self.answer: bytes | Exception = RedisConnectionError("the round trip did not end")  # a lost one is sent again by the caller


class RedisLog:
    """One connection for commands, one more for each blocking reader: bounded whatever the number of waiting futures."""

    def __init__(self, client: redis.Redis, fleet: str, result_retention_ms: int = 600_000, wait_aof_ms: int = 0) -> None:
        self.wait_aof_ms = wait_aof_ms
        self.client = client
        self.fleet = fleet
        self.result_retention_ms = result_retention_ms
        tag = f"{{{fleet}}}"
        self.requests, self.log, self.epoch_key, self.lease = f"{tag}:requests", f"{tag}:log", f"{tag}:epoch", f"{tag}:leader"
        self.blob_prefix, self.bodies_key, self.results_prefix = f"{tag}:blob:", f"{tag}:bodies", f"{tag}:results:"
        self.trimmed_key = f"{tag}:trimmed"
        self._commit_sha = hashlib.sha1(_COMMIT.encode(), usedforsecurity=False).hexdigest()
        self._lead = client.register_script(_LEAD)
        self._renew = client.register_script(_RENEW)
        self._resign = client.register_script(_RESIGN)
        self._trim = client.register_script(_TRIM)
        self._wire = Wire(client.connection_pool)
        self._idle_readers: list[Wire] = []
        self._appends: list[_Append] = []  # that wait for their round trip
        self._intake_length = 0  # as of the last submit

    @staticmethod
    def connect(url: str, fleet: str, result_retention_ms: int = 600_000, wait_aof_ms: int = 0) -> RedisLog:
        """`url`: redis://, rediss:// (TLS) or unix://, with user and password where the server has ACL users.

        `wait_aof_ms`: where the server syncs once a second only, `submit` asks it (WAITAOF) to say that the request is on disk, and waits
        up to this long.
        """
        client = redis.Redis.from_url(
            url,
            max_connections=8,
            socket_connect_timeout=5,
            retry=Retry(NoBackoff(), 0),  # the client must not repeat a commit behind our back; callers wait and look first
        )
        return RedisLog(client, fleet, result_retention_ms, wait_aof_ms)

    async def commit(self, epoch: int, commit: Commit) -> None:
        newest = max([commit.after, *(i for i, _ in commit.events), *(r.log_id for r in commit.results)])
        floor = ids.make(max(0, ids.ms_of(newest) - self.result_retention_ms))
        keys = [self.epoch_key, self.log, self.requests, self.blob_prefix, self.results_prefix, self.bodies_key]
        args: list[bytes | str | int] = [epoch, ids.text(commit.after), ids.text(floor), self.result_retention_ms, *_flat(commit)]
        try:
            status, detail = await self._wire.call("EVALSHA", self._commit_sha, len(keys), *keys, *args)
        except NoScriptError:
            status, detail = await self._wire.call("EVAL", _COMMIT, len(keys), *keys, *args)
        if status == b"fenced":
            self._fenced(epoch, int(detail))
        if status == b"diverged":
            raise LogDiverged(f"the log ends at {detail.decode()}, this daemon's at {ids.text(commit.after)}")

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        entries = cast("_Entries", await self.client.xrange(self.log, min=f"({ids.text(after)}", max="+", count=limit))
        return [(ids.parse(entry_id), fields[b"e"]) for entry_id, fields in entries]

    async def bounds(self) -> tuple[int, int]:
        first = cast("_Entries", await self.client.xrange(self.log, count=1))
        last = cast("_Entries", await self.client.xrevrange(self.log, count=1))
        return (ids.parse(first[0][0]), ids.parse(last[0][0])) if first and last else (0, 0)

    async def trimmed(self) -> int:
        return ids.parse(await self.client.get(self.trimmed_key) or b"0-0")

    async def fence(self) -> int:
        return int(await self.client.incr(self.epoch_key))

    async def submit(self, header: bytes, body: bytes) -> str:
        if self._intake_length >= MOST_INTAKE:
            self._intake_length = int(await self.client.xlen(self.requests))
            if self._intake_length >= MOST_INTAKE:
                raise Busy(f"{self._intake_length} requests wait for the daemon to take them in", retry_after_ms=1000)
        append: Command = ("XADD", self.requests, "*", "h", header, "b", body) if body else ("XADD", self.requests, "*", "h", header)
        if not self.wait_aof_ms:
            return await self._append_together(append)
        async with self.client.client() as one:  # WAITAOF speaks of what its own connection wrote
            intake_id = (await cast("Awaitable[bytes]", cast(Any, one).execute_command(*append))).decode()
            local, _ = await cast("Awaitable[list[int]]", cast(Any, one).execute_command("WAITAOF", 1, 0, self.wait_aof_ms))
            if not local:
                raise RedisTimeout(f"the server did not sync {intake_id} within {self.wait_aof_ms} ms")
            self._intake_length = int(await self.client.xlen(self.requests))
            return intake_id

    async def _append_together(self, command: Command) -> str:
        """Appends that begin at the same time share a round trip, and the server's sync of it, in the order in which they began. It also
        tells how full the intake is, which the next submit heeds."""
        mine = _Append(command)
        self._appends.append(mine)
        await anyio.lowlevel.checkpoint()  # whoever else is about to append joins
        if mine.sent is None:
            together, self._appends = self._appends, []
            sent = anyio.Event()
            for append in together:
                append.sent = sent
            try:
                commands: list[Command] = [*(append.command for append in together), ("XLEN", self.requests)]
                if len(together) == 1:
                    answers = await self._wire.calls(commands)
                else:  # as a transaction the reader of the intake is woken once, after all of them, and takes them in with one commit
                    *queued, executed = await self._wire.calls([("MULTI",), *commands, ("EXEC",)])
                    refused = next((answer for answer in queued if isinstance(answer, Exception)), executed)
                    answers = executed if isinstance(executed, list) else [refused] * len(commands)
                for append, answer in zip(together, answers):
                    append.answer = answer
                if isinstance(answers[-1], int):
                    self._intake_length = answers[-1]
            finally:
                sent.set()
        else:
            await mine.sent.wait()
        if isinstance(mine.answer, Exception):
            raise mine.answer
        return mine.answer.decode()

    @staticmethod
    def _fenced(epoch: int, leading: int) -> NoReturn:
        if leading < epoch:
            raise LogTruncated(f"the server knows epoch {leading} where epoch {epoch} was elected: it lost data or is another one")
        raise Fenced(f"epoch {epoch} tried to write, epoch {leading} leads")

    async def read_intake(self, after: str, limit: int, block_ms: int) -> list[Entry]:
        entries = await self._read_stream(self.requests, after, limit, block_ms)
        return [Entry(entry_id.decode(), fields.get(b"h", b""), fields.get(b"b", b"")) for entry_id, fields in entries]

    async def read_results(self, tenant: str, after: int, limit: int, block_ms: int) -> list[tuple[int, bytes]]:
        entries = await self._read_stream(self.results_prefix + tenant, ids.text(after), limit, block_ms)
        return [(ids.parse(entry_id), fields[b"r"]) for entry_id, fields in entries]

    async def _read_stream(self, key: str, after: str, limit: int, block_ms: int) -> _Entries:
        """Its wire is used again only where it was read to the end: on another, a read that was given up would hold the next one up."""
        wire = self._idle_readers.pop() if self._idle_readers else Wire(self.client.connection_pool)
        try:
            command: Command = ("XREAD", "COUNT", limit, "BLOCK", block_ms, "STREAMS", key, after)
            answer = await wire.call(*command, within_s=ANSWER_WITHIN_S + block_ms / 1000)
        except BaseException:
            await wire.close()
            raise
        self._idle_readers.append(wire)
        return _only_stream(answer)

    async def last_result(self, tenant: str) -> int:
        last = cast("_Entries", await self.client.xrevrange(self.results_prefix + tenant, count=1))
        return ids.parse(last[0][0]) if last else 0

    async def blob(self, digest: str) -> bytes | None:
        return cast("bytes | None", await self._wire.call("GET", self.blob_prefix + digest))

    async def bodies(self) -> set[str]:
        return {digest.decode() for digest in await cast("Awaitable[set[bytes]]", self.client.smembers(self.bodies_key))}

    async def trim(self, epoch: int, first: int) -> None:
        if not await self._trim(keys=[self.epoch_key, self.log, self.trimmed_key], args=[epoch, ids.text(first)]):
            self._fenced(epoch, int(await self.client.get(self.epoch_key) or 0))

    async def lead(self, holder: str, lease_ms: int) -> int | None:
        epoch = int(await self._lead(keys=[self.epoch_key, self.lease], args=[holder, lease_ms]))
        return epoch or None

    async def renew(self, epoch: int, holder: str, lease_ms: int) -> bool:
        return bool(await self._renew(keys=[self.epoch_key, self.lease], args=[epoch, holder, lease_ms]))

    async def resign(self, holder: str) -> None:
        await self._resign(keys=[self.lease], args=[holder])

    async def leader(self) -> str:
        holder = await cast("Awaitable[bytes | None]", self.client.get(self.lease))
        return holder.decode() if holder else ""

    async def close(self) -> None:
        for wire in (self._wire, *self._idle_readers):
            await wire.close()
        await self.client.aclose()


def _flat(commit: Commit) -> Iterator[bytes | str | int]:
    """The script's five counted lists."""
    yield len(commit.events)
    for log_id, data in commit.events:
        yield ids.text(log_id)
        yield data
    yield len(commit.taken)
    yield from commit.taken
    yield len(commit.forget)
    yield from commit.forget
    yield len(commit.blobs)
    for digest, intake_id in commit.blobs:
        yield digest
        yield intake_id
    yield len(commit.results)
    for result in commit.results:
        yield result.tenant
        yield ids.text(result.log_id)
        yield result.payload
        yield ids.text(result.first_at) if result.first_at else ""


def _only_stream(answer: Any) -> _Entries:
    """The entries of a one-stream XREAD, in RESP2 (list of pairs) or RESP3 (map) form."""
    if not answer:
        return []
    entries = next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]
    return [(entry_id, dict(zip(fields[::2], fields[1::2]))) for entry_id, fields in entries]
