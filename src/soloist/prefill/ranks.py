"""Prompts on several ranks: each multiplies its share, and owns some rows of the residual stream.

Products of attention_output and down are parts of sums. For the rows that it owns, a rank adds all
ranks' parts in the order of the ranks, in fp32, and gives the norm to all: so everybody multiplies
the same bits, and each row's residual, norm and traffic are one rank's affair (after the sequence
parallelism of Korthikanti et al. 2022, arXiv:2205.05198).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from soloist.parallel.share import Share
from soloist.prefill.communicator import Communicator, Narrowing, Rows, Stages, Workspace
from soloist.prefill.elementwise import Chunk, OwnRows, Reach


class RankCommunicator(Communicator):
    """Partial sums of one rank.

    Args:
        share: the rank's part of the model.
        work: what it computes with; there is a 'head' in any case.

    Attributes:
        reach: what ranks read and write of each other, of whole chunks.
        last_reach: the same of the last token in the last layer.
    """

    narrowing = Narrowing.MLP

    def __init__(self, share: Share, work: Workspace) -> None:
        super().__init__(work)
        self._share = share
        self.reach = self.last_reach = Reach([], [])

    def connect(self, ranks: Sequence[Communicator]) -> None:
        """See the base class."""
        works = [rank._work for rank in ranks if isinstance(rank, RankCommunicator)]  # noqa: SLF001 - same class
        self.reach, self.last_reach = (
            Reach([b.delta for b in of_all], [b.normed for b in of_all])
            for of_all in ([work.buffers for work in works], [work.last for work in works])
        )

    def begin(self, rows: Rows, chunk: Chunk) -> None:  # noqa: ARG002
        """See the base class: of its own rows."""
        own = self._own(chunk)
        if own.rows:
            ids = chunk.ids[own.rows.start : own.rows.stop]
            table = self._work.products.matrix("embedding")
            self._operations.embed(table, replace(chunk, ids=ids), own.residual)

    def attention_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:
        """See the base class."""
        layers = self._operations.layers
        bias = layers[layer - 1].down_bias if layer else None
        norm = layers[layer].attention_norm
        yield from self._join(rows, chunk, bias, norm, has_parts=layer > 0)

    def output(self, module: int, rows: Rows) -> Tensor:  # noqa: ARG002
        """See the base class."""
        return rows.buffers.delta

    def mlp_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:
        """See the base class."""
        own = self._operations.layers[layer]
        yield from self._join(rows, chunk, own.attention_output_bias, own.mlp_norm)

    def last_row(self, rows: Rows, chunk: Chunk) -> Rows:
        """See the base class; its residual stream stays where it is."""
        last = self.new_last_row()
        torch.index_select(rows.buffers.normed, 0, chunk.last, out=last.buffers.normed)
        return last

    def head(self, rows: Rows, chunk: Chunk) -> Stages:
        """See the base class."""
        bias = self._operations.layers[-1].down_bias
        yield from self._join(rows, chunk, bias, self._operations.final_norm)
        self._work.products.multiply(rows.buffers.normed, "head", self._work.logits)

    def _join(
        self, rows: Rows, chunk: Chunk, bias: Tensor | None, norm: Tensor, *,
        has_parts: bool = True,
    ) -> Stages:  # fmt: skip
        """Parts of all ranks, if any, and `bias` join the residual stream; its norm to all."""
        reach, own = self.reach, self._own(chunk)
        if rows.is_last:
            reach, own = self.last_reach, replace(own, last=chunk.last)
        self._operations.tell(reach)
        yield
        self._operations.sum_norm(reach, own, bias, norm, has_parts=has_parts)
        yield
        self._operations.meet(reach)

    def _own(self, chunk: Chunk) -> OwnRows:
        count, rank, ranks = chunk.num_rows, self._share.rank, self._share.ranks
        rows = range(count * rank // ranks, count * (rank + 1) // ranks)
        return OwnRows(rows, self._work.buffers.residual[: len(rows)])
