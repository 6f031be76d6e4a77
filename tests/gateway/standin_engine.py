"""A stand-in for an external engine, where none can run: no weights of a served model exist here, and no accelerator.

python -m tests.gateway.standin_engine PORT [DEVICE-BYTES]

What stands in is the model: the next token's logits are drawn from a hash of the adapter's files and of the tokens before it. The protocols
are vLLM's (adapters are loaded and unloaded by name and path, an unknown model is 404, a name twice is 400, completions take and give
token ids) and SGLang's (`/generate`, whose requests name the adapter; what is not loaded is 400 with words). `/standin` sets faults and
tells what was seen. It sleeps as vLLM does; what was loaded before is another adapter afterwards, as has been reported of one version,
and a call that a sleeping engine cannot serve is an error that is remembered. With DEVICE-BYTES it holds so much of
a GPU while it is awake.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import uvicorn
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

VOCABULARY, LONGEST, MOST_LOGPROBS, EOS = 64, 64, 20, 1


class StandIn:
    def __init__(self, device_bytes: int) -> None:
        self.device_bytes, self.held = device_bytes, None
        self.take()
        self.adapters: dict[str, str] = {"base": ""}
        self.delay_s = 0.0
        self.fault, self.faults_left = 0, 0
        self.running, self.most_running = 0, 0
        self.seen: list[str] = []
        self.asleep = False
        self.disturbed = 0  # calls that came while it slept

    def take(self) -> None:
        if self.device_bytes:
            import torch

            self.held = torch.empty(self.device_bytes, dtype=torch.uint8, device="cuda")

    def give(self) -> None:
        if self.device_bytes:
            import torch

            self.held = None
            torch.cuda.empty_cache()

    async def sleep(self, request: Request) -> Response:
        self.seen.append(f"sleep with {len(self.adapters) - 1} loaded")
        self.adapters = {name: f"broken {digest}" if digest else "" for name, digest in self.adapters.items()}
        self.asleep = True
        self.give()
        return Response()

    async def wake(self, request: Request) -> Response:
        self.seen.append("wake")
        try:
            self.take()
        except RuntimeError as fault:
            return error(500, "InternalServerError", str(fault))
        self.asleep = False
        return Response()

    async def models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model", "parent": "base" if digest else None} for name, digest in self.adapters.items()]
        return JSONResponse({"object": "list", "data": data})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self.asleep})

    def awake(self, act: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if self.asleep:
                self.disturbed += 1
                return error(500, "InternalServerError", "CUDA error: an illegal memory access was encountered")
            return await act(request)

        return handle

    async def load(self, request: Request) -> Response:
        asked = await request.json()
        name, path = asked.get("lora_name"), Path(asked.get("lora_path", ""))
        if not name or not asked.get("lora_path"):
            return error(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters:
            return error(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
        try:
            settings = json.loads((path / "adapter_config.json").read_bytes())
            weights = load_file(path / "adapter_model.safetensors")
        except OSError as fault:
            return error(404, "NotFoundError", f"No adapter found for {path}: {fault}")
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for key in sorted(weights):
            digest.update(key.encode() + weights[key].tobytes())
        self.adapters[name] = digest.hexdigest()
        self.seen.append(f"load {name}")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = (await request.json()).get("lora_name")
        if name not in self.adapters or name == "base":
            return error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        self.seen.append(f"unload {name} while {self.running} run")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def load_sglang(self, request: Request) -> Response:
        name = (await request.json()).get("lora_name")
        if name in self.adapters:
            return updated(f"LoRA adapter {name} is already loaded.")
        answer = await self.load(request)
        return updated("" if answer.status_code == 200 else f"Failed to load LoRA adapter {name}")

    async def unload_sglang(self, request: Request) -> Response:
        """It waits for what runs by itself; this one is told by the test whether it had to."""
        answer = await self.unload(request)
        return updated("" if answer.status_code == 200 else "LoRA with that name does not exist, or was not loaded.")

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        count = len(asked["input_ids"])
        names = asked.get("lora_path") or ["base"] * count
        if self.faults_left:
            self.faults_left -= 1
            return error(self.fault, "InternalServerError", "as it was told to")
        if missing := set(names) - set(self.adapters):
            return error(400, "BadRequest", f"The following requested LoRA adapters are not loaded: {missing}")
        longest = max(len(ids) + params["max_new_tokens"] for ids, params in zip(asked["input_ids"], asked["sampling_params"]))
        if longest > LONGEST:
            return error(400, "BadRequest", f"Requested token count exceeds the model's maximum context length of {LONGEST} tokens.")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay_s)
        rows = zip(asked["input_ids"], asked["sampling_params"], names)
        answers = [self._generated(ids, params, name, asked) for ids, params, name in rows]
        self.running -= 1
        self.seen.append(f"generate {names[0]}")
        return JSONResponse(answers)

    def _generated(self, ids: list[int], params: dict, name: str, asked: dict) -> dict:
        """From the same model as a completion, in the other words."""
        k, whole = asked["top_logprobs_num"], asked["logprob_start_len"] == 0
        completion = {
            "model": name,
            "prompt": ids,
            "seed": params["sampling_seed"],
            "max_tokens": params["max_new_tokens"],
            "temperature": params["temperature"],
            "stop_token_ids": params["stop_token_ids"],
            "ignore_eos": params["ignore_eos"],
            "logprobs": k,
            "prompt_logprobs": 0,
        }
        choice = self._choice(0, completion)
        values, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        meta = {
            "finish_reason": {"type": choice["finish_reason"]},
            "output_token_logprobs": [[value, token, None] for value, token in zip(values, choice["token_ids"])],
        }
        if k:
            meta["output_top_logprobs"] = [rows_of({int(key[9:]): value for key, value in top.items()}, k) for top in tops]
        if whole:
            seen = [logprobs_after(self.adapters[name], ids[:at]) for at in range(1, len(ids))]
            meta["input_token_logprobs"] = [[None, ids[0], None], *([float(row[token]), token, None] for row, token in zip(seen, ids[1:]))]
            meta["input_top_logprobs"] = [None, *(rows_of({one: float(row[one]) for one in best(row, k)}, k) for row in seen)]
        return {"text": "", "output_ids": choice["token_ids"], "meta_info": meta}

    async def completions(self, request: Request) -> Response:
        asked = await request.json()
        if self.faults_left:
            self.faults_left -= 1
            return error(self.fault, "InternalServerError", "as it was told to")
        if asked["model"] not in self.adapters:
            return error(404, "NotFoundError", f"The model `{asked['model']}` does not exist.")
        if asked["temperature"] == 0 and asked["n"] > 1:
            return error(400, "BadRequestError", "n must be 1 when using greedy sampling")
        if len(asked["prompt"]) + asked["max_tokens"] > LONGEST or any(not 0 <= token < VOCABULARY for token in asked["prompt"]):
            return error(400, "BadRequestError", f"the prompt has a token outside the vocabulary, or is too long for {LONGEST} tokens")
        if max(asked["logprobs"], asked.get("prompt_logprobs", 0)) > MOST_LOGPROBS:
            return error(400, "BadRequestError", f"more than {MOST_LOGPROBS} logprobs")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay_s)
        choices = [self._choice(index, asked) for index in range(asked["n"])]
        self.running -= 1
        self.seen.append(f"completion {asked['model']}")
        return JSONResponse({"object": "text_completion", "model": asked["model"], "choices": choices})

    def _choice(self, index: int, asked: dict) -> dict:
        digest = self.adapters[asked["model"]]
        tokens, values, tops = list(asked["prompt"]), [], []
        rng = np.random.default_rng([asked["seed"], index])
        reason = "length"
        for _ in range(asked["max_tokens"]):
            logprobs = logprobs_after(digest, tokens)
            token = int(np.argmax(logprobs)) if asked["temperature"] == 0 else int(np.argmax(logprobs + rng.gumbel(size=VOCABULARY)))
            values.append(float(logprobs[token]))
            tops.append({f"token_id:{one}": float(logprobs[one]) for one in {*best(logprobs, asked["logprobs"]), token}})
            tokens.append(token)
            if token in asked["stop_token_ids"] or (token == EOS and not asked["ignore_eos"]):
                reason = "stop"
                break
        choice = {
            "index": index,
            "text": "",
            "finish_reason": reason,
            "token_ids": tokens[len(asked["prompt"]) :],
            "logprobs": {"token_logprobs": values, "top_logprobs": tops, "tokens": [], "text_offset": []},
        }
        if asked.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [None] + [
                self._row(logprobs_after(digest, asked["prompt"][:at]), asked["prompt"][at], asked["prompt_logprobs"])
                for at in range(1, len(asked["prompt"]))
            ]
        return choice

    @staticmethod
    def _row(logprobs: np.ndarray, own: int, k: int) -> dict:
        ranks = np.argsort(np.argsort(-logprobs))
        return {
            str(token): {"logprob": float(logprobs[token]), "rank": int(ranks[token]) + 1, "decoded_token": "?"}
            for token in {*best(logprobs, k), own}
        }

    async def standin(self, request: Request) -> Response:
        asked = await request.json()
        self.delay_s = asked.get("delay_s", self.delay_s)
        self.fault, self.faults_left = asked.get("fault", self.fault), asked.get("times", self.faults_left)
        return JSONResponse(
            {
                "seen": self.seen,
                "most_running": self.most_running,
                "running": self.running,
                "adapters": list(self.adapters),
                "asleep": self.asleep,
                "disturbed": self.disturbed,
            }
        )


def updated(words: str) -> JSONResponse:
    """SGLang's answer to a change of adapters; `words` empty: it was made."""
    return JSONResponse({"success": not words, "error_message": words, "loaded_adapters": {}}, 400 if words else 200)


