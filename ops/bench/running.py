"""A whole fleet as a process, for benchmarks on real workers."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scheduler.config import Config, load
from scheduler.embedded import EmbeddedServer
from state.errors import OperatorError

FLEET = "bench"


@contextmanager
def fleet(groups: str) -> Iterator[tuple[str, Config]]:
    """`hotdesk up` in a folder of its own: its server's URL, its configuration. `groups`: TOML without [fleet]. Raises `OperatorError`."""
    with tempfile.TemporaryDirectory(prefix="hd-") as name:
        directory = Path(name)
        path = directory / "bench.toml"
        path.write_text(f'[fleet]\nname = "{FLEET}"\ndata_dir = "{name}"\n{groups}')
        config = load(path, {})
        command = [sys.executable, "-m", "ops.cli", "up", "--no-gateway", "--config", str(path)]
        with open(directory / "up.log", "wb") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while (said := (directory / "up.log").read_text()).count("workers_joined") < len(config.groups):
                if daemon.poll() is not None:
                    raise OperatorError(f"the fleet did not start: {said[-2000:]}")
                time.sleep(0.2)
            yield EmbeddedServer(directory).url, config
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(120)
