"""Row-major weights → the order in which the kernel streams them, and back. Torch, any device.

`partition.py` says which rows a block owns; here a block's rows become tiles in which every lane
of a warp finds its m16n8k16 fragments as 16 consecutive bytes. A tile of one step is a slot: two
halves of 32 columns for each of the 8 warps. A half tile is half a slot: 64 columns for each warp.
Half tiles of two steps make a slot, so that the ring has no half empty ones. Each half of a slot
has all parts of a format: its values, then their scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan
from soloist.megakernel.shape import ModelShape
from soloist.megakernel.tile import (
    COLUMN_DIGITS,
    HALF_TILE_ORDER,
    HALF_TILE_ROWS,
    STEP_COLUMNS,
    TILE_ORDER,
)
from soloist.megakernel.weight_format import WeightFormat

# Partitions that are remembered: every layer has the same, of a few matrices on each rank.
_MATRICES = 64
_PAIRED = (RowOrder.PAIRED, RowOrder.FINELY_PAIRED)


def ordered(shape: ModelShape, matrix: Matrix, values: Tensor) -> Tensor:
    """Rows [R, …] of a matrix or bias in the kernel's order."""
    if matrix.order is RowOrder.HEADS:
        heads = values.unflatten(0, (-1, shape.head_dim))
        q, k, v = heads.split([shape.query_heads, shape.kv_heads, shape.kv_heads])
        q = q.unflatten(0, (shape.kv_heads, shape.group))
        return torch.cat([q, k[:, None], v[:, None]], dim=1).flatten(0, 2)
    if matrix.order in _PAIRED:
        gate, up = values.unflatten(0, (2, -1, matrix.unit_neurons))
        return torch.stack([gate, up], dim=1).flatten(0, 2)
    return values


def unordered(shape: ModelShape, matrix: Matrix, values: Tensor) -> Tensor:
    """The inverse of `ordered`."""
    if matrix.order is RowOrder.HEADS:
        heads = values.unflatten(0, (shape.kv_heads, shape.group + 2, shape.head_dim))
        q, k, v = heads.split([shape.group, 1, 1], dim=1)
        return torch.cat([part.flatten(0, 2) for part in (q, k, v)])
    if matrix.order in _PAIRED:
        pairs = values.unflatten(0, (-1, 2, matrix.unit_neurons))
        return torch.cat([pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)])
    return values


def pack(plan: Plan, operation: Operation, parts: Mapping[str, Tensor]) -> Tensor:
    """A matrix's tensors in the checkpoint's order → all its half slots [half slots, bytes].

    Args:
        plan: of the kernel.
        operation: which matrix.
        parts: by part of its format, [rows, columns or groups of columns]. A matrix whose values
            stand for themselves may have values of any size; then the result has them too, in
            place of bytes.
    """
    matrix = operation.matrix
    packed = [
        _packed(plan.shape, operation, parts[part], layout)
        for part, layout in _layouts(matrix.format).items()
    ]
    if matrix.format.is_plain:
        return packed[0]
    return torch.cat([part.view(torch.uint8) for part in packed], dim=1)


