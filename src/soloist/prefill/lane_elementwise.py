"""What a Laneformer's prefill does between products, in plain torch, which kernels have to match.

Streams [l, T, H] are fp32, of the l lanes that a rank has; their partial results have the pool's
dtype, as in the reference. Sums over lanes go in the order of all lanes, in fp32, so that they have
the same bits for any number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from soloist.prefill.elementwise import Chunk, Elementwise, Reach, rms_norm


@dataclass(frozen=True, slots=True)
class News:
    """What joins the streams after a module: own + (sum over lanes - past); see `DelayLine`.

    Attributes:
        own: [l, T, H], the lanes' partial results.
        own_scale: of `own`, where there is no sum.
        sums: [T, H] fp32, the sum over all lanes.
        summed: [l, T, H], partial results that are summed instead, where a rank has all lanes.
        past: [l, T, H], the lanes' own part of the sum.
    """

    own: Tensor | None = None
    own_scale: float = 1.0
    sums: Tensor | None = None
    summed: Tensor | None = None
    past: Tensor | None = None

    def of_row(self, row: Tensor) -> "News":
        """The same for one row, an index [1]."""

        def taken(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(-2, row)

        own, sums, summed, past = map(taken, (self.own, self.sums, self.summed, self.past))
        return News(own, self.own_scale, sums, summed, past)


@dataclass(frozen=True, slots=True)
class Due:
    """What a rank sums for all.

    Attributes:
        has_parts: without them nothing is summed, and a rank only waits for all others.
        own: rows that it sums.
        tokens: of the chunk.
    """

    has_parts: bool
    own: range
    tokens: int


class LaneOperations(ABC):
    """What lanes need beside the operations of any model.

    A `Reach` has partial results [l, T, H] and sums [T, H] of each rank, as parts and results.
    """

    @abstractmethod
    def embed_lanes(self, table: Tensor, chunk: Chunk, streams: Tensor) -> None:
        """Each of `streams` [l, T, H] = rows of `table` [V, H]."""

    @abstractmethod
    def hear(
        self, streams: Tensor, news: News, weight: Tensor, out: Tensor, exact: Tensor | None = None
    ) -> None:
        """`streams` += `news`; `out` and `exact` (fp32) = their RMS norms times `weight`.

        Args:
            streams: [l, T, H] fp32.
            news: what joins them.
            weight: [H], or [l, H].
            out: [l, T, H].
            exact: [l, T, H] fp32.
        """

    @abstractmethod
    def sum_lanes(self, reach: Reach, due: Due) -> None:
        """Wait for all ranks, give them the sums that are due, and tell them."""

    def hear_and_sum(
        self,
        streams: Tensor,
        news: News,
        weight: Tensor,
        out: Tensor,
        reach: Reach,
        due: Due,
    ) -> None:
        """`hear` and `sum_lanes` side by side; `news` has nothing of these sums."""
        self.sum_lanes(reach, due)
        self.hear(streams, news, weight, out)

    @abstractmethod
    def meet_at_head(self, reach: Reach, weight: Tensor | None, out: Tensor) -> None:
        """What the LM head reads of the last token, after all ranks' `tell`.

        Args:
            reach: parts are fp32 [l, 1, H] of each rank; there are no results.
            weight: [H]: the norm of the sum over lanes times this. None: the mean over lanes.
            out: [1, H].
        """


MakeLanes = Callable[[Elementwise], LaneOperations]


class TorchLanes(LaneOperations):
    """On any device.

    Args:
        base: operations of any model.
    """

    def __init__(self, base: Elementwise) -> None:
        self.base = base

    def embed_lanes(self, table: Tensor, chunk: Chunk, streams: Tensor) -> None:
        """See the base class."""
        streams.copy_(table.index_select(0, chunk.ids).expand_as(streams))

    def hear(
        self, streams: Tensor, news: News, weight: Tensor, out: Tensor, exact: Tensor | None = None
    ) -> None:
        """See the base class."""
        change = _change(news)
        if change is not None:
            streams.add_(change)
        scales = weight if weight.ndim == 1 else weight[:, None]
        norm = rms_norm(streams, scales, self.base.config.norm_epsilon)
        out.copy_(norm)
        if exact is not None:
            exact.copy_(norm)

    def sum_lanes(self, reach: Reach, due: Due) -> None:
        """See the base class; one queue, or the caller's order, has everything told."""
        if not due.has_parts or not due.own:
            return
        here = slice(due.own.start, due.own.stop)
        shape = (-1, due.tokens, reach.results[0].shape[-1])
        total = _total(
            lane
            for part in reach.parts
            for lane in part[: due.tokens].view(shape)[:, here].to(self.base.pool.device)
        )
        for result in reach.results:
            result[here] = total

    def meet_at_head(self, reach: Reach, weight: Tensor | None, out: Tensor) -> None:
        """See the base class."""
        lanes = [lane for part in reach.parts for lane in part.view(-1, *out.shape)]
        total = _total(lane.to(out.device) for lane in lanes)
        if weight is None:
            out.copy_(total / len(lanes))
        else:
            out.copy_(rms_norm(total, weight, self.base.config.norm_epsilon))


def _change(news: News) -> Tensor | None:
    """What is added to the streams, in the reference's order of additions."""
    own = None if news.own is None else news.own.float()
    total = news.sums if news.summed is None else _total(news.summed)
    if total is None:
        return None if own is None else own * news.own_scale
    others = total if news.past is None else total - news.past.float()
    return others if own is None else own + others


def _total(lanes: Iterable[Tensor]) -> Tensor:
    """The fp32 sum in order."""
    first, *others = (lane.float() for lane in lanes)
    return sum(others, first)
