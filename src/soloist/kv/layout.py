"""Where keys and values lie in the pages of a pool: the one definition, for Python and CUDA.

A page holds 64 positions of all layers and KV heads, [layer][head], and of each two half pages of
32 positions. In a half page keys come first, [32 positions][D] in chunks of 8 numbers. Where D is a
multiple of 64, odd rows swap neighbouring groups of four chunks (chunk c lies at c ^ 4), so that
two rows that a warp reads from shared memory never share banks. Values follow, transposed,
[D][32 positions]. A sequence's page table lists its pages in the order of its positions.

Pure: no torch, no device. Places are counted in numbers, not bytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soloist.errors import ShapeUnsupported
from soloist.model.kv_format import KvFormat

PAGE_POSITIONS = 64
HALF_PAGE_POSITIONS = 32
PAGE_HALVES = PAGE_POSITIONS // HALF_PAGE_POSITIONS
# Numbers that a thread moves at once, 16 bytes of the formats there are.
CHUNK_VALUES = 8
# Odd rows swap groups of so many, a power of 2.
SWAPPED_CHUNKS = 4
SWAPPED_VALUES = SWAPPED_CHUNKS * CHUNK_VALUES
KEYS, VALUES = 0, 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The pages of one model, or of one rank's share of it.

    Attributes:
        num_layers: of the model.
        num_heads: KV heads that the pool holds.
        head_dim: D.
        format: of keys and values.

    Raises:
        ShapeUnsupported: D is no whole number of chunks.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    format: KvFormat

    def __post_init__(self) -> None:
        if self.head_dim % CHUNK_VALUES:
            raise ShapeUnsupported(
                f"head dimension {self.head_dim}", f"multiples of {CHUNK_VALUES}"
            )

    @property
    def half_page_values(self) -> int:
        """Numbers of a half page: its keys or its values."""
        return HALF_PAGE_POSITIONS * self.head_dim

    @property
    def half_page_bytes(self) -> int:
        """The same in bytes."""
        return self.format.num_bytes(self.half_page_values)

    @property
    def page_values(self) -> int:
        """Numbers of a page."""
        return self.half_page_place(self.num_layers, 0, 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.format.num_bytes(self.page_values)

    def pool_bytes(self, num_pages: int) -> int:
        """Bytes of so many pages."""
        return num_pages * self.page_bytes

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """[pages, layers, K, half pages, (keys, values), 32 · D]: a pool as a tensor."""
        parts = len(self.format.parts)
        heads = (num_pages, self.num_layers, self.num_heads)
        return (*heads, PAGE_HALVES, parts, self.half_page_values)

    def half_page_place(self, layer: int, head: int, half_page: int) -> int:
        """From the start of a page to a half page's keys."""
        index = (layer * self.num_heads + head) * PAGE_HALVES + half_page
        return index * len(self.format.parts) * self.half_page_values

    @property
    def swaps_chunks(self) -> bool:
        """Whether odd rows of keys swap groups of chunks."""
        return self.head_dim % (2 * SWAPPED_VALUES) == 0

    def key_places(self) -> NDArray[np.int64]:
        """[32 rows, D]: from a half page's keys to each number."""
        row, d = np.arange(HALF_PAGE_POSITIONS)[:, None], np.arange(self.head_dim)
        return row * self.head_dim + (d ^ row % 2 * SWAPPED_VALUES if self.swaps_chunks else d)

    def value_places(self) -> NDArray[np.int64]:
        """[32 rows, D]: from a half page's values to each number."""
        row, d = np.arange(HALF_PAGE_POSITIONS)[:, None], np.arange(self.head_dim)
        return d * HALF_PAGE_POSITIONS + row

    @property
    def cuda(self) -> str:
        """CUDA text of a kernel's only model: constants, and where things lie."""
        return "\n".join([*page_constants(), *self.members()])

    def members(self, storage: str = "") -> list[str]:
        """The part of the text that depends on the model; it needs ptx/types.cuh.

        Args:
            storage: 'static ' for members of a struct.
        """
        # A chunk of the neighbouring group, a number in it: bits of an odd row, shifted.
        chunk_shift, value_shift = (n.bit_length() - 1 for n in (SWAPPED_CHUNKS, SWAPPED_VALUES))
        swaps = self.swaps_chunks
        constants = {"kPoolKvHeads": self.num_heads, "kHalfPageBytes": self.half_page_bytes}
        derived = {
            "kPageHalves": PAGE_HALVES,
            "kKvParts": len(self.format.parts),
            "kHalfPageValues": self.half_page_values,
            "kKeyRowBytes": self.format.num_bytes(self.head_dim),
            "kValueRowBytes": self.format.num_bytes(HALF_PAGE_POSITIONS),
            "kSwappedKeyBytes": self.format.num_bytes(SWAPPED_VALUES) if swaps else 0,
        }

        def function(declaration: str, result: str) -> str:
            return f"{storage}__device__ __forceinline__ {declaration} {{ return {result}; }}"

        return [
            "// The layout of KV pages; see kv/layout.py.",
            *(f"{storage}constexpr unsigned {name} = {n}u;" for name, n in constants.items()),
            "enum : unsigned {",
            *(f"  {name} = {value}u," for name, value in derived.items()),
            "};",
            "// From the start of the pool to a half page's keys; its values follow them.",
            function(
                "u64 half_page_place(u64 page_values, i32 page, u32 layer, u32 head, u32 half)",
                "page * page_values + ((static_cast<u64>(layer) * kPoolKvHeads + head) * "
                "kPageHalves + half) * (kKvParts * kHalfPageValues)",
            ),
            "// Which chunk of its row a chunk of a key takes.",
            function(
                "u32 key_chunk(u32 row, u32 chunk)",
                f"chunk ^ (row & 1) << {chunk_shift}" if swaps else "chunk",
            ),
            "// Which number of its row a number of a key takes.",
            function(
                "u32 key_column(u32 row, u32 d)",
                f"d ^ (row & 1) << {value_shift}" if swaps else "d",
            ),
            "// From a half_page's values to one number.",
            function("u32 value_place(u32 row, u32 d)", "d * kHalfPagePositions + row"),
        ]


def page_constants() -> list[str]:
    """CUDA text of what all models have alike."""
    constants = {"kPagePositions": PAGE_POSITIONS, "kHalfPagePositions": HALF_PAGE_POSITIONS}
    return [f"constexpr unsigned {name} = {value}u;" for name, value in constants.items()]
