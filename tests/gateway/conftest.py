from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.gateway.running import MEGATRON, Running


@pytest.fixture(scope="package")
def megatron():
    """A fleet with one Megatron group, which several files share."""
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        started = Running(Path(directory), MEGATRON)
        started.wait()
        yield started
        code = started.stop()
        assert code == 0, started.log[-3000:]
