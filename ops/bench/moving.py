"""What moving adapters between groups brings: two worker groups of one kind, eight tenants; those of one group stop early, the others go
on. Twice, each time on a fleet of its own: adapters may move, and adapters stay.

Told: how long those that went on took, how many moved, and whether each of them has the same bits in both, after every step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import anyio
import msgspec

from ops.bench import result
from ops.bench.running import FLEET, fleet
from ops.bench.sharing import CONFIG, RANKS, Work
from ops.tables import table
from scheduler.producer import AdapterHandle, Producer
from state.events import RequestAccepted, StepFinished, StepKind, StepStarted, decode
from state.redis_log import RedisLog
from state.requests import Op


def groups(config: str, move_gain: float) -> str:
    """`config`, whose group is called `main`, with that group twice."""
    head, _, main = config.partition("[groups.main]")
    again = [("[groups.main]" + main).replace("groups.main", f"groups.{name}") for name in ("left", "right")]
    policy = head if "[policy]" in head else head + "[policy]\n"
    return policy.replace("[policy]\n", f"[policy]\nmove_gain = {move_gain}\n") + "\n".join(again)


async def homes(store: RedisLog) -> dict[str, str]:
    """Tenant -> the group that its adapter was created on."""
    found = {}
    for _, data in await store.read(0, 1000):
        event = decode(data)
        if isinstance(event, RequestAccepted) and event.request.op == Op.CREATE_ADAPTER:
            found[event.request.tenant] = event.group
    return found


async def moves(store: RedisLog) -> int:
    started, count, after = set(), 0, 0
    while events := await store.read(after, 1000):
        after = events[-1][0]
        for _, data in events:
            event = decode(data)
            if isinstance(event, StepStarted) and event.step.kind is StepKind.MOVE:
                started.add((event.group, event.step.id))
            elif isinstance(event, StepFinished):
                count += (event.group, event.step_id) in started
    return count


async def train(adapter: AdapterHandle, work: Work, steps: int, digests: list[str]) -> None:
    for step in range(steps):
        forward = await adapter.forward_backward(work.batch(f"{adapter.producer.tenant}/{step}"))
        update = await adapter.optim_step(learning_rate=1e-3)
        await forward
        digests.append((await update).digest)


async def measured(url: str, args: argparse.Namespace, vocabulary: int) -> tuple[dict[str, object], dict[str, list[str]]]:
    """The row, and what each of those that went on was after every step."""
    work = Work(args.sequences, args.tokens, vocabulary)
    store = RedisLog.connect(url, FLEET)
    digests: dict[str, list[str]] = {f"t{number}": [] for number in range(args.tenants)}
    async with anyio.create_task_group() as connections:
        adapters: dict[str, AdapterHandle] = {}
        closing = anyio.Event()

        async def connect(number: int, ready: anyio.Event) -> None:
            async with Producer.connect(url, fleet=FLEET, tenant=f"t{number}") as producer:
                adapters[producer.tenant] = await producer.create_adapter("poet", rank=RANKS[number % len(RANKS)], seed=number)
                ready.set()
                await closing.wait()

        for number in range(args.tenants):
            ready = anyio.Event()
            connections.start_soon(connect, number, ready)
            await ready.wait()
        home = await homes(store)
        async with anyio.create_task_group() as tasks:
            for tenant, adapter in adapters.items():
                tasks.start_soon(train, adapter, work, 2, digests[tenant])
        going_on = [tenant for tenant in adapters if home[tenant] == "right"]
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for tenant in going_on:
                tasks.start_soon(train, adapters[tenant], work, args.steps, digests[tenant])
        seconds = time.perf_counter() - began
        closing.set()
    tokens = len(going_on) * args.steps * work.sequences * work.tokens
    row: dict[str, object] = {"seconds": round(seconds, 2), "tokens_per_s": round(tokens / seconds), "moves": await moves(store)}
    await store.close()
    return row, {tenant: digests[tenant] for tenant in going_on}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML with a group `main` and no [fleet]; by default a small model on the processor")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="of each tenant that goes on")
    parser.add_argument("--sequences", type=int, default=4, help="in a forward_backward")
    parser.add_argument("--tokens", type=int, default=128, help="in a sequence")
    parser.add_argument("--name", default="moving-cpu", help="of the result file")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    args = parser.parse_args()
    rows, seen = [], []
    for what, move_gain in (("stay", 0.0), ("may move", 4.0)):
        with fleet(groups(args.config.read_text() if args.config else CONFIG, move_gain)) as (url, config):
            model = config.groups["left"].model
            row, digests = anyio.run(measured, url, args, model.vocab_size)
        rows.append({"adapters": what, **row})
        seen.append(digests)
        print(rows[-1], file=sys.stderr)
    same = seen[0] == seen[1]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    steps = sum(len(digests) for digests in seen[0].values())
    print(f"{'the same bits' if same else 'OTHER BITS'} after each of {steps} steps")
    result.write(args.name, {"same_bits": same, "steps": steps, "model": msgspec.structs.asdict(model), "rows": rows}, args.out)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
