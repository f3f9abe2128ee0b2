"""Row-major weights → the order in which the kernel streams them, and back. Torch, any device.

`partition.py` says which rows a block owns; here a block's rows become tiles in which every lane
of a warp finds its m16n8k16 fragments as 16 consecutive bytes. A tile of one step is a slot: two
halves of 32 columns for each of the 8 warps. A half tile is half a slot: 64 columns for each warp.
Half tiles of two steps make a slot, so that the ring has no half empty ones. Where steps are paired
(`Matrix.pairs_steps`) a warp's columns of both are neighbours in the matrix. Each half of a slot
has all parts of a format: its values, then their scales.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import OF_EXPERTS
from soloist.megakernel.shape import ModelShape
from soloist.megakernel.tile import (
    COLUMN_DIGITS,
    HALF_STEP_COLUMNS,
    HALF_TILE_ROWS,
    HALF_TILE_VALUES,
    STEP_COLUMNS,
    WARP_COLUMNS,
)
from soloist.weights.layout import layout_of, with_paired_columns, without_paired_columns
from soloist.weights.memory import VALUES_AT_ONCE

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


def table_of(operation: Operation, columns: Tensor) -> Tensor:
    """A permuted matrix's table of columns [K] as the kernel reads it, int32 [values].

    Columns of padding stay where they are.
    """
    in_order = torch.arange(2 * operation.table_values, dtype=torch.int32, device=columns.device)
    in_order[: len(columns)] = columns.to(torch.int32)
    if operation.matrix.pairs_steps:
        in_order = with_paired_columns(in_order.view(-1, STEP_COLUMNS)).flatten()
    return in_order.to(torch.uint16).view(torch.int32)


def columns_of(operation: Operation, values: Tensor) -> Tensor:
    """The inverse of `table_of`: uint16 [K]."""
    found = values.view(torch.uint16)
    if operation.matrix.pairs_steps:
        found = without_paired_columns(found.view(-1, STEP_COLUMNS)).flatten()
    return found[: operation.matrix.columns]


def pack(plan: Plan, operation: Operation, parts: Mapping[str, Tensor]) -> Tensor:
    """A matrix's tensors in the checkpoint's order → all its half slots [half slots, bytes].

    Of one that ends in half a step [half tiles, bytes].

    Args:
        plan: of the kernel.
        operation: which matrix.
        parts: by part of its format, as `Quantized` says. A matrix whose values stand for
            themselves may have values of any size; then the result has them too, in place of bytes.
    """
    matrix, layout = operation.matrix, layout_of(operation.matrix)
    by_row = layout.by_row(parts, matrix.steps)
    if matrix.ends_in_half:
        by_row = [_with_half_step(values) for values in by_row]
    rows = matrix.units * matrix.unit_rows
    half_tiles = rows // HALF_TILE_ROWS
    ready = []
    for values in by_row:
        own = ordered(plan.shape, matrix, values)
        own = pad(own, (0, 0) * (own.dim() - 1) + (0, rows - own.shape[0]))
        ready.append(own.unflatten(0, (half_tiles, HALF_TILE_ROWS)))
    packed = None
    for part in _pieces(operation):
        index = part.to(ready[0].device)
        tiles = layout.packed([values[index] for values in ready])
        slots = _to_slots(*tiles, pairs_steps=matrix.pairs_steps)
        if matrix.ends_in_half:
            slots = slots[
                :, : slots.shape[1] * matrix.padded_columns // (matrix.steps * STEP_COLUMNS)
            ]
        if packed is None:
            packed = slots.new_empty(half_tiles, slots[0].numel() // index.shape[1])
        packed[index] = slots.reshape(*index.shape, -1)
    assert packed is not None, "a matrix has rows"
    return packed if matrix.ends_in_half else packed.view(half_tiles * matrix.steps, -1)


def unpack(plan: Plan, operation: Operation, packed: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack`; scales and zeros are those of the format's groups."""
    matrix, layout = operation.matrix, layout_of(operation.matrix)
    assert not matrix.ends_in_half, "of experts in 16 bits see word_places"
    half_tiles = matrix.units * matrix.unit_half_tiles
    by_half_tile = packed.view(half_tiles, -1)
    ready: list[Tensor] = []
    for part in _pieces(operation):
        index = part.to(packed.device)
        slots = by_half_tile[index]
        tiles, halves = _from_slots(slots, matrix.steps, pairs_steps=matrix.pairs_steps)
        for place_, values in enumerate(layout.unpacked(tiles, halves)):
            if place_ == len(ready):
                ready.append(values.new_empty(half_tiles, *values.shape[2:]))
            ready[place_][index] = values
    by_row = [
        unordered(plan.shape, matrix, values.flatten(0, 1)[: matrix.rows]) for values in ready
    ]
    return layout.parts(by_row, matrix.columns)


def place(plan: Plan, operation: Operation, layer: int, packed: Tensor, image: Tensor) -> None:
    """Copy a packed matrix into every block's part of the image [blocks, bytes or values]."""
    image = _words(image)
    start, unit = _place(plan, operation, layer, image)
    by_unit = packed.view(image.dtype).view(operation.matrix.units, unit)
    for blocks, units in _shares(operation.matrix):
        part = by_unit[units.to(packed.device)].flatten(1)
        image[blocks.to(image.device), start : start + part.shape[1]] = part


