"""From the kernel's image back to rows: what prefill multiplies by where only one copy fits."""

from dataclasses import replace

import torch
from torch import Tensor

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan
from soloist.model.quantized import COLUMNS
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.numbers import as_numbers
from soloist.weights.packing import columns_of, gather, unpack


class Unpacked:
    """Row-major matrices by name, each unpacked from the kernel's image when asked for.

    Of a model with lanes they have lanes first.

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
        layer, short = 0, "head"
        if name not in ("embedding", "head"):
            _, number, short = name.split(".")
            layer = int(number)
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


def tables_of_columns(plan: Plan, packed: PackedWeights) -> dict[str, Tensor]:
    """Of permuted matrices, by name: uint16 [K], which column of the matrix codes' columns are."""
    image = plan.image
    names = [
        (layer, name)
        for layer in range(plan.shape.num_layers)
        for name in image.layer(layer).operations
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


def parts_to_rows(plan: Plan, weights: Weights) -> None:
    """Replace the parts of a rank's quantised matrices by rows, one matrix after the other."""
    for name, stored in plan.formats.items():
        parts = {part: weights.pop(name + part) for part in stored.parts}
        assert stored.meaning is not None, "a format of its own says what its parts mean"
        weights[name] = as_numbers(stored.meaning, parts, plan.dtype)
