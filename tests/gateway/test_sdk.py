"""The tinker SDK as it is published, against `hotdesk up` with a Megatron group: undisturbed, and while everything is killed around it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time

import pytest

from tests.gateway.running import ROOT, Running

STEPS = 14
ENVIRONMENT = os.environ | {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
PROGRAM = [sys.executable, "-m", "tests.gateway.train_program"]


@pytest.fixture
def running(megatron):
    return megatron


def begin(running: Running, key: str, seed: int) -> subprocess.Popen[str]:
    command = [*PROGRAM, running.url, key, str(STEPS), str(seed)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, text=True, **pipes)


def end(program: subprocess.Popen[str]) -> dict[str, object]:
    out, err = program.communicate(timeout=240)
    assert program.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


def test_the_page_for_those_who_come_from_tinker(running):
    """Its programs, one after the other, as somebody would type them."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "ops" / "TINKER.md").read_text(), re.S)
    program = f"URL, MODEL = {running.url!r}, 'tiny-gpt'\n" + "\n".join(programs) + "\nimport os, sys; sys.stdout.flush(); os._exit(0)\n"
    ran = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr[-2000:]
    losses = [float(line.split()[1]) for line in ran.stdout.splitlines()[:5]]
    assert losses[-1] < losses[0]
    assert len(json.loads(ran.stdout.splitlines()[5])) == 2


@pytest.mark.timeout(420)
def test_tenants_see_what_each_sees_alone_also_when_everything_is_killed_around_them(running):
    seed = int(os.environ.get("HOTDESK_SEED", time.time_ns() % 100_000))
    print(f"seed {seed}")
    rng = random.Random(seed)
    others = [begin(running, "tml-ada", 7), begin(running, "tml-brook", 8)]
    control, other = (end(program) for program in others)
    assert control["losses"][STEPS - 1] < control["losses"][0]
    assert control["losses"] != other["losses"]
    program = begin(running, "tml-cleo", 7)
    for kill in (running.kill_gateway, running.kill_worker, running.kill_ray, running.kill_daemon):
        for _ in range(rng.randint(1, 3)):
            assert program.stderr.readline().startswith("step"), "the program ended before everything was killed"
            program.stdin.write("go on\n")
            program.stdin.flush()
        time.sleep(rng.random() * 0.2)
        kill()
    disturbed = end(program)
    assert disturbed["losses"] == control["losses"]
    assert disturbed["samples"] == control["samples"]
    assert "gateway_ended" in running.log
    assert "workers_lost" in running.log
    assert '"epoch": 2' in running.log