def place_expert(
    plan: Plan,
    layer: int,
    number: int,
    matrices: Mapping[str, Mapping[str, Tensor]],
    experts: Tensor,
) -> None:
    """Pack matrices of one expert into the experts of all layers, bytes or values.

    Args:
        plan: of the kernel.
        layer: the expert's.
        number: of the expert.
        matrices: parts of its gate_up, its down or both, as of `pack`.
        experts: [experts_bytes], or values in place of bytes.
    """
    kind = plan.image.layer(layer)
    assert kind.experts is not None, "a mixture"
    start = plan.image.experts_offset(layer) + number * kind.experts.num_bytes
    for name in OF_EXPERTS:
        num_bytes = kind.operations[name].matrix.num_bytes
        if (parts := matrices.get(name)) is not None:
            packed = pack(plan, kind.operations[name], parts).flatten()
            own = packed.view(experts.dtype)
            at = start * own.numel() // num_bytes
            experts[at : at + own.numel()] = own
        start += num_bytes


def pieces_of_experts(operation: Operation, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Which half tiles of so many experts are unpacked together, on their device."""
    matrix = operation.matrix
    half_tiles = matrix.units * matrix.unit_half_tiles
    firsts = half_tiles * torch.arange(count)[:, None, None]
    return tuple((firsts + part).flatten(0, 1).to(device) for part in _pieces(operation))


def unpack_experts(
    plan: Plan, operation: Operation, packed: Tensor, pieces: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Parts of a matrix of several experts, as of `unpack`, rows of one after those of another.

    The host waits for nothing.

    Args:
        plan: of the kernel.
        operation: of one expert.
        packed: [experts, bytes].
        pieces: as `pieces_of_experts` has them for so many.
    """
    matrix, layout, count = operation.matrix, layout_of(operation.matrix), len(packed)
    assert not matrix.ends_in_half, "quantised ones have whole steps"
    half_tiles = matrix.units * matrix.unit_half_tiles
    by_half_tile = packed.reshape(count * half_tiles, -1)
    ready: list[Tensor] = []
    for index in pieces:
        slots = by_half_tile[index]
        tiles, halves = _from_slots(slots, matrix.steps, pairs_steps=matrix.pairs_steps)
        for place_, values in enumerate(layout.unpacked(tiles, halves)):
            if place_ == len(ready):
                ready.append(values.new_empty(count * half_tiles, *values.shape[2:]))
            ready[place_][index] = values
    by_row = [
        torch.cat(
            [
                unordered(plan.shape, matrix, own.flatten(0, 1)[: matrix.rows])
                for own in values.split(half_tiles)
            ]
        )
        for values in ready
    ]
    return layout.parts(by_row, matrix.columns)


def word_places(plan: Plan, operation: Operation) -> Tensor:
    """Where a packed matrix of 16-bit values has its words, row by row: int32 [rows · columns / 2].

    A word is two values that are neighbours in a row.
    """
    matrix = operation.matrix
    assert matrix.format.is_plain, "values that stand for themselves"
    # 0 is padding.
    numbers = torch.arange(1, matrix.rows * matrix.columns + 1, dtype=torch.int32)
    packed = pack(plan, operation, {"": numbers.view(matrix.rows, matrix.columns)}).flatten()
    found = packed.nonzero().flatten()
    places = torch.empty(len(numbers), dtype=torch.int32)
    places[packed[found].long() - 1] = found.to(torch.int32)
    first, second = places[::2], places[1::2]
    assert torch.equal(first // 2 * 2 + 1, second), "values of a word are neighbours"
    return first // 2


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


def _pieces(operation: Operation) -> Iterator[Tensor]:
    """Rows of all parts; of a quantised matrix so few at a time that bytes may become words."""
    matrix = operation.matrix
    for part in _parts(operation):
        blocks, half_tiles = part.rows.shape
        if not matrix.format.is_plain:
            blocks = max(1, VALUES_AT_ONCE // (half_tiles * HALF_TILE_VALUES * matrix.steps))
        yield from part.rows.split(blocks)


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


def _with_half_step(values: Tensor) -> Tensor:
    """[rows, steps, columns]: of the last step's first half each warp gets as many."""
    last = values[:, -1, :HALF_STEP_COLUMNS].unflatten(1, (COLUMN_DIGITS["w"], -1))
    last = pad(last, (0, WARP_COLUMNS - last.shape[-1])).flatten(1)
    return torch.cat([values[:, :-1], last[:, None]], dim=1)


def _to_slots(tiles: Tensor, halves: Tensor, *, pairs_steps: bool) -> Tensor:
    """[blocks, steps, tiles or half tiles, values] → [blocks, values] as they stream.

    Two steps at a time: tiles of the first, tiles of the second, the half tiles that both have. Of
    paired steps the tiles of the same rows follow each other.
    """
    if pairs_steps:
        paired: Tensor = tiles.unflatten(1, (-1, 2)).transpose(2, 3).flatten(1)
        return paired
    steps = range(0, tiles.shape[1], 2)
    return torch.cat(
        [part[:, at : at + 2].flatten(1) for at in steps for part in (tiles, halves)], dim=1
    )


def _from_slots(slots: Tensor, steps: int, *, pairs_steps: bool) -> tuple[Tensor, Tensor]:
    """The inverse of `_to_slots`, of [blocks, half tiles, values]."""
    blocks, count, each = slots.shape
    each //= steps
    full = count // 2 * 2
    if pairs_steps:
        tiles = slots.reshape(blocks, steps // 2, full // 2, 2, 2 * each).transpose(2, 3)
        return tiles.flatten(1, 2), slots.new_empty(blocks, steps, 0, each)
    sizes = [
        part * min(2, steps - at) * each
        for at in range(0, steps, 2)
        for part in (full, count - full)
    ]
    parts = slots.flatten(1).split(sizes, dim=1)
    tiles, halves = torch.cat(parts[::2], dim=1), torch.cat(parts[1::2], dim=1)
    return (
        tiles.view(blocks, steps, full // 2, 2 * each),
        halves.view(blocks, steps, count - full, each),
    )
