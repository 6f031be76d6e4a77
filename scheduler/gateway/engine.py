"""An external engine that serves LoRA adapters by path behind the OpenAI protocol, in vLLM's dialect: `load_lora_adapter`,
`unload_lora_adapter`, and completions of token ids.

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
import numpy as np
import structlog
from safetensors import SafetensorError, safe_open

from scheduler.config import EngineConfig
from scheduler.gateway.answers import LARGE_BYTES
from scheduler.gateway.translate import NO_LOGPROB
from state.errors import BadBody, BadCheckpoint, WorkerFailed, WorkersLostError
from state.requests import Sample, SampleResult, Sequence, Tensor, TopK

log = structlog.get_logger("hotdesk.gateway")

PAUSE_FIRST_S, PAUSE_MOST_S = 0.05, 2.0
TRIES_AT_FAULT = 3  # of an engine that answers with an error of its own
BUSY = (429, 503)
WORDS = 300


class Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[dict[str, Logprob] | None] | None = None


class Completion(msgspec.Struct):
    choices: list[Choice]


class Engine:
    """One process's connections to it. Names of adapters are the caller's; a name means one version for ever."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
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

    async def load(self, name: str, path: Path) -> None:
        """Idempotent. Raises `BadCheckpoint`, and `WorkerFailed` or `WorkersLostError` for an engine that refuses or is away."""
        if path not in self._valid:
            await anyio.to_thread.run_sync(validate, path)
            self._valid.add(path)
        while (draining := self._drained.get(name)) is not None:
            await draining.wait()
        await self._load(name, path)

    async def _load(self, name: str, path: Path) -> None:
        answer = await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        if answer.status_code != 200 and "already been loaded" not in answer.text:
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
            answer = await self._post("/v1/unload_lora_adapter", {"lora_name": name})
            if answer.status_code not in (200, 404):
                raise WorkerFailed(f"the engine did not unload {name!r}: {answer.text[:WORDS]}")
            self._valid.discard(self._paths.pop(name, Path()))
        finally:
            del self._drained[name]
            if not self._running[name]:
                del self._running[name]
            drained.set()

    async def sample(self, name: str, asked: Sample, *, ignore_eos: bool = False) -> SampleResult:
        """`name` empty: the base model. Raises `BadBody` for what the engine refuses."""
        self._running[name] += 1
        try:
            answer = await self._post("/v1/completions", self._completion(name, asked, ignore_eos))
            if answer.status_code == 404 and name in self._paths:
                log.warning("engine_forgot", adapter=name, detail="loaded again")
                await self._load(name, self._paths[name])  # not behind an unloading that waits for this very sample
                answer = await self._post("/v1/completions", self._completion(name, asked, ignore_eos))
        finally:
            self._running[name] -= 1
            if not self._running[name] and name in self._idle:
                self._idle.pop(name).set()
        if answer.status_code in (400, 422):
            raise BadBody(f"the engine refused the sample: {answer.text[:WORDS]}")
        if answer.status_code != 200:
            raise WorkerFailed(f"the engine answered {answer.status_code}: {answer.text[:WORDS]}")
        if len(answer.content) > LARGE_BYTES:
            return await anyio.to_thread.run_sync(result, answer.content, asked)
        return result(answer.content, asked)

    def _completion(self, name: str, asked: Sample, ignore_eos: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": name or self.config.model,
            "prompt": np.frombuffer(asked.prompt.data, "<i4").tolist(),
            "n": 1 if asked.temperature == 0 else asked.num_samples,  # greedy ones are equal, and the engine makes one only
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "seed": asked.seed,
            "stop_token_ids": [token for stop in asked.stop for token in stop],
            "ignore_eos": ignore_eos,
            "logprobs": asked.topk_sample_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if asked.prompt_logprobs or asked.topk_prompt_logprobs:
            body["prompt_logprobs"] = max(1, asked.topk_prompt_logprobs)
        return body

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Waits `patience_s` for an engine that starts, is busy or is away."""
        deadline, pause, faults = anyio.current_time() + self.config.patience_s, PAUSE_FIRST_S, 0
        while True:
            try:
                answer = await self._http.post(path, json=body)
                words = f"answers {answer.status_code}"
                if answer.status_code < 500 and answer.status_code not in BUSY:
                    return answer
                if answer.status_code not in BUSY:
                    faults += 1
                    if faults == TRIES_AT_FAULT:
                        return answer
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise WorkerFailed(
                    f"the engine did not answer within {self.config.timeout_s:.0f} s", way_out="raise gateway.engines.*.timeout_s"
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


def result(content: bytes, asked: Sample) -> SampleResult:
    """Raises `WorkerFailed` for what is no completion, or of other lengths than asked for."""
    try:
        choices = sorted(msgspec.json.decode(content, type=Completion).choices, key=lambda choice: choice.index)
        sequences = [_sequence(choice, asked.topk_sample_logprobs) for choice in choices]
        if asked.temperature == 0:
            sequences *= asked.num_samples
        if len(sequences) != asked.num_samples:
            raise ValueError(f"{len(sequences)} sequences of {asked.num_samples}")
        prompt = None
        if asked.prompt_logprobs or asked.topk_prompt_logprobs:
            prompt = choices[0].prompt_logprobs
            if prompt is None or len(prompt) != asked.prompt.shape[0]:
                raise ValueError("the prompt's logprobs are missing")
        return SampleResult(
            tuple(sequences),
            _own(prompt, np.frombuffer(asked.prompt.data, "<i4").tolist()) if prompt is not None and asked.prompt_logprobs else None,
            _top([_ranked(row) for row in prompt[1:]], asked.topk_prompt_logprobs)
            if prompt is not None and asked.topk_prompt_logprobs
            else None,
        )
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise WorkerFailed(
            f"the engine's answer is none: {error}", way_out="it must know return_token_ids and return_tokens_as_token_ids (vLLM >= 0.10.2)"
        ) from error


def _sequence(choice: Choice, k: int) -> Sequence:
    if choice.logprobs is None or len(choice.logprobs.token_logprobs) != len(choice.token_ids):
        raise ValueError("a sequence without a logprob a token")
    logprobs = np.asarray([np.nan if one is None else one for one in choice.logprobs.token_logprobs], "<f4")
    tokens = np.asarray(choice.token_ids, "<i4")
    topk = None
    if k:
        rows = [{_token(name): value for name, value in (row or {}).items()} for row in choice.logprobs.top_logprobs or []]
        topk = _top([sorted(row.items(), key=lambda cell: -cell[1]) for row in rows], k)
    reason = "stop" if choice.finish_reason == "stop" else "length"
    return Sequence(Tensor("int32", tokens.shape, tokens.tobytes()), Tensor("float32", logprobs.shape, logprobs.tobytes()), reason, topk)


def _token(name: str) -> int:
    """Of "token_id:17"."""
    return int(name.removeprefix("token_id:"))


def _own(prompt: list[dict[str, Logprob] | None], tokens: list[int]) -> Tensor:
    """Of the prompt's own tokens; NaN where there is none, as at the first."""
    values = [row[str(token)].logprob if row else np.nan for row, token in zip(prompt, tokens)]
    return Tensor("float32", (len(values),), np.asarray(values, "<f4").tobytes())


def _ranked(row: dict[str, Logprob] | None) -> list[tuple[int, float]]:
    return sorted(((int(token), seen.logprob) for token, seen in (row or {}).items()), key=lambda cell: -cell[1])


def _top(rows: list[list[tuple[int, float]]], k: int) -> TopK:
    tokens = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), NO_LOGPROB, "<f4")
    for index, row in enumerate(rows):
        for column, (token, value) in enumerate(row[:k]):
            tokens[index, column], logprobs[index, column] = token, value
    return TopK(Tensor("int32", tokens.shape, tokens.tobytes()), Tensor("float32", logprobs.shape, logprobs.tobytes()))
