"""A Laneformer's prompts, on one rank or several: each multiplies its lanes, batched.

Lanes receive each other's results d layers late, so that no rank has to wait for a sum: after
a module's products a rank sums what all lanes published in the module before, for the rows of the
chunk that it owns, and publishes the sums to all ranks, while its own streams receive older ones.
Only the first d layers, where lanes sum at once, and the head wait for all ranks. Partial results
and sums lie in rings of 2 d + 1 modules. A pass begins once all ranks have ended the one before.
Before a rank sums at module e it waits until all others have summed at e - 1; then they have their
sums of e - 2 and all that their streams received at e - 2. So
- sums of e - 2 d, received at e, came before the wait at e - 1 at the latest, or at e where d is 1;
- products of e + 1 overwrite what lanes published in e - 2 d, and all ranks have summed that;
- sums of e - 1 overwrite those of e - 2 d - 2, and all ranks have received them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.parallel.lanes import LaneShare, modules_of, rules_of
from soloist.prefill.buffers import Buffers, num_bytes
from soloist.prefill.communicator import Communicator, Narrowing, Rows, Stages, Workspace
from soloist.prefill.elementwise import Chunk, Reach
from soloist.prefill.lane_elementwise import Due, LaneOperations, News

# Buffers that have lanes first.
_OF_LANES = ("residual", "normed", "qkv", "gate_up", "activated")
# Modules: where sums are received so early, they have to have come by the wait at that very module.
_CLOSE = 2


class _Ring(NamedTuple):
    """What lanes gave in the latest modules, and sums of it; module e's at e modulo their number.

    Rows of T tokens lie as [l, T, H] in as many rows of [l · H].
    """

    parts: Tensor  # [modules, T, l · H]
    sums: Tensor  # [modules, T, H] fp32; none on one rank, which sums while it adds


class LaneCommunicator(Communicator):
    """The streams of one rank's lanes: what they publish, and what they hear.

    Args:
        share: which lanes.
        work: what the rank computes with.
        operations: of lanes.

    Attributes:
        ring: what lanes gave, and sums, of whole chunks.
        last_ring: of the last token in the last layer.
    """

    narrowing = Narrowing.OUTPUT

    def __init__(self, share: LaneShare, work: Workspace, operations: LaneOperations) -> None:
        super().__init__(work)
        self._share, self._rules = share, rules_of(share.whole)
        self._lanes = operations
        self._is_alone = share.ranks == 1
        self._modules = modules_of(share.whole)
        talks = any(module.communicates for module in self._modules)
        self._talks = talks and not self._is_alone
        self._late = 2 * self._rules.delay_layers  # modules
        self._num_slots = work.streams.ring_modules
        self.ring = self._new_ring(self._num_slots, len(work.buffers.residual))
        self.last_ring = self._new_ring(2, 1)
        self._norms = torch.empty_like(work.last.residual)
        self._reaches: Sequence[Reach] = []
        self._last_reaches: Sequence[Reach] = []
        self._head_reach = Reach([], [])

    def connect(self, ranks: Sequence[Communicator]) -> None:
        """See the base class."""
        lanes = [rank for rank in ranks if isinstance(rank, LaneCommunicator)]
        self._reaches = _reaches([rank.ring for rank in lanes])
        self._last_reaches = _reaches([rank.last_ring for rank in lanes])
        self._head_reach = Reach([rank.met for rank in lanes], [])

    @property
    def met(self) -> Tensor:
        """[1, l · H] fp32, what the lanes give where they meet: norms, or streams."""
        return self._work.last.residual if self._rules.sum_before_norm else self._norms

    @property
    def num_bytes(self) -> int:
        """See the base class."""
        return num_bytes(*self.ring, *self.last_ring, self._norms)

    def is_cut(self, layers: int) -> bool:
        """See the base class.

        Several ranks have graphs of 1, 1, 2, 4 and so on layers: one host starts them all in turn.
        """
        return layers == 1 or (not self._is_alone and layers.bit_count() == 1)

    def arranged(self, b: Buffers) -> Buffers:
        """See the base class: everything but heads as [l, T, …]."""
        named = b._asdict()
        return b._replace(**{name: self._by_lane(named[name]) for name in _OF_LANES})

    def begin(self, rows: Rows, chunk: Chunk) -> None:
        """See the base class."""
        table = self._work.products.matrix("embedding")
        self._lanes.embed_lanes(table, chunk, rows.buffers.residual)
        if not self._is_alone:
            self._operations.tell(self._reaches[0])  # the pass before is over

    def attention_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:
        """See the base class."""
        weight = self._operations.layers[layer].attention_norm
        yield from self._hear(rows, chunk, 2 * layer - 1, weight)

    def before_output(self, layer: int) -> Stages:
        """See the base class: nobody is in the pass before."""
        if layer == 0 and not self._is_alone:
            yield
            self._operations.meet(self._reaches[0])

    def output(self, module: int, rows: Rows) -> Tensor:
        """See the base class: [l, T, H]."""
        parts = (self.last_ring if rows.is_last else self.ring).parts
        return self._by_lane(parts[module % len(parts)][: rows.num_rows])

    def mlp_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:
        """See the base class."""
        yield from self._exchange(rows, 2 * layer)
        yield from self._hear(rows, chunk, 2 * layer, self._operations.layers[layer].mlp_norm)

    def after_layer(self, layer: int, rows: Rows) -> Stages:
        """See the base class."""
        yield from self._exchange(rows, 2 * layer + 1)

    def last_row(self, rows: Rows, chunk: Chunk) -> Rows:
        """See the base class; its streams are copied."""
        last = self.new_last_row()
        torch.index_select(rows.buffers.residual, 1, chunk.last, out=last.buffers.residual)
        return last

    def _hear(
        self,
        rows: Rows,
        chunk: Chunk,
        module: int,
        weight: Tensor,
        exact: Tensor | None = None,
    ) -> Stages:
        """The streams hear what there is after a module's products (-1: none yet); their norms.

        A rank sums then what lanes gave in the module before.
        """
        lanes, streams, out = self._lanes, rows.buffers.residual, rows.buffers.normed
        is_over = self._late > _CLOSE and module + 1 == 2 * self._work.config.num_layers
        if not self._talks or module < 0 or self._sums_at_once(module) or is_over:
            lanes.hear(streams, self._news(rows, chunk, module), weight, out, exact)
            return
        before, count = module - 1, chunk.num_rows
        has_parts = before >= 0 and self._publishes(before) and not self._sums_at_once(before)
        reach = self._reaches[before % self._num_slots]
        due = Due(has_parts, self._own(count), count)
        if self._late > _CLOSE:
            news = self._news(rows, chunk, module)
            lanes.hear_and_sum(streams, news, weight, out, reach, due)
            yield
        else:
            yield
            lanes.sum_lanes(reach, due)  # and what is news came before all others told
            lanes.hear(streams, self._news(rows, chunk, module), weight, out, exact)

    def _exchange(self, rows: Rows, module: int) -> Stages:
        """Of a module whose sums nobody can do without."""
        if self._is_alone or not self._sums_at_once(module):
            return
        reaches = self._last_reaches if rows.is_last else self._reaches
        reach = reaches[module % len(reaches)]
        self._operations.tell(reach)
        yield
        due = Due(has_parts=True, own=self._own(rows.num_rows), tokens=rows.num_rows)
        self._lanes.sum_lanes(reach, due)
        yield
        self._operations.meet(reach)

    def _news(self, rows: Rows, chunk: Chunk, module: int) -> News:
        """What the streams hear after a module."""
        if module < 0:
            return News()
        kind, layer, given = self._modules[module % 2], module // 2, self.output(module, rows)
        if kind.sums(layer):
            if self._is_alone:
                return News(summed=given)
            sums = (self.last_ring if rows.is_last else self.ring).sums
            return News(sums=sums[module % len(sums)][: rows.num_rows])
        if not kind.receives(layer):
            return News(own=given, own_scale=math.sqrt(self._rules.num_lanes))
        count, slot = chunk.num_rows, (module - self._late) % self._num_slots
        past = self._by_lane(self.ring.parts[slot][:count])
        of_all = None if self._is_alone else self.ring.sums[slot][:count]
        received = News(sums=of_all, summed=past if self._is_alone else None, past=past)
        if rows.is_last:
            received = received.of_row(chunk.last)
        return replace(received, own=given)

    def head(self, rows: Rows, chunk: Chunk) -> Stages:
        """See the base class: where the lanes meet."""
        work, final_norm = self._work, self._operations.final_norm
        last = 2 * work.config.num_layers - 1
        matrix = work.products.matrix("head")  # [l, V / L, H], the last lanes' filled up
        if self._rules.head == "vocab_parallel":
            yield from self._hear(rows, chunk, last, final_norm)
            logits = work.logits.view(1, len(matrix), -1)
            for lane, own in enumerate(matrix):
                work.products.multiply_by(rows.buffers.normed[lane], own, logits[:, lane])
            return
        assert self._rules.head == "replicate", "the plan refuses others"
        yield from self._hear(rows, chunk, last, final_norm, self._by_lane(self._norms))
        if not self._is_alone:
            self._operations.tell(self._head_reach)
            yield
            self._operations.meet(self._head_reach)
        met = work.last.normed[:, : work.config.hidden_size]
        weight = final_norm if self._rules.sum_before_norm else None
        self._lanes.meet_at_head(self._head_reach, weight, met)
        work.products.multiply_by(met, matrix.flatten(0, 1), work.logits)

    def _own(self, tokens: int) -> range:
        """Which rows of a chunk the rank sums."""
        rank, ranks = self._share.rank, self._share.ranks
        return range(tokens * rank // ranks, tokens * (rank + 1) // ranks)

    def _sums_at_once(self, module: int) -> bool:
        return self._modules[module % 2].sums(module // 2)

    def _publishes(self, module: int) -> bool:
        return self._modules[module % 2].publishes(module // 2)

    def _by_lane(self, x: Tensor) -> Tensor:
        """[T, l · width] that lies as [l, T, width], as such."""
        return x.view(self._work.streams.count, x.shape[0], -1)

    def _new_ring(self, modules: int, rows: int) -> _Ring:
        hidden, pool = self._work.config.hidden_size, self._work.pool
        sums = 0 if self._is_alone else modules
        parts = (modules, rows, self._work.streams.count * hidden)
        return _Ring(
            torch.empty(parts, dtype=pool.dtype, device=pool.device),
            torch.empty((sums, rows, hidden), dtype=torch.float32, device=pool.device),
        )


def _reaches(rings: Sequence[_Ring]) -> list[Reach]:
    """Of each place in the ranks' rings."""
    places = range(len(rings[0].parts))
    alone = len(rings) == 1
    return [
        Reach([ring.parts[p] for ring in rings], [] if alone else [ring.sums[p] for ring in rings])
        for p in places
    ]
