"""Row-major weights → the order in which the kernel streams them, and back. Torch, any device.

`partition.py` says which rows a block owns; here a block's rows become tiles in which every lane
of a warp finds its m16n8k16 fragments as 16 consecutive bytes. A tile of 16 rows and 512 columns is
a slot of 16 KB: two halves of 32 columns for each of the 8 warps. A tile of 8 rows is half a slot:
64 columns for each warp. Those of two steps make a slot, so that the ring has no half empty ones.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.megakernel.partition import SLOT_ROWS, SLOT_VALUES, STEP_COLUMNS, Matrix, RowOrder
from soloist.megakernel.plan import Operation, Plan

# Columns of a step, from the slowest to the fastest: warp, half of its 64 columns, quarter of a
# quad's 32, multiply, register, element.
_COLUMNS = (8, 2, 4, 2, 2, 2)
# Partitions that are remembered: every layer has the same, of a few matrices on each rank.
_MATRICES = 64
_PAIRED = (RowOrder.PAIRED, RowOrder.FINELY_PAIRED)


def ordered(plan: Plan, matrix: Matrix, values: Tensor) -> Tensor:
    """Rows [R, …] of a matrix or bias in the kernel's order."""
    if matrix.order is RowOrder.HEADS:
        heads = values.unflatten(0, (-1, plan.head_dim))
        q, k, v = heads.split([plan.query_heads, plan.kv_heads, plan.kv_heads])
        q = q.unflatten(0, (plan.kv_heads, plan.group))
        return torch.cat([q, k[:, None], v[:, None]], dim=1).flatten(0, 2)
    if matrix.order in _PAIRED:
        gate, up = values.unflatten(0, (2, -1, matrix.unit_neurons))
        return torch.stack([gate, up], dim=1).flatten(0, 2)
    return values


def unordered(plan: Plan, matrix: Matrix, values: Tensor) -> Tensor:
    """The inverse of `ordered`."""
    if matrix.order is RowOrder.HEADS:
        heads = values.unflatten(0, (plan.kv_heads, plan.group + 2, plan.head_dim))
        q, k, v = heads.split([plan.group, 1, 1], dim=1)
        return torch.cat([part.flatten(0, 2) for part in (q, k, v)])
    if matrix.order in _PAIRED:
        pairs = values.unflatten(0, (-1, 2, matrix.unit_neurons))
        return torch.cat([pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)])
    return values


