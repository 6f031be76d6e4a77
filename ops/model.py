"""A fleet on a virtual clock: the real fold, planner and policies, with workers that only cost time.

For asking what another policy would have done with a recorded day, and for fleets larger than any machine here. What a step makes of a
device is `state.fleet.advance`, which the fold holds real workers' facts against; what it costs comes from a table of costs.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from scheduler.core import decide
from scheduler.policy import POLICIES
from state import log_id as ids
from state.events import (
    AdapterFacts,
    Event,
    Facts,
    GroupSpec,
    LeaderElected,
    Part,
    Request,
    RequestAccepted,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    Settings,
    Step,
    StepFinished,
    StepKind,
    StepStarted,
    WorkersJoined,
    Written,
)
from state.fleet import SWITCHING, Expected, Fleet, Group, advance, apply
from state.requests import Op
from state.residency import Residency

Costs = Callable[[Step, int], int]  # (step, the request's tokens) -> microseconds
IDLE = Facts(weights=True, grads=True, optimizer=True)


class Summary(msgspec.Struct):
    """What a policy made of a workload. Times in milliseconds; `waits`: from acceptance to the end, of completed requests, by tenant."""

    requests: int = 0
    turns: int = 0
    swaps: int = 0
    sampler_wakes: int = 0
    busy_ms: float = 0.0
    switching_ms: float = 0.0
    span_ms: float = 0.0
    waits: dict[str, list[float]] = {}
    used_us: dict[str, int] = {}

    def rows(self) -> dict[str, str]:
        waits = sorted(wait for each in self.waits.values() for wait in each)
        slowest = max((sum(each) / len(each) for each in self.waits.values() if each), default=0.0)
        switching = self.switching_ms / self.busy_ms if self.busy_ms else 0.0
        return {
            "requests": str(self.requests),
            "turns": str(self.turns),
            "swaps": str(self.swaps),
            "sampler woken": str(self.sampler_wakes),
            "busy ms": f"{self.busy_ms:.0f}",
            "of it switching": f"{100 * switching:.1f} %",
            "span ms": f"{self.span_ms:.0f}",
            "wait p50 ms": f"{quantile(waits, 0.5):.1f}",
            "wait p99 ms": f"{quantile(waits, 0.99):.1f}",
            "slowest tenant's mean wait ms": f"{slowest:.1f}",
            "Jain index of accelerator time": f"{jain(list(self.used_us.values())):.3f}",
        }


def quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def jain(shares: list[int]) -> float:
    """Jain, Chiu and Hawe 1984: 1 where all have the same, 1/n where one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


