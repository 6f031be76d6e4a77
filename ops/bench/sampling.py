"""The Megatron sampler by itself: tokens a second for one prompt with 1, 8 and 64 continuations, for requests of one continuation that are
computed one by one and together, and what publishing a new version of an adapter costs, beside copying as many bytes through pinned memory
in the same run.

    python -m ops.bench.sampling [--config ops/bench/qwen3-4b.toml] [--tokens 64] [--name sampling-cpu] [--out DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ops.bench import result
from ops.bench.sharing import CONFIG
from ops.tables import table
from scheduler.config import load
from state.requests import Sample, Signature, Tensor
from workers.megatron.rank import Rank, free_port

PROMPT_TOKENS = 32
ALONE, TOGETHER = 4, 64


def median_ms(engine: Any, act: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        engine._synchronize()
        began = time.perf_counter()
        act()
        engine._synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML with a group `main`; by default a small model on the processor")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--name", default="sampling-cpu", help="of the result file")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        path = Path(directory) / "group.toml"
        path.write_text(args.config.read_text() if args.config else CONFIG)
        config = load(path, {}).groups["main"]
        engine: Any = Rank(config, 0, "127.0.0.1", free_port(), directory).machine.engine
        engine.create("a", Signature(config.max_rank, 2.0 * config.max_rank, (), 1))
        engine.wake_sampler()
        device = engine.sampler.base.device
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in engine.sampler.lora)
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        rows: list[dict[str, Any]] = [
            {"what": "publish a version", "bytes": nbytes, "ms": median_ms(engine, lambda: engine.publish("a"), args.repeat)},
            {"what": "copy as many bytes", "bytes": nbytes, "ms": median_ms(engine, lambda: there.copy_(here), args.repeat)},
        ]
        prompt = np.arange(PROMPT_TOKENS, dtype="<i4")
        body = Sample(Tensor("int32", prompt.shape, prompt.tobytes()), max_tokens=args.tokens)
        for count in (1, 8, 64):
            asked = msgspec.structs.replace(body, num_samples=count)
            engine.sampler.sample([asked])
            ms = median_ms(engine, partial(engine.sampler.sample, [asked]), 3)
            rows.append({"what": f"sample {count} x {args.tokens}", "ms": ms, "tokens_per_s": round(1000 * count * args.tokens / ms)})
            print(rows[-1], file=sys.stderr)
        many = [msgspec.structs.replace(body, seed=seed) for seed in range(TOGETHER)]
        each = median_ms(engine, lambda: [engine.sampler.sample([one]) for one in many[:ALONE]], 1) / ALONE
        together = median_ms(engine, lambda: engine.sampler.sample(many), 3) / TOGETHER
        for what, ms in ((f"a request of 1 x {args.tokens}, alone", each), (f"the same, {TOGETHER} together", together)):
            rows.append({"what": what, "ms": ms, "tokens_per_s": round(1000 * args.tokens / ms), "ratio": round(each / ms, 1)})
    for row in rows:
        row["ms"] = round(row["ms"], 3)
    head = ["what", "bytes", "ms", "tokens_per_s", "ratio"]
    print(table(head, [[row.get(key, "") for key in head] for row in rows]))
    result.write(args.name, {"model": msgspec.structs.asdict(config.model), "rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
