"""One tenant of the demo, in its own process: a byte-level language model on one text, through the queue producer.

Prints one JSON object a line: progress, then the result. What it sends depends on its arguments alone, so the same tenant run alone
sends the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
from typing import Any

import anyio
import numpy as np

from scheduler.producer import AdapterHandle, Producer, datum, values
from state.requests import Datum, ForwardResult, OptimStepResult

SEQUENCES, LENGTH = 8, 64
WARM_UP_STEPS, LEARNING_RATE = 10, 5e-3
AHEAD = 4  # requests kept in flight, so that a turn finds several of them queued


def text(name: str) -> bytes:
    """Real text that every Python carries."""
    if name == "topics":
        from pydoc_data.topics import topics

        return "\n".join(topics.values()).encode()
    if name == "argparse":
        return inspect.getsource(argparse).encode()
    import html.entities

    return inspect.getsource(html.entities).encode()


PROMPTS = {"topics": b"The ", "argparse": b"    def ", "entities": b"    '"}


def byte_entropy(data: bytes) -> float:
    """Nats a byte of single bytes: what a model that knows only frequencies can reach."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    shares = counts[counts > 0] / len(data)
    return float(-(shares * np.log(shares)).sum())


def batch(data: bytes, seed: int, step: int) -> list[Datum]:
    random = np.random.default_rng([seed, step])
    starts = random.integers(0, len(data) - LENGTH - 1, SEQUENCES)
    windows = [np.frombuffer(data, np.uint8)[start : start + LENGTH + 1].astype(np.int32) for start in starts]
    return [datum(window[:-1], window[1:]) for window in windows]


def learning_rate(step: int) -> float:
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def train(args: argparse.Namespace) -> None:
    data = text(args.text)
    async with Producer.connect(args.url, fleet=args.fleet, tenant=args.tenant) as hotdesk:
        adapter = await hotdesk.create_adapter("writer", rank=args.rank, seed=args.seed, instance="demo")
        say(kind="started", entropy=byte_entropy(data), bytes=len(data))
        losses: list[float] = []
        digests: list[str] = []
        waiting: list[tuple[Any, Any]] = []
        for step in range(args.steps):
            waiting.append(
                (
                    await adapter.forward_backward(batch(data, args.seed, step)),
                    await adapter.optim_step(learning_rate=learning_rate(step), eps=1e-8),
                )
            )
            if len(waiting) >= AHEAD:
                await collect(waiting.pop(0), losses, digests)
            if (step + 1) % args.sample_every == 0 and step + 1 < args.steps:
                await sample(adapter, args, 24)
        for pair in waiting:
            await collect(pair, losses, digests)
        written = await sample(adapter, args, 160)
        saved = await (await adapter.save_state("final", overwrite=True))
        say(
            kind="done",
            losses=losses,
            digests=digests,
            text=written.decode("utf-8", "replace"),
            path=saved.path,
            entropy=byte_entropy(data),
        )


async def collect(pair: tuple[Any, Any], losses: list[float], digests: list[str]) -> None:
    forward: ForwardResult = await pair[0]
    step: OptimStepResult = await pair[1]
    losses.append(forward.metrics["loss:sum"] / forward.metrics["tokens:sum"])
    digests.append(step.digest)
    say(kind="step", step=step.optimizer_step, loss=losses[-1])


async def sample(adapter: AdapterHandle, args: argparse.Namespace, max_tokens: int) -> bytes:
    prompt = PROMPTS[args.text]
    params = {"temperature": 0.8, "seed": args.seed, "max_tokens": max_tokens}
    result = await (await adapter.sample(list(prompt), **params))
    return prompt + values(result.sequences[0].tokens).astype(np.uint8).tobytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--text", choices=list(PROMPTS), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sample-every", type=int, required=True)
    try:
        anyio.run(train, parser.parse_args())
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass


if __name__ == "__main__":
    main()
