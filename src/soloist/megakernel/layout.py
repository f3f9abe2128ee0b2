"""Buffers one after the other in one allocation. Pure."""

import math
from dataclasses import dataclass

ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Buffer:
    """Part of an allocation.

    Attributes:
        offset: bytes from its start.
        shape: in values; the last dimension is contiguous.
        value_bytes: of one value.
    """

    offset: int
    shape: tuple[int, ...]
    value_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size, rounded up so that the next buffer is aligned."""
        size = math.prod(self.shape) * self.value_bytes
        return -(-size // ALIGNMENT) * ALIGNMENT


def stack(shapes: dict[str, tuple[int, ...]], value_bytes: int) -> dict[str, Buffer]:
    """Lay out buffers in order, each aligned to a cache line."""
    buffers: dict[str, Buffer] = {}
    offset = 0
    for name, shape in shapes.items():
        buffers[name] = Buffer(offset, shape, value_bytes)
        offset += buffers[name].num_bytes
    return buffers


def end_of(buffers: dict[str, Buffer]) -> int:
    """Bytes of an allocation that holds them all."""
    return max((b.offset + b.num_bytes for b in buffers.values()), default=0)
