"""AWQ's and GPTQ's orders: a matrix's columns come one after the other, and groups of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from soloist.errors import QuantizationMismatch
from soloist.model.quantization.matrices import StoredMatrix
from soloist.model.quantization.scheme import Role
from soloist.model.quantized import Codes
from soloist.weights.decoding.parts import Decoded, column_groups, decoded, signed, split_words
from soloist.weights.numbers import packed

# Where in a word of AWQ's rows 0 … 7 are.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def decode_awq(matrix: StoredMatrix, tensors: Mapping[Role, Tensor]) -> Decoded:
    """Words of eight rows, for codes and zeros."""
    codes = packed(_in_order(tensors[Role.CODES]).t())
    zeros = _in_order(tensors[Role.ZEROS]).t()
    return decoded(matrix, codes, tensors[Role.SCALES].t(), _checked(matrix, zeros))


def decode_gptq(matrix: StoredMatrix, tensors: Mapping[Role, Tensor]) -> Decoded:
    """Words of consecutive columns, whose bytes are in order once rows come first."""
    bits = matrix.scheme.codes.bits
    words = tensors[Role.CODES].t().clone(memory_format=torch.contiguous_format)
    codes = words.view(torch.uint8)
    # What was taken off every zero is added to all fields of a word at once, as it was taken off:
    # what one field borrowed from the next comes back.
    offset = matrix.scheme.zero_offset * (0x11111111 if bits == 4 else 0x01010101)
    zeros = split_words(tensors[Role.ZEROS] + offset, bits).t()
    if matrix.scheme.codes is Codes.INT8:
        codes, zeros = signed(codes), signed(zeros)
    groups = column_groups(matrix, tensors.get(Role.GROUPS))
    return decoded(matrix, codes, tensors[Role.SCALES].t(), _checked(matrix, zeros), groups)


def _in_order(words: Tensor) -> Tensor:
    """Fields of AWQ's words [..., W] as rows of the matrix [..., 8 · W]."""
    fields: Tensor = split_words(words, 4).unflatten(-1, (-1, 8))
    places = torch.tensor(_PLACES, device=words.device)
    return fields.index_select(-1, places).flatten(-2)


def _checked(matrix: StoredMatrix, zeros: Tensor) -> Tensor | None:
    """Zeros, where they say something; a symmetric matrix has the middle of its range."""
    if not matrix.scheme.symmetric:
        return zeros
    middle = 8 if matrix.scheme.codes is Codes.INT4 else 0
    if bool((zeros != middle).any()):
        unsigned = 0 if matrix.scheme.codes is Codes.INT4 else 128
        raise QuantizationMismatch(
            matrix.tensors[Role.ZEROS].name,
            f"zeros from {int(zeros.min()) + unsigned} to {int(zeros.max()) + unsigned}",
            f"{middle + unsigned} everywhere, since it is symmetric",
        )
    return None
