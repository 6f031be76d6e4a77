"""`hotdesk submit`: one request from the shell, mainly for looking and for scripts. Bodies are JSON in the form of `state.requests`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import anyio
import msgspec

from ops.cli import common_arguments
from ops.fleet import configuration, open_store
from scheduler.config import Config
from scheduler.producer import Producer
from state.errors import BadBody, HotdeskError, UnknownOperation
from state.requests import BODIES, CONTROL_OPS, CreateAdapter, Op

EXAMPLE = """example:
  hotdesk submit --tenant alice --adapter poet create_adapter '{"signature": {"rank": 8, "alpha": 16, "seed": 1}}'
  hotdesk submit --tenant alice --adapter poet optim_step '{"learning_rate": 0.001}'
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.epilog, parser.formatter_class = EXAMPLE, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="seconds to wait for the result (default 120)")
    parser.add_argument("op", help=", ".join(Op))
    parser.add_argument("body", nargs="?", default="{}", help="JSON (default {})")


def run(args: argparse.Namespace) -> int:
    if args.op not in list(Op):
        raise UnknownOperation(f"operation {args.op!r} does not exist", way_out=f"use one of {', '.join(Op)}")
    try:
        body: msgspec.Struct = msgspec.json.decode(args.body, type=BODIES[Op(args.op)])
    except msgspec.DecodeError as error:
        raise BadBody(f"body of {args.op}: {error}") from error
    try:
        result = anyio.run(_submit, configuration(args), args, body)
    except TimeoutError:
        print(f"hotdesk: no result within {args.timeout_s:.0f} s; the request stays in the queue", file=sys.stderr)
        return 1
    except HotdeskError as error:
        print(f"hotdesk: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(msgspec.to_builtins(result), indent=2))
    return 0


async def _submit(config: Config, args: argparse.Namespace, body: Any) -> msgspec.Struct:
    op = Op(args.op)
    with anyio.fail_after(args.timeout_s):
        async with open_store(config) as store, Producer.over(store, args.tenant) as producer:
            if isinstance(body, CreateAdapter):
                signature = msgspec.structs.asdict(body.signature)
                handle = await producer.create_adapter(args.adapter, group=body.group, **signature)
                return await (await producer._send_control(Op.DESCRIBE, handle.name, BODIES[Op.DESCRIBE]()))
            if op in CONTROL_OPS:
                return await (await producer._send_control(op, args.adapter, body))
            handle = await producer.adapter(args.adapter)
            return await (await handle.send(op, body))
