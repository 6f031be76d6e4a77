"""`hotdesk simulate`: seeded fleets in which everything fails, until so many events were checked; a broken one is shrunk and printed."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator

import structlog

from ops.simulation.history import DRAWN, Report, Size, run_seed
from state.errors import HotdeskError

PROGRESS_EVERY_S = 5.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the first history; each further one has the next (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20_000, help="go on until so many events were checked (default %(default)s)")
    parser.add_argument("--tenants", type=int, default=-1, help="in each history; by default the seed decides")
    parser.add_argument("--requests", type=int, default=-1, help="of each adapter; by default the seed decides")
    parser.add_argument("--faults", type=int, default=-1, help="in each history at most; by default the seed decides")
    parser.add_argument("--log", action="store_true", help="print what the simulated daemons log")


def run(args: argparse.Namespace) -> int:
    quiet = logging.INFO if args.log else logging.CRITICAL
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(quiet))
    size = Size(args.tenants, args.requests, args.faults)
    faults: Counter[str] = Counter()
    events = histories = terms = decisions = 0
    began = shown = time.monotonic()
    seed = args.seed
    while events < args.steps:
        found = attempt(seed, size)
        if isinstance(found, BaseException):
            print(f"seed {seed}: {_words(found)}")
            smaller, error = shrink(seed, size)
            print(f"smallest history found that breaks: hotdesk simulate --seed {seed} {flags(smaller)}--steps 1 --log\n  {_words(error)}")
            return 1
        events, histories, seed = events + found.events, histories + 1, seed + 1
        terms, decisions = terms + found.terms, decisions + found.decisions
        faults.update(found.faults)
        if time.monotonic() - shown > PROGRESS_EVERY_S:
            shown = time.monotonic()
            print(f"{histories} histories, {events} of {args.steps} events, {faults.total()} faults", file=sys.stderr)
    print(f"{histories} histories from seed {args.seed}, {events} events, {decisions} decisions, {terms} terms of leaders: nothing broke")
    print(f"{faults.total()} faults: " + ", ".join(f"{name} {count}" for name, count in faults.most_common()))
    print(f"{events / (time.monotonic() - began):.0f} events/s")
    return 0


def attempt(seed: int, size: Size) -> Report | BaseException:
    try:
        return run_seed(seed, size)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return error


def shrink(seed: int, size: Size) -> tuple[Size, BaseException]:
    """A history of the same seed, as small as this finds it, that still breaks: fewer faults, then tenants, then requests."""
    best, error = size, attempt(seed, size)
    assert isinstance(error, BaseException)
    for smaller in _smaller(size):
        merged = Size(*(new if new >= 0 else old for new, old in zip(smaller, best)))
        found = attempt(seed, merged)
        if isinstance(found, BaseException):
            best, error = merged, found
    return best, error


def _smaller(size: Size) -> Iterator[Size]:
    """From large to small, so that the last one that breaks is the smallest."""
    for faults in (20, 10, 6, 4, 3, 2, 1, 0):
        yield DRAWN._replace(faults=faults)
    for tenants in (3, 2, 1):
        yield DRAWN._replace(tenants=tenants)
    for requests in (10, 6, 4, 3, 2, 1):
        yield DRAWN._replace(requests=requests)


def flags(size: Size) -> str:
    return "".join(f"--{name} {value} " for name, value in size._asdict().items() if value >= 0)


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, HotdeskError) else f"{type(error).__name__}: {error}"
