"""What a switch of adapters costs: bytes, pieces and time per transition, in one run against

(a) per-tensor copies through pinned memory, out and then in,
(b) one flat buffer each way at once,
(c) only the bytes that had to move, flat, each way at once.

    python -m ops.bench.adapter_store [--shape tiny|qwen3-4b] [--rank 32] [--repeat 7] [--out DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ops.bench import result
from ops.tables import table
from workers.checkpoints import Kept
from workers.group_config import GroupConfig, ModelConfig

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
SHAPES = {
    "tiny": ModelConfig(layers=2, hidden_size=96, heads=4, ffn_hidden_size=384, max_sequence_tokens=256),
    # Qwen3-4B: 36 layers, hidden 2560, GQA 32/8 of 128, ffn 9728; a small vocabulary, since no adapter touches it. Random weights.
    "qwen3-4b": ModelConfig(
        layers=36,
        hidden_size=2560,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn_hidden_size=9728,
        vocab_size=1024,
        max_sequence_tokens=1024,
        gated=True,
    ),
}


class Bench:
    def __init__(self, shape: str, rank: int, repeat: int) -> None:
        from workers.megatron.rank import Rank, free_port

        on_cuda = _cuda()
        config = GroupConfig(
            model=SHAPES[shape],
            max_rank=rank,
            targets=TARGETS,
            dtype="bfloat16",
            device_slots=3,
            host_slots=6,
            gpus_per_rank=float(on_cuda),
        )
        self.rank, self.repeat, self.on_cuda = rank, repeat, on_cuda
        machine: Any = Rank(config, 0, "127.0.0.1", free_port(), tempfile.mkdtemp(prefix="hd-")).machine
        self.engine: Any = machine.engine
        self.signature = self._signature()
        for name in "abc":
            self.engine.create(name, self.signature)
            self.engine._materialise(self.engine.slots[name])
        self.engine.bind("a")
        self.parameters = sum(p.numel() for p in self.engine.parameters.values())

    def _signature(self) -> Any:
        from state.requests import Signature

        return Signature(self.rank, 2.0 * self.rank, (), 1)

    def time_ms(self, act: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        times = []
        for _ in range(self.repeat):
            before()
            self.engine._synchronize()
            started = time.perf_counter()
            act()
            self.engine._synchronize()
            times.append((time.perf_counter() - started) * 1000)
        return statistics.median(times)

    def run(self) -> list[dict[str, Any]]:
        engine = self.engine
        state, grads = engine.state_bytes, engine.grad_bytes
        rows = []
        for what, out in (
            ("forward", (False, False)),
            ("forward_backward", (False, True)),
            ("optim_step", (True, False)),
            ("both", (True, True)),
        ):
            names = ["a", "b"]

            def switch(names: list[str] = names, out: tuple[bool, bool] = out) -> None:
                engine.switch(names[0], names[1], state=out[0], grads=out[1])
                names.reverse()

            # An adapter that leaves with pending gradients comes back with them.
            leaving, coming = state * out[0] + grads * out[1], state + grads * out[1]
            ours = self.time_ms(switch)
            engine.bind("a")
            rows.append(
                {
                    "transition": f"host switch after {what}",
                    "bytes": leaving + coming,
                    "of 36 B a parameter": round((leaving + coming) / (36 * self.parameters), 3),
                    "pieces": len(engine.kept) * (1 + out[0]) + 2 * len(engine.live.grads) * out[1],
                    "ms": ours,
                    "floor (c) ms": self.flat_both_ways(leaving, coming),
                }
            )
        engine.set_aside("a")
        engine.bind("b")
        pair = ["b", "a"]

        def exchange() -> None:
            engine.exchange_live(*pair)
            pair.reverse()

        rows.append(
            {"transition": "resident switch", "bytes": 0, "pieces": len(engine.kept) + len(engine.live.grads), "ms": self.time_ms(exchange)}
        )
        rows.append({"transition": "host switch, prefetched, after optim_step", "bytes": 2 * state, "ms": self.prefetched(pair[0])})
        made = [0]

        def create() -> None:
            made[0] += 1
            engine.create(f"new{made[0]}", self.signature)

        def forget() -> None:
            if made[0]:
                engine.drop(f"new{made[0]}")

        rows.append({"transition": "create", "bytes": state, "ms": self.time_ms(create, forget)})
        rows += self.durable()
        rows.append(
            {
                "transition": "(a) per-tensor, out then in, everything",
                "bytes": 2 * self.everything(),
                "pieces": 2 * len(self.tensors()),
                "ms": self.per_tensor(),
            }
        )
        rows.append(
            {
                "transition": "(b) one flat buffer each way at once, everything",
                "bytes": 2 * self.everything(),
                "pieces": 2,
                "ms": self.flat_both_ways(self.everything(), self.everything()),
            }
        )
        return rows

    def durable(self) -> list[dict[str, Any]]:
        """A snapshot and a sampler's export from the host slot, beside writing as many bytes to a synced file."""
        import os

        from state.events import AdapterFacts

        engine, count = self.engine, [0]
        turn: list[float] = []  # when each step was over
        facts = AdapterFacts("c", "offloaded")

        def snapshot() -> None:
            count[0] += 1
            engine.snapshot("c", count[0], Kept(0, 0), facts, False)

        def beside() -> None:
            count[0] += 1
            engine.snapshot("c", count[0], Kept(0, 0), facts, True)
            turn.append(time.perf_counter())
            engine.writer.settle()  # so that the next one does not wait for this one's memory

        def turn_ms() -> float:
            times = []
            for _ in range(self.repeat):
                began = time.perf_counter()
                beside()
                times.append(1000 * (turn[-1] - began))
            return statistics.median(times)

        def export() -> None:
            count[0] += 1
            engine.save("c", f"e{count[0]}", "sampler_weights", False, facts, "")

        def plain(nbytes: int) -> Callable[[], None]:
            data = bytes(nbytes)

            def act() -> None:
                with open(engine.root / "plain", "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

            return act

        weights = 2 * self.parameters
        return [
            {"transition": "snapshot", "bytes": engine.state_bytes, "ms": self.time_ms(snapshot)},
            {"transition": "snapshot written beside: its step", "bytes": engine.state_bytes, "ms": turn_ms()},
            {"transition": "as many bytes to a synced file", "bytes": engine.state_bytes, "ms": self.time_ms(plain(engine.state_bytes))},
            {"transition": "export for a sampler (PEFT)", "bytes": weights, "ms": self.time_ms(export)},
            {"transition": "as many bytes to a synced file", "bytes": weights, "ms": self.time_ms(plain(weights))},
        ]

    def prefetched(self, leaving: str) -> float:
        """What the next tenant waits for: each round prefetches, waits until it is there, and times the switch up to the moment when
        the incoming adapter can compute; the copy out goes on beside it."""
        import torch

        engine, times, pair = self.engine, [], [leaving, "c"]
        for _ in range(self.repeat):
            engine.prefetch(pair[1])
            engine._synchronize()
            started = time.perf_counter()
            engine.switch(pair[0], pair[1], state=True, grads=False)
            if self.on_cuda:
                torch.cuda.current_stream().synchronize()
            times.append((time.perf_counter() - started) * 1000)
            pair.reverse()
        return statistics.median(times)

    # --- what it is compared with ---------------------------------------------------------------------------------

    def tensors(self) -> list[Any]:
        """The live tensors one by one, as a store without flat storages sees them: weights, gradients, masters, moments."""
        import torch

        found = []
        for parameter in self.engine.parameters.values():
            found += [torch.empty_like(parameter.detach()), *(torch.empty(parameter.shape, device=parameter.device) for _ in range(4))]
        return found

    def everything(self) -> int:
        return 18 * self.parameters  # bf16 weight 2, fp32 gradient 4, master 4, moments 8

    def per_tensor(self) -> float:
        tensors = self.tensors()
        hosts = [t.cpu().pin_memory() if self.on_cuda else t.clone() for t in tensors]

        def act() -> None:
            for tensor, host in zip(tensors, hosts):
                host.copy_(tensor, non_blocking=True)
            self.engine._synchronize()
            for tensor, host in zip(tensors, hosts):
                tensor.copy_(host, non_blocking=True)

        return self.time_ms(act)

    def flat_both_ways(self, out_bytes: int, in_bytes: int) -> float:
        import torch

        out, into = max(1, out_bytes), max(1, in_bytes)
        device = self.engine.device
        there = [torch.empty(n, dtype=torch.uint8, device=device) for n in (out, into)]
        here = [torch.empty(n, dtype=torch.uint8, pin_memory=self.on_cuda) for n in (out, into)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def act() -> None:
            with torch.cuda.stream(streams[0]):
                if out_bytes:
                    here[0].copy_(there[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                there[1].copy_(here[1], non_blocking=True)

        return self.time_ms(act)


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args.shape, args.rank, args.repeat)
    rows = bench.run()
    head = ["transition", "bytes", "of 36 B a parameter", "pieces", "ms", "floor (c) ms"]
    rows = [{name: round(v, 3) if isinstance(v := row.get(name, "-"), float) else v for name in head} for row in rows]
    print(f"{bench.parameters} adapter parameters, {bench.engine.state_bytes} bytes of state, {bench.engine.grad_bytes} of gradients")
    print(table(head, [[row[name] for name in head] for row in rows]))
    print("kept:", result.write(f"adapter_store-{args.shape}-{'cuda' if bench.on_cuda else 'cpu'}", rows, args.out))


if __name__ == "__main__":
    main()
