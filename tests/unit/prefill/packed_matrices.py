"""Matrices of every format as they are packed, spread over blocks, and what they stand for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from interpreter.quantised import FORMATS, random_parts
from plan.shapes import SMALL
from soloist.megakernel.gpu import Gpu
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.weight_format import format_of, quantized_format
from soloist.model.dtype import Dtype
from soloist.model.quantized import COLUMNS
from soloist.model.torch_types import TORCH_DTYPES
from soloist.weights.numbers import as_numbers
from soloist.weights.packing import pack

KINDS = ("plain", *FORMATS)
# Rows, columns, order, blocks, tiles whose sums a warp keeps at once.
Shape = tuple[int, int, RowOrder, int, int]
SHAPES: dict[str, Shape] = {
    "one block": (48, 1024, RowOrder.NATURAL, 1, 3),
    "halves left over": (200, 1536, RowOrder.NATURAL, 7, 1),
    "two groups": (320, 1024, RowOrder.NATURAL, 4, 2),
    "part of a step": (72, 224, RowOrder.NATURAL, 3, 2),
    "heads": (256, 512, RowOrder.HEADS, 5, 4),
    "gate and up": (192, 1024, RowOrder.PAIRED, 5, 2),
    "an odd vocabulary": (203, 512, RowOrder.NATURAL, 9, 2),
}


@dataclass(frozen=True)
class Packed:
    """A matrix.

    Attributes:
        plan: of a model whose heads it may have.
        operation: how it is packed.
        image: uint8 [blocks, bytes].
        numbers: [rows, columns] in 16 bits, as unpacking gives them; columns in the order of codes.
    """

    plan: Plan
    operation: Operation
    image: Tensor
    numbers: Tensor


def packed_matrix(kind: str, shape: Shape, dtype: Dtype = Dtype.BF16) -> Packed:
    """A matrix of random codes, or of random numbers."""
    rows, columns, order, blocks, group_tiles = shape
    gpu = Gpu("sm_90a", 9, 227 * 1024)
    plan = make_plan(SMALL, dtype, gpu)
    if kind == "plain":
        draw = torch.Generator().manual_seed(rows)
        numbers = torch.randn(rows, columns, generator=draw).to(TORCH_DTYPES[dtype])
        stored, parts = format_of(dtype), {"": numbers}
    else:
        quantized = FORMATS[kind]
        stored = quantized_format(quantized)
        parts = random_parts(rows, columns, quantized)
        parts.pop(COLUMNS, None)
        plain = quantized_without_order(kind)
        numbers = as_numbers(plain, parts, dtype)
    matrix = Matrix("any", rows, columns, order, blocks, stored)
    operation = Operation(matrix, group_tiles, gpu)
    packed = pack(plan, operation, parts).view(torch.uint8).view(matrix.units, -1)
    image = torch.zeros(blocks, matrix.max_block_bytes + 512, dtype=torch.uint8)
    for block in range(blocks):
        own = packed[matrix.first_unit(block) : matrix.first_unit(block + 1)].flatten()
        image[block, : len(own)] = own
    return Packed(plan, operation, image, numbers)


def quantized_without_order(kind: str):
    """What codes mean where their columns are."""
    from dataclasses import replace

    return replace(FORMATS[kind], permuted=False)
