"""One tenant at the gateway: what its sessions, models, samplers and checkpoints are in Hotdesk's own terms.

session   an entry in the catalog, and a beat
model     SESSION:train:N is the adapter and lane SESSION-N; its seq_id k is the seq first_seq + k
sampler   a fixed version, loaded once from a checkpoint and brought back when it is used again: an unordered adapter of the group, or an
          adapter of an external engine (`versions`)
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup

from scheduler.config import GatewayConfig
from scheduler.gateway import translate
from scheduler.gateway.answers import Answer, Answers, Encode, Then
from scheduler.gateway.versions import CREATE, FORWARDED, LOAD, Asked, EngineVersions, GroupVersions, Version, Versions
from scheduler.producer import Producer
from state.catalog import Catalog, Checkpoint, Run, Sampler, Session
from state.errors import (
    AdapterExists,
    BadBody,
    BadName,
    HotdeskError,
    MalformedRequest,
    RequestConflict,
    RequestError,
    ResultExpired,
    UnknownAdapter,
    UnknownCheckpoint,
    UnknownRequest,
)
from state.requests import (
    CreateAdapter,
    LoadState,
    Op,
    SaveResult,
    SaveState,
    SaveWeightsForSampler,
    Signature,
    is_name,
)
from workers.inference.client import InferenceEngine

log = structlog.get_logger("hotdesk.gateway")

WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
UNNAMED, INFLIGHT = "unnamed.", "inflight."  # checkpoints that were saved for a sampler and given no name
AT_END = "at-session-end"
USED_EVERY_S = 30.0
REASON_WAIT_S = 3.0
MOST_SEQUENCES = 4096
MOST_REASON = 500


class Offer(msgspec.Struct, frozen=True):
    """A base model that can be trained and sampled here. `group`: the first that serves it, beside which an engine may stand; `root`: where
    checkpoints are kept."""

    model: str
    group: str
    targets: tuple[str, ...]
    max_rank: int
    max_tokens: int
    alpha: float
    root: Path

    def trained(self, attention: bool, mlp: bool, unembed: bool) -> tuple[str, ...]:
        wanted = {
            **dict.fromkeys(("linear_qkv", "linear_proj"), attention),
            **dict.fromkeys(("linear_fc1", "linear_fc2"), mlp),
            "output_layer": unembed,
        }
        return tuple(target for target in self.targets if wanted.get(target, True))


class LoraConfig(msgspec.Struct):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Resident:
    """A sampler's version, while it is being loaded and once it is there."""

    def __init__(self) -> None:
        self.ready = anyio.Event()
        self.place = ""
        self.error: HotdeskError | None = None
        self.used_at = 0.0


