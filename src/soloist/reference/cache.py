"""Storage that outlives a step: keys and values, and scratch that is allocated once."""

import math

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one sequence, allocated for `capacity` positions at once.

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
        # [2 (key, value), K, capacity, D] per block: one copy appends both.
        self.blocks = [
            torch.zeros(2, heads, capacity, dim, dtype=dtype, device=device)
            for heads, dim in shapes
        ]

    def append(self, block: int, position: int, keys_values: Tensor) -> None:
        """Store the keys and values [2, K, T, D] of positions `position` … `position` + T - 1."""
        count = keys_values.shape[2]
        self.blocks[block][:, :, position : position + count].copy_(keys_values)

    def view(self, block: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop - start, D] of a range of positions."""
        stored = self.blocks[block]
        return stored[0, :, start:stop], stored[1, :, start:stop]

    @property
    def num_bytes(self) -> int:
        """Size of the allocation."""
        return sum(block.numel() * block.element_size() for block in self.blocks)


class Scratch:
    """Named tensors for intermediate results, allocated on first use and reused in every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[object, ...], Tensor] = {}

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

    @property
    def num_bytes(self) -> int:
        """Size of all that is held."""
        return sum(held.numel() * held.element_size() for held in self._held.values())
