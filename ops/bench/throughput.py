"""Requests a second through the whole scheduler, and how long one takes: real server synced at every write, real daemon, producers in
other processes; the workers cost nothing.

Each tenant is a closed loop: a `forward_backward` (4 sequences of 128 tokens) and an `optim_step` are sent together, both are awaited.
Beside it, in the same run, the floor: the same bodies appended to the same server by a closed loop that does nothing else. Where cores
are few, the processor time that a request takes in the daemon, the server and the producers says more than requests a second do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import redis

from ops.bench import result
from ops.tables import table
from scheduler.embedded import EmbeddedServer
from scheduler.producer import Producer, datum
from state.requests import Forward, encode_body

PRODUCERS = 2
CONFIG = """
[fleet]
name = "throughput"
[log]
level = "warning"
[groups.main]
backend = "simulated"
max_adapters = 4096
host_slots = 4096
"""
DATA = tuple(datum(list(range(128)), list(range(1, 129))) for _ in range(4))
#: Multi-tenant LoRA servers on two cores with null backends: requests/s at 1, 8, 64 tenants, as published.
PEERS = {"SQLite, one process": (18, 85, 129), "Redis everysec": (299, 288, 257)}


async def _tenant(url: str, name: str, until: list[float], latencies_ms: list[float]) -> None:
    async with Producer.connect(url, fleet="throughput", tenant=name) as producer:
        adapter = await producer.create_adapter("poet", rank=4)
        while not until:
            await anyio.sleep(0.01)
        while time.perf_counter() < until[0]:
            began = time.perf_counter()
            forward = await adapter.forward_backward(DATA)
            step = await adapter.optim_step(learning_rate=1e-4)
            await forward
            latencies_ms.append(1000 * (time.perf_counter() - began))
            await step
            latencies_ms.append(1000 * (time.perf_counter() - began))


def _producers(url: str, names: list[str], seconds: float, ready: Any, go: Any, answers: Any) -> None:
    """One process with the loops of many tenants. Answers its latencies, and the processor time it took."""
    latencies_ms: list[float] = []
    until: list[float] = []
    cpu_s: list[float] = []

    async def begin() -> None:
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(_tenant, url, name, until, latencies_ms)
            await anyio.sleep(0.5 + 0.02 * len(names))  # all adapters are there
            ready.release()
            await anyio.to_thread.run_sync(go.wait)
            cpu_s.append(time.process_time())
            until.append(time.perf_counter() + seconds)
        cpu_s.append(time.process_time())

    anyio.run(begin)
    answers.put((latencies_ms, cpu_s[1] - cpu_s[0]))


def _cpu_s(pid: int) -> float:
    """Processor time of a process, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, pids: Mapping[str, int], tenants: int, seconds: float) -> dict[str, float]:
    """`pids`: processes beside the producers whose processor time counts, by the name it is told under."""
    context = multiprocessing.get_context("spawn")
    ready, go, answers = context.Semaphore(0), context.Event(), context.Queue()
    names = [f"t{tenants}n{number}" for number in range(tenants)]
    parts = [names[part::PRODUCERS] for part in range(PRODUCERS) if names[part::PRODUCERS]]
    processes = [context.Process(target=_producers, args=(url, part, seconds, ready, go, answers)) for part in parts]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    before_s = {name: _cpu_s(pid) for name, pid in pids.items()}
    go.set()
    told = [answers.get() for _ in processes]
    cpu_s = {name: _cpu_s(pid) - before_s[name] for name, pid in pids.items()} | {"producers": sum(spent_s for _, spent_s in told)}
    latencies_ms = [latency for latencies, _ in told for latency in latencies]
    for process in processes:
        process.join()
    ordered = sorted(latencies_ms)
    return {
        "tenants": tenants,
        "requests_per_s": round(len(ordered) / seconds, 1),
        "p50_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
        **{f"{name}_cpu_ms": round(1000 * spent_s / len(ordered), 3) for name, spent_s in cpu_s.items()},
    }


def floor(server: EmbeddedServer, seconds: float) -> dict[str, float]:
    """Appends of the same body, one after the other: what one durable write costs on this disk."""
    body = encode_body(Forward(DATA))
    times_ms = []
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            client.xadd("floor", {"b": body}, maxlen=1000)
            times_ms.append(1000 * (time.perf_counter() - began))
    return {"requests_per_s": round(len(times_ms) / seconds, 1), "p50_ms": round(statistics.median(times_ms), 3)}


@contextmanager
def fleet(directory: Path, profile: str = "") -> Iterator[tuple[EmbeddedServer, dict[str, int]]]:
    """The server, and the process ids of daemon and server."""
    (directory / "throughput.toml").write_text(CONFIG)
    server = EmbeddedServer(directory)
    server.start()
    command = [sys.executable, *(["-m", "cProfile", "-o", profile] if profile else []), "-m", "ops.cli", "serve", "--url", server.url]
    command += ["--config", str(directory / "throughput.toml"), "--data-dir", str(directory)]
    daemon = subprocess.Popen(command)
    try:
        while not (directory / "endpoint").exists():
            time.sleep(0.05)
        assert server.process is not None
        yield server, {"daemon": daemon.pid, "server": server.process.pid}
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default %(default)s)")
    parser.add_argument("--name", default="throughput", help="of the result file")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    parser.add_argument("--profile", default="", metavar="FILE", help="write the daemon's profile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, fleet(Path(name), args.profile) as (server, pids):
        lowest = floor(server, 2.0)
        rows = [measure(server.url, pids, tenants, args.seconds) for tenants in args.tenants]
    for row in rows:
        row["p50_of_floor"] = round(row["p50_ms"] / lowest["p50_ms"], 1)
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"floor: one durable append takes {lowest['p50_ms']} ms, {lowest['requests_per_s']} a second")
    for peer, figures in PEERS.items():
        print(f"peer ({peer}): {' / '.join(map(str, figures))} requests/s at 1 / 8 / 64 tenants")
    print(result.write(args.name, {"floor": lowest, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
