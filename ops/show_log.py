"""`hotdesk log`: the event log, readable."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import anyio

from ops import readable
from ops.cli import common_arguments
from ops.fleet import configuration, open_history, segments
from state import log_id as ids
from state.errors import ConfigError
from state.events import decode
from state.log import EventReader

READ_EVENTS = 1000
FOLLOW_S = 0.2


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--segments", type=Path, metavar="DIR", help="read archived segments instead of a server")
    parser.add_argument("--after", default="0", metavar="ID", help="only events after this log id")
    parser.add_argument("--kind", action="append", default=[], metavar="KIND", help="only this kind, e.g. step_started; may be repeated")
    parser.add_argument("--match", default="", metavar="TEXT", help="only events that name TEXT: a tenant, an adapter, a request id")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="only the last N of them")
    parser.add_argument("--follow", action="store_true", help="keep printing as events come")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace) -> int:
    try:
        ids.parse(args.after)
    except ValueError as error:
        raise ConfigError(f"--after {args.after!r} is no log id", way_out="copy one from `hotdesk log`") from error
    anyio.run(_run, args)
    return 0


async def _run(args: argparse.Namespace) -> None:
    if args.segments:
        await _print(segments(args.segments), args)
        return
    async with open_history(configuration(args)) as log:
        await _print(log, args)


async def _print(log: EventReader, args: argparse.Namespace) -> None:
    after = ids.parse(args.after)
    kept: list[str] = []
    while True:
        events = await log.read(after, READ_EVENTS)
        for log_id, data in events:
            after = log_id
            event = decode(data)
            if args.kind and readable.kind_of(event) not in args.kind:
                continue
            if args.match and args.match not in readable.names(event):
                continue
            text = readable.as_json(log_id, event).decode() if args.json else readable.line(log_id, event)
            if args.last and not args.follow:
                kept = [*kept[1 - args.last :], text] if args.last > 1 else [text]
            else:
                print(text)
        if not events:
            if not args.follow:
                break
            sys.stdout.flush()
            await anyio.sleep(FOLLOW_S)
    for text in kept:
        print(text)
