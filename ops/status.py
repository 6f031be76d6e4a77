"""`hotdesk status`: the fold of the log, as tables. `hotdesk top`: the same again and again, as events come."""

from __future__ import annotations

import argparse
import sys
import time

import anyio

from ops.cli import common_arguments
from ops.fleet import configuration, open_store
from ops.readable import step_text
from ops.tables import table
from scheduler import state_snapshots
from scheduler.config import Config
from state import log_id as ids
from state.archive import Archive, History
from state.errors import ConfigError
from state.events import decode
from state.files import Directory
from state.fleet import Fleet, apply, residency_of

TOP_S = 1.0
READ_EVENTS = 1000
CLEAR = "\x1b[H\x1b[2J"


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--every", type=float, metavar="SECONDS", help="again and again, until interrupted (top: 1)")


def run(args: argparse.Namespace) -> int:
    every_s = args.every if args.every is not None else TOP_S if args.command == "top" else 0.0
    if every_s < 0:
        raise ConfigError(f"--every {every_s} is negative")
    anyio.run(_run, configuration(args), every_s)
    return 0


async def _run(config: Config, every_s: float) -> None:
    async with open_store(config) as store:
        history = History(Archive(Directory(config.data_dir / "archive")), store)
        fleet, _ = await state_snapshots.load_fleet(Directory(config.data_dir / "snapshots"), history)
        while True:
            if every_s and sys.stdout.isatty():
                print(CLEAR, end="")
            print(render(config.fleet.name, fleet, await store.leader()), flush=True)
            if not every_s:
                return
            await anyio.sleep(every_s)
            while events := await history.read(fleet.log_id, READ_EVENTS):
                for log_id, data in events:
                    apply(fleet, log_id, decode(data))


def render(name: str, fleet: Fleet, leader: str) -> str:
    age_s = time.time() - ids.ms_of(fleet.log_id) / 1000 if fleet.log_id else 0.0
    lines = [
        f"fleet {name}: {f'led by {leader}' if leader else 'no daemon leads'}, epoch {fleet.epoch}, policy {fleet.settings.policy}",
        f"log: {fleet.events} events, last {ids.text(fleet.log_id)} {age_s:.0f} s ago; {fleet.queued} requests open",
        "",
        table(
            ["group", "workers", "live", "sampler", "on device", "turns", "swaps", "parks", "moves", "busy s", "now"],
            [
                [
                    group.name,
                    group.incarnation or "none",
                    group.device.live or "-",
                    group.device.published or ("awake" if group.device.sampler else "asleep"),
                    f"{group.device_bytes / 2**20:.1f} MiB",
                    group.turns,
                    group.swaps,
                    group.parks,
                    group.moves,
                    f"{group.busy_us / 1e6:.1f}",
                    group.broken or next((step_text(step) for step in group.steps.values()), "idle"),
                ]
                for group in fleet.groups.values()
            ],
        ),
        "",
        table(
            ["adapter", "group", "residency", "next seq", "queued", "pending", "step", "digest"],
            [
                [a.key, a.group, residency_of(a), a.next_seq, len(a.queue), a.pending, a.optimizer_step, a.divergence or a.digest or "-"]
                for a in fleet.adapters.values()
            ],
        ),
        "",
        table(
            ["tenant", "queued", "accepted", "completed", "failed", "refused", "cancelled", "used s"],
            [
                [name, t.queued, t.accepted, t.completed, t.failed, t.refused, t.cancelled, f"{t.used_us / 1e6:.2f}"]
                for name, t in fleet.tenants.items()
            ],
        ),
        *(f"\nadapter {a.key}: {a.damaged}; what was before it is kept" for a in fleet.adapters.values() if a.damaged),
    ]
    return "\n".join(lines)