def rows_of(logprobs: dict[int, float], k: int) -> list[list]:
    return [[value, token, None] for token, value in sorted(logprobs.items(), key=lambda one: -one[1])[:k]]


def logprobs_after(digest: str, tokens: list[int]) -> np.ndarray:
    number = hashlib.sha256(f"{digest}/{tokens}".encode()).digest()
    logits = np.random.default_rng(list(number)).normal(size=VOCABULARY) * 2
    return (logits - np.log(np.exp(logits).sum())).astype("<f4")


def best(logprobs: np.ndarray, k: int) -> list[int]:
    return [int(token) for token in np.argsort(-logprobs)[:k]]


def error(status: int, kind: str, words: str) -> JSONResponse:
    return JSONResponse({"error": {"message": words, "type": kind, "param": None, "code": status}}, status)


def main(port: int, device_bytes: int = 0) -> None:
    standin = StandIn(device_bytes)
    routes = [
        Route("/v1/load_lora_adapter", standin.awake(standin.load), methods=["POST"]),
        Route("/v1/unload_lora_adapter", standin.awake(standin.unload), methods=["POST"]),
        Route("/v1/completions", standin.awake(standin.completions), methods=["POST"]),
        Route("/sleep", standin.sleep, methods=["POST"]),
        Route("/wake_up", standin.wake, methods=["POST"]),
        Route("/v1/models", standin.models, methods=["GET"]),
        Route("/is_sleeping", standin.is_sleeping, methods=["GET"]),
        Route("/load_lora_adapter", standin.load_sglang, methods=["POST"]),
        Route("/unload_lora_adapter", standin.unload_sglang, methods=["POST"]),
        Route("/generate", standin.generate, methods=["POST"]),
        Route("/standin", standin.standin, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="warning")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
