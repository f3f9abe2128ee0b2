"""From the kernel's image back to rows: experts for prefill, and what its kernel has to make."""

from dataclasses import replace

import torch
from torch import Tensor

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import OF_EXPERTS, place_of
from soloist.model.quantized import COLUMNS
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.numbers import as_numbers, write_numbers
from soloist.weights.packing import (
    columns_of,
    gather,
    pieces_of_experts,
    unpack,
    unpack_experts,
    word_places,
)


class Unpacked:
    """Row-major matrices by name, each unpacked from the kernel's image when asked for.

    By steps of torch, on any device: the definition of what `UnpackedMatrices` of prefill makes by
    a kernel. Of a model with lanes they have lanes first.

    Args:
        plan: how the image is laid out.
        packed: weights of a rank; the image may have values in place of bytes.
    """

    def __init__(self, plan: Plan, packed: PackedWeights) -> None:
        self._plan, self._image, self._table = plan, packed.image, packed.embedding
        self._vectors = packed.vectors

    def __call__(self, name: str) -> Tensor:
        """[out, in] or [L, out, in], contiguous."""
        if name == "embedding" and self._table is not None:
            return self._table
        layer, short = (0, "head") if name in ("embedding", "head") else place_of(name)
        operation = self._plan.image.operation(layer, short)
        parts = [
            self._row_major(operation, layer, gather(self._plan, operation, layer, image))
            for image in torch.split(self._image, self._plan.blocks)
        ]
        return torch.stack(parts) if self._plan.shape.has_lanes else parts[0].contiguous()

    def _row_major(self, operation: Operation, layer: int, packed: Tensor) -> Tensor:
        dtype, stored = TORCH_DTYPES[self._plan.dtype], operation.matrix.format
        if stored.meaning is None:
            values = packed.view(dtype) if packed.dtype is torch.uint8 else packed
            return unpack(self._plan, operation, values)[""]
        meaning = replace(stored.meaning, group=stored.group)
        parts = unpack(self._plan, operation, packed)
        if stored.is_permuted:
            start = self._plan.image.table_offset(layer, operation.matrix.name)
            words = self._vectors[start : start + operation.table_values]
            parts[COLUMNS] = columns_of(operation, words)
        return as_numbers(meaning, parts, self._plan.dtype)


class UnpackedExperts:
    """Row-major matrices of experts, unpacked some at a time from all that the kernel has.

    Which ones the device alone needs to know, and what they become is always at the same addresses.

    Args:
        plan: how experts are laid out.
        packed: weights of a rank.
    """

    def __init__(self, plan: Plan, packed: PackedWeights) -> None:
        assert packed.experts is not None, "there are experts"
        self._plan, self._experts = plan, packed.experts
        device = packed.experts.device
        kinds = [kind for kind in plan.image.kinds if kind.experts is not None]
        self._places = {
            op: word_places(plan, op).to(device)
            for op in dict.fromkeys(k.operations[name] for k in kinds for name in OF_EXPERTS)
            if op.matrix.format.is_plain
        }
        self._room: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        # Of quantised matrices and so many experts; made at a first call, which nobody records.
        self._pieces: dict[tuple[Operation, int], tuple[Tensor, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """What it has in memory between calls."""
        indices = (x for pieces in self._pieces.values() for x in pieces)
        held = (*self._places.values(), *self._room.values(), *indices)
        return sum(x.numel() * x.element_size() for x in held)

    def __call__(self, layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """gate_up [G, 2 F, H] and down [G, H, F] of a layer's experts; valid until the next call.

        Args:
            layer: which one.
            numbers: [G], of the experts.
        """
        kind = self._plan.image.layer(layer)
        experts = kind.experts
        assert experts is not None, "a mixture"
        start = self._plan.image.experts_offset(layer)
        own = self._experts[start : start + experts.layer_bytes].view(torch.int64)
        own = own.view(experts.router.num_experts, -1)
        copied = self._take("packed", torch.int64, len(numbers), own.shape[1])
        torch.index_select(own, 0, numbers, out=copied)
        gate_up, down = (kind.operations[name] for name in OF_EXPERTS)
        sizes = [gate_up.matrix.num_bytes, down.matrix.num_bytes]
        gate_ups, downs = copied.view(torch.uint8).split(sizes, dim=1)
        return self._rows(gate_up, gate_ups), self._rows(down, downs)

    def _rows(self, operation: Operation, packed: Tensor) -> Tensor:
        """[G, bytes] → [G, out, in]."""
        matrix, dtype = operation.matrix, TORCH_DTYPES[self._plan.dtype]
        shape = (len(packed), matrix.rows, matrix.columns)
        rows = self._take(matrix.name, dtype, *shape)
        if (places := self._places.get(operation)) is not None:
            words = rows.view(len(packed), -1).view(torch.int32)
            torch.index_select(packed.view(torch.int32), 1, places, out=words)
            return rows
        meaning = matrix.format.meaning
        assert meaning is not None, "a format of its own says what its parts mean"
        meaning = replace(meaning, group=matrix.format.group)
        which = (operation, len(packed))
        if which not in self._pieces:
            self._pieces[which] = pieces_of_experts(*which, packed.device)
        parts = unpack_experts(self._plan, operation, packed, self._pieces[which])
        write_numbers(meaning, parts, rows.flatten(0, 1))
        return rows

    def _take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        if (name, shape) not in self._room:
            self._room[name, shape] = torch.empty(shape, dtype=dtype, device=self._experts.device)
        return self._room[name, shape]


def tables_of_columns(plan: Plan, packed: PackedWeights) -> dict[str, Tensor]:
    """Of permuted matrices, by name: uint16 [K], which column of the matrix codes' columns are."""
    image = plan.image
    names = [
        (layer, name)
        for layer in range(plan.shape.num_layers)
        for name in image.layer(layer).in_blocks
    ]
    tables = {}
    for layer, short in [*names, (0, "head")]:
        operation = image.operation(layer, short)
        if operation.matrix.format.is_permuted:
            start = image.table_offset(layer, short)
            words = packed.vectors[start : start + operation.table_values]
            name = short if short == "head" else f"layers.{layer}.{short}"
            tables[name] = columns_of(operation, words)
    return tables


def routers_of(plan: Plan, packed: PackedWeights) -> dict[str, Tensor]:
    """Routers [E, H], what corrects their scores [E], and gates [1, H] of MLPs beside experts.

    By name; views of what the kernel has.
    """
    found, image = {}, plan.image
    for layer in range(plan.shape.num_layers):
        experts = image.layer(layer).experts
        if experts is None:
            continue
        for name in ("router", "router_correction", "shared_gate"):
            if (vector := image.layer(layer).vectors.get(name)) is not None:
                start, count = image.vector_offset(layer, name), vector.shape[0]
                values = packed.vectors[start : start + count]
                if name != "router_correction":
                    values = values.view(-1, plan.model.hidden_size)
                found[f"layers.{layer}.{name}"] = values
    return found


def parts_to_rows(plan: Plan, weights: Weights) -> None:
    """Replace the parts of a rank's quantised matrices by rows, one matrix after the other.

    Experts are not among `weights`: the kernel's copy is the only one.
    """
    for name, stored in plan.formats.items():
        if name not in weights:
            continue
        parts = {part: weights.pop(name + part) for part in stored.parts}
        assert stored.meaning is not None, "a format of its own says what its parts mean"
        weights[name] = as_numbers(stored.meaning, parts, plan.dtype)
