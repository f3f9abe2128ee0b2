"""Where a packed matrix has the rows that a warp multiplies at once. Pure integers.

`mma` and `wgmma` take 16 rows of weights from a warp's registers: a *fragment*. Its two halves of 8
rows are a tile of the kernel's order, or two half tiles that may belong to different blocks
(`weights/packing.py`). Along K a fragment is read in *chunks* of 64 columns, those that one warp of
the decode kernel has of a step. A chunk's columns are neighbours in the matrix.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.partition import RowOrder
from soloist.megakernel.shape import ModelShape
from soloist.megakernel.tile import COLUMN_DIGITS, HALF_TILE_ROWS, STEP_COLUMNS, WARP_COLUMNS

CHUNK_COLUMNS = WARP_COLUMNS
STEP_CHUNKS = COLUMN_DIGITS["w"]
# Columns whose 4-byte words change places on their way to shared memory, see `arranged_columns`.
ARRANGED_COLUMNS = 32
# Most fragments of a block: two groups of four warps have one each.
BLOCK_FRAGMENTS = 8
GROUP_FRAGMENTS = 4


class HalfKind(IntEnum):
    """What 8 rows are stored in."""

    NONE = 0
    TILE = 1  # half of a tile: its other half is the fragment's other half
    ALONE = 2  # a half tile


# `Half` of cuda/tile/fragments.cuh.
_WORDS = struct.Struct("<QIIIiII")
HALF_BYTES = _WORDS.size


@dataclass(frozen=True, slots=True)
class Half:
    """8 rows of a matrix.

    Attributes:
        kind: in what they are stored.
        at: bytes from where the first block has the matrix to their tile or half tile in the first
            step.
        pair_bytes: from a step to the next but one.
        step_bytes: from an even step to the next.
        last_less: bytes by which the last step lies earlier, where steps are odd in number.
        out: which values of a result's row they are, the first of them; neurons of SwiGLU.
        is_upper: they are the upper half of their tile.
    """

    kind: HalfKind
    at: int = 0
    pair_bytes: int = 0
    step_bytes: int = 0
    last_less: int = 0
    out: int = 0
    is_upper: bool = False

    def in_step(self, step: int, steps: int) -> int:
        """Bytes to the tile or half tile in a step, from where `at` counts."""
        less = self.last_less if steps % 2 and step == steps - 1 else 0
        return self.at + step // 2 * self.pair_bytes + step % 2 * self.step_bytes - less

    @property
    def words(self) -> bytes:
        """As the kernel reads it."""
        return _WORDS.pack(
            self.at, self.pair_bytes, self.step_bytes, self.last_less,
            self.out, self.kind, self.is_upper,
        )  # fmt: skip


_NOTHING = Half(HalfKind.NONE)
Fragment = tuple[Half, Half]


def chunk_place(chunk: int, *, pairs_steps: bool) -> tuple[int, int]:
    """(step, warp of the decode kernel) of the 64 columns from 64 · `chunk` on."""
    if not pairs_steps:
        return chunk // STEP_CHUNKS, chunk % STEP_CHUNKS
    pair, within = divmod(chunk, 2 * STEP_CHUNKS)
    return 2 * pair + within % 2, within // 2


def arranged_columns(columns: int) -> list[int]:
    """Which column each place of a row of activations has, where fragments meet them.

    A lane's registers hold 8 neighbouring columns, and for `wgmma` 2 columns of each 16: so the
    words of 32 columns, four for each lane of a quad, are transposed.
    """
    places = range(-(-columns // ARRANGED_COLUMNS) * ARRANGED_COLUMNS)
    return [arranged_column(place) for place in places]


def arranged_column(place: int) -> int:
    """The column of one place."""
    first, within = place // ARRANGED_COLUMNS * ARRANGED_COLUMNS, place % ARRANGED_COLUMNS
    word, value = within // 2, within % 2
    return first + word % 4 * 8 + word // 4 * 2 + value


def eight_bit_columns(columns: int) -> list[int]:
    """The same of activations in 8 bits, of which `wgmma` has 4 neighbouring columns a word."""
    return [eight_bit_column(place) for place in range(columns)]


def eight_bit_column(place: int) -> int:
    """The column of one place, in 8 bits."""
    first, within = place // ARRANGED_COLUMNS * ARRANGED_COLUMNS, place % ARRANGED_COLUMNS
    word, value = within // 4, within % 4
    return first + word % 4 * 8 + word // 4 * 4 + value


def has_fragments(operation: Operation) -> bool:
    """Whether all 8 rows of a half are neighbours in the matrix."""
    return operation.matrix.order is not RowOrder.FINELY_PAIRED


def fragments(
    shape: ModelShape, operation: Operation, block_bytes: int, *, gated: bool, first: int = 0
) -> tuple[Fragment, ...]:
    """All fragments of a matrix, in the order of its rows.

    Args:
        shape: of the model.
        operation: the multiply that the decode kernel has of it.
        block_bytes: from one block's weights to the next's.
        gated: of gate_up, whose results are one value for a gate row and an up row.
        first: row from which on results are wanted.
    """
    assert has_fragments(operation) or not gated, "8 neurons of gate and of up"
    return _paired(_groups(shape, operation, block_bytes.__mul__, gated=gated), operation, first)


def expert_fragments(
    shape: ModelShape, operation: Operation, *, gated: bool
) -> tuple[Fragment, ...]:
    """The same of one expert's matrix, where one block's rows follow those of another."""
    matrix = operation.matrix

    def block_at(block: int) -> int:
        return matrix.first_unit(block) * matrix.unit_bytes

    return _paired(_groups(shape, operation, block_at, gated=gated), operation, 0)


def _paired(groups: Iterable[list[Half]], operation: Operation, first: int) -> tuple[Fragment, ...]:
    """Two halves each; those that are left over meet, whichever blocks have them."""
    found: list[Fragment] = []
    single: Half | None = None
    for halves in groups:
        pairs = zip(halves[::2], halves[1::2], strict=False)
        found += [p for p in pairs if any(_is_wanted(operation, half, first) for half in p)]
        if len(halves) % 2 == 0 or not _is_wanted(operation, halves[-1], first):
            continue
        if single is None:
            single = halves[-1]
        else:
            found.append((single, halves[-1]))
            single = None
    if single is not None:
        found.append((single, _NOTHING))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RowCut:
    """How many fragments tiles of rows have.

    Attributes:
        each: of a tile, the last one may have fewer.
        whole: how many tiles have as many, before others; all, where `rest` is 0.
        rest: of each tile behind them, fewer: so the last round of tiles is over sooner.
    """

    each: int
    whole: int = 0
    rest: int = 0

    def tiles(self, found: Sequence[Fragment]) -> list[Sequence[Fragment]]:
        """The fragments of each tile."""
        stop = self.whole * self.each if self.rest else len(found)
        wide = [found[at : min(at + self.each, stop)] for at in range(0, stop, self.each)]
        behind = range(stop, len(found), max(self.rest, 1))
        return wide + [found[at : at + self.rest] for at in behind]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How fragments became tiles of rows.

    Attributes:
        each: fragments of the widest tile.
        count: of tiles.
        results: values of a row of results.
    """

    each: int
    count: int
    results: int


