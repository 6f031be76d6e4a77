"""Samplers of fixed versions, behind one protocol: the worker group's own (`GroupVersions`), an external engine's (`EngineVersions`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from scheduler.gateway import translate
from scheduler.gateway.answers import Answer, Answers
from scheduler.producer import Producer
from state.catalog import Catalog, Forwarded, Sampler
from state.errors import AdapterExists, HotdeskError, RequestConflict, ResultExpired, UnknownAdapter, UnknownCheckpoint
from state.requests import CreateAdapter, Done, LoadState, Op, Sample, SampleResult, Signature, Unload, decode_body, encode_body
from workers.inference.client import InferenceEngine

log = structlog.get_logger("hotdesk.gateway")

CREATE, LOAD, UNLOAD, FIRST_SAMPLE = 0, 1, 2, 16  # seqs in a sampler's lane
FORWARDED = "fwd:"  # begins the id of a request that is in no lane, and so in no log


class Version(NamedTuple):
    """What a sampler is of. `load` and `directory` are None for the base model itself."""

    name: str
    group: str
    signature: Signature
    load: LoadState | None
    directory: Path | None


class Asked(NamedTuple):
    """`number`: the same for a retry, and for nothing else of this sampler."""

    sampler: Sampler
    number: int
    body: Sample
    last_n: int | None


class Versions(Protocol):
    """One tenant's. A version never changes; what brings or releases it may be run twice, or killed half way."""

    async def bring(self, version: Version) -> str:
        """Where it is served, once it can be sampled from. Raises the loading's error."""
        ...

    async def sample(self, place: str, asked: Asked) -> str:
        """The request's id, without the tenant. Its answer is expected from then on."""
        ...

    async def release(self, name: str) -> None: ...


class GroupVersions:
    """Each an unordered adapter of the worker group, loaded once; samples are requests in its lane."""

    def __init__(self, tenant: str, producer: Producer, catalog: Catalog, ask: Callable[..., Awaitable[str]]) -> None:
        self.tenant, self.producer, self.catalog, self.ask = tenant, producer, catalog, ask

    async def bring(self, version: Version) -> str:
        lane = await self._lane(version.name)
        body = CreateAdapter(version.signature, unordered=True, like=version.group)
        created = await self.producer.send(lane, CREATE, Op.CREATE_ADAPTER, body)
        try:
            await created
        except AdapterExists:
            pass  # brought long ago, and in use since
        if version.load is not None:
            try:
                loaded = await self.producer.send(lane, LOAD, Op.LOAD_STATE, version.load)
                await loaded
            except HotdeskError:
                await self.release(version.name)
                raise
        return lane

    async def sample(self, place: str, asked: Asked) -> str:
        return await self.ask(place, FIRST_SAMPLE + asked.number, Op.SAMPLE, asked.body, last_n=asked.last_n)

    async def release(self, name: str) -> None:
        """Frees the adapter; the next use brings it back, where its checkpoint is still there."""
        try:
            unloaded: Any = await self.producer.send(await self._lane(name), UNLOAD, Op.UNLOAD, Unload())
            done: Done = await unloaded
            log.info("sampler_freed", tenant=self.tenant, adapter=done.adapter)
        except (UnknownAdapter, ResultExpired, RequestConflict):
            pass  # it was not there
        await self.catalog.free(self.tenant, name)

    async def _lane(self, name: str) -> str:
        return f"{name}:{await self.catalog.generation(self.tenant, name)}"


class EngineVersions:
    """Each an adapter that the engine loads by path. Samples are forwarded outside the log; what was asked is kept beside it for as long as
    answers are, so that another gateway asks the engine again for a client that still waits."""

    def __init__(self, tenant: str, group: str, engine: InferenceEngine, catalog: Catalog, answers: Answers) -> None:
        self.tenant, self.group, self.engine, self.catalog, self.answers = tenant, group, engine, catalog, answers

    async def bring(self, version: Version) -> str:
        if version.load is None:
            return ""
        if version.directory is None:
            raise UnknownCheckpoint(f"the files of {version.load.name!r} are not on the gateway's host: the engine could not read them")
        name = self._name(version.name)
        await self.engine.load(name, version.directory)
        return name

    async def sample(self, place: str, asked: Asked) -> str:
        short_id = f"{FORWARDED}{self.group}:{asked.number}"
        mine = Forwarded(asked.sampler, encode_body(asked.body), asked.last_n)
        first = await self.catalog.forwarded(self.tenant, short_id, mine, self.answers.kept_s)
        if first.body != mine.body:
            raise RequestConflict(f"{short_id} was sent before, with another body")
        self.expect(short_id, place, mine)
        return short_id

    def expect(self, short_id: str, place: str, asked: Forwarded) -> Answer:
        request_id, body = f"{self.tenant}/{short_id}", decode_body(Op.SAMPLE, asked.body)
        running = Running(partial(self.engine.sample, place, body))
        encode = partial(translate.sample_output, last_n=asked.last_n)
        return self.answers.get(request_id) or self.answers.expect(request_id, running, encode)

    async def release(self, name: str) -> None:
        await self.engine.unload(self._name(name))
        await self.catalog.free(self.tenant, name)
        log.info("sampler_freed", tenant=self.tenant, adapter=name)

    def _name(self, name: str) -> str:
        """Tenants share the engine's names."""
        return f"{self.tenant}.{name.partition('@')[2]}"


class Running:
    """A forwarded sample, awaited once."""

    def __init__(self, sample: Callable[[], Awaitable[SampleResult]]) -> None:
        self._sample = sample
        self.result_bytes = 0

    def __await__(self) -> Generator[Any, None, SampleResult]:
        return self._outcome().__await__()

    async def _outcome(self) -> SampleResult:
        result = await self._sample()
        self.result_bytes = sum(len(sequence.tokens.data) + len(sequence.logprobs.data) for sequence in result.sequences)
        return result
