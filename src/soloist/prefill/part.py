"""One rank's part of a model: its pass over the layers, put together, and when a graph runs it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from soloist.errors import ShapeUnsupported
from soloist.kv.chunks import LEAST_CHUNK_TOKENS
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.maths import require_maths
from soloist.model.config import ModelConfig
from soloist.parallel.lanes import LaneShare, lanes_of_ranks
from soloist.parallel.share import Share, share_of
from soloist.prefill.buffers import num_bytes
from soloist.prefill.chunk_attention import ChunkAttention
from soloist.prefill.communicator import Communicator, Nobody, Workspace
from soloist.prefill.elementwise import Chunk, MakeElementwise, TorchElementwise, Vectors
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.graphs import Graphs
from soloist.prefill.lane_elementwise import MakeLanes, TorchLanes
from soloist.prefill.lanes import LaneCommunicator
from soloist.prefill.passes import Pass
from soloist.prefill.products import Matrices, Products
from soloist.prefill.ranks import RankCommunicator
from soloist.prefill.upload import TokenIds, Upload
from soloist.prefill.widths import MOST_PASS_TOKENS, Widths, width_of


def config_of(share: Share | LaneShare) -> ModelConfig:
    """What each rank has, as a model: what prefill's kernels are compiled for."""
    of_ranks = lanes_of_ranks if isinstance(share, LaneShare) else share_of
    return of_ranks(share.whole, share.ranks)