def tiled(found: Sequence[Fragment], cut: RowCut, results: int) -> tuple[Tiling, bytes]:
    """Tiles of fragments, and their table: BLOCK_FRAGMENTS fragments a tile, of two halves each."""
    nothing = (_NOTHING, _NOTHING)
    tiles = cut.tiles(found)
    filled = (
        half
        for tile in tiles
        for fragment in (*tile, *[nothing] * (BLOCK_FRAGMENTS - len(tile)))
        for half in fragment
    )
    return Tiling(cut.each, len(tiles), results), halves_table(filled)


def halves_table(halves: Iterable[Half]) -> bytes:
    """As kernels read them."""
    return b"".join(half.words for half in halves)


# Of an SM in a cycle: bytes of weights from memory, bytes of weights and activations from the L2,
# and tokens by which 64 rows and 16 columns are multiplied. Cycles that go by between two tiles,
# that adding parts takes, and more for each of them.
_MEMORY_BYTES, _L2_BYTES, _TOKENS, _TILE, _ADDING, _PART = 20, 47, 2, 2000, 7000, 2000
_STEP = 16  # columns of a product
# Cycles that a warp takes for a step beside its products, and more for each token of a tile; and
# how many times as many where there are two groups.
_WARP, _WARP_TOKEN, _WARP_BESIDE = 60, 0.6, 1.3


@dataclass(frozen=True, slots=True)
class Load:
    """What a product is, for `best_shares`.

    Attributes:
        count: of its fragments.
        columns: of its matrix.
        value_bits: of a weight.
        width: tokens of a tile.
        token_tiles: how many of these.
        eight_bits: of activations, by which products take half.
    """

    count: int
    columns: int
    value_bits: int
    width: int
    token_tiles: int
    eight_bits: bool = False


class Shares(NamedTuple):
    """Of a product: how its rows are cut, parts of its columns, cycles of the busiest SM."""

    rows: RowCut
    parts: int
    cycles: float


