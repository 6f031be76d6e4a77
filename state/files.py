"""A directory of small durable files as an interface, so that a simulation can give the daemon a disk that fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """Every method may raise `OSError`."""

    def names(self) -> list[str]:
        """Of the files that are there whole, sorted."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """Whole and durable once this returns, or not there."""
        ...

    def remove(self, name: str) -> None: ...


Disk = Callable[[str], Files]  # a directory by its name within the fleet's own


class Directory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".")) if self.path.is_dir() else []

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Aside, synced, renamed, and the directory synced; a leader that was deposed and its successor write aside under other names."""
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / f".{name}.{os.getpid()}"
        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(self.path / name)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync_directory(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def directory_disk(root: Path) -> Disk:
    return lambda name: Directory(root / name)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
