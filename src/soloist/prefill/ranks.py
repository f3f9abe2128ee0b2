"""Prompts on several ranks: each multiplies its share, and owns some rows of the residual stream.

Products of attention_output and down are parts of sums. For the rows that it owns, a rank adds all
ranks' parts in the order of the ranks, in fp32, and gives the norm to all: so everybody multiplies
the same bits, and each row's residual, norm and traffic are one rank's affair (after the sequence
parallelism of Korthikanti et al. 2022, arXiv:2205.05198).
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from soloist.errors import DeviceError, LaunchError
from soloist.megakernel.lanes import LaneShare
from soloist.megakernel.share import Share, share_of
from soloist.model.config import ModelConfig
from soloist.prefill.elementwise import Chunk, Heads, OwnRows, Reach, TorchElementwise, Vectors
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.pages import PagePool
from soloist.prefill.prompts import MOST_PASS_TOKENS, PromptRunner, TokenIds
from soloist.prefill.runner import MakeElementwise, Matrices, Prefill, combined
from soloist.prefill.widths import agreeing_widths


class RankPart(Prefill):
    """What runs one rank's part of a pass.

    Attributes:
        share: which part.
    """

    share: Share | LaneShare

    @abstractmethod
    def connect(self, ranks: Sequence["RankPart"]) -> None:
        """Before the first pass: all ranks in order, whose memory this one can reach."""

    @abstractmethod
    def stages(self, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        """Queue one pass; stops where all ranks have to come as far before any goes on."""

    @property
    def fused(self) -> FusedElementwise | None:
        """What runs between products, where those are kernels of ours."""
        return self._elementwise if isinstance(self._elementwise, FusedElementwise) else None

    def replays(self, chunk: Chunk) -> Iterator[None]:
        """Queue the recorded pass; stops where others should get their next graph, too."""
        for graph in self._graphs[chunk.num_rows]:
            graph.replay()
            yield

    def replay_all(self) -> None:
        """Queue each recorded pass once, over no token."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.replay()

    def part(self) -> None:
        """From here on wait for no other rank, until `unite`."""
        if self.fused is not None:
            self.fused.wait_for_nobody(alone=True)

    def unite(self) -> None:
        """Wait for all ranks again."""
        if self.fused is not None:
            self.fused.wait_for_nobody(alone=False)

    def _connect_kernels(self, ranks: Sequence["RankPart"]) -> None:
        if self.fused is not None:
            self.fused.connect(self.share.rank, [r.fused for r in ranks if r.fused is not None])

    def _parts(self, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        """The same at once: to be recorded."""
        for _ in self.stages(chunk, want_logits=want_logits):
            pass
        yield from ()


class RankPrefill(RankPart):
    """One rank's part of a pass; `RanksPrefill` runs all of them.

    Args:
        share: which part.
        matrices: of the share, as of `Prefill`; 'embedding' is the whole table, and there is a
            'head' in any case.
        vectors: of the share.
        pool: of the share's KV heads.
        elementwise: as of `Prefill`.
        most_tokens: as of `Prefill`.
    """

    share: Share

    def __init__(
        self,
        share: Share,
        matrices: Matrices,
        vectors: Vectors,
        pool: PagePool,
        elementwise: MakeElementwise = TorchElementwise,
        most_tokens: int = MOST_PASS_TOKENS,
    ) -> None:
        config = share_of(share.whole, share.ranks)
        super().__init__(config, matrices, vectors, pool, elementwise, most_tokens)
        self.share = share
        self._reach = self._last_reach = Reach([], [])

    def connect(self, ranks: Sequence[RankPart]) -> None:
        """See the base class."""
        self._reach, self._last_reach = (
            Reach([b.delta for b in of_all], [b.normed for b in of_all])
            for of_all in ([r._buffers for r in ranks], [r._last_row for r in ranks])  # noqa: SLF001 - same class
        )
        self._connect_kernels(ranks)

    @property
    def logits(self) -> Tensor:
        """[rows] fp32, of the rank's part of the vocabulary."""
        return self._logits[0, : len(self.share.vocabulary)].float()

    def stages(self, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        """See the base class."""
        e, b, layers = self._elementwise, self._buffers.rows(chunk.num_rows), self._names
        share, count = self.share, chunk.num_rows
        rows = range(count * share.rank // share.ranks, count * (share.rank + 1) // share.ranks)
        own = OwnRows(rows, b.residual[: len(rows)])
        heads = Heads(b.queries, b.keys, b.values)
        e.start()
        if rows:
            ids = chunk.ids[rows.start : rows.stop]
            e.embed(self._matrices("embedding"), replace(chunk, ids=ids), own.residual)
        yield from self._join(self._reach, own, None, e.layers[0].attention_norm, has_parts=False)
        for i, (vectors, names) in enumerate(zip(e.layers, layers, strict=True)):
            is_last = i + 1 == len(layers)
            self._multiply(b.normed, names.qkv, b.qkv)
            e.qkv_rope_store(b.qkv, i, chunk, heads)
            if is_last and not want_logits:
                return
            self._multiply(self._attend(i, chunk, heads), names.attention_output, b.delta)
            reach, bias = self._reach, vectors.attention_output_bias
            yield from self._join(reach, own, bias, vectors.mlp_norm)
            following = e.final_norm if is_last else e.layers[i + 1].attention_norm
            if is_last:  # nobody asks for more than the last token from here on
                torch.index_select(b.normed, 0, chunk.last, out=self._last_row.normed)
                reach, b, own = self._last_reach, self._last_row, replace(own, last=chunk.last)
            self._activate(b, i)
            self._multiply(b.activated, names.down, b.delta)
            yield from self._join(reach, own, vectors.down_bias, following)
        self._multiply(b.normed, "head", self._logits)

    def _join(
        self, reach: Reach, own: OwnRows, bias: Tensor | None, norm: Tensor, *,
        has_parts: bool = True,
    ) -> Iterator[None]:  # fmt: skip
        self._elementwise.tell(reach)
        yield
        self._elementwise.sum_norm(reach, own, bias, norm, has_parts=has_parts)
        yield
        self._elementwise.meet(reach)


class RanksPrefill(PromptRunner):
    """A prompt on all ranks of a model.

    What a rank waits for was always queued before, so that ranks may share a GPU and its queue, and
    calls that wait for a whole GPU wait for nothing that is still to come.

    Args:
        ranks: one for each, in order; their GPUs can reach each other's memory.
    """

    def __init__(self, ranks: Sequence[RankPart]) -> None:
        assert [r.share.rank for r in ranks] == list(range(ranks[0].share.ranks)), "every rank"
        self.ranks = list(ranks)
        self.most_tokens = min(r.most_tokens for r in ranks)
        for rank in self.ranks:
            rank.connect(self.ranks)

    @property
    def config(self) -> ModelConfig:
        """The whole model."""
        return self.ranks[0].share.whole

    def settle_widths(self) -> None:
        """See the base class: the widths that every rank's products and attention agree on."""
        if not all(rank.tries_widths for rank in self.ranks):
            return
        of_ranks = [rank.behaviours() for rank in self.ranks]
        everywhere = {
            width: {name: combined([of_one[width][name] for of_one in of_ranks]) for name in seen}
            for width, seen in of_ranks[0].items()
        }
        widths = agreeing_widths(everywhere, self.ranks[0].padded)
        if widths is not None and all(rank.agrees_on(widths.passes) for rank in self.ranks):
            for rank in self.ranks:
                rank.take_widths(widths)
            self.widths, self.most_tokens = widths.passes, widths.passes[-1]

    @torch.inference_mode()
    def run(
        self,
        token_ids: TokenIds,
        position: int,
        page_table: Tensor | Sequence[int],
        *,
        want_logits: bool = True,
    ) -> Tensor | None:
        """See the base class; logits come to the first rank's device.

        Raises:
            KernelStuck: a rank waited for another in vain; it names both.
            LaunchError: a GPU failed.
        """
        try:
            chunks = [
                rank.placed(token_ids, position, page_table, want_logits=want_logits)
                for rank in self.ranks
            ]
            if all(rank.has_graph(chunk) for rank, chunk in self._each(chunks)):
                for _ in zip_longest(*(r.replays(chunk) for r, chunk in self._each(chunks))):
                    pass
            else:
                self._advance(chunks, want_logits=want_logits)
            if not want_logits:
                return None
            device = self.ranks[0].pool.device
            logits = torch.cat([rank.logits.to(device) for rank in self.ranks])
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # whoever fails is named here
        except (RuntimeError, DeviceError) as error:
            stuck = (rank.fused.failure for rank in self.ranks if rank.fused is not None)
            reason = str(error).splitlines()[0]
            failure = LaunchError("a prompt on several GPUs", reason)
            raise next(filter(None, stuck), failure) from error
        return logits

    def _each(self, chunks: Sequence[Chunk]) -> Iterable[tuple[RankPart, Chunk]]:
        return zip(self.ranks, chunks, strict=True)

    def _advance(self, chunks: Sequence[Chunk], *, want_logits: bool) -> None:
        """All ranks stage by stage."""
        passes = [r.stages(chunk, want_logits=want_logits) for r, chunk in self._each(chunks)]
        for _ in zip_longest(*passes):
            pass

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int]) -> None:
        """As of `Prefill`, where every rank has a GPU of its own; otherwise nothing is recorded.

        Ranks that share a GPU would wait for graphs behind their own.
        """
        devices = {rank.pool.device for rank in self.ranks}
        if len(devices) < len(self.ranks):
            return
        for size in sorted(set(sizes), reverse=True):
            chunks = [rank.begin_capture(size) for rank in self.ranks]
            self._advance(chunks, want_logits=True)  # libraries set themselves up
            for rank, chunk in self._each(chunks):
                rank.record(chunk)
        # A graph's first start may wait for its whole GPU, and so must not find anybody waiting.
        for step in (RankPart.part, RankPart.replay_all, RankPart.unite):
            for rank in self.ranks:
                step(rank)
                torch.cuda.synchronize(rank.pool.device)
