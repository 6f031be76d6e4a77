"""Ray-hosted Megatron groups, real actors: the contract at TP 2 and DP 2, and what happens when a rank dies."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from state.errors import WorkersLostError
from state.requests import Op
from tests.workers.conformance import Conformance, Device, batch
from tests.workers.megatron_rank import group
from workers.ray_group import RayGroup, ray

SHAPES = {
    "tp2": {"tp": 2},
    "dp2-bfloat16-overlap": {"dp": 2, "dtype": "bfloat16", "overlap": True, "bucket_size": 3000},
    "dp2-precision-aware": {"dp": 2, "dtype": "bfloat16", "optimizer": "precision_aware_remainders"},
    "tp2-dp2-overlap": {"tp": 2, "dp": 2, "overlap": True},
}


@pytest.fixture(scope="module")
def portal():
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module", params=SHAPES)
def hosted(request, portal):
    config = group(**SHAPES[request.param], host_slots=192, cpus_per_rank=0.25)
    made = RayGroup("main", config, fleet="test", root=Path(tempfile.mkdtemp(prefix="hd-")))
    portal.call(made.start, 1)
    made.last, made.epoch = 0, 1
    yield made
    portal.call(made.close)


class TestRayGroup(Conformance):
    @pytest.fixture
    def device(self, hosted, portal):
        """The actors outlive a test, and with them their epoch, their last step and what is live."""
        device = Device(lambda call: portal.call(hosted.apply, call), hosted.epoch)
        device.live = portal.call(hosted.status, hosted.epoch).facts.live
        device.last = hosted.last
        yield device
        hosted.last, hosted.epoch = device.last, device.epoch


def test_a_killed_rank_is_told_as_lost_workers(portal):
    made = RayGroup("other", group(dp=2, cpus_per_rank=0.5), fleet="test", root=Path(tempfile.mkdtemp(prefix="hd-")))
    first = portal.call(made.start, 1)
    device = Device(lambda call: portal.call(made.apply, call))
    device.create("t/a", 1)
    device.swap("t/a")
    os.kill(ray.get(made.actors[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(WorkersLostError):
        device.run("t/a", Op.FORWARD_BACKWARD, batch(1))
    again = portal.call(made.start, 2)
    assert again.incarnation != first.incarnation
    assert again.facts.adapters == ()
    portal.call(made.close)


def ray_processes() -> dict[str, psutil.Process]:
    return {child.name(): child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def test_the_local_ray_outlives_the_threads_of_the_pool(portal, monkeypatch):
    """Linux ends its processes with the thread that began them: seen as a daemon that could start no worker after one had died."""
    made = RayGroup("kept", group(cpus_per_rank=0.5), fleet="test", root=Path(tempfile.mkdtemp(prefix="hd-")))
    monkeypatch.setattr("anyio._backends._asyncio.WorkerThread.MAX_IDLE_TIME", 0)

    async def busy() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(anyio.to_thread.run_sync, time.sleep, 0.1)
        await anyio.to_thread.run_sync(time.sleep, 0.1)  # ends the other two

    portal.call(made.start, 1)
    before = ray_processes()
    portal.call(busy)
    time.sleep(0.5)
    assert {"raylet", "gcs_server"} <= set(before)
    assert ray_processes() == before
    portal.call(made.close)


def test_a_local_ray_of_which_a_part_was_killed_is_started_again(portal):
    """The raylet is killed in tests/gateway/test_sdk.py, under a whole daemon."""
    made = RayGroup("again", group(cpus_per_rank=0.5), fleet="test", root=Path(tempfile.mkdtemp(prefix="hd-")))
    first = portal.call(made.start, 1)
    ray_processes()["gcs_server"].kill()
    while "gcs_server" in ray_processes():
        time.sleep(0.01)
    with pytest.raises(WorkersLostError, match="local Ray ended"):
        portal.call(made.status, 1)
    assert portal.call(made.start, 2).incarnation != first.incarnation
    Device(lambda call: portal.call(made.apply, call), 2).create("t/a", 1)
    portal.call(made.close)
