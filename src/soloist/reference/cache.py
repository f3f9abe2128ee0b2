"""Storage that outlives a step: keys and values, and scratch that is allocated once."""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Made = TypeVar("Made")


class KVCache:
    """Keys and values of one sequence, allocated for `capacity` positions at once.

    What was not appended holds any values.

    Args:
        shapes: per attention block (KV heads, head dimension).
        capacity: positions it can hold.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity

        def stored() -> list[Tensor]:
            """[K, capacity, D] for each block, not filled: that would take a second for 3 GB."""
            return [
                torch.empty(heads, capacity, dim, dtype=dtype, device=device)
                for heads, dim in shapes
            ]

        self._keys, self._values = stored(), stored()

    @property
    def num_blocks(self) -> int:
        """Attention blocks."""
        return len(self._keys)

    def append(self, block: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [K, T, D] of positions `position` … `position` + T - 1."""
        count = keys.shape[1]
        self._keys[block].narrow(1, position, count).copy_(keys)
        self._values[block].narrow(1, position, count).copy_(values)

    def view(self, block: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop - start, D] of a range of positions."""
        count = stop - start
        return (
            self._keys[block].narrow(1, start, count),
            self._values[block].narrow(1, start, count),
        )

    @property
    def num_bytes(self) -> int:
        """Size of the allocation."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))


class Scratch:
    """Named tensors for intermediate results, allocated on first use and reused in every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[object, ...], Tensor] = {}
        self._made: dict[tuple[object, ...], Any] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of this name and shape; its content is whatever the last user left."""
        key = (name, dtype, shape)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = torch.empty(shape, dtype=dtype, device=self._device)
        return held

    def take_growing(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], most: int
    ) -> Tensor:
        """A tensor of this shape out of one allocation made for `most` values at once."""
        key, count = (name, dtype), math.prod(shape)
        held = self._held.get(key)
        if held is None or held.numel() < count:
            held = self._held[key] = torch.empty(max(most, count), dtype=dtype, device=self._device)
        return held[:count].view(shape)

    def made(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """What `make` returned for this key the first time: views of buffers, not made again."""
        if key not in self._made:
            self._made[key] = make()
        return cast("Made", self._made[key])

    @property
    def num_bytes(self) -> int:
        """Size of all that is held."""
        return sum(held.numel() * held.element_size() for held in self._held.values())
