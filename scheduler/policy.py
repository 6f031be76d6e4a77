"""Policies: whose turn on a group, and how much of its queue. Small pure classes, chosen by name.

A policy reads the fleet's state and nothing else, so that a recorded log can be decided again under another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Protocol

from state.events import Request
from state.fleet import Adapter, Fleet, Group, Queued
from state.plan import Turn, fit_together
from state.requests import Op
from state.residency import NEEDS, Residency


class Policy(Protocol):
    def turn(self, fleet: Fleet, group: Group, but: str = "") -> Turn | None:
        """The next turn on an idle `group`, leaving the adapter `but` out; None where nothing can run."""
        ...

    def order(self, fleet: Fleet, group: Group) -> Iterator[Turn]:
        """Turns of those that wait, at most one an adapter, the next one first: what may be planned together."""
        ...


def ready(adapter: Adapter, limit: int) -> tuple[Request, ...]:
    """The adapter's requests that may run back to back: in order, of one phase (sampling, or not), at most `limit`."""
    requests: list[Request] = []
    for queued in islice(adapter.queue.values() if adapter.unordered else _consecutive(adapter), limit):
        request = queued.request
        if requests and _sampling(request) != _sampling(requests[0]):
            break
        requests.append(request)
        if request.op == Op.UNLOAD:
            break
    return tuple(requests)


def _consecutive(adapter: Adapter) -> Iterator[Queued]:
    for seq in count(adapter.next_seq):
        queued = adapter.queue.get(seq)
        if queued is None:
            return
        yield queued


def _sampling(request: Request) -> bool:
    return NEEDS[Op(request.op)].sampler is True


class Fifo:
    """The oldest waiting request first, whoever sent it, one at a time."""

    def turn(self, fleet: Fleet, group: Group, but: str = "") -> Turn | None:
        candidates = [(at, key) for key, at in group.queue.runnable() if key != but]
        if not candidates:
            return None
        _, key = min(candidates)
        return Turn(key, ready(fleet.adapters[key], 1))

    def order(self, fleet: Fleet, group: Group) -> Iterator[Turn]:
        for _, key in sorted((at, key) for key, at in group.queue.runnable()):
            yield Turn(key, ready(fleet.adapters[key], 1))


class RoundRobin:
    """Tenants in rotation, and each tenant's adapters in rotation: the one longest without a turn is next, for up to `turn_requests`
    requests in a row."""

    def turn(self, fleet: Fleet, group: Group, but: str = "") -> Turn | None:
        candidates = [key for key, _ in group.queue.runnable() if key != but]
        if not candidates:
            return None
        last_by_tenant = _last_by_tenant(fleet, group)

        def longest_without_turn(key: str) -> tuple[int, int, str]:
            adapter = fleet.adapters[key]
            return last_by_tenant[adapter.tenant], adapter.last_turn, key

        key = min(candidates, key=longest_without_turn)
        return Turn(key, ready(fleet.adapters[key], fleet.settings.turn_requests))

    def order(self, fleet: Fleet, group: Group) -> Iterator[Turn]:
        """Each tenant's adapter longest without a turn; a second one of a tenant waits for the next plan."""
        last_by_tenant = _last_by_tenant(fleet, group)
        for tenant in sorted(group.queue.waiting, key=lambda name: (last_by_tenant[name], name)):
            key = min(group.queue.waiting[tenant], key=lambda k: (fleet.adapters[k].last_turn, k))
            yield Turn(key, ready(fleet.adapters[key], fleet.settings.turn_requests))


def _last_by_tenant(fleet: Fleet, group: Group) -> dict[str, int]:
    last: dict[str, int] = {}
    for key in group.adapters:
        adapter = fleet.adapters[key]
        last[adapter.tenant] = max(last.get(adapter.tenant, 0), adapter.last_turn)
    return last


class Fair:
    """Start-time fair queueing over measured accelerator time, switches included (`state.fair_queue`). The tenant that had least for its
    weight is next, and among its adapters the one longest without a turn, those on the device first.

    A turn is worth `turn_switches` times what a switch costs, so switching is a bounded part of the whole. Where trainer and sampler share
    the device, whoever needs it as it is goes first for as long as that, so giving it away is too.
    """

    LOOK = 64  # tenants that are looked at for one that needs the device as it is
    LONGEST = 64  # requests in a turn

    def turn(self, fleet: Fleet, group: Group, but: str = "") -> Turn | None:
        sampling = group.device.sampler
        worth_us = turn_worth_us(fleet, group)
        first, priority = "", 0
        for tenant in group.queue.in_order(self.LOOK):
            key, suits = self._adapter(fleet, group, tenant, but, sampling)
            if not key:
                continue
            if first and fleet.settings.share(tenant).priority != priority:
                break
            if not first:
                first, priority = key, fleet.settings.share(tenant).priority
            if suits:
                return self._turn(fleet, group, key, worth_us)
            if group.queue.phase_us >= worth_us:
                break
        return self._turn(fleet, group, first, worth_us) if first else None

    def order(self, fleet: Fleet, group: Group) -> Iterator[Turn]:
        worth_us = turn_worth_us(fleet, group)
        for tenant in group.queue.in_order(self.LOOK):
            key, _ = self._adapter(fleet, group, tenant, "", group.device.sampler)
            yield self._turn(fleet, group, key, worth_us)

    @staticmethod
    def _adapter(fleet: Fleet, group: Group, tenant: str, but: str, sampling: bool) -> tuple[str, bool]:
        """The tenant's next adapter, and whether it needs the device as it is."""

        def rank(key: str) -> tuple[bool, int, bool, str]:
            adapter = fleet.adapters[key]
            assert adapter.head is not None
            other_phase = _sampling(adapter.head.request) != sampling
            return other_phase, adapter.last_turn, adapter.residency not in ON_DEVICE, key

        keys = [key for key in group.queue.waiting[tenant] if key != but]
        if not keys:
            return "", False
        best = min(map(rank, keys))
        return best[3], not best[0]

    def _turn(self, fleet: Fleet, group: Group, key: str, worth_us: int) -> Turn:
        adapter = fleet.adapters[key]
        assert group.spec is not None
        requests: list[Request] = []
        sum_us = 0
        for request in ready(adapter, self.LONGEST):
            cost = group.queue.costs.get(request.op)
            known = cost is not None and cost.work > 0
            full = sum_us >= worth_us or (not known and len(requests) >= fleet.settings.turn_requests)
            # a sample that fits beside those before it is computed with them, for next to nothing
            if requests and full and not (request.sequences and fit_together(group.spec, [*requests, request])):
                break
            requests.append(request)
            sum_us += cost.of(request.work) if cost is not None else 0
        return Turn(key, tuple(requests))


ON_DEVICE = frozenset({Residency.LIVE, Residency.PARKED, Residency.RESIDENT})


def turn_worth_us(fleet: Fleet, group: Group) -> int:
    """Accelerator time that a turn should take, switches not counted."""
    settings = fleet.settings
    return min(settings.turn_most_us, max(settings.turn_least_us, int(settings.turn_switches * group.queue.switch_us)))


def expected_us(group: Group, requests: Iterable[Request]) -> int:
    """What they should take, by what their operations took lately."""
    costs = group.queue.costs
    return sum(costs[request.op].of(request.work) for request in requests if request.op in costs)


POLICIES: dict[str, Policy] = {"fair": Fair(), "fifo": Fifo(), "round_robin": RoundRobin()}
