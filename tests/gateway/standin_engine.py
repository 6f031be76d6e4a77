"""A stand-in for an external engine, where none can run: no weights of a served model exist here, and no accelerator.

python -m tests.gateway.standin_engine PORT

What stands in is the model: the next token's logits are drawn from a hash of the adapter's files and of the tokens before it. The protocol
is vLLM's: adapters are loaded and unloaded by name and path, an unknown model is 404, a name twice is 400, completions take and give token
ids. `/standin` sets faults and tells what was seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
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
    def __init__(self) -> None:
        self.adapters: dict[str, str] = {"base": ""}
        self.delay_s = 0.0
        self.fault, self.faults_left = 0, 0
        self.running, self.most_running = 0, 0
        self.seen: list[str] = []

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
            {"seen": self.seen, "most_running": self.most_running, "running": self.running, "adapters": list(self.adapters)}
        )


def logprobs_after(digest: str, tokens: list[int]) -> np.ndarray:
    number = hashlib.sha256(f"{digest}/{tokens}".encode()).digest()
    logits = np.random.default_rng(list(number)).normal(size=VOCABULARY) * 2
    return (logits - np.log(np.exp(logits).sum())).astype("<f4")


def best(logprobs: np.ndarray, k: int) -> list[int]:
    return [int(token) for token in np.argsort(-logprobs)[:k]]


def error(status: int, kind: str, words: str) -> JSONResponse:
    return JSONResponse({"error": {"message": words, "type": kind, "param": None, "code": status}}, status)


def main(port: int) -> None:
    standin = StandIn()
    routes = [
        Route("/v1/load_lora_adapter", standin.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", standin.unload, methods=["POST"]),
        Route("/v1/completions", standin.completions, methods=["POST"]),
        Route("/standin", standin.standin, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]))
