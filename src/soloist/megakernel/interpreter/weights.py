"""A rank's weights, as its blocks find them in memory."""

import torch
from torch import Tensor

from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.interpreter.multiply import product
from soloist.megakernel.interpreter.tiles import Numbers, bytes_of_each, unpacked
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.plan import Plan
from soloist.megakernel.tile import HALF_TILE_ROWS
from soloist.model.torch_types import TORCH_DTYPES


def rows_of(op: Operation, block: int) -> range:
    """The rows of a matrix that a block owns."""
    units, height = _units_of(op, block), op.matrix.unit_rows
    return range(units.start * height, units.stop * height)


def _units_of(op: Operation, block: int) -> range:
    return range(op.matrix.first_unit(block), op.matrix.first_unit(block + 1))


class Weights:
    """Matrices by block, vectors by rows.

    Args:
        plan: where they lie.
        memory: of the rank.
        dtype: what the kernel rounds to; None for no rounding.
    """

    def __init__(self, plan: Plan, memory: Memory, dtype: torch.dtype | None) -> None:
        self._plan, self._memory, self._rounds = plan, memory, dtype is not None
        self._half = dtype or TORCH_DTYPES[plan.dtype]
        self._matrices: dict[tuple[str, int, int], Numbers] = {}
        assert plan.share.tied_head == (memory.embedding is None), "ranks have a table"
        _check_owners(plan)

    def product(self, op: Operation, x: Tensor, layer: int, block: int) -> Tensor:
        """[rows, 8] of a block's rows and activations [columns, 8]."""
        numbers = self._matrix(op, layer, block)
        if op.matrix.format.is_permuted:
            x = x[self._columns(op, layer)]
        return product(numbers, op.matrix, x, self._half, rounds=self._rounds)

    def _matrix(self, op: Operation, layer: int, block: int) -> Numbers:
        name, image = op.matrix.name, self._memory.image[block]
        if (name, layer, block) not in self._matrices:
            start, each = self._plan.image.matrix_offset(layer, name), bytes_of_each(image)
            end = start + op.matrix.block_bytes(block)
            packed, rows = image[start // each : end // each], len(rows_of(op, block))
            self._matrices[name, layer, block] = unpacked(packed, op, rows, self._half)
        return self._matrices[name, layer, block]

    def expert_product(
        self, op: Operation, x: Tensor, layer: int, expert: int, part: int
    ) -> Tensor:
        """[rows, 8] of one expert's rows: a block's of `down`, a tile's of gate_up."""
        key = (f"{expert}.{op.matrix.name}", layer, part)
        if key not in self._matrices:
            memory, layout = self._memory.experts, self._plan.image
            experts = layout.layer(layer).experts
            assert memory is not None, "there are experts"
            assert experts is not None, "in this layer"
            start = layout.experts_offset(layer) + expert * experts.num_bytes
            start += experts.gate_up.num_bytes if op.matrix.name == "down" else 0
            start += op.matrix.first_unit(part) * op.matrix.unit_bytes
            end, each = start + op.matrix.block_bytes(part), bytes_of_each(memory)
            packed, rows = memory[start // each : end // each], len(rows_of(op, part))
            self._matrices[key] = unpacked(packed, op, rows, self._half)
        return product(self._matrices[key], op.matrix, x, self._half, rounds=self._rounds)

    def _columns(self, op: Operation, layer: int) -> Tensor:
        """The activations that a permuted matrix's columns meet, padding included."""
        start = self._plan.image.table_offset(layer, op.matrix.name)
        words = self._memory.vectors[start : start + op.table_values]
        columns = words.contiguous().view(torch.uint16).long()
        if not op.matrix.pairs_steps:
            return columns
        # A warp's columns of two steps are neighbours.
        return columns.view(-1, 2, 8, 64).transpose(1, 2).flatten()

    def vector(self, layer: int, name: str, rows: range) -> Tensor:
        """Norm weights, biases and such of some rows; what the model has not is zero."""
        layout = self._plan.image
        if name == "final_norm":
            start = layout.final_norm_offset
        elif name in layout.layer(layer).vectors:
            start = layout.vector_offset(layer, name)
        else:
            return torch.zeros(len(rows))
        return self._memory.vectors[start + rows.start : start + rows.stop]

    def embedding(self, token: int, rows: range) -> Tensor:
        """Some rows of the residual: of the table, or of the packed head where it is tied."""
        if self._memory.embedding is not None:
            return self._memory.embedding[token, rows.start : rows.stop].float()
        head = self._plan.head
        owner = head.matrix.owner(token // HALF_TILE_ROWS)
        local = token - rows_of(head, owner).start
        return self._matrix(head, 0, owner).values[local, rows.start : rows.stop]

    def embedding_scale(self) -> float:
        """1 / rms of the table, or of the packed head where it is tied."""
        table, plan = self._memory.embedding, self._plan
        if table is None:
            parts = [self._matrix(plan.head, 0, block).values for block in range(plan.blocks)]
            table = torch.cat(parts)[: plan.model.vocab_size, : plan.model.hidden_size]
        return float(table.float().square().mean().rsqrt())


def _check_owners(plan: Plan) -> None:
    """Every unit is one block's, and no matrices share bytes of the image."""
    taken = torch.zeros(plan.blocks, plan.image.block_stride, dtype=torch.bool)
    for layer in range(plan.model.num_layers):
        for op in plan.image.layer(layer).in_blocks.values():
            _take(plan, layer, op, taken)
    _take(plan, 0, plan.head, taken)


def _take(plan: Plan, layer: int, op: Operation, taken: Tensor) -> None:
    m = op.matrix
    owned = [unit for block in range(plan.blocks) for unit in _units_of(op, block)]
    assert owned == list(range(m.units)), f"{m.name}: units owned are {owned}"
    start = plan.image.matrix_offset(layer, m.name)
    for block in range(plan.blocks):
        part = taken[block, start : start + m.block_bytes(block)]
        assert part.numel() == m.block_bytes(block), f"{m.name} ends beyond the image"
        assert not part.any(), f"{m.name} lies where another matrix does"
        part[:] = True
