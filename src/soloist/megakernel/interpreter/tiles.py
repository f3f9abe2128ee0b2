"""Packed weights back in rows and columns: the places of values and scales in a block's slots.

Places are written down here once more, from what lanes read (cuda/tile/formats.cuh). Lane (g, q) of
a warp has rows g and g + 8 of a tile and the columns 8q … 8q + 7 of 32; of a half tile row g.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.tile import (
    HALF_STEP_COLUMNS,
    HALF_TILE_ROWS,
    HALF_TILE_VALUES,
    STEP_COLUMNS,
)
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.dtype import Dtype
from soloist.model.quantized import OFFSET_COLUMNS, Codes

_SCALE_TYPES = {
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
}


@dataclass(frozen=True, slots=True)
class Numbers:
    """A block's part of a matrix, padding included.

    Attributes:
        values: [rows, columns] that are multiplied: numbers, or codes less their zeros.
        scales: [rows, groups of columns] by which sums are multiplied; None where there are none.
        offsets: [rows, groups of 32 columns], where there are any: integers of super-blocks, or
            numbers that are added.
        super_scales: [rows, super-blocks], where scales are integers.
        super_offsets: likewise, where there are offsets.
    """

    values: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    super_scales: Tensor | None = None
    super_offsets: Tensor | None = None


def unpacked(packed: Tensor, op: Operation, rows: int, half: torch.dtype) -> Numbers:
    """A block's part of a matrix.

    Args:
        packed: the block's bytes, or values of an image without rounding.
        op: whose matrix it is.
        rows: that the block owns.
        half: what 16-bit values are.
    """
    if op.matrix.format.super_block:
        return _of_super_blocks(packed, op, rows)
    if op.matrix.pairs_steps:
        return _of_paired_steps(packed, op, rows)
    if op.matrix.ends_in_half:
        return _ending_in_half(packed, op, half)
    stored, steps, at = op.matrix.format, op.matrix.steps, 0
    values = torch.full((rows, steps, STEP_COLUMNS), torch.nan)
    scales = torch.full((rows, steps, stored.step_groups), torch.nan)
    offsets = torch.full_like(scales, torch.nan)
    for step, tile in _slots(op, rows // HALF_TILE_ROWS):
        end = at + len(tile) * stored.half_tile_bytes // bytes_of_each(packed)
        own = slice(tile.start * HALF_TILE_ROWS, tile.stop * HALF_TILE_ROWS)
        slot = packed[at:end]
        if slot.dtype is not torch.uint8:
            values[own, step] = slot.float()[_places_16(len(tile))]
        elif stored.meaning is None:
            values[own, step] = slot.view(half)[_places_16(len(tile))].float()
        else:
            codes, shared, added = _quantised(slot, stored, len(tile))
            values[own, step], scales[own, step] = codes, shared
            if added is not None:
                offsets[own, step] = added
        at = end
    assert at == len(packed), f"{op.matrix.name}: slots"
    if stored.is_plain:
        return Numbers(values.flatten(1))
    added = offsets.flatten(1) if stored.offset_bits else None
    return Numbers(values.flatten(1), scales.flatten(1), added)


def _ending_in_half(packed: Tensor, op: Operation, half: torch.dtype) -> Numbers:
    """The same of one tile in 16 bits whose last step has the first half of each warp's columns."""
    values = packed.view(half).float() if packed.dtype is torch.uint8 else packed.float()
    places, whole = _places_16(2), 2 * HALF_TILE_VALUES
    k = torch.arange(HALF_STEP_COLUMNS)
    last = places[:, k // 32 * 64 + k % 32]
    steps = [values[step * whole :][places] for step in range(op.matrix.steps - 1)]
    assert len(values) == len(steps) * whole + last.max() + 1, f"{op.matrix.name}: slots"
    return Numbers(torch.cat([*steps, values[len(steps) * whole :][last]], dim=1))


def _of_paired_steps(packed: Tensor, op: Operation, rows: int) -> Numbers:
    """The same where two steps are a pair, whose tiles of the same rows follow each other.

    A warp's columns of both steps are neighbours in the matrix. The first tile has the scales and
    zeros of rows g: [groups of a step][g][step]; the second those of rows g + 8.
    """
    stored = op.matrix.format
    tile_bytes, groups = 2 * stored.half_tile_bytes, 2 * stored.step_groups
    values = torch.full((rows, op.matrix.steps * STEP_COLUMNS), torch.nan)
    scales = torch.full((rows, op.matrix.steps * stored.step_groups), torch.nan)
    column, most, at = torch.arange(STEP_COLUMNS), 2 * op.group_tiles * HALF_TILE_ROWS, 0
    for start in range(0, rows, most):
        for pair in range(op.matrix.steps // 2):
            of_groups = slice(pair * groups, pair * groups + groups)
            for first in range(start, min(start + most, rows), 2 * HALF_TILE_ROWS):
                both = packed[at : at + 2 * tile_bytes].split(tile_bytes)
                zeros = []
                for half, tile in enumerate(both):
                    own = slice(first + half * HALF_TILE_ROWS, first + (half + 1) * HALF_TILE_ROWS)
                    scale, zero = _shared_of_half(tile, stored)
                    scales[own, of_groups] = scale
                    zeros.append(zero.repeat_interleave(stored.group, 1))
                own, zero = slice(first, first + 2 * HALF_TILE_ROWS), torch.cat(zeros)
                for step, tile in enumerate(both):
                    place = pair * 2 * STEP_COLUMNS + column // 64 * 128 + step * 64 + column % 64
                    codes = _codes(tile[: 2 * stored.half_tile_values_bytes], stored)
                    values[own, place] = codes - zero[:, place % (2 * STEP_COLUMNS)]
                at += 2 * tile_bytes
    assert at == len(packed), f"{op.matrix.name}: slots"
    return Numbers(values, scales)


def _codes(codes: Tensor, stored: WeightFormat) -> Tensor:
    """Integers [16, 512] of a tile."""
    assert stored.meaning is not None, "they mean something"
    return (_int4 if stored.meaning.codes is Codes.INT4 else _int8)(codes, 2).float()


def _shared_of_half(tile: Tensor, stored: WeightFormat) -> tuple[Tensor, Tensor]:
    """Scales and zeros [8, groups of two steps] that lie in one tile of a pair."""
    assert stored.meaning is not None, "scales mean something"
    begin = 2 * stored.half_tile_values_bytes
    end = begin + 2 * stored.half_tile_scales_bytes
    scales = tile[begin:end].contiguous().view(_scale_type(stored)).float()
    is_int4 = stored.meaning.codes is Codes.INT4
    zeros = torch.full_like(scales, 8 if is_int4 else 0)
    if stored.zero_bits:
        found = tile[end : end + 2 * stored.half_tile_zeros_bytes].contiguous()
        zeros = found.view(torch.uint8 if is_int4 else torch.int8).float()
    # [group of a step][g][step] → [g, groups of both steps]
    shape = (stored.step_groups, HALF_TILE_ROWS, 2)
    scales, zeros = (x.view(shape).permute(1, 2, 0).flatten(1) for x in (scales, zeros))
    return scales, zeros


def _of_super_blocks(packed: Tensor, op: Operation, rows: int) -> Numbers:
    """The same of super-blocks.

    Scales lie as [warp][g][group of the warp][rows g and g + 8], offsets with rows before groups,
    what super-blocks have as [super-block][g][rows g and g + 8]. Where tiles have offsets, each
    [warp][g] and each row of a super-block has them behind the scales. Of a pair of steps the first
    tile has the latter for rows g in both steps, the second one for rows g + 8:
    [super-block of a step][g][step].
    """
    stored, steps = op.matrix.format, op.matrix.steps
    has_offsets, at = stored.offset_bits > 0, 0
    columns = steps * STEP_COLUMNS

    def empty(each: int) -> Tensor:
        return torch.full((rows, columns // each), torch.nan)

    values, scales = empty(1), empty(stored.group)
    offsets, supers = empty(OFFSET_COLUMNS), [empty(stored.super_block) for _ in range(2)]
    sizes = [size for size in stored.half_tile_parts_bytes if size]
    for step, tile in _slots_of(op, rows // HALF_TILE_ROWS):
        halves, own = len(tile), slice(tile.start * HALF_TILE_ROWS, tile.stop * HALF_TILE_ROWS)
        end = at + halves * stored.half_tile_bytes
        parts = _parts_of(packed[at:end], [halves * size for size in sizes], halves)
        column = _columns_of(op, step)
        values[own, column] = _super_codes(parts[0], stored, halves).float()
        for found, part, signed in ((scales, parts[1], True), (offsets, parts[2], False)):
            if found is offsets and not has_offsets:
                continue
            each = columns // found.shape[1]
            whole = part.view(torch.int8) if signed else part
            if found is scales:
                by_warp = whole.view(8, HALF_TILE_ROWS, 64 // each, halves).permute(3, 1, 0, 2)
            else:
                by_warp = whole.view(8, HALF_TILE_ROWS, halves, 64 // each).permute(2, 1, 0, 3)
            found[own, column[::each] // each] = by_warp.flatten(0, 1).flatten(1).float()
        for found, part in zip(supers, parts[2 + has_offsets :], strict=False):
            halfs = part.contiguous().view(torch.float16).float()
            blocks = STEP_COLUMNS // stored.super_block
            by_block = halfs.view(blocks, HALF_TILE_ROWS, -1).permute(2, 1, 0)
            if not op.matrix.pairs_steps:
                first = step * blocks
                found[own, first : first + blocks] = by_block.flatten(0, 1)
                continue
            of_rows = slice(own.start + step % 2 * 8, own.start + step % 2 * 8 + 8)
            for which, of_step in enumerate(by_block):
                first = (step // 2 * 2 + which) * blocks
                found[of_rows, first : first + blocks] = of_step
        at = end
    assert at == len(packed), f"{op.matrix.name}: slots"
    if not has_offsets:
        return Numbers(values, scales, None, supers[0])
    return Numbers(values, scales, offsets, *supers)


def _slots_of(op: Operation, half_tiles: int) -> Iterator[tuple[int, range]]:
    """`_slots`, also where steps are paired: then tiles of the same rows follow each other."""
    if not op.matrix.pairs_steps:
        yield from _slots(op, half_tiles)
        return
    most = 2 * op.group_tiles
    for start in range(0, half_tiles, most):
        for pair in range(0, op.matrix.steps, 2):
            for first in range(start, min(start + most, half_tiles), 2):
                yield from ((pair + step, range(first, first + 2)) for step in range(2))


def _columns_of(op: Operation, step: int) -> Tensor:
    """The matrix's columns [512] that a step has."""
    k = torch.arange(STEP_COLUMNS)
    if not op.matrix.pairs_steps:
        return step * STEP_COLUMNS + k
    return step // 2 * 2 * STEP_COLUMNS + k // 64 * 128 + step % 2 * 64 + k % 64


def _parts_of(packed: Tensor, sizes: list[int], half_tiles: int) -> list[Tensor]:
    """Each part of a tile's bytes, codes and scales first; parts that lie together come apart."""
    parts = list(packed.split(sizes))
    if half_tiles == 2 and len(parts) == 5:
        return [parts[0], *_parted(64, *parts[1:3]), *_parted(32, *parts[3:5])]
    return parts


def _parted(places: int, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of which each of so many places has its bytes together."""
    first, both = len(parts[0]) // places, torch.cat(parts).view(places, -1)
    return both[:, :first].flatten(), both[:, first:].flatten()


def _super_codes(codes: Tensor, stored: WeightFormat, half_tiles: int) -> Tensor:
    """Integers [8 or 16, 512]. Of six bits a lane has three words for four of a multiply.

    A byte has a value above two bits of one in the fourth word: the first word has the upper two.
    """
    if stored.value_bits == 4:
        return _int4(codes, half_tiles)
    d = _digits(half_tiles)
    word = d.multiply * 2 + d.half if half_tiles == 2 else d.part * 2 + d.multiply
    four, first = d.part if half_tiles == 2 else 0, 8 * half_tiles

    def byte(of_word: Tensor | int) -> Tensor:
        at = (four * 3 + of_word) * 4 + d.of_four
        behind = 256 * first + d.lane * (first // 2) + at - first
        return codes[torch.where(at < first, d.lane * first + at, behind)].int()

    fourth = (byte(0) & 3) << 4 | (byte(1) & 3) << 2 | byte(2) & 3
    whole = torch.where(word == 3, fourth, byte(word.clamp(max=2)) >> 2)
    return whole - 64 * (whole >= 32)


def bytes_of_each(packed: Tensor) -> int:
    """What an element stands for: an image without rounding has values for 16 bits."""
    return 1 if packed.dtype is torch.uint8 else 2


def _slots(op: Operation, half_tiles: int) -> Iterator[tuple[int, range]]:
    """(step, half tiles) as the image has them: by group of tiles, two steps, tile.

    An odd half tile comes after the tiles of two steps.
    """
    steps, most = range(op.matrix.steps), 2 * op.group_tiles
    for start in range(0, half_tiles, most):
        group = range(start, min(start + most, half_tiles))
        tiles = [group[i : i + 2] for i in range(0, len(group), 2)]
        for pair in (steps[i : i + 2] for i in range(0, len(steps), 2)):
            for size in (2, 1):
                yield from ((step, tile) for step in pair for tile in tiles if len(tile) == size)


@dataclass(frozen=True, slots=True)
class _Digits:
    """Where values of a tile or half tile lie: digits of rows [rows, 1] and of columns [512]."""

    lane: Tensor  # of all of a block's 256
    half: Tensor  # of a tile's rows
    part: Tensor  # of the 64 columns of a warp
    multiply: Tensor
    register: Tensor
    column: Tensor

    @property
    def of_four(self) -> Tensor:
        """Which of four neighbouring columns."""
        return self.register * 2 + self.column


@cache
def _digits(half_tiles: int) -> _Digits:
    """Those of a half tile (1) or a tile (2)."""
    row, k = torch.arange(half_tiles * HALF_TILE_ROWS)[:, None], torch.arange(STEP_COLUMNS)
    lane = k // 64 * 32 + row % 8 * 4 + k % 32 // 8
    return _Digits(lane, row // 8, k % 64 // 32, k % 8 // 4, k % 4 // 2, k % 2)


@cache
def _places_16(half_tiles: int) -> Tensor:
    """[8 or 16, 512]: which of a slot's 16-bit values is which of a tile's.

    A lane reads 16 bytes for each multiply. Of a tile these are registers 0 … 3 of m16n8k16's first
    operand: rows g and g + 8 in turn, times the two activations of the lane that come with the
    first pair, then the second. Of a half tile they are consecutive columns.
    """
    row, k = torch.arange(half_tiles * HALF_TILE_ROWS)[:, None], torch.arange(STEP_COLUMNS)
    warp, half, quad, multiply = k // 64, k % 64 // 32, k % 32 // 8, k % 8 // 4
    if half_tiles == 1:
        return warp * 512 + half * 256 + (row * 4 + quad) * 8 + k % 8
    lane, register = row % 8 * 4 + quad, k % 4 // 2 * 2 + row // 8
    return half * HALF_TILE_VALUES + warp * 512 + multiply * 256 + lane * 8 + register * 2 + k % 2


def _quantised(
    slot: Tensor, stored: WeightFormat, half_tiles: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values [8 or 16, 512], scales [8 or 16, groups] and any offsets of a tile's bytes."""
    assert stored.meaning is not None, "scales mean something"
    kind, ends, end = stored.meaning.codes, [], 0
    for size in (
        stored.half_tile_values_bytes,
        stored.half_tile_scales_bytes,
        stored.half_tile_zeros_bytes + stored.half_tile_offsets_bytes,
    ):
        end += half_tiles * size
        ends.append(end)
    codes, scales, zeros = slot[: ends[0]], slot[ends[0] : ends[1]], slot[ends[1] : ends[2]]
    shared = _scale_type(stored)
    by_row = _of_rows(scales.contiguous().view(shared).float(), stored, half_tiles)
    if kind is Codes.FP8:
        return _fp8(codes, half_tiles), by_row, None
    values = (_int4 if kind is Codes.INT4 else _int8)(codes, half_tiles).float()
    if stored.offset_bits:
        added = zeros.contiguous().view(shared).float()
        return values, by_row, _of_rows(added, stored, half_tiles)
    if not stored.zero_bits:
        return values - (8 if kind is Codes.INT4 else 0), by_row, None
    signed = zeros.contiguous().view(torch.uint8 if kind is Codes.INT4 else torch.int8)
    zero = _of_rows(signed.float(), stored, half_tiles, rows_each=1)
    return values - zero.repeat_interleave(stored.group, 1), by_row, None


def _scale_type(stored: WeightFormat) -> torch.dtype:
    """Scales of FP8 always are in fp32, others as in the file."""
    assert stored.meaning is not None, "it has scales"
    is_fp8 = stored.meaning.codes is Codes.FP8
    return torch.float32 if is_fp8 else _SCALE_TYPES[stored.meaning.scale_dtype]


def _of_rows(
    shared: Tensor, stored: WeightFormat, half_tiles: int, rows_each: int | None = None
) -> Tensor:
    """[group][row g][rows g and g + 8] → [8 or 16, groups]; some rows may share one."""
    each = rows_each or stored.scale_rows
    by_group = shared.view(stored.step_groups, HALF_TILE_ROWS // each, half_tiles)
    return by_group.repeat_interleave(each, 1).permute(2, 1, 0).flatten(0, 1)


def _int4(codes: Tensor, half_tiles: int) -> Tensor:
    """A byte has two values: of rows g and g + 8, or of a half tile 32 columns apart."""
    d = _digits(half_tiles)
    if half_tiles == 2:
        byte, nibble = d.lane * 16 + d.part * 8 + d.multiply * 4 + d.of_four, d.half
    else:
        byte, nibble = d.lane * 8 + d.multiply * 4 + d.of_four, d.part
    return codes[byte] >> 4 * nibble & 15


def _int8(codes: Tensor, half_tiles: int) -> Tensor:
    """A lane's 16 bytes are the registers of m16n8k32; of a half tile those of both parts."""
    d = _digits(half_tiles)
    if half_tiles == 2:
        register = d.multiply * 2 + d.half
        byte = d.part * HALF_TILE_VALUES + d.lane * 16 + register * 4 + d.of_four
    else:
        byte = d.lane * 16 + d.part * 8 + d.multiply * 4 + d.of_four
    return codes.contiguous().view(torch.int8)[byte]


def _fp8(codes: Tensor, half_tiles: int) -> Tensor:
    """A word has the pairs of two registers: rows g and g + 8, or four columns of row g."""
    d = _digits(half_tiles)
    if half_tiles == 2:
        at, pair = d.lane * 4 + d.multiply * 2 + d.register, d.half
        at = d.part * (HALF_TILE_VALUES // 4) + at
    else:
        at, pair = d.lane * 4 + d.part * 2 + d.multiply, d.register
    byte = codes[at * 4 + pair * 2 + d.column]
    return byte.contiguous().view(torch.float8_e4m3fn).float()
