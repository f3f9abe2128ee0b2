"""Keys and values in the pages of the KV pool."""

import torch
from torch import Tensor

from soloist.kv.layout import HALF_PAGE_POSITIONS, PAGE_POSITIONS
from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.plan import Plan


class Cache:
    """A rank's or a lane's heads in the pool.

    Args:
        plan: where numbers lie in a page.
        memory: the pool, which changes, and whose pages are whose.
    """

    def __init__(self, plan: Plan, memory: Memory) -> None:
        self._layout, self._memory = plan.kv_layout, memory
        self._key_places = torch.from_numpy(plan.kv_layout.key_places())
        self._value_places = torch.from_numpy(plan.kv_layout.value_places())

    def append(self, layer: int, head: int, sequence: int, position: int, kv: Tensor) -> None:
        """Store the key and the value [2, D] of a position."""
        keys, values = self._half_page(layer, head, sequence, position)
        row = position % HALF_PAGE_POSITIONS
        keys[self._key_places[row]], values[self._value_places[row]] = kv.to(keys.dtype)

    def read(self, layer: int, head: int, sequence: int, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values [32, D] of a half page, which has its first position at `start`."""
        keys, values = self._half_page(layer, head, sequence, start)
        return keys.float()[self._key_places], values.float()[self._value_places]

    def _half_page(self, layer: int, head: int, sequence: int, position: int) -> Tensor:
        """[2, 32 · D], a view of the pool: keys and values around a position."""
        page, within = divmod(position, PAGE_POSITIONS)
        half_page, size = within // HALF_PAGE_POSITIONS, self._layout.half_page_values
        start = self._layout.half_page_place(layer, self._memory.first_head + head, half_page)
        values = self._memory.pool[int(self._memory.page_tables[sequence, page])].view(-1)
        return values[start : start + 2 * size].view(2, size)
