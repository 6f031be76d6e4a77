"""Policies: whose turn on a group, and how much of its queue. Small pure classes, chosen by name.

A policy reads the fleet's state and nothing else, so that a recorded log can be decided again under another one.
"""

from __future__ import annotations

from typing import Protocol

from state.events import Request
from state.fleet import Adapter, Fleet, Group
from state.plan import Turn
from state.requests import Op
from state.residency import NEEDS


class Policy(Protocol):
    def turn(self, fleet: Fleet, group: Group, but: str = "") -> Turn | None:
        """The next turn on an idle `group`, leaving the adapter `but` out; None where nothing can run."""
        ...


def ready(adapter: Adapter, limit: int) -> tuple[Request, ...]:
    """The adapter's requests that may run back to back: consecutive seqs of one phase (sampling, or not), at most `limit`."""
    requests: list[Request] = []
    seq = adapter.next_seq
    while len(requests) < limit and (queued := adapter.queue.get(seq)) is not None:
        request = queued.request
        if requests and _sampling(request) != _sampling(requests[0]):
            break
        requests.append(request)
        seq += 1
        if request.op == Op.UNLOAD:
            break
    return tuple(requests)


def _sampling(request: Request) -> bool:
    return NEEDS[Op(request.op)].sampler is True


class Fifo:
    """The oldest waiting request first, whoever sent it, one at a time."""

    def turn(self, fleet: Fleet, group: Group, but: str = "") -> Turn | None:
        candidates = [key for key in group.runnable if key != but]
        if not candidates:
            return None
        key = min(candidates, key=lambda k: (group.runnable[k], k))
        return Turn(key, ready(fleet.adapters[key], 1))


class RoundRobin:
    """Tenants in rotation, and each tenant's adapters in rotation: the one longest without a turn is next, for up to `turn_requests`
    requests in a row."""

    def turn(self, fleet: Fleet, group: Group, but: str = "") -> Turn | None:
        candidates = [key for key in group.runnable if key != but]
        if not candidates:
            return None
        last_by_tenant: dict[str, int] = {}
        for key in group.adapters:
            adapter = fleet.adapters[key]
            last_by_tenant[adapter.tenant] = max(last_by_tenant.get(adapter.tenant, 0), adapter.last_turn)

        def longest_without_turn(key: str) -> tuple[int, int, str]:
            adapter = fleet.adapters[key]
            return last_by_tenant[adapter.tenant], adapter.last_turn, key

        key = min(candidates, key=longest_without_turn)
        return Turn(key, ready(fleet.adapters[key], fleet.settings.turn_requests))


POLICIES: dict[str, Policy] = {"fifo": Fifo(), "round_robin": RoundRobin()}
