"""Which adapter leaves a crowded group, and for which other one. Pure, as policies are.

A move costs a snapshot there and a restore here. What others went on waiting for in the meantime is lost if it is not made, and who will
come cannot be known: so an adapter leaves once what was waited comes to so many times (`move_gain`) what the move costs.
"""

from __future__ import annotations

from itertools import islice

from scheduler.policy import expected_us
from state.fleet import Adapter, Fleet, Group, crowded_us
from state.residency import Residency

GUESS_US = 200_000  # what a snapshot costs while none was measured
LOOK = 64  # tenants and groups that are looked at
MOVABLE = frozenset({Residency.OFFLOADED, Residency.RESIDENT, Residency.LIVE, Residency.PARKED})


def leaves(fleet: Fleet, group: Group) -> tuple[Adapter, str] | None:
    """The adapter of the idle `group` that should leave now, and the group it goes to: one of the same kin whose tenants waited less than
    half as long, and that will still have less to do than this one had."""
    due_us = fleet.settings.move_gain * 2 * (group.snapshot_us or GUESS_US)
    here_crowded_us = crowded_us(group, fleet.log_id)
    if not due_us or group.failures or len(group.queue.waiting) < 2 or here_crowded_us < due_us:
        return None
    others = [other for other in islice(fleet.groups.values(), LOOK) if _takes(fleet, group, other)]
    if not others:
        return None
    to = min(others, key=lambda other: (len(other.queue.waiting) + bool(other.steps), len(other.adapters), other.name))
    if len(to.queue.waiting) + 1 >= len(group.queue.waiting) or 2 * crowded_us(to, fleet.log_id) > here_crowded_us:
        return None
    adapter = _last_in_order(fleet, group)
    if adapter is None:
        return None
    work_us = _waiting_us(group, [adapter])
    here_us, there_us = (_waiting_us(group, _waiting(fleet, one)) for one in (group, to))
    return (adapter, to.name) if there_us + work_us < here_us else None


def has_room(group: Group) -> bool:
    """For one more adapter, those on their way counted."""
    return group.spec is not None and len(group.adapters) + group.arriving < group.spec.max_adapters


def is_kin(group: Group | None, other: Group) -> bool:
    """Whether an adapter of the one could be the other's, with the same bits."""
    return group is not None and group.spec is not None and other.spec is not None and group.spec.kin == other.spec.kin != ""


def _takes(fleet: Fleet, group: Group, other: Group) -> bool:
    if other is group or other.spec is None or other.broken or other.failures or other.arriving:
        return False
    commanded = bool(other.incarnation) and other.joined_epoch == fleet.epoch
    return commanded and is_kin(group, other) and has_room(other) and len(other.adapters) < other.spec.host_slots


def _last_in_order(fleet: Fleet, group: Group) -> Adapter | None:
    """Who would wait longest, of those that can leave."""
    for tenant in reversed(list(group.queue.in_order(LOOK))):
        for key in sorted(group.queue.waiting[tenant]):
            adapter = fleet.adapters[key]
            if adapter.residency in MOVABLE and not (adapter.pinned or adapter.recovering or adapter.writing):
                return adapter
    return None


def _waiting(fleet: Fleet, group: Group) -> list[Adapter]:
    return [fleet.adapters[key] for key, _ in group.queue.runnable()]


def _waiting_us(group: Group, adapters: list[Adapter]) -> int:
    """Accelerator time of all that is queued for `adapters`, by what operations took on `group`."""
    return sum(expected_us(group, (queued.request for queued in adapter.queue.values())) for adapter in adapters)
