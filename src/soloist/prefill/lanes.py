"""A Laneformer's prompts, on one rank or several: each multiplies its lanes, batched.

Because lanes hear of each other d layers late, nobody has to wait for a sum: a rank sums, after a
module's products, what all lanes gave in the module before, for the rows of the chunk that it owns,
and gives the sums to all, while its own streams hear of older ones. Only the first d layers, where
lanes sum at once, and the head wait for everybody. Partial results and sums lie in rings of 2 d + 1
modules. A pass begins with everybody's word that the one before is over. Before a rank sums at
module e it waits until all others have summed at e - 1; then they have sums of e - 2 behind them,
and what their streams heard at e - 2. So
- sums of e - 2 d, heard at e, came before the wait at e - 1 at the latest, or at e where d is 1;
- products of e + 1 overwrite what lanes gave in e - 2 d, and everybody has summed that;
- sums of e - 1 overwrite those of e - 2 d - 2, and everybody has heard them.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.megakernel.lanes import LaneShare, lanes_of_ranks, modules_of, rules_of
from soloist.model.config import ModelConfig
from soloist.model.memory import modules_under_way
from soloist.prefill.elementwise import Chunk, Heads, Reach, Vectors
from soloist.prefill.lane_elementwise import Due, LaneElementwise, News, TorchLanes
from soloist.prefill.pages import PagePool
from soloist.prefill.prompts import MOST_PASS_TOKENS
from soloist.prefill.ranks import RankPart
from soloist.prefill.runner import Buffers, MakeElementwise, Matrices

# Modules: where sums are heard so early, they have to have come by the wait at that very module.
_CLOSE = 2


class _Ring(NamedTuple):
    """What lanes gave in the latest modules, and sums of it; module e's at e modulo their number.

    Rows of T tokens lie as [l, T, H] in as many rows of [l · H].
    """

    parts: Tensor  # [modules, T, l · H]
    sums: Tensor  # [modules, T, H] fp32; none on one rank, which sums while it adds


class _Rows(NamedTuple):
    """Rows of a chunk on their way: all, or of the last layer the last one."""

    buffers: Buffers
    ring: _Ring
    reaches: Sequence[Reach]
    num_rows: int


class LanePrefill(RankPart):
    """One rank's lanes; where there are several ranks, `RanksPrefill` runs all of them.

    Attributes:
        ring: what lanes gave, and sums, of whole chunks.
        last_ring: of the last token in the last layer.

    Args:
        share: which lanes.
        matrices: a row-major matrix in the pool's dtype by the name of its `TensorSpec`, cut for
            the share (`shard_all`): [l, out, in], and 'embedding' [V, H].
        vectors: fp32 norm weights by the name of their `TensorSpec`, of the share.
        pool: gains keys and values; its heads are those of the share's lanes.
        elementwise: `FusedLanes` with its last arguments bound, or plain torch.
        most_tokens: of one chunk; buffers are allocated for as many.
    """

    share: LaneShare
    _elementwise: LaneElementwise

    def __init__(
        self,
        share: LaneShare,
        matrices: Matrices,
        vectors: Vectors,
        pool: PagePool,
        elementwise: MakeElementwise = TorchLanes,
        most_tokens: int = MOST_PASS_TOKENS,
    ) -> None:
        self.share, self._rules = share, rules_of(share.whole)
        self._modules = modules_of(share.whole)
        talks = any(module.communicates for module in self._modules)
        self._talks = talks and share.ranks > 1
        self._late = 2 * self._rules.delay_layers  # modules
        self._num_slots = modules_under_way(share.whole)
        super().__init__(without_lanes(share), matrices, vectors, pool, elementwise, most_tokens)
        assert isinstance(self._elementwise, LaneElementwise), "what lanes need"
        self.ring = self._new_ring(self._num_slots, most_tokens)
        self.last_ring = self._new_ring(2, 1)
        self._norms = self._empty(1, self._width, dtype=torch.float32)
        self._reaches: Sequence[Reach] = []
        self._last_reaches: Sequence[Reach] = []
        self._head_reach = Reach([], [])
        if share.ranks == 1:
            self.connect([self])

    def connect(self, ranks: Sequence["RankPart"]) -> None:
        """See the base class."""
        lanes = [rank for rank in ranks if isinstance(rank, LanePrefill)]
        self._reaches = _reaches([rank.ring for rank in lanes])
        self._last_reaches = _reaches([rank.last_ring for rank in lanes])
        self._head_reach = Reach([rank.met for rank in lanes], [])
        self._connect_kernels(ranks)

    @property
    def met(self) -> Tensor:
        """[1, l · H] fp32, what the lanes give where they meet: norms, or streams."""
        return self._last_row.residual if self._rules.sum_before_norm else self._norms

    @property
    def padded(self) -> Collection[str]:
        """See the base class: a lane's rows are followed by the next lane's."""
        return ()

    @property
    def logits(self) -> Tensor:
        """[rows] fp32, of the rank's part of the vocabulary."""
        return self._logits[0, : len(self.share.vocabulary)].float()

    @property
    def num_bytes(self) -> int:
        """Size of the buffers, without graphs and what attention allocates."""
        own = (*self.ring, *self.last_ring, self._norms)
        return super().num_bytes + sum(x.numel() * x.element_size() for x in own)

    def stages(self, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        """See the base class."""
        for layer in self._layers(chunk, want_logits=want_logits):
            yield from layer

    def _parts(self, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        """See the base class.

        Several ranks have graphs of 1, 1, 2, 4 and so on layers: one host starts them all in turn.
        """
        for i, layer in enumerate(self._layers(chunk, want_logits=want_logits), 1):
            for _ in layer:
                pass
            is_cut = i == 1 or (self.share.ranks > 1 and i.bit_count() == 1)
            if is_cut and i < len(self._names):
                yield

    def _layers(self, chunk: Chunk, *, want_logits: bool) -> Iterator[Iterator[None]]:
        """The stages of each layer, the head's with the last one's; each to be run through."""
        e, count = self._elementwise, chunk.num_rows
        rows = _Rows(self._buffers.rows(count), self.ring, self._reaches, count)
        e.start()
        e.embed_lanes(self._matrices("embedding"), chunk, self._by_lane(rows.buffers.residual))
        if self.share.ranks > 1:
            e.tell(self._reaches[0])  # the pass before is over
        for layer in range(len(self._names)):
            yield self._layer(layer, rows, chunk, want_logits=want_logits)

    def _layer(self, layer: int, rows: _Rows, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        e, b, names = self._elementwise, rows.buffers, self._names[layer]
        vectors, attention, mlp = e.layers[layer], 2 * layer, 2 * layer + 1
        heads = Heads(b.queries, b.keys, b.values)
        yield from self._hear(rows, chunk, attention - 1, vectors.attention_norm)
        self._multiply_lanes(b.normed, names.qkv, b.qkv)
        e.qkv_rope_store(self._by_lane(b.qkv), layer, chunk, heads)
        is_last = layer + 1 == len(self._names)
        if is_last and not want_logits:
            return
        attended = self._attend(layer, chunk, heads)
        if layer == 0 and self.share.ranks > 1:
            yield
            e.meet(self._reaches[0])
        if is_last:  # nobody asks for more than the last token from here on
            attended = attended.index_select(0, chunk.last)
            rows = self._last_of(rows, chunk)
            b = rows.buffers
        by_lane = attended.view(rows.num_rows, len(self.share.lanes), -1).transpose(0, 1)
        self._multiply_lanes(by_lane, names.attention_output, self._given(rows, attention))
        yield from self._exchange(rows, attention)
        yield from self._hear(rows, chunk, attention, vectors.mlp_norm)
        self._multiply_lanes(b.normed, names.gate_up, b.gate_up)
        e.silu_mul(self._by_lane(b.gate_up), None, self._by_lane(b.activated))
        self._multiply_lanes(b.activated, names.down, self._given(rows, mlp))
        yield from self._exchange(rows, mlp)
        if is_last:
            yield from self._head(rows, chunk)

    def _hear(
        self,
        rows: _Rows,
        chunk: Chunk,
        module: int,
        weight: Tensor,
        exact: Tensor | None = None,
    ) -> Iterator[None]:
        """The streams hear what there is after a module's products (-1: none yet); their norms.

        A rank sums then what lanes gave in the module before.
        """
        e = self._elementwise
        streams, out = self._by_lane(rows.buffers.residual), self._by_lane(rows.buffers.normed)
        is_over = self._late > _CLOSE and module + 1 == 2 * len(self._names)
        if not self._talks or module < 0 or self._sums_at_once(module) or is_over:
            e.hear(streams, self._news(rows, chunk, module), weight, out, exact)
            return
        before, count = module - 1, chunk.num_rows
        has_parts = before >= 0 and self._tells(before) and not self._sums_at_once(before)
        reach = self._reaches[before % self._num_slots]
        due = Due(has_parts, self._own(count), count)
        if self._late > _CLOSE:
            e.hear_and_sum(streams, self._news(rows, chunk, module), weight, out, reach, due)
            yield
        else:
            yield
            e.sum_lanes(reach, due)  # and what is news came before all others told
            e.hear(streams, self._news(rows, chunk, module), weight, out, exact)

    def _exchange(self, rows: _Rows, module: int) -> Iterator[None]:
        """Of a module whose sums nobody can do without."""
        if self.share.ranks == 1 or not self._sums_at_once(module):
            return
        e, reach = self._elementwise, rows.reaches[module % len(rows.reaches)]
        e.tell(reach)
        yield
        due = Due(has_parts=True, own=self._own(rows.num_rows), tokens=rows.num_rows)
        e.sum_lanes(reach, due)
        yield
        e.meet(reach)

    def _news(self, rows: _Rows, chunk: Chunk, module: int) -> News:
        """What the streams hear after a module."""
        if module < 0:
            return News()
        kind, layer, given = self._modules[module % 2], module // 2, self._given(rows, module)
        is_alone = self.share.ranks == 1
        if kind.sums(layer):
            if is_alone:
                return News(summed=given)
            of_all = rows.ring.sums[module % len(rows.reaches)]
            return News(sums=of_all[: rows.num_rows])
        if not kind.hears(layer):
            return News(own=given, own_scale=math.sqrt(self._rules.num_lanes))
        count, slot = chunk.num_rows, (module - self._late) % self._num_slots
        past = self._by_lane(self.ring.parts[slot][:count])
        sums = None if is_alone else self.ring.sums[slot][:count]
        heard = News(sums=sums, summed=past if is_alone else None, past=past)
        if rows.ring is not self.ring:
            heard = heard.of_row(chunk.last)
        return replace(heard, own=given)

    def _head(self, rows: _Rows, chunk: Chunk) -> Iterator[None]:
        """Logits of the last token: where the lanes meet."""
        e, normed, last = self._elementwise, rows.buffers.normed, 2 * len(self._names) - 1
        matrix = self._matrices("head")  # [l, V / L, H], the last lanes' filled up
        if self._rules.head == "vocab_parallel":
            yield from self._hear(rows, chunk, last, e.final_norm)
            logits = self._logits.view(1, len(matrix), -1)
            for lane, own in enumerate(matrix):
                self._multiply_by(self._by_lane(normed)[lane], own, logits[:, lane])
            return
        assert self._rules.head == "replicate", "the plan refuses others"
        norms = self._by_lane(self._norms)
        yield from self._hear(rows, chunk, last, e.final_norm, norms)
        if self.share.ranks > 1:
            e.tell(self._head_reach)
            yield
            e.meet(self._head_reach)
        met = normed[:, : self.config.hidden_size]
        e.meet_at_head(self._head_reach, e.final_norm if self._rules.sum_before_norm else None, met)
        self._multiply_by(met, matrix.flatten(0, 1), self._logits)

    def _own(self, tokens: int) -> range:
        """Which rows of a chunk the rank sums."""
        rank, ranks = self.share.rank, self.share.ranks
        return range(tokens * rank // ranks, tokens * (rank + 1) // ranks)

    def _sums_at_once(self, module: int) -> bool:
        return self._modules[module % 2].sums(module // 2)

    def _tells(self, module: int) -> bool:
        return self._modules[module % 2].tells(module // 2)

    def _last_of(self, rows: _Rows, chunk: Chunk) -> _Rows:
        """The row of the last token; its stream is copied."""
        last = _Rows(self._last_row, self.last_ring, self._last_reaches, 1)
        streams = self._by_lane(rows.buffers.residual)
        own = self._by_lane(last.buffers.residual)
        torch.index_select(streams, 1, chunk.last, out=own)
        return last

    def _given(self, rows: _Rows, module: int) -> Tensor:
        """[l, T, H] that a module's products give."""
        return self._by_lane(rows.ring.parts[module % len(rows.reaches)][: rows.num_rows])

    def _by_lane(self, x: Tensor) -> Tensor:
        """[T, l · width] that lies as [l, T, width], as such."""
        return x.view(len(self.share.lanes), x.shape[0], -1)

    def _multiply_lanes(self, x: Tensor, name: str, out: Tensor) -> None:
        """`out` [l, T, rows] = `x` [l, T, columns] · matrices [l, rows, columns]ᵀ, fp32 sums."""
        lanes_first = x if x.ndim == out.ndim == 3 else self._by_lane(x)
        out = out if out.ndim == 3 else self._by_lane(out)
        torch.bmm(lanes_first, self._matrices(name).mT, out=out)

    def _products(self) -> list[tuple[str, int]]:
        """See the base class."""
        return [(name, 0) for name in self._distinct_matrices()]

    def _multiply_as_a_pass(self, name: str, first: int, x: Tensor) -> Tensor:
        """See the base class; all lanes have the same factor."""
        assert first == 0, "lanes multiply whole matrices"
        b, short = self._buffers.rows(len(x)), name.rpartition(".")[2]
        of_lanes = x.expand(len(self.share.lanes), *x.shape)
        if short == "attention_output":  # lanes lie side by side
            given = of_lanes.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            given = self._by_lane(b.activated if short == "down" else b.normed).copy_(of_lanes)
        targets = {"qkv": b.qkv, "gate_up": b.gate_up}
        out = self._by_lane(targets.get(short, self.ring.parts[0][: len(x)]))
        self._multiply_lanes(given, name, out)
        return out.transpose(0, 1).flatten(1)

    @property
    def _width(self) -> int:
        """Of all the rank's streams: l · H."""
        return len(self.share.lanes) * self.config.hidden_size

    def _new_ring(self, modules: int, rows: int) -> _Ring:
        sums = modules if self.share.ranks > 1 else 0
        return _Ring(
            self._empty(modules, rows, self._width, dtype=self.pool.dtype),
            self._empty(sums, rows, self.config.hidden_size, dtype=torch.float32),
        )

    def _allocate(self, rows: int) -> Buffers:
        """Streams of all lanes; products are 16-bit, and what modules give is in the rings."""
        dtype, attention = self.pool.dtype, self.config.layers[0].attention
        ordinary = super()._allocate(rows)
        return ordinary._replace(
            residual=self._empty(rows, self._width, dtype=torch.float32),
            normed=self._empty(rows, self._width, dtype=dtype),
            qkv=self._empty(rows, attention.qkv_rows, dtype=dtype),
            delta=self._empty(rows, 0, dtype=dtype),
            mlp_delta=self._empty(rows, 0, dtype=dtype),
        )


def _reaches(rings: Sequence[_Ring]) -> list[Reach]:
    """Of each place in the ranks' rings."""
    places = range(len(rings[0].parts))
    alone = len(rings) == 1
    return [
        Reach([ring.parts[p] for ring in rings], [] if alone else [ring.sums[p] for ring in rings])
        for p in places
    ]


def without_lanes(share: LaneShare) -> ModelConfig:
    """Heads, neurons and vocabulary of all the share's lanes, as a model that has none.

    Rope turns halves: rows are packed for it.
    """
    lanes = lanes_of_ranks(share.whole, share.ranks)
    return replace(lanes, lanes=None, rope=replace(lanes.rope, interleaved=False))
