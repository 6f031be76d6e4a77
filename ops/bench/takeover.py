"""How long a fleet stands still when its leader is killed: a standby waits, the leader gets `kill -9` in the middle of a training loop.

Measured from the kill to the next answer that a producer gets, beside the lease, which is most of it: a standby cannot know sooner.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio

from ops.bench import result
from scheduler.embedded import EmbeddedServer
from scheduler.producer import AdapterHandle, Producer, datum

CONFIG = """
[fleet]
name = "takeover"
[redis]
lease_ms = {lease_ms}
[log]
format = "json"
[groups.main]
backend = "simulated"
"""


class Candidate:
    def __init__(self, directory: Path, number: int) -> None:
        self.log = directory / f"daemon{number}.log"
        command = [sys.executable, "-m", "ops.cli", "serve", "--config", str(directory / "takeover.toml"), "--data-dir", str(directory)]
        command += ["--url", EmbeddedServer(directory).url]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def said(self, event: str) -> dict[str, object] | None:
        for line in self.log.read_text().splitlines():
            if line.startswith("{") and (said := json.loads(line))["event"] == event:
                return dict(said)
        return None

    async def wait_for(self, event: str) -> dict[str, object]:
        with anyio.fail_after(60):
            while (said := self.said(event)) is None:
                await anyio.sleep(0.02)
        return said


async def measure(directory: Path, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    leader = Candidate(directory, 0)
    await leader.wait_for("workers_joined")
    async with Producer.connect(EmbeddedServer(directory).url, fleet="takeover", tenant="ada") as producer:
        adapter = await producer.create_adapter("poet", rank=4)
        for number in range(1, rounds + 1):
            standby = Candidate(directory, number)
            await standby.wait_for("standby")
            await _train(adapter, 100)
            killed = time.perf_counter()
            os.kill(leader.process.pid, signal.SIGKILL)
            leader.process.wait()
            await _train(adapter, 1)
            stood_still_ms = round(1000 * (time.perf_counter() - killed))
            led = await standby.wait_for("leading")
            rows.append({"stood_still_ms": stood_still_ms, "fold_ms": led["took_ms"], "events_folded": led["events_folded"]})
            print(f"takeover {number}: {stood_still_ms} ms, of which {led['took_ms']} ms to fold {led['events_folded']} events", flush=True)
            leader = standby
    leader.process.send_signal(signal.SIGTERM)
    leader.process.wait(30)
    return rows


async def _train(adapter: AdapterHandle, steps: int) -> None:
    for _ in range(steps):
        await adapter.forward_backward([datum([1, 2, 3], [2, 3, 4])])
        await (await adapter.optim_step())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lease-ms", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "takeover.toml").write_text(CONFIG.format(lease_ms=args.lease_ms))
        server = EmbeddedServer(directory)
        server.start()
        try:
            rows = anyio.run(measure, directory, args.rounds)
        finally:
            server.stop()
    stood_still = [float(str(row["stood_still_ms"])) for row in rows]
    ratio = statistics.median(stood_still) / args.lease_ms
    print(f"median {statistics.median(stood_still):.0f} ms, {ratio:.2f} of the lease of {args.lease_ms} ms")
    print(result.write("takeover", {"lease_ms": args.lease_ms, "median_of_lease": round(ratio, 2), "takeovers": rows}))


if __name__ == "__main__":
    main()
