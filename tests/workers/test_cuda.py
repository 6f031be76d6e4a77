"""What only a GPU shows: streams, pinned memory, the allocator, graphs. Run where CUDA is, by the same command; elsewhere told as skipped.

Copies are made late on purpose: a stream that copies is given something long to do first, so that whoever does not wait reads or frees
too early. Each test has a partner that takes the waiting away.
"""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import torch

from state.events import StepKind
from state.requests import CreateAdapter, LoadState, Op, OptimStep, Sample, SaveState, Signature
from state.residency import ALL_PARTS
from tests.harness import int32
from tests.workers.conformance import batch
from tests.workers.megatron_rank import group, rank
from tests.workers.test_megatron import fresh_device
from workers.megatron import decoding
from workers.megatron.engine import MegatronEngine, Slot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
LATE_CYCLES = 100_000_000  # some 50 ms
ADAPTERS = ("t/a", "t/b", "t/c")
STEP = OptimStep(learning_rate=0.01, eps=1e-8)  # as `Device.train`

DRAWN = {"num_samples": 3, "max_tokens": 40, "seed": 5, "topk_sample_logprobs": 2}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def hosted(request):
    made = rank(group(dtype=request.param, device_slots=2))
    yield made
    made.leave()


@pytest.fixture
def device(hosted):
    return fresh_device(hosted)


def alone(hosted, adapter: str) -> list[str]:
    device = fresh_device(hosted)
    device.create(adapter, ord(adapter[-1]))
    device.swap(adapter)
    return [device.train(adapter, number) for number in range(4)]


def in_turns(hosted, prefetch: bool) -> dict[str, list[str]]:
    """Three adapters through the host, with late copies: each leaves with its window half done."""
    device = fresh_device(hosted)
    engine = hosted.machine.engine
    seen: dict[str, list[str]] = {adapter: [] for adapter in ADAPTERS}
    for adapter in ADAPTERS:
        device.create(adapter, ord(adapter[-1]))
    for number in range(4):
        for half in (0, 1):
            for index, adapter in enumerate(ADAPTERS):
                for stream in (engine.copying_in, engine.copying_out):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(LATE_CYCLES)
                device.swap(adapter)
                following = ADAPTERS[(index + 1) % len(ADAPTERS)] if prefetch else ""
                if half == 0:
                    device.run(adapter, Op.FORWARD_BACKWARD, batch(number), next=following)
                else:
                    seen[adapter].append(device.run(adapter, Op.OPTIM_STEP, STEP, next=following).digest)
    return seen


@pytest.mark.parametrize("prefetch", [False, True])
def test_late_copies_change_no_bit(hosted, prefetch):
    assert in_turns(hosted, prefetch) == {adapter: alone(hosted, adapter) for adapter in ADAPTERS}


@pytest.mark.parametrize("prefetch", [False, True])
def test_streams_that_do_not_wait_for_each_other_are_noticed(hosted, monkeypatch, prefetch):
    control = {adapter: alone(hosted, adapter) for adapter in ADAPTERS}
    with monkeypatch.context() as patch, contextlib.suppress(AssertionError):  # garbage may fail a step as well
        patch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
        assert in_turns(hosted, prefetch) == control
        pytest.fail("not noticed")
    torch.cuda.synchronize()


def saved_at_once(hosted) -> list[str]:
    """An adapter is saved while the copy into its slot is still to come, then goes on from what was saved."""
    device = fresh_device(hosted)
    for adapter in ADAPTERS[:2]:
        device.create(adapter, ord(adapter[-1]))
    device.swap("t/a")
    seen = [device.train("t/a", number) for number in (0, 1)]
    with torch.cuda.stream(hosted.machine.engine.copying_out):
        torch.cuda._sleep(10 * LATE_CYCLES)
    device.swap("t/b")
    device.run("t/a", Op.SAVE_STATE, SaveState("at-once", overwrite=True))
    torch.cuda.synchronize()
    device.run("t/a", Op.LOAD_STATE, LoadState("at-once"))
    device.swap("t/a")
    return seen + [device.train("t/a", number) for number in (2, 3)]


def test_a_slot_is_read_once_its_copy_has_come(hosted):
    assert saved_at_once(hosted) == alone(hosted, "t/a")


def test_a_slot_that_is_read_too_early_is_noticed(hosted, monkeypatch):
    control = alone(hosted, "t/a")
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "settle", lambda self: None)
        seen = saved_at_once(hosted)
    assert seen != control


def test_the_arena_is_pinned_and_every_slot_lies_in_it(hosted, device):
    engine = hosted.machine.engine
    device.create("t/a")
    slot = engine.slots["t/a"].state
    first = engine.arena.storage.data_ptr()
    assert engine.arena.storage.is_pinned()
    assert slot.is_pinned()
    assert first <= slot.data_ptr() < first + engine.arena.budget_bytes


