"""HTTP: keys, routes and limits of the gateway. What is not here answers 404; what fails here answers 4xx with words, because clients of
this protocol repeat a 5xx for minutes."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.config import GatewayConfig
from scheduler.gateway import translate
from scheduler.gateway.answers import JSON, LARGE_BYTES
from scheduler.gateway.desk import INFLIGHT, SAMPLER_WEIGHTS, UNNAMED, WEIGHTS, Desk, LoraConfig, Offer, now_ms, path_of
from scheduler.producer import Producer
from state.catalog import Catalog, Checkpoint, Run, Sampler, Session
from state.errors import (
    BadBody,
    BodyTooLarge,
    HotdeskError,
    MalformedRequest,
    RequestError,
    UnknownAdapter,
    UnknownCheckpoint,
    UnknownRequest,
)
from state.redis_log import RedisLog
from state.requests import Op, OptimStep
from workers.inference.client import InferenceEngine

log = structlog.get_logger("hotdesk.gateway")

API = "/api/v1"
KEY_CACHE = 65_536
KEY_KNOWN_S = 60.0  # a key that was taken away works for so long
UNKNOWN = (UnknownAdapter, UnknownCheckpoint, UnknownRequest)
T = TypeVar("T")
Act = Callable[[Desk, Request], Awaitable[Response]]


class Gateway:
    def __init__(self, config: GatewayConfig, url: str, fleet: str, offers: dict[str, Offer]) -> None:
        self.config, self.url, self.fleet, self.offers = config, url, fleet, offers
        self.catalog = Catalog.connect(url, fleet)
        self.store = RedisLog.connect(url, fleet)
        self._digests = {digest: tenant for tenant, digest in config.keys.items()}
        self._tenants: dict[str, tuple[str, float]] = {}  # key digest -> tenant, and until when that is taken for true
        self._engines = {group: InferenceEngine(engine) for group, engine in config.engines.items()}
        self._desks: dict[str, Desk] = {}
        self._opening: dict[str, anyio.Event] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._tasks: TaskGroup
        self._ending: set[tuple[str, str]] = set()  # sessions and samplers that are being freed
        self._sweep_now = anyio.Event()
        self._began_ms = now_ms()
        self._posts = self._often()
        self._rest: ASGIApp = Starlette(routes=self._routes(), lifespan=self._life)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The routes of a training loop are found by their path alone: a framework's routing costs as much as what they do."""
        act = self._posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if act is None:
            await self._rest(scope, receive, send)
        else:
            response = await self._guard(act, Request(scope, receive))
            await response(scope, receive, send)

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._sweeps)
            yield
            self._tasks.cancel_scope.cancel()
        for engine in self._engines.values():
            await engine.close()
        await self.catalog.close()
        await self.store.close()

    # --- tenants ------------------------------------------------------------------------------------------------------

    async def tenant(self, key: str) -> str | None:
        """Whose key it is. Only its digest is ever kept."""
        if not key:
            return None
        digest = hashlib.sha256(key.encode()).hexdigest()
        cached, until = self._tenants.get(digest, ("", 0.0))
        if cached and anyio.current_time() < until:
            return cached
        known = self._digests.get(digest) or await self.catalog.tenant_of(digest)
        if known is None and self.config.any_key:
            known = f"k{digest[:16]}"
        if len(self._tenants) >= KEY_CACHE:
            self._tenants.clear()
        if known is not None:
            self._tenants[digest] = known, anyio.current_time() + KEY_KNOWN_S
        return known

    async def desk(self, tenant: str) -> Desk:
        """The tenant's, opened at its first request."""
        while tenant not in self._desks:
            opening = self._opening.get(tenant)
            if opening is None:
                opening = self._opening[tenant] = anyio.Event()
                self._tasks.start_soon(self._open, tenant, opening)
            await opening.wait()
        desk = self._desks[tenant]
        desk.used_at = anyio.current_time()
        return desk

    async def _open(self, tenant: str, opened: anyio.Event) -> None:
        try:
            with anyio.CancelScope() as scope:
                async with Producer.over(self.store, tenant) as producer, anyio.create_task_group() as tasks:
                    self._scopes[tenant] = scope
                    self._desks[tenant] = Desk(tenant, producer, self.catalog, self.offers, self._engines, tasks, self.config)
                    opened.set()
                    await anyio.sleep_forever()
        finally:
            self._desks.pop(tenant, None)
            self._opening.pop(tenant, None)
            opened.set()

    # --- what is done beside requests ----------------------------------------------------------------------------------

    async def _sweeps(self) -> None:
        while True:
            with anyio.move_on_after(min(10.0, self.config.session_timeout_s / 4)):
                await self._sweep_now.wait()
            self._sweep_now = anyio.Event()
            try:
                await self._sweep()
            except (RedisError, OSError, HotdeskError) as error:
                log.warning("sweep_failed", error=str(error), detail="tried again")

    async def _sweep(self) -> None:
        """Sessions that ended or fell silent, samplers that nobody uses, checkpoints past their time, answers past theirs."""
        now = now_ms()
        silent_before = int(now - 1000 * self.config.session_timeout_s)
        if now - self._began_ms < 1000 * self.config.session_timeout_s:
            silent_before = 0  # nobody could send a beat while no gateway ran: only those that ended
        for tenant, session_id in await self.catalog.silent(silent_before):
            self._begin(tenant, session_id, partial(self._at_desk, tenant, Desk.close_session, session_id))
        for tenant, version in await self.catalog.unused(int(now - 1000 * self.config.sampler_idle_s)):
            self._begin(tenant, version, partial(self._at_desk, tenant, Desk.release, version))
        for tenant, desk in list(self._desks.items()):
            desk.answers.reclaim()
            self._begin(tenant, "expire", desk.expire)
            if not desk.answers.open and anyio.current_time() - desk.used_at > self.config.answer_kept_s:
                self._scopes[tenant].cancel()

    async def _at_desk(self, tenant: str, act: Callable[[Desk, str], Awaitable[None]], name: str) -> None:
        await act(await self.desk(tenant), name)

    def _begin(self, tenant: str, name: str, act: Callable[[], Awaitable[None]]) -> None:
        """Once at a time, and beside the others: one that has to wait, or fails, holds nobody up."""
        if (tenant, name) in self._ending:
            return

        async def run() -> None:
            try:
                await act()
            except (RedisError, OSError, HotdeskError) as error:
                log.warning("sweep_failed", tenant=tenant, name=name, error=str(error), detail="tried again")
            finally:
                self._ending.discard((tenant, name))

        self._ending.add((tenant, name))
        self._tasks.start_soon(run)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _often(self) -> dict[str, Act]:
        acts: dict[str, Act] = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "forward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._asample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
        }
        return {f"{API}/{path}": act for path, act in acts.items()}

    def _routes(self) -> list[Route]:
        others: list[tuple[str, str, Act]] = [
            ("POST", "sessions/{session_id}/finish", self._finish),
            ("POST", "training_runs/{run}/checkpoints/{kind}/{name}/publish", self._publish),
            ("GET", "get_server_capabilities", self._capabilities),
            ("GET", "samplers/{sampler}", self._get_sampler),
            ("GET", "training_runs", self._training_runs),
            ("GET", "training_runs/{run}", self._training_run),
            ("GET", "training_runs/{run}/checkpoints", self._run_checkpoints),
            ("GET", "checkpoints", self._user_checkpoints),
            ("GET", "sessions", self._sessions),
            ("GET", "sessions/{session_id}", self._session),
            ("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}", self._delete),
            ("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}/publish", self._unpublish),
            ("PUT", "training_runs/{run}/checkpoints/{kind}/{name}/ttl", self._set_ttl),
        ]
        return [
            Route(f"{API}/healthz", self._healthz, methods=["GET"]),
            Route(f"{API}/client/config", self._client_config, methods=["POST"]),
            Route(f"{API}/client/dynamic_config", self._dynamic_config, methods=["POST"]),
            Route(f"{API}/telemetry", self._telemetry, methods=["POST"]),
            *(Route(f"{API}/{path}", self._guarded(act), methods=[method]) for method, path, act in others),
        ]

    def _guarded(self, act: Act) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            return await self._guard(act, request)

        return handle

    async def _guard(self, act: Act, request: Request) -> Response:
        try:
            tenant = await self.tenant(request.headers.get("x-api-key", ""))
            if tenant is None:
                return _refusal(401, "Unauthorized", "this API key is not known here")
            return await act(await self.desk(tenant), request)
        except UNKNOWN as error:
            return _refusal(404, type(error).__name__, str(error))
        except (HotdeskError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(400, type(error).__name__, str(error))
        except (RedisError, OSError) as error:
            log.warning("server_away", error=str(error), path=request.url.path)
            return _refusal(503, "ServerAway", "the log's server is away; try again", {"retry-after": "1"})
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            log.exception("unforeseen", path=request.url.path)
            return _refusal(400, type(error).__name__, f"the gateway could not serve this: {error}")

    async def _body(self, request: Request) -> bytes:
        """Raises `BodyTooLarge` before more than the limit was read."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.config.body_bytes:
                raise BodyTooLarge(f"the body has more than {self.config.body_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _read(self, request: Request, kind: type[T]) -> T:
        body = await self._body(request)
        if len(body) > LARGE_BYTES:
            return await anyio.to_thread.run_sync(lambda: msgspec.json.decode(body, type=kind))
        return msgspec.json.decode(body, type=kind)

    # --- service ------------------------------------------------------------------------------------------------------

    async def _healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _client_config(self, request: Request) -> Response:
        return JSONResponse({"proto_compress_fwdbwd": True})

    async def _dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        """Tracebacks of users' programs are none of ours: taken, and dropped."""
        return JSONResponse({"status": "accepted"})

    async def _capabilities(self, desk: Desk, request: Request) -> Response:
        models = [
            {"model_name": offer.model, "max_context_length": offer.max_tokens, "trainable": True, "sampleable": True}
            for offer in self.offers.values()
        ]
        return JSONResponse({"supported_models": models})

    async def _create_session(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, CreateSession)
        session_id = f"s{secrets.token_hex(8)}"
        await desk.open_session(
            Session(session_id, now_ms(), tuple(asked.tags), asked.user_metadata or {}, asked.display_name, asked.project_id)
        )
        return JSONResponse({"session_id": session_id, "type": "create_session"})

    async def _heartbeat(self, desk: Desk, request: Request) -> Response:
        session_id = (await self._read(request, OfSession)).session_id
        session = await desk.session(session_id)
        if session.ended:
            return _refusal(410, "SessionEnded", f"session {session_id} ended: {session.ended}")
        await desk.beat(session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, Finish)
        await desk.finish(request.path_params["session_id"], asked.reason.type)
        self._sweep_now.set()
        return JSONResponse({})

    # --- training -----------------------------------------------------------------------------------------------------

    async def _create_model(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, CreateModel)
        if asked.optimizer_config.get("type", "adamw") != "adamw":
            raise BadBody(f"optimizer {asked.optimizer_config.get('type')!r}: adamw is supported")
        lora = asked.lora_config or LoraConfig()
        short_id = await desk.create_model(asked.session_id, _number(asked.model_seq_id), asked.base_model, lora, asked.user_metadata or {})
        return _promise(short_id)

    async def _load_weights(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, LoadWeights)
        if asked.session_id is not None and asked.model_seq_id is not None:
            metadata = asked.user_metadata or {}
            return _promise(await desk.create_from(asked.session_id, _number(asked.model_seq_id), asked.path, asked.optimizer, metadata))
        if asked.model_id is None or asked.seq_id is None:
            raise MalformedRequest("either session_id and model_seq_id or model_id and seq_id are needed")
        return _promise(await desk.load_into(asked.model_id, asked.seq_id, asked.path, asked.optimizer))

    async def _get_info(self, desk: Desk, request: Request) -> Response:
        run = await desk.run((await self._read(request, OfModel)).model_id)
        data = {"arch": "gpt", "model_name": run.base_model}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": run.model_id,
                "model_name": run.base_model,
                "model_data": data,
                "is_lora": True,
                "lora_rank": run.rank,
            }
        )

    async def _forward_backward(self, desk: Desk, request: Request) -> Response:
        body = await self._body(request)
        encoding = request.headers.get("content-encoding", "")

        def read() -> Any:
            return translate.forward_backward(translate.decompressed(body, encoding, self.config.body_bytes))

        large = len(body) > LARGE_BYTES
        message = await anyio.to_thread.run_sync(read) if large else read()

        async def forward() -> msgspec.Struct:
            return await anyio.to_thread.run_sync(translate.forward_body, message) if large else translate.forward_body(message)

        op = Op.FORWARD if message.forward_only else Op.FORWARD_BACKWARD
        return _promise(await desk.train(message.model_id, message.seq_id, op, forward), message.model_id)

    async def _optim_step(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, StepRequest)

        async def step() -> OptimStep:
            if asked.optimizer_params is not None:
                raise BadBody("optimizer_params: only AdamW's adam_params are supported")
            return (asked.adam_params or translate.AdamParams()).body()

        return _promise(await desk.train(asked.model_id, asked.seq_id, Op.OPTIM_STEP, step), asked.model_id)

    async def _save_weights(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, SaveWeights)
        metadata = {key: str(value) for key, value in (asked.user_metadata or {}).items()}
        short_id = await desk.save(
            asked.model_id,
            asked.seq_id,
            WEIGHTS,
            asked.path or "",
            overwrite=asked.overwrite,
            ttl_s=asked.ttl_seconds,
            metadata=metadata,
        )
        return _promise(short_id, asked.model_id)

    async def _save_weights_for_sampler(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, SaveWeights)
        unnamed = f"{INFLIGHT if asked.kind == 'inflight' else UNNAMED}{asked.seq_id}"
        metadata = {key: str(value) for key, value in (asked.user_metadata or {}).items()}
        short_id = await desk.save(
            asked.model_id,
            asked.seq_id,
            SAMPLER_WEIGHTS,
            asked.path if asked.path is not None else unnamed,
            overwrite=False,
            ttl_s=asked.ttl_seconds,
            metadata=metadata,
        )
        return _promise(short_id, asked.model_id)

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, desk: Desk, request: Request) -> Response:
        asked = await self._read(request, CreateSampler)
        number = _number(asked.sampling_session_seq_id)
        sampler_id = await desk.open_sampler(asked.session_id, number, asked.base_model or "", asked.model_path or "")
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _get_sampler(self, desk: Desk, request: Request) -> Response:
        sampler = await desk.sampler(request.path_params["sampler"])
        return JSONResponse({"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.path or None})

    async def _asample(self, desk: Desk, request: Request) -> Response:
        short_id, sequence_ids = await desk.sample(await self._read(request, translate.SampleRequest))
        return JSONResponse({"request_id": short_id, "sample_sequence_ids": sequence_ids})

    # --- futures ------------------------------------------------------------------------------------------------------

    async def _retrieve(self, desk: Desk, request: Request) -> Response:
        short_id = (await self._read(request, OfRequest)).request_id
        answer = await desk.answer(short_id)
        if answer is None:
            return _refusal(410, "ResultExpired", f"request {short_id} is not known, or its result is not kept any more")
        with anyio.move_on_after(self.config.hold_s):
            await answer.settled.wait()
        if not answer.settled.is_set():
            state, reason = await desk.why(short_id)
            return JSONResponse({"type": "try_again", "request_id": short_id, "queue_state": state, "queue_state_reason": reason})
        return Response(answer.encoded.content, media_type=answer.encoded.media_type)

    async def _cancel(self, desk: Desk, request: Request) -> Response:
        """What runs already finishes; the answer says so either way."""
        short_id = (await self._read(request, OfRequest)).request_id
        try:
            await desk.producer.cancel(f"{desk.tenant}/{short_id}")
        except RequestError as error:
            return JSONResponse({"cancelled": False, "reason": str(error)})
        return JSONResponse({"cancelled": True})

    # --- what is there ------------------------------------------------------------------------------------------------

    async def _run_json(self, desk: Desk, run: Run, checkpoints: list[Checkpoint]) -> dict[str, Any]:
        mine = [one for one in checkpoints if one.model_id == run.model_id]
        last = {kind: next((one for one in mine if one.kind == kind), None) for kind in (WEIGHTS, SAMPLER_WEIGHTS)}
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": desk.tenant,
            "is_lora": True,
            "lora_rank": run.rank,
            "corrupted": False,
            "last_request_time": _time(max([run.created_ms, *(one.created_ms for one in mine)])),
            "last_checkpoint": _checkpoint(desk, last[WEIGHTS]),
            "last_sampler_checkpoint": _checkpoint(desk, last[SAMPLER_WEIGHTS]),
            "user_metadata": run.user_metadata,
        }

    async def _training_runs(self, desk: Desk, request: Request) -> Response:
        runs = sorted(await desk.catalog.all(desk.tenant, Run), key=lambda run: -run.created_ms)
        page, cursor = _page(request, runs)
        checkpoints = list(await desk.checkpoints())
        return JSONResponse({"training_runs": [await self._run_json(desk, run, checkpoints) for run in page], "cursor": cursor})

    async def _training_run(self, desk: Desk, request: Request) -> Response:
        run = await desk.run(request.path_params["run"])
        return JSONResponse(await self._run_json(desk, run, list(await desk.checkpoints())))

    async def _run_checkpoints(self, desk: Desk, request: Request) -> Response:
        run = await desk.run(request.path_params["run"])
        found = [_checkpoint(desk, one) for one in await desk.checkpoints() if one.model_id == run.model_id]
        return JSONResponse({"checkpoints": found, "cursor": {"offset": 0, "limit": len(found), "total_count": len(found)}})

    async def _user_checkpoints(self, desk: Desk, request: Request) -> Response:
        page, cursor = _page(request, list(await desk.checkpoints()))
        return JSONResponse({"checkpoints": [_checkpoint(desk, one) for one in page], "cursor": cursor})

    async def _sessions(self, desk: Desk, request: Request) -> Response:
        sessions = sorted(await desk.catalog.all(desk.tenant, Session), key=lambda one: -one.created_ms)
        page, cursor = _page(request, sessions)
        return JSONResponse({"sessions": [one.session_id for one in page], "cursor": cursor})

    async def _session(self, desk: Desk, request: Request) -> Response:
        session = await desk.session(request.path_params["session_id"])
        runs = [one.model_id for one in await desk.catalog.all(desk.tenant, Run) if one.session_id == session.session_id]
        samplers = [one.sampler_id for one in await desk.catalog.all(desk.tenant, Sampler) if one.session_id == session.session_id]
        return JSONResponse(
            {
                "training_run_ids": sorted(runs),
                "sampler_ids": sorted(samplers),
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    async def _weights_info(self, desk: Desk, request: Request) -> Response:
        checkpoint = await desk.checkpoint((await self._read(request, OfPath)).tinker_path)
        run = await desk.run(checkpoint.model_id)
        trained = {
            name: not run.targets or target in run.targets
            for name, target in (("train_unembed", "output_layer"), ("train_mlp", "linear_fc1"), ("train_attn", "linear_qkv"))
        }
        return JSONResponse({"base_model": run.base_model, "is_lora": True, "lora_rank": run.rank, **trained})

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def _delete(self, desk: Desk, request: Request) -> Response:
        await desk.delete(_path(request))
        return Response(status_code=204)

    async def _publish(self, desk: Desk, request: Request) -> Response:
        return await self._change(desk, request, public=True)

    async def _unpublish(self, desk: Desk, request: Request) -> Response:
        return await self._change(desk, request, public=False)

    async def _set_ttl(self, desk: Desk, request: Request) -> Response:
        ttl_s = (await self._read(request, Ttl)).ttl_seconds
        if ttl_s is not None and ttl_s <= 0:
            raise BadBody(f"ttl_seconds {ttl_s} is not positive")
        return await self._change(desk, request, expires_ms=now_ms() + 1000 * ttl_s if ttl_s else 0)

    async def _change(self, desk: Desk, request: Request, **changes: Any) -> Response:
        checkpoint = await desk.checkpoint(_path(request))
        await desk.catalog.put(desk.tenant, checkpoint.path, msgspec.structs.replace(checkpoint, **changes))
        return JSONResponse({})


# --- bodies of requests -----------------------------------------------------------------------------------------------


class CreateSession(msgspec.Struct):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    project_id: str | None = None


class OfSession(msgspec.Struct):
    session_id: str


class OfModel(msgspec.Struct):
    model_id: str


class OfRequest(msgspec.Struct):
    request_id: str


class OfPath(msgspec.Struct):
    tinker_path: str


class Reason(msgspec.Struct):
    type: str = "success"


class Finish(msgspec.Struct):
    reason: Reason = msgspec.field(default_factory=Reason)


class CreateModel(msgspec.Struct):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] = {}
    user_metadata: dict[str, Any] | None = None


class LoadWeights(msgspec.Struct):
    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None


class StepRequest(msgspec.Struct):
    model_id: str
    seq_id: int
    adam_params: translate.AdamParams | None = None
    optimizer_params: Any = None


class SaveWeights(msgspec.Struct):
    model_id: str
    seq_id: int
    path: str | None = None
    kind: str = "snapshot"
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSampler(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Ttl(msgspec.Struct):
    ttl_seconds: int | None = None


# --- answers ----------------------------------------------------------------------------------------------------------


def _promise(short_id: str, model_id: str | None = None) -> Response:
    content = {"request_id": short_id, "model_id": model_id} if model_id else {"request_id": short_id}
    return Response(msgspec.json.encode(content), media_type=JSON)


def _refusal(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail, "code": code}, status, headers)


def _number(value: int) -> int:
    if not 0 <= value < 10**9:
        raise MalformedRequest(f"sequence number {value} is outside 0..10^9")
    return value


def _path(request: Request) -> str:
    parts = request.path_params
    return path_of(parts["run"], parts["kind"], parts["name"])


def _page(request: Request, items: list[T]) -> tuple[list[T], dict[str, int]]:
    try:
        limit, offset = int(request.query_params.get("limit", 20)), int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise MalformedRequest(f"limit and offset are numbers: {error}") from error
    if not (0 <= limit <= 10_000 and offset >= 0):
        raise MalformedRequest(f"limit {limit} or offset {offset} is out of bounds")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _checkpoint(desk: Desk, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": "training" if checkpoint.kind == WEIGHTS else "sampler",
        "time": _time(checkpoint.created_ms),
        "tinker_path": checkpoint.path,
        "size_bytes": desk.size_bytes(checkpoint),
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": _time(checkpoint.expires_ms) if checkpoint.expires_ms else None,
    }


def _time(ms: int) -> str:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC).isoformat()
