"""An external engine that serves LoRA adapters by path, in the dialect that its configuration names (`workers.inference.dialects`).

What is repeated, and why it may be: loading and unloading name an immutable version, so that "already loaded" and "not loaded" are success;
a sample changes nothing and has its seed. Only an engine that answered too late is not asked again: it computes still.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import msgspec
import structlog
from safetensors import SafetensorError, safe_open

from state.errors import BadBody, BadCheckpoint, WorkerFailed, WorkersLostError
from state.requests import Sample, SampleResult
from workers.group_config import EngineConfig
from workers.inference.dialects import DIALECTS, Said, parsed

log = structlog.get_logger("hotdesk.inference")

PAUSE_FIRST_S, PAUSE_MOST_S = 0.05, 2.0
TRIES_AT_FAULT = 3  # of an engine that answers with an error of its own
BUSY = (429, 503)
WORDS = 300
LARGE_BYTES = 64 * 1024  # reading more than this leaves the event loop


class Asleep(msgspec.Struct):
    is_sleeping: bool


class Model(msgspec.Struct):
    """`parent`: of an adapter, the base model's name."""

    id: str
    parent: str | None = None


class Models(msgspec.Struct):
    data: list[Model]


class InferenceEngine:
    """One process's connections to it. Names of adapters are the caller's; a name means one version for ever."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.dialect = DIALECTS[config.dialect]
        self._paths: dict[str, Path] = {}  # of what was loaded: an engine that was started again has forgotten it
        self._valid: set[Path] = set()
        self._running: Counter[str] = Counter()
        self._idle: dict[str, anyio.Event] = {}
        self._drained: dict[str, anyio.Event] = {}  # of those that are being unloaded
        headers = {"authorization": f"Bearer {config.key}"} if config.key else {}
        self._http = httpx.AsyncClient(
            base_url=config.url,
            headers=headers,
            limits=httpx.Limits(max_connections=config.connections, max_keepalive_connections=config.connections),
            timeout=httpx.Timeout(config.timeout_s, connect=5.0, pool=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def loaded(self) -> tuple[str, ...]:
        return tuple(self._paths)

    async def sleep(self) -> None:
        """Gives the device back, with nothing left loaded. Idempotent."""
        if await self._is_asleep():
            return
        for name in {*self.loaded, *await self._listed()}:
            await self.unload(name)
        await self._become(self.dialect.sleep, asleep=True)

    async def wake(self) -> None:
        """Idempotent."""
        if await self._is_asleep():
            self._paths.clear()
            await self._become(self.dialect.wake, asleep=False)

    async def _listed(self) -> set[str]:
        """Adapters that the engine has, of earlier processes as well."""
        answer = await self._ask("GET", self.dialect.models)
        if answer.status_code != 200:
            raise WorkerFailed(f"the engine does not list its models: {answer.status_code} {answer.text[:WORDS]}")
        return {model.id for model in msgspec.json.decode(answer.content, type=Models).data if model.parent is not None}

    async def _become(self, route: str, *, asleep: bool) -> None:
        answer = await self._ask("POST", route)
        if answer.status_code != 200 or await self._is_asleep() != asleep:
            state = "asleep" if asleep else "awake"
            raise WorkerFailed(f"the engine is not {state} after {route}: {answer.text[:WORDS]}", way_out="see the engine's log")

    async def _is_asleep(self) -> bool:
        answer = await self._ask("GET", self.dialect.asleep)
        try:
            if answer.status_code == 200:
                return msgspec.json.decode(answer.content, type=Asleep).is_sleeping
            words = f"{answer.status_code} {answer.text[:WORDS]}"
        except msgspec.DecodeError as error:
            words = str(error)
        raise WorkerFailed(
            f"the engine does not say whether it sleeps: {words}", way_out="start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
        )

    async def load(self, name: str, path: Path) -> None:
        """Idempotent. Raises `BadCheckpoint`, and `WorkerFailed` or `WorkersLostError` for an engine that refuses or is away."""
        if path not in self._valid:
            await anyio.to_thread.run_sync(validate, path)
            self._valid.add(path)
        while (draining := self._drained.get(name)) is not None:
            await draining.wait()
        await self._load(name, path)

    async def _load(self, name: str, path: Path) -> None:
        answer = await self._ask("POST", self.dialect.load, {"lora_name": name, "lora_path": str(path)})
        if not self.dialect.is_loaded(Said(answer.status_code, answer.text)):
            raise WorkerFailed(f"the engine did not load {name!r}: {answer.text[:WORDS]}", way_out="see the engine's log")
        self._paths[name] = path

    async def unload(self, name: str) -> None:
        """Once its running samples have ended. Idempotent."""
        if name in self._drained:
            await self._drained[name].wait()
            return
        drained = self._drained[name] = anyio.Event()
        try:
            while self._running[name]:
                idle = self._idle[name] = anyio.Event()
                await idle.wait()
            answer = await self._ask("POST", self.dialect.unload, {"lora_name": name})
            if not self.dialect.is_unloaded(Said(answer.status_code, answer.text)):
                raise WorkerFailed(f"the engine did not unload {name!r}: {answer.text[:WORDS]}")
            self._valid.discard(self._paths.pop(name, Path()))
        finally:
            del self._drained[name]
            if not self._running[name]:
                del self._running[name]
            drained.set()

    async def sample(self, name: str, asked: Sample) -> SampleResult:
        """`name` empty: the base model. Raises `BadBody` for what the engine refuses."""
        self._running[name] += 1
        try:
            body = self.dialect.body(name, self.config.model, asked)
            answer = await self._ask("POST", self.dialect.sample, body)
            if name in self._paths and self.dialect.is_forgotten(Said(answer.status_code, answer.text)):
                log.warning("engine_forgot", adapter=name, detail="loaded again")
                await self._load(name, self._paths[name])  # not behind an unloading that waits for this very sample
                answer = await self._ask("POST", self.dialect.sample, body)
        finally:
            self._running[name] -= 1
            if not self._running[name] and name in self._idle:
                self._idle.pop(name).set()
        if answer.status_code in (400, 422):
            raise BadBody(f"the engine refused the sample: {answer.text[:WORDS]}")
        if answer.status_code != 200:
            raise WorkerFailed(f"the engine answered {answer.status_code}: {answer.text[:WORDS]}")
        if len(answer.content) > LARGE_BYTES:
            return await anyio.to_thread.run_sync(parsed, self.dialect, answer.content, asked)
        return parsed(self.dialect, answer.content, asked)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Waits `patience_s` for an engine that starts, is busy or is away."""
        deadline, pause, faults = anyio.current_time() + self.config.patience_s, PAUSE_FIRST_S, 0
        while True:
            try:
                answer = await self._http.request(method, path, json=body)
                words = f"answers {answer.status_code}"
                if answer.status_code < 500 and answer.status_code not in BUSY:
                    return answer
                if answer.status_code not in BUSY:
                    faults += 1
                    if faults == TRIES_AT_FAULT:
                        return answer
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise WorkerFailed(
                    f"the engine did not answer within {self.config.timeout_s:.0f} s", way_out="raise the engine's timeout_s"
                ) from error
            except httpx.TransportError as error:
                words = f"cannot be reached ({type(error).__name__})"
            if anyio.current_time() + pause > deadline:
                raise WorkersLostError(
                    f"the engine at {self.config.url} {words} for {self.config.patience_s:.0f} s", way_out="send the sample again later"
                )
            await anyio.sleep(pause)
            pause = min(2 * pause, PAUSE_MOST_S)


def validate(path: Path) -> None:
    """That an adapter is what PEFT calls one: its settings, and pairs of A [r, in] and B [out, r]. Raises `BadCheckpoint`. Blocking."""
    try:
        settings = msgspec.json.decode((path / "adapter_config.json").read_bytes(), type=dict[str, Any])
        with safe_open(path / "adapter_model.safetensors", framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise BadCheckpoint(f"the adapter at {path.name!r} cannot be read: {error}") from error
    rank = settings.get("r")
    if settings.get("peft_type") != "LORA" or not shapes:
        raise BadCheckpoint(f"the adapter at {path.name!r} is no LoRA adapter")
    for name, shape in shapes.items():
        if len(shape) != 2 or shape[0 if ".lora_A." in name else 1] != rank:
            raise BadCheckpoint(f"the adapter at {path.name!r} has {name} of shape {list(shape)}, its rank is {rank}")
