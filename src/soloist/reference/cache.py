"""Storage that outlives a step: keys and values, and scratch that is allocated once."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from soloist.kv.codes import code_type, codes_of, numbers_of, scale_type
from soloist.model.kv_format import KvFormat

Made = TypeVar("Made")


class KVCache:
    """Keys and values of one sequence, allocated for `capacity` positions at once.

    What was not appended holds any values. What is read was stored before in any case, the latest
    position's too: so no bit depends on how a text was cut.

    Args:
        shapes: per attention block (KV heads, head dimension).
        capacity: positions it can hold.
        dtype: what is appended and read.
        stored: codes and scales instead of numbers, if they are not stored as they are.
        key_order: in which the numbers of a key share scales (`Rope.order_in_halves`); None where
            it is their own. Values share them as they come.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: KvFormat | None = None,
        key_order: Sequence[int] | None = None,
    ) -> None:
        self.capacity, self._dtype = capacity, dtype
        self._order = None if key_order is None else torch.tensor(key_order, device=device)
        self._codes = None if stored is None or stored.is_plain else stored

        def part(heads: int, dim: int) -> tuple[Tensor, ...]:
            """Keys or values of a block, not filled: that would take a second for 3 GB."""

            def made(length: int, kind: torch.dtype) -> Tensor:
                return torch.empty(heads, capacity, length, dtype=kind, device=device)

            if (codes := self._codes) is None:
                return (made(dim, dtype),)
            num_codes = dim * codes.value_bits // 8
            return (
                made(num_codes, code_type(codes)),
                made(dim // codes.scale_values, scale_type()),
            )

        # Of each block: [K, capacity, …], numbers or codes and scales.
        self._keys = [part(heads, dim) for heads, dim in shapes]
        self._values = [part(heads, dim) for heads, dim in shapes]

    @property
    def num_blocks(self) -> int:
        """Attention blocks."""
        return len(self._keys)

    def append(self, block: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [K, T, D] of positions `position` … `position` + T - 1."""
        if self._codes is None:
            self.restore(block, position, (keys, values))
        else:
            if self._order is not None:
                keys = keys.index_select(-1, self._order)
            self.restore(
                block, position, (*codes_of(keys, self._codes), *codes_of(values, self._codes))
            )

    def view(self, block: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop - start, D] of a range of positions.

        A view; of codes and scales the numbers that they stand for, made anew.
        """
        parts = self.stored(block, start, stop)
        if self._codes is None:
            keys, values = parts
            return keys, values
        key_codes, key_scales, value_codes, value_scales = parts
        keys = numbers_of(key_codes, key_scales, self._codes, self._dtype)
        if self._order is not None:
            keys = torch.empty_like(keys).index_copy_(-1, self._order, keys)
        return keys, numbers_of(value_codes, value_scales, self._codes, self._dtype)

    def stored(self, block: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Views of all that is stored of a range of positions, for `restore`."""
        parts = (*self._keys[block], *self._values[block])
        return tuple(part.narrow(1, start, stop - start) for part in parts)

    def restore(self, block: int, position: int, parts: Sequence[Tensor]) -> None:
        """Store what `stored` gave, of this cache or of one like it."""
        for here, part in zip(
            self.stored(block, position, position + parts[0].shape[1]), parts, strict=True
        ):
            here.copy_(part)

    @property
    def num_bytes(self) -> int:
        """Size of the allocation."""
        return sum(
            part.numel() * part.element_size()
            for parts in (*self._keys, *self._values)
            for part in parts
        )


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
