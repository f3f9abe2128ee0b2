"""What every decoder makes, and steps that several share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.errors import QuantizationMismatch
from soloist.model.quantization.matrices import StoredMatrix
from soloist.model.quantization.scheme import Role
from soloist.model.quantized import COLUMNS, SCALES, ZEROS, Codes, Quantized
from soloist.model.torch_types import TORCH_DTYPES
from soloist.weights.numbers import packed, unpacked


@dataclass(frozen=True, slots=True)
class Decoded:
    """A matrix in rows.

    Attributes:
        quantized: what the parts mean.
        parts: codes, scales and zeros by the end of their names.
        groups: [K], of each column, where they do not follow each other.
    """

    quantized: Quantized
    parts: dict[str, Tensor]
    groups: Tensor | None = None

    def by_group(self) -> dict[str, Tensor]:
        """Parts in which columns of codes lie by group, with a table that says which they are."""
        if self.groups is None:
            return self.parts
        columns, codes = self.groups.argsort(stable=True), self.parts[""]
        if self.quantized.codes is Codes.INT4:
            codes = packed(unpacked(codes)[:, columns])
        else:
            codes = codes.view(torch.uint8)[:, columns].view(codes.dtype)
        return {**self.parts, "": codes, COLUMNS: columns.to(torch.uint16)}


def decoded(
    matrix: StoredMatrix,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None = None,
) -> Decoded:
    """Put parts [N, …] together; scales and zeros have a row for each row."""
    dtype = TORCH_DTYPES[matrix.quantized.scale_dtype]
    parts = {"": codes.contiguous(), SCALES: scales.to(dtype).contiguous()}
    if zeros is not None:
        parts[ZEROS] = zeros.contiguous()
    return Decoded(matrix.quantized, parts, groups)


def by_row(matrix: StoredMatrix, shared: Tensor) -> Tensor:
    """Scales or zeros of a matrix, a row or a block of rows as [N, G]."""
    rows = matrix.scheme.rows
    if rows == 0:
        return shared.reshape(1, 1).expand(matrix.rows, 1)
    if shared.dim() == 1:
        return shared[:, None]
    if rows == 1:
        return shared
    return shared.repeat_interleave(rows, 0)[: matrix.rows]


def split_words(words: Tensor, bits: int) -> Tensor:
    """Fields of 32-bit words [..., W] in order, the lowest first, as uint8 [..., W · 32 / bits]."""
    # `contiguous` leaves the strides of dimensions of one, which `view` then minds.
    in_order = words.clone(memory_format=torch.contiguous_format)
    in_bytes = in_order.view(torch.uint8)  # the lowest byte first, as on all hosts here
    if bits == 8:
        return in_bytes
    return torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(-2)


def signed(codes: Tensor) -> Tensor:
    """0 … 255 as -128 … 127."""
    return (codes ^ 0x80).view(torch.int8)


def column_groups(matrix: StoredMatrix, given: Tensor | None) -> Tensor | None:
    """The group of each column; None where columns of a group follow each other.

    Raises:
        QuantizationMismatch: there are no such groups, or the configuration says nothing of an
            order.
    """
    if given is None:
        return None
    name, count = matrix.tensors[Role.GROUPS].name, matrix.quantized.groups(matrix.columns)
    if int(given.min()) < 0 or int(given.max()) >= count:
        raise QuantizationMismatch(
            name,
            f"groups {int(given.min())} … {int(given.max())}",
            f"0 … {count - 1}, since there are scales of {count}",
        )
    groups = given.long()
    in_order = torch.arange(matrix.columns, device=given.device)
    if torch.equal(groups, in_order // (matrix.scheme.group or matrix.columns)):
        return None
    if not matrix.scheme.reordered:
        raise QuantizationMismatch(
            name, "columns in groups of their own order", "groups of consecutive columns"
        )
    return groups