class Desk:
    def __init__(
        self,
        tenant: str,
        producer: Producer,
        catalog: Catalog,
        offers: dict[str, Offer],
        engines: dict[str, InferenceEngine],
        tasks: TaskGroup,
        config: GatewayConfig,
    ) -> None:
        """`engines`: by the group beside which they sample."""
        self.tenant, self.producer, self.catalog, self.offers = tenant, producer, catalog, offers
        self.answers = Answers(producer, tasks, config.answer_kept_s)
        self.unnamed_kept = config.unnamed_kept
        self.used_every_s = min(USED_EVERY_S, config.sampler_idle_s / 4)
        self.used_at = anyio.current_time()
        self._runs: dict[str, Run] = {}
        self._group_versions = GroupVersions(tenant, producer, catalog, self._ask)
        self._engines = {group: EngineVersions(tenant, group, engine, catalog, self.answers) for group, engine in engines.items()}
        self._residents: dict[str, Resident] = {}

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def open_session(self, session: Session) -> None:
        await self.catalog.put(self.tenant, session.session_id, session)
        await self.beat(session.session_id)

    async def session(self, session_id: str) -> Session:
        """Raises `UnknownRequest`."""
        found = await self.catalog.get(self.tenant, Session, session_id)
        if found is None:
            raise UnknownRequest(f"session {session_id!r} does not exist")
        return found

    async def beat(self, session_id: str) -> None:
        await self.catalog.beat(self.tenant, session_id, now_ms())

    async def finish(self, session_id: str, reason: str) -> None:
        """The first reason wins. Its adapters are freed by the next sweep."""
        session = await self.session(session_id)
        if not session.ended:
            await self.catalog.put(self.tenant, session_id, msgspec.structs.replace(session, ended=reason))
        await self.catalog.beat(self.tenant, session_id, 0)

    async def close_session(self, session_id: str) -> None:
        """Saves and frees what the session's models hold. Safe to run twice, and to be killed half way."""
        session = await self.catalog.get(self.tenant, Session, session_id)
        if session is not None and not session.ended:
            await self.catalog.put(self.tenant, session_id, msgspec.structs.replace(session, ended="silent"))
        for run in await self.catalog.all(self.tenant, Run):
            if run.session_id == session_id and not run.ended:
                await self._end_run(run)
        await self.catalog.forget_beat(self.tenant, session_id)
        log.info("session_closed", tenant=self.tenant, session=session_id)

    async def _end_run(self, run: Run) -> None:
        adapter = adapter_of(run.model_id)
        try:
            handle = await self.producer.adapter(adapter)
            request_id = f"{self.tenant}/{handle.lane}/{handle.next_seq}"
            await self.catalog.saving(self.tenant, Checkpoint(path_of(run.model_id, WEIGHTS, AT_END), request_id, now_ms()))
            saved = await handle.save_state(AT_END, overwrite=True)
            unloaded = await handle.unload()
            await saved
            await self.catalog.saved(self.tenant, saved.request_id, well=True)
            await unloaded
        except UnknownAdapter:
            pass  # freed before, or never made
        for checkpoint in await self.catalog.all(self.tenant, Checkpoint):
            if checkpoint.model_id == run.model_id and is_unnamed(checkpoint):
                await self._forget(checkpoint)
        await self.catalog.put(self.tenant, run.model_id, msgspec.structs.replace(run, ended=True))
        self._runs.pop(run.model_id, None)

    # --- models -------------------------------------------------------------------------------------------------------

    def offer(self, base_model: str) -> Offer:
        """Raises `UnknownCheckpoint`."""
        found = self.offers.get(base_model) or self.offers.get(base_model.partition(":")[0])
        if found is None:
            raise UnknownCheckpoint(f"base model {base_model!r} is not served here; these are: {', '.join(self.offers)}")
        return found

    async def run(self, model_id: str) -> Run:
        """Raises `UnknownAdapter`."""
        run = self._runs.get(model_id)
        if run is None:
            run = await self.catalog.get(self.tenant, Run, model_id)
            if run is None:
                raise UnknownAdapter(f"model {model_id!r} does not exist")
            self._runs[model_id] = run
        return run

    async def create_model(self, session_id: str, number: int, base_model: str, lora: LoraConfig, metadata: dict[str, Any]) -> str:
        await self.session(session_id)
        offer = self.offer(base_model)
        targets = offer.trained(lora.train_attn, lora.train_mlp, lora.train_unembed)
        seed = lora.seed if lora.seed is not None else digest_number(f"{session_id}/{number}", 31)
        run = Run(
            model_id=f"{session_id}:train:{number}",
            session_id=session_id,
            base_model=base_model,
            rank=lora.rank,
            created_ms=now_ms(),
            seed=seed % 2**31,
            targets=targets,
            user_metadata=metadata,
        )
        return await self._create(run, offer)

    async def _create(self, run: Run, offer: Offer) -> str:
        known = await self.catalog.get(self.tenant, Run, run.model_id)
        run = known or run  # a retry: the first one counts
        if known is None:
            await self.catalog.put(self.tenant, run.model_id, run)
        body = CreateAdapter(Signature(run.rank, offer.alpha, run.targets, run.seed), like=offer.group)
        return await self._ask(adapter_of(run.model_id), CREATE, Op.CREATE_ADAPTER, body)

    async def create_from(self, session_id: str, number: int, path: str, optimizer: bool, metadata: dict[str, Any]) -> str:
        """A new model that begins as a checkpoint."""
        await self.session(session_id)
        checkpoint = await self.checkpoint(path)
        source = await self.run(checkpoint.model_id)
        model_id = f"{session_id}:train:{number}"
        run = msgspec.structs.replace(
            source, model_id=model_id, session_id=session_id, created_ms=now_ms(), user_metadata=metadata, first_seq=LOAD, ended=False
        )
        await self._create(run, self.offer(run.base_model))
        return await self._ask(adapter_of(model_id), LOAD, Op.LOAD_STATE, self._load(checkpoint, optimizer))

    async def load_into(self, model_id: str, seq_id: int, path: str, optimizer: bool) -> str:
        async def body() -> LoadState:
            return self._load(await self.checkpoint(path), optimizer)

        return await self.train(model_id, seq_id, Op.LOAD_STATE, body)

    @staticmethod
    def _load(checkpoint: Checkpoint, optimizer: bool) -> LoadState:
        return LoadState(checkpoint.name, adapter_of(checkpoint.model_id), optimizer, checkpoint.kind == SAMPLER_WEIGHTS)

    async def train(self, model_id: str, seq_id: int, op: Op, body: Callable[[], Awaitable[msgspec.Struct]]) -> str:
        """Sends a request of the model's own order. What `body` cannot make of it is refused in the log: the seq is spent either way."""
        run = await self.run(model_id)
        if not 1 <= seq_id < 2**31:
            raise MalformedRequest(f"seq_id {seq_id} is outside 1..2^31-1")
        lane, seq = adapter_of(model_id), run.first_seq + seq_id
        if self.answers.get(f"{self.tenant}/{lane}/{seq}") is not None:
            return f"{lane}/{seq}"
        try:
            return await self._ask(lane, seq, op, await body())
        except (BadBody, BadName, UnknownCheckpoint, MalformedRequest) as error:
            return await self._ask(lane, seq, op, b"", refused=error.info.message[:MOST_REASON])

    async def save(
        self, model_id: str, seq_id: int, kind: str, name: str, *, overwrite: bool, ttl_s: int | None, metadata: dict[str, str]
    ) -> str:
        run = await self.run(model_id)
        request_id = f"{self.tenant}/{adapter_of(model_id)}/{run.first_seq + seq_id}"

        async def body() -> msgspec.Struct:
            if not is_name(name) or (name.startswith((UNNAMED, INFLIGHT)) and name.partition(".")[2] != str(seq_id)):
                raise BadName(f"checkpoint name {name!r} is not allowed")
            expires = now_ms() + 1000 * ttl_s if ttl_s else 0
            await self.catalog.saving(
                self.tenant, Checkpoint(path_of(model_id, kind, name), request_id, now_ms(), expires, False, dict(metadata))
            )
            return SaveState(name, overwrite) if kind == WEIGHTS else SaveWeightsForSampler(name)

        return await self.train(model_id, seq_id, Op.SAVE_STATE if kind == WEIGHTS else Op.SAVE_WEIGHTS_FOR_SAMPLER, body)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _ask(self, lane: str, seq: int, op: Op, body: msgspec.Struct | bytes, *, refused: str = "", last_n: int | None = None) -> str:
        """Once it is durable, and always under the same id."""
        request_id = f"{self.tenant}/{lane}/{seq}"
        if self.answers.get(request_id) is None:
            future = await self.producer.send(lane, seq, op, body, refused=refused)
            if self.answers.get(request_id) is None:
                self.answers.expect(request_id, future, *self.meaning(request_id, op, last_n))
        return f"{lane}/{seq}"

    async def answer(self, short_id: str) -> Answer | None:
        """None where the tenant has no such request, or its result was given up."""
        request_id = f"{self.tenant}/{short_id}"
        found = self.answers.get(request_id)
        if found is None and short_id.startswith(FORWARDED):
            return await self._forward_again(short_id)
        if found is None and short_id.count("/") == 1:
            found = await self.answers.recall(request_id, self.meaning)
        return found

    async def _forward_again(self, short_id: str) -> Answer | None:
        """What an earlier process was asked for, and did not tell."""
        versions = self._engines.get(short_id.split(":")[1])
        asked = await self.catalog.forwarded_as(self.tenant, short_id)
        if versions is None or asked is None:
            return None
        return versions.expect(short_id, await self._resident(asked.sampler), asked)

    async def why(self, short_id: str) -> tuple[str, str]:
        """(queue state, reason in words) of a request that has no answer yet."""
        adapter = short_id.partition("/")[0].partition(":")[0]
        with anyio.move_on_after(REASON_WAIT_S):
            try:
                seen = await self.producer.describe(adapter)
            except HotdeskError as error:
                return "active", error.info.message
            return "active", f"{seen.queued} requests of this model wait for their turn; it is {seen.residency}"
        return "paused_capacity", "the scheduler does not answer at the moment; nothing that was accepted is lost"

    def meaning(self, request_id: str, op: Op, last_n: int | None = None) -> tuple[Encode, Then | None]:
        """What an outcome is in the protocol, and what follows from it. Told by the request's id, its operation and its result alone."""
        lane = request_id.split("/")[1]
        if op in (Op.FORWARD, Op.FORWARD_BACKWARD):
            return translate.forward_output, None
        if op is Op.OPTIM_STEP:
            return translate.optim_step_output, None
        if op is Op.SAMPLE:
            return partial(translate.sample_output, last_n=last_n), None
        if op in (Op.SAVE_STATE, Op.SAVE_WEIGHTS_FOR_SAMPLER):
            return self._saved_output, partial(self._saved, request_id)
        if op is Op.LOAD_STATE:
            return lambda done: {"type": "load_weights", "model_id": model_of(lane)}, None
        return lambda done: {"type": "create_model", "model_id": model_of(lane)}, partial(self._created, model_of(lane))

    async def _created(self, model_id: str, error: Exception | None) -> None:
        if isinstance(error, RequestError) and not isinstance(error, ResultExpired | RequestConflict | AdapterExists):
            await self.catalog.drop(self.tenant, Run, model_id)  # it never was
            self._runs.pop(model_id, None)

    async def _saved(self, request_id: str, error: Exception | None) -> None:
        if error is None:
            for checkpoint in await self.catalog.being_saved(self.tenant):
                if checkpoint.request_id == request_id and is_unnamed(checkpoint) and checkpoint.name.startswith(INFLIGHT):
                    await self._follow(checkpoint)
        await self.catalog.saved(self.tenant, request_id, well=error is None)

    async def _follow(self, checkpoint: Checkpoint) -> None:
        """The model's in-flight sampler is at this version from now on, unless it is at a later one."""
        run = await self.run(checkpoint.model_id)
        sampler_id = sampler_of(checkpoint)
        before = await self.catalog.get(self.tenant, Sampler, sampler_id)
        if before is None or int(before.path.rpartition(".")[2]) < int(checkpoint.path.rpartition(".")[2]):
            await self.catalog.put(self.tenant, sampler_id, Sampler(sampler_id, run.session_id, run.base_model, checkpoint.path))

    @staticmethod
    def _saved_output(result: SaveResult) -> dict[str, Any]:
        _, _, _, adapter, kind, name = result.path.split("/")
        checkpoint = Checkpoint(path_of(model_of(adapter), kind, name), "", 0)
        if kind == WEIGHTS:
            return {"type": "save_weights", "path": checkpoint.path}
        if name.startswith((UNNAMED, INFLIGHT)):
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_of(checkpoint)}
        return {"type": "save_weights_for_sampler", "path": checkpoint.path}

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoint(self, path: str) -> Checkpoint:
        """Raises `UnknownCheckpoint`."""
        found = await self.catalog.get(self.tenant, Checkpoint, path)
        if found is None or (found.expires_ms and found.expires_ms < now_ms()):
            raise UnknownCheckpoint(f"checkpoint {path!r} does not exist")
        return found

    async def checkpoints(self) -> Sequence[Checkpoint]:
        """Those that are there and have a name, the newest first."""
        await self._settle_saves()
        found = [one for one in await self.catalog.all(self.tenant, Checkpoint) if not is_unnamed(one)]
        return sorted(found, key=lambda one: -one.created_ms)

    async def _settle_saves(self) -> None:
        """Saves whose end no gateway saw: what became of them is asked of the log."""
        for checkpoint in await self.catalog.being_saved(self.tenant):
            answer = await self.answer(checkpoint.request_id.partition("/")[2])
            if answer is None:
                await self.catalog.saved(self.tenant, checkpoint.request_id, well=False)

    async def delete(self, path: str) -> None:
        checkpoint = await self.checkpoint(path)
        await self.catalog.drop(self.tenant, Checkpoint, path)
        directory = self._directory(checkpoint)
        try:  # while its samples run, an engine that is started again may still have to load it
            await self.release(self._name((await self.run(checkpoint.model_id)).base_model, path))
        finally:
            if directory is not None:
                await anyio.to_thread.run_sync(partial(shutil.rmtree, directory, ignore_errors=True))

    def _directory(self, checkpoint: Checkpoint) -> Path | None:
        """On this host. Every part of it was checked to be a name."""
        for offer in self.offers.values():
            directory = offer.root / self.tenant / adapter_of(checkpoint.model_id) / checkpoint.kind / checkpoint.name
            if directory.is_dir():
                return directory
        return None

    def size_bytes(self, checkpoint: Checkpoint) -> int | None:
        directory = self._directory(checkpoint)
        return sum(file.stat().st_size for file in directory.iterdir()) if directory is not None else None

    async def expire(self) -> None:
        """Checkpoints past their time, and those without a name of which a model has more than `unnamed_kept`: the oldest that no sampler
        uses."""
        unnamed: dict[tuple[str, str], list[Checkpoint]] = {}
        for checkpoint in await self.catalog.all(self.tenant, Checkpoint):
            if checkpoint.expires_ms and checkpoint.expires_ms < now_ms():
                await self.catalog.put(self.tenant, checkpoint.path, msgspec.structs.replace(checkpoint, expires_ms=0))
                await self._forget(checkpoint)
                log.info("checkpoint_expired", tenant=self.tenant, path=checkpoint.path)
            elif is_unnamed(checkpoint):
                unnamed.setdefault((checkpoint.model_id, checkpoint.name.partition(".")[0]), []).append(checkpoint)
        for those in unnamed.values():
            newest_first = sorted(those, key=lambda one: -int(one.name.partition(".")[2]))
            for checkpoint in newest_first[self.unnamed_kept :]:
                if not await self._is_used(checkpoint):
                    await self._forget(checkpoint)

    async def _is_used(self, checkpoint: Checkpoint) -> bool:
        try:
            version = self._name((await self.run(checkpoint.model_id)).base_model, checkpoint.path)
        except (UnknownAdapter, UnknownCheckpoint):
            return False  # nothing serves its model any more
        return await self.catalog.is_used(self.tenant, version)

    async def _forget(self, checkpoint: Checkpoint) -> None:
        """Whatever of it is still there: another gateway may be at it too."""
        try:
            await self.delete(checkpoint.path)
        except (UnknownAdapter, UnknownCheckpoint):
            pass

    # --- samplers -----------------------------------------------------------------------------------------------------

    async def open_sampler(self, session_id: str, number: int, base_model: str, path: str) -> str:
        """Raises `UnknownCheckpoint`: once a sampler is open, its version is loaded."""
        await self.session(session_id)
        if path:
            checkpoint = await self.checkpoint(path)
            base_model = (await self.run(checkpoint.model_id)).base_model
        self.offer(base_model)
        sampler_id = f"{session_id}:sample:{number}"
        known = await self.catalog.get(self.tenant, Sampler, sampler_id)
        sampler = known or Sampler(sampler_id, session_id, base_model, path)
        await self._resident(sampler)
        if known is None:
            await self.catalog.put(self.tenant, sampler_id, sampler)
        return sampler_id

    async def sampler(self, sampler_id: str) -> Sampler:
        """Raises `UnknownRequest`."""
        found = await self.catalog.get(self.tenant, Sampler, sampler_id)
        if found is None:
            session_id, _, rest = sampler_id.partition(":sample:")
            number, dot, seq = rest.partition(".")
            path = path_of(f"{session_id}:train:{number}", SAMPLER_WEIGHTS, f"{UNNAMED}{seq}")
            checkpoint = await self.catalog.get(self.tenant, Checkpoint, path) if dot else None
            if checkpoint is None:
                raise UnknownRequest(f"sampler {sampler_id!r} does not exist")
            run = await self.run(checkpoint.model_id)
            found = Sampler(sampler_id, run.session_id, run.base_model, path)
        return found

    async def sample(self, request: translate.SampleRequest) -> tuple[str, list[str]]:
        """(request id, an id of each sequence). A retry gets the first one's."""
        if not 1 <= request.num_samples <= MOST_SEQUENCES:
            raise BadBody(f"num_samples {request.num_samples} is outside 1..{MOST_SEQUENCES}")
        sampler = await self.sampler(request.sampling_session_id)
        identity = f"{request.sampling_session_id}/{request.seq_id}"
        body = translate.sample_body(request, self.offer(sampler.base_model).max_tokens, digest_number(identity, 62))
        asked = Asked(sampler, digest_number(identity, 60), body, request.prompt_logprobs_last_n)
        place = await self._resident(sampler)
        short_id = await self._versions(self._name(sampler.base_model, sampler.path)).sample(place, asked)
        return short_id, [f"{short_id}/{index}" for index in range(request.num_samples)]

    async def _resident(self, sampler: Sampler) -> str:
        """Where the sampler's version is, loaded: nothing is sampled from before. Raises the loading's error."""
        version = self._name(sampler.base_model, sampler.path)
        resident = self._residents.get(version)
        if resident is None:
            resident = self._residents[version] = Resident()
            try:
                await self.catalog.used(self.tenant, version, now_ms())  # from now on nobody takes its files away
                resident.place = await self._versions(version).bring(await self._version(sampler))
            except HotdeskError as error:
                resident.error = error
                del self._residents[version]
            except BaseException:
                resident.error = UnknownCheckpoint("the sampler could not be loaded")
                del self._residents[version]
                raise
            finally:
                resident.ready.set()
        await resident.ready.wait()
        if resident.error is not None:
            raise resident.error
        if anyio.current_time() - resident.used_at > self.used_every_s or not resident.used_at:
            resident.used_at = anyio.current_time()
            await self.catalog.used(self.tenant, version, now_ms())
        return resident.place

    async def _version(self, sampler: Sampler) -> Version:
        offer = self.offer(sampler.base_model)
        name = self._name(sampler.base_model, sampler.path)
        if not sampler.path:
            return Version(name, offer.group, Signature(1, 1.0, (), 0), None, None)
        checkpoint = await self.checkpoint(sampler.path)
        run = await self.run(checkpoint.model_id)
        signature = Signature(run.rank, offer.alpha, run.targets, run.seed)
        return Version(name, offer.group, signature, self._load(checkpoint, optimizer=False), self._directory(checkpoint))

    def _name(self, base_model: str, path: str) -> str:
        """Of a checkpoint's version, or of a base model, where it is sampled from. An engine's begins with the group it stands beside."""
        group = self.offer(base_model).group
        digest = hashlib.sha256((path or base_model).encode()).hexdigest()[:24]
        return f"{group}@{digest}" if group in self._engines else f"v{digest}"

    def _versions(self, name: str) -> Versions:
        group, at, _ = name.partition("@")
        return self._engines[group] if at and group in self._engines else self._group_versions

    async def release(self, name: str) -> None:
        """Frees a sampler's version; the next use brings it back, where its checkpoint is still there."""
        self._residents.pop(name, None)
        await self._versions(name).release(name)


