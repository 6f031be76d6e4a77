"""One host arena a rank: registered once, cut into pieces of two sizes.

The pinned allocator of torch rounds each block up to a power of two and registers each one; an arena costs one registration. Every
adapter of a group has the same padded shape, so there are two sizes only, an adapter's state and its pending gradients, and nothing
can fragment.
"""

from __future__ import annotations

import torch

from state.errors import OutOfMemory

ALIGNMENT = 256  # bytes; a multiple of every dtype and of what copy engines like


class Pool:
    """`count` pieces of `nbytes` each within `storage`."""

    def __init__(self, what: str, storage: torch.Tensor, first: int, nbytes: int, count: int) -> None:
        self.what, self.storage, self.nbytes, self.count = what, storage, nbytes, count
        self.stride = aligned(nbytes)
        self.free = [first + index * self.stride for index in reversed(range(count))]

    def take(self) -> torch.Tensor:
        """uint8 [nbytes]. Raises `OutOfMemory` when every piece is taken."""
        if not self.free:
            raise OutOfMemory(f"all {self.count} pieces of {self.nbytes} bytes for {self.what} in the host arena are taken")
        offset = self.free.pop()
        return self.storage[offset : offset + self.nbytes]

    def give(self, piece: torch.Tensor) -> None:
        self.free.append(int(piece.storage_offset()))

    @property
    def taken(self) -> int:
        return self.count - len(self.free)


class Arena:
    """Room for `slots` adapters, each with pending gradients, in host memory; pinned where CUDA works."""

    def __init__(self, state_bytes: int, grad_bytes: int, slots: int, pinned: bool) -> None:
        self.budget_bytes = slots * (aligned(state_bytes) + aligned(grad_bytes))
        self.storage = torch.empty(self.budget_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.states = Pool("adapter states", self.storage, 0, state_bytes, slots)
        self.grads = Pool("pending gradients", self.storage, slots * aligned(state_bytes), grad_bytes, slots)

    @property
    def taken_bytes(self) -> int:
        return sum(pool.taken * pool.stride for pool in (self.states, self.grads))

    @property
    def wasted_bytes(self) -> int:
        """Alignment: taken, but asked for by nobody."""
        return sum(pool.taken * (pool.stride - pool.nbytes) for pool in (self.states, self.grads))


def aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
