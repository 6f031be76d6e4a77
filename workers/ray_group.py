"""A worker group hosted by Ray: one actor a rank. With a cluster address the actors are named and detached, so they outlive the daemon.

What crosses Ray is bytes of declared types. A rank that dies takes the group with it: ranks hold shards of one state.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import uuid
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from state.errors import HotdeskError, OperatorError, WorkersLostError
from state.events import Facts
from workers import ray_connection
from workers.contract import Call, Status, StepOutcome, under_way
from workers.group_config import GroupConfig
from workers.ray_connection import RayError, ray

LOOK_S = 2.0  # how often a wait for Ray looks whether Ray lives
BROKEN_COLLECTIVE = ("DistBackendError", "DistNetworkError", "Timed out waiting", "Connection closed by peer", "Connection reset by peer")
_CALL = msgspec.msgpack.Decoder(Call)
_OUTCOME = msgspec.msgpack.Decoder(StepOutcome)
_STATUS = msgspec.msgpack.Decoder(Status)


class RankActor:
    """The actor around one rank. Built in two calls: rank 0's address is known only once it runs."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.rank: Any = None

    def endpoint(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def build(self, config: bytes, rank: int, address: str, port: int, root: str) -> None:
        from workers.megatron.rank import Rank

        self.rank = Rank(msgspec.msgpack.decode(config, type=GroupConfig), rank, address, port, root)

    def apply(self, call: bytes) -> bytes:
        outcome = self.rank.machine.apply(_CALL.decode(call))
        if outcome.error is not None and any(sign in outcome.error.message for sign in BROKEN_COLLECTIVE):
            os._exit(1)  # a process group that lost a peer stays broken: better a clear death than an error for every tenant in turn
        return msgspec.msgpack.encode(outcome)

    def status(self, epoch: int) -> bytes:
        machine = self.rank.machine
        machine.gate.fence(epoch)
        outcomes = tuple(machine.gate.outcomes.values())
        return msgspec.msgpack.encode(Status(self.incarnation, machine.engine.spec, machine.facts(), outcomes))

    def pid(self) -> int:
        return os.getpid()


class RayGroup:
    """A `WorkerGroup`. `address` empty: a local Ray."""

    def __init__(self, name: str, config: GroupConfig, *, fleet: str, root: Path, address: str = "", namespace: str = "hotdesk") -> None:
        self.name = name
        self.config = config
        self.fleet = fleet
        self.root = root
        self.address, self.namespace = address, namespace
        self.world = config.tp * config.dp
        self.actors: list[Any] = []
        self.generation = 0

    async def start(self, epoch: int) -> Status:
        cpus = self.world * self.config.cpus_per_rank
        generation = await ray_connection.connect(self.address, self.namespace, max(cpus, os.cpu_count() or 1))
        if generation != self.generation:
            self.actors, self.generation = [], generation
        found = await anyio.to_thread.run_sync(self._find) if self.address else False
        if found:
            try:
                return await self.status(epoch)
            except WorkersLostError:
                pass  # some rank died while no daemon looked: the group starts anew
        await self._kill()
        await self._build()
        return await self.status(epoch)

    def _actor_name(self, rank: int) -> str:
        return f"hotdesk.{self.fleet}.{self.name}.{rank}"

    def _find(self) -> bool:
        """Whether all ranks of an earlier daemon's group are there. `actors` has those that are, so that they can be killed."""
        self.actors = []
        for rank in range(self.world):
            try:
                self.actors.append(ray.get_actor(self._actor_name(rank), self.namespace))
            except ValueError:
                continue
        return len(self.actors) == self.world

    async def _build(self) -> None:
        incarnation = uuid.uuid4().hex[:12]
        actor = ray.remote(RankActor)
        for rank in range(self.world):
            options: dict[str, Any] = {"num_cpus": self.config.cpus_per_rank, "num_gpus": self.config.gpus_per_rank}
            if self.address:
                options |= {"name": self._actor_name(rank), "namespace": self.namespace, "lifetime": "detached"}
            self.actors.append(actor.options(**options).remote(incarnation))
        config = msgspec.msgpack.encode(self.config)
        with anyio.move_on_after(self.config.start_timeout_s) as scope:
            [(address, port)] = await self._gather([self.actors[0].endpoint.remote()])
            if not self.address:
                address = "127.0.0.1"
            root = str(self.root)
            await self._gather([a.build.remote(config, rank, address, port, root) for rank, a in enumerate(self.actors)])
        if scope.cancelled_caught:
            raise OperatorError(
                f"group {self.name!r} did not start within {self.config.start_timeout_s:.0f} s; {self.world} ranks of "
                f"{self.config.cpus_per_rank} CPUs and {self.config.gpus_per_rank} GPUs were asked for",
                way_out="check that Ray has that many, or lower groups.*.cpus_per_rank; see the Ray logs of the actor",
            )

    def apply(self, call: Call) -> asyncio.Future[StepOutcome]:
        data = msgspec.msgpack.encode(call)
        return under_way(self._outcome(call, [actor.apply.remote(data) for actor in self.actors]))

    async def _outcome(self, call: Call, refs: list[Any]) -> StepOutcome:
        with anyio.move_on_after(self.config.step_timeout_s):
            return merge([_OUTCOME.decode(answer) for answer in await self._gather(refs)])
        raise WorkersLostError(
            f"group {self.name!r}: {call.step.op or call.step.kind} {call.step.id} took over {self.config.step_timeout_s:.0f} s"
        )

    async def status(self, epoch: int) -> Status:
        if reason := ray_connection.lost(self.generation):
            raise WorkersLostError(f"group {self.name!r}: {reason}")
        with anyio.move_on_after(self.config.step_timeout_s):
            answers = [_STATUS.decode(a) for a in await self._gather([actor.status.remote(epoch) for actor in self.actors])]
            if len({answer.incarnation for answer in answers}) != 1:
                raise WorkersLostError(f"group {self.name!r}: its ranks are of different incarnations")
            return self._merged_status(answers)
        raise WorkersLostError(f"group {self.name!r} does not answer")

    @staticmethod
    def _merged_status(answers: list[Status]) -> Status:
        """Only a step that every rank remembers was settled; one that some rank lacks is in doubt, and its shards differ."""
        by_id = [{outcome.step_id: outcome for outcome in answer.outcomes} for answer in answers]
        common = [step_id for step_id in by_id[0] if all(step_id in ranks for ranks in by_id)]
        ahead = {step_id for ranks in by_id for step_id in ranks} - set(common)
        if ahead:
            raise WorkersLostError(f"steps {sorted(ahead)} reached only some ranks: their shards belong to different states")
        outcomes = tuple(merge([ranks[step_id] for ranks in by_id]) for step_id in common)
        return Status(answers[0].incarnation, answers[0].spec, merge_facts([answer.facts for answer in answers]), outcomes)

    async def close(self, kill: bool = False) -> None:
        if kill or not self.address:
            await self._kill()

    async def _kill(self) -> None:
        actors, self.actors = self.actors, []
        for actor in actors:
            await anyio.to_thread.run_sync(_kill_quietly, actor)
        with anyio.move_on_after(10):  # a killed actor's name is free a moment later
            while self.address and actors:
                taken = await anyio.to_thread.run_sync(self._names_taken)
                if not taken:
                    break
                await anyio.sleep(0.1)

    def _names_taken(self) -> bool:
        taken = {one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == self.namespace}
        return any(self._actor_name(rank) in taken for rank in range(self.world))

    async def _gather(self, refs: list[Any]) -> list[Any]:
        """The ranks' answers. Raises WorkersLostError as soon as one of them died, or the Ray that would tell so."""
        waiting = [asyncio.ensure_future(self._one(ref)) for ref in refs]
        try:
            while True:
                done, pending = await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
                for one in done:
                    one.result()
                if not pending:
                    return [one.result() for one in waiting]
                if reason := ray_connection.lost(self.generation):
                    raise WorkersLostError(f"group {self.name!r}: {reason}")
        finally:
            for one in waiting:  # and nobody else will look at what became of them
                _ = one.cancel() or one.cancelled() or one.exception()

    async def _one(self, ref: Any) -> Any:
        try:
            return await ref
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, HotdeskError):
                raise cause from error  # an answer, such as StaleEpoch, not a death
            raise WorkersLostError(f"group {self.name!r}: {type(error).__name__}: {str(error).strip().splitlines()[-1]}") from error


