"""One rank's shard of a checkpoint, and fingerprints of tensors: what proves that two states are the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
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
from workers import checkpoints, snapshot_writer

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
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> str:
    """Every rank writes its shard aside; rank 0 adds `files` and a manifest over all, and makes it visible. Returns its digest."""
    aside = Path(_on_rank_0(lambda: checkpoints.begin(final, overwrite)))
    name = _shard(dist.get_rank())
    written = engine._gather_world((name, checkpoints.write_shard(aside, name, _bytes(tensors))))
    others = {file: checkpoints.write_shard(aside, file, data) for file, data in files.items()}
    manifest = msgspec.structs.replace(_manifest(engine, facts, kind, request_id), shards=dict(written) | others)
    digest = _on_rank_0(lambda: checkpoints.commit(aside, final, manifest))
    return str(digest)


def save_beside(
    engine: MegatronEngine, facts: AdapterFacts, final: Path, tensors: dict[str, torch.Tensor], kept: checkpoints.Kept
) -> Callable[[], None]:
    """Prepares a snapshot of `tensors`, which nothing changes any more; what it returns writes it, in any thread, without a collective."""
    aside = Path(_on_rank_0(lambda: checkpoints.begin(final, overwrite=True)))
    manifest = _manifest(engine, facts, "snapshot")
    rank, world = dist.get_rank(), dist.get_world_size()

    def write() -> None:
        digest = checkpoints.write_shard(aside, _shard(rank), _bytes(tensors))
        snapshot_writer.leave_digest(aside, _shard(rank), digest)
        if rank == 0:
            digests = snapshot_writer.collect_digests(aside, [_shard(one) for one in range(world)])
            snapshot_writer.finish(aside, final, msgspec.structs.replace(manifest, shards=digests), kept)

    return write


def _shard(rank: int) -> str:
    return f"shard-{rank}.safetensors"


def _bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return to_bytes({key: tensor.contiguous() for key, tensor in tensors.items()})


def _manifest(engine: MegatronEngine, facts: AdapterFacts, kind: str, request_id: str = "") -> checkpoints.Manifest:
    slot = engine.slots[facts.adapter]
    known: dict[str, Any] = {"optimizer_step": facts.optimizer_step, "pending": facts.pending, "digest": facts.digest}
    known["group_steps"] = slot.group_steps
    return checkpoints.Manifest(facts.adapter, kind, msgspec.to_builtins(slot.signature), _layout(engine), known, {}, request_id=request_id)


def load(engine: MegatronEngine, path: Path) -> tuple[checkpoints.Manifest, dict[str, torch.Tensor]]:
    """This rank's verified shard. Raises `UnknownCheckpoint` or `BadCheckpoint`."""
    manifest = checkpoints.read_manifest(path)
    if manifest.layout != _layout(engine):
        raise BadCheckpoint(f"checkpoint {path.name!r} was written by layout {manifest.layout}, this group is {_layout(engine)}")
    data = checkpoints.read_shard(path, manifest, _shard(dist.get_rank()))
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
