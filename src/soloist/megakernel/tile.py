"""The pieces into which weights are cut, whatever their format. Pure integers.

A *tile* is 16 rows of one step of columns, as m16n8k16 takes them; a *half tile* 8 rows. A *slot*
of the shared-memory ring holds a tile, or the half tiles of two steps.
"""

STEP_COLUMNS = 512
HALF_TILE_ROWS = 8
TILE_ROWS = 2 * HALF_TILE_ROWS
HALF_TILE_VALUES = HALF_TILE_ROWS * STEP_COLUMNS
# Room for a tile of 16-bit values; other formats take less of it.
SLOT_BYTES = 2 * HALF_TILE_VALUES * 2
