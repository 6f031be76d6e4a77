"""What every worker must do, whatever is behind it: one class, subclassed with a `device` fixture.

`device` applies steps one at a time and says what came out; `body` data fits every implementation.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np

from state.events import STALE, Part, Step, StepKind
from state.requests import (
    RESULTS,
    CreateAdapter,
    Forward,
    LoadState,
    Op,
    OptimStep,
    Sample,
    SaveState,
    SaveWeightsForSampler,
    Signature,
    encode_body,
)
from state.residency import ALL_PARTS
from tests.harness import int32, sequence
from workers.contract import Call, StepOutcome

VOCABULARY = 64


def batch(number: int, sequences: int = 2, length: int = 12, **options: Any) -> Forward:
    random = np.random.default_rng(number)
    return Forward(tuple(sequence(*random.integers(0, VOCABULARY, length + 1).tolist()) for _ in range(sequences)), **options)


PROMPT = Sample(int32([1, 2, 3]), num_samples=2, max_tokens=4, seed=9, prompt_logprobs=True)


_SPACES = itertools.count()


class Device:
    """Wraps `apply`: counts step ids, fills in the live slot, decodes results."""

    def __init__(self, apply: Any, epoch: int = 1) -> None:
        self.apply, self.epoch = apply, epoch
        self.last = 0
        self.live = ""
        self.space = next(_SPACES)

    def do(
        self, kind: StepKind, adapter: str = "", *, op: str = "", body: Any = None, live: str | None = None, **fields: Any
    ) -> StepOutcome:
        self.last += 1
        step = Step(self.last, kind, adapter, op=op, live=self.live if live is None else live, **fields)
        outcome: StepOutcome = self.apply(Call(self.epoch, step, body=encode_body(body) if body is not None else b""))
        if outcome.facts is not None:
            self.live = outcome.facts.live
        return outcome

    def ok(self, *args: Any, **kwargs: Any) -> StepOutcome:
        outcome = self.do(*args, **kwargs)
        assert outcome.error is None, outcome.error
        return outcome

    def run(self, adapter: str, op: Op, body: Any = None, **fields: Any) -> Any:
        outcome = self.ok(StepKind.EXECUTE, adapter, op=op, body=body, **fields)
        return msgspec.msgpack.decode(outcome.result, type=RESULTS[op])

    def create(self, adapter: str, seed: int = 0, rank: int = 4, targets: tuple[str, ...] = ()) -> None:
        self.run(adapter, Op.CREATE_ADAPTER, CreateAdapter(Signature(rank, 2.0 * rank, targets, seed)))

    def swap(self, adapter: str, keep: bool = False) -> StepOutcome:
        return self.ok(StepKind.SWAP, adapter, keep=keep)

    def train(self, adapter: str, number: int, **adam: float) -> str:
        """One forward_backward and one optim_step; the digest afterwards."""
        self.run(adapter, Op.FORWARD_BACKWARD, batch(number))
        return str(self.run(adapter, Op.OPTIM_STEP, OptimStep(**{"learning_rate": 0.01, "eps": 1e-8, **adam})).digest)

    def give_away(self) -> None:
        """What the planner does before a sample."""
        if self.live and self.live != STALE:
            self.ok(StepKind.PARK, self.live)
        self.ok(StepKind.OFFLOAD, parts=ALL_PARTS)
        self.ok(StepKind.WAKE_SAMPLER)

    def take_back(self, adapter: str) -> None:
        self.ok(StepKind.SLEEP_SAMPLER)
        self.ok(StepKind.BACKLOAD, parts=ALL_PARTS)
        if self.live == adapter:
            self.ok(StepKind.UNPARK, adapter)
        else:
            self.swap(adapter)

    def sample(self, adapter: str, version: int = 1) -> Any:
        self.ok(StepKind.PUBLISH, adapter, version=version)
        return self.run(adapter, Op.SAMPLE, PROMPT)


def code(outcome: StepOutcome) -> str:
    return outcome.error.code if outcome.error is not None else ""


class Conformance:
    """Subclasses give `device`, a fresh `Device` in an unused name space; adapter names below are made unique by `name`."""

    def name(self, device: Device, short: str) -> str:
        return f"t{device.space}/{short}"

    def control(self, device: Device, adapter: str, numbers: list[int], seed: int = 0) -> list[str]:
        device.create(adapter, seed)
        device.swap(adapter)
        return [device.train(adapter, number) for number in numbers]

    def test_interleaved_adapters_equal_undisturbed_ones(self, device):
        a, b, alone_a, alone_b = (self.name(device, n) for n in ("a", "b", "alone-a", "alone-b"))
        control_a = self.control(device, alone_a, [1, 2, 3], seed=1)
        control_b = self.control(device, alone_b, [4, 5, 6], seed=2)
        device.create(a, 1)
        device.create(b, 2)
        seen_a, seen_b = [], []
        for number in (1, 2, 3):
            device.swap(a)
            seen_a.append(device.train(a, number))
            device.swap(b)
            seen_b.append(device.train(b, number + 3))
        assert seen_a == control_a
        assert seen_b == control_b
        assert seen_a != seen_b

    def test_pending_gradients_survive_a_swap(self, device):
        a, b, alone = (self.name(device, n) for n in ("a", "b", "alone"))
        device.create(alone, 1)
        device.swap(alone)
        device.run(alone, Op.FORWARD_BACKWARD, batch(1))
        control = device.train(alone, 2)
        device.create(a, 1)
        device.create(b, 2)
        device.swap(a)
        device.run(a, Op.FORWARD_BACKWARD, batch(1))
        device.swap(b)
        device.train(b, 7)
        device.swap(a)
        assert device.train(a, 2) == control

    def test_pending_gradients_survive_the_device_being_given_away(self, device):
        a, alone = self.name(device, "a"), self.name(device, "alone")
        device.create(alone, 1)
        device.swap(alone)
        device.run(alone, Op.FORWARD_BACKWARD, batch(1))
        control = device.train(alone, 2)
        device.create(a, 1)
        device.swap(a)
        device.run(a, Op.FORWARD_BACKWARD, batch(1))
        device.give_away()
        device.sample(a)
        device.take_back(a)
        assert device.train(a, 2) == control

    def test_a_device_given_away_holds_nothing_of_the_trainer(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.swap(a)
        device.ok(StepKind.PARK, a)
        facts = device.ok(StepKind.OFFLOAD, parts=ALL_PARTS).facts
        assert (facts.weights, facts.grads, facts.optimizer) == (False, False, False)
        facts = device.ok(StepKind.BACKLOAD, parts=ALL_PARTS).facts
        assert (facts.weights, facts.grads, facts.optimizer) == (True, True, True)
        device.ok(StepKind.UNPARK, a)

    def test_resident_adapters_equal_undisturbed_ones(self, device):
        a, b, alone = (self.name(device, n) for n in ("a", "b", "alone"))
        control = self.control(device, alone, [1, 2, 3], seed=1)
        device.create(a, 1)
        device.create(b, 2)
        device.swap(a)
        seen = [device.train(a, 1)]
        device.run(a, Op.FORWARD_BACKWARD, batch(2))
        device.swap(b, keep=True)  # a stays resident with a pending gradient
        device.train(b, 8)
        moved = device.swap(a, keep=True).facts.moved_bytes
        assert moved == 0
        seen.append(device.run(a, Op.OPTIM_STEP, OptimStep(learning_rate=0.01, eps=1e-8)).digest)
        device.ok(StepKind.OFFLOAD, b)
        device.ok(StepKind.BACKLOAD, b)
        device.ok(StepKind.FLUSH, a)
        seen.append(device.train(a, 3))
        device.ok(StepKind.OFFLOAD, b)
        assert seen == control

    def test_a_freed_storage_is_refused_by_our_own_error(self, device):
        a, b = self.name(device, "a"), self.name(device, "b")
        device.create(a, 1)
        device.create(b, 2)
        device.swap(a)
        device.ok(StepKind.PARK, a)
        device.ok(StepKind.OFFLOAD, parts=(Part.GRADS,))
        assert code(device.do(StepKind.SWAP, b)) == "NotResident"
        assert code(device.do(StepKind.EXECUTE, a, op=Op.FORWARD_BACKWARD, body=batch(1))) == "NotResident"
        device.ok(StepKind.BACKLOAD, parts=(Part.GRADS,))
        device.swap(b)
        device.train(b, 1)

    def test_pending_gradients_cannot_be_offloaded_unparked(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.swap(a)
        device.run(a, Op.FORWARD_BACKWARD, batch(1))
        assert code(device.do(StepKind.OFFLOAD, parts=ALL_PARTS)) == "PendingUnparked"

    def test_a_call_that_names_another_live_slot_is_refused(self, device):
        a, b = self.name(device, "a"), self.name(device, "b")
        device.create(a, 1)
        device.create(b, 2)
        device.swap(a)
        assert code(device.do(StepKind.EXECUTE, a, op=Op.OPTIM_STEP, body=OptimStep(), live=b)) == "WrongLive"
        assert code(device.do(StepKind.EXECUTE, b, op=Op.OPTIM_STEP, body=OptimStep())) == "WrongLive"
        assert code(device.do(StepKind.SWAP, self.name(device, "nobody"))) == "UnknownSlot"

    def test_a_repeated_step_returns_the_first_outcome(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.swap(a)
        device.run(a, Op.FORWARD_BACKWARD, batch(1))
        body = OptimStep(learning_rate=0.01)
        first = device.ok(StepKind.EXECUTE, a, op=Op.OPTIM_STEP, body=body)
        device.last -= 1
        again = device.ok(StepKind.EXECUTE, a, op=Op.OPTIM_STEP, body=body)
        assert again == first

    def test_an_older_epoch_is_refused(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.epoch += 1
        device.swap(a)
        device.epoch -= 1
        assert code(device.do(StepKind.EXECUTE, a, op=Op.FORWARD, body=batch(1))) == "StaleEpoch"
        device.epoch += 1

    def test_transitions_are_idempotent(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.create(a, 1)
        device.swap(a)
        control = device.train(a, 1)
        for _ in range(2):
            device.ok(StepKind.PARK, a)
        for _ in range(2):
            device.ok(StepKind.OFFLOAD, parts=ALL_PARTS)
        for _ in range(2):
            device.ok(StepKind.WAKE_SAMPLER)
        for _ in range(2):
            device.ok(StepKind.SLEEP_SAMPLER)
        for _ in range(2):
            device.ok(StepKind.BACKLOAD, parts=ALL_PARTS)
        for _ in range(2):
            device.ok(StepKind.UNPARK, a)
        facts = device.ok(StepKind.FLUSH, a).facts
        assert facts.adapters[0].digest == control

    def test_a_new_adapter_equals_the_first_one_whatever_was_there_before(self, device):
        first, second = self.name(device, "first"), self.name(device, "second")
        control = self.control(device, first, [1, 2], seed=3)
        device.run(first, Op.UNLOAD)
        assert device.live == STALE
        assert self.control(device, second, [1, 2], seed=3) == control

    def test_a_discard_leaves_a_clean_window(self, device):
        a, alone = self.name(device, "a"), self.name(device, "alone")
        control = self.control(device, alone, [2], seed=1)
        device.create(a, 1)
        device.swap(a)
        device.run(a, Op.FORWARD_BACKWARD, batch(1))
        assert code(device.do(StepKind.EXECUTE, a, op=Op.OPTIM_STEP, body=OptimStep(), discard=True)) == "WindowVoided"
        assert [device.train(a, 2)] == control

    def test_a_forward_leaves_no_gradient(self, device):
        a, alone = self.name(device, "a"), self.name(device, "alone")
        control = self.control(device, alone, [2], seed=1)
        device.create(a, 1)
        device.swap(a)
        first = device.run(a, Op.FORWARD, batch(5))
        assert device.run(a, Op.FORWARD, batch(5)) == first
        assert [device.train(a, 2)] == control

    def test_a_checkpoint_brings_back_the_same_bits(self, device):
        a, b = self.name(device, "a"), self.name(device, "b")
        device.create(a, 1)
        device.swap(a)
        device.train(a, 1)
        device.ok(StepKind.FLUSH, a)
        saved = device.run(a, Op.SAVE_STATE, SaveState("one"))
        assert saved.path.endswith(f"{a}/weights/one")
        after = device.train(a, 2)
        device.create(b, 9)
        device.run(b, Op.LOAD_STATE, LoadState("one", adapter="a"))
        device.swap(b)
        assert device.train(b, 2) == after
        device.run(b, Op.LOAD_STATE, LoadState("one", adapter="a"))  # while live: the device follows the slot
        assert device.train(b, 2) == after

    def test_checkpoint_names_are_immutable_and_the_two_kinds_do_not_meet(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.run(a, Op.SAVE_STATE, SaveState("one"))
        assert code(device.do(StepKind.EXECUTE, a, op=Op.SAVE_STATE, body=SaveState("one"))) == "CheckpointExists"
        device.run(a, Op.SAVE_STATE, SaveState("one", overwrite=True))
        device.run(a, Op.SAVE_WEIGHTS_FOR_SAMPLER, SaveWeightsForSampler("one"))
        outcome = device.do(StepKind.EXECUTE, a, op=Op.SAVE_WEIGHTS_FOR_SAMPLER, body=SaveWeightsForSampler("one"))
        assert code(outcome) == "CheckpointExists"
        assert code(device.do(StepKind.EXECUTE, a, op=Op.LOAD_STATE, body=LoadState("two"))) == "UnknownCheckpoint"

    def test_a_snapshot_restores_pending_gradients_too(self, device):
        a, alone = self.name(device, "a"), self.name(device, "alone")
        device.create(alone, 1)
        device.swap(alone)
        device.train(alone, 1)
        device.run(alone, Op.FORWARD_BACKWARD, batch(2))
        control = device.train(alone, 3)
        device.create(a, 1)
        device.swap(a)
        device.train(a, 1)
        device.run(a, Op.FORWARD_BACKWARD, batch(2))
        assert code(device.do(StepKind.SNAPSHOT, a)) == "PendingUnparked"  # the slot is behind the device
        device.ok(StepKind.FLUSH, a)
        device.ok(StepKind.SNAPSHOT, a)
        version = device.last
        device.train(a, 4)
        device.swap(alone)
        facts = device.ok(StepKind.RESTORE, a, version=version).facts.adapters[0]
        assert facts.pending == 1
        device.swap(a)
        assert device.train(a, 3) == control

    def test_samples_are_decided_by_weights_and_request(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.swap(a)
        device.train(a, 1, learning_rate=0.1)
        device.give_away()
        first = device.sample(a)
        assert device.sample(a) == first
        assert len(first.sequences) == 2
        assert first.sequences[0] != first.sequences[1]
        assert first.prompt_logprobs.shape == (3,)
        assert code(device.do(StepKind.EXECUTE, self.name(device, "a"), op=Op.FORWARD, body=batch(1))) == "NotResident"
        device.take_back(a)

    def test_each_adam_parameter_changes_the_update(self, device):
        digests = {}
        variants = {"plain": {}, "lr": {"learning_rate": 0.02}, "beta1": {"beta1": 0.5}, "beta2": {"beta2": 0.5}}
        variants |= {"eps": {"eps": 0.1}, "decay": {"weight_decay": 0.3}, "clip": {"grad_clip_norm": 1e-3, "eps": 1e-2}}
        for index, (which, adam) in enumerate(variants.items()):
            adapter = self.name(device, f"v{index}")
            device.create(adapter, 1)
            device.swap(adapter)
            device.train(adapter, 1, **adam)
            digests[which] = device.train(adapter, 2, **adam)
        assert len(set(digests.values())) == len(variants)
