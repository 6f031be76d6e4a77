"""The residency machine, as tables: where an adapter is, what each step does, and what each operation needs.

An adapter's own machine (invariants 1, 2, 4):

    new       --create-->    offloaded   its slot is filled from the seed
    offloaded --swap_in-->   live        bound to the model
    resident  --swap_in-->   live        bound from its device slot, nothing copied
    live      --swap_out-->  offloaded   dirty state saved to the slot first
    live      --set_aside--> resident    stays in its device slot
    parked    --swap_out-->  offloaded   its slot is already complete
    live      --park-->      parked      the group gives the device away
    parked    --unpark-->    live        the group is back
    offloaded --backload-->  resident    brought in ahead of its turn
    resident  --offload-->   offloaded   another adapter, or the sampler, needs the room
    any       --unload-->    gone
    any       --lose-->      lost        the workers died, or it moved: its new group restores it from the snapshot of its old one
    lost      --restore-->   offloaded   from the last snapshot
    lost      --create-->    offloaded   no snapshot yet: from the seed again

Nothing outside `EDGES` moves an adapter; a missing edge is `ForbiddenMove` by name.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from state.events import Part, StepKind
from state.requests import Op


class Residency(enum.StrEnum):
    NEW = "new"
    OFFLOADED = "offloaded"
    PARKED = "parked"
    RESIDENT = "resident"
    LIVE = "live"
    LOST = "lost"
    GONE = "gone"


class Move(enum.StrEnum):
    CREATE = "create"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    SET_ASIDE = "set_aside"
    PARK = "park"
    UNPARK = "unpark"
    BACKLOAD = "backload"
    OFFLOAD = "offload"
    FLUSH = "flush"
    UNLOAD = "unload"
    LOSE = "lose"
    RESTORE = "restore"


R, M = Residency, Move

EDGES: dict[tuple[Residency, Move], Residency] = {
    (R.NEW, M.CREATE): R.OFFLOADED,
    (R.OFFLOADED, M.SWAP_IN): R.LIVE,
    (R.RESIDENT, M.SWAP_IN): R.LIVE,
    (R.LIVE, M.SWAP_OUT): R.OFFLOADED,
    (R.LIVE, M.SET_ASIDE): R.RESIDENT,
    (R.PARKED, M.SWAP_OUT): R.OFFLOADED,
    (R.LIVE, M.PARK): R.PARKED,
    (R.PARKED, M.UNPARK): R.LIVE,
    (R.OFFLOADED, M.BACKLOAD): R.RESIDENT,
    (R.RESIDENT, M.OFFLOAD): R.OFFLOADED,
    (R.LIVE, M.FLUSH): R.LIVE,
    (R.RESIDENT, M.FLUSH): R.RESIDENT,
    (R.OFFLOADED, M.UNLOAD): R.GONE,
    (R.PARKED, M.UNLOAD): R.GONE,
    (R.RESIDENT, M.UNLOAD): R.GONE,
    (R.LIVE, M.UNLOAD): R.GONE,
    (R.LOST, M.UNLOAD): R.GONE,
    (R.OFFLOADED, M.LOSE): R.LOST,
    (R.PARKED, M.LOSE): R.LOST,
    (R.RESIDENT, M.LOSE): R.LOST,
    (R.LIVE, M.LOSE): R.LOST,
    (R.LOST, M.LOSE): R.LOST,
    (R.NEW, M.LOSE): R.NEW,
    (R.LOST, M.RESTORE): R.OFFLOADED,
    (R.LOST, M.CREATE): R.OFFLOADED,
}


class ForbiddenMove(AssertionError):
    """The machine has no such edge: the planner, or a worker, broke its promise."""


def moved(residency: Residency, move: Move) -> Residency:
    try:
        return EDGES[residency, move]
    except KeyError:
        raise ForbiddenMove(f"an adapter that is {residency} cannot {move}") from None


class Needs(NamedTuple):
    """What an operation or a step finds in place before it runs. `sampler`: True awake, False asleep, None either."""

    parts: tuple[Part, ...] = ()
    live: bool = False
    sampler: bool | None = None
    slot: bool = False  # the adapter's slot is complete: not behind the device


ALL_PARTS = (Part.WEIGHTS, Part.GRADS, Part.OPTIMIZER)

NEEDS: dict[Op, Needs] = {
    Op.FORWARD: Needs(parts=(Part.WEIGHTS,), live=True, sampler=False),
    Op.FORWARD_BACKWARD: Needs(parts=(Part.WEIGHTS, Part.GRADS), live=True, sampler=False),
    Op.OPTIM_STEP: Needs(parts=ALL_PARTS, live=True, sampler=False),
    Op.SAMPLE: Needs(sampler=True, slot=True),
    Op.CREATE_ADAPTER: Needs(),
    Op.LOAD_STATE: Needs(slot=True),
    Op.SAVE_STATE: Needs(slot=True),
    Op.SAVE_WEIGHTS_FOR_SAMPLER: Needs(slot=True),
    Op.UNLOAD: Needs(),
}

#: A swap and an unpark write every part of the incoming adapter, so every part's storage must be there (invariant 3).
STEP_NEEDS: dict[StepKind, Needs] = {
    StepKind.SWAP: Needs(parts=ALL_PARTS, sampler=False),
    StepKind.UNPARK: Needs(parts=ALL_PARTS, sampler=False),
    StepKind.BACKLOAD: Needs(sampler=False),
}

#: What a step does to the adapter it names. Swap also moves the outgoing one: `SWAP_OUT`, or `SET_ASIDE` where it keeps its device slot.
STEP_MOVES: dict[StepKind, Move] = {
    StepKind.SWAP: M.SWAP_IN,
    StepKind.PARK: M.PARK,
    StepKind.UNPARK: M.UNPARK,
    StepKind.BACKLOAD: M.BACKLOAD,
    StepKind.OFFLOAD: M.OFFLOAD,
    StepKind.FLUSH: M.FLUSH,
    StepKind.RESTORE: M.RESTORE,
    StepKind.MOVE: M.LOSE,
}
OP_MOVES: dict[Op, Move] = {Op.CREATE_ADAPTER: M.CREATE, Op.UNLOAD: M.UNLOAD}
