"""The simulated group against the contract."""

from __future__ import annotations

import msgspec
import pytest

from state.events import StepKind
from tests.workers.conformance import Conformance, Device
from workers.machine import Machine
from workers.simulated import SIMULATED_SPEC, SimulatedEngine


class TestSimulated(Conformance):
    @pytest.fixture
    def device(self, tmp_path):
        spec = msgspec.structs.replace(SIMULATED_SPEC, device_slots=3)
        return Device(Machine(SimulatedEngine(spec, tmp_path)).apply)


def test_a_snapshot_that_a_status_told_of_is_told_again_by_the_next_step():
    """An idle group is asked whether it lives, and nobody keeps the answer: the log hears of a snapshot by a step's outcome."""
    machine = Machine(SimulatedEngine())
    device = Device(machine.apply)
    device.create("t/a", 1)
    device.ok(StepKind.SNAPSHOT, "t/a", beside=True)
    version = device.last
    told = [machine.facts().written for _ in range(5)]
    assert [one.version for one in told[-1]] == [version]
    device.swap("t/a")
    assert [one.version for one in device.written] == [version]
    device.ok(StepKind.FLUSH, "t/a")
    assert len(device.written) == 1