def unpack(plan: Plan, operation: Operation, packed: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack`; the values of a scaled format are int8, its scales uint8."""
    stored = operation.matrix.format
    if stored.is_plain:
        return {"": _unpacked(plan.shape, operation, packed, _BY_BITS[stored.value_bits])}
    sizes = (stored.half_tile_values_bytes, stored.half_tile_scales_bytes)
    values, scales = (part.contiguous() for part in packed.split(sizes, dim=1))
    return {
        "": _unpacked(plan.shape, operation, values.view(torch.int8), _BY_BITS[stored.value_bits]),
        ".scales": _unpacked(plan.shape, operation, scales, _SCALES),
    }


def numbers(stored: WeightFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """The fp32 numbers [rows, columns] that a matrix's tensors stand for."""
    values = parts[""].float()
    if stored.is_plain:
        return values
    # A power of two, biased by 127 as in a float's exponent.
    scales = (parts[".scales"].float() - 127).exp2().repeat_interleave(stored.group, dim=1)
    return values * scales[:, : values.shape[1]]


def place(plan: Plan, operation: Operation, layer: int, packed: Tensor, image: Tensor) -> None:
    """Copy a packed matrix into every block's part of the image [blocks, bytes or values]."""
    image = _words(image)
    start, unit = _place(plan, operation, layer, image)
    by_unit = packed.view(image.dtype).view(operation.matrix.units, unit)
    for blocks, units in _shares(operation.matrix):
        part = by_unit[units.to(packed.device)].flatten(1)
        image[blocks.to(image.device), start : start + part.shape[1]] = part


def gather(plan: Plan, operation: Operation, layer: int, image: Tensor) -> Tensor:
    """The inverse of `place`: a packed matrix [half slots, bytes or values] out of the image."""
    matrix, given = operation.matrix, image.dtype
    image = _words(image)
    start, unit = _place(plan, operation, layer, image)
    packed = torch.empty(matrix.units, unit, dtype=image.dtype, device=image.device)
    for blocks, units in _shares(matrix):
        stop = start + units.shape[1] * unit
        part = image[blocks.to(image.device), start:stop]
        packed[units.to(image.device)] = part.unflatten(1, (-1, unit))
    return packed.view(given).view(matrix.units * matrix.unit_half_tiles * matrix.steps, -1)


def _words(image: Tensor) -> Tensor:
    """Bytes by eight, which all formats divide: fewer elements to copy; values as they are."""
    return image.view(torch.int64) if image.dtype is torch.uint8 else image


def _place(plan: Plan, operation: Operation, layer: int, image: Tensor) -> tuple[int, int]:
    """Where a block's part of the image has a matrix, and how much a unit is: words or values."""
    matrix = operation.matrix
    bytes_each = 8 if image.dtype is torch.int64 else matrix.format.value_bits // 8
    start = plan.image.matrix_offset(layer, matrix.name)
    return start // bytes_each, matrix.unit_bytes // bytes_each


@lru_cache(_MATRICES)
def _shares(matrix: Matrix) -> tuple[tuple[Tensor, Tensor], ...]:
    """Blocks [B] with equally many units, and which ones [B, units] they own."""
    by_count: dict[int, list[int]] = {}
    for block in range(matrix.blocks):
        count = matrix.num_units(block)
        by_count.setdefault(count, []).append(block)
    shares = []
    for count, blocks in by_count.items():
        first = torch.tensor([matrix.first_unit(b) for b in blocks])
        shares.append((torch.tensor(blocks), first[:, None] + torch.arange(count)))
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks with equally many half tiles to a step, and one of their groups of tiles."""

    rows: Tensor  # [blocks, half tiles]: which of the matrix's


@lru_cache(_MATRICES)
def _parts(operation: Operation) -> tuple[_Part, ...]:
    matrix = operation.matrix
    first = [matrix.first_unit(b) * matrix.unit_half_tiles for b in range(matrix.blocks + 1)]
    most = 2 * operation.group_tiles
    by_count: dict[int, list[int]] = {}
    for start, end in pairwise(first):
        for group in range(start, end, most):
            by_count.setdefault(min(most, end - group), []).append(group)
    return tuple(
        _Part(torch.tensor(starts)[:, None] + torch.arange(count))
        for count, starts in by_count.items()
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """In which order a part of a format lies in the halves of a slot.

    Letters of dimensions: b block, t tile, s step, and the digits of tile.py.

    Attributes:
        columns: sizes of the dimensions of one step of columns, w first.
        tile: the order of a full tile's dimensions [b t h g s w p …], with b s t first.
        half_tile: the same of half tiles [b t g s w p …], with b s t first.
    """

    columns: tuple[int, ...]
    tile: tuple[int, ...]
    half_tile: tuple[int, ...]


def _layout(columns: str, tile: str, half_tile: str) -> _Layout:
    return _Layout(
        tuple(COLUMN_DIGITS[c] for c in columns),
        tuple(("bthgs" + columns).index(c) for c in "bst" + tile),
        tuple(("btgs" + columns).index(c) for c in "bst" + half_tile),
    )


# A lane's 16 bytes are one multiply's values of 16 bits, or both multiplies' of 8.
_BY_BITS = {
    16: _layout("wpqmre", TILE_ORDER, HALF_TILE_ORDER),
    8: _layout("wpqmre", "pwgqmrhe", "wgqpmre"),
}
_SCALES = _layout("wp", "pwgh", "wgp")


def _layouts(stored: WeightFormat) -> dict[str, _Layout]:
    """By part. Values of test images without rounding lie as those of 16 bits."""
    layouts = {"": _BY_BITS[stored.value_bits]}
    return layouts if stored.is_plain else {**layouts, ".scales": _SCALES}


def _packed(shape: ModelShape, operation: Operation, values: Tensor, layout: _Layout) -> Tensor:
    """[rows, columns] of one part → [half slots, values]."""
    matrix = operation.matrix
    rows = matrix.units * matrix.unit_rows
    values = ordered(shape, matrix, values)
    per_step = torch.Size(layout.columns).numel()
    width = matrix.steps * per_step
    values = pad(values, (0, width - values.shape[1], 0, rows - values.shape[0]))
    half_tiles, each = rows // HALF_TILE_ROWS, HALF_TILE_ROWS * per_step
    by_row = values.view(half_tiles, HALF_TILE_ROWS, matrix.steps, *layout.columns)
    packed = values.new_empty(half_tiles, matrix.steps, each)
    for part in _parts(operation):
        index = part.rows.to(values.device)
        slots = _to_slots(by_row[index], layout)  # of [blocks, half tiles, row, step, …]
        packed[index] = slots.view(*part.rows.shape, matrix.steps, each)
    return packed.flatten(0, 1)


def _unpacked(shape: ModelShape, operation: Operation, packed: Tensor, layout: _Layout) -> Tensor:
    """The inverse of `_packed`."""
    matrix = operation.matrix
    rows = matrix.units * matrix.unit_rows
    half_tiles = rows // HALF_TILE_ROWS
    slots = packed.view(half_tiles, matrix.steps, -1)
    by_row = packed.new_empty(half_tiles, HALF_TILE_ROWS, matrix.steps, *layout.columns)
    for part in _parts(operation):
        index = part.rows.to(packed.device)
        by_row[index] = _from_slots(slots[index], layout)
    values = by_row.view(rows, -1)
    per_step = torch.Size(layout.columns).numel()
    columns = -(-matrix.columns * per_step // STEP_COLUMNS)
    return unordered(shape, matrix, values[: matrix.rows])[:, :columns]


def _to_slots(units: Tensor, layout: _Layout) -> Tensor:
    """[blocks, half tiles, row, step, *columns] → [blocks, half slots, values].

    Two steps at a time: tiles of the first, tiles of the second, the half tiles that both have.
    """
    blocks, count, _, steps = units.shape[:4]
    full, each = count // 2 * 2, HALF_TILE_ROWS * torch.Size(layout.columns).numel()
    tiles = units[:, :full].unflatten(1, (-1, 2)).permute(layout.tile)
    halves = units[:, full:].permute(layout.half_tile)
    both = [part.reshape(blocks, steps, -1, each) for part in (tiles, halves) if part.numel()]
    return torch.cat(
        [part[:, at : at + 2].flatten(1, 2) for at in range(0, steps, 2) for part in both], dim=1
    )


def _from_slots(slots: Tensor, layout: _Layout) -> Tensor:
    """The inverse of `_to_slots`, of [blocks, half tiles, steps, values]."""
    blocks, count, steps, each = slots.shape
    full = count // 2 * 2
    sizes = [
        part * min(2, steps - at) for at in range(0, steps, 2) for part in (full, count - full)
    ]
    parts = slots.reshape(blocks, -1, each).split(sizes, dim=1)
    tile_sizes = (blocks, full // 2, 2, HALF_TILE_ROWS, steps, *layout.columns)
    half_sizes = (blocks, count - full, HALF_TILE_ROWS, steps, *layout.columns)
    tiles = _restored(torch.cat(parts[::2], dim=1), layout.tile, tile_sizes)
    halves = _restored(torch.cat(parts[1::2], dim=1), layout.half_tile, half_sizes)
    return torch.cat([tiles.flatten(1, 2), halves], dim=1)


def _restored(values: Tensor, order: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Values that were permuted to `order` from dimensions of these sizes."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return values.reshape([sizes[i] for i in order]).permute(back)