def pack(plan: Plan, operation: Operation, values: Tensor) -> Tensor:
    """[rows, columns] in the checkpoint's order → all slots of the matrix, one after the other."""
    matrix = operation.matrix
    rows = matrix.units * matrix.unit_rows
    values = ordered(plan, matrix, values)
    columns = matrix.steps * STEP_COLUMNS
    values = pad(values, (0, columns - values.shape[1], 0, rows - values.shape[0]))
    by_row = values.view(rows // SLOT_ROWS, SLOT_ROWS, matrix.steps, *_COLUMNS)
    packed = torch.empty(
        rows // SLOT_ROWS, matrix.steps * SLOT_VALUES, dtype=values.dtype, device=values.device
    )
    for part in _parts(operation):
        units = by_row[part.rows.to(values.device)]  # [blocks, units, row, step, …]
        packed[part.rows.to(values.device)] = _to_slots(units).view(
            *part.rows.shape, matrix.steps * SLOT_VALUES
        )
    return packed.flatten()


def place(plan: Plan, operation: Operation, layer: int, packed: Tensor, image: Tensor) -> None:
    """Copy a packed matrix into every block's part of the image [blocks, values]."""
    start = _start(plan, operation, layer)
    by_unit = packed.view(operation.matrix.units, -1)
    for blocks, units in _shares(operation.matrix):
        part = by_unit[units.to(packed.device)].flatten(1)
        image[blocks.to(image.device), start : start + part.shape[1]] = part


def gather(plan: Plan, operation: Operation, layer: int, image: Tensor) -> Tensor:
    """The inverse of `place`: a packed matrix, copied out of the image [blocks, values]."""
    matrix = operation.matrix
    start = _start(plan, operation, layer)
    unit_values = matrix.unit_slots * matrix.steps * SLOT_VALUES
    packed = torch.empty(matrix.units, unit_values, dtype=image.dtype, device=image.device)
    for blocks, units in _shares(matrix):
        stop = start + units.shape[1] * unit_values
        part = image[blocks.to(image.device), start:stop]
        packed[units.to(image.device)] = part.unflatten(1, (-1, unit_values))
    return packed.flatten()


def _start(plan: Plan, operation: Operation, layer: int) -> int:
    """Values from the start of a block's part of the image to its part of a matrix."""
    return (plan.layer_bytes * layer + plan.matrix_offset(operation)) // 2


@lru_cache(_MATRICES)
def _shares(matrix: Matrix) -> tuple[tuple[Tensor, Tensor], ...]:
    """Blocks [B] with equally many units, and which ones [B, units] they own."""
    by_count: dict[int, list[int]] = {}
    for block in range(matrix.blocks):
        count = matrix.first_unit(block + 1) - matrix.first_unit(block)
        by_count.setdefault(count, []).append(block)
    shares = []
    for count, blocks in by_count.items():
        first = torch.tensor([matrix.first_unit(b) for b in blocks])
        shares.append((torch.tensor(blocks), first[:, None] + torch.arange(count)))
    return tuple(shares)


def unpack(plan: Plan, operation: Operation, packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    matrix = operation.matrix
    rows = matrix.units * matrix.unit_rows
    slots = packed.view(rows // SLOT_ROWS, matrix.steps * SLOT_VALUES)
    by_row = torch.empty(
        rows // SLOT_ROWS, SLOT_ROWS, matrix.steps, *_COLUMNS,
        dtype=packed.dtype, device=packed.device,
    )  # fmt: skip
    for part in _parts(operation):
        index = part.rows.to(packed.device)
        by_row[index] = _from_slots(slots[index], matrix.steps)
    values = by_row.view(rows, matrix.steps * STEP_COLUMNS)
    return unordered(plan, matrix, values[: matrix.rows])[:, : matrix.columns]


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks with equally many units of 8 rows, and one of their groups of tiles."""

    rows: Tensor  # [blocks, units]: which units of 8 rows


@lru_cache(_MATRICES)
def _parts(operation: Operation) -> tuple[_Part, ...]:
    matrix = operation.matrix
    first = [matrix.first_unit(b) * matrix.unit_slots for b in range(matrix.blocks + 1)]
    most = 2 * operation.group_tiles
    by_count: dict[int, list[int]] = {}
    for start, end in pairwise(first):
        for group in range(start, end, most):
            by_count.setdefault(min(most, end - group), []).append(group)
    return tuple(
        _Part(torch.tensor(starts)[:, None] + torch.arange(count))
        for count, starts in by_count.items()
    )


def _to_slots(units: Tensor) -> Tensor:
    """[blocks, units, row, step, *columns] → [blocks, slots · values].

    Two steps at a time: tiles of the first, tiles of the second, what both have of 8 rows.
    """
    blocks, count, _, steps = units.shape[:4]
    full = count // 2 * 2
    # b blocks, t tile, h half of its rows, g row, s step, w warp, p part, q quad, m multiply,
    # r register, e element
    tiles = units[:, :full].unflatten(1, (-1, 2))  # b t h g s w p q m r e
    tiles = tiles.permute(0, 4, 1, 6, 5, 8, 3, 7, 9, 2, 10)  # b s t p w m g q r h e
    halves = units[:, full:].permute(0, 3, 1, 4, 5, 2, 6, 7, 8, 9)  # b s . w p g q m r e
    both = tiles.reshape(blocks, steps, -1), halves.reshape(blocks, steps, -1)
    return torch.cat(
        [part[:, at : at + 2].flatten(1) for at in range(0, steps, 2) for part in both], dim=1
    )


def _from_slots(slots: Tensor, steps: int) -> Tensor:
    """The inverse of `_to_slots`, of [blocks, units, steps · values]."""
    blocks, count = slots.shape[:2]
    full = count // 2 * 2
    sizes = [
        part * min(2, steps - at) * SLOT_VALUES
        for at in range(0, steps, 2)
        for part in (full, count - full)
    ]
    parts = slots.reshape(blocks, -1).split(sizes, dim=1)
    w, p, q, m, r, e = _COLUMNS
    tiles = torch.cat(parts[::2], dim=1)
    tiles = tiles.reshape(blocks, steps, full // 2, p, w, m, SLOT_ROWS, q, r, 2, e)
    tiles = tiles.permute(0, 2, 9, 6, 1, 4, 3, 7, 5, 8, 10).flatten(1, 2)
    halves = torch.cat(parts[1::2], dim=1)
    halves = halves.reshape(blocks, steps, count - full, w, p, SLOT_ROWS, q, m, r, e)
    halves = halves.permute(0, 2, 5, 1, 3, 4, 6, 7, 8, 9)
    return torch.cat([tiles, halves], dim=1)
