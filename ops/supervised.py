"""A process that runs beside the daemon and is started again when it dies: the gateway of `hotdesk up`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import structlog

from scheduler.config import Config

log = structlog.get_logger("hotdesk")
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0
LASTED_S = 60.0  # whoever lived so long did not die of how it was started


@contextlib.contextmanager
def beside(config: Config, args: argparse.Namespace, url: str) -> Iterator[Supervised]:
    """A gateway process for as long as this one runs."""
    command = [sys.executable, "-m", "ops.cli", "gateway", "--url", url, "--data-dir", str(config.data_dir)]
    command += ["--config", str(args.config)] if args.config else []
    supervised = Supervised(command)
    supervised.keep_alive()
    try:
        yield supervised
    finally:
        supervised.stop()


class Supervised:
    """A child process that is started again when it died."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None
        self.pause_s, self._again_at, self._began = FIRST_PAUSE_S, 0.0, 0.0

    def keep_alive(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        if self.process is not None:
            if not self._again_at:
                if time.monotonic() - self._began >= LASTED_S:
                    self.pause_s = FIRST_PAUSE_S
                log.warning("gateway_ended", exit_code=self.process.returncode, again_in_s=self.pause_s)
                self._again_at = time.monotonic() + self.pause_s
                self.pause_s = min(2 * self.pause_s, MOST_PAUSE_S)
            if time.monotonic() < self._again_at:
                return
        self._again_at, self._began = 0.0, time.monotonic()
        # In a session of its own: an interrupt at the terminal is for the daemon, which stops it last.
        self.process = subprocess.Popen(self.command, start_new_session=True, env=os.environ | {"HOTDESK_PARENT": str(os.getpid())})

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
