"""What needs a Megatron group built otherwise: dropout, another largest rank, an engine that leaves it little of a GPU."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from state.events import StepKind
from state.residency import ALL_PARTS
from tests.gateway.running import StandInEngine, free_port
from tests.workers.conformance import Device
from tests.workers.megatron_rank import SMALL, group, rank
from tests.workers.test_megatron import fresh_device
from workers.group_config import EngineConfig


def test_an_adapters_randomness_is_its_own():
    dropping = rank(group(model=msgspec.structs.replace(SMALL, dropout=0.2)))
    try:
        check_randomness(dropping)
    finally:
        dropping.leave()


def check_randomness(dropping):
    def alone(seed):
        device = fresh_device(dropping)
        device.create("t/a", seed)
        device.swap("t/a")
        return [device.train("t/a", 1) for _ in range(4)]

    control = {seed: alone(seed) for seed in (1, 2)}
    assert control[1] == alone(1)
    assert control[1] != control[2]
    device = fresh_device(dropping)
    seen = {1: [], 2: []}
    for seed in seen:
        device.create(f"t/{seed}", seed)
    for _ in range(4):
        for seed in seen:
            device.swap(f"t/{seed}")
            seen[seed].append(device.train(f"t/{seed}", 1))
    assert seen == control


def test_an_adapter_in_a_larger_group_equals_one_in_a_group_of_its_own_rank():
    """Not bit for bit: a matrix product over a padded rank may add in another order. 1e-5: some hundred roundings of fp32 near 1."""

    def trained(max_rank):
        made = rank(group(max_rank=max_rank))
        try:
            return weights_after(made)
        finally:
            made.leave()

    def weights_after(made):
        device = Device(made.machine.apply)
        device.create("t/a", 1, rank=4, targets=("linear_qkv", "linear_fc2"))
        device.swap("t/a")
        for number in range(4):
            device.train("t/a", number)
        return {n: p.detach().clone() for n, p in made.machine.engine.parameters.items()}

    own, padded = trained(4), trained(8)
    for name, weights in own.items():
        rows = padded[name][:4] if ".lora_a." in name else padded[name][:, :4]
        assert np.allclose(weights.cpu().numpy(), rows.cpu().numpy(), atol=1e-5), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("gives_back", [True, False])
def test_an_engine_gets_the_memory_that_training_had_and_training_gets_it_back(monkeypatch, gives_back):
    """What training leaves in its allocator's cache is more than the engine leaves free."""
    whole = torch.cuda.mem_get_info()[1]
    standin = StandInEngine(free_port(), whole * 9 // 10)
    try:
        standin.standin()
        made = rank(group(engine=EngineConfig(standin.url, "base", patience_s=20.0)))
        try:
            device = fresh_device(made)
            device.create("t/a", 1)
            device.swap("t/a")
            control = device.train("t/a", 1)
            if not gives_back:
                monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
            torch.empty(whole // 4, dtype=torch.uint8, device="cuda")
            device.ok(StepKind.PARK, "t/a")
            device.ok(StepKind.OFFLOAD, parts=ALL_PARTS)
            assert (device.do(StepKind.WAKE_SAMPLER).error is None) == gives_back
            if gives_back:
                device.sample("t/a")
                device.take_back("t/a")
                again = fresh_device(made)
                again.create("t/a", 1)
                again.swap("t/a")
                assert again.train("t/a", 1) == control
        finally:
            monkeypatch.undo()
            made.leave()
    finally:
        standin.kill()
        torch.cuda.empty_cache()