class Model:
    def __init__(self, settings: Settings, groups: dict[str, GroupSpec], costs: Costs, start_ms: int = 0, keep: bool = False) -> None:
        """`keep`: every event stays in `kept`."""
        self.kept: list[tuple[int, Event]] | None = [] if keep else None
        self.fleet = Fleet()
        self.costs = costs
        self.policy = POLICIES[settings.policy]
        self.summary = Summary()
        self._now_us = start_ms * 1000
        self._start_us = self._now_us
        self._last_id = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._accepted_us: dict[str, int] = {}
        self._idle: dict[str, None] = {}
        self._emit(LeaderElected(1, "model", settings))
        for name, spec in groups.items():
            self._emit(WorkersJoined(name, "model", spec, IDLE))

    def at(self, time_us: int, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (time_us, self._order, act))

    def accept(self, event: RequestAccepted) -> None:
        self._emit(event)
        self._accepted_us[event.request.request_id] = self._now_us
        self._idle[self.fleet.adapters[event.request.adapter].group] = None

    def run(self) -> Summary:
        self._decide()
        while self._due:
            self._now_us, _, act = heapq.heappop(self._due)
            act()
            if not self._due or self._due[0][0] > self._now_us:  # what comes at one time is decided on together, as in the daemon
                self._decide()
        summary, groups = self.summary, self.fleet.groups.values()
        summary.turns, summary.swaps = sum(group.turns for group in groups), sum(group.swaps for group in groups)
        summary.busy_ms = sum(group.busy_us for group in groups) / 1000
        summary.span_ms = (self._now_us - self._start_us) / 1000
        summary.used_us = {name: tenant.used_us for name, tenant in self.fleet.tenants.items()}
        return summary

    def _decide(self) -> None:
        idle, self._idle = self._idle, {}
        for name in idle:
            self._schedule(self.fleet.groups[name])

    @property
    def now_us(self) -> int:
        return self._now_us

    def _emit(self, event: Event) -> None:
        self._last_id = ids.following(self._last_id, self._now_us // 1000)
        apply(self.fleet, self._last_id, event)
        if self.kept is not None:
            self.kept.append((self._last_id, event))

    def _schedule(self, group: Group) -> None:
        if group.steps:
            return
        end_us = self._now_us
        for step in decide(self.fleet, group, self.policy):
            self._emit(StepStarted(group.name, step))
            found = self.fleet.queued_request(step.request_id) if step.kind is StepKind.EXECUTE else None
            cost_us = self.costs(step, found[1].request.work if found is not None else 0)
            end_us += cost_us
            self.at(end_us, lambda step=step, cost_us=cost_us: self._finish(group, step, cost_us))  # type: ignore[misc]

    def _finish(self, group: Group, step: Step, cost_us: int) -> None:
        if step.kind in SWITCHING:
            self.summary.switching_ms += cost_us / 1000
            self.summary.sampler_wakes += step.kind is StepKind.WAKE_SAMPLER
        self._emit(StepFinished(group.name, step.id, predicted(self.fleet, group, step), cost_us))
        if step.kind is StepKind.EXECUTE:
            waited = (self._now_us - self._accepted_us.pop(step.request_id)) / 1000
            self.summary.waits.setdefault(step.request_id.partition("/")[0], []).append(waited)
            self.summary.requests += 1
            self._emit(RequestCompleted(step.request_id))
            self.completed(step.request_id)
        self._idle[group.name] = None
        if step.to:
            self._idle[step.to] = None

    def completed(self, request_id: str) -> None:
        """For a workload that reacts to answers."""


def predicted(fleet: Fleet, group: Group, step: Step) -> Facts:
    """What a worker that does as it should reports after `step`."""
    device = msgspec.structs.replace(group.device)
    touched = [key for key in dict.fromkeys((device.live if step.kind is StepKind.SWAP else "", step.adapter)) if key in fleet.adapters]
    expected = Expected(device, {key: fleet.adapters[key].residency for key in (*touched, device.live) if key in fleet.adapters})
    advance(expected, step)
    seen = []
    for key in touched:
        adapter, where = fleet.adapters[key], expected.residency[key]
        trained = step.kind is StepKind.EXECUTE and key == step.adapter and step.op in (Op.FORWARD_BACKWARD, Op.OPTIM_STEP)
        on_device = where in (Residency.LIVE, Residency.RESIDENT)
        updated = step.op == Op.OPTIM_STEP and key == step.adapter
        pending = 0 if updated else adapter.pending + (trained and not updated)
        dirty = trained or (adapter.dirty and on_device and step.kind is not StepKind.FLUSH)
        spilled = step.kind is StepKind.SPILL if step.kind in (StepKind.SPILL, StepKind.FETCH) else adapter.spilled
        seen.append(AdapterFacts(key, where, pending, dirty, adapter.optimizer_step + updated, "", spilled))
    parts = device.parts
    written = (Written(step.adapter, step.id),) if step.beside else ()
    return Facts(
        live=device.live,
        weights=Part.WEIGHTS in parts,
        grads=Part.GRADS in parts,
        optimizer=Part.OPTIMIZER in parts,
        sampler=device.sampler,
        published=device.published,
        adapters=tuple(seen),
        written=written,
    )


# --- a recorded log as a workload -----------------------------------------------------------------------------------


class Recorded:
    """What a log says of arrivals and costs. Requests that failed or were cancelled are left out: what they cost depends on the policy."""

    def __init__(self, events: Iterable[tuple[int, Event]]) -> None:
        self.settings = Settings()
        self.groups: dict[str, GroupSpec] = {}
        self.arrivals: list[tuple[int, RequestAccepted]] = []
        self.costs_us: dict[str, int] = {}  # of each request's own step
        self.samples: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # by operation: (tokens, microseconds)
        self.kinds: defaultdict[str, list[int]] = defaultdict(list)  # of other steps, by kind
        steps: dict[tuple[str, int], Step] = {}
        work: dict[str, int] = {}
        ended: set[str] = set()
        for log_id, event in events:
            if isinstance(event, LeaderElected):
                self.settings = event.settings
            elif isinstance(event, WorkersJoined):
                self.groups[event.group] = event.spec
            elif isinstance(event, RequestAccepted):
                self.arrivals.append((ids.ms_of(log_id), event))
                work[event.request.request_id] = event.request.work
            elif isinstance(event, RequestFailed | RequestCancelled):
                ended.add(event.request_id)
            elif isinstance(event, StepStarted):
                steps[event.group, event.step.id] = event.step
            elif isinstance(event, StepFinished):
                step = steps.pop((event.group, event.step_id))
                self._measured(step, event.cost_us, work.get(step.request_id, 0))
        self.arrivals = [(at, event) for at, event in self.arrivals if event.request.request_id not in ended]

    def _measured(self, step: Step, cost_us: int, work: int) -> None:
        if step.kind is not StepKind.EXECUTE:
            self.kinds[step.kind].append(cost_us)
        elif not step.redo:
            self.costs_us[step.request_id] = cost_us
            self.samples[step.op].append((work, cost_us))

    def cost(self, step: Step, work: int) -> int:
        """Its own measured cost for a request; the mean of its kind for any other step, the mean of all switches for a kind never seen."""
        if step.kind is StepKind.EXECUTE:
            return self.costs_us.get(step.request_id, 0)
        seen = self.kinds.get(step.kind) or [cost for costs in self.kinds.values() for cost in costs]
        return math.ceil(sum(seen) / len(seen)) if seen else 0

    def under(self, policy: str) -> Summary:
        """The same requests at the same times under `policy`, parking and all; seqs are renumbered over what was left out."""
        settings = msgspec.structs.replace(self.settings, policy=policy)
        model = Model(settings, self.groups, self.cost, start_ms=self.arrivals[0][0] if self.arrivals else 0)
        next_seq: defaultdict[str, int] = defaultdict(int)
        measured = dict(self.costs_us)
        for at_ms, event in self.arrivals:
            request = event.request
            lane = f"{request.tenant}/{request.lane}"
            renumbered = msgspec.structs.replace(request, seq=next_seq[lane])
            next_seq[lane] += 1
            self.costs_us[renumbered.request_id] = measured.get(request.request_id, 0)
            model.at(at_ms * 1000, lambda event=event, request=renumbered: model.accept(_with(event, request)))  # type: ignore[misc]
        return model.run()


def _with(event: RequestAccepted, request: Request) -> RequestAccepted:
    return msgspec.structs.replace(event, request=request)


class Fitted:
    """Costs for work that was never recorded: of an operation, least squares over its tokens; of any other step, the mean of its kind."""

    def __init__(self, recorded: Recorded) -> None:
        self.lines = {op: _line(samples) for op, samples in recorded.samples.items()}
        self.means = {kind: sum(costs) / len(costs) for kind, costs in recorded.kinds.items()}
        self.counts = {op: len(samples) for op, samples in recorded.samples.items()}
        self.counts |= {kind: len(costs) for kind, costs in recorded.kinds.items()}
        self._any = sum(self.means.values()) / max(1, len(self.means))

    def __call__(self, step: Step, work: int) -> int:
        if step.kind is not StepKind.EXECUTE:
            return math.ceil(self.means.get(step.kind, self._any))
        fixed_us, token_us, _ = self.lines.get(step.op, (self._any, 0.0, 0.0))
        return math.ceil(fixed_us + token_us * work)

    def rows(self) -> list[list[str]]:
        """[what, fixed us, us a token, samples, mean relative error of the fit]."""
        lines = [[op, f"{a:.0f}", f"{b:.2f}", str(self.counts[op]), f"{100 * e:.0f} %"] for op, (a, b, e) in self.lines.items()]
        return lines + [[str(kind), f"{mean:.0f}", "0", str(self.counts[kind]), ""] for kind, mean in self.means.items()]


def _line(samples: list[tuple[int, int]]) -> tuple[float, float, float]:
    """(fixed, a token, mean relative error); neither part is negative."""
    count = len(samples)
    mean_work, mean_us = sum(work for work, _ in samples) / count, sum(cost for _, cost in samples) / count
    spread = sum((work - mean_work) ** 2 for work, _ in samples)
    slope = sum((work - mean_work) * (cost - mean_us) for work, cost in samples) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_us / mean_work if mean_work else 0.0)
    fixed = mean_us - slope * mean_work
    error = sum(abs(fixed + slope * work - cost) / max(1, cost) for work, cost in samples) / count
    return fixed, slope, error
