"""Shared by the tests: bodies and data, and a fleet that runs in one thread without I/O.

`Synchronous` drives the real core and real worker machines (simulated engine) step by step on a clock of its own, so a test can look
between any two events. The daemon's shell has its own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from scheduler.core import Batch, Core, Finished, Input, Joined, Lost
from scheduler.validation import Limits
from state.events import Event, GroupSpec, Settings, decode
from state.fleet import Fleet, apply, encode
from state.log import Entry
from state.requests import (
    RESULTS,
    CreateAdapter,
    Datum,
    Envelope,
    Forward,
    Op,
    OptimStep,
    Reply,
    Sample,
    Signature,
    Tensor,
    encode_body,
)
from workers.contract import Call, Status
from workers.machine import Machine
from workers.simulated import SIMULATED_SPEC, SimulatedDisk, SimulatedEngine

NOTHING = b""


def int32(values: Sequence[int]) -> Tensor:
    return Tensor("int32", (len(values),), np.asarray(values, "<i4").tobytes())


def float32(values: Sequence[float]) -> Tensor:
    return Tensor("float32", (len(values),), np.asarray(values, "<f4").tobytes())


def sequence(*tokens: int, **inputs: Sequence[float]) -> Datum:
    """Next-token data over `tokens`."""
    floats = {name: float32(values) for name, values in inputs.items()}
    return Datum(int32(tokens[:-1]), {"target_tokens": int32(tokens[1:]), **floats})


def forward_body(number: int = 0, loss_fn: str = "cross_entropy") -> Forward:
    """A small batch that differs with `number`."""
    random = np.random.default_rng(number)
    return Forward(tuple(sequence(*random.integers(0, 256, 9).tolist()) for _ in range(2)), loss_fn)


FAILING = Forward((sequence(1, 2),), loss_config={"clip_high_threshold": 13.0})  # the simulated engine raises on it
CREATE = CreateAdapter(Signature(rank=4, alpha=8.0))
SAMPLE = Sample(int32([1, 2, 3]), max_tokens=4)


class Synchronous:
    """`send` queues intake entries, `settle` runs until nothing is left to do."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        groups: Sequence[str] = ("main",),
        spec: GroupSpec = SIMULATED_SPEC,
        guard_pending: bool = True,
        limits: Limits | None = None,
        machine: Machine | None = None,
        cost_us: Callable[[Call], int] | None = None,
    ) -> None:
        self.core = Core(Fleet(), limits or Limits())
        self.now_ms = 1_000_000
        self.log: list[tuple[int, bytes]] = []
        self.replies: dict[str, Reply] = {}
        self.all_replies: list[Reply] = []
        self.bodies: dict[str, bytes] = {}
        self.spec, self.guard_pending = machine.engine.spec if machine is not None else spec, guard_pending
        self.cost_us = cost_us  # declared cost of a step, instead of the measured one
        self.given = machine  # a real worker's machine instead of simulated ones
        self.machines: dict[str, Machine] = {}
        self.incarnations: dict[str, str] = {}
        self.disk = SimulatedDisk()
        self._intake = 0
        self._born = 0
        self._pending: list[Input] = []
        self.commit(self.core.lead(self.now_ms, 1, "test", settings or Settings()))
        for name in groups:
            self.join(name)

    # --- the fleet --------------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        return self.core.fleet

    def join(self, name: str = "main") -> None:
        self.handle(self.reborn(name))

    def reborn(self, name: str) -> Joined:
        """New workers, as after a start or a death; snapshots are on disk and survive."""
        engine = SimulatedEngine(self.spec, disk=self.disk)
        self._born += 1
        self.machines[name] = self.given or Machine(engine, guard_pending=self.guard_pending)
        self.incarnations[name] = f"born-{self._born}"
        return Joined(name, self.status(name))

    def status(self, name: str) -> Status:
        machine = self.machines[name]
        return Status(self.incarnations[name], self.spec, machine.facts(), tuple(machine.gate.outcomes.values()))

    def kill(self, name: str = "main") -> None:
        self.handle(Lost(name, self.incarnations[name], "killed"))

    def adapter(self, key: str):
        return self.fleet.adapters[key]

    # --- requests -----------------------------------------------------------------------------------------------------

    def entry(
        self, tenant: str, lane: str, seq: int, op: str, body: msgspec.Struct | bytes = NOTHING, adapter: str = "", refused: str = ""
    ) -> Entry:
        data = body if isinstance(body, bytes) else encode_body(body)
        envelope = Envelope(tenant, lane, seq, op, adapter or lane.partition(":")[0], refused=refused)
        self._intake += 1
        self.bodies.setdefault(envelope.request_id, data)
        return Entry(f"{self._intake}-0", msgspec.msgpack.encode(envelope), data)

    def send(self, *args: Any, **kwargs: Any) -> str:
        """Queues one request; returns its id."""
        entry = self.entry(*args, **kwargs)
        self._pending.append(entry)
        tenant, lane, seq = args[:3]
        return f"{tenant}/{lane}/{seq}"

    def create(self, tenant: str, name: str = "poet", seed: int = 0, rank: int = 4) -> str:
        return self.send(tenant, name, 0, Op.CREATE_ADAPTER, CreateAdapter(Signature(rank, 2.0 * rank, (), seed)))

    def program(self, tenant: str, ops: Sequence[str | tuple[str, msgspec.Struct]], name: str = "poet", first: int = 1) -> list[str]:
        """Queues `ops` of one adapter from seq `first`; a bare name gets a body that depends on its seq."""
        sent = []
        for seq, item in enumerate(ops, first):
            op, body = (item, default_body(item, seq)) if isinstance(item, str) else item
            sent.append(self.send(tenant, name, seq, op, body))
        return sent

    # --- running ------------------------------------------------------------------------------------------------------

    def handle(self, *inputs: Input) -> Batch:
        self.now_ms += 1
        batch = self.core.handle(self.now_ms, inputs)
        self.commit(batch)
        return batch

    def commit(self, batch: Batch) -> None:
        commit = batch.commit
        assert commit.after == (self.log[-1][0] if self.log else 0)
        self.log.extend(commit.events)
        for result in commit.results:
            reply = msgspec.msgpack.decode(result.payload, type=Reply)
            if result.first_at:
                reply = next((r for r in self.all_replies if r.request_id == reply.request_id), reply)
            self.all_replies.append(reply)
            self.replies[reply.request_id] = reply

    def one_turn(self, batch: Batch) -> Batch:
        """Works off what `batch` dispatched, and returns what followed."""
        return self._work_off(batch, lambda: False)

    def settle(self, dies: Callable[[], bool] = lambda: False) -> Synchronous:
        """`dies` is asked before and after every step: True kills that group's workers there, and new ones join."""
        inputs, self._pending = self._pending, []
        batch = self.handle(*inputs)
        while batch.dispatches:
            batch = self._work_off(batch, dies)
        assert not any(group.broken for group in self.fleet.groups.values()), self.fleet.groups
        return self

    def _work_off(self, batch: Batch, dies: Callable[[], bool]) -> Batch:
        outcomes: list[Input] = []
        for dispatch in batch.dispatches:
            after = 0
            name, incarnation = dispatch.group, self.incarnations[dispatch.group]
            for step in dispatch.steps:
                dead = dies()
                if not dead:
                    body = self.bodies.get(step.request_id, NOTHING)
                    outcome = self.machines[name].apply(Call(1, step, after, body))
                    if self.cost_us is not None:
                        outcome = msgspec.structs.replace(outcome, cost_us=self.cost_us(Call(1, step)))
                    after = step.id
                    dead = dies()  # it was done, but nobody heard of it
                if dead:
                    outcomes += [Lost(name, incarnation, "killed"), self.reborn(name)]
                    break
                outcomes.append(Finished(name, incarnation, outcome))
        return self.handle(*outcomes)

    # --- looking --------------------------------------------------------------------------------------------------------

    def events(self, *kinds: type) -> list[Any]:
        events: list[Event] = [decode(data) for _, data in self.log]
        return [event for event in events if not kinds or isinstance(event, kinds)]

    def result(self, request_id: str) -> Any:
        reply = self.replies[request_id]
        assert reply.error is None, reply.error
        op = next(e.request.op for e in self.events() if getattr(getattr(e, "request", None), "request_id", "") == request_id)
        return msgspec.msgpack.decode(reply.result, type=RESULTS[Op(op)])

    def error(self, request_id: str) -> str:
        error = self.replies[request_id].error
        return error.code if error is not None else ""

    def refold(self) -> bytes:
        fleet = Fleet()
        for log_id, data in self.log:
            apply(fleet, log_id, decode(data))
        return encode(fleet)


def default_body(op: str, seq: int) -> msgspec.Struct:
    if op in (Op.FORWARD, Op.FORWARD_BACKWARD):
        return forward_body(seq)
    if op == Op.OPTIM_STEP:
        return OptimStep(learning_rate=0.01 * seq)
    if op == Op.SAMPLE:
        return SAMPLE
    raise ValueError(op)


def digests(bench: Synchronous, requests: Sequence[str]) -> list[str]:
    """Of the optim_steps among `requests`."""
    return [r.digest for r in (bench.result(q) for q in requests if bench.replies[q].error is None) if hasattr(r, "digest")]
