"""Partial results of attention, where a cache is split over several blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from soloist.megakernel.interpreter.exchange import Exchange
from soloist.megakernel.interpreter.softmax import Softmax, joined
from soloist.megakernel.plan import Plan

# As many lanes merge the partial results of a query, as many at once.
_LANES = 4
_BATCH = 4


class Partials:
    """[query][query head][split]: each split's part, for the blocks that merge."""

    def __init__(self, plan: Plan) -> None:
        self._shape = plan.shape
        self._out = Exchange(plan, "partial")
        self._stats = Exchange(plan, "partial_stats")

    def publish(self, epoch: int, queries: range, head: int, split: int, part: Softmax) -> None:
        """One split's result for the rows of some queries and a KV head."""
        where = (slice(queries.start, queries.stop), self._of(head), split)
        stats, rows = torch.stack([part.top, part.total], dim=1), (len(queries), self._shape.group)
        self._out.write(epoch, (*where, slice(None), 0), part.out.unflatten(0, rows))
        self._stats.write(epoch, where, stats.unflatten(0, rows))

    def merged(self, epoch: int, query: int, head: int, splits: Sequence[int]) -> Tensor:
        """[group, D]: attention of a query over the splits, in this order."""
        lanes = [
            self._lane(epoch, query, head, splits[i:]) for i in range(0, _LANES * _BATCH, _BATCH)
        ]
        while len(lanes) > 1:  # neighbours first
            lanes = [joined(pair) for pair in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0].mean

    def _lane(self, epoch: int, query: int, head: int, splits: Sequence[int]) -> Softmax:
        """One lane's part of these: a batch, and after the other lanes' batches the next."""
        merged = Softmax.empty(self._shape.group, self._shape.head_dim)
        for i in range(0, len(splits), _LANES * _BATCH):
            where = (query, self._of(head), splits[i : i + _BATCH])
            tops, totals = self._stats.read(epoch, where).unbind(2)
            outs = self._out.read(epoch, (*where, slice(None), 0))
            merged.add_parts(tops, totals, outs)
        return merged

    def clear(self, epoch: int) -> None:
        """See Exchange."""
        self._out.clear(epoch)
        self._stats.clear(epoch)

    def _of(self, head: int) -> slice:
        """The query heads of a KV head."""
        return slice(head * self._shape.group, (head + 1) * self._shape.group)
