"""What tenants gave names to through a front end: sessions, training runs, checkpoints, samplers. Kept beside the log, under the fleet's
prefix; nothing here decides what a request does.

A front end that was killed left no more here than what its clients were told: a checkpoint is entered when its request is sent (`saving`)
and becomes one of the tenant's once that request has ended well.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar, cast

import msgspec
import redis.asyncio as redis


class Session(msgspec.Struct, frozen=True):
    session_id: str
    created_ms: int
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = {}
    display_name: str | None = None
    project_id: str | None = None
    ended: str = ""  # why: success, errored, interrupted, silent


class Run(msgspec.Struct, frozen=True):
    """A model being trained. `first_seq`: of the request in its lane that the client counts as number 0, which made it what it is."""

    model_id: str
    session_id: str
    base_model: str
    rank: int
    created_ms: int
    seed: int = 0
    targets: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = {}
    first_seq: int = 0
    ended: bool = False


class Checkpoint(msgspec.Struct, frozen=True):
    """`path`: tinker://MODEL_ID/KIND/NAME."""

    path: str
    request_id: str
    created_ms: int
    expires_ms: int = 0
    public: bool = False
    user_metadata: dict[str, str] = {}

    @property
    def model_id(self) -> str:
        return self.path.split("/")[2]

    @property
    def kind(self) -> str:
        return self.path.split("/")[3]

    @property
    def name(self) -> str:
        return self.path.split("/")[4]


class Sampler(msgspec.Struct, frozen=True):
    """`path` empty: the base model itself."""

    sampler_id: str
    session_id: str
    base_model: str
    path: str = ""


class Forwarded(msgspec.Struct, frozen=True):
    """A sample that an external engine was asked for, outside the log. `body`: of a `Sample`, in msgpack."""

    sampler: Sampler
    body: bytes
    last_n: int | None = None


Record = TypeVar("Record", Session, Run, Checkpoint, Sampler)
CONNECTIONS = 8
KINDS: dict[type, str] = {Session: "sessions", Run: "runs", Checkpoint: "checkpoints", Sampler: "samplers"}
_ENCODER = msgspec.json.Encoder()


