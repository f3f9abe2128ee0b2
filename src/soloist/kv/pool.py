"""Keys and values of all sequences in one tensor of pages, laid out as the decode kernel reads.

`layout.py` says where they lie.
"""

import torch
from torch import Tensor

from soloist.kv.layout import (
    HALF_PAGE_POSITIONS,
    KEYS,
    PAGE_POSITIONS,
    SWAPPED_VALUES,
    VALUES,
    KvLayout,
)
from soloist.model.kv_format import plain
from soloist.model.torch_types import TORCH_DTYPES

_FORMATS = {stored: plain(dtype) for dtype, stored in TORCH_DTYPES.items()}


class PagePool:
    """The pages of one model on one device, zero at first.

    Attributes:
        tensor: [pages, layers, K, 2 half pages, 2 (keys, values), 32 · D].

    Raises:
        ShapeUnsupported: D is no whole number of chunks.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layout = KvLayout(num_layers, num_kv_heads, head_dim, _FORMATS[dtype])
        self.num_kv_heads, self.head_dim, self.num_pages = num_kv_heads, head_dim, num_pages
        self.tensor = torch.zeros(layout.shape(num_pages), dtype=dtype, device=device)
        self._heads = torch.arange(num_kv_heads, device=device)[None, :, None]
        self._key_places = torch.from_numpy(layout.key_places()).to(device)
        self._value_places = torch.from_numpy(layout.value_places()).to(device)
        self._swaps_chunks = layout.swaps_chunks

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.tensor.dtype

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
        # Of [T, K, D] every number has its place.
        key_places, value_places = self._key_places[rows, None], self._value_places[rows, None]
        self.tensor[(*half_page, KEYS, key_places)] = keys.to(self.dtype)
        self.tensor[(*half_page, VALUES, value_places)] = values.to(self.dtype)

    def read(self, layer: int, page_table: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop - start, D] of a range of positions, copied.

        By views, which is quicker than to look every place up.
        """
        first = start // PAGE_POSITIONS
        pages = page_table[first : -(-stop // PAGE_POSITIONS)].long()
        part = slice(start - first * PAGE_POSITIONS, stop - first * PAGE_POSITIONS)
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
