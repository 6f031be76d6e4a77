"""Prometheus metrics of a daemon: the fold's own counters. A restart resets none of them, and a new leader goes on where the last one was.

They are served by a thread of their own and computed on the daemon's loop, between two of its rounds, for each scrape: a state that is
being changed is never read, and nothing is computed that nobody asked for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import anyio
import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.config import MetricsConfig
from scheduler.daemon import Daemon
from state.fleet import Fleet, Tenant

AGAIN_S = 1.0  # until a port that was taken is tried again
SCRAPE_S = 10.0
MOST_TENANTS = 1000  # with series of their own: those that used most; the others are summed as `(others)`
OTHERS = "(others)"
STATUSES = ("accepted", "completed", "failed", "refused", "cancelled")


class Exporter(Collector):
    """Called by the thread that serves; what it tells is computed on the daemon's loop, when somebody asks and not before."""

    def __init__(self, daemon: Daemon, loop: asyncio.AbstractEventLoop) -> None:
        self.daemon, self.loop = daemon, loop

    def collect(self) -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(self._now(), self.loop).result(SCRAPE_S)

    async def _now(self) -> list[Metric]:
        leading = self.daemon.ready.is_set()
        return families(self.daemon.core.fleet if leading else Fleet(), leading)


async def serve(daemon: Daemon, config: MetricsConfig) -> None:
    """For as long as the daemon lives. A port that is taken, as by a leader beside its standby, is waited for: it stops nobody."""
    log = structlog.get_logger("hotdesk")
    registry = CollectorRegistry()
    registry.register(Exporter(daemon, asyncio.get_running_loop()))
    said = False
    while True:
        try:
            server, _ = start_http_server(config.port, config.host, registry)
            break
        except OSError as error:
            if not said:
                said = True
                log.warning("metrics_wait", host=config.host, port=config.port, error=str(error), detail="tried again until it is free")
            await anyio.sleep(AGAIN_S)
    log.info("metrics_served", url=f"http://{config.host}:{server.server_port}/metrics")
    try:
        await anyio.sleep_forever()
    finally:
        server.shutdown()
        server.server_close()


def families(fleet: Fleet, leading: bool) -> list[Metric]:
    return [
        _gauge("hotdesk_leading", "1 where this daemon leads its fleet", {(): float(leading)}),
        _gauge("hotdesk_epoch", "Term of the leader", {(): fleet.epoch}),
        _counter("hotdesk_events", "Events in the log, those that were trimmed included", {(): fleet.events}),
        _gauge("hotdesk_requests_open", "Requests accepted and without an end", {(): fleet.queued}),
        *_of_tenants(fleet),
        *_of_groups(fleet),
    ]


def _of_tenants(fleet: Fleet) -> list[Metric]:
    tenants = sorted(fleet.tenants.items(), key=lambda item: -item[1].used_us)
    named, others = dict(tenants[:MOST_TENANTS]), [tenant for _, tenant in tenants[MOST_TENANTS:]]
    if others:
        fields = (*STATUSES, "queued", "queued_bytes", "used_us")
        named[OTHERS] = Tenant(**{field: sum(getattr(tenant, field) for tenant in others) for field in fields})
    ends = {(name, status): getattr(tenant, status) for name, tenant in named.items() for status in STATUSES}
    return [
        _counter("hotdesk_requests", "Requests by how far they came", ends, "tenant", "status"),
        _gauge("hotdesk_requests_queued", "Requests that wait or run", {(n,): t.queued for n, t in named.items()}, "tenant"),
        _gauge("hotdesk_queued_bytes", "Bodies of requests that wait or run", {(n,): t.queued_bytes for n, t in named.items()}, "tenant"),
        _counter(
            "hotdesk_accelerator_seconds",
            "Accelerator time charged, switches included",
            {(n,): t.used_us / 1e6 for n, t in named.items()},
            "tenant",
        ),
    ]


def _of_groups(fleet: Fleet) -> list[Metric]:
    groups = fleet.groups.values()
    residencies = Counter((adapter.group, str(adapter.residency)) for adapter in fleet.adapters.values())

    def each(kind: str, name: str, words: str, value: str, scale: float = 1.0) -> Metric:
        made = _counter if kind == "counter" else _gauge
        return made(name, words, {(group.name,): scale * getattr(group, value) for group in groups}, "group")

    return [
        _gauge("hotdesk_group_up", "1 where the group's workers answer", {(g.name,): float(bool(g.incarnation)) for g in groups}, "group"),
        each("counter", "hotdesk_group_busy_seconds", "Accelerator time of the group's steps", "busy_us", 1e-6),
        each("counter", "hotdesk_group_turns", "Turns given", "turns"),
        each("counter", "hotdesk_group_swaps", "Adapters swapped in", "swaps"),
        each("counter", "hotdesk_group_parks", "Adapters parked with pending gradients", "parks"),
        each("counter", "hotdesk_group_moves", "Adapters that left for another group", "moves"),
        each("counter", "hotdesk_group_moved_bytes", "Bytes moved between host and device", "moved_bytes"),
        each("gauge", "hotdesk_group_device_bytes", "Bytes on the device after the last step", "device_bytes"),
        each("gauge", "hotdesk_group_host_bytes", "Bytes of slots in host memory after the last step", "host_bytes"),
        _gauge("hotdesk_adapters", "Adapters by residency", residencies, "group", "residency"),
    ]


def _counter(name: str, words: str, values: Mapping[Any, float], *labels: str) -> Metric:
    family = CounterMetricFamily(name, words, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def _gauge(name: str, words: str, values: Mapping[Any, float], *labels: str) -> Metric:
    family = GaugeMetricFamily(name, words, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