def test_a_copy_to_the_host_does_not_hold_the_next_tenant_up(hosted, device, monkeypatch):
    """A switch returns, and the next tenant computes, while the copy out is still to come."""
    engine = hosted.machine.engine
    for adapter in ADAPTERS:
        device.create(adapter)
        device.swap(adapter)
        device.run(adapter, Op.FORWARD_BACKWARD, batch(1))
    torch.cuda.synchronize()
    save = engine._save
    monkeypatch.setattr(engine, "_save", lambda *args, **kinds: torch.cuda._sleep(20 * LATE_CYCLES) or save(*args, **kinds))
    device.swap("t/a")
    assert not engine.slots["t/c"].written.query()
    device.run("t/a", Op.FORWARD, batch(1))
    assert not engine.slots["t/c"].written.query()


def allocated(engine: MegatronEngine) -> tuple[int, int]:
    """What the allocator says is in use, and what the engine declares."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(engine.device), engine.device_bytes()


def test_the_allocator_gives_and_takes_what_the_engine_declares(hosted, device):
    """To 512 bytes a storage, which is how the allocator rounds. Everything that stays resident comes and goes in whole storages."""
    engine = hosted.machine.engine
    for adapter in ADAPTERS:
        device.create(adapter)
    device.swap("t/a")
    device.train("t/a", 1)
    device.ok(StepKind.PARK, "t/a")
    before, declared = allocated(engine)
    storages = sum(len(engine._storages(part)) for part in ALL_PARTS)
    device.ok(StepKind.OFFLOAD, parts=ALL_PARTS)
    after, left = allocated(engine)
    spare = 8  # storages of a set kept for switching, which is given back too
    assert abs((before - after) - (declared - left)) <= 512 * (storages + spare)
    assert declared - left > 0
    device.ok(StepKind.BACKLOAD, parts=ALL_PARTS)
    device.ok(StepKind.UNPARK, "t/a")


def test_hundreds_of_turns_leave_the_device_as_it_was(hosted, device):
    """Trainer and sampler give each other the device: no byte stays behind, and the allocator never had to try twice."""
    engine = hosted.machine.engine
    for adapter in ADAPTERS:
        device.create(adapter, ord(adapter[-1]))
    seen = set()
    for number in range(100):
        for adapter in ADAPTERS:
            device.swap(adapter) if device.live != adapter else None
            device.train(adapter, number)
            device.give_away()
            device.sample(adapter, number)
            device.take_back(adapter)
        if number > 1:
            seen.add((*allocated(engine), engine.host_bytes(), torch.cuda.memory_reserved(engine.device)))
    assert len(seen) == 1
    assert torch.cuda.memory_stats(engine.device)["num_alloc_retries"] == 0


def test_a_captured_step_gives_the_same_bits(hosted, device, monkeypatch):
    device.create("t/a", 1)
    device.swap("t/a")
    device.train("t/a", 1, learning_rate=0.1)
    device.give_away()
    device.ok(StepKind.PUBLISH, "t/a", version=1)
    captured = []
    capture = torch.cuda.graph
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: captured.append(1) or capture(*args, **options))

    def sampled(**options):
        return device.run(
            "t/a", Op.SAMPLE, Sample(int32([1, 2, 3]), num_samples=3, max_tokens=40, seed=5, topk_sample_logprobs=2, **options)
        )

    graphed = sampled()
    tokens = np.frombuffer(graphed.sequences[0].tokens.data, "<i4").tolist()
    stopping = sampled(stop=((tokens[20], tokens[21]),)).sequences[0]
    assert sampled() == graphed
    assert len(captured) == 1, "one graph for all batches of a shape"
    assert np.frombuffer(stopping.tokens.data, "<i4").tolist() == tokens[: stopping.tokens.shape[0]]
    assert stopping.stop_reason == "stop"
    filtered = sampled(top_p=0.9)
    assert len(captured) == 2
    monkeypatch.setattr(decoding, "GRAPH_FROM", 10**9)
    hosted.machine.engine.sampler.forget()
    assert (sampled(), sampled(top_p=0.9)) == (graphed, filtered)
    assert len(captured) == 2
    device.take_back("t/a")


@pytest.mark.parametrize("forgetful", [True, False])
def test_a_captured_step_is_not_used_for_an_adapter_of_another_scale(hosted, device, monkeypatch, forgetful):
    for adapter, alpha in (("t/a", 1.0), ("t/b", 64.0)):
        device.run(adapter, Op.CREATE_ADAPTER, CreateAdapter(Signature(4, alpha, (), 1)))
        device.swap(adapter)
        device.train(adapter, 1, learning_rate=0.1)
    device.give_away()
    sampler = hosted.machine.engine.sampler
    body = Sample(int32([1, 2, 3]), max_tokens=40, seed=5)

    def sampled(adapter):
        device.ok(StepKind.PUBLISH, adapter, version=1)
        return device.run(adapter, Op.SAMPLE, body)

    control = sampled("t/b")
    sampler.forget()
    if not forgetful:
        monkeypatch.setattr(sampler, "forget", lambda: None)
    sampled("t/a")
    assert (sampled("t/b") == control) == forgetful
    monkeypatch.undo()
    device.take_back("t/b")
