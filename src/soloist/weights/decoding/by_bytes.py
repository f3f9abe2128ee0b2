"""FP8 and int8, a code a byte in rows: Hugging Face's FP8, ModelOpt's, compressed-tensors'."""

from collections.abc import Mapping

import torch
from torch import Tensor

from soloist.model.quantization.matrices import StoredMatrix
from soloist.model.quantization.scheme import Role
from soloist.weights.decoding.parts import Decoded, by_row, decoded


def decode(matrix: StoredMatrix, tensors: Mapping[Role, Tensor]) -> Decoded:
    """Codes are there; scales in E8M0 become the powers of two that they stand for."""
    scales = tensors[Role.SCALES]
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.to(torch.float32)
    zeros = tensors.get(Role.ZEROS)
    return decoded(
        matrix,
        tensors[Role.CODES],
        by_row(matrix, scales),
        None if zeros is None else by_row(matrix, zeros),
    )
