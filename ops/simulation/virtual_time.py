"""An event loop whose clock jumps to the first task that is due when every task waits. Deterministic, and hours cost nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


class Stuck(Exception):
    """Every task waits for another one."""


class _Jump(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("no task is due at any time: a deadlock")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run(main: Callable[..., Awaitable[T]], *args: Any) -> T:
    return anyio.run(main, *args, backend="asyncio", backend_options={"loop_factory": VirtualLoop})
