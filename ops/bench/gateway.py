"""Requests a second through the HTTP gateway: `python -m ops.bench.gateway [--seconds 5]`. Writes results/gateway.json.

Real embedded server with every append on disk, real daemon and gateway as processes of their own, simulated workers. Each tenant repeats: a
forward_backward of 4 sequences of 128 tokens and an optim_step, sent one after the other, both waited for. The client speaks HTTP over
plain sockets. Beside it, in the same run: the same steps by the queue producer, without a gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ops.bench import result
from scheduler.gateway import wire
from scheduler.producer import Producer, datum

TENANTS = (1, 8, 64)
SEQUENCES, TOKENS = 4, 128
CONFIG = '[fleet]\nname = "bench"\n[gateway]\nport = 0\n[log]\nlevel = "error"\n[groups.main]\nbackend = "simulated"\n'


class Connection:
    """Keep-alive HTTP/1.1, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self.reader, self.writer, self.key = reader, writer, key

    @staticmethod
    async def open(port: int, key: str) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", port), key)

    async def post(self, path: str, body: bytes) -> bytes:
        head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: bench\r\nx-api-key: {self.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        content = await self.reader.readexactly(int(answer.partition("content-length: ")[2].partition("\r")[0]))
        if " 200 " not in answer[:15]:
            raise RuntimeError(f"{path}: {answer} {content!r}")
        return content

    async def json(self, path: str, **body: Any) -> Any:
        return json.loads(await self.post(path, json.dumps(body).encode()))

    async def result(self, request_id: str) -> bytes:
        while b"try_again" in (answer := await self.post("retrieve_future", json.dumps({"request_id": request_id}).encode()))[:40]:
            pass
        if answer.startswith(b'{"error'):
            raise RuntimeError(answer)
        return answer


async def over_http(port: int, tenant: int, until: list[float], times: list[float]) -> None:
    ask, first, second = [await Connection.open(port, f"tml-{tenant}") for _ in range(3)]
    session = (await ask.json("create_session"))["session_id"]
    lora = {"rank": 8, "seed": tenant}
    created = await ask.json("create_model", session_id=session, model_seq_id=0, base_model="tiny-gpt", lora_config=lora)
    await ask.result(created["request_id"])
    message = wire.ForwardBackwardRequest(model_id=f"{session}:train:0", loss_fn="cross_entropy")
    for row in range(SEQUENCES):
        data = message.data.add()
        tokens = np.arange(TOKENS, dtype="<i4") % 40 + row
        data.model_input.add().encoded_text.tokens = tokens.tobytes()
        target = data.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = (tokens + 1).astype("<i8").tobytes(), 2
        target.shape.append(TOKENS)
    while not until:
        await asyncio.sleep(0.01)
    seq = 1
    while time.perf_counter() < until[0]:
        began = time.perf_counter()
        message.seq_id = seq
        forward = json.loads(await ask.post("forward_backward", message.SerializeToString()))
        step = await ask.json("optim_step", model_id=message.model_id, seq_id=seq + 1, adam_params={"learning_rate": 1e-4})
        await asyncio.gather(first.result(forward["request_id"]), second.result(step["request_id"]))
        times.append(time.perf_counter() - began)
        seq += 2


async def over_queue(url: str, tenant: int, until: list[float], times: list[float]) -> None:
    async with Producer.connect(url, fleet="bench", tenant=f"q{tenant}") as hotdesk:
        adapter = await hotdesk.create_adapter("a", rank=8, seed=tenant)
        data = [datum(np.arange(TOKENS) % 40 + row, np.arange(TOKENS) % 40 + row + 1) for row in range(SEQUENCES)]
        while not until:
            await asyncio.sleep(0.01)
        while time.perf_counter() < until[0]:
            began = time.perf_counter()
            forward = await adapter.forward_backward(data)
            step = await adapter.optim_step()
            await forward
            await step
            times.append(time.perf_counter() - began)


async def measured(program: Any, where: Any, tenants: int, seconds: float) -> dict[str, float]:
    until: list[float] = []
    times: list[float] = []
    tasks = [asyncio.create_task(program(where, tenant, until, times)) for tenant in range(tenants)]
    await asyncio.sleep(1.0 + 0.05 * tenants)
    began = time.perf_counter()
    until.append(began + seconds)
    await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    ordered = sorted(1000 * one for one in times)
    return {
        "requests_per_s": round(2 * len(times) / took, 1),
        "step_p50_ms": round(statistics.median(ordered), 1),
        "step_p99_ms": round(ordered[int(0.99 * len(ordered))], 1),
    }


@contextlib.contextmanager
def fleet() -> Iterator[tuple[int, str]]:
    """(the gateway's port, the server's URL)."""
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        config = Path(directory) / "bench.toml"
        config.write_text(CONFIG)
        daemon = subprocess.Popen([sys.executable, "-m", "ops.cli", "up", "--config", str(config), "--data-dir", directory])
        try:
            port, url = Path(directory) / "gateway", Path(directory) / "endpoint"
            while not (port.exists() and url.exists()):
                time.sleep(0.1)
            time.sleep(1.0)
            yield int(port.read_text().rpartition(":")[2]), url.read_text()
        finally:
            daemon.terminate()
            daemon.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--name", default="gateway", help="of the result file")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for tenants in TENANTS:
        with fleet() as (port, url):
            http = asyncio.run(measured(over_http, port, tenants, args.seconds))
            queue = asyncio.run(measured(over_queue, url, tenants, args.seconds))
        ratio = round(http["requests_per_s"] / queue["requests_per_s"], 2)
        rows[str(tenants)] = {"gateway": http, "queue_producer": queue, "ratio": ratio}
        print(f"{tenants} tenants: gateway {http}, queue producer {queue}, ratio {ratio}", flush=True)
    result.write(args.name, rows, args.out)


if __name__ == "__main__":
    main()
