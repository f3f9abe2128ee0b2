"""How one matrix is cut into tiles and spread over the blocks of the grid. Pure integers.

A matrix [rows, columns] is cut along its rows into *units*: 8 rows each (16 for most gate_up, where
a unit is 8 gate rows and the 8 up rows that belong to them), and along its columns into *steps* of
512. A block owns consecutive units. Two units of 8 rows make a tile for the m16n8k16 multiply; an
odd one is a half tile. A tile of one step fills a slot of the shared-memory ring; so do the half
tiles of two steps.
"""

from dataclasses import dataclass
from enum import StrEnum

from soloist.megakernel.tile import (
    HALF_STEP_COLUMNS,
    HALF_TILE_ROWS,
    STEP_COLUMNS,
    TILE_ROWS,
    WARP_COLUMNS,
)
from soloist.megakernel.weight_format import WeightFormat


class RowOrder(StrEnum):
    """In which order the rows of a matrix are laid out for the kernel."""

    NATURAL = "natural"
    HEADS = "heads"  # for each KV head: its query heads, its key head, its value head
    PAIRED = "paired"  # 8 gate rows, the 8 up rows of the same neurons, and so on
    FINELY_PAIRED = "finely paired"  # the same by 4


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix in the plan.

    Attributes:
        name: of the `TensorSpec`, without 'layers.N.'.
        rows: as in the checkpoint.
        columns: as in the checkpoint.
        order: of the rows in the kernel.
        blocks: over how many blocks it is spread.
        format: how its values are stored.
        padded_units: units with padding, so that all blocks have as many; None: as rows say.
        ends_in_half: the last step has half as many columns, of which a warp has half as many. Of
            matrices in 16 bits, of which every block has one tile.
        skips_padding: columns of padding that a warp has in a step are stored but not streamed. Of
            quantised matrices, of which every block has one tile of one or two steps in a slot.
    """

    name: str
    rows: int
    columns: int
    order: RowOrder
    blocks: int
    format: WeightFormat
    padded_units: int | None = None
    ends_in_half: bool = False
    skips_padding: bool = False

    @property
    def unit_rows(self) -> int:
        """Rows in a unit."""
        return TILE_ROWS if self.order is RowOrder.PAIRED else HALF_TILE_ROWS

    @property
    def unit_neurons(self) -> int:
        """Neurons in a unit of gate_up."""
        return self.unit_rows // 2

    @property
    def units(self) -> int:
        """Units in the matrix; the last may hold rows of padding (a vocabulary that is odd)."""
        return self.padded_units or -(-self.rows // self.unit_rows)

    @property
    def steps(self) -> int:
        """Steps of 512 columns; the last may hold columns of padding."""
        return -(-self.columns // STEP_COLUMNS)

    @property
    def padded_columns(self) -> int:
        """Columns of all steps."""
        return self.steps * STEP_COLUMNS - (HALF_STEP_COLUMNS if self.ends_in_half else 0)

    @property
    def may_end_in_half(self) -> bool:
        """Whether half a step holds what is left over, and the kernel knows such a matrix."""
        is_tile = self.units * self.unit_half_tiles == 2 * self.blocks
        return (
            is_tile
            and self.format.is_plain
            and 0 < self.columns % STEP_COLUMNS <= HALF_STEP_COLUMNS
        )

    @property
    def may_skip_padding(self) -> bool:
        """Whether some warp has only padding of a step, and the kernel can leave that out."""
        is_tile = self.units * self.unit_half_tiles == 2 * self.blocks
        fits = not self.may_end_in_half and self.steps <= min(2, self.format.tiles)
        columns = WARP_COLUMNS * (2 if self.pairs_steps else 1)
        padding = self.steps * STEP_COLUMNS - self.columns
        return is_tile and fits and not self.format.super_block and padding >= columns

    @property
    def unit_half_tiles(self) -> int:
        """Half tiles of one unit and step."""
        return self.unit_rows // HALF_TILE_ROWS

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit, over all steps."""
        step_bytes = self.unit_half_tiles * self.format.half_tile_bytes
        return step_bytes * self.padded_columns // STEP_COLUMNS

    @property
    def shares_slots(self) -> bool:
        """Some block has an odd number of half tiles, of which those of two steps share a slot."""
        odd = self.units % self.blocks > 0 or self.max_units % 2 == 1
        return self.unit_half_tiles == 1 and odd

    @property
    def pairs_steps(self) -> bool:
        """A warp's columns of two steps are neighbours, and have one scale.

        So of integers in wide groups: sums of twice as many products become fp32 at once.
        """
        is_wide = self.format.scaled_columns >= 2 * WARP_COLUMNS
        return is_wide and self.steps % 2 == 0 and not self.shares_slots

    def first_unit(self, block: int) -> int:
        """Where a block's units begin; `first_unit(blocks)` is the end."""
        return block * self.units // self.blocks

    def num_units(self, block: int) -> int:
        """How many units a block owns."""
        return self.first_unit(block + 1) - self.first_unit(block)

    def owner(self, unit: int) -> int:
        """The block that owns a unit."""
        return ((unit + 1) * self.blocks - 1) // self.units

    def cuda(self) -> list[str]:
        """CUDA text of the same three: members of the matrix's struct, which need ptx/types.cuh."""
        return [
            f"static __device__ __forceinline__ u32 {function} {{ return {result}; }}"
            for function, result in (
                ("first_unit(u32 block)", f"block * {self.units}u / {self.blocks}u"),
                ("num_units(u32 block)", "first_unit(block + 1) - first_unit(block)"),
                ("owner(u32 unit)", f"((unit + 1) * {self.blocks}u - 1) / {self.units}u"),
            )
        ]

    def block_bytes(self, block: int) -> int:
        """Bytes that a block streams for this matrix."""
        return self.num_units(block) * self.unit_bytes

    @property
    def max_block_bytes(self) -> int:
        """Bytes that the busiest block streams for this matrix."""
        return self.max_units * self.unit_bytes

    @property
    def max_units(self) -> int:
        """Units of the busiest block."""
        return -(-self.units // self.blocks)

    @property
    def max_tiles(self) -> int:
        """Tiles of the busiest block; the last may be half a tile."""
        return -(-self.max_units * self.unit_half_tiles // 2)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole matrix."""
        return self.units * self.unit_bytes
