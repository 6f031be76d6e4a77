"""`hotdesk demo`: the main job on this machine, with every real part, and the two checks that matter.

Three tenants in their own processes train and sample on one colocated Megatron group; then the recorded log is replayed, and one tenant is
run alone from the same seed on a fresh fleet and its weights are compared bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from ops.fleet import configuration, open_history
from ops.log_report import by_tenant
from ops.replay import Verifier, history, written_states
from ops.tables import table
from scheduler.config import Config
from scheduler.embedded import EmbeddedServer
from state.errors import OperatorError
from state.events import Event, decode

CONFIG = Path(__file__).with_name("demo.toml")
START_TIMEOUT_S = 120.0
PROGRESS_EVERY_S = 2.0


class Tenant(NamedTuple):
    name: str
    text: str
    rank: int
    seed: int


TENANTS = (Tenant("ada", "topics", 4, 11), Tenant("brook", "argparse", 8, 22), Tenant("cleo", "entities", 16, 33))
ALONE = TENANTS[1]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", default="hotdesk-data/demo", metavar="DIR", help="where log and checkpoints go (default %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps per tenant (default %(default)s)")
    parser.add_argument("--sample-every", type=int, default=30, help="steps between samples (default %(default)s)")
    parser.set_defaults(config=CONFIG, url=None)


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    root = Path(args.data_dir).resolve()
    for name in ("together", "alone"):
        _clear(root / name)
    try:
        return anyio.run(_demo, args, root, started)
    except (FileNotFoundError, PermissionError) as error:
        raise OperatorError(f"the demo cannot write to {root}: {error}", way_out="name another directory with --data-dir") from error


def _clear(directory: Path) -> None:
    """An earlier demo's data, and a server that it may have left behind when it was killed."""
    if directory.exists():
        left = EmbeddedServer(directory)
        if left._own():
            left.stop()
        shutil.rmtree(directory)


async def _demo(args: argparse.Namespace, root: Path, started: float) -> int:
    args.data_dir = str(root / "together")
    config = configuration(args)
    print(f"Three tenants, one Megatron group, {args.steps} steps each. Starting server, Ray, workers, daemon ...", flush=True)
    async with _daemon(args.data_dir) as url:
        print(f"  up after {time.monotonic() - started:.0f} s\n", flush=True)
        results = await _run_tenants(TENANTS, args, url)
    print()
    events = await _read(config)
    _print_table(results, events)
    verifier = Verifier(written_states(config.data_dir))
    for log_id, event in events:
        verifier.take(log_id, event)
    print(
        f"Replay: {len(events)} events, {verifier.decisions} decisions, {verifier.differences} come out differently; "
        f"the fold equals the daemon's state in {verifier.compared - verifier.unequal} of {verifier.compared} places, byte for byte."
    )
    for problem in verifier.problems[:3]:
        print(f"  {problem}")
    same = await _alone(args, root, results[ALONE.name])
    print(f"\nThe log stays in {args.data_dir}. Look at it with")
    for command in ("log --last 20", "status", "replay --verify"):
        print(f"  {_ours()} {command} --config {_short(CONFIG)} --data-dir {_short(Path(args.data_dir))}")
    print(f"\n{time.monotonic() - started:.0f} s in all.")
    learned = all(result["losses"][-1] < result["entropy"] for result in results.values())
    return 0 if same and learned and not verifier.problems and verifier.compared else 1


async def _alone(args: argparse.Namespace, root: Path, together: dict[str, Any]) -> bool:
    """The control: one tenant with a fresh fleet to itself; it must end with the same bits."""
    data_dir = str(root / "alone")
    print(f"\nNow {ALONE.name} alone on a fresh fleet, same seed ...", flush=True)
    async with _daemon(data_dir) as url:
        alone = (await _run_tenants((ALONE,), args, url))[ALONE.name]
    steps = sum(a == b for a, b in zip(together["digests"], alone["digests"]))
    files = [_checkpoint(Path(directory)) for directory in (args.data_dir, data_dir)]
    same = together["digests"] == alone["digests"] and files[0] == files[1] and together["text"] == alone["text"]
    verdict = "bit-identical to" if same else "DIFFERENT from"
    print(
        f"Alone, {ALONE.name}'s weights, masters, moments and step are {verdict} the interleaved run's "
        f"({steps} of {len(alone['digests'])} optimizer steps have the same digest; the saved checkpoints are "
        f"{'the same bytes' if files[0] == files[1] else 'different'})."
    )
    return same


def _checkpoint(data_dir: Path) -> dict[str, bytes]:
    """The final training checkpoint's shards, as bytes."""
    directory = data_dir / "adapters" / ALONE.name / "writer" / "weights" / "final"
    return {path.name: path.read_bytes() for path in sorted(directory.glob("shard-*"))}


