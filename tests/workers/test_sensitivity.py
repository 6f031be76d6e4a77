"""The partners: each mechanism that keeps adapters apart is broken on purpose, and the comparison with undisturbed adapters must notice."""

from __future__ import annotations

import pytest

from state.requests import Op, OptimStep
from tests.workers.conformance import batch
from tests.workers.megatron_rank import group, rank
from tests.workers.test_megatron import fresh_device


@pytest.fixture(scope="module", params=[("distributed", "bfloat16"), ("distributed_fused", "float32")], ids="-".join)
def hosted(request):
    made = rank(group(optimizer=request.param[0], dtype=request.param[1]))
    yield made
    made.leave()


def interleaved(hosted) -> dict[str, list[str]]:
    """Two adapters in turns, each switch in the middle of a window; then a third that reuses the first one's memory."""
    device = fresh_device(hosted)
    seen: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    for name in "ab":
        device.create(f"t/{name}", ord(name))
    head_start(device)
    for number in range(3):
        for name in "ab":
            if device.live != f"t/{name}":
                device.swap(f"t/{name}")
            if number:
                seen[name].append(step(device, name, number))
            device.run(f"t/{name}", Op.FORWARD_BACKWARD, batch(number))
    device.run("t/a", Op.UNLOAD)
    device.create("t/c", ord("c"))
    device.swap("t/c")
    device.run("t/c", Op.FORWARD_BACKWARD, batch(7))
    seen["c"].append(step(device, "c", 1))
    return seen


def head_start(device) -> None:
    """One step more for one of them, so that their step counts differ."""
    device.swap("t/a") if device.live != "t/a" else None
    device.run("t/a", Op.FORWARD_BACKWARD, batch(9))
    step(device, "a", 9)


def step(device, name, number) -> str:
    body = OptimStep(learning_rate=0.01 * number + ord(name) / 1e4, beta1=0.8 + ord(name) / 1e3, eps=1e-8, weight_decay=0.1)
    return str(device.run(f"t/{name}", Op.OPTIM_STEP, body).digest)


def undisturbed(hosted) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {}
    for name, numbers in (("a", (0, 1, 2)), ("b", (0, 1, 2)), ("c", (7,))):
        device = fresh_device(hosted)
        device.create(f"t/{name}", ord(name))
        device.swap(f"t/{name}")
        seen[name] = []
        if name == "a":
            head_start(device)
        for number in numbers:
            if number and name != "c":
                seen[name].append(step(device, name, number))
            device.run(f"t/{name}", Op.FORWARD_BACKWARD, batch(number))
        if name == "c":
            seen[name].append(step(device, "c", 1))
    return seen


def test_unbroken_they_are_equal(hosted):
    assert interleaved(hosted) == undisturbed(hosted)


def forget_kind(engine, monkeypatch, kind):
    """One kind of state stays behind when an adapter is brought in."""
    lost = next(tensor for name, tensor in engine.live.state.items() if name.startswith(kind))
    copy = engine._copy

    def copy_others(sources, targets):
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if t is not lost]
        copy([s for s, _ in pairs], [t for _, t in pairs])

    monkeypatch.setattr(engine, "_copy", copy_others)
    monkeypatch.setattr(engine, "switch", lambda *names, **kinds: (engine.store(names[0], **kinds), engine.bind(names[1])))


def break_moments(engine, monkeypatch):
    forget_kind(engine, monkeypatch, "exp_avg")


def break_steps(engine, monkeypatch):
    if "step" in engine.live.state:
        forget_kind(engine, monkeypatch, "step")
    else:
        monkeypatch.setattr("workers.megatron.layouts.set_group_steps", lambda optimizer, steps: None)


def break_pending(engine, monkeypatch):
    save = engine._save
    monkeypatch.setattr(engine, "_save", lambda slot, mine, *, state, grads: save(slot, mine, state=state, grads=False))


def break_state_out(engine, monkeypatch):
    save = engine._save
    monkeypatch.setattr(engine, "_save", lambda slot, mine, *, state, grads: save(slot, mine, state=False, grads=grads))


def break_zeroing(engine, monkeypatch):
    """The gradients of whoever was live before stay in the buffer of an adapter that has none."""
    fill = engine._fill_set

    def leave_gradients(slot, mine):
        fill(slot, mine) if slot.grads is not None else fill(
            slot, [*mine[: len(engine.kept)], *(t.clone() for t in mine[len(engine.kept) :])]
        )

    monkeypatch.setattr(engine, "_fill_set", leave_gradients)


def break_seeding(engine, monkeypatch):
    """A new adapter gets whatever lies where its predecessor was."""
    monkeypatch.setattr(engine, "_draw", lambda signature, pieces: None)


def break_derivation(engine, monkeypatch):
    if engine.live.runs:
        monkeypatch.setattr(engine, "_derive", lambda masters, weights: None)
    else:
        monkeypatch.setattr(engine, "kept", engine.kept[1:])


def break_hyper_parameters(engine, monkeypatch):
    """The first tenant's Adam stays everybody's."""
    from workers.megatron import layouts

    members = layouts.members(engine.optimizer)
    first: list[dict] = []

    class Sticky(dict):
        def update(self, *args, **kwargs):
            if not first:
                first.append(kwargs)
            super().update(*args, **first[0])

    for member in members:
        monkeypatch.setattr(member.optimizer, "param_groups", [Sticky(group) for group in member.optimizer.param_groups])


BREAKS = [
    break_moments,
    break_steps,
    break_pending,
    break_state_out,
    break_zeroing,
    break_seeding,
    break_derivation,
    break_hyper_parameters,
]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_a_broken_mechanism_is_noticed(hosted, monkeypatch, broken):
    control = undisturbed(hosted)
    with monkeypatch.context() as patch:
        broken(hosted.machine.engine, patch)
        try:
            seen = interleaved(hosted)
        except AssertionError as refused:
            seen = {"refused": [str(refused)]}
    assert seen != control
    assert interleaved(hosted) == control  # and mended again it is right
