"""Running softmaxes, to base 2, and how several become one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.megakernel.interpreter.exchange import rounded


@dataclass(slots=True)
class Softmax:
    """Attention over some positions, for rows of (query, query head).

    Attributes:
        top: [rows] the largest score so far.
        total: [rows] sum of weights.
        out: [rows, D] sums of values.
    """

    top: Tensor
    total: Tensor
    out: Tensor

    @classmethod
    def empty(cls, rows: int, head_dim: int) -> "Softmax":
        """Over no positions."""
        top = torch.full((rows,), -math.inf)
        return cls(top, torch.zeros(rows), torch.zeros(rows, head_dim))

    @property
    def mean(self) -> Tensor:
        """[rows, D]: values by their weights."""
        return self.out / self.total[:, None]

    def add(
        self,
        scores: Tensor,
        values: Tensor,
        dtype: torch.dtype | None,
        scales: Tensor | None = None,
    ) -> None:
        """More positions.

        Args:
            scores: [rows, positions], minus infinity where unseen.
            values: [positions, D].
            dtype: what weights are rounded to before they multiply values; None for no rounding.
            scales: [positions, scales of a head] of values that are codes: weights take them on.
        """
        before, self.top = self.top, torch.maximum(self.top, scores.amax(1))
        base = self.top.nan_to_num(neginf=0.0)
        shrink, weights = (before - base).exp2(), (scores - base[:, None]).exp2()
        self.total = self.total * shrink + weights.sum(1)
        if scales is None:
            added = rounded(weights, dtype) @ values
        else:
            parts = zip(values.chunk(scales.shape[1], 1), scales.T, strict=True)
            added = torch.cat([rounded(weights * s, dtype) @ codes for codes, s in parts], 1)
        self.out = self.out * shrink[:, None] + added

    def add_parts(self, tops: Tensor, totals: Tensor, outs: Tensor) -> None:
        """What others have summed: [rows, parts] twice, and [rows, parts, D]."""
        before, self.top = self.top, torch.maximum(self.top, tops.amax(1))
        shrink, weights = (before - self.top).exp2(), (tops - self.top[:, None]).exp2()
        self.total = self.total * shrink + (totals * weights).sum(1)
        self.out = self.out * shrink[:, None] + (outs * weights[:, :, None]).sum(1)


def joined(parts: Sequence[Softmax]) -> Softmax:
    """All of them at once, in their order."""
    tops = torch.stack([x.top for x in parts])
    top = tops.amax(0)
    weights = (tops - top.nan_to_num(neginf=0.0)).exp2()
    total = (torch.stack([x.total for x in parts]) * weights).sum(0)
    return Softmax(top, total, (torch.stack([x.out for x in parts]) * weights[:, :, None]).sum(0))
