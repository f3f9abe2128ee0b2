"""Keys and values of all sequences in one tensor of pages, laid out as the decode kernel reads.

`layout.py` says where they lie.
"""

import torch
from torch import Tensor

from soloist.kv.codes import bytes_of, codes_of, numbers_of, of_bytes
from soloist.kv.layout import (
    HALF_PAGE_POSITIONS,
    KEYS,
    PAGE_POSITIONS,
    SWAPPED_VALUES,
    VALUES,
    KvLayout,
)
from soloist.model.kv_format import KvFormat, plain
from soloist.model.torch_types import TORCH_DTYPES

# Pages of codes that become numbers at once, and bytes that each of their numbers takes meanwhile:
# twice fp32, codes, indices.
_READ_PAGES = 32
_CODING_BYTES = 24
_FORMATS = {stored: plain(dtype) for dtype, stored in TORCH_DTYPES.items()}


class PagePool:
    """The pages of one model on one device, zero at first.

    Args:
        num_layers: of the model.
        num_kv_heads: K.
        head_dim: D.
        num_pages: of all sequences.
        dtype: of keys and values, as they come and as they are read.
        device: where.
        stored: codes and scales instead of numbers; None stores numbers as they are.

    Attributes:
        layout: where numbers lie.
        dtype: of keys and values.
        tensor: [pages, layers, K, 2 half pages, 2 (keys, values), 32 · D] in `dtype`, or bytes
            [pages, layers, K, 2 half pages, bytes] of codes and scales.

    Raises:
        ShapeUnsupported: D is no whole number of chunks, or of blocks of codes.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: KvFormat | None = None,
    ) -> None:
        layout = KvLayout(num_layers, num_kv_heads, head_dim, stored or _FORMATS[dtype])
        self.num_kv_heads, self.head_dim, self.num_pages = num_kv_heads, head_dim, num_pages
        self.layout, self.dtype = layout, dtype
        held = dtype if layout.format.is_plain else torch.uint8
        self.tensor = torch.zeros(layout.shape(num_pages), dtype=held, device=device)
        self._heads = torch.arange(num_kv_heads, device=device)[None, :, None]
        if layout.format.is_plain:
            places = layout.key_places(), layout.value_places()
        else:
            places = layout.stored_places(KEYS), layout.stored_places(VALUES)
        self._key_places, self._value_places = (torch.from_numpy(p).to(device) for p in places)
        self._swaps_chunks = layout.swaps_chunks

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.tensor.device

    def write(
        self, layer: int, page_table: Tensor, position: int, keys: Tensor, values: Tensor
    ) -> None:
        """Store keys and values [T, K, D] of the positions from `position` on."""
        positions = torch.arange(position, position + keys.shape[0], device=self.device)
        pages = page_table[positions // PAGE_POSITIONS].long()[:, None, None]
        half_pages = (positions % PAGE_POSITIONS // HALF_PAGE_POSITIONS)[:, None, None]
        rows = positions % HALF_PAGE_POSITIONS
        half_page = (pages, layer, self._heads, half_pages)
        # Of [T, K, D] every number, or every byte that is stored of it, has its place.
        key_places, value_places = self._key_places[rows, None], self._value_places[rows, None]
        keys, values, stored = keys.to(self.dtype), values.to(self.dtype), self.layout.format
        if not stored.is_plain:
            self.tensor[(*half_page, key_places)] = bytes_of(keys, stored)
            self.tensor[(*half_page, value_places)] = bytes_of(values, stored)
            return
        self.tensor[(*half_page, KEYS, key_places)] = keys
        self.tensor[(*half_page, VALUES, value_places)] = values

    def rounded(self, x: Tensor) -> Tensor:
        """What is read of keys or values [T, K, D] once they were stored."""
        stored = self.layout.format
        if stored.is_plain:
            return x.to(self.dtype)
        return numbers_of(*codes_of(x.to(self.dtype), stored), stored, self.dtype)

    def fill(self) -> None:
        """Random keys and values at all positions, to measure what reading them takes."""
        stored = self.layout.format
        if stored.is_plain:
            self.tensor.normal_()
            return
        # Bytes of the same few positions: what they hold costs no time.
        shape = (HALF_PAGE_POSITIONS, self.head_dim)
        half_page = torch.zeros(self.tensor.shape[-1], dtype=torch.uint8, device=self.device)
        for places in (self._key_places, self._value_places):
            numbers = torch.randn(shape, device=self.device).to(self.dtype)
            half_page[places] = bytes_of(numbers, stored)
        self.tensor[:] = half_page

    def read(self, layer: int, page_table: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop - start, D] of a range of positions, copied.

        By views, which is quicker than to look every place up; of codes, what they stand for.
        """
        first = start // PAGE_POSITIONS
        pages = page_table[first : -(-stop // PAGE_POSITIONS)].long()
        part = slice(start - first * PAGE_POSITIONS, stop - first * PAGE_POSITIONS)
        if not self.layout.format.is_plain:
            keys, values = self._read_codes(layer, pages)
            return keys[:, part], values[:, part]
        read = self.tensor[:, layer].index_select(0, pages)  # [pages, K, 2, 2, 32 · D]
        heads, dim = self.num_kv_heads, self.head_dim
        keys = read[:, :, :, KEYS]
        if self._swaps_chunks:
            # [pages, K, 2, 16 pairs of rows, even and odd, groups of 8 chunks, 2 · 4, values]
            keys = keys.view(*keys.shape[:3], HALF_PAGE_POSITIONS // 2, 2, -1, 2, SWAPPED_VALUES)
            ordered = keys.new_empty(heads, len(pages), *keys.shape[2:])
            ordered[:, :, :, :, 0] = keys[:, :, :, :, 0].transpose(0, 1)
            ordered[:, :, :, :, 1] = keys[:, :, :, :, 1].flip(-2).transpose(0, 1)
        else:
            ordered = keys.transpose(0, 1).contiguous()
        values = read[:, :, :, VALUES]
        values = values.view(*values.shape[:3], dim, HALF_PAGE_POSITIONS)
        values = values.permute(1, 0, 2, 4, 3).reshape(heads, -1, dim)
        return ordered.view(heads, -1, dim)[:, part], values[:, part]

    def _read_codes(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [K, positions, D] of whole pages, some at a time: see `coding_bytes`."""
        stored = self.layout.format
        shape = (self.num_kv_heads, len(pages), PAGE_POSITIONS, self.head_dim)
        both = tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        for start in range(0, len(pages), _READ_PAGES):
            some = slice(start, start + _READ_PAGES)
            read = self.tensor[:, layer].index_select(0, pages[some])  # [pages, K, 2, bytes]
            for numbers, places in zip(both, (self._key_places, self._value_places), strict=True):
                found = of_bytes(read[..., places], stored)  # [pages, K, 2, 32 rows, …]
                made = numbers_of(*found, stored, self.dtype)
                numbers[:, some] = made.flatten(2, 3).transpose(0, 1)
        keys, values = (numbers.flatten(1, 2) for numbers in both)
        return keys, values


def coding_bytes(layout: KvLayout, num_tokens: int) -> int:
    """Most that rounding keys or values of so many positions takes, or reading them.

    Nothing where numbers are stored as they are.
    """
    if layout.format.is_plain:
        return 0
    most = max(num_tokens, _READ_PAGES * PAGE_POSITIONS)
    return most * layout.num_heads * layout.head_dim * _CODING_BYTES
