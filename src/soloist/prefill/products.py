"""Matrix products by the device's library."""

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.prefill.batched_experts import ExpertMatrices
from soloist.prefill.experts import ExpertProducts

Matrices = Callable[[str], Tensor]
# Libraries ask no more of where a matrix lies.
_MOST_ALIGNMENT = 256


class Arranged(NamedTuple):
    """A product's factor whose columns are in the order in which a kernel of ours reads them."""

    values: Tensor


Factor = Tensor | Arranged


class Products:
    """Multiplies by a model's matrices, batched where a rank has streams side by side.

    Args:
        matrices: a row-major matrix [out, in], of l lanes [l, out, in], by the name of its
            `TensorSpec`, valid until the next call.
        experts: rows of those of mixtures, or what multiplies by them; None where there are none.

    Attributes:
        in_rows: all matrices can be had row by row; otherwise the embedding alone, unless it is
            the head.
        matrix: `matrices`.
        experts: as given.
        padded_rows: as of `Widths.products`.
        pads: whether these count: not in a pass whose rows may have bits of their own.
        gates_all: `gated` is never None, so nobody needs room for gate and up.
    """

    in_rows = True
    gates_all = False

    def __init__(
        self, matrices: Matrices, experts: ExpertMatrices | ExpertProducts | None = None
    ) -> None:
        self.matrix, self.experts = matrices, experts
        self.padded_rows: Mapping[tuple[str, int], int] = {}
        self.pads = True

    def behaviour(self, name: str) -> tuple[int, Hashable]:
        """Columns of a matrix, and what decides how it is multiplied, beside the number of rows."""
        matrix = self.matrix(name)
        alignment = min(matrix.data_ptr() & -matrix.data_ptr(), _MOST_ALIGNMENT)
        return matrix.shape[-1], (alignment, tuple(matrix.shape))

    def takes_arranged(self, name: str) -> bool:  # noqa: ARG002 - libraries take their order
        """Whether a matrix is multiplied quickest by factors whose columns are `Arranged`."""
        return False

    def factor(self, x: Tensor, name: str) -> Factor:
        """`x`, written in the order that `takes_arranged` says, as the matrix's factor."""
        return Arranged(x) if self.takes_arranged(name) else x

    def look_up(self, ids: Tensor, residual: Tensor) -> bool:  # noqa: ARG002 - tables lie in rows
        """Rows of the embedding as the residual stream, [T, H] fp32.

        Returns:
            Whether that was done: only where the embedding lies otherwise than row by row.
        """
        return False

    def gated(self, x: Factor, name: str, out: Tensor) -> Factor | None:  # noqa: ARG002 - the same
        """silu(gate) · up of `x`'s product with a gate_up that has no bias, in `out` [T, F].

        Returns:
            `out`, or None where products are not made that way.
        """
        return None

    def multiply(self, x: Factor, name: str, out: Tensor, first: int = 0) -> None:
        """`out` [T, rows] = `x` [T, columns] · matrixᵀ, summed in fp32; rows from `first` on.

        Batched, `out` is [l, T, rows], and `x` [l, T, columns] or [T, l · columns].
        """
        assert isinstance(x, Tensor), "libraries take columns in their order"
        x, out = self.lengthened(name, x, out)
        self.multiply_by(x, self.matrix(name)[..., first:, :], out[..., first:])

    def multiply_in_parts(self, x: Factor, name: str, out: Tensor) -> Tensor:
        """The same, where the next operation can add parts of sums.

        Returns:
            `out`, or where a kernel makes sums in parts these, [parts, T, rows] fp32, valid until
            the next call: their sum in this order is what `out` would have.
        """
        self.multiply(x, name, out)
        return out

    def num_rows(self, name: str, rows: int) -> int:
        """How many rows the product of a pass of so many rows takes."""
        return self.padded_rows.get((name.rpartition(".")[2], rows), rows) if self.pads else rows

    def lengthened(self, name: str, *buffers: Tensor) -> list[Tensor]:
        """Buffers' rows of a pass with those behind them, as many as the product takes.

        Rows behind a pass's own are of no use: it is for the order in which those before are
        summed.
        """
        rows = len(buffers[0])
        count = self.num_rows(name, rows)
        return [x if count == rows else x.as_strided((count, *x.shape[1:]), x.stride())
                for x in buffers]  # fmt: skip

    def multiply_by(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """`out` = `x` · `matrix`ᵀ; shapes as of `multiply`."""
        if out.ndim > 2:
            if x.ndim == 2:
                x = x.view(len(x), len(out), -1).transpose(0, 1)
            torch.bmm(x, matrix.mT, out=out)
        elif out.dtype is x.dtype:
            torch.mm(x, matrix.mT, out=out)
        else:
            torch.mm(x, matrix.mT, out_dtype=out.dtype, out=out)
