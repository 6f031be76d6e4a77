"""What needs a Megatron group built otherwise: dropout, another largest rank."""

from __future__ import annotations

import msgspec
import numpy as np

from tests.workers.conformance import Device
from tests.workers.megatron_rank import SMALL, group, rank
from tests.workers.test_megatron import fresh_device


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
