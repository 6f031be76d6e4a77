"""The planner: `plan(fleet, group, turn)` is the fewest steps after which each request of the turn finds what `NEEDS` says, and
the requests themselves. Pure: the same state gives the same steps, which is what `replay --verify` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from state.events import STALE, GroupSpec, Part, Request, Step, StepKind
from state.fleet import Adapter, Expected, Fleet, Group, advance
from state.requests import TRAINING_OPS, Op
from state.residency import ALL_PARTS, NEEDS, STEP_NEEDS, Needs, Residency


class Turn(NamedTuple):
    """A policy's answer: whose turn on a group, and which of its requests, in `seq` order."""

    adapter: str
    requests: tuple[Request, ...]


def plan(fleet: Fleet, group: Group, turn: Turn, following: Turn | None = None) -> list[Step]:
    """Steps for `turn`, in order, the last of each request being its `execute`. `following` is whose turn will probably be next: its slot
    is brought to the device while this turn computes, as a hint that changes no state."""
    return plan_together(fleet, group, [turn], following)


def plan_together(fleet: Fleet, group: Group, turns: Sequence[Turn], following: Turn | None) -> list[Step]:
    """Steps for `turns` one after the other, each planned on what the ones before it leave behind. More than one only where `joinable`."""
    planner: _Planner | None = None
    for turn, after in zip(turns, (*turns[1:], following), strict=True):
        planner = _Planner(fleet, group, fleet.adapters[turn.adapter], planner)
        planner.next = _to_prefetch(fleet, after)
        if turn.requests[0].op != Op.UNLOAD:  # what is about to go needs no rebuilding
            planner.recover(turn.requests[0].request_id)
        for request in turn.requests:
            planner.request(request)
        planner.snapshot_if_due(turn)
    return planner.steps if planner is not None else []


def joinable(fleet: Fleet, group: Group, turn: Turn) -> bool:
    """Whether `turn` may share a plan: plain training of a healthy adapter on a host where nothing is spilled. Then the adapters of a plan
    do not touch each other's state, and the look-ahead over many of them is exact."""
    adapter = fleet.adapters[turn.adapter]
    assert group.spec is not None
    return (
        not adapter.recovering
        and not adapter.spilled
        and len(group.adapters) <= group.spec.host_slots
        and all(request.op in TRAINING_OPS for request in turn.requests)
    )


def fit_together(spec: GroupSpec, requests: Sequence[Request]) -> bool:
    """Whether the sampler computes these samples side by side."""
    rows, places = sum(request.sequences for request in requests), sum(request.places for request in requests)
    return rows <= spec.sample_rows and (places <= spec.sample_tokens or not spec.sample_tokens)


def plan_move(fleet: Fleet, group: Group, adapter: Adapter, to: str) -> list[Step]:
    """Steps after which `adapter` is another group's: all it is lies in a durable snapshot, from which that group restores it."""
    assert adapter.head is not None
    planner = _Planner(fleet, group, adapter)
    planner.request_id = adapter.head.request.request_id
    planner.needs(Needs(slot=True))
    if adapter.history or not adapter.snapshot:
        planner.add(StepKind.SNAPSHOT, adapter.key, version=adapter.snapshot, before=adapter.previous)
    planner.add(StepKind.MOVE, adapter.key, to=to)
    return planner.steps


def plan_leave(fleet: Fleet, group: Group) -> list[Step]:
    """Steps that put a group to rest before a clean shutdown: pending gradients parked, every changed adapter snapshotted."""
    steps: list[Step] = []
    live = fleet.adapters.get(group.device.live)
    if live is not None and live.residency is Residency.LIVE:
        planner = _Planner(fleet, group, live)
        planner.add(StepKind.PARK, live.key)
        steps = planner.steps
    for key in group.adapters:
        adapter = fleet.adapters[key]
        if adapter.history and not adapter.recovering and adapter.residency is not Residency.GONE:
            if adapter.spilled:
                continue  # its file is as good as a snapshot's history: it is re-executed, or fetched first when it is next used
            if adapter.residency is Residency.RESIDENT and adapter.dirty:
                steps.append(Step(group.next_step + len(steps), StepKind.FLUSH, key, live=group.device.live))
            steps.append(Step(group.next_step + len(steps), StepKind.SNAPSHOT, key, live=group.device.live, version=adapter.snapshot))
    return steps


def _to_prefetch(fleet: Fleet, following: Turn | None) -> str:
    """The adapter of `following`, where its turn begins with a swap from the host."""
    if following is None or not NEEDS[Op(following.requests[0].op)].live:
        return ""
    adapter = fleet.adapters[following.adapter]
    return adapter.key if adapter.residency is Residency.OFFLOADED and not adapter.recovering and not adapter.spilled else ""


