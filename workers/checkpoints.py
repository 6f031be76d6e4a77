"""Checkpoint directories: shards beside a manifest that names each of them with its digest; written aside, synced, renamed.

Layout under the root of all groups, for the adapter `owner/name`:
    owner/name/weights/NAME            training state (save_state)
    owner/name/sampler_weights/NAME    what a sampler loads (save_weights_for_sampler); never shares a name space with the above
    owner/name/snapshot/ID             the daemon's own, by the id of the step that wrote it
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from state.errors import BadCheckpoint, CheckpointExists, UnknownCheckpoint
from state.files import sync_directory

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True):
    """`shards`: file name -> sha256. `signature`: rank, alpha, targets, seed. `facts`: optimizer_step, pending, digest."""

    adapter: str
    kind: str
    signature: dict[str, Any]
    layout: dict[str, Any]
    facts: dict[str, Any]
    shards: dict[str, str]
    v: int = 1
    request_id: str = ""  # that asked for it


def storage_id(root: Path) -> str:
    """Of the storage that `root` lies on, the same for all who see it: adapters move only between groups that share it."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / ".storage"
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(uuid.uuid4().hex)
    return path.read_text()


def begin(final: Path, overwrite: bool = False) -> Path:
    """The empty directory to write shards into. Raises `CheckpointExists`."""
    if final.exists() and not overwrite:
        raise CheckpointExists(f"checkpoint {final.name!r} exists")
    aside = final.with_name(f".{final.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def written_by(final: Path, request_id: str) -> str:
    """The manifest's digest, where `request_id` wrote this checkpoint before and its workers died before they could say so; else empty."""
    try:
        if not request_id or read_manifest(final).request_id != request_id:
            return ""
        return hashlib.sha256((final / MANIFEST).read_bytes()).hexdigest()
    except (UnknownCheckpoint, BadCheckpoint, OSError):
        return ""


def write_shard(aside: Path, name: str, data: bytes) -> str:
    """sha256 of the shard, durable once this returns. Hashing and writing go on side by side; both leave the interpreter free."""
    with ThreadPoolExecutor(1) as beside, open(aside / name, "wb") as file:
        digest = beside.submit(hashlib.sha256, data)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return digest.result().hexdigest()


def commit(aside: Path, final: Path, manifest: Manifest) -> str:
    """Makes the checkpoint visible, whole or not at all. Returns the manifest's digest."""
    digest = write_shard(aside, MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    sync_directory(aside)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return digest


def read_manifest(path: Path) -> Manifest:
    """Raises `UnknownCheckpoint`, or `BadCheckpoint` where the manifest cannot be read or a shard is missing."""
    if not path.is_dir():
        raise UnknownCheckpoint(f"checkpoint {path.name!r} does not exist")
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise BadCheckpoint(f"checkpoint {path.name!r} has no readable manifest: {error}") from error
    missing = [name for name in manifest.shards if not (path / name).is_file()]
    if missing:
        raise BadCheckpoint(f"checkpoint {path.name!r} lacks {missing}: a partial set of shards is refused")
    return manifest


def read_shard(path: Path, manifest: Manifest, name: str) -> bytes:
    """The shard's bytes, digest checked. Raises `BadCheckpoint`."""
    if name not in manifest.shards:
        raise BadCheckpoint(f"checkpoint {path.name!r} has shards {sorted(manifest.shards)}, not {name!r}: another parallel layout")
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"shard {name!r} of checkpoint {path.name!r} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != manifest.shards[name]:
        raise BadCheckpoint(f"shard {name!r} of checkpoint {path.name!r} is damaged: its digest differs from the manifest's")
    return data


class Kept(NamedTuple):
    """Which snapshots the log trusted when a further one was planned: the last, and the one before it, should that be damaged."""

    last: int
    before: int

    def of(self, versions: Iterable[int]) -> set[int]:
        """Later ones stay as well: the log may have heard of them since."""
        versions = set(versions)
        before = self.before or max((version for version in versions if version < self.last), default=0)
        return {version for version in versions if version >= self.last or version == before}


def forget_snapshots(directory: Path, kept: Kept) -> None:
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    keep = kept.of(int(name) for name in names if name.isdigit())
    for name in names:
        if name not in {str(version) for version in keep}:
            shutil.rmtree(directory / name, ignore_errors=True)