def best_shares(
    load: Load, num_sms: int, *, parts: Sequence[int] = (1,), multiple: int = 1
) -> Shares:
    """The shares with which SMs are done first.

    Args:
        load: what is to be done.
        num_sms: of the GPU.
        parts: that are possible.
        multiple: what fragments of a tile are a multiple of.
    """
    halves = 2 if load.eight_bits else 1
    numbers = [each for each in range(BLOCK_FRAGMENTS, 0, -1) if each % multiple == 0]

    def of_tile(each: int, parts: int) -> float:
        products = -(-each // GROUP_FRAGMENTS) * load.width / _TOKENS / halves
        fragment_bytes = 2 * HALF_TILE_ROWS * _STEP * load.value_bits / 8
        weights, tokens = each * fragment_bytes, load.width * _STEP * 2 / halves
        read = max(weights / load.token_tiles / _MEMORY_BYTES, (weights + tokens) / _L2_BYTES)
        steps = load.columns / _STEP / parts
        beside = _WARP_BESIDE if each > GROUP_FRAGMENTS else 1
        warp = (_WARP + _WARP_TOKEN * load.width) * beside / halves
        return steps * max(products, read, warp) + _TILE

    def found(each: int, parts: int) -> Iterator[Shares]:
        """With tiles that are alike, and with narrower ones in the last round."""
        of_rows = load.token_tiles * parts  # tiles of the same rows
        rounds, left = divmod(-(-load.count // each) * of_rows, num_sms)
        adding = _ADDING + parts * _PART if parts > 1 else 0
        full = rounds * of_tile(each, parts) + adding
        yield Shares(RowCut(each), parts, full + (of_tile(each, parts) if left else 0))
        whole = rounds * num_sms // of_rows
        for rest in numbers:
            tiles = whole + -(-(load.count - whole * each) // rest)
            if whole and rest < each and tiles * of_rows <= (rounds + 1) * num_sms:
                yield Shares(RowCut(each, whole, rest), parts, full + of_tile(rest, parts))

    every = (shares for n in parts for each in numbers for shares in found(each, n))
    return min(every, key=lambda shares: shares.cycles)


def half_tiles_of_rows(shape: ModelShape, operation: Operation, block_bytes: int) -> list[Half]:
    """The halves of a matrix whose rows are in their natural order, by row / 8."""
    groups = _groups(shape, operation, block_bytes.__mul__, gated=False)
    return [half for halves in groups for half in halves]


def _is_wanted(operation: Operation, half: Half, first: int) -> bool:
    return first < half.out + HALF_TILE_ROWS and half.out < operation.matrix.rows


def _groups(
    shape: ModelShape, operation: Operation, block_at: Callable[[int], int], *, gated: bool
) -> Iterator[list[Half]]:
    """Halves of each group of tiles of each block, which has the matrix from `block_at` on."""
    matrix, most = operation.matrix, 2 * operation.group_tiles
    half_bytes, steps = matrix.format.half_tile_bytes, matrix.steps
    for block in range(matrix.blocks):
        first = matrix.first_unit(block) * matrix.unit_half_tiles
        end = matrix.first_unit(block + 1) * matrix.unit_half_tiles
        for start in range(first, end, most):
            count = min(most, end - start)
            at = block_at(block) + (start - first) * steps * half_bytes
            yield [
                _half(operation, i, count, at, _result(shape, operation, start + i, gated=gated))
                for i in range(count)
            ]


def _half(operation: Operation, number: int, count: int, at: int, out: int) -> Half:
    """Half `number` of a group of `count`, which begins at `at`."""
    matrix = operation.matrix
    half_bytes, full = matrix.format.half_tile_bytes, count // 2
    pair_bytes, tiles_bytes = 2 * count * half_bytes, 2 * full * half_bytes
    if matrix.pairs_steps:
        assert count % 2 == 0, "whole tiles"
        own = number // 2 * 4 * half_bytes
        return Half(HalfKind.TILE, at + own, pair_bytes, 2 * half_bytes, 0, out, number % 2 == 1)
    if number < 2 * full:
        own = number // 2 * 2 * half_bytes
        return Half(HalfKind.TILE, at + own, pair_bytes, tiles_bytes, 0, out, number % 2 == 1)
    # Behind the tiles of two steps, or of one where the last one has no other.
    own = 2 * tiles_bytes
    return Half(HalfKind.ALONE, at + own, pair_bytes, half_bytes, tiles_bytes, out)


def _result(shape: ModelShape, operation: Operation, half_tile: int, *, gated: bool) -> int:
    """Where the results of a half tile begin in a row of them."""
    matrix = operation.matrix
    row = half_tile * HALF_TILE_ROWS
    if matrix.order is RowOrder.PAIRED:
        unit, is_up = divmod(half_tile, 2)
        neurons = matrix.rows // 2
        return unit * HALF_TILE_ROWS + (neurons if is_up and not gated else 0)
    if matrix.order is RowOrder.FINELY_PAIRED:
        return row // 2  # and as many rows of up
    if matrix.order is not RowOrder.HEADS:
        return row
    head, within = divmod(row, shape.head_dim)
    kv, place = divmod(head, shape.group + 2)
    heads = {
        shape.group: shape.query_heads + kv,
        shape.group + 1: shape.query_heads + shape.kv_heads + kv,
    }
    return heads.get(place, kv * shape.group + place) * shape.head_dim + within


def chunk_bytes(value_bits: int) -> int:
    """Bytes of 8 rows in a chunk."""
    return HALF_TILE_ROWS * CHUNK_COLUMNS * value_bits // 8


def num_chunks(columns: int) -> int:
    """Chunks of a row; the last may hold columns of padding."""
    return -(-columns // CHUNK_COLUMNS)


assert STEP_COLUMNS == STEP_CHUNKS * CHUNK_COLUMNS, "a step is a chunk for each warp"
