"""The command line as a stranger meets it: real processes, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import pytest
import redis

from scheduler.config import load
from scheduler.embedded import EmbeddedServer
from state.errors import ConfigError
from state.segment_log import read_segment, write_segment
from tests.gateway.running import free_port

ROOT = Path(__file__).parents[2]
SIMULATED = '[groups.main]\nbackend = "simulated"\n[metrics]\nport = {port}\n'


def hotdesk(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ops.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "hotdesk.toml"
    path.write_text(SIMULATED.format(port=free_port()))
    return path


class Up:
    """`hotdesk up` in its own process."""

    def __init__(self, config: Path, data_dir: Path) -> None:
        self.where = ("--config", str(config), "--data-dir", str(data_dir))
        self.log = data_dir / "daemon.log"
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "ops.cli", "up", "--no-gateway", *self.where]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def wait_for(self, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert self.process.poll() is None or text in self.log.read_text(), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def up(config, short_tmp):
    started = Up(config, short_tmp)
    started.wait_for("workers_joined")
    yield started
    if started.process.poll() is None:
        started.stop()


def test_help_and_version():
    helped = hotdesk("--help")
    assert helped.returncode == 0
    assert "replay" in helped.stdout
    assert hotdesk("--version").stdout.startswith("hotdesk ")
    assert hotdesk("log", "--help").returncode == 0
    assert hotdesk("fly").returncode == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[groups.main]\ntp = 0\n", "key groups.main.tp: must be at least 1"),
        ('[groups.main]\ntp = "many"\n', "key groups[...].tp"),
        ("[fleet]\nnam = 3\n", "key fleet.nam: there is no such key"),
        ('[policy]\nname = "whim"\n', "key policy.name: is none of"),
        ("[limits]\ndatums = 0\n", "key limits.datums: must be positive"),
        ("[groups.main.model]\nheads = 5\n", "key groups.main.model.hidden_size: must be a multiple"),
        ('[groups.main.engine]\nurl = "x"\nmodel = "m"\n', "key groups.main.engine.url: must begin with http"),
        (
            '[groups.main.engine]\nurl = "http://x"\nmodel = "m"\ndialect = "sglang"\n',
            "key groups.main.engine.dialect: cannot say whether it sleeps",
        ),
        (
            '[groups.main.engine]\nurl = "http://x"\nmodel = "m"\n[gateway.engines.main]\nurl = "http://x"\nmodel = "m"\n',
            "key gateway.engines.main: group 'main' has",
        ),
        ('[redis]\nurl = "localhost"\n', "key redis.url: must begin with"),
        ('[gateway.engines.other]\nurl = "http://x"\nmodel = "m"\n', "key gateway.engines.other.url: there is no such group"),
        ("fleet = [", "configuration file"),
    ],
)
def test_a_wrong_configuration_fails_early_with_the_keys_name(tmp_path, text, says):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(path, {})
    assert str(raised.value).startswith(says)


def test_a_wrong_configuration_ends_a_command_before_it_does_anything(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text("[groups.main]\ntp = 0\n")
    failed = hotdesk("up", "--config", str(path), "--data-dir", str(tmp_path / "data"))
    assert failed.returncode == 2
    assert "key groups.main.tp: must be at least 1" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "data").exists()


def test_serve_without_a_url_and_status_without_a_fleet_say_what_to_do(tmp_path):
    failed = hotdesk("serve", "--data-dir", str(tmp_path))
    assert (failed.returncode, "redis.url" in failed.stderr) == (2, True)
    failed = hotdesk("status", "--data-dir", str(tmp_path))
    assert (failed.returncode, "there is no fleet in" in failed.stderr) == (2, True)
    failed = hotdesk("log", "--data-dir", str(tmp_path), "--after", "yesterday")
    assert (failed.returncode, "is no log id" in failed.stderr) == (2, True)


def heeding_interrupts() -> None:
    """A shell's background jobs, and all that they begin, ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_submit_status_log_and_replay_on_a_running_fleet_and_after_it(up, short_tmp):
    def sub(*arguments):
        return hotdesk("submit", *up.where, "--tenant", "ada", "--adapter", "poet", *arguments)

    created = sub("create_adapter", '{"signature": {"rank": 4, "alpha": 8}}')
    assert json.loads(created.stdout)["next_seq"] == 1, created.stderr
    assert json.loads(sub("optim_step", '{"learning_rate": 0.1}').stdout)["optimizer_step"] == 1
    refused = sub("optim_step", '{"learning_rate": -1}')
    assert (refused.returncode, "BadBody" in refused.stderr) == (1, True)
    assert hotdesk("submit", *up.where, "--tenant", "ada", "--adapter", "poet", "fly").returncode == 3
    status = hotdesk("status", *up.where).stdout
    assert "ada/poet" in status
    assert "live" in status
    port = tomllib.loads(Path(up.where[1]).read_text())["metrics"]["port"]
    told = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    assert "hotdesk_leading 1.0" in told
    assert 'hotdesk_requests_total{status="completed",tenant="ada"} 2.0' in told
    assert 'hotdesk_adapters{group="main",residency="live"} 1.0' in told
    command = [sys.executable, "-m", "ops.cli", "top", *up.where, "--every", "0.2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, preexec_fn=heeding_interrupts) as top:
        seen = [top.stdout.readline() for _ in range(60)]
        top.send_signal(signal.SIGINT)
        assert top.wait(20) == 130
    assert sum(line.startswith(b"fleet hotdesk: led by") for line in seen) > 1
    assert up.stop() == 0
    lines = hotdesk("log", *up.where, "--json").stdout.splitlines()
    kinds = [json.loads(line)["event"]["type"].partition("/")[0] for line in lines]
    assert kinds[:2] == ["leader_elected", "workers_joined"]
    assert kinds.count("request_refused") == 1
    only = hotdesk("log", *up.where, "--kind", "request_completed", "--match", "ada").stdout.splitlines()
    assert len(only) == kinds.count("request_completed") == 2
    assert len(hotdesk("log", *up.where, "--last", "3").stdout.splitlines()) == 3
    replayed = hotdesk("replay", *up.where, "--verify", "--export", str(short_tmp / "out.hdlog"))
    assert replayed.returncode == 0, replayed.stdout
    assert "0 different; 2 states written by the daemon compared, 0 different" in replayed.stdout
    early = json.loads(lines[2])["id"]
    assert hotdesk("replay", *up.where, "--at", early).stdout.startswith("3 events")
    (short_tmp / "segments").mkdir()
    first = next((short_tmp / "segments").parent.glob("out.hdlog"))
    first.rename(short_tmp / "segments" / f"{0:020d}.hdlog")
    cut = short_tmp / "cut" / f"{0:020d}.hdlog"
    cut.parent.mkdir()
    write_segment(cut, list(read_segment(short_tmp / "segments" / cut.name))[5:])
    beheaded = hotdesk("replay", "--segments", str(cut.parent))
    assert (beheaded.returncode, "beginning is missing" in beheaded.stderr) == (3, True)
    again = hotdesk("replay", "--segments", str(short_tmp / "segments"), "--verify")
    assert again.stdout.splitlines()[0] == replayed.stdout.splitlines()[0]


def test_a_daemon_killed_with_its_server_goes_on(up, config, short_tmp):
    where = up.where
    hotdesk("submit", *where, "--tenant", "ada", "--adapter", "poet", "create_adapter", '{"signature": {"rank": 4, "alpha": 8}}')
    first = hotdesk("submit", *where, "--tenant", "ada", "--adapter", "poet", "optim_step").stdout
    os.killpg(up.process.pid, signal.SIGKILL)  # the embedded server has a session of its own and stays
    up.process.wait()
    again = Up(config, short_tmp)
    again.wait_for('"epoch": 2')
    second = hotdesk("submit", *where, "--tenant", "ada", "--adapter", "poet", "optim_step").stdout
    assert (json.loads(first)["optimizer_step"], json.loads(second)["optimizer_step"]) == (1, 2)
    assert again.stop(signal.SIGINT) == 0
    assert hotdesk("replay", *where, "--verify").returncode == 0


def test_a_second_daemon_waits_as_a_standby_and_says_so(up, config, short_tmp):
    second = Up(config, short_tmp)
    second.wait_for('"standby"')
    assert second.stop() == 0
    submit = ("submit", *up.where, "--timeout-s", "10", "--tenant", "ada", "--adapter", "poet")
    created = hotdesk(*submit, "create_adapter", '{"signature": {"rank": 4, "alpha": 8}}')
    assert created.returncode == 0, created.stderr  # the leader and its server are untouched


def test_an_embedded_server_that_dies_is_started_again(up):
    submit = ("submit", *up.where, "--timeout-s", "20", "--tenant", "ada", "--adapter", "poet")
    hotdesk(*submit, "create_adapter", '{"signature": {"rank": 4, "alpha": 8}}')
    with redis.Redis(unix_socket_path=str(EmbeddedServer(up.log.parent).socket)) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    assert json.loads(hotdesk(*submit, "optim_step").stdout)["optimizer_step"] == 1
    up.wait_for("server_back")
