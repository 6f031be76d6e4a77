"""The simulated group against the contract."""

from __future__ import annotations

import msgspec
import pytest

from tests.workers.conformance import Conformance, Device
from workers.machine import Machine
from workers.simulated import SIMULATED_SPEC, SimulatedEngine


class TestSimulated(Conformance):
    @pytest.fixture
    def device(self, tmp_path):
        spec = msgspec.structs.replace(SIMULATED_SPEC, device_slots=3)
        return Device(Machine(SimulatedEngine(spec, tmp_path)).apply)
