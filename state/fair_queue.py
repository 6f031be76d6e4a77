"""Who waits on a group, in the order of start-time fair queueing (Goyal, Vin and Cheng 1996), and what its work and switches cost.

Each tenant has a start tag: the accelerator time it was charged, divided by its weight. Whoever has the smallest is served next. A tenant
that comes back from being idle starts at the group's virtual time, the start tag of the last turn, so idle time is not banked. Part of the
fleet's state: changed by the fold only, read by policies.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

TAG_PER_US = 1000  # tags are whole numbers, so that equal histories have equal bytes
IDLE_TAGS = 64  # tags of idle tenants that are looked through for old ones no sooner than there are so many


class Share(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one tenant is entitled to. `weight`: its part of the accelerator time. A higher `priority` goes first whatever others have had.
    Limits, 0 for none but the fleet's: requests queued, bytes of their bodies, adapters, requests accepted in a second."""

    weight: float = 1.0
    priority: int = 0
    queued: int = 0
    queued_bytes: int = 0
    adapters: int = 0
    per_second: float = 0.0


EQUAL = Share()


class Cost(msgspec.Struct, array_like=True):
    """What an operation costs for so much work, as a moving sum over the last few. `work`: tokens, and one for the request, in 1/1024."""

    us: int = 0
    work: int = 0

    def add(self, us: int, work: int) -> None:
        self.us = self.us * 3 // 4 + us
        self.work = self.work * 3 // 4 + (work + 1) * 1024

    def of(self, work: int) -> int:
        """Expected microseconds of `work`; 0 while nothing was measured."""
        return self.us * (work + 1) * 1024 // self.work if self.work else 0


class FairQueue(msgspec.Struct, array_like=True):
    """`order` is a heap of (-priority, start tag, tenant). An entry that does not say a tenant's tag any more is skipped."""

    waiting: dict[str, dict[str, int]] = {}  # tenant -> its runnable adapters -> the head request's log id
    tags: dict[str, int] = {}
    virtual_time: int = 0
    order: list[tuple[int, int, str]] = []
    costs: dict[str, Cost] = {}  # by operation
    switch_us: int = 0  # moving mean of what changing the adapter, or giving the device away, costs
    moved_us: int = 0  # spent on that since the last computation
    phase_us: int = 0  # spent since the sampler woke or went to sleep

    def runnable(self) -> Iterator[tuple[str, int]]:
        for adapters in self.waiting.values():
            yield from adapters.items()

    def wait(self, tenant: str, adapter: str, at: int, share: Share) -> None:
        adapters = self.waiting.get(tenant)
        if adapters is not None:
            adapters[adapter] = at
            return
        self.waiting[tenant] = {adapter: at}
        self.tags[tenant] = max(self.tags.get(tenant, 0), self.virtual_time)
        self._push(tenant, share)

    def leave(self, tenant: str, adapter: str) -> None:
        adapters = self.waiting.get(tenant)
        if adapters is None or adapter not in adapters:
            return
        del adapters[adapter]
        if not adapters:
            del self.waiting[tenant]
            self._clean()

    def come(self, tenant: str, old: FairQueue, share: Share) -> None:
        """From another group's queue: what it had there beyond others counts here too."""
        ahead = max(0, old.tags.get(tenant, 0) - old.virtual_time)
        self._tag(tenant, max(self.tags.get(tenant, 0), self.virtual_time + ahead), share)

    def clear(self) -> None:
        self.waiting, self.order = {}, []

    def open_turn(self, tenant: str, capped: bool = False) -> None:
        """`capped`: no further than to who is next, so that a tenant that is served out of order, as one is whose adapter moves, costs the
        others nothing. Where no adapter moves, logs of before were decided without."""
        tag = self.tags.get(tenant, 0)
        self.virtual_time = max(self.virtual_time, min(tag, self.order[0][1]) if capped and self.order else tag)
        if len(self.tags) > IDLE_TAGS + 2 * len(self.waiting):
            self.tags = {name: tag for name, tag in self.tags.items() if tag > self.virtual_time or name in self.waiting}

    def computed(self, operation: str, cost_us: int, work: int) -> None:
        """What was moved since the last computation was one switch, if anything was."""
        if self.moved_us:
            self.switch_us = (3 * self.switch_us + self.moved_us) // 4 if self.switch_us else self.moved_us
        self.moved_us = 0
        self.costs.setdefault(operation, Cost()).add(cost_us, work)

    def charge(self, tenant: str, cost_us: int, share: Share) -> None:
        self._tag(tenant, max(self.tags.get(tenant, 0), self.virtual_time) + round(cost_us * TAG_PER_US / share.weight), share)

    def _tag(self, tenant: str, tag: int, share: Share) -> None:
        if tag != self.tags.get(tenant):
            self.tags[tenant] = tag
            if tenant in self.waiting:
                self._push(tenant, share)

    def in_order(self, most: int) -> Iterator[str]:
        """The first `most` waiting tenants, best first. Costs a logarithm each, and changes nothing."""
        frontier = [(self.order[0], 0)] if self.order else []
        last = ""  # an entry may be there twice, next to itself
        while frontier and most:
            entry, index = heapq.heappop(frontier)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self.order):
                    heapq.heappush(frontier, (self.order[child], child))
            if entry[2] != last and self._valid(entry):
                most -= 1
                last = entry[2]
                yield last

    def _push(self, tenant: str, share: Share) -> None:
        heapq.heappush(self.order, (-share.priority, self.tags[tenant], tenant))
        self._clean()

    def _clean(self) -> None:
        while self.order and not self._valid(self.order[0]):
            heapq.heappop(self.order)
        if len(self.order) > 16 + 2 * len(self.waiting):
            self.order = sorted({entry for entry in self.order if self._valid(entry)})

    def _valid(self, entry: tuple[int, int, str]) -> bool:
        return entry[2] in self.waiting and self.tags[entry[2]] == entry[1]
