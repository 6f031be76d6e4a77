"""The real Megatron engine, world of one, in this process: the contract in four optimizer layouts, and what only a real model shows."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from scheduler.producer import datum, values
from state.errors import OutOfMemory, UnknownLayout
from state.events import StepKind
from state.requests import CreateAdapter, Forward, LoadState, Op, OptimStep, SaveState, SaveWeightsForSampler, Signature
from state.residency import ALL_PARTS
from tests.harness import float32, sequence
from tests.workers.conformance import Conformance, Device, batch, code
from tests.workers.megatron_rank import RECIPE_NAMES as RECIPES
from tests.workers.megatron_rank import group, rank
from workers.megatron.losses import loss

LAYOUTS = [("distributed", "float32"), ("plain", "float32"), ("plain_fused", "float32"), ("distributed_fused", "float32")]
LAYOUTS += [(name, "bfloat16") for name in RECIPES]


@pytest.fixture(scope="module", params=LAYOUTS, ids=["-".join(layout) for layout in LAYOUTS])
def hosted(request):
    optimizer, dtype = request.param
    made = rank(group(optimizer=optimizer, dtype=dtype))
    yield made
    made.leave()


@pytest.fixture
def device(hosted):
    return fresh_device(hosted)


def fresh_device(hosted) -> Device:
    """The same process with an empty store and no memory of steps."""
    machine = hosted.machine
    engine = machine.engine
    if machine.sampler:
        engine.sleep_sampler()
    engine.backload(tuple(part for part in ALL_PARTS if part not in engine.resident_parts()))
    for adapter in list(machine.held):
        engine.drop(adapter)
    type(machine).__init__(machine, engine)
    assert engine.arena.taken_bytes == 0
    return Device(machine.apply)


class TestMegatron(Conformance):
    @pytest.fixture
    def device(self, hosted):
        return fresh_device(hosted)


def test_loss_falls_and_is_the_sum_of_the_targets_log_probabilities(device):
    device.create("t/a", 1)
    device.swap("t/a")
    losses = []
    for _ in range(8):
        result = device.run("t/a", Op.FORWARD_BACKWARD, batch(1))
        total = -sum(float(values(t).sum()) for t in result.logprobs)
        assert math.isclose(total, result.metrics["loss:sum"], rel_tol=1e-4)
        losses.append(result.metrics["loss:sum"])
        device.run("t/a", Op.OPTIM_STEP, OptimStep(learning_rate=0.02, eps=1e-8))
    assert losses[-1] < 0.8 * losses[0]


def test_gradients_of_several_requests_add_up(device):
    """Two requests of one sequence and one request of both end in the same update, up to the order of one addition."""
    both = batch(1, sequences=2)
    for adapter, bodies in (("t/a", [Forward(both.data[:1]), Forward(both.data[1:])]), ("t/b", [both])):
        device.create(adapter, 1)
        device.swap(adapter)
        for body in bodies:
            device.run(adapter, Op.FORWARD_BACKWARD, body)
        device.run(adapter, Op.OPTIM_STEP, OptimStep(learning_rate=0.01, eps=1e-3))
    after = {}
    for adapter in ("t/a", "t/b"):
        device.swap(adapter)
        after[adapter] = np.concatenate([values(t) for t in device.run(adapter, Op.FORWARD, both).logprobs])
    assert np.allclose(after["t/a"], after["t/b"], atol=2e-2)


def test_the_first_update_is_a_fresh_adams(hosted, device):
    """|update| is lr for every element with a gradient (Adam's first step is lr * g/|g|), and decay alone moves nothing else."""
    engine = hosted.machine.engine
    device.create("t/a", 1)
    device.swap("t/a")
    before = {name: p.detach().float().clone() for name, p in engine.parameters.items()}
    assert engine._optimizer_step(engine.slots["t/a"]) == 0
    device.run("t/a", Op.FORWARD_BACKWARD, batch(1))
    device.run("t/a", Op.OPTIM_STEP, OptimStep(learning_rate=2**-6, eps=0.0 + 1e-30))
    moved = {name: (p.detach().float() - before[name]).abs() for name, p in engine.parameters.items()}
    b_moved = [m for name, m in moved.items() if ".lora_b." in name]
    for update in b_moved:
        own = update[:, :4].flatten()
        assert math.isclose(float(own.median()), 2**-6, rel_tol=1e-2)
        assert float(update[:, 4:].abs().max()) == 0  # padding beyond the adapter's rank stays zero for ever


def test_optim_step_without_gradients_uses_nobody_elses(device):
    device.create("t/a", 1)
    device.create("t/b", 2)
    device.swap("t/b")
    device.run("t/b", Op.FORWARD_BACKWARD, batch(1))
    device.swap("t/a")
    before = device.run("t/a", Op.FORWARD, batch(3))
    device.run("t/a", Op.OPTIM_STEP, OptimStep(learning_rate=0.1))
    assert device.run("t/a", Op.FORWARD, batch(3)).logprobs == before.logprobs


def test_an_adapter_of_fewer_targets_and_another_rank_lives_beside_others(hosted, device):
    engine = hosted.machine.engine
    device.create("t/a", 1, rank=2, targets=("linear_qkv",))
    device.swap("t/a")
    device.train("t/a", 1)
    for name, parameter in engine.parameters.items():
        if "linear_qkv" not in name:
            assert float(parameter.detach().abs().max()) == 0, name


def test_losses_of_reinforcement_learning_follow_their_formulas(device):
    device.create("t/a", 1)
    device.swap("t/a")
    tokens = (3, 1, 4, 1, 5, 9)
    logp = values(device.run("t/a", Op.FORWARD, Forward((sequence(*tokens),))).logprobs[0])
    old = logp - np.array([0.5, -0.5, 0.0, 0.1, -0.1], np.float32)
    advantages = np.array([1.0, -1.0, 2.0, 0.5, 1.0], np.float32)
    ratio = np.exp(logp - old)
    clipped = np.clip(ratio, 0.8, 1.2)
    whole = np.exp((logp - old).mean())
    due = {
        "importance_sampling": -(advantages * ratio).sum(),
        "ppo": -np.minimum(advantages * ratio, advantages * clipped).sum(),
        "cispo": -(advantages * clipped * logp).sum(),
        "gspo": -np.minimum(advantages * whole, advantages * np.clip(whole, 0.8, 1.2)).sum(),
        "dro": -(advantages * logp - 0.025 * (logp - old) ** 2).sum(),
    }
    datum = sequence(*tokens, logprobs=old.tolist(), advantages=advantages.tolist())
    for loss_fn, expected in due.items():
        result = device.run("t/a", Op.FORWARD_BACKWARD, Forward((datum,), loss_fn))
        assert math.isclose(result.metrics["loss:sum"], float(expected), rel_tol=1e-3, abs_tol=1e-3), loss_fn
    device.run("t/a", Op.OPTIM_STEP, OptimStep())


def test_the_ratio_of_a_sequence_is_over_what_is_marked_and_each_token_has_its_own_gradient():
    logp = torch.tensor([[-1.0, -2.0, -3.0, 0.0]], requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([[-1.5, -1.5, -1.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 2.0, 3.0, 0.0]]),
        "weights": torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
        "sequence_ratio_mask": torch.tensor([[1.0, 1.0, 0.0, 0.0]]),
    }
    loss("gspo", logp, inputs, {}).backward()
    assert torch.allclose(logp.grad, -inputs["advantages"])  # the ratio is exp((0.5 - 0.5) / 2) = 1, within the clip
    inputs["sequence_ratio_mask"] = inputs["weights"]
    assert math.isclose(float(loss("gspo", logp.detach(), inputs, {})), -6 * math.exp(-2 / 3), rel_tol=1e-6)


def test_several_targets_of_a_token_are_told_and_trained_as_each_alone(device):
    device.create("t/a", 1)
    device.swap("t/a")
    device.train("t/a", 1)
    random = np.random.default_rng(4)
    tokens, targets = random.integers(0, 64, 6), random.integers(0, 64, (6, 3))
    weights = random.random((6, 3)).astype(np.float32)

    def told(of, by):
        return device.run("t/a", Op.FORWARD_BACKWARD, Forward((datum(tokens, of, weights=by), datum([1, 2], [3, 4]))))

    def trained():
        grads = [grads.detach().clone().float() for grads in device.apply.__self__.engine.live.grads]
        device.run("t/a", Op.OPTIM_STEP, OptimStep(learning_rate=0.0))
        return grads

    together = told(targets, weights)
    assert [one.shape for one in together.logprobs] == [(6, 3), (2,)]
    gradients = trained()
    each = [told(targets[:, k], weights[:, k]) for k in range(3)]
    assert np.allclose(values(together.logprobs[0]), np.stack([values(one.logprobs[0]) for one in each], 1), atol=2e-2)
    alone = values(each[0].logprobs[1]).sum()
    assert math.isclose(together.metrics["loss:sum"] - sum(one.metrics["loss:sum"] for one in each), 2 * alone, rel_tol=2e-2, abs_tol=2e-2)
    device.run("t/a", Op.FORWARD_BACKWARD, Forward((datum([1, 2], [3, 4], weights=[-2, -2]),)))  # which was trained thrice
    for ours, due in zip(gradients, trained()):
        assert float((ours - due).norm()) < 0.05 * float(due.norm())


def test_gradients_that_are_not_finite_are_discarded_and_nothing_is_applied(device):
    device.create("t/a", 1)
    device.swap("t/a")
    before = device.run("t/a", Op.FORWARD, batch(2))
    huge = sequence(1, 2, 3, weights=[3e38, 3e38])
    outcome = device.do(StepKind.EXECUTE, "t/a", op=Op.FORWARD_BACKWARD, body=Forward((huge,)))
    if not outcome.error:
        outcome = device.do(StepKind.EXECUTE, "t/a", op=Op.OPTIM_STEP, body=OptimStep(learning_rate=0.1))
    assert code(outcome) == "WorkerFailed"
    assert "finite" in outcome.error.message or "inf" in outcome.error.message
    assert (outcome.facts.adapters[0].pending, outcome.facts.adapters[0].optimizer_step) == (0, 0)
    assert device.run("t/a", Op.FORWARD, batch(2)) == before


def test_a_damaged_or_partial_checkpoint_is_refused_and_the_adapter_stays_as_it_was(hosted, device, tmp_path):
    hosted.machine.engine.root = tmp_path
    device.create("t/a", 1)
    device.swap("t/a")
    device.train("t/a", 1)
    device.ok(StepKind.FLUSH, "t/a")
    before = device.run("t/a", Op.FORWARD, batch(2))
    for name, harm in (("cut", lambda p: p.write_bytes(p.read_bytes()[:-8])), ("gone", lambda p: p.unlink())):
        device.run("t/a", Op.SAVE_STATE, SaveState(name))
        harm(tmp_path / "t/a/weights" / name / "shard-0.safetensors")
        outcome = device.do(StepKind.EXECUTE, "t/a", op=Op.LOAD_STATE, body=LoadState(name))
        assert code(outcome) == "BadCheckpoint"
    device.create("t/small", 1, rank=2)
    device.run("t/small", Op.SAVE_STATE, SaveState("rank2"))
    assert code(device.do(StepKind.EXECUTE, "t/a", op=Op.LOAD_STATE, body=LoadState("rank2", adapter="small"))) == "BadCheckpoint"
    assert device.run("t/a", Op.FORWARD, batch(2)) == before


def test_thousands_of_switches_leave_host_and_device_bytes_flat(hosted, device):
    engine = hosted.machine.engine
    for adapter in ("t/a", "t/b", "t/c"):
        device.create(adapter, 1)
    device.swap("t/a")
    device.run("t/a", Op.FORWARD_BACKWARD, batch(1))
    for keep in (False, True):
        for adapter in ("t/b", "t/c", "t/a"):
            device.swap(adapter, keep=keep)
        if keep:
            break
    seen = set()
    for number in range(10_000 if hosted.machine.engine.config.optimizer == "distributed" else 1_000):
        device.swap(("t/b", "t/c", "t/a")[number % 3], keep=True)
        if number % 100 == 0:
            seen.add((engine.device_bytes(), engine.host_bytes(), engine.arena.wasted_bytes))
    assert len(seen) == 1
    hosted.machine.gate.outcomes.clear()


def test_an_unknown_layout_is_refused_by_name(hosted):
    from workers.megatron import optimizers

    assert set(optimizers.RECIPES) == set(RECIPES)
    with pytest.raises(UnknownLayout, match="sgd"):
        optimizers.recipe(msgspec.structs.replace(hosted.machine.engine.config, optimizer="sgd"))
    with pytest.raises(UnknownLayout, match="bfloat16"):
        optimizers.recipe(msgspec.structs.replace(hosted.machine.engine.config, optimizer="offload_50", dtype="float32"))


def test_weights_of_zero_change_nothing(device):
    device.create("t/a", 1)
    device.swap("t/a")
    before = device.run("t/a", Op.FORWARD, batch(2))
    nothing = sequence(1, 2, 3, weights=[0.0, 0.0])
    assert nothing.inputs["weights"] == float32([0.0, 0.0])
    device.run("t/a", Op.FORWARD_BACKWARD, Forward((nothing,)))
    device.run("t/a", Op.OPTIM_STEP, OptimStep(learning_rate=0.1))
    assert device.run("t/a", Op.FORWARD, batch(2)) == before


# --- what the store adds --------------------------------------------------------------------------------------------------


def test_bytes_moved_follow_what_happened_since_the_last_switch(hosted, device):
    """After a forward nothing goes out; after a forward_backward only gradients; after an optim_step masters and moments."""
    engine = hosted.machine.engine
    for adapter in ("t/a", "t/b"):
        device.create(adapter, 1)
    state = sum(engine.bytes_of[t] for t in engine.kept)
    grads = sum(engine.bytes_of[t] for t in engine.live.grads)
    moved = {}
    for adapter in ("t/a", "t/b"):  # a fresh adapter is its seed: nothing is copied in for it
        device.swap(adapter)
        device.run(adapter, Op.OPTIM_STEP, OptimStep(learning_rate=0.01))
    for what in ("forward", "forward_backward", "optim_step"):
        device.swap("t/a")
        if what == "forward":
            device.run("t/a", Op.FORWARD, batch(1))
        elif what == "forward_backward":
            device.run("t/a", Op.FORWARD_BACKWARD, batch(1))
        else:
            device.run("t/a", Op.OPTIM_STEP, OptimStep(learning_rate=0.01))
        moved[what] = device.swap("t/b").facts.moved_bytes
    assert moved == {"forward": state, "forward_backward": state + grads, "optim_step": 2 * state}


def test_a_prefetched_adapter_is_bound_without_a_copy_in(device):
    for adapter, seed in (("t/a", 1), ("t/b", 2), ("t/c", 2)):
        device.create(adapter, seed)
    device.swap("t/a")
    device.run("t/a", Op.FORWARD, batch(1), next="t/b")
    assert device.swap("t/b").facts.moved_bytes == 0
    prefetched = [device.train("t/b", number) for number in (1, 2)]
    device.swap("t/c")
    assert [device.train("t/c", number) for number in (1, 2)] == prefetched


def test_a_prefetch_of_a_slot_that_changed_is_forgotten(device):
    for adapter in ("t/a", "t/b", "t/c"):
        device.create(adapter, 1)
    device.swap("t/b")
    control = device.train("t/b", 1)
    device.ok(StepKind.FLUSH, "t/b")
    device.run("t/b", Op.SAVE_STATE, SaveState("one"))
    device.swap("t/a")
    device.run("t/a", Op.FORWARD, batch(1), next="t/c")
    device.run("t/c", Op.LOAD_STATE, LoadState("one", adapter="b"))
    device.swap("t/c")
    device.run("t/c", Op.OPTIM_STEP, OptimStep(learning_rate=0.01))
    device.swap("t/b")
    assert control
    again = device.run("t/b", Op.OPTIM_STEP, OptimStep(learning_rate=0.01)).digest
    device.swap("t/c")
    device.ok(StepKind.FLUSH, "t/c")
    assert device.do(StepKind.FLUSH, "t/c").facts.adapters[0].digest == again


def test_a_switch_right_behind_a_switch_waits_for_the_copy_that_is_still_under_way(device):
    """The set that the first switch copies out of is the one that the second wants to use. On a host copies end at once; CUDA shows it."""
    for adapter, seed in (("t/alone", 1), ("t/a", 1), ("t/b", 2), ("t/c", 3)):
        device.create(adapter, seed)
    device.swap("t/alone")
    control = [device.train("t/alone", number) for number in (1, 2)]
    device.swap("t/a")
    seen = [device.train("t/a", 1)]
    device.swap("t/b")
    device.swap("t/c", keep=True)
    device.train("t/c", 5)
    device.swap("t/b", keep=True)
    device.swap("t/a")
    seen.append(device.train("t/a", 2))
    device.ok(StepKind.OFFLOAD, "t/c")
    assert seen == control


def test_creating_an_adapter_takes_nothing_new_from_the_system(hosted, device):
    engine = hosted.machine.engine
    storage = engine.arena.storage.data_ptr()
    before = engine.arena.taken_bytes
    device.create("t/a", 1)
    assert engine.arena.taken_bytes - before == engine.arena.states.stride
    assert engine.slots["t/a"].state.untyped_storage().data_ptr() == storage
    device.run("t/a", Op.UNLOAD)
    assert engine.arena.taken_bytes == before


def test_a_full_host_refuses_by_name(hosted, device):
    slots = hosted.machine.engine.config.host_slots
    for number in range(slots):
        device.create(f"t/{number}", 1)
    outcome = device.do(StepKind.EXECUTE, "t/more", op=Op.CREATE_ADAPTER, body=CreateAdapter(Signature(2, 4.0)))
    assert code(outcome) == "OutOfMemory"
    device.ok(StepKind.SPILL, "t/0")
    device.create("t/more", 1)


def test_storages_are_exchanged_with_every_view_following():

    from workers.megatron.exchange import exchange

    left, right = torch.arange(4.0), torch.arange(4.0) + 10
    view = left[1:3]
    exchange(left, right)
    assert (left.tolist(), right.tolist(), view.tolist()) == ([10, 11, 12, 13], [0, 1, 2, 3], [11, 12])
    with pytest.raises(ValueError, match="cannot be exchanged"):
        exchange(left, torch.zeros(5))


def test_remainders_hold_every_bit_of_a_master():

    from workers.megatron.fused_adam import join, split

    bits = torch.randint(-(2**31), 2**31 - 1, (10_000,), dtype=torch.int64).to(torch.int32)
    values_ = bits.view(torch.float32)
    values_ = values_[torch.isfinite(values_)]
    high, low = split(values_)
    assert torch.equal(join(high, low).view(torch.int32), values_.view(torch.int32))


def test_the_export_is_what_peft_expects(hosted, device, tmp_path):
    """Names, shapes and configuration as HF PEFT has them; the parts of the fused update, put together again, are the fused update."""
    import json

    from safetensors.torch import load_file

    engine = hosted.machine.engine
    engine.root = tmp_path
    device.create("t/a", 1, rank=3)
    device.swap("t/a")
    device.train("t/a", 1, learning_rate=0.1)
    device.ok(StepKind.FLUSH, "t/a")
    device.run("t/a", Op.SAVE_WEIGHTS_FOR_SAMPLER, SaveWeightsForSampler("one"))
    path = tmp_path / "t/a/sampler_weights/one"
    settings = json.loads((path / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 6.0)
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"} <= set(settings["target_modules"])
    tensors = load_file(path / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.0.self_attn"
    fused = engine.parameters["decoder.layers.0.self_attention.linear_qkv.lora_b.weight"].detach()[:, :3].cpu()
    heads, width = 4, 8
    parts = [tensors[f"{layer}.{name}.lora_B.weight"].view(heads, width, 3) for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(torch.cat(parts, 1).reshape(-1, 3), fused)
    for name in ("q_proj", "k_proj", "v_proj"):
        a = engine.parameters["decoder.layers.0.self_attention.linear_qkv.lora_a.weight"].detach()[:3].cpu()
        assert torch.equal(tensors[f"{layer}.{name}.lora_A.weight"], a)
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (64, 3)
    assert sorted(p.name for p in path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "shard-0.safetensors",
    ]


def test_a_byte_budget_decides_how_many_adapters_stay(hosted):
    from workers.megatron.engine import MegatronEngine

    assert MegatronEngine._within("device_bytes", 0, 100) == 0
    assert MegatronEngine._within("device_bytes", 350, 100) == 3
    with pytest.raises(OutOfMemory, match="host_bytes 99"):
        MegatronEngine._within("host_bytes", 99, 100)


def test_stubs_in_a_chain_own_nothing(hosted):
    """Megatron chains an empty optimizer for kinds of parameters that a rank has none of."""
    from types import SimpleNamespace

    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from workers.megatron import layouts

    engine = hosted.machine.engine
    real = layouts.members(engine.optimizer)
    stub = SimpleNamespace(is_stub_optimizer=True, optimizer=None, model_chunks=[], config=real[0].config)
    chain = ChainedOptimizer([*real, stub])
    assert layouts.members(chain) == real
    assert layouts.group_steps(chain) == layouts.group_steps(engine.optimizer)
