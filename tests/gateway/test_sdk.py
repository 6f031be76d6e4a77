"""The tinker SDK as it is published, against `hotdesk up` with a Megatron group: undisturbed, and while everything is killed around it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.gateway.running import MEGATRON, ROOT, Running

STEPS = 14
PROGRAM = [sys.executable, "-m", "tests.gateway.train_program"]


@pytest.fixture(scope="module")
def running():
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        started = Running(Path(directory), MEGATRON)
        started.wait()
        yield started
        code = started.stop()
        assert code == 0, started.log[-3000:]


def begin(running: Running, key: str, seed: int) -> subprocess.Popen[str]:
    environment = os.environ | {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    command = [*PROGRAM, running.url, key, str(STEPS), str(seed)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(program: subprocess.Popen[str]) -> dict[str, object]:
    out, err = program.communicate(timeout=240)
    assert program.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.timeout(300)
def test_two_tenants_at_once_see_what_each_sees_alone(running):
    together = [begin(running, "tml-ada", 5), begin(running, "tml-brook", 5)]
    ada, brook = (end(program) for program in together)
    assert ada["losses"] == brook["losses"]
    assert ada["samples"] == brook["samples"]
    assert ada["model_id"] != brook["model_id"]
    assert ada["losses"][STEPS - 1] < ada["losses"][0]
    other = end(begin(running, "tml-ada", 6))
    assert other["losses"] != ada["losses"]


@pytest.mark.timeout(420)
def test_killing_gateway_worker_and_daemon_changes_no_loss(running):
    seed = int(os.environ.get("HOTDESK_SEED", time.time_ns() % 100_000))
    print(f"seed {seed}")
    rng = random.Random(seed)
    control = end(begin(running, "tml-cleo", 7))
    program = begin(running, "tml-dana", 7)
    for kill in (running.kill_gateway, running.kill_worker, running.kill_gateway, running.kill_daemon):
        for _ in range(rng.randint(1, 3)):
            assert program.stderr.readline().startswith("step"), "the program ended before everything was killed"
        time.sleep(rng.random() * 0.2)
        kill()
    disturbed = end(program)
    assert disturbed["losses"] == control["losses"]
    assert disturbed["samples"] == control["samples"]
    assert "gateway_ended" in running.log
    assert "workers_lost" in running.log
    assert '"epoch": 2' in running.log