class Part:
    """What one rank, or the only one, has and does; `Prefill` runs all of them.

    Args:
        share: which part of a model. Layers have the same heads; all else may differ.
        matrices: a row-major matrix in the pool's dtype by the name of its `TensorSpec`, cut for
            the share (`shard_all`): [out, in], of lanes [l, out, in]; 'embedding' [V, H] is the
            whole table, and on several ranks there is a 'head' in any case. Or what multiplies by
            matrices that lie otherwise, or has experts as well.
        vectors: fp32 norm weights, biases and routers of the share by the name of their
            `TensorSpec`.
        pool: gains keys and values of the share's heads.
        operations: what runs between products: `FusedElementwise` with its last arguments bound,
            or plain torch.
        most_tokens: of one chunk; buffers are allocated for as many.
        lane_operations: the same of a model with lanes, `FusedLanes` or plain torch.

    Attributes:
        widths: of passes, as of `Prefill`.

    Raises:
        ShapeUnsupported: see `require_prefill`.
    """

    def __init__(
        self,
        share: Share | LaneShare,
        matrices: Matrices | Products,
        vectors: Vectors,
        pool: PagePool,
        operations: MakeElementwise = TorchElementwise,
        most_tokens: int = MOST_PASS_TOKENS,
        lane_operations: MakeLanes = TorchLanes,
    ) -> None:
        config = config_of(share)

        def workspace() -> Workspace:
            made = operations(config, vectors, pool)
            products = matrices if isinstance(matrices, Products) else Products(matrices)
            return Workspace(config, pool, made, products, most_tokens)

        self.share, self.pool, self.most_tokens = share, pool, most_tokens
        self.communicator: Communicator
        if isinstance(share, LaneShare):
            self.work = workspace()
            of_lanes = lane_operations(self.work.operations)
            self.communicator = LaneCommunicator(share, self.work, of_lanes)
        else:
            require_prefill(config)
            self.work = workspace()
            alone = share.ranks == 1
            self.communicator = Nobody(self.work) if alone else RankCommunicator(share, self.work)
        self._upload = Upload(pool.num_pages, most_tokens, pool.device)
        self._attention = ChunkAttention(self.work.config, pool, self.work.operations)
        self.model_pass = Pass(self.work, self._attention, self.communicator)
        self.graphs = Graphs(pool.device)
        self.widths: tuple[int, ...] = ()

    def connect(self, parts: Sequence["Part"]) -> None:
        """Before the first pass: all ranks in order, whose memory this one can reach."""
        self.communicator.connect([part.communicator for part in parts])
        if self.fused is not None:
            peers = [part.fused for part in parts if part.fused is not None]
            self.fused.connect(self.share.rank, peers)

    @property
    def fused(self) -> FusedElementwise | None:
        """What runs between products, where those are kernels of ours."""
        operations = self.work.operations
        return operations if isinstance(operations, FusedElementwise) else None

    def wait_for_nobody(self, *, alone: bool) -> None:
        """Whether its kernels go on at once, though other ranks do not run."""
        if self.fused is not None:
            self.fused.wait_for_nobody(alone=alone)

    @property
    def logits(self) -> Tensor:
        """[rows] fp32, of the rank's part of the vocabulary, of the last pass that had them."""
        return self.work.logits[0, : len(self.share.vocabulary)].float()

    @property
    def num_bytes(self) -> int:
        """Size of the buffers, without graphs and what attention allocates."""
        work, gathered = self.work, self._attention.gathered
        rope = work.operations.rope_table
        attended = () if work.attended is None else (work.attended,)
        held = (
            *work.buffers, *work.last, work.logits, *attended, self._upload.words, rope, *gathered,
        )  # fmt: skip
        pages = 0 if self.fused is None else self.fused.page_attention_bytes
        experts = 0 if work.mixtures is None else work.mixtures.num_bytes
        return num_bytes(*held) + self.communicator.num_bytes + pages + experts

    def take_widths(self, widths: Widths) -> None:
        """Have passes of these widths, and a place for gathered keys and values."""
        self.widths, self.most_tokens = widths.passes, widths.passes[-1]
        self.work.products.padded_rows = widths.products
        padded = [n for (name, _), n in widths.products.items() if name == "attention_output"]
        if padded:
            queries = self.work.buffers.queries
            self.work.attended = queries.new_empty(max(padded), queries[0].numel())
        self._attention.take_widths(widths.passes)

    # --- passes -----------------------------------------------------------------------------------

    def placed(
        self,
        token_ids: TokenIds,
        position: int,
        page_table: Tensor | Sequence[int],
        *,
        want_logits: bool,
    ) -> Chunk:
        """A chunk on the device, padded where that lets a graph take it; arguments as of `run`."""
        assert 0 < len(token_ids) <= self.most_tokens, "the caller cuts prompts into chunks"
        stop = position + len(token_ids)
        most = min(len(page_table) * PAGE_POSITIONS, self.work.config.context_tokens)
        assert stop <= most, "no room"
        is_prompt, tokens = position == 0 and want_logits, len(token_ids)
        graph_rows = self._graph_rows(tokens) if is_prompt else None
        rows = graph_rows or (width_of(tokens, self.widths) if self.widths else tokens)
        pages = page_table[: -(-stop // PAGE_POSITIONS)]
        is_short = graph_rows is not None and bool(self.widths)
        return self._upload.chunk(token_ids, position, pages, rows, is_short_prompt=is_short)

    def _graph_rows(self, tokens: int) -> int | None:
        """Rows of the smallest graph for all of a prompt of so many tokens, if there is one.

        Of a prompt as long as a chunk the chunk is kept, so its rows have no bits of their own.
        """
        if not self.widths:
            fitting = [n for n in self.graphs.by_rows if tokens <= n < self.most_tokens]
        elif tokens < LEAST_CHUNK_TOKENS:
            most = width_of(tokens, self.widths)
            fitting = [n for n in self.graphs.of_short_prompts if tokens <= n <= most]
        else:
            fitting = []
        return min(fitting, default=None)

    def stages(self, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        """Queue one pass; stops where all ranks have to come as far before any goes on."""
        for layer in self.model_pass.layers(chunk, want_logits=want_logits):
            yield from layer

    def graph_parts(self, chunk: Chunk) -> Iterator[None]:
        """Queue one pass to be recorded; stops where it is cut in two."""
        layers = self.model_pass.layers(chunk, want_logits=True)
        for i, layer in enumerate(layers, 1):
            for _ in layer:
                pass
            if self.communicator.is_cut(i) and i < len(self.model_pass.names):
                yield

    def has_graph(self, chunk: Chunk) -> bool:
        """Whether a pass over the chunk was recorded."""
        return self._attention.fits_graph(chunk) and self.graphs.has(chunk)

    def begin_capture(self, size: int, *, is_short_prompt: bool) -> Chunk:
        """A chunk of so many rows and no token: the pool stays as it is."""
        assert self.work.operations.capturable, "kernels read the place from the device"
        assert 0 < size <= self.most_tokens, "buffers are large enough"
        is_whole = size == self.most_tokens and not self.widths
        can = self._attention.can_attend_whole
        self._attention.attends_whole = is_whole and can(self.work.buffers)
        nothing = torch.zeros(0, dtype=torch.int32)
        return self._upload.chunk(nothing, 0, nothing, size, is_short_prompt=is_short_prompt)

    def record(self, chunk: Chunk) -> None:
        """Record the pass that `begin_capture` began, once it has run."""
        self.graphs.record(chunk, self.graph_parts(chunk))
        self._attention.attends_whole = False


def require_prefill(config: ModelConfig) -> None:
    """Refuse what prefill cannot do, before anything is allocated.

    Raises:
        ShapeUnsupported: the model has lanes, layers with different heads, or other maths.
    """
    if config.lanes is not None:
        raise ShapeUnsupported(f"{config.lanes.num_lanes} lanes", "models without lanes")
    require_maths(config)
    heads = {
        (a.num_query_heads, a.num_kv_heads, a.head_dim)
        for a in (layer.attention for layer in config.layers)
    }
    if len(heads) > 1:
        raise ShapeUnsupported("layers with different heads", "the same heads in all layers")
