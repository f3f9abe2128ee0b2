"""Queries, keys and values of a round, from the product of qkv to what attention takes."""

import torch
from torch import Tensor

from soloist.megakernel.interpreter.exchange import Exchange, rounded
from soloist.megakernel.interpreter.weights import Weights
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan


class Projection:
    """The rows of qkv, which every block that needs them norms and rotates for itself.

    Args:
        plan: the buffer's size.
        weights: norms and biases.
        rope: [positions, D / 2, 2] cosine and sine.
        dtype: what results are rounded to; None for no rounding.
    """

    def __init__(
        self, plan: Plan, weights: Weights, rope: Tensor, dtype: torch.dtype | None
    ) -> None:
        self._plan, self._weights, self._rope, self._dtype = plan, weights, rope, dtype
        self._values = Exchange(plan, "projected")
        self._factor = torch.zeros(plan.blocks, MAX_QUERIES)

    def publish(self, epoch: int, block: int, rows: range, product: Tensor, factor: Tensor) -> None:
        """A block's rows [queries, rows], and what it multiplies all rows of a query by."""
        where = (slice(len(product)), slice(rows.start, rows.stop), 0)
        self._values.write(epoch, where, product)
        self._factor[block, : len(factor)] = factor

    def clear(self, epoch: int) -> None:
        """See Exchange."""
        self._values.clear(epoch)

    def prepared(self, layer: int, epoch: int, head: int, query: int, position: int) -> Tensor:
        """[group + 2, D]: queries, key and value of one KV head, normed, rotated and rounded."""
        attention = self._plan.model.layers[layer].attention
        members = self._members(layer, epoch, head, query)
        rotating, value = members[:-1], members[-1:]
        if attention.qk_norm:
            rotating = self._normed(layer, rotating)
        if attention.rope:
            rotating = _rotated(rotating, self._rope[position])
        return rounded(torch.cat([rotating, value]), self._dtype)

    def _members(self, layer: int, epoch: int, head: int, query: int) -> Tensor:
        """[group + 2, D] with biases."""
        shape = self._plan.shape
        size = (shape.group + 2) * shape.head_dim
        rows = range(head * size, (head + 1) * size)
        # One of those that may need them; all know the same factor.
        block = head * self._plan.attention.splits
        members = self._values.read(epoch, (query, slice(rows.start, rows.stop), 0))
        scaled = members * self._factor[block, query]
        return (scaled + self._weights.vector(layer, "qkv_bias", rows)).view(-1, shape.head_dim)

    def _normed(self, layer: int, x: Tensor) -> Tensor:
        """Queries and a key, each by its norm."""
        d, group = range(self._plan.shape.head_dim), self._plan.shape.group
        q, k = (self._weights.vector(layer, name, d) for name in ("q_norm", "k_norm"))
        scale = (x.square().mean(1, keepdim=True) + self._plan.model.norm_epsilon).rsqrt()
        return x * scale * torch.stack([*[q] * group, k])


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """[heads, D] at one position, whose [D / 2, 2] cosines and sines these are."""
    (cos, sin), (low, high) = rotations.unbind(1), x.chunk(2, dim=1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], 1)