# --- names ------------------------------------------------------------------------------------------------------------


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def digest_number(text: str, bits: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


def adapter_of(model_id: str) -> str:
    """Raises `UnknownAdapter` for what is no model id."""
    session_id, middle, number = model_id.partition(":train:")
    adapter = f"{session_id}-{number}"
    if not middle or not is_name(adapter) or not number.isdigit():
        raise UnknownAdapter(f"model {model_id!r} does not exist")
    return adapter


def model_of(adapter: str) -> str:
    session_id, _, number = adapter.rpartition("-")
    return f"{session_id}:train:{number}"


def path_of(model_id: str, kind: str, name: str) -> str:
    return f"tinker://{model_id}/{kind}/{name}"


def is_unnamed(checkpoint: Checkpoint) -> bool:
    """Whether it was saved for a sampler and given no name. A training checkpoint is its tenant's, whatever it is called."""
    return checkpoint.kind == SAMPLER_WEIGHTS and checkpoint.name.startswith((UNNAMED, INFLIGHT))


def sampler_of(checkpoint: Checkpoint) -> str:
    """The sampler that an unnamed checkpoint is saved for: one a save, or one a model where it follows the model."""
    session_id, _, number = checkpoint.model_id.partition(":train:")
    which = "inflight" if checkpoint.name.startswith(INFLIGHT) else checkpoint.name.removeprefix(UNNAMED)
    return f"{session_id}:sample:{number}.{which}"