class Catalog:
    """Records by tenant and name. Every call raises the client's errors while the server is away."""

    def __init__(self, client: redis.Redis, fleet: str) -> None:
        self.client = client
        self.prefix = f"{{{fleet}}}:catalog"

    @staticmethod
    def connect(url: str, fleet: str) -> Catalog:
        pool = redis.BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS, timeout=None, socket_connect_timeout=5)
        return Catalog(redis.Redis(connection_pool=pool), fleet)

    async def close(self) -> None:
        await self.client.aclose()

    def _key(self, tenant: str, kind: type) -> str:
        return f"{self.prefix}:{tenant}:{KINDS[kind]}"

    async def put(self, tenant: str, name: str, record: Record) -> None:
        await _of(self.client.hset(self._key(tenant, type(record)), name, _ENCODER.encode(record)))

    async def get(self, tenant: str, kind: type[Record], name: str) -> Record | None:
        found = await _of(self.client.hget(self._key(tenant, kind), name))
        return msgspec.json.decode(found, type=kind) if found is not None else None

    async def all(self, tenant: str, kind: type[Record]) -> list[Record]:
        """In no order."""
        return [msgspec.json.decode(found, type=kind) for found in await _of(self.client.hvals(self._key(tenant, kind)))]

    async def drop(self, tenant: str, kind: type[Record], name: str) -> None:
        await _of(self.client.hdel(self._key(tenant, kind), name))

    # --- checkpoints that are being written ---------------------------------------------------------------------------

    async def saving(self, tenant: str, checkpoint: Checkpoint) -> None:
        await _of(self.client.hset(f"{self.prefix}:{tenant}:saving", checkpoint.request_id, _ENCODER.encode(checkpoint)))

    async def being_saved(self, tenant: str) -> list[Checkpoint]:
        found = await _of(self.client.hvals(f"{self.prefix}:{tenant}:saving"))
        return [msgspec.json.decode(one, type=Checkpoint) for one in found]

    async def saved(self, tenant: str, request_id: str, well: bool) -> None:
        """The request ended. Idempotent."""
        key = f"{self.prefix}:{tenant}:saving"
        found = await _of(self.client.hget(key, request_id))
        if found is not None:
            if well:
                checkpoint = msgspec.json.decode(found, type=Checkpoint)
                await self.put(tenant, checkpoint.path, checkpoint)
            await _of(self.client.hdel(key, request_id))

    # --- samples outside the log --------------------------------------------------------------------------------------

    async def forwarded(self, tenant: str, short_id: str, asked: Forwarded, kept_s: float) -> Forwarded:
        """What was asked first under this id. It is forgotten after `kept_s`."""
        key, body = f"{self.prefix}:{tenant}:{short_id}", msgspec.msgpack.encode(asked)
        first = await _of(self.client.set(key, body, nx=True, get=True, px=int(1000 * kept_s)))
        return msgspec.msgpack.decode(first, type=Forwarded) if first is not None else asked

    async def forwarded_as(self, tenant: str, short_id: str) -> Forwarded | None:
        found = await _of(self.client.get(f"{self.prefix}:{tenant}:{short_id}"))
        return msgspec.msgpack.decode(found, type=Forwarded) if found is not None else None

    # --- who is there -------------------------------------------------------------------------------------------------

    async def beat(self, tenant: str, session_id: str, now_ms: int) -> None:
        await _of(self.client.zadd(f"{self.prefix}:beats", {f"{tenant}/{session_id}": now_ms}))

    async def silent(self, before_ms: int) -> list[tuple[str, str]]:
        """(tenant, session) of sessions whose last beat was before."""
        found = await _of(self.client.zrangebyscore(f"{self.prefix}:beats", 0, before_ms))
        return [cast("tuple[str, str]", tuple(one.decode().split("/"))) for one in found]

    async def forget_beat(self, tenant: str, session_id: str) -> None:
        await _of(self.client.zrem(f"{self.prefix}:beats", f"{tenant}/{session_id}"))

    async def used(self, tenant: str, sampler: str, now_ms: int) -> None:
        """A sampler's adapter was used."""
        await _of(self.client.zadd(f"{self.prefix}:samplers", {f"{tenant}/{sampler}": now_ms}))

    async def is_used(self, tenant: str, sampler: str) -> bool:
        """Whether its adapter was not freed since it was used."""
        return await _of(self.client.zscore(f"{self.prefix}:samplers", f"{tenant}/{sampler}")) is not None

    async def unused(self, before_ms: int) -> list[tuple[str, str]]:
        found = await _of(self.client.zrangebyscore(f"{self.prefix}:samplers", 0, before_ms))
        return [cast("tuple[str, str]", tuple(one.decode().split("/"))) for one in found]

    async def generation(self, tenant: str, sampler: str) -> int:
        """How often the sampler's adapter was freed: its lane must be another one afterwards."""
        found = await _of(self.client.hget(f"{self.prefix}:{tenant}:generations", sampler))
        return int(found or 0)

    async def free(self, tenant: str, sampler: str) -> None:
        await _of(self.client.hincrby(f"{self.prefix}:{tenant}:generations", sampler, 1))
        await _of(self.client.zrem(f"{self.prefix}:samplers", f"{tenant}/{sampler}"))

    async def tenant_of(self, key_digest: str) -> str | None:
        """Of an API key, by the sha256 of it in hex."""
        found = await _of(self.client.hget(f"{self.prefix}:keys", key_digest))
        return found.decode() if found is not None else None


async def _of(call: Any) -> Any:
    """The client's methods are typed for its sync face as well."""
    return await cast("Awaitable[Any]", call)
