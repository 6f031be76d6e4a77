"""Training and sampling on one device for hundreds of turns: tenants train and sample in turns on one real worker group, then the first of
them does the same on a fleet of its own. Every answer and every digest of it must be the same bits.

By the log, beside it: how often the group switched, slept and woke; the fewest and the most bytes on device and host after a step, in the
second half; whether a step ever reported another device than the fold expected (the group would have been given up).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import anyio
import msgspec

from ops.bench import result
from ops.bench.running import FLEET, fleet
from ops.bench.sharing import CONFIG, RANKS, Work
from scheduler.producer import Producer
from state.events import RequestAccepted, StepFinished, StepStarted, WorkersLost, decode
from state.redis_log import RedisLog
from state.requests import Op, digest_of, encode_body

PROMPT = [1, 2, 3]
Answers = list[tuple[str, str, str]]  # of each step: digests of the forward's result, of the adapter after the update, of the sample


async def tenant(url: str, number: int, work: Work, steps: int) -> Answers:
    answers: Answers = []
    async with Producer.connect(url, fleet=FLEET, tenant=f"t{number}") as producer:
        adapter = await producer.create_adapter("poet", rank=RANKS[number % len(RANKS)], seed=number)
        for step in range(steps):
            forward = await adapter.forward_backward(work.batch(f"t{number}/{step}"))
            update = await adapter.optim_step(learning_rate=1e-3)
            sample = await adapter.sample(PROMPT, max_tokens=16, seed=step)
            parts = digest_of(encode_body(await forward)), (await update).digest, digest_of(encode_body(await sample))
            answers.append(parts)
            if number == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1} of {steps}", file=sys.stderr)
    return answers


async def everyone(url: str, numbers: range, work: Work, steps: int) -> dict[int, Answers]:
    seen: dict[int, Answers] = {}

    async def run(number: int) -> None:
        seen[number] = await tenant(url, number, work, steps)

    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(run, number)
    return seen


async def told(url: str) -> dict[str, object]:
    store = RedisLog.connect(url, FLEET)
    steps, counts, devices, hosts, created, lost, after = {}, Counter[str](), [], [], 0, 0, 0
    while events := await store.read(after, 1000):
        after = events[-1][0]
        for _, data in events:
            event = decode(data)
            if isinstance(event, StepStarted):
                steps[event.step.id] = event.step.kind
            elif isinstance(event, StepFinished):
                counts[steps.get(event.step_id, "?")] += 1
                devices.append(event.facts.device_bytes)
                hosts.append(event.facts.host_bytes)
            elif isinstance(event, RequestAccepted) and event.request.op is Op.CREATE_ADAPTER:
                created = len(devices)
            elif isinstance(event, WorkersLost):
                lost += 1
    await store.close()
    half = (created + len(devices)) // 2
    return {
        "steps": {str(kind): count for kind, count in sorted(counts.items())},
        "device_bytes": [min(devices[half:]), max(devices[half:])],
        "host_bytes": [min(hosts[half:]), max(hosts[half:])],
        "workers_lost": lost,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML with a group `main` and no [fleet]; by default a small model on the processor")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30, help="of each tenant: forward_backward, optim_step, sample")
    parser.add_argument("--sequences", type=int, default=2, help="in a forward_backward")
    parser.add_argument("--tokens", type=int, default=64, help="in a sequence")
    parser.add_argument("--name", default="colocated-cpu", help="of the result file")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    args = parser.parse_args()
    groups = args.config.read_text() if args.config else CONFIG
    with fleet(groups) as (url, config):
        model = config.groups["main"].model
        work = Work(args.sequences, args.tokens, model.vocab_size)
        shared = anyio.run(everyone, url, range(args.tenants), work, args.steps)
        row = anyio.run(told, url)
    with fleet(groups) as (url, _):
        alone = anyio.run(everyone, url, range(1), work, args.steps)
    same = [mine == other for mine, other in zip(shared[0], alone[0])]
    row |= {"same_as_alone": f"{sum(same)} of {len(same)} steps", "model": msgspec.structs.asdict(model)}
    print("\n".join(f"{key}: {value}" for key, value in row.items()))
    result.write(args.name, row, args.out)
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