@asynccontextmanager
async def _daemon(data_dir: str) -> AsyncIterator[str]:
    """`hotdesk up` in its own process; stopped cleanly at the end."""
    directory = Path(data_dir)
    directory.mkdir(parents=True, exist_ok=True)
    log_path = directory / "daemon.log"
    command = [sys.executable, "-m", "ops.cli", "up", "--no-gateway", "--config", str(CONFIG), "--data-dir", data_dir]
    with open(log_path, "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield await _joined(process, directory, log_path)
    finally:
        with anyio.CancelScope(shield=True):
            process.send_signal(signal.SIGTERM)
            with anyio.move_on_after(30):
                while process.poll() is None:
                    await anyio.sleep(0.1)
            if process.poll() is None:
                process.kill()


async def _joined(process: subprocess.Popen[bytes], directory: Path, log_path: Path) -> str:
    """The fleet's URL once its workers have joined."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        log = log_path.read_text(errors="replace")
        if (directory / "endpoint").exists() and '"workers_joined"' in log:
            return (directory / "endpoint").read_text()
        if process.poll() is not None or time.monotonic() > deadline:
            raise OperatorError(f"the daemon did not come up: {log[-800:]}", way_out=f"look into {log_path}")
        await anyio.sleep(0.1)


async def _run_tenants(tenants: tuple[Tenant, ...], args: argparse.Namespace, url: str) -> dict[str, dict[str, Any]]:
    progress: dict[str, tuple[int, float]] = {}
    results: dict[str, dict[str, Any]] = {}

    async def one(tenant: Tenant) -> None:
        arguments = [f"--{field}={value}" for field, value in {"tenant": tenant.name, **tenant._asdict()}.items() if field != "name"]
        command = [sys.executable, "-m", "ops.demo_tenant", "--url", url, "--fleet", "demo", *arguments]
        command += ["--steps", str(args.steps), "--sample-every", str(args.sample_every)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=2**22)
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                said = json.loads(line)
                if said["kind"] == "step":
                    progress[tenant.name] = (said["step"], said["loss"])
                elif said["kind"] == "done":
                    results[tenant.name] = said
            await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if tenant.name not in results:
            raise OperatorError(f"tenant {tenant.name} ended without a result (exit code {process.returncode})", tenant=tenant.name)

    async with anyio.create_task_group() as tasks:
        for tenant in tenants:
            tasks.start_soon(one, tenant)
        while len(results) < len(tenants):
            await anyio.sleep(PROGRESS_EVERY_S if not sys.stdout.isatty() else 0.5)
            _show(tenants, progress, args.steps)
    return results


def _show(tenants: tuple[Tenant, ...], progress: dict[str, tuple[int, float]], steps: int) -> None:
    parts = []
    for tenant in tenants:
        step, loss = progress.get(tenant.name, (0, float("nan")))
        parts.append(f"{tenant.name} {step:>3}/{steps} loss {loss:5.3f}")
    line = "   ".join(parts)
    print(f"\r  {line}" if sys.stdout.isatty() else f"  {line}", end="" if sys.stdout.isatty() else "\n", flush=True)


async def _read(config: Config) -> list[tuple[int, Event]]:
    async with open_history(config) as log:
        return [(log_id, decode(data)) async for log_id, data in history(log)]


def _print_table(results: dict[str, dict[str, Any]], events: list[tuple[int, Event]]) -> None:
    reports = by_tenant(events)
    rows = []
    for tenant in TENANTS:
        result, report = results[tenant.name], reports[tenant.name]
        losses, waits = result["losses"], report.waits_ms
        last = sum(losses[-10:]) / len(losses[-10:])
        rows.append(
            [tenant.name, tenant.text, tenant.rank, len(losses), f"{losses[0]:.3f}", f"{last:.3f}", f"{result['entropy']:.3f}"]
            + [report.turns, report.swaps, report.parks, report.samples, f"{sum(waits) / len(waits):.0f}", max(waits)]
        )
    head = ["tenant", "text", "rank", "steps", "first loss", "last loss", "1-byte entropy", "turns", "swaps", "parks", "samples"]
    print(table([*head, "mean wait ms", "longest"], rows))
    print("(losses in nats a byte, the last one over 10 steps)\n")
    for tenant in TENANTS:
        print(f"{tenant.name}: {results[tenant.name]['text']!r}")
    print()


def _ours() -> str:
    """How to call the command from this shell."""
    return "hotdesk" if shutil.which("hotdesk") else _short(Path(sys.executable).parent / "hotdesk")


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
