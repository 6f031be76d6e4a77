"""What every worker must do, whatever is behind it: one class, subclassed with a `device` fixture.

`device` applies steps one at a time and says what came out; `body` data fits every implementation.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from state.events import STALE, Part, Step, StepKind, Written
from state.fleet import Device as Observed
from state.fleet import Expected, advance
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
    Unload,
    encode_body,
)
from state.residency import ALL_PARTS, Residency
from tests.harness import int32, sequence
from workers.contract import Call, StepOutcome

VOCABULARY = 64


def batch(number: int, sequences: int = 2, length: int = 12, **options: Any) -> Forward:
    random = np.random.default_rng(number)
    return Forward(tuple(sequence(*random.integers(0, VOCABULARY, length + 1).tolist()) for _ in range(sequences)), **options)


FUZZ = {
    Op.FORWARD: batch(1),
    Op.FORWARD_BACKWARD: batch(2),
    Op.OPTIM_STEP: OptimStep(learning_rate=0.01),
    Op.SAMPLE: Sample(int32([1, 2, 3]), max_tokens=2),
    Op.CREATE_ADAPTER: CreateAdapter(Signature(2, 4.0)),
    Op.SAVE_STATE: SaveState("fuzz"),
    Op.LOAD_STATE: LoadState("fuzz"),
    Op.UNLOAD: Unload(),
}
PROMPT = Sample(int32([1, 2, 3]), num_samples=2, max_tokens=4, seed=9, prompt_logprobs=True)


_SPACES = itertools.count()


class Device:
    """Wraps `apply`: counts step ids, fills in the live slot, decodes results."""

    def __init__(self, apply: Any, epoch: int = 1) -> None:
        self.apply, self.epoch = apply, epoch
        self.last = 0
        self.live = ""
        self.written: list[Written] = []  # what was told of snapshots that were written beside the steps
        self.space = next(_SPACES)

    def do(
        self,
        kind: StepKind,
        adapter: str = "",
        *,
        op: str = "",
        body: Any = None,
        ahead: tuple[Any, ...] = (),
        after: int = 0,
        live: str | None = None,
        **fields: Any,
    ) -> StepOutcome:
        self.last += 1
        step = Step(self.last, kind, adapter, op=op, live=self.live if live is None else live, **fields)
        following = tuple(encode_body(one) for one in ahead)
        outcome: StepOutcome = self.apply(Call(self.epoch, step, after, encode_body(body) if body is not None else b"", following))
        if outcome.facts is not None:
            self.live = outcome.facts.live
            self.written += outcome.facts.written
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

    def test_a_save_that_is_asked_for_again_finds_what_it_wrote(self, device):
        """The workers may die between the checkpoint and the word of it; the request then runs once more, and must not meet itself."""
        a = self.name(device, "a")
        device.create(a, 1)
        for op, body in ((Op.SAVE_STATE, SaveState("two")), (Op.SAVE_WEIGHTS_FOR_SAMPLER, SaveWeightsForSampler("two"))):
            first = device.run(a, op, body, request_id=f"{a}/5")
            assert device.run(a, op, body, request_id=f"{a}/5") == first
            assert code(device.do(StepKind.EXECUTE, a, op=op, body=body, request_id=f"{a}/6")) == "CheckpointExists"

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

    def test_an_adapter_that_moves_leaves_nothing_behind_and_is_restored_as_it_was(self, device):
        """Away and back: what another group of the same kind would find. Its gradients of a half-done window come along."""
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
        assert code(device.do(StepKind.MOVE, a, to="other")) == "PendingUnparked"  # the slot is behind the device
        device.ok(StepKind.FLUSH, a)
        device.ok(StepKind.SNAPSHOT, a)
        version = device.last
        facts = device.ok(StepKind.MOVE, a, to="other").facts
        assert (facts.live, [(seen.adapter, seen.residency) for seen in facts.adapters]) == (STALE, [(a, "lost")])
        assert code(device.do(StepKind.SWAP, a)) == "UnknownSlot"
        device.ok(StepKind.RESTORE, a, version=version)
        device.swap(a)
        assert device.train(a, 3) == control

    def test_an_adapter_that_moves_is_not_what_the_sampler_holds_any_more(self, device):
        """A later adapter of its name could have a version of the same number. The planner expects the same."""
        a, b = self.name(device, "a"), self.name(device, "b")
        device.create(a, 1)
        device.create(b, 2)
        device.swap(a)
        device.give_away()
        before = device.ok(StepKind.PUBLISH, a, version=1).facts
        device.ok(StepKind.SNAPSHOT, a)
        facts = device.ok(StepKind.MOVE, a, to="other").facts
        assert (before.published, facts.published) == (f"{a}@1", "")
        expected = Expected(Observed.observed(before), {a: Residency.PARKED})
        advance(expected, Step(device.last, StepKind.MOVE, a, to="other"))
        assert expected.device == Observed.observed(facts)
        device.take_back(b)

    def test_a_snapshot_written_beside_the_steps_holds_what_it_copied(self, device):
        """The adapter trains on, and its slot changes, while the snapshot is on its way to the disk."""
        a, alone = self.name(device, "a"), self.name(device, "alone")
        control = self.control(device, alone, [1, 2])
        device.create(a, 0)
        device.swap(a)
        assert device.train(a, 1) == control[0]
        device.ok(StepKind.FLUSH, a)
        device.ok(StepKind.SNAPSHOT, a, beside=True)
        version = device.last
        device.train(a, 10)
        for _ in range(1000):
            if device.written:
                break
            device.ok(StepKind.FLUSH, a)
            time.sleep(0.005)
        assert [(one.adapter, one.version, one.error) for one in device.written] == [(a, version, "")]
        device.swap(alone)
        device.ok(StepKind.RESTORE, a, version=version)
        device.swap(a)
        assert device.train(a, 2) == control[1]

    def trained_and_away(self, device: Device) -> str:
        """An adapter that was trained once, and whose device is the sampler's now."""
        a = self.name(device, "a")
        device.create(a, 1)
        device.swap(a)
        device.train(a, 1, learning_rate=0.1)
        device.give_away()
        return a

    def test_samples_are_decided_by_weights_and_request(self, device):
        a = self.trained_and_away(device)
        first = device.sample(a)
        assert device.sample(a) == first
        assert len(first.sequences) == 2
        assert first.sequences[0] != first.sequences[1]
        assert first.prompt_logprobs.shape == (3,)
        assert code(device.do(StepKind.EXECUTE, self.name(device, "a"), op=Op.FORWARD, body=batch(1))) == "NotResident"
        device.take_back(a)

    def test_samples_computed_together_are_those_computed_alone(self, device):
        a = self.trained_and_away(device)
        device.ok(StepKind.PUBLISH, a, version=1)
        asked = [
            Sample(int32([1, 2, 3]), num_samples=2, max_tokens=5, seed=1, prompt_logprobs=True),
            Sample(int32([4] * 9), max_tokens=3, seed=2, temperature=0.5, top_k=5),
            Sample(int32([5]), num_samples=9, max_tokens=4, seed=3, top_p=0.8, topk_sample_logprobs=2),
            Sample(int32([1] * 60), max_tokens=4, temperature=0.0, stop=((6,), (7,))),
        ]
        alone = [device.run(a, Op.SAMPLE, one) for one in asked]
        together = [device.run(a, Op.SAMPLE, asked[0], ahead=tuple(asked[1:])), *(device.run(a, Op.SAMPLE, one) for one in asked[1:])]
        assert together == alone
        assert device.run(a, Op.SAMPLE, asked[2], ahead=(asked[0],)) == alone[2]
        assert device.sample(a, 2) == device.run(a, Op.SAMPLE, PROMPT), "what was computed ahead is of its own plan only"
        device.take_back(a)

    def test_sampler_weights_can_be_sampled_as_another_adapter(self, device):
        """A sampler of a fixed version: the weights that were saved for it, loaded into an adapter of its own."""
        a, frozen = self.name(device, "a"), self.name(device, "frozen")
        device.create(a, 1)
        device.create(frozen, 7)
        device.swap(a)
        device.train(a, 1, learning_rate=0.1)
        device.ok(StepKind.FLUSH, a)
        device.run(a, Op.SAVE_WEIGHTS_FOR_SAMPLER, SaveWeightsForSampler("v1"))
        device.run(frozen, Op.LOAD_STATE, LoadState("v1", a.partition("/")[2], sampler_weights=True))
        device.give_away()
        first = device.sample(a)
        assert device.sample(frozen) == first
        device.take_back(a)
        device.train(a, 2, learning_rate=0.1)
        device.give_away()
        assert device.sample(a, 2) != first
        assert device.sample(frozen) == first
        device.take_back(a)

    def test_the_most_likely_tokens_are_told_where_they_are_asked_for(self, device):
        a = self.name(device, "a")
        device.create(a, 1)
        device.swap(a)
        device.give_away()
        device.ok(StepKind.PUBLISH, a, version=1)
        body = Sample(int32([1, 2, 3]), num_samples=2, max_tokens=4, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
        result = device.run(a, Op.SAMPLE, body)
        assert result.topk_prompt_logprobs.tokens.shape == result.topk_prompt_logprobs.logprobs.shape == (2, 3)
        assert [sequence.topk.tokens.shape for sequence in result.sequences] == [(4, 2)] * 2
        best = np.frombuffer(result.topk_prompt_logprobs.logprobs.data, "<f4").reshape(2, 3)
        assert (np.diff(best) <= 0).all()
        device.take_back(a)

    @pytest.mark.parametrize("seed", range(2))
    def test_random_schedules_leave_each_adapter_as_if_alone(self, device, seed):
        """Programs of forward_backwards and optim_steps of three adapters, cut anywhere by swaps, parks, flushes, spills, device slots and
        prefetches; the seed is the test's name."""
        rng = random.Random(seed)
        programs = {n: [rng.choice(("fb", "fb", "step", "forward")) for _ in range(rng.randint(4, 9))] + ["step"] for n in "abc"}
        ranks = {n: rng.randint(1, 4) for n in programs}
        control = {}
        for n, program in programs.items():
            alone = self.name(device, f"alone-{n}")
            device.create(alone, ord(n), rank=ranks[n])
            device.swap(alone)
            control[n] = [self.one(device, alone, op, i) for i, op in enumerate(program)]
        names = {n: self.name(device, n) for n in programs}
        for n in programs:
            device.create(names[n], ord(n), rank=ranks[n])
        done = {n: [] for n in programs}
        residents: set[str] = set()
        while any(len(done[n]) < len(programs[n]) for n in programs):
            n = rng.choice([n for n in programs if len(done[n]) < len(programs[n])])
            me = names[n]
            if device.live != me:
                keep = device.live in names.values() and rng.random() < 0.5
                leaving = device.live
                device.swap(me, keep=keep)
                residents.discard(me)
                if keep:
                    residents.add(leaving)
            for _ in range(rng.randint(1, 3)):
                if len(done[n]) < len(programs[n]):
                    hint = rng.choice(list(names.values()))
                    hint = hint if hint != me and hint not in residents and rng.random() < 0.5 else ""
                    done[n].append(self.one(device, me, programs[n][len(done[n])], len(done[n]), next=hint))
            self.disturb(device, rng, names, residents)
        for resident in residents:
            device.ok(StepKind.OFFLOAD, resident)
        assert done == control, f"seed {seed}"

    def one(self, device, adapter, op, number, **fields):
        if op == "step":
            return device.run(adapter, Op.OPTIM_STEP, OptimStep(learning_rate=0.01 * (number + 1), eps=1e-8, weight_decay=0.1), **fields)
        return device.run(adapter, Op.FORWARD if op == "forward" else Op.FORWARD_BACKWARD, batch(number), **fields)

    def disturb(self, device, rng, names, residents):
        """Something between two turns."""
        away = [a for a in names.values() if a != device.live and a not in residents]
        what = rng.choice(("nothing", "flush", "sample", "spill", "stage", "unstage"))
        if what == "flush":
            device.ok(StepKind.FLUSH, device.live)
        elif what == "spill" and away:
            victim = rng.choice(away)
            device.ok(StepKind.SPILL, victim)
            device.ok(StepKind.FETCH, victim)
        elif what == "stage" and away and len(residents) < 2:
            residents.add(device.ok(StepKind.BACKLOAD, rng.choice(away)).facts.adapters[0].adapter)
        elif what == "unstage" and residents:
            device.ok(StepKind.OFFLOAD, residents.pop())
        elif what == "sample":
            live = device.live
            for resident in sorted(residents):
                device.ok(StepKind.OFFLOAD, resident)
            residents.clear()
            device.give_away()
            device.sample(rng.choice(list(names.values())))
            device.take_back(live)

    def test_a_spilled_adapter_comes_back_bit_for_bit_and_is_refused_until_then(self, device):
        a, b, alone = (self.name(device, n) for n in ("a", "b", "alone"))
        device.create(alone, 1)
        device.swap(alone)
        device.train(alone, 1)
        device.run(alone, Op.FORWARD_BACKWARD, batch(2))
        control = device.train(alone, 3)
        device.create(a, 1)
        device.create(b, 2)
        device.swap(a)
        device.train(a, 1)
        device.run(a, Op.FORWARD_BACKWARD, batch(2))
        device.swap(b)
        before = device.ok(StepKind.FLUSH, b).facts.host_bytes
        facts = device.ok(StepKind.SPILL, a).facts
        assert facts.adapters[0].spilled
        assert facts.host_bytes < before
        assert code(device.do(StepKind.SWAP, a)) == "NotResident"
        device.ok(StepKind.FETCH, a)
        device.swap(a)
        assert device.train(a, 3) == control

    def test_no_sequence_of_calls_reaches_more_than_our_own_errors(self, device):
        """Random steps with random fields: refused or done, never anything else, and the device still works afterwards."""
        rng = random.Random(7)
        names = [self.name(device, n) for n in "ab"]
        device.create(names[0], 1)
        allowed = {
            "NotResident",
            "PendingUnparked",
            "WrongLive",
            "UnknownSlot",
            "UnknownCheckpoint",
            "CheckpointExists",
            "WindowVoided",
            "",
        }
        for _ in range(120):
            kind = rng.choice(list(StepKind))
            fields = {"adapter": rng.choice([*names, self.name(device, "nobody"), ""]), "keep": rng.random() < 0.3}
            if kind in (StepKind.BACKLOAD, StepKind.OFFLOAD):
                fields["parts"] = tuple(part for part in ALL_PARTS if rng.random() < 0.7)
                fields["adapter"] = "" if rng.random() < 0.7 else fields["adapter"]
            if kind is StepKind.EXECUTE:
                op = rng.choice(list(FUZZ))
                fields |= {"op": op, "body": FUZZ[op]}
            if kind in (StepKind.SNAPSHOT, StepKind.RESTORE):
                fields["version"] = rng.randint(1, 3)
            if not fields["adapter"] and kind not in (StepKind.BACKLOAD, StepKind.OFFLOAD, StepKind.WAKE_SAMPLER, StepKind.SLEEP_SAMPLER):
                continue
            outcome = device.do(kind, fields.pop("adapter"), **fields)
            assert code(outcome) in allowed, outcome
        self.settle_down(device)
        assert self.control(device, self.name(device, "after"), [1, 2]) == self.control(device, self.name(device, "again"), [1, 2])

    def settle_down(self, device):
        """Back to a device that trains, from wherever a fuzz left it."""
        device.ok(StepKind.SLEEP_SAMPLER)
        for n in "ab":
            device.do(StepKind.OFFLOAD, self.name(device, n))
        device.ok(StepKind.BACKLOAD, parts=ALL_PARTS)
        if device.live and device.live != STALE:
            device.do(StepKind.UNPARK, device.live)

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
