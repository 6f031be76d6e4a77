"""`hotdesk up` and `hotdesk serve`: wires store, worker groups and daemon together."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys

import anyio
import anyio.to_thread
import structlog

from ops import metrics
from ops.cli import common_arguments
from ops.fleet import adapters_root, configuration
from ops.supervised import Supervised, beside
from scheduler.config import Config
from scheduler.daemon import Daemon
from scheduler.embedded import EmbeddedServer
from state.errors import ConfigError, ServerFault
from state.files import directory_disk
from state.redis_log import RedisLog
from workers import checkpoints
from workers.contract import WorkerGroup
from workers.group_config import GroupConfig
from workers.simulated import SIMULATED_SPEC, SimulatedGroup

SUPERVISE_S = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--no-gateway", action="store_true", help="up: without the HTTP gateway")


def run(args: argparse.Namespace) -> int:
    config = configuration(args)
    set_up_logging(config)
    server = None
    if args.command == "up" and not config.redis.url:
        config.data_dir.mkdir(parents=True, exist_ok=True)
        server = EmbeddedServer(config.data_dir)
        server.start()
    elif not config.redis.url:
        raise ConfigError("key redis.url: is empty", way_out="set it, or use `hotdesk up` for an embedded server")
    url = server.url if server is not None else config.redis.url
    structlog.get_logger("hotdesk").info("starting", fleet=config.fleet.name, redis=_without_password(url), data_dir=str(config.data_dir))
    with_gateway = args.command == "up" and not args.no_gateway
    try:
        with beside(config, args, url) if with_gateway else contextlib.nullcontext() as gateway:
            anyio.run(_serve, config, url, server, gateway)
    finally:
        if server is not None:
            server.stop()
    return 0


async def _serve(config: Config, url: str, server: EmbeddedServer | None, gateway: Supervised | None) -> None:
    store = RedisLog.connect(url, config.fleet.name, config.settings().result_retention_ms)
    groups = [build_group(name, group, config) for name, group in config.groups.items()]
    daemon = Daemon(
        store,
        groups,
        settings=config.settings(),
        limits=config.request_limits(),
        disk=directory_disk(config.data_dir),
        lease_ms=config.redis.lease_ms,
    )
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_announce, daemon, config, url)
            if config.metrics.port:
                tasks.start_soon(metrics.serve, daemon, config.metrics)
            if server is not None:
                tasks.start_soon(_supervise, server)
            if gateway is not None:
                tasks.start_soon(_supervise_gateway, gateway)
            await daemon.run(handle_signals=True)
            tasks.cancel_scope.cancel()
    finally:
        await store.close()


async def _supervise(server: EmbeddedServer) -> None:
    """An embedded server that dies is started again: nobody else would."""
    while True:
        await anyio.sleep(SUPERVISE_S)
        try:
            await anyio.to_thread.run_sync(server.keep_alive)
        except ServerFault as error:
            structlog.get_logger("hotdesk").error("embedded_server_failed", error=str(error))


async def _supervise_gateway(gateway: Supervised) -> None:
    while True:
        await anyio.sleep(SUPERVISE_S)
        gateway.keep_alive()


async def _announce(daemon: Daemon, config: Config, url: str) -> None:
    """Writes where this fleet can be reached, once it leads: what scripts wait for."""
    await daemon.ready.wait()
    (config.data_dir / "endpoint").write_text(url)


def build_group(name: str, group: GroupConfig, config: Config) -> WorkerGroup:
    root = adapters_root(config)
    if group.backend == "simulated":
        import msgspec

        spec = msgspec.structs.replace(
            SIMULATED_SPEC,
            max_rank=group.max_rank,
            targets=group.targets,
            vocab_size=group.model.vocab_size,
            max_sequence_tokens=group.model.max_sequence_tokens,
            base_model=group.model.name,
            device_slots=group.device_slots,
            host_slots=group.host_slots,
            max_adapters=group.max_adapters,
            kin=group.kin(checkpoints.storage_id(root)),
        )
        return SimulatedGroup(name, spec, root, group.simulated_cost_us or None, sleep=bool(group.simulated_cost_us))
    try:
        from workers.ray_group import RayGroup
    except ImportError as error:
        raise ConfigError(
            f"key groups.{name}.backend: the Megatron workers need {error.name}", way_out="pip install 'hotdesk[megatron]'"
        ) from error
    return RayGroup(name, group, fleet=config.fleet.name, root=root, address=config.ray.address, namespace=config.ray.namespace)


def set_up_logging(config: Config) -> None:
    """structlog to standard error: for people on a terminal, JSON lines elsewhere."""
    console = config.log.format == "console" or (config.log.format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log.level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
