"""One host arena a rank: registered once, sub-allocated by us.

The pinned allocator of torch rounds each block up to a power of two and registers each one; an arena costs one registration, and what
it wastes is only the alignment of its pieces.
"""

from __future__ import annotations

import torch

from state.errors import OutOfMemory

ALIGNMENT = 256  # bytes; a multiple of every dtype and of what copy engines like


class Arena:
    """`budget_bytes` of host memory, pinned where CUDA works. First fit over a sorted free list; neighbours merge."""

    def __init__(self, budget_bytes: int, pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self.storage = torch.empty(budget_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.free: list[tuple[int, int]] = [(0, budget_bytes)]  # (offset, bytes), by offset
        self.taken: dict[int, int] = {}
        self.asked_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]. Raises `OutOfMemory` at the budget."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        for index, (offset, room) in enumerate(self.free):
            if room >= size:
                self.free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                self.taken[offset] = size
                self.asked_bytes += nbytes
                return self.storage[offset : offset + nbytes]
        raise OutOfMemory(f"{nbytes} bytes of host memory: {self.free_bytes} of {self.budget_bytes} are free, in {len(self.free)} pieces")

    def give(self, piece: torch.Tensor) -> None:
        offset = int(piece.storage_offset())
        size = self.taken.pop(offset)
        self.asked_bytes -= piece.numel()
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self.free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self.free = merged

    @property
    def taken_bytes(self) -> int:
        return sum(self.taken.values())

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.taken_bytes

    @property
    def wasted_bytes(self) -> int:
        """Alignment: taken, but asked for by nobody."""
        return self.taken_bytes - self.asked_bytes
