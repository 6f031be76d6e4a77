"""Ray-hosted Megatron groups, real actors: the contract at TP 2 and DP 2, and what happens when a rank dies."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

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