def _kill_quietly(actor: Any) -> None:
    try:
        ray.kill(actor)
    except RayError:
        pass


def merge(outcomes: list[StepOutcome]) -> StepOutcome:
    """One outcome for the group: an error of any rank is the group's; the result is rank 0's; costs are the slowest rank's."""
    first = outcomes[0]
    failed = next((outcome for outcome in outcomes if outcome.error is not None), None)
    facts = [outcome.facts for outcome in outcomes if outcome.facts is not None]
    merged = merge_facts(facts) if facts else None
    agree = len({outcome.error.code if outcome.error else "" for outcome in outcomes}) == 1 and len(facts) in (0, len(outcomes))
    if merged is not None and not agree:
        merged = msgspec.structs.replace(merged, live="!ranks differ in how the step ended")
    cost_us = max(outcome.cost_us for outcome in outcomes)
    if failed is not None:
        return StepOutcome(first.step_id, merged, cost_us, error=failed.error)
    return StepOutcome(first.step_id, merged, cost_us, first.result)


def merge_facts(facts: list[Facts]) -> Facts:
    """Ranks must see the same device state; where they do not, the merged `live` says so and the fold finds the group diverged. Only rank 0
    tells of snapshots that were written beside the steps."""
    first = facts[0]
    summed = {name: sum(getattr(seen, name) for seen in facts) for name in ("device_bytes", "host_bytes", "moved_bytes")}
    same = {
        msgspec.msgpack.encode(msgspec.structs.replace(seen, device_bytes=0, host_bytes=0, moved_bytes=0, written=())) for seen in facts
    }
    if len(same) > 1:
        digest = hashlib.sha256(b"".join(sorted(same))).hexdigest()[:8]
        return msgspec.structs.replace(first, live=f"!ranks differ {digest}", **summed)
    return msgspec.structs.replace(first, **summed)
