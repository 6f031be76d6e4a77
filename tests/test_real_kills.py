"""`kill -9` of a worker, of the daemon and of the server while tenants train on real Megatron workers.

Every answer and every bit must be as in an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import psutil
import pytest
import redis

from scheduler.embedded import EmbeddedServer
from scheduler.producer import Producer, datum
from state.requests import CreateAdapter, Forward, Op, OptimStep, Signature, digest_of, encode_body
from tests.gateway.running import free_port
from tests.workers.conformance import Device

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"RAY_AUTH_MODE": "disabled"}  # else Ray's clusters want a token where their user happens to have one
STEPS = 24
TENANTS = {"ada": (4, 1), "brook": (8, 2), "cleo": (2, 3)}  # rank, seed
Answers = list[tuple[str, str]]  # of each step: digest of the forward_backward's result, and of the adapter after the update
GROUP = os.environ.get("HOTDESK_TEST_GROUP", "")  # another group, such as "dp = 2\ngpus_per_rank = 1.0" on a machine with two GPUs
CONFIG = f"""
[fleet]
name = "kills"
[redis]
lease_ms = 1500
[limits]
snapshot_after_requests = 12
[groups.main]
max_rank = 8
{GROUP}
[groups.main.model]
layers = 2
hidden_size = 32
heads = 4
ffn_hidden_size = 64
vocab_size = 64
max_sequence_tokens = 64
"""


def data(seed: int, step: int):
    tokens = random.Random(f"{seed}/{step}").choices(range(64), k=17)
    return [datum(tokens[:-1], tokens[1:])]


ADAM = {"learning_rate": 0.02, "eps": 1e-8}


def undisturbed() -> dict[str, Answers]:
    """The same programs on a rank in a process of its own."""
    code = "import tests.test_real_kills as t; t.print_undisturbed()"
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {tenant: [(one, other) for one, other in seen] for tenant, seen in json.loads(ran.stdout.splitlines()[-1]).items()}


def print_undisturbed() -> None:
    from scheduler.config import load
    from workers.megatron.rank import Rank, free_port

    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"kills-{os.getpid()}.toml"
    path.write_text(CONFIG)
    device = Device(Rank(load(path, {}).groups["main"], 0, "127.0.0.1", free_port(), tempfile.mkdtemp(prefix="hd-")).machine.apply)
    path.unlink()
    answers: dict[str, Answers] = {}
    for tenant, (rank, seed) in TENANTS.items():
        device.run(tenant, Op.CREATE_ADAPTER, CreateAdapter(Signature(rank, 2.0 * rank, (), seed)))
        device.swap(tenant)
        answers[tenant] = []
        for step in range(STEPS):
            forward = device.run(tenant, Op.FORWARD_BACKWARD, Forward(tuple(data(seed, step))))
            answers[tenant].append((digest_of(encode_body(forward)), device.run(tenant, Op.OPTIM_STEP, OptimStep(**ADAM)).digest))
    print(json.dumps(answers))


class Fleet:
    def __init__(self, directory: Path, more: str = "", ray_root: int = 0) -> None:
        self.directory = directory
        self.ray_root = ray_root  # process of the Ray cluster; 0: the daemon's own
        self.config = directory / "kills.toml"
        self.config.write_text(CONFIG + more)
        self.start()

    def wait(self) -> None:
        deadline = time.monotonic() + 90
        while "workers_joined" not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def start(self) -> None:
        command = [sys.executable, "-m", "ops.cli", "up", "--no-gateway", "--config", str(self.config), "--data-dir", str(self.directory)]
        with open(self.directory / "daemon.log", "ab") as log:
            self.daemon = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True)

    def log(self) -> str:
        return (self.directory / "daemon.log").read_text()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def kill_worker(self) -> None:
        """Ray's workers are grandchildren of the daemon, or of the cluster's root; those of other tests are not."""
        root = psutil.Process(self.ray_root or self.daemon.pid)
        *_, worker = [child for child in root.children(recursive=True) if title(child).startswith("ray::RankActor")]
        worker.kill()

    def kill_server(self) -> None:
        with redis.Redis(unix_socket_path=str(EmbeddedServer(self.directory).socket)) as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)

    def kill_daemon(self) -> None:
        """And its local Ray with it, as a reboot would."""
        os.killpg(self.daemon.pid, signal.SIGKILL)
        self.daemon.wait()
        self.start()

    def stop(self) -> None:
        self.daemon.send_signal(signal.SIGTERM)
        self.daemon.wait(60)

    def verify(self) -> None:
        command = [sys.executable, "-m", "ops.cli", "replay", "--verify", "--config", str(self.config), "--data-dir", str(self.directory)]
        verified = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert verified.returncode == 0, verified.stdout


def title(process: psutil.Process) -> str:
    """Empty for one that has ended meanwhile."""
    try:
        return "".join(process.cmdline())
    except psutil.Error:
        return ""


async def train(url: str, tenant: str, progress: dict[str, int]) -> Answers:
    rank, seed = TENANTS[tenant]
    answers: Answers = []
    async with Producer.connect(url, fleet="kills", tenant=tenant) as hotdesk:
        poet = await hotdesk.create_adapter("poet", rank=rank, seed=seed)
        for step in range(STEPS):
            forward = await poet.forward_backward(data(seed, step))
            update = await (await poet.optim_step(**ADAM))
            assert update.optimizer_step == step + 1
            answers.append((digest_of(encode_body(await forward)), update.digest))
            progress[tenant] = step + 1
    return answers


async def disturbed(fleet: Fleet, seed: int, kills: Sequence[Callable[[], None]]) -> dict[str, Answers]:
    rng = random.Random(seed)
    progress = dict.fromkeys(TENANTS, 0)
    seen: dict[str, Answers] = {}

    async def run(tenant: str) -> None:
        seen[tenant] = await train(EmbeddedServer(fleet.directory).url, tenant, progress)

    async def killers() -> None:
        for index, kill in enumerate(kills):
            due = rng.randint(2, 5) + 6 * index
            while progress["ada"] < due:
                await anyio.sleep(0.02)
            await anyio.sleep(rng.random() * 0.2)
            print(f"seed {seed}: {kill.__name__} at step {progress}")
            kill()

    async with anyio.create_task_group() as tasks:
        for tenant in TENANTS:
            tasks.start_soon(run, tenant)
        tasks.start_soon(killers)
    return seen


@pytest.fixture(scope="module")
def control(tmp_path_factory) -> dict[str, Answers]:
    if not GROUP:
        return undisturbed()
    fleet = Fleet(tmp_path_factory.mktemp("control"))  # bits are those of one layout, so another one has its control
    try:
        fleet.wait()
        return anyio.run(disturbed, fleet, 0, ())
    finally:
        fleet.stop()


@pytest.mark.timeout(420)
def test_killing_a_worker_the_server_and_the_daemon_changes_no_bit(short_tmp, control):
    seed = int(os.environ.get("HOTDESK_SEED", time.time_ns() % 100_000))
    print(f"seed {seed}")
    fleet = Fleet(short_tmp)
    try:
        fleet.wait()
        seen = anyio.run(disturbed, fleet, seed, (fleet.kill_worker, fleet.kill_server, fleet.kill_daemon))
        assert seen == control, f"seed {seed}"
        log = fleet.log()
        assert "workers_lost" in log
        assert "server_away" in log
        assert '"epoch": 2' in log
    finally:
        fleet.stop()
    fleet.verify()


@pytest.mark.timeout(300)
def test_workers_on_a_cluster_outlive_their_daemon(short_tmp, control):
    """The next daemon commands the same workers: nothing is restored, nothing is executed again. A killed worker is replaced there too."""
    seed = int(os.environ.get("HOTDESK_SEED", time.time_ns() % 100_000))
    print(f"seed {seed}")
    with cluster(short_tmp) as (address, root):
        fleet = Fleet(short_tmp, f'[ray]\naddress = "{address}"\n', root)
        try:
            fleet.wait()
            seen = anyio.run(disturbed, fleet, seed, (fleet.kill_daemon, fleet.kill_worker, fleet.kill_daemon))
            assert seen == control, f"seed {seed}"
            joined = [line["incarnation"] for line in fleet.lines() if line["event"] == "workers_joined"]
            first, second, third, fourth = joined
            assert first == second != third == fourth, joined
        finally:
            fleet.stop()
    fleet.verify()


@contextmanager
def cluster(directory: Path) -> Iterator[tuple[str, int]]:
    """A Ray cluster of one node that belongs to nobody here, as an operator has one: its address and root process."""
    port = free_port()
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false", "--num-cpus=2"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={directory / 'ray'}", f"--object-store-memory={2**27}"]
    with open(directory / "cluster.log", "wb") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True)
    try:
        yield f"127.0.0.1:{port}", started.pid
    finally:
        for process in psutil.Process(started.pid).children(recursive=True):
            process.kill()
        started.kill()
        started.wait()
