"""One rank's shard of a checkpoint, and fingerprints of tensors: what proves that two states are the same bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from state.errors import BadCheckpoint
from state.events import AdapterFacts
from workers import checkpoints

if TYPE_CHECKING:
    from workers.megatron.engine import MegatronEngine

DEFAULT_RNG = "default"
FINGERPRINT_CHUNK = 4 * 2**20  # elements; bounds the temporary int64 copy


def fingerprint(tensor: torch.Tensor) -> int:
    """64 bits over the exact bytes, computed where the tensor lives: sum of word[i] * (2i + 1) modulo 2^64. Integer sums do not depend on
    their order, so the result is the same on every device."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words = flat.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), FINGERPRINT_CHUNK):
        chunk = words[start : start + FINGERPRINT_CHUNK].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=chunk.device, dtype=torch.int64) * 2 + 1
        total += int((chunk * weights).sum())
    return total & (2**64 - 1)


def combine(per_rank: list[list[int]]) -> str:
    return hashlib.sha256(repr(per_rank).encode()).hexdigest()[:16]


def written_by(final: Path, request_id: str) -> str:
    """Rank 0's answer, on every rank."""
    return str(_on_rank_0(lambda: checkpoints.written_by(final, request_id)))


def save(
    engine: MegatronEngine,
    facts: AdapterFacts,
    final: Path,
    kind: str,
    tensors: dict[str, torch.Tensor],
    overwrite: bool,
    request_id: str = "",
) -> str:
    """Every rank writes its shard aside; rank 0 writes the manifest over all of them and makes it visible. Returns its digest."""
    rank = dist.get_rank()
    prepared = _on_rank_0(lambda: checkpoints.begin(final, overwrite))
    aside = Path(prepared)
    name = f"shard-{rank}.safetensors"
    data = to_bytes({key: tensor.contiguous() for key, tensor in tensors.items()})
    written = engine._gather_world((name, checkpoints.write_shard(aside, name, data)))
    signature = msgspec.to_builtins(engine.slots[facts.adapter].signature)
    known: dict[str, Any] = {"optimizer_step": facts.optimizer_step, "pending": facts.pending, "digest": facts.digest}
    known["group_steps"] = engine.slots[facts.adapter].group_steps
    manifest = checkpoints.Manifest(facts.adapter, kind, signature, _layout(engine), known, dict(written), request_id=request_id)
    digest = _on_rank_0(lambda: checkpoints.commit(aside, final, manifest))
    return str(digest)


def export(engine: MegatronEngine, facts: AdapterFacts, final: Path, files: dict[str, bytes], request_id: str) -> str:
    """Rank 0's `files`, with a manifest; immutable once visible."""

    def write() -> str:
        aside = checkpoints.begin(final)
        written = {name: checkpoints.write_shard(aside, name, data) for name, data in files.items()}
        signature = msgspec.to_builtins(engine.slots[facts.adapter].signature)
        known = {"optimizer_step": facts.optimizer_step}
        layout = _layout(engine)
        manifest = checkpoints.Manifest(facts.adapter, "sampler_weights", signature, layout, known, written, request_id=request_id)
        return checkpoints.commit(aside, final, manifest)

    return str(_on_rank_0(write))


def load(engine: MegatronEngine, path: Path) -> tuple[checkpoints.Manifest, dict[str, torch.Tensor]]:
    """This rank's verified shard. Raises `UnknownCheckpoint` or `BadCheckpoint`."""
    manifest = checkpoints.read_manifest(path)
    if manifest.layout != _layout(engine):
        raise BadCheckpoint(f"checkpoint {path.name!r} was written by layout {manifest.layout}, this group is {_layout(engine)}")
    data = checkpoints.read_shard(path, manifest, f"shard-{dist.get_rank()}.safetensors")
    try:
        return manifest, from_bytes(data)
    except SafetensorError as error:
        raise BadCheckpoint(f"checkpoint {path.name!r}: {error}") from error


def _layout(engine: MegatronEngine) -> dict[str, Any]:
    config = engine.config
    return {
        "tp": config.tp,
        "dp": engine.dp,
        "dtype": config.dtype,
        "optimizer": config.optimizer,
        "max_rank": config.max_rank,
        "targets": list(config.targets),
        "model": msgspec.to_builtins(config.model),
    }


def _on_rank_0(work: Any) -> Any:
    """`work()` on rank 0; every rank gets its result, or its error."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def seeded_rng(seed: int, tp_rank: int) -> dict[str, torch.Tensor]:
    """Fresh generator states: the default one, and Megatron's tracker's, which differ by tensor-parallel rank as Megatron seeds them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = {name: torch.Generator(device).manual_seed(seed + 2718 + tp_rank).get_state() for name in get_cuda_rng_tracker().get_states()}
    return {DEFAULT_RNG: torch.Generator(device).manual_seed(seed).get_state(), **states}


def get_rng() -> dict[str, torch.Tensor]:
    """uint8 states of the generators that dropout draws from."""
    default = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    return {DEFAULT_RNG: default.clone(), **{name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}}


def set_rng(states: dict[str, torch.Tensor]) -> None:
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: state for name, state in states.items() if name != DEFAULT_RNG})
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[DEFAULT_RNG])
    else:
        torch.set_rng_state(states[DEFAULT_RNG])
