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
}


@pytest.fixture(scope="module")
def portal():
    with start_blocking_portal() as portal:
        yield portal


def made(name: str, **options: object) -> RayGroup:
    """On a machine with GPUs each rank has one of its own, and NCCL between them."""
    config = group(**options, gpus_per_rank=float(gpus() > 0))
    return RayGroup(name, config, fleet="test", root=Path(tempfile.mkdtemp(prefix="hd-")))


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="class", params=SHAPES)
def hosted(request, portal):
    yield from started(made("main", **SHAPES[request.param], host_slots=192, cpus_per_rank=0.25), portal)


@pytest.fixture(scope="class")
def precision_aware(portal):
    aware = {"dtype": "bfloat16", "optimizer": "precision_aware_remainders"}
    yield from started(made("main", dp=2, **aware, host_slots=192, cpus_per_rank=0.25), portal)


@pytest.fixture(scope="class")
def four_ranks(portal):
    if 0 < gpus() < 4:
        pytest.skip(f"four ranks over NCCL need four GPUs, here are {gpus()}")
    yield from started(made("main", tp=2, dp=2, overlap=True, host_slots=192, cpus_per_rank=0.25), portal)


def started(hosted: RayGroup, portal):
    portal.call(hosted.start, 1)
    hosted.last, hosted.epoch = 0, 1
    yield hosted
    portal.call(hosted.close)


def device_of(hosted: RayGroup, portal):
    """The actors outlive a test, and with them their epoch, their last step and what is live."""
    device = Device(lambda call: portal.call(hosted.apply, call), hosted.epoch)
    device.live = portal.call(hosted.status, hosted.epoch).facts.live
    device.last = hosted.last
    yield device
    hosted.last, hosted.epoch = device.last, device.epoch


class TestRayGroup(Conformance):
    @pytest.fixture
    def device(self, hosted, portal):
        yield from device_of(hosted, portal)


class Sharded:
    """What shards can break together: processes are slow to start on few cores."""

    name, control = Conformance.name, Conformance.control
    test_interleaved_adapters_equal_undisturbed_ones = Conformance.test_interleaved_adapters_equal_undisturbed_ones
    test_resident_adapters_equal_undisturbed_ones = Conformance.test_resident_adapters_equal_undisturbed_ones
    test_pending_gradients_survive_the_device_being_given_away = Conformance.test_pending_gradients_survive_the_device_being_given_away
    test_a_snapshot_restores_pending_gradients_too = Conformance.test_a_snapshot_restores_pending_gradients_too
    test_sampler_weights_can_be_sampled_as_another_adapter = Conformance.test_sampler_weights_can_be_sampled_as_another_adapter


class TestPrecisionAware(Sharded):
    @pytest.fixture
    def device(self, precision_aware, portal):
        yield from device_of(precision_aware, portal)


class TestFourRanks(Sharded):
    """Both kinds of parallelism at once."""

    @pytest.fixture
    def device(self, four_ranks, portal):
        yield from device_of(four_ranks, portal)


# --- what dies --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fragile(portal):
    """Started anew by each test that breaks it."""
    group = made("fragile", dp=2, cpus_per_rank=0.25)
    group.epoch = 1
    portal.call(group.start, 1)
    yield group
    portal.call(group.close)


def start_again(group: RayGroup, portal):
    group.epoch += 1
    return portal.call(group.start, group.epoch)


def ray_processes() -> dict[str, psutil.Process]:
    return {child.name(): child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def test_the_local_ray_outlives_the_threads_of_the_pool(fragile, portal, monkeypatch):
    """Linux ends its processes with the thread that began them: seen as a daemon that could start no worker after one had died."""
    monkeypatch.setattr("anyio._backends._asyncio.WorkerThread.MAX_IDLE_TIME", 0)

    async def busy() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(anyio.to_thread.run_sync, time.sleep, 0.1)
        await anyio.to_thread.run_sync(time.sleep, 0.1)  # ends the other two

    before = ray_processes()
    portal.call(busy)
    time.sleep(0.5)
    assert {"raylet", "gcs_server"} <= set(before)
    assert ray_processes() == before


def test_a_killed_rank_is_told_as_lost_workers(fragile, portal):
    first = portal.call(fragile.status, fragile.epoch)
    device = Device(lambda call: portal.call(fragile.apply, call), fragile.epoch)
    device.create("t/a", 1)
    device.swap("t/a")
    os.kill(ray.get(fragile.actors[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(WorkersLostError):
        device.run("t/a", Op.FORWARD_BACKWARD, batch(1))
    again = start_again(fragile, portal)
    assert again.incarnation != first.incarnation
    assert again.facts.adapters == ()


def test_a_local_ray_of_which_a_part_was_killed_is_started_again(fragile, portal):
    """The raylet is killed in tests/gateway/test_sdk.py, under a whole daemon."""
    first = portal.call(fragile.status, fragile.epoch)
    ray_processes()["gcs_server"].kill()
    while "gcs_server" in ray_processes():
        time.sleep(0.01)
    with pytest.raises(WorkersLostError, match="local Ray ended"):
        portal.call(fragile.status, fragile.epoch)
    assert start_again(fragile, portal).incarnation != first.incarnation
    Device(lambda call: portal.call(fragile.apply, call), fragile.epoch).create("t/a", 1)
