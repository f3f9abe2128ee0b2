"""Keys and values of all sequences in one tensor of pages, laid out as the decode kernel reads.

A page holds 64 positions of all layers and KV heads, as two granules of 32. In a granule, keys are
[32 positions][D] in chunks of 8 values; where D is a multiple of 64, odd rows swap neighbouring
groups of four chunks (chunk c lies at c ^ 4), which keeps the kernel's reads of shared memory free
of bank conflicts. Values are transposed, [D][32 positions]. A sequence's page table lists its pages
in the order of its positions.
"""

import torch
from torch import Tensor

from soloist.errors import ShapeUnsupported
from soloist.megakernel.limits import GRANULE_POSITIONS, PAGE_POSITIONS

CHUNK_VALUES = 8
_GRANULES = PAGE_POSITIONS // GRANULE_POSITIONS
_SWAPPED_VALUES = 4 * CHUNK_VALUES
_KEYS, _VALUES = 0, 1


class PagePool:
    """The pages of one model on one device, zero at first.

    Attributes:
        tensor: [pages, layers, K, 2 granules, 2 (keys, values), 32 · D].

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
        if head_dim % CHUNK_VALUES:
            raise ShapeUnsupported(f"head dimension {head_dim}", f"multiples of {CHUNK_VALUES}")
        self.num_kv_heads, self.head_dim, self.num_pages = num_kv_heads, head_dim, num_pages
        parts = (num_pages, num_layers, num_kv_heads, _GRANULES, 2)
        self.tensor = torch.zeros(*parts, GRANULE_POSITIONS * head_dim, dtype=dtype, device=device)
        # Views of all granules: of each one part is meant only.
        self._by_position = self.tensor.view(*parts, GRANULE_POSITIONS, head_dim)
        self._by_dimension = self.tensor.view(*parts, head_dim, GRANULE_POSITIONS)
        self._heads = torch.arange(num_kv_heads, device=device)[None, :, None]
        self._dims = torch.arange(head_dim, device=device)
        self._swapped = head_dim % (2 * _SWAPPED_VALUES) == 0

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
        granules = (positions % PAGE_POSITIONS // GRANULE_POSITIONS)[:, None, None]
        rows = (positions % GRANULE_POSITIONS)[:, None, None]
        dims = self._dims.expand(1, 1, -1)
        columns = dims ^ (rows % 2 * _SWAPPED_VALUES) if self._swapped else dims
        granule = (pages, layer, self._heads, granules)
        self._by_position[(*granule, _KEYS, rows, columns)] = keys.to(self.dtype)
        self._by_dimension[(*granule, _VALUES, dims, rows)] = values.to(self.dtype)

    def read(self, layer: int, page_table: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop - start, D] of a range of positions, copied."""
        first = start // PAGE_POSITIONS
        pages = page_table[first : -(-stop // PAGE_POSITIONS)].long()
        part = slice(start - first * PAGE_POSITIONS, stop - first * PAGE_POSITIONS)
        read = self.tensor[:, layer].index_select(0, pages)  # [pages, K, 2, 2, 32 · D]
        heads, dim = self.num_kv_heads, self.head_dim
        keys = read[:, :, :, _KEYS]
        if self._swapped:
            # [pages, K, 2, 16 pairs of rows, even and odd, groups of 8 chunks, 2 · 4, values]
            keys = keys.view(*keys.shape[:3], GRANULE_POSITIONS // 2, 2, -1, 2, _SWAPPED_VALUES)
            ordered = keys.new_empty(heads, len(pages), *keys.shape[2:])
            ordered[:, :, :, :, 0] = keys[:, :, :, :, 0].transpose(0, 1)
            ordered[:, :, :, :, 1] = keys[:, :, :, :, 1].flip(-2).transpose(0, 1)
        else:
            ordered = keys.transpose(0, 1).contiguous()
        values = read[:, :, :, _VALUES]
        values = values.view(*values.shape[:3], dim, GRANULE_POSITIONS)
        values = values.permute(1, 0, 2, 4, 3).reshape(heads, -1, dim)
        return ordered.view(heads, -1, dim)[:, part], values[:, part]
