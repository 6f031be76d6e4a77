"""What sharing costs: tenants that train in turns on one real worker group, against one tenant that does the same work alone.

Through the whole stack: server synced at every write, daemon, Ray, a Megatron group, producers that keep `--ahead` steps under way. The
two are measured alternately in one run. Beside the ratio, where the group's time went, by the log: steps that compute, steps that switch,
and the rest, in which the group waited for its next plan.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import msgspec

from ops.bench import result
from ops.bench.running import FLEET, fleet
from ops.replay import history
from ops.tables import table
from scheduler.config import Config
from scheduler.producer import AdapterHandle, Producer, datum
from state.archive import Archive, History
from state.events import StepFinished, StepKind, StepStarted, decode
from state.files import Directory
from state.redis_log import RedisLog
from state.requests import Datum
from state.segment_log import write_segment

CONFIG = """
[groups.main]
max_rank = 16
device_slots = 2
[groups.main.model]
layers = 4
hidden_size = 256
heads = 4
ffn_hidden_size = 1024
vocab_size = 512
max_sequence_tokens = 256
"""
RANKS = (4, 8, 16)


class Work:
    """What each step brings: `sequences` of `tokens`."""

    def __init__(self, sequences: int, tokens: int, vocabulary: int) -> None:
        self.sequences, self.tokens, self.vocabulary = sequences, tokens, vocabulary

    def batch(self, seed: str) -> list[Datum]:
        rng = random.Random(seed)
        rows = [rng.choices(range(self.vocabulary), k=self.tokens + 1) for _ in range(self.sequences)]
        return [datum(row[:-1], row[1:]) for row in rows]


async def train(adapter: AdapterHandle, work: Work, steps: int, ahead: int) -> None:
    room = anyio.Semaphore(ahead)

    async def step(number: int) -> None:
        forward = await adapter.forward_backward(work.batch(f"{adapter.producer.tenant}/{number}"))
        update = await adapter.optim_step(learning_rate=1e-3)
        waiting.start_soon(done, forward, update)

    async def done(*futures: object) -> None:
        for future in futures:
            await future  # type: ignore[misc]
        room.release()

    async with anyio.create_task_group() as waiting:
        for number in range(steps):
            await room.acquire()
            await step(number)


async def together(adapters: list[AdapterHandle], work: Work, steps: int, ahead: int) -> float:
    """Seconds from the first request to the last answer."""
    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for adapter in adapters:
            tasks.start_soon(train, adapter, work, steps, ahead)
    return time.perf_counter() - began


async def where(store: RedisLog, after: int, seconds: float) -> dict[str, float]:
    """Of a group's time since `after`, in percent; and how many steps of each kind there were."""
    steps, spent_us, counts = {}, Counter[str](), Counter[str]()
    while events := await store.read(after, 1000):
        after = events[-1][0]
        for _, data in events:
            event = decode(data)
            if isinstance(event, StepStarted):
                steps[event.step.id] = event.step.kind
            elif isinstance(event, StepFinished):
                kind = steps.get(event.step_id, StepKind.EXECUTE)
                spent_us[kind] += event.cost_us
                counts[kind] += 1
    computing = spent_us.pop(StepKind.EXECUTE, 0)
    switching = sum(spent_us.values())
    shares = {"computing_%": computing, "switching_%": switching}
    rows = {name: round(100e-6 * value / seconds, 2) for name, value in shares.items()}
    return rows | {"waiting_%": round(100 - sum(rows.values()), 2)} | {f"{kind}_steps": count for kind, count in sorted(counts.items())}


async def measure(url: str, args: argparse.Namespace, config: Config) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    store = RedisLog.connect(url, FLEET)
    async with AsyncExitStack() as stack:
        adapters = []
        for number in range(args.tenants):
            producer = await stack.enter_async_context(Producer.connect(url, fleet=FLEET, tenant=f"t{number}"))
            adapters.append(await producer.create_adapter("poet", rank=RANKS[number % len(RANKS)], seed=number))
        for sequences in args.sequences:
            work = Work(sequences, args.tokens, config.groups["main"].model.vocab_size)
            await together(adapters, work, 1, args.ahead)  # what happens at first only is over
            for number in range(args.rounds):
                for name, who, steps in (("alone", adapters[:1], args.steps * args.tenants), ("shared", adapters, args.steps)):
                    _, at = await store.bounds()
                    seconds = await together(who, work, steps, args.ahead)
                    tokens = args.steps * args.tenants * sequences * work.tokens
                    row = {"sequences": sequences, "round": number, "who": name, "seconds": round(seconds, 3)}
                    rows.append(row | {"tokens_per_s": round(tokens / seconds)} | await where(store, at, seconds))
                    print(rows[-1], file=sys.stderr)
    if args.keep:
        whole = History(Archive(Directory(config.data_dir / "archive")), store)
        write_segment(args.keep, [event async for event in history(whole)])
    await store.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML with a group `main` and no [fleet]; by default a small model on the processor")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of each tenant in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=[4], help="in a forward_backward; measured for each")
    parser.add_argument("--tokens", type=int, default=256, help="in a sequence")
    parser.add_argument("--ahead", type=int, default=8, help="steps that a tenant has under way")
    parser.add_argument("--name", default="sharing-cpu", help="of the result file")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE.hdlog", help="write the whole run's log there: `hotdesk trace` and `replay` read it"
    )
    args = parser.parse_args()
    with fleet(args.config.read_text() if args.config else CONFIG) as (url, config):
        rows = anyio.run(measure, url, args, config)
    print(table(list(rows[1]), [[row.get(key, "") for key in rows[1]] for row in rows]))
    ratios = {}
    for sequences in args.sequences:
        mine = [row for row in rows if row["sequences"] == sequences]
        alone, shared = (statistics.median(float(row["seconds"]) for row in mine if row["who"] == who) for who in ("alone", "shared"))
        ratios[f"{sequences} x {args.tokens}"] = round(shared / alone, 4)
    print(f"{args.tenants} tenants in turns, in time of one alone with the same work, by batch (medians of {args.rounds}): {ratios}")
    model = msgspec.structs.asdict(config.groups["main"].model)
    result.write(args.name, {"ratio": ratios, "model": model, "rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
