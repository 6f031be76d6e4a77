"""`hotdesk`: one command, a table of subcommands.

Exit codes: 0 done; 1 a check failed; 2 wrong usage or configuration; 3 stopped with words; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from redis import RedisError

from state.errors import ConfigError, HotdeskError, ServerFault

#: name -> (module, one line). Each module has `arguments(parser)` and `run(args) -> int`; loaded only when asked for.
COMMANDS = {
    "up": ("ops.serve", "run a daemon with everything it needs: embedded server, local Ray, worker groups"),
    "serve": ("ops.serve", "run a daemon on a Redis URL and a Ray address"),
    "gateway": ("ops.gateway", "serve the Tinker protocol over HTTP for a running fleet"),
    "demo": ("ops.demo", "three tenants train and sample on one colocated group, replayed and checked"),
    "submit": ("ops.submit", "send one request as a tenant and print its result"),
    "status": ("ops.status", "what is true now: leader, groups, adapters, tenants"),
    "top": ("ops.status", "status, again every second"),
    "log": ("ops.show_log", "print the event log, filtered, followed, or as JSON"),
    "simulate": ("ops.simulate", "seeded fleets in which everything fails: a soak of the scheduler, without a model"),
    "why": ("ops.why", "where all of a request's time went, and who caused it"),
    "trace": ("ops.trace", "write the fleet's time as a file for Perfetto"),
    "replay": ("ops.replay", "rebuild the state at any id or time; check every recorded decision"),
}


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (HotdeskError, RedisError, BaseExceptionGroup) as error:
        return _stopped(_words(error))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hotdesk", description="Many tenants train and sample their own LoRA adapters on one fleet.")
    parser.add_argument("--version", action="version", version=f"hotdesk {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, line) in COMMANDS.items():
        sub = commands.add_parser(name, help=line, description=line)
        if name == wanted:
            importlib.import_module(module).arguments(sub)
    return parser.parse_args(argv)


def _words(error: BaseException) -> HotdeskError:
    """The error with words inside whatever task groups wrapped around it; anything else is a bug and keeps its traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RedisError):
        return ServerFault(f"the server does not serve: {error}", way_out="check --url and that the server runs")
    if not isinstance(error, HotdeskError):
        raise error
    return error


def _stopped(error: HotdeskError) -> int:
    print(f"hotdesk: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 3


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hotdesk")
    except PackageNotFoundError:
        return "(not installed)"


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Which fleet: the same for every command."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration (see ops/hotdesk.toml)")
    parser.add_argument("--data-dir", metavar="DIR", help="overrides fleet.data_dir")
    parser.add_argument("--url", metavar="URL", help="overrides redis.url")


if __name__ == "__main__":
    sys.exit(main())