class _Planner:
    """Looks ahead on a copy of the device: `advance` is the same function that the fold holds facts against."""

    def __init__(self, fleet: Fleet, group: Group, adapter: Adapter, before: _Planner | None = None) -> None:
        """`before`: the planner of the turn before this one in the same plan, whose steps and look-ahead go on."""
        self.fleet, self.group, self.adapter = fleet, group, adapter
        self.steps: list[Step] = before.steps if before is not None else []
        self.had_turn: dict[str, int] = before.had_turn if before is not None else {}  # adapter -> which turn of this plan was its
        self.had_turn[adapter.key] = len(self.had_turn) + 1
        self.expected: Expected
        if before is not None:
            self.expected = before.expected
            self.expected.residency.setdefault(adapter.key, adapter.residency)
        else:
            residency = {adapter.key: adapter.residency}
            for key in (group.device.live, *group.residents):
                if key and key != STALE:
                    residency[key] = fleet.adapters[key].residency
            self.expected = Expected(msgspec.structs.replace(group.device), residency)
        self.dirty = adapter.dirty
        self.voided = adapter.voided
        self.spilled: set[str] = set()
        self.fetched = False
        self.version = adapter.version
        self.request_id = ""
        self.next = ""
        self.mutations = len(adapter.history) - adapter.writing_at
        self.writing: str = before.writing if before is not None else group.writing

    @property
    def where(self) -> Residency:
        return self.expected.residency[self.adapter.key]

    def add(
        self,
        kind: StepKind,
        adapter: str = "",
        *,
        op: str = "",
        parts: tuple[Part, ...] = (),
        keep: bool = False,
        discard: bool = False,
        redo: bool = False,
        request_id: str = "",
        version: int = 0,
        before: int = 0,
        beside: bool = False,
        to: str = "",
    ) -> None:
        step = Step(
            id=self.group.next_step + len(self.steps),
            kind=kind,
            adapter=adapter,
            request_id=request_id or self.request_id,
            op=op,
            live=self.expected.device.live,
            parts=parts,
            keep=keep,
            discard=discard,
            version=version,
            next=self.take_hint(op),
            redo=redo,
            before=before,
            to=to,
            beside=beside,
        )
        advance(self.expected, step)
        self.steps.append(step)

    def take_hint(self, op: str) -> str:
        """Goes with the first step that computes on the live adapter."""
        if not self.next or not op or not NEEDS[Op(op)].live:
            return ""
        hint, self.next = self.next, ""
        return hint

    def recover(self, request_id: str) -> None:
        """Brings an adapter whose workers died back to where the log says it was: last snapshot, then its own history."""
        if not self.adapter.recovering:
            return
        self.request_id = request_id
        if self.where is Residency.LOST and self.adapter.snapshot:
            self.make_room()
            self.add(StepKind.RESTORE, self.adapter.key, version=self.adapter.snapshot, discard=self.adapter.snapshot_voided)
        for redo in self.adapter.history[self.adapter.redone :]:
            op = Op(redo.request.op)
            if op is Op.CREATE_ADAPTER:
                self.make_room()
            self.needs(NEEDS[op])
            self.add(StepKind.EXECUTE, self.adapter.key, op=op, redo=True, request_id=redo.request.request_id)
            self.dirtied(op)

    def request(self, request: Request) -> None:
        self.request_id = request.request_id
        op = Op(request.op)
        if self.where is Residency.GONE:
            return
        if op is Op.CREATE_ADAPTER:
            self.make_room()
        self.needs(NEEDS[op])
        discard = op is Op.OPTIM_STEP and self.voided
        self.add(StepKind.EXECUTE, self.adapter.key, op=op, discard=discard)
        self.dirtied(op)
        if op in (Op.OPTIM_STEP, Op.LOAD_STATE):
            self.voided = False
        if op in (Op.OPTIM_STEP, Op.LOAD_STATE, Op.CREATE_ADAPTER):
            self.version += 1

    def dirtied(self, op: Op) -> None:
        if op in (Op.FORWARD_BACKWARD, Op.OPTIM_STEP):
            self.dirty = True
        elif op is Op.LOAD_STATE:
            self.dirty = False
        if op in (Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.LOAD_STATE, Op.CREATE_ADAPTER):
            self.mutations += 1

    def needs(self, needs: Needs) -> None:
        if needs.live or needs.slot:
            self.fetch()
        if needs.sampler is True:
            self.give_to_sampler()
        if needs.live:
            self.make_live()
        self.backload(needs)
        if needs.slot and self.dirty and self.where in (Residency.LIVE, Residency.RESIDENT):
            self.add(StepKind.FLUSH, self.adapter.key)
            self.dirty = False

    def make_room(self) -> None:
        """Where the host is full, the adapter longest without a turn goes to disk."""
        assert self.group.spec is not None
        slots = self.group.spec.host_slots
        if len(self.group.adapters) <= slots:
            return
        held = [self.fleet.adapters[key] for key in self.group.adapters if key not in self.spilled and key != self.adapter.key]
        held = [a for a in held if not a.spilled and a.residency not in (Residency.NEW, Residency.LOST, Residency.GONE)]
        if len(held) < slots:
            return
        idle = [a for a in held if self.expected.residency.get(a.key, a.residency) is Residency.OFFLOADED]
        if idle:
            victim = min(idle, key=lambda a: (a.last_turn, a.key))
            self.spilled.add(victim.key)
            self.add(StepKind.SPILL, victim.key)

    def fetch(self) -> None:
        if self.adapter.spilled and not self.fetched:
            self.make_room()
            self.add(StepKind.FETCH, self.adapter.key)
            self.fetched = True

    def give_to_sampler(self) -> None:
        """The device goes to the sampler: park, put every resident away, take training state off, wake, publish."""
        device = self.expected.device
        live = device.live
        if live and live != STALE and self.expected.residency[live] is Residency.LIVE and self.fleet.settings.parking:
            self.add(StepKind.PARK, live)
            if live == self.adapter.key:
                self.dirty = False
        for key, where in list(self.expected.residency.items()):
            if where is Residency.RESIDENT:
                self.add(StepKind.OFFLOAD, key)
                if key == self.adapter.key:
                    self.dirty = False
        if device.parts:
            self.add(StepKind.OFFLOAD, parts=device.parts)
        if not device.sampler:
            self.add(StepKind.WAKE_SAMPLER)
        if device.published != f"{self.adapter.key}@{self.version}":
            self.add(StepKind.PUBLISH, self.adapter.key, version=self.version)

    def make_live(self) -> None:
        device = self.expected.device
        if device.live == self.adapter.key:
            if self.where is Residency.PARKED:
                self.backload(STEP_NEEDS[StepKind.UNPARK])
                self.add(StepKind.UNPARK, self.adapter.key)
            return
        self.backload(STEP_NEEDS[StepKind.SWAP])
        self.add(StepKind.SWAP, self.adapter.key, keep=self.keeps_outgoing())
        self.dirty = self.where is Residency.LIVE and self.dirty

    def keeps_outgoing(self) -> bool:
        """Whether the outgoing adapter stays in a device slot; makes room by offloading an idle resident."""
        assert self.group.spec is not None
        slots = self.group.spec.device_slots
        live = self.expected.device.live
        if slots < 2 or not live or live == STALE or self.expected.residency[live] is not Residency.LIVE:
            return False
        residents = [k for k, where in self.expected.residency.items() if where is Residency.RESIDENT and k != self.adapter.key]
        if 2 + len(residents) > slots:
            idle = residents if not self.fleet.settings.resident_turns else [k for k in residents if self.is_idle(k)]
            victim = min(idle, key=lambda k: (self.had_turn.get(k, 0), self.fleet.adapters[k].last_turn, k), default="")
            if not victim:
                return False
            self.add(StepKind.OFFLOAD, victim)
        return True

    def is_idle(self, resident: str) -> bool:
        """Whether it may lose its device slot to the outgoing adapter. Were it the one longest without a turn, adapters in rotation would
        all lose their slots just before they are needed again."""
        adapter = self.fleet.adapters[resident]
        waits = resident in self.group.queue.waiting.get(adapter.tenant, ())
        long_ago = self.group.turn - adapter.last_turn > self.fleet.settings.resident_turns
        return long_ago and not waits and resident not in self.had_turn

    def backload(self, needs: Needs) -> None:
        if needs.sampler is False and self.expected.device.sampler:
            self.add(StepKind.SLEEP_SAMPLER)
        missing = tuple(p for p in needs.parts if p not in self.expected.device.parts)
        if missing:
            # What was taken off together comes back together: one step, and the next operation finds it there.
            self.add(StepKind.BACKLOAD, parts=tuple(p for p in ALL_PARTS if p not in self.expected.device.parts))

    def snapshot_if_due(self, turn: Turn) -> None:
        if self.where is Residency.GONE:
            return
        # A checkpoint may be overwritten later, so a load is never left to be re-executed.
        loaded = any(request.op == Op.LOAD_STATE for request in turn.requests)
        settings, adapter = self.fleet.settings, self.adapter
        beside = settings.snapshot_beside and not loaded and not self.writing
        late = adapter.redo_bytes - adapter.writing_bytes >= settings.snapshot_after_bytes
        due = loaded or late or self.mutations >= settings.snapshot_after_requests
        if not due and (not self.pays() or (settings.snapshot_beside and not beside)):
            return
        self.needs(Needs(slot=True))
        before = adapter.previous if settings.snapshot_beside else 0
        self.add(StepKind.SNAPSHOT, adapter.key, version=adapter.snapshot, before=before, beside=beside)
        if beside:
            self.writing = adapter.key

    def pays(self) -> bool:
        """Whether re-executing what came since the last snapshot takes so long that `snapshot_share` of it is enough to write one. Looks at
        what was measured, hence at finished steps only."""
        share = self.fleet.settings.snapshot_share
        return share > 0 and self.adapter.redo_us > 0 and self.adapter.redo_us * share >= self.group.snapshot_us
