"""Packed weights back in rows and columns: the places of values and scales in a block's slots."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS
from soloist.megakernel.weight_format import WeightFormat


def unpacked(packed: Tensor, op: Operation, rows: int, half: torch.dtype) -> Tensor:
    """[rows, columns] of a block's part of a matrix, padding included.

    Args:
        packed: the block's bytes, or values of an image without rounding.
        op: whose matrix it is.
        rows: that the block owns.
        half: what 16-bit values are.
    """
    stored, at = op.matrix.format, 0
    out = torch.full((rows, op.matrix.steps * STEP_COLUMNS), torch.nan)
    for step, tile in _slots(op, rows // HALF_TILE_ROWS):
        end = at + len(tile) * stored.half_tile_bytes // bytes_of_each(packed)
        row, column = tile.start * HALF_TILE_ROWS, step * STEP_COLUMNS
        place = out[row : row + len(tile) * HALF_TILE_ROWS, column : column + STEP_COLUMNS]
        place.copy_(_tile(packed[at:end], stored, len(tile), half))
        at = end
    assert at == len(packed), f"{op.matrix.name}: slots"
    return out


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


def _tile(slot: Tensor, stored: WeightFormat, half_tiles: int, half: torch.dtype) -> Tensor:
    """The numbers [8 or 16, 512] of one or two halves of a slot.

    Args:
        slot: bytes, or values of an image without rounding.
        stored: the matrix's format.
        half_tiles: 1 for a half tile, 2 for a tile.
        half: what 16-bit values are.
    """
    if slot.dtype is not torch.uint8:
        return slot.float()[_places_16(half_tiles)]
    if stored.is_plain:
        return slot.view(half)[_places_16(half_tiles)].float()
    halves = slot.view(half_tiles, stored.half_tile_bytes)
    values = halves[:, : stored.half_tile_values_bytes].flatten().view(torch.int8)
    scales = halves[:, stored.half_tile_values_bytes :].flatten()
    numbers = values[_places_8(half_tiles)].float()
    return numbers * (scales[_scale_places(half_tiles)].float() - 127).exp2()


def _coordinates(half_tiles: int) -> tuple[Tensor, Tensor]:
    """[rows, 1] and [512]: rows and columns of one or two half tiles."""
    return torch.arange(half_tiles * HALF_TILE_ROWS)[:, None], torch.arange(STEP_COLUMNS)


@cache
def _places_16(half_tiles: int) -> Tensor:
    """[8 or 16, 512]: which of a slot's 16-bit values is which of a tile's.

    Lane (g, q) of a warp reads 16 bytes for each multiply. Of a tile these are registers 0 … 3 of
    m16n8k16's first operand: rows g and g + 8 in turn, times the two activations of the lane that
    come with the first pair, then the second. Of a half tile they are consecutive columns.
    """
    row, k = _coordinates(half_tiles)
    warp, half, quad, multiply = k // 64, k % 64 // 32, k % 32 // 8, k % 8 // 4
    if half_tiles == 1:
        return warp * 512 + half * 256 + (row * 4 + quad) * 8 + k % 8
    lane, register = row % 8 * 4 + quad, k % 4 // 2 * 2 + row // 8
    return half * HALF_TILE_VALUES + warp * 512 + multiply * 256 + lane * 8 + register * 2 + k % 2


@cache
def _places_8(half_tiles: int) -> Tensor:
    """The same of 8-bit values: a lane's 16 bytes are those of both multiplies or halves."""
    row, k = _coordinates(half_tiles)
    warp, half, quad, multiply = k // 64, k % 64 // 32, k % 32 // 8, k % 8 // 4
    lane = row % 8 * 4 + quad
    if half_tiles == 1:
        return warp * 512 + lane * 16 + half * 8 + k % 8
    register = k % 4 // 2 * 2 + row // 8
    return half * HALF_TILE_VALUES + warp * 512 + lane * 16 + multiply * 8 + register * 2 + k % 2


@cache
def _scale_places(half_tiles: int) -> Tensor:
    """The same of scales, one for 32 columns of a row: by warp and lane's row, two to a lane."""
    row, k = _coordinates(half_tiles)
    warp, half = k // 64, k % 64 // 32
    if half_tiles == 1:
        return warp * 16 + row * 2 + half
    return half * 128 + warp * 16 + row % 8 * 2 + row // 8
