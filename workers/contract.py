"""The worker contract: `apply(call) -> outcome` and `status(epoch) -> status`.

Every call carries the leader's epoch, the step with its id, and the live slot that the planner expects; a worker compares all three
with what it observes before it touches a tensor, and a repeated step id gets the first outcome instead of acting again.
`conformance` in the tests runs against every implementation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from state.errors import ErrorInfo, StaleEpoch, StepOutOfOrder
from state.events import Facts, GroupSpec, Step
from state.requests import Op

REMEMBERED_OUTCOMES = 512  # a plan is far shorter; what is older was settled in the log long ago


class Call(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """`after`: the step that must have finished just before this one; 0 opens a plan. `body`: of an `execute`. `ahead`: bodies of the
    samples right behind this one in the plan, for the workers to compute together with it; their own calls come all the same."""

    epoch: int
    step: Step
    after: int = 0
    body: bytes = b""
    ahead: tuple[bytes, ...] = ()


class StepOutcome(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Exactly one of `error` and a finished step. A failed step may still report `facts`: what the device holds now."""

    step_id: int
    facts: Facts | None = None
    cost_us: int = 0
    result: bytes = b""
    error: ErrorInfo | None = None


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a group is and remembers. `incarnation` is new for every set of processes."""

    incarnation: str
    spec: GroupSpec
    facts: Facts
    outcomes: tuple[StepOutcome, ...] = ()


class WorkerGroup(Protocol):
    """One group of workers behind one address. Every method raises `WorkersLostError` once the processes are gone."""

    name: str

    async def start(self, epoch: int) -> Status:
        """Starts the processes, or finds those that outlived an earlier daemon, and fences older epochs off."""
        ...

    def apply(self, call: Call) -> asyncio.Future[StepOutcome]:
        """Under way from now on, whether or not somebody waits. Calls are carried out one at a time, in the order in which they were made;
        the next may be made before the last one's outcome is there, so that the workers need not wait for it."""
        ...

    async def status(self, epoch: int) -> Status: ...

    async def close(self, kill: bool = False) -> None:
        """Stops what this process started; detached workers stay, unless `kill`: then nothing of them may be left."""
        ...


def under_way(work: Coroutine[Any, Any, StepOutcome]) -> asyncio.Future[StepOutcome]:
    """As `WorkerGroup.apply` promises: what becomes of it may be dropped."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class Gate:
    """The checks that stand before every step, the same for all workers: epoch, repetition, order."""

    def __init__(self) -> None:
        self.epoch = 0
        self.outcomes: OrderedDict[int, StepOutcome] = OrderedDict()
        self.finished = 0

    def fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpoch(f"call of epoch {epoch} came after epoch {self.epoch}")
        self.epoch = epoch

    def run(self, call: Call, act: Callable[[Call], StepOutcome]) -> StepOutcome:
        """`act(call)` unless the call is stale, repeated, or out of order."""
        step_id = call.step.id
        try:
            self.fence(call.epoch)
        except StaleEpoch as error:
            return StepOutcome(step_id, error=error.info)
        if step_id in self.outcomes:
            return self.outcomes[step_id]
        if call.after and call.after != self.finished:
            error_info = StepOutOfOrder(f"step {step_id} follows step {call.after}, the last finished is {self.finished}").info
            outcome = StepOutcome(step_id, error=error_info)
        else:
            outcome = act(call)
        if outcome.error is None or (call.step.op == Op.SAMPLE and outcome.facts is not None):
            self.finished = step_id  # a sample that failed changed nothing: what comes behind it may run
        self.outcomes[step_id] = outcome
        while len(self.outcomes) > REMEMBERED_OUTCOMES:
            self.outcomes.popitem(last=False)
        return outcome
