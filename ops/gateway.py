"""`hotdesk gateway`: the Tinker protocol over HTTP, in a process of its own. It can be killed and started again at any time."""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time

import structlog
import uvicorn

from ops.cli import common_arguments
from ops.fleet import adapters_root, configuration
from ops.serve import set_up_logging
from scheduler.config import Config
from scheduler.gateway.app import Gateway
from scheduler.gateway.desk import Offer
from state.errors import ConfigError, ServerFault

log = structlog.get_logger("hotdesk.gateway")
BACKLOG = 2048
WATCH_S = 0.5


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--port", type=int, help="overrides gateway.port; 0 for any free one")


def run(args: argparse.Namespace) -> int:
    config = configuration(args)
    set_up_logging(config)
    url = config.redis.url or _endpoint(config)
    gateway = Gateway(config.gateway, url, config.fleet.name, offers(config))
    config.data_dir.mkdir(parents=True, exist_ok=True)
    bound = _bind(config.gateway.host, config.gateway.port if args.port is None else args.port)
    host, port = bound.getsockname()[:2]
    (config.data_dir / "gateway").write_text(f"http://{host}:{port}")
    log.info("gateway_listens", url=f"http://{host}:{port}", keys="any" if config.gateway.any_key else len(config.gateway.keys))
    server = uvicorn.Server(
        uvicorn.Config(
            gateway.app,
            interface="asgi3",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,  # polls in progress are asked again by their clients
        )
    )
    _end_with_parent(server)
    server.run(sockets=[bound])
    return 0


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # with its protocol named, as asyncio turns Nagle's algorithm off for such sockets only
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
        return bound
    except OSError as error:
        raise ServerFault(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}", way_out="set gateway.port, or stop what listens there"
        ) from error


def _end_with_parent(server: uvicorn.Server) -> None:
    """Beside a daemon it ends with it, however that ended: the next one starts its own, on the same port."""
    parent = int(os.environ.get("HOTDESK_PARENT", 0))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        server.should_exit = True

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def offers(config: Config) -> dict[str, Offer]:
    """Base models by name, as the first group that serves one describes it."""
    found: dict[str, Offer] = {}
    for name, group in config.groups.items():
        offer = Offer(
            group.model.name,
            name,
            group.targets,
            group.max_rank,
            group.model.max_sequence_tokens,
            config.gateway.lora_alpha,
            adapters_root(config),
        )
        found.setdefault(group.model.name, offer)
    return found


def _endpoint(config: Config) -> str:
    """Of the embedded server that `hotdesk up` runs in the same data directory."""
    try:
        return (config.data_dir / "endpoint").read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"there is no running fleet in {config.data_dir}", way_out="start one with hotdesk up, or name a server with --url"
        ) from error
