"""The pieces into which weights are cut, and where a piece has which value. Pure integers.

A *tile* is 16 rows of one step of columns, as m16n8k16 takes them; a *half tile* 8 rows. A *slot*
of the shared-memory ring holds a tile, or the half tiles of two steps.

Places are digits of a row and of a column, each named by a letter: h half of a tile's rows, g row
in the half; w warp, p half of its 64 columns, q quarter of a quad's 32, m multiply, r register,
e element.
"""

STEP_COLUMNS = 512
HALF_TILE_ROWS = 8
TILE_ROWS = 2 * HALF_TILE_ROWS
HALF_TILE_VALUES = HALF_TILE_ROWS * STEP_COLUMNS
# Room for a tile of 16-bit values; other formats take less of it.
SLOT_BYTES = 2 * HALF_TILE_VALUES * 2

# Digits of a column of a step, and of a row of a tile: how many values each has, slowest first.
COLUMN_DIGITS = {"w": 8, "p": 2, "q": 4, "m": 2, "r": 2, "e": 2}
# Columns of a step that a warp has.
WARP_COLUMNS = STEP_COLUMNS // COLUMN_DIGITS["w"]
# Columns of half a step: of a warp's 64 columns the first half, which is the first half of a tile.
HALF_STEP_COLUMNS = STEP_COLUMNS // COLUMN_DIGITS["p"]
ROW_DIGITS = {"h": 2, "g": HALF_TILE_ROWS}
# In which order values of 16 bits lie, slowest digit first. A lane's 16 bytes are one multiply's.
TILE_ORDER = "pwmgqrhe"
HALF_TILE_ORDER = "wpgqmre"


def tile_places() -> list[str]:
    """CUDA text: where a tile and a half tile have a row and a column of a step, in values.

    The functions need ptx/types.cuh.
    """
    return [_place("tile_place", TILE_ORDER), _place("half_tile_place", HALF_TILE_ORDER)]


def _place(name: str, order: str) -> str:
    digits = {"h": (2, "half"), "g": (HALF_TILE_ROWS, "row")} | _digits("column", COLUMN_DIGITS)
    terms, stride = [], 1
    for digit in reversed(order):
        size, text = digits[digit]
        terms.append(f"{text} * {stride}" if stride > 1 else text)
        stride *= size
    given = "u32 half, u32 row" if "h" in order else "u32 row"
    return (
        f"__device__ __forceinline__ constexpr u32 {name}({given}, u32 column) "
        f"{{ return {' + '.join(reversed(terms))}; }}"
    )


def _digits(coordinate: str, sizes: dict[str, int]) -> dict[str, tuple[int, str]]:
    """How many values a digit has, and the digit as an expression."""
    digits, below = {}, 1
    for name, size in reversed(sizes.items()):
        part = f"{coordinate} % {below * size}"
        digits[name] = (size, f"{part} / {below}" if below > 1 else part)
        below *= size
    return digits
