"""`pack-quantized` of compressed-tensors: codes in 32-bit words along a row, zeros along a column.

A stored field is the signed code plus half of its range, and so is a zero's: the two cancel.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from soloist.errors import WrongShape
from soloist.model.quantization.matrices import StoredMatrix
from soloist.model.quantization.scheme import Role
from soloist.model.quantized import Codes
from soloist.weights.decoding.parts import (
    Decoded,
    by_row,
    column_groups,
    decoded,
    signed,
    split_words,
)


def decode(matrix: StoredMatrix, tensors: Mapping[Role, Tensor]) -> Decoded:
    """Bytes of 4-bit codes are already in the order of rows; 8-bit ones lose their offset."""
    shape = tuple(int(size) for size in tensors[Role.SHAPE])
    if shape != matrix.source.shape:
        raise WrongShape(f"{matrix.module}.weight", shape, matrix.source.shape)
    is_int4 = matrix.scheme.codes is Codes.INT4
    in_bytes = tensors[Role.CODES].contiguous().view(torch.uint8)
    width = matrix.columns // 2 if is_int4 else matrix.columns
    codes = in_bytes[:, :width]
    zeros = tensors.get(Role.ZEROS)
    if zeros is not None:
        fields = split_words(zeros.t(), matrix.scheme.codes.bits)  # [G, N and padding]
        zeros = by_row(matrix, fields[:, : matrix.rows].t())
    if not is_int4:
        codes = signed(codes)
        zeros = None if zeros is None else signed(zeros)
    scales = by_row(matrix, tensors[Role.SCALES])
    return decoded(matrix, codes, scales, zeros, column_groups(matrix, tensors.get(Role.GROUPS)))
