"""What must always be true of a fleet, by the design's numbers: small predicates in a table, each saying what is wrong, or nothing.

Asserted in the running daemon after every round and in the tests after every event. Invariants that are not here are held elsewhere: 3 and
the worker's half of 1 and 2 by `workers.machine`, 4 by the residency table, 5 by the conformance tests, 7 by the commit script, 8 by
`hotdesk replay --verify`.
"""

from __future__ import annotations

from collections.abc import Callable

from state.events import STALE
from state.fleet import Fleet, Group
from state.residency import ALL_PARTS, Residency


def _one_live(fleet: Fleet, group: Group) -> str:
    live = group.device.live
    if live in ("", STALE) or group.broken:
        return ""
    where = fleet.adapters[live].residency
    return "" if where in (Residency.LIVE, Residency.PARKED) else f"{live} is bound and {where}"


def _residents_are_resident(fleet: Fleet, group: Group) -> str:
    wrong = [key for key in group.residents if fleet.adapters[key].residency is not Residency.RESIDENT]
    return f"{wrong} are counted as resident and are not" if wrong else ""


def _pending_has_a_place(fleet: Fleet, group: Group) -> str:
    live = fleet.adapters.get(group.device.live)
    if live is None or live.residency is not Residency.LIVE or not live.pending or not fleet.settings.parking:
        return ""
    return "" if group.device.parts == ALL_PARTS else f"{live.key} has pending gradients on a device that holds {group.device.parts}"


def _sampler_or_trainer(fleet: Fleet, group: Group) -> str:
    return "the sampler is awake beside training state" if group.device.sampler and group.device.parts and not group.broken else ""


def _bounded(fleet: Fleet, group: Group) -> str:
    if group.spec is None:
        return ""
    if len(group.residents) > max(0, group.spec.device_slots - 1):
        return f"{len(group.residents)} residents beside the live one in {group.spec.device_slots} device slots"
    return "" if len(group.adapters) <= group.spec.max_adapters else f"{len(group.adapters)} adapters"


#: number in the design's section 4 -> predicates
INVARIANTS: dict[int, tuple[Callable[[Fleet, Group], str], ...]] = {
    1: (_one_live, _residents_are_resident),
    2: (_pending_has_a_place, _sampler_or_trainer),
    9: (_bounded,),
}


def violated(fleet: Fleet, group: Group) -> list[str]:
    """What is wrong with `group`, each with its number; empty when all is well."""
    return [f"invariant {number}: {wrong}" for number, checks in INVARIANTS.items() for check in checks if (wrong := check(fleet, group))]
