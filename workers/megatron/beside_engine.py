"""A Megatron group whose samples an external engine draws, on the same devices: while the group trains, the engine sleeps.

The steps are those of Megatron's own sampler. Waking and sleeping are calls to the engine; publishing writes the adapter's PEFT export to
disk and has the engine load it under a name that was never used. Nothing is left loaded over a sleep: what an engine restores then has been
seen to be another adapter than before.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import torch
import torch.distributed as dist
from anyio.from_thread import start_blocking_portal

from state.errors import ErrorInfo, HotdeskError, WorkerFailed, error_from
from state.events import Part
from state.requests import Sample, SampleResult
from state.residency import ALL_PARTS
from workers.group_config import EngineConfig, GroupConfig
from workers.inference.client import InferenceEngine
from workers.megatron.engine import MegatronEngine, all_gather

LOOK_S = 0.05
MOST_OF_A_STEP = 0.7  # for the engine; the rest is for the device's memory to come back
T = TypeVar("T")


class NoSampler:
    """In the place of Megatron's own: it takes no memory."""

    base, lora, tokens, together = torch.empty(0), (), 0, True

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def forget(self) -> None:
        pass


class BesideEngine(MegatronEngine):
    """`config.engine` says where it is. Rank 0 alone talks to it; what fails there fails on every rank."""

    def __init__(self, config: GroupConfig, root: Path, device: torch.device) -> None:
        assert config.engine is not None
        self.engine = within(config.engine, config.step_timeout_s)
        self.most_s = config.step_timeout_s * MOST_OF_A_STEP
        self.patient: Any = None  # the other ranks wait for rank 0 as long as a step may take, which is longer than a collective may
        if dist.get_world_size() > 1:
            self.patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.step_timeout_s))
        self.published = root / ".published" / hashlib.sha256(self.engine.url.encode()).hexdigest()[:12]
        self.held = contextlib.ExitStack()  # for as long as the process lives
        self.portal: Any = None
        self.client: InferenceEngine | None = None
        if dist.get_rank() == 0:
            self.portal = self.held.enter_context(start_blocking_portal())
            self.client = self.portal.call(InferenceEngine, self.engine)
        self._at_engine(InferenceEngine.sleep)  # it may have been left awake: the model would find no room
        super().__init__(config, root, device)

    def _build_sampler(self) -> Any:
        return NoSampler(self.engine.connections)

    def _gather_world(self, value: Any) -> list[Any]:
        return all_gather(value, dist.get_world_size(), self.patient)

    def _at_engine(self, act: Callable[[InferenceEngine], Awaitable[T]]) -> T | None:
        """However many calls `act` makes, they end before the step is taken for lost."""

        async def bounded(engine: InferenceEngine) -> T:
            try:
                with anyio.fail_after(self.most_s):
                    return await act(engine)
            except TimeoutError as error:
                raise WorkerFailed(f"the engine at {self.engine.url} took longer than {self.most_s:.0f} s") from error

        return self._together(lambda: self.portal.call(bounded, self.client) if self.client is not None else None)  # type: ignore[no-any-return]

    def wake_sampler(self) -> None:
        torch.cuda.empty_cache()  # what is free inside this process is taken for the engine's
        self._at_engine(InferenceEngine.wake)

    def sleep_sampler(self) -> None:
        self._at_engine(self._sleep)
        self._together(self._wait_for_room)

    async def _sleep(self, engine: InferenceEngine) -> None:
        await engine.sleep()
        await anyio.to_thread.run_sync(partial(shutil.rmtree, self.published, ignore_errors=True))

    def backload(self, parts: tuple[Part, ...]) -> None:
        """An engine that was started again meanwhile is awake."""
        self._at_engine(InferenceEngine.sleep)
        super().backload(parts)

    def _wait_for_room(self) -> None:
        """An engine may say that it sleeps before the driver has its memory back."""
        needed = sum(nbytes for part in ALL_PARTS for storage, nbytes in self._storages(part) if not storage.nbytes())
        deadline = time.monotonic() + self.engine.patience_s
        while (free := self._free_bytes()) < needed:
            if time.monotonic() > deadline:
                raise WorkerFailed(
                    f"the engine sleeps, and {free} bytes of the device are free of the {needed} that training needs",
                    way_out="see what else holds memory there; an engine at vLLM's sleep level 1 keeps some, so lower device_bytes",
                )
            time.sleep(LOOK_S)

    def _free_bytes(self) -> int:
        """On the device, for this process; a processor's memory is not looked at."""
        if self.device.type != "cuda":
            return 2**63
        own = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + own

    def publish(self, adapter: str) -> None:
        files = self._peft_files(adapter)

        async def publish(engine: InferenceEngine) -> None:
            for name in engine.loaded:
                await engine.unload(name)
            path = self.published / uuid.uuid4().hex[:12]
            await anyio.to_thread.run_sync(_write, path, files)
            await engine.load(f"{adapter.replace('/', '.')}.{path.name}", path)

        self._at_engine(publish)

    def sample(self, bodies: Sequence[Sample]) -> list[SampleResult | HotdeskError]:
        async def sample(engine: InferenceEngine) -> list[SampleResult | ErrorInfo]:
            if len(engine.loaded) != 1:
                raise WorkerFailed(f"the engine has {len(engine.loaded)} adapters of this group, not the one that was published")
            [name] = engine.loaded
            found: dict[int, SampleResult | ErrorInfo] = {}

            async def one(index: int, body: Sample) -> None:
                try:
                    found[index] = await engine.sample(name, body)
                except HotdeskError as error:
                    found[index] = error.info

            async with anyio.create_task_group() as tasks:
                for index, body in enumerate(bodies):
                    tasks.start_soon(one, index, body)
            return [found[index] for index in range(len(bodies))]

        [results] = [mine for mine in self._gather_world(self._at_engine(sample)) if mine is not None]
        return [error_from(one) if isinstance(one, ErrorInfo) else one for one in results]


def within(engine: EngineConfig, step_s: float) -> EngineConfig:
    """No call of it waits for longer than a step may take."""
    return msgspec.structs.replace(engine, timeout_s=min(engine.timeout_s, step_s / 2), patience_s=min(engine.patience_s, step_s / 5))


def _write(path: Path, files: dict[str, bytes]) -> None:
    """Instead of what was published before."""
    shutil.rmtree(path.parent, ignore_errors=True)
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
