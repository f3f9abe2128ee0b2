"""Where keys and values lie in the pages of a pool: the one definition, for Python and CUDA.

A page holds 64 positions of all layers and KV heads, [layer][head], and of each two half pages of
32 positions. In a half page keys come first, [32 positions][D] in chunks of 8 numbers. Where D is a
multiple of 64, odd rows swap neighbouring groups of four chunks (chunk c lies at c ^ 4), so that
two rows that a warp reads from shared memory never share banks. Values follow, transposed,
[D][32 positions]. A sequence's page table lists its pages in the order of its positions.

Of keys and values in fewer bits a half page has bytes: codes of keys, [32 positions][D], codes of
values, [D][32 positions], scales of keys and scales of values, [scales of a head][32 positions].
In 4 bits a byte holds numbers 2i and 2i + 1 of one position, of values too: [D / 2][32 positions].
So no two positions share a byte. Keys swap blocks of 32 numbers, see `key_turn`.

Pure: no torch, no device. Places of plain numbers are counted in numbers, others in bytes.
"""

from collections.abc import Callable
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
# Numbers of a key whose codes stay together when a row swaps them: what a warp reads at once.
BLOCK_VALUES = 32
_BANKS_BYTES = 128  # of shared memory, all of its banks
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The pages of one model, or of one rank's share of it.

    Attributes:
        num_layers: of the model.
        num_heads: KV heads that the pool holds.
        head_dim: D.
        format: of keys and values.

    Raises:
        ShapeUnsupported: D is no whole number of chunks, or of blocks where there are codes.
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
        if not self.format.is_plain and self.head_dim % BLOCK_VALUES:
            raise ShapeUnsupported(
                f"keys and values in {self.format.name} with a head dimension of {self.head_dim}",
                f"multiples of {BLOCK_VALUES}",
            )

    @property
    def half_page_values(self) -> int:
        """Numbers of a half page: its keys or its values."""
        return HALF_PAGE_POSITIONS * self.head_dim

    @property
    def half_page_bytes(self) -> int:
        """The same in bytes, scales included."""
        return self.format.num_bytes(self.half_page_values)

    @property
    def code_bytes(self) -> int:
        """The same without scales: from a half page's keys to its values."""
        return self.half_page_values * self.format.value_bits // 8

    @property
    def num_scales(self) -> int:
        """Scales of a head at one position; 0 where numbers are stored as they are."""
        return self.head_dim // self.format.scale_values if self.format.scale_values else 0

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
        """[pages, layers, K, half pages, (keys, values), 32 · D]: a pool as a tensor.

        In fewer bits its last dimension is the bytes of a half page: of codes and scales.
        """
        parts = len(self.format.parts)
        heads = (num_pages, self.num_layers, self.num_heads)
        if not self.format.is_plain:
            return (*heads, PAGE_HALVES, parts * self.half_page_bytes)
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
    def num_blocks(self) -> int:
        """Blocks of a key's codes."""
        return self.head_dim // BLOCK_VALUES

    @property
    def _block_bytes(self) -> int:
        return BLOCK_VALUES * self.format.value_bits // 8

    @property
    def _row_bytes(self) -> int:
        """Codes of a key."""
        return self.head_dim * self.format.value_bits // 8

    def _turn(self) -> tuple[int, int, int]:
        """(bits of a row's number from bit 0, from which bit others come, how many of these).

        Eight lanes of a warp, or four where a number has 8 bits, read rows 0, 1, 8, 9, … at once,
        of each one block. Rows 8 apart begin in the same banks, and so do neighbours where a row
        fills all banks.
        """
        if self.num_blocks not in (2, 4):
            return 0, 0, 0
        neighbours = int(self._row_bytes % _BANKS_BYTES == 0)
        return neighbours, 3, self.num_blocks.bit_length() - 1 - neighbours

    def key_turn(self, row: int) -> int:
        """Block b of a row's codes lies at b ^ this, so that rows read at once share few banks."""
        low, shift, high = self._turn()
        return row & (1 << low) - 1 | (row >> shift & (1 << high) - 1) << low

    def stored_places(self, part: int) -> NDArray[np.int64]:
        """[32 rows, bytes]: from the start of a half page to each byte of codes, then of scales.

        Args:
            part: `KEYS` or `VALUES`, in fewer bits.
        """
        row, byte = np.arange(HALF_PAGE_POSITIONS)[:, None], np.arange(self._row_bytes)
        if part == KEYS:
            turns = np.array([self.key_turn(r) for r in range(HALF_PAGE_POSITIONS)])[:, None]
            codes = row * self._row_bytes + (byte ^ turns * self._block_bytes)
        else:
            codes = self.code_bytes + byte * HALF_PAGE_POSITIONS + row
        first = 2 * self.code_bytes + part * self.num_scales * HALF_PAGE_POSITIONS * _SCALE_BYTES
        number, of_scale = np.divmod(np.arange(self.num_scales * _SCALE_BYTES), _SCALE_BYTES)
        scales = first + (number * HALF_PAGE_POSITIONS + row) * _SCALE_BYTES + of_scale
        return np.concatenate([codes, scales], 1)

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
        swaps = self.swaps_chunks and self.format.is_plain
        constants = {"kPoolKvHeads": self.num_heads, "kHalfPageBytes": self.half_page_bytes}
        derived = {
            "kPageHalves": PAGE_HALVES,
            "kKvParts": len(self.format.parts),
            "kHalfPageValues": self.half_page_values,
            "kKeyRowBytes": self._row_bytes,
            "kValueRowBytes": HALF_PAGE_POSITIONS * self.format.value_bits // 8,
            "kSwappedKeyBytes": self.format.num_bytes(SWAPPED_VALUES) if swaps else 0,
            "kCodeBits": self.format.value_bits,
            "kCodeBytes": self.code_bytes,
        }

        def function(declaration: str, result: str) -> str:
            return f"{storage}__device__ __forceinline__ {declaration} {{ return {result}; }}"

        if not self.format.is_plain:
            return self._members_of_codes(constants, derived, function, storage)
        return [
            *_text_of(storage, constants, derived),
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

    def _members_of_codes(
        self,
        constants: dict[str, int],
        derived: dict[str, int],
        function: Callable[[str, str], str],
        storage: str,
    ) -> list[str]:
        low, shift, high = self._turn()
        turn = [f"row & {(1 << low) - 1}"] if low else []
        turn += [f"(row >> {shift} & {(1 << high) - 1}) << {low}"] if high else []
        derived |= {
            "kFloatCodes": int(self.format.name == "fp8"),
            "kScales": self.num_scales,
            "kScaleRowBytes": HALF_PAGE_POSITIONS * _SCALE_BYTES,
            "kKeyBlockBytes": self._block_bytes,
        }
        return [
            *_text_of(storage, constants, derived),
            "// From the start of the pool, in 16 bits, to a half page: codes of keys, of values,",
            "// then scales of keys, of values.",
            function(
                "u64 half_page_place(u64 page_values, i32 page, u32 layer, u32 head, u32 half)",
                "page * page_values + ((static_cast<u64>(layer) * kPoolKvHeads + head) * "
                f"kPageHalves + half) * (kKvParts * kHalfPageBytes / {_SCALE_BYTES})",
            ),
            "// Block b of the codes of a key lies at b ^ this.",
            function("u32 key_turn(u32 row)", " | ".join(turn) or "0"),
        ]


def _text_of(storage: str, constants: dict[str, int], derived: dict[str, int]) -> list[str]:
    return [
        "// The layout of KV pages; see kv/layout.py.",
        *(f"{storage}constexpr unsigned {name} = {n}u;" for name, n in constants.items()),
        "enum : unsigned {",
        *(f"  {name} = {value}u," for name, value in derived.items()),
        "};",
    ]


def page_constants() -> list[str]:
    """CUDA text of what all models have alike."""
    constants = {"kPagePositions": PAGE_POSITIONS, "kHalfPagePositions": HALF_PAGE_POSITIONS}
    return [f"constexpr unsigned {name} = {value}u;" for name, value in constants.items()]
