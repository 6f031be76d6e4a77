"""`hotdesk up` with its gateway, as a process of its own, whose parts can be killed one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
SIMULATED = """
[groups.main]
backend = "simulated"
"""
MEGATRON = """
[groups.main]
backend = "megatron"
device_slots = 2
[groups.main.model]
hidden_size = 32
heads = 4
ffn_hidden_size = 64
vocab_size = 64
max_sequence_tokens = 64
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            httpx.post(url, json={}, timeout=5)
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


class Process:
    """What can be killed and started again at the same port."""

    def __init__(self, *command: object) -> None:
        self.command = [str(word) for word in command]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class StandInEngine(Process):
    def __init__(self, port: int, device_bytes: int = 0) -> None:
        self.url = f"http://127.0.0.1:{port}"
        super().__init__("tests.gateway.standin_engine", port, device_bytes)

    def standin(self, **settings: object) -> dict:
        """Sets faults, and tells what was seen."""
        wait_for(f"{self.url}/standin")
        return httpx.post(f"{self.url}/standin", json=settings).json()


class Running:
    """The gateway's port stays the same over restarts, as a service's does."""

    def __init__(self, directory: Path, groups: str, gateway: str = "") -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = directory / "gateway.toml"
        self.config.write_text(f'[fleet]\nname = "gateway"\n[redis]\nlease_ms = 1000\n[gateway]\nport = {self.port}\n{gateway}\n{groups}')
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "ops.cli", "up", "--config", str(self.config), "--data-dir", str(self.directory)]
        with open(self.directory / "up.log", "ab") as log:
            self.daemon = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self) -> str:
        return (self.directory / "up.log").read_text()

    def wait(self, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while "workers_joined" not in self.log or not self.answers():
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.1)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/api/v1/healthz", timeout=2).status_code == 200
        return False

    def processes(self, pattern: str) -> list[int]:
        """Of this fleet: children of the daemon, or of its Ray."""
        found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in found if self._is_mine(int(pid))]

    def _is_mine(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            raylet = Path(f"/proc/{parent}/cmdline").read_text()
            return int(parent) == self.daemon.pid or f"/{self.daemon.pid}/session_" in raylet
        return False

    def kill_gateway(self) -> None:
        self._kill("ops.cli gateway")

    def _kill(self, pattern: str) -> None:
        """Waits for one: it may be starting."""
        deadline = time.monotonic() + 60
        while not (found := self.processes(pattern)):
            assert time.monotonic() < deadline, subprocess.run(["pgrep", "-fa", "ray::|ops.cli"], capture_output=True, text=True).stdout
            time.sleep(0.1)
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def kill_worker(self) -> None:
        self._kill("ray::RankActor")

    def kill_ray(self) -> None:
        """Its raylet, alone: the daemon lives, and has to start another Ray."""
        self._kill("raylet/raylet")

    def kill_daemon(self) -> None:
        """And its local Ray with it. Its gateway ends by itself, and the next daemon starts another."""
        os.killpg(self.daemon.pid, signal.SIGKILL)
        self.daemon.wait()
        self.start()

    def stop(self) -> int:
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(60)
