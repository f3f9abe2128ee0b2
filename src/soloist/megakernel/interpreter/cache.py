"""Keys and values in the pages of the KV pool."""

from typing import NamedTuple

import torch
from torch import Tensor

from soloist.kv.codes import bytes_of, code_numbers, of_bytes
from soloist.kv.layout import HALF_PAGE_POSITIONS, KEYS, PAGE_POSITIONS, VALUES
from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.plan import Plan


class Stored(NamedTuple):
    """Keys or values of a half page.

    Attributes:
        numbers: [32, D], codes where there are scales.
        scales: [32, scales of a head], each of equally many numbers; None where there are none.
    """

    numbers: Tensor
    scales: Tensor | None = None


class Cache:
    """A rank's or a lane's heads in the pool.

    Args:
        plan: where numbers lie in a page.
        memory: the pool, which changes, and whose pages are whose.
    """

    def __init__(self, plan: Plan, memory: Memory) -> None:
        self._layout, self._memory = plan.kv_layout, memory
        layout = plan.kv_layout
        if layout.format.is_plain:
            places = layout.key_places(), layout.value_places() + layout.half_page_values
        else:
            places = layout.stored_places(KEYS), layout.stored_places(VALUES)
        # [32, …]: of each position, from the start of a half page.
        self._places = tuple(torch.from_numpy(p) for p in places)

    def append(self, layer: int, head: int, sequence: int, position: int, kv: Tensor) -> None:
        """Store the key and the value [2, D] of a position, rounded as the pool's format says."""
        half_page, stored = self._half_page(layer, head, sequence, position), self._layout.format
        row = position % HALF_PAGE_POSITIONS
        given = kv.to(half_page.dtype) if stored.is_plain else bytes_of(kv, stored)
        for places, x in zip(self._places, given, strict=True):
            half_page[places[row]] = x

    def read(self, layer: int, head: int, sequence: int, start: int) -> tuple[Stored, Stored]:
        """Keys and values of a half page, which has its first position at `start`."""
        half_page = self._half_page(layer, head, sequence, start)
        keys, values = (self._read(half_page[places]) for places in self._places)
        return keys, values

    def _read(self, found: Tensor) -> Stored:
        stored = self._layout.format
        if stored.is_plain:
            return Stored(found.float())
        codes, scales = of_bytes(found, stored)
        return Stored(code_numbers(codes, stored), scales.float())

    def _half_page(self, layer: int, head: int, sequence: int, position: int) -> Tensor:
        """A view of the pool, of numbers or bytes: keys and values around a position."""
        page, within = divmod(position, PAGE_POSITIONS)
        half_page, size = within // HALF_PAGE_POSITIONS, 2 * self._layout.half_page_values
        start = self._layout.half_page_place(layer, self._memory.first_head + head, half_page)
        if not self._layout.format.is_plain:
            start, size = (self._layout.format.num_bytes(n) for n in (start, size))
        values = self._memory.pool[int(self._memory.page_tables[sequence, page])].view(-1)
        return values[start : start + size]
