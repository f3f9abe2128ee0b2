"""How one matrix is cut into tiles and spread over the blocks of the grid. Pure integers.

A matrix [rows, columns] is cut along its rows into *units*, 8 rows each (16 for most gate_up, where
a unit is 8 gate rows and the 8 up rows that belong to them), and along its columns into *steps* of
512. A block owns consecutive units. Two units of 8 rows make a full tile for the m16n8k16 multiply;
an odd one is a half tile. A full tile of one step fills a *slot* of the shared-memory ring, 16 KB;
so do the half tiles of two steps.
"""

from dataclasses import dataclass
from enum import StrEnum

STEP_COLUMNS = 512
SLOT_ROWS = 8
TILE_ROWS = 16
SLOT_VALUES = SLOT_ROWS * STEP_COLUMNS


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
        padded_units: units with padding, so that all blocks have as many; None: as rows say.
    """

    name: str
    rows: int
    columns: int
    order: RowOrder
    blocks: int
    padded_units: int | None = None

    @property
    def unit_rows(self) -> int:
        """Rows in a unit."""
        return TILE_ROWS if self.order is RowOrder.PAIRED else SLOT_ROWS

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
    def unit_slots(self) -> int:
        """Slots of one unit and step."""
        return self.unit_rows // SLOT_ROWS

    @property
    def shares_slots(self) -> bool:
        """Some block has an odd number of 8 rows, of which those of two steps share a slot."""
        return self.unit_slots == 1 and (self.units % self.blocks > 0 or self.max_units % 2 == 1)

    def first_unit(self, block: int) -> int:
        """Where a block's units begin; `first_unit(blocks)` is the end."""
        return block * self.units // self.blocks

    def owner(self, unit: int) -> int:
        """The block that owns a unit."""
        return ((unit + 1) * self.blocks - 1) // self.units

    def block_bytes(self, block: int) -> int:
        """Bytes that a block streams for this matrix."""
        units = self.first_unit(block + 1) - self.first_unit(block)
        return units * self.unit_slots * self.steps * SLOT_VALUES * 2

    @property
    def max_block_bytes(self) -> int:
        """Bytes that the busiest block streams for this matrix."""
        return self.max_units * self.unit_slots * self.steps * SLOT_VALUES * 2

    @property
    def max_units(self) -> int:
        """Units of the busiest block."""
        return -(-self.units // self.blocks)

    @property
    def max_tiles(self) -> int:
        """Tiles of 16 rows of the busiest block."""
        return -(-self.max_units * self.unit_slots // 2)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole matrix."""
        return self.units * self.unit_slots * self.steps * SLOT_VALUES * 2
