"""The main job, short: real server, real Ray, real Megatron, three tenant processes, the replay and the control run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(280)
def test_the_demo(short_tmp):
    command = [sys.executable, "-m", "ops.cli", "demo", "--data-dir", str(short_tmp), "--steps", "32", "--sample-every", "8"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=260)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 come out differently" in ran.stdout
    assert "bit-identical to the interleaved run's" in ran.stdout
    rows = {line.split()[0]: line.split() for line in ran.stdout.splitlines() if re.match(r"(ada|brook|cleo)\s+\S+\s+\d+\s+32 ", line)}
    assert set(rows) == {"ada", "brook", "cleo"}
    for row in rows.values():
        first, last, entropy = map(float, row[4:7])
        assert last < first - 2
        assert last < entropy + 0.3  # 32 steps only; the full demo ends well below
        assert int(row[8]) > 3  # swaps
