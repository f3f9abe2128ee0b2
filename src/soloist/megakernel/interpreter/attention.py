"""Attention of a round: every block's splits of its KV head's caches, then what it merges."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.kv.layout import HALF_PAGE_POSITIONS
from soloist.megakernel.interpreter.cache import Cache, Stored
from soloist.megakernel.interpreter.exchange import Operand
from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.interpreter.partials import Partials
from soloist.megakernel.interpreter.projection import Projection
from soloist.megakernel.interpreter.softmax import Softmax, joined
from soloist.megakernel.interpreter.split import Group, Splits
from soloist.megakernel.plan import Plan

# A block merges so many neighbouring numbers of a query, and then others those after them.
_PIECE = 8


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of one round."""

    number: int
    epoch: int
    splits: Splits
    groups: tuple[Group, ...]


class Attention:
    """From queries, keys and values to the operand of attention_output.

    Args:
        plan: how caches are split.
        memory: the KV pool.
        projection: queries, keys and values.
        dtype: what the kernel rounds to; None for no rounding.

    Attributes:
        attended: what comes of it, [queries, query heads · D].
    """

    def __init__(
        self, plan: Plan, memory: Memory, projection: Projection, dtype: torch.dtype | None
    ) -> None:
        self._plan, self._projection, self._dtype = plan, projection, dtype
        self._cache, self._partials = Cache(plan, memory), Partials(plan)
        self.attended = Operand(plan, "attended", dtype)

    def clear(self, epoch: int) -> None:
        """See Exchange."""
        self.attended.clear(epoch)
        self._partials.clear(epoch)

    def run(
        self, number: int, epoch: int, sequences: Sequence[int], positions: Sequence[int]
    ) -> None:
        """A layer, for queries of sequences at positions."""
        window = self._plan.model.layers[number].attention.window
        splits = Splits(self._plan.attention, number, window)
        layer = _Layer(number, epoch, splits, tuple(splits.groups(sequences, positions)))
        shape = (self._plan.shape.kv_heads, len(positions), max(positions) + 1)
        seen = torch.zeros(shape, dtype=torch.int32)
        for head, place in self._owners():
            for group in layer.groups:
                split = (place - group.first_place) % self._plan.attention.splits
                if split < group.splits:
                    self._attend(layer, head, split, group, seen[head])
        _check(splits, positions, seen)
        for head, place in self._owners():
            for query, position in enumerate(positions):
                if splits.count(position) > 1:
                    self._merge(epoch, head, place, query, splits.in_order(position))

    def _owners(self) -> Iterator[tuple[int, int]]:
        """(KV head, place among those that have it) of all blocks that have one."""
        places = (divmod(b, self._plan.attention.splits) for b in range(self._plan.blocks))
        return ((head, place) for head, place in places if head < self._plan.shape.kv_heads)

    def _attend(self, layer: _Layer, head: int, split: int, group: Group, seen: Tensor) -> None:
        """One group's queries against the pages of one split."""
        half_pages = list(layer.splits.half_pages(group, split))
        if not half_pages:
            return
        fresh = self._fresh(layer, head, group)
        queries = torch.cat([x[:-2] for x in fresh[-len(group.queries) :]])
        lanes = range(self._plan.attention.softmax_lanes)
        parts = [Softmax.empty(*queries.shape) for _ in lanes]
        for start, lane in half_pages:
            self._append(layer, head, group, start, fresh)
            keys, values = self._cache.read(layer.number, head, group.sequence, start)
            visible = _visible(layer.splits, group, start)
            _count(seen, group, start, visible)
            scores = _scores(queries, keys, visible)
            parts[lane].add(scores, values.numbers, self._dtype, values.scales)
        self._publish(layer, head, split, group, joined(parts))

    def _fresh(self, layer: _Layer, head: int, group: Group) -> list[Tensor]:
        """[group + 2, D] of each query whose keys and values come with this round."""
        return [
            self._projection.prepared(layer.number, layer.epoch, head, query, position)
            for query, position in zip(group.fresh, group.fresh_positions, strict=True)
        ]

    def _append(
        self, layer: _Layer, head: int, group: Group, start: int, fresh: Sequence[Tensor]
    ) -> None:
        """Those of a half page, before the half page is read."""
        for members, position in zip(fresh, group.fresh_positions, strict=True):
            if position in range(start, start + HALF_PAGE_POSITIONS):
                self._cache.append(layer.number, head, group.sequence, position, members[-2:])

    def _publish(self, layer: _Layer, head: int, split: int, group: Group, part: Softmax) -> None:
        """An unsplit group's attention, or a split one's partial results."""
        if group.splits > 1:
            self._partials.publish(layer.epoch, group.queries, head, split, part)
            return
        finished = part.mean.view(len(group.queries), -1)
        self.attended.publish(layer.epoch, group.queries, self._rows(head), finished)

    def _merge(self, epoch: int, head: int, place: int, query: int, splits: Sequence[int]) -> None:
        """A block's pieces of a query whose cache is split."""
        rows, places = self._rows(head), self._plan.attention.splits
        pieces = len(rows) // _PIECE
        own = [i for i in range(pieces) if (query * pieces + i) % places == place]
        k = [rows[i * _PIECE + j] for i in own for j in range(_PIECE)]
        merged = self._partials.merged(epoch, query, head, splits).view(pieces, _PIECE)
        self.attended.publish(epoch, range(query, query + 1), k, merged[own].view(1, -1))

    def _rows(self, head: int) -> range:
        """Where attention of a KV head's queries lies."""
        size = self._plan.shape.group * self._plan.shape.head_dim
        return range(head * size, (head + 1) * size)


def _visible(splits: Splits, group: Group, start: int) -> Tensor:
    """[queries, 32]: which positions of a half page each query sees."""
    at = start + torch.arange(HALF_PAGE_POSITIONS)
    first = torch.tensor([splits.window_start(p) for p in group.positions])[:, None]
    return (at >= first) & (at <= torch.tensor(group.positions)[:, None])


def _scores(queries: Tensor, keys: Stored, visible: Tensor) -> Tensor:
    """[rows, 32], to base 2, minus infinity where a row's query does not see."""
    scale: float = queries.shape[1] ** -0.5 * math.log2(math.e)
    scores, group = _products(queries, keys) * scale, len(queries) // len(visible)
    return scores.masked_fill(~visible.repeat_interleave(group, dim=0), -math.inf)


def _products(queries: Tensor, keys: Stored) -> Tensor:
    """[rows, 32]; of codes the sum of each part of a head is scaled by itself."""
    if keys.scales is None:
        return queries @ keys.numbers.T
    count = keys.scales.shape[1]
    parts = zip(queries.chunk(count, 1), keys.numbers.chunk(count, 1), keys.scales.T, strict=True)
    first, *others = (q @ codes.T * scale for q, codes, scale in parts)
    scores: Tensor = sum(others, first)
    return scores


def _count(seen: Tensor, group: Group, start: int, visible: Tensor) -> None:
    """Add what a group sees of a half page to one head's [queries, positions]."""
    end = start + HALF_PAGE_POSITIONS
    counted = seen[group.queries.start : group.queries.stop, start:end]
    counted += visible[:, : counted.shape[1]]


def _check(splits: Splits, positions: Sequence[int], seen: Tensor) -> None:
    """[heads, queries, positions]: queries of every head have seen what they should, once."""
    for c, position in enumerate(positions):
        first = splits.window_start(position)
        assert not seen[:, c, :first].any(), "positions before the window"
        assert (seen[:, c, first : position + 1] == 1).all(), "a position counts once"
