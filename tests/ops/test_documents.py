"""Examples in the documents are run: Python blocks against a daemon, command lines against the parser, the configuration by the loader."""

from __future__ import annotations

import re
import shlex
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import redis

from ops.cli import parse
from scheduler.config import Config, load
from scheduler.daemon import Daemon
from scheduler.embedded import EmbeddedServer
from scheduler.producer import Producer
from scheduler.validation import Limits
from state.events import Settings
from state.redis_log import RedisLog
from workers.simulated import SimulatedGroup

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ops" / "RUNBOOK.md", ROOT / "ops" / "TINKER.md"]


def blocks(kind: str) -> list[str]:
    return [b for path in DOCUMENTS for b in re.findall(rf"```{kind}\n(.*?)```", path.read_text(), re.S)]


def test_every_command_line_parses():
    lines = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    commands = [shlex.split(line, comments=True) for line in lines]
    ours = [words[1:] for words in commands if words[0] == "hotdesk"]
    assert len(ours) > 10
    for words in ours:
        parse(words)
    for words in commands:
        if words[0].startswith("./"):
            assert (ROOT / words[0]).stat().st_mode & 0o111


def test_the_example_configuration_is_the_default_one():
    assert load(ROOT / "ops" / "hotdesk.toml", {}) == Config()


def test_environment_variables_override_the_file():
    config = load(ROOT / "ops" / "hotdesk.toml", {"HOTDESK_REDIS_URL": "redis://other", "HOTDESK_LIMITS_DATUMS": "7"})
    assert (config.redis.url, config.limits.datums) == ("redis://other", 7)


@pytest.fixture
def serving(short_tmp):
    """A daemon on a server of its own, in a thread."""
    server = EmbeddedServer(short_tmp)
    server.start()
    started, stop = threading.Event(), threading.Event()

    async def serve(url):
        store = RedisLog.connect(url, "hotdesk")
        daemon = Daemon(store, [SimulatedGroup("main", root=short_tmp / "adapters")], settings=Settings(), limits=Limits())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(daemon.run)
            await daemon.ready.wait()
            started.set()
            await anyio.to_thread.run_sync(stop.wait)
            daemon.drain()
        await store.close()

    threads = []

    def start(url=server.url):
        threads.append(threading.Thread(target=lambda: anyio.run(serve, url)))
        threads[-1].start()
        assert started.wait(10)
        return server

    yield start
    stop.set()
    for thread in threads:
        thread.join()
    server.stop()


def test_the_tenants_program_in_the_readme(serving, capsys):
    server = serving()
    (program,) = [b for b in blocks("python") if "SyncProducer" in b]
    exec(compile(program, "README.md", "exec"), {"URL": server.url})
    printed = [line for line in capsys.readouterr().out.splitlines() if "[info" not in line]
    assert [line[0] for line in printed] == ["0", "1", "2", "["]


def test_the_two_acl_users_of_the_runbook_are_enough_and_no_more(serving, short_tmp):
    server = EmbeddedServer(short_tmp)
    server.start()
    (rules,) = blocks("acl")
    with redis.Redis(unix_socket_path=str(server.socket)) as admin:
        for line in rules.strip().splitlines():
            admin.execute_command(*shlex.split(line))

    def url(user, password):
        return f"unix://{user}:{password}@{server.socket}"

    serving(url("hotdesk-daemon", "DAEMON-PASSWORD"))

    async def tenant():
        alice = url("hotdesk-alice", "ALICE-PASSWORD")
        async with Producer.connect(alice, fleet="hotdesk", tenant="alice") as hotdesk:
            poet = await hotdesk.create_adapter("poet", rank=4)
            assert (await (await poet.optim_step())).optimizer_step == 1
        client = RedisLog.connect(alice, "hotdesk").client
        for forbidden in (
            client.xrange("{hotdesk}:log"),
            client.xread({"{hotdesk}:results:bob": "0"}),
            client.xread({"{hotdesk}:requests": "0"}),
            client.set("{hotdesk}:epoch", 9),
        ):
            with pytest.raises(redis.ResponseError):
                await forbidden
        await client.aclose()

    anyio.run(tenant)
