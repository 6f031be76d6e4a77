"""This process's Ray: a cluster that is joined, or a local one that ends with this process and is started again when a part of it died."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from state.errors import OperatorError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
import ray as ray
from ray.exceptions import RayError as RayError

OBJECT_STORE_BYTES = 128 * 2**20
_calls: queue.SimpleQueue[tuple[Future[int], Callable[[], int]]] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_processes: list[psutil.Process] = []  # of the local Ray
_generation = 0


async def connect(address: str, namespace: str, cpus: float) -> int:
    """Joins the cluster at `address`, or starts a local one, unless that was done and it lives. The answer is that Ray's generation:
    handles of an earlier one are of no use.

    Linux kills the local Ray's processes when the *thread* that began them ends (Ray asks for it, PR_SET_PDEATHSIG), and threads of a pool
    end when they are idle. So they have a thread of their own, which lasts as long as this process.
    """
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_serve, name="ray", daemon=True)
        _thread.start()
    done: Future[int] = Future()
    _calls.put((done, lambda: _connect(address, namespace, cpus)))
    generation = await asyncio.wrap_future(done)
    _take_back_signals()
    return generation


def lost(generation: int) -> str:
    """In words, what is wrong with the Ray of `generation`; empty where nothing is seen to be. Cheap."""
    if generation != _generation:
        return "its Ray was started again"
    dead = [process for process in _processes if _ended(process)]
    return f"process {dead[0].pid} of the local Ray ended" if dead else ""


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return True


def _serve() -> None:
    while True:
        done, call = _calls.get()
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)


def _connect(address: str, namespace: str, cpus: float) -> int:
    global _processes, _generation
    if ray.is_initialized():
        if not lost(_generation):
            return _generation
        ray.shutdown()
    common: dict[str, Any] = {"namespace": namespace, "logging_level": "ERROR", "log_to_driver": False}
    before = set(psutil.Process().children())
    if address:
        try:
            ray.init(address=address, **common)
        except ConnectionError as error:
            raise OperatorError(
                f"ray.address: no Ray cluster answers at {address!r}",
                way_out="check the address; where the cluster wants a token, start the daemon with RAY_AUTH_MODE=token too",
            ) from error
    else:
        ray.init(
            address="local",
            num_cpus=max(1, int(cpus + 0.999)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(_own_directory()),
            **common,
        )
    _processes = [child for child in psutil.Process().children() if child not in before and child.name() in ("gcs_server", "raylet")]
    _generation += 1
    return _generation


def _own_directory() -> Path:
    """For this process's Ray alone: Ray's default belongs to whichever user came first. Short, because sockets lie below it."""
    return Path(tempfile.gettempdir()) / f"hotdesk-ray-{os.getuid()}" / str(os.getpid())


def _take_back_signals() -> None:
    """Ray takes SIGTERM for a crash: its handler prints a stack and aborts. Whoever had asked for it before gets it again."""
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)
