"""The same operations as CUDA kernels of our own (`cuda/kernels/lane_prefill.cu`)."""

import ctypes

from torch import Tensor

from soloist.prefill.elementwise import Chunk, Elementwise, Reach
from soloist.prefill.fused import FusedElementwise, KernelArgs, pointer
from soloist.prefill.lane_elementwise import Due, LaneOperations, News

_ENTRIES = ("embed_lanes", "hear", "meet_at_head")
_OF_RANKS = ("sum_lanes", "hear_and_sum")
_FOUR = 4
# From so many on a block takes all lanes of a token, and makes their sum once; with fewer there
# would not be enough blocks for a GPU.
_MANY_TOKENS = 512
# That sum beside streams that hear: one for each SM of a large GPU, which leaves room for others.
_SUM_BLOCKS = 132


class KernelNews(ctypes.Structure):
    """`News` as kernels take it; `weight_stride` counts fours from lane to lane."""

    _fields_ = (
        ("own", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("summed", ctypes.c_void_p),
        ("past", ctypes.c_void_p),
        ("own_scale", ctypes.c_float),
        ("weight_stride", ctypes.c_uint32),
    )


class KernelHearing(ctypes.Structure):
    """What `hear` does, as kernels take it."""

    _fields_ = (
        ("streams", ctypes.c_void_p),
        ("news", KernelNews),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("exact", ctypes.c_void_p),
        ("tokens", ctypes.c_uint32),
        ("together", ctypes.c_uint32),
    )


class KernelDue(ctypes.Structure):
    """What `sum_lanes` does, as kernels take it."""

    _fields_ = (
        ("has_parts", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
    )


class FusedLanes(LaneOperations):
    """On a CUDA device, for 16-bit pools.

    Args:
        base: operations of any model, compiled for these lanes.

    Raises:
        DeviceError: the kernels cannot be compiled or loaded.
    """

    def __init__(self, base: Elementwise) -> None:
        assert isinstance(base, FusedElementwise), "these share its stream and its peers"
        self._base = base
        entries = (*_ENTRIES, *(_OF_RANKS if base.ranks > 1 else ()))
        assert base.sources.lanes is not None, "of a model with lanes"
        self._kernels = base.load(base.sources.lanes, entries)

    def embed_lanes(self, table: Tensor, chunk: Chunk, streams: Tensor) -> None:
        """See the base class."""
        assert table.is_contiguous(), "rows lie one after the other"
        args = (pointer(table), pointer(chunk.ids), pointer(streams))
        self._launch("embed_lanes", chunk.num_rows, args)

    def hear(
        self, streams: Tensor, news: News, weight: Tensor, out: Tensor, exact: Tensor | None = None
    ) -> None:
        """See the base class."""
        hearing = hearing_of(streams, news, weight, out, exact)
        self._launch("hear", _blocks(hearing, streams), (hearing,))

    def sum_lanes(self, reach: Reach, due: Due) -> None:
        """See the base class."""
        blocks = max(1, len(due.own)) if due.has_parts else 1
        self._launch("sum_lanes", blocks, (self._base.reaching(reach), _due(due)))

    def hear_and_sum(
        self, streams: Tensor, news: News, weight: Tensor, out: Tensor, reach: Reach, due: Due
    ) -> None:
        """See the base class."""
        hearing = hearing_of(streams, news, weight, out, None)
        blocks = min(max(1, len(due.own)), _SUM_BLOCKS) if due.has_parts else 1
        args = (hearing, self._base.reaching(reach), _due(due), ctypes.c_uint32(blocks))
        self._launch("hear_and_sum", blocks + _blocks(hearing, streams), args)

    def meet_at_head(self, reach: Reach, weight: Tensor | None, out: Tensor) -> None:
        """See the base class."""
        args = (self._base.reaching(reach), pointer(weight), pointer(out))
        self._launch("meet_at_head", 1, args)

    def _launch(self, entry: str, blocks: int, args: KernelArgs) -> None:
        self._kernels.launch(entry, blocks, args, self._base.stream)


def hearing_of(
    streams: Tensor, news: News, weight: Tensor, out: Tensor, exact: Tensor | None
) -> KernelHearing:
    """For `hear`; arguments as of `LaneOperations`."""
    told = (news.own, news.sums, news.summed, news.past)
    held = (streams, out, exact, *told)
    assert all(x is None or x.is_contiguous() for x in held), "lanes lie one after the other"
    lanes, tokens, hidden = streams.shape
    stride = 0 if weight.ndim == 1 else hidden // _FOUR
    return KernelHearing(
        pointer(streams), KernelNews(*(pointer(x) for x in told), news.own_scale, stride),
        pointer(weight), pointer(out), pointer(exact), tokens,
        lanes if tokens >= _MANY_TOKENS else 1,
    )  # fmt: skip


def _blocks(hearing: KernelHearing, streams: Tensor) -> int:
    return streams.shape[0] * streams.shape[1] // int(hearing.together)


def _due(due: Due) -> KernelDue:
    return KernelDue(due.has_parts, due.own.start, len(due.own), due.tokens)
