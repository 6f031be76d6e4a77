"""Finding a fleet from the command line: its configuration, its store, its log."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from scheduler.config import Config, load
from scheduler.embedded import EmbeddedServer
from state.archive import Archive, History
from state.errors import ConfigError
from state.files import Directory
from state.log import EventReader
from state.redis_log import RedisLog
from state.segment_log import SegmentLog


def configuration(args: argparse.Namespace) -> Config:
    config = load(args.config)
    if args.data_dir:
        config = msgspec.structs.replace(config, fleet=msgspec.structs.replace(config.fleet, data_dir=args.data_dir))
    if args.url:
        config = msgspec.structs.replace(config, redis=msgspec.structs.replace(config.redis, url=args.url))
    return config


@asynccontextmanager
async def open_store(config: Config) -> AsyncIterator[RedisLog]:
    """The fleet's store. An embedded server that is not running is started for the time of the command, so that the log of a
    daemon that is down can be read."""
    server = None
    url = config.redis.url
    if not url:
        if not (config.data_dir / "redis").is_dir():
            raise ConfigError(
                f"there is no fleet in {config.data_dir}",
                way_out="name it with --data-dir, --url or --config, or start one with hotdesk up",
            )
        server = EmbeddedServer(config.data_dir)
        server.start()
        url = server.url
    store = RedisLog.connect(url, config.fleet.name)
    try:
        yield store
    finally:
        await store.close()
        if server is not None:
            server.stop()


@asynccontextmanager
async def open_history(config: Config) -> AsyncIterator[History]:
    """Archive and log as one."""
    async with open_store(config) as store:
        yield History(Archive(Directory(config.data_dir / "archive")), store)


def segments(directory: Path) -> EventReader:
    """A directory of archived or exported segments, without a server. Raises `LogTruncated` where it holds none."""
    archive = Archive(Directory(directory))
    return History(archive, None) if archive.spans() else SegmentLog(directory, read_only=True)


def adapters_root(config: Config) -> Path:
    """Of all groups: an adapter may move from one to another, and finds its snapshots and checkpoints there."""
    return config.data_dir / "adapters"
