"""A prompt through the model in chunks: library products, attention, and keys into the pool.

On CUDA a layer is nine launches (four products, attention, four kernels of ours), eight where
gate_up and SwiGLU are one, and where passes have settled widths one more, which brings earlier keys
together. First chunks may run as captured graphs, and so may all passes of settled widths: up to
some hundred tokens launching takes longer than computing, and where we have no attention of our own
a full first chunk has the faster one that is slow to set up.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.errors import ShapeUnsupported
from soloist.megakernel.plan import PAGE_POSITIONS
from soloist.model.config import ModelConfig
from soloist.prefill.agreement import attention_agrees, product_behaviours
from soloist.prefill.attention import attend, attend_one, attend_packed, attend_whole
from soloist.prefill.elementwise import (
    DTYPES,
    Chunk,
    Delta,
    Elementwise,
    Heads,
    TorchElementwise,
    Vectors,
)
from soloist.prefill.header import wide_products
from soloist.prefill.pages import PagePool
from soloist.prefill.prompts import MOST_PASS_TOKENS, PromptRunner, TokenIds
from soloist.prefill.upload import Upload
from soloist.prefill.widths import (
    BLOCK_TOKENS,
    Widths,
    agreeing_widths,
    candidate_widths,
    width_of,
)

Matrices = Callable[[str], Tensor]
Behaviours = dict[int, dict[str, Hashable | None]]
MakeElementwise = Callable[[ModelConfig, Vectors, PagePool], Elementwise]

# Positions up to which graphs serve later passes: their gathered keys have a place of their own,
# as large as these positions of one layer. Beyond, computing takes longer than launching.
REACH_TOKENS = 32_768
# Products whose factors lie in buffers, with more rows behind those of a pass.
PADDED = ("qkv", "gate_up", "down")
# Libraries ask no more of where a matrix lies.
_MOST_ALIGNMENT = 256


class _Names(NamedTuple):
    """Of one layer's matrices."""

    qkv: str
    attention_output: str
    gate_up: str
    down: str


class Buffers(NamedTuple):
    """Intermediate results of T rows."""

    residual: Tensor  # [T, H] fp32
    normed: Tensor  # [T, H]
    qkv: Tensor  # [T, (Q + 2 K) D] product
    queries: Tensor  # [T, Q, D]
    keys: Tensor  # [T, K, D]
    values: Tensor  # [T, K, D]
    delta: Tensor  # [T, H] product
    mlp_delta: Tensor  # [T, H] product
    gate_up: Tensor  # [T, 2 F]
    activated: Tensor  # [T, F]

    def rows(self, count: int) -> "Buffers":
        """The first rows."""
        return Buffers(*(buffer[:count] for buffer in self))


class Prefill(PromptRunner):
    """Runs prompts of one model on the pool's device, in the pool's dtype.

    Args:
        config: a dense model whose layers are of one size; windows, rope and biases may differ.
        matrices: a row-major matrix [out, in] in the pool's dtype by the name of its `TensorSpec`,
            valid until the next call.
        vectors: fp32 norm weights and biases by the name of their `TensorSpec`.
        pool: gains keys and values.
        elementwise: what runs between products: `FusedElementwise` with its last arguments bound,
            or plain torch.
        most_tokens: of one chunk; buffers are allocated for as many.

    Raises:
        ShapeUnsupported: the model has lanes, layers of different sizes or interleaved rope.
    """

    def __init__(
        self,
        config: ModelConfig,
        matrices: Matrices,
        vectors: Vectors,
        pool: PagePool,
        elementwise: MakeElementwise = TorchElementwise,
        most_tokens: int = MOST_PASS_TOKENS,
    ) -> None:
        require_prefill(config)
        self.config, self.pool, self.most_tokens = config, pool, most_tokens
        self._matrices = matrices
        self._elementwise = elementwise(config, vectors, pool)
        self._names = [
            _Names(*(f"layers.{i}.{name}" for name in _Names._fields))
            for i in range(config.num_layers)
        ]
        # Only CUDA multiplies 16-bit matrices into fp32.
        widest = torch.float32 if pool.device.type == "cuda" else pool.dtype
        is_wide = pool.dtype in DTYPES and wide_products(DTYPES[pool.dtype])
        self._product_dtype = widest if is_wide else pool.dtype
        self._buffers = self._allocate(most_tokens)
        self._last_row = self._allocate(1)
        self._logits = self._empty(1, config.vocab_size, dtype=widest)
        self._upload = Upload(pool.num_pages, most_tokens, pool.device)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._recorder: torch.cuda.Stream | None = None
        self._attends_whole = False  # while a full chunk is captured
        self._gathered: tuple[Tensor, Tensor] | None = None  # keys, values [reach, K, D]
        self._product_rows: Mapping[tuple[str, int], int] = {}  # as of `Widths`

    @torch.inference_mode()
    def run(
        self,
        token_ids: TokenIds,
        position: int,
        page_table: Tensor | Sequence[int],
        *,
        want_logits: bool = True,
    ) -> Tensor | None:
        """See the base class."""
        chunk = self.placed(token_ids, position, page_table, want_logits=want_logits)
        if self.has_graph(chunk):
            self.replay(chunk)
        else:
            self._forward(chunk, want_logits=want_logits)
        return self.logits if want_logits else None

    @property
    def logits(self) -> Tensor:
        """[V] fp32, of the last pass that computed them."""
        return self._logits[0].float()

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
        assert stop <= min(len(page_table) * PAGE_POSITIONS, self.config.context_tokens), "no room"
        rows = self._num_rows(len(token_ids), is_prompt=position == 0 and want_logits)
        pages = page_table[: -(-stop // PAGE_POSITIONS)]
        return self._upload.chunk(token_ids, position, pages, rows)

    def _num_rows(self, num_tokens: int, *, is_prompt: bool) -> int:
        """Of a pass over so many tokens, which may be a prompt's first ones and its last ones."""
        if is_prompt and num_tokens < (BLOCK_TOKENS if self.widths else self.most_tokens):
            bound = self.widths[0] if self.widths else self.most_tokens
            short = [size for size in self._graphs if num_tokens <= size < bound]
            if short:
                return min(short)
        return width_of(num_tokens, self.widths) if self.widths else num_tokens

    def has_graph(self, chunk: Chunk) -> bool:
        """Whether a pass over the chunk was recorded."""
        is_served = chunk.position == 0
        if self._gathered is not None and chunk.num_rows in self.widths:
            is_served = chunk.stop <= len(self._gathered[0])
        return is_served and chunk.num_rows in self._graphs

    def replay(self, chunk: Chunk) -> None:
        """Queue the recorded pass; logits are computed, too."""
        for graph in self._graphs[chunk.num_rows]:
            graph.replay()

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int]) -> None:
        """Record CUDA graphs for first chunks of up to each of `sizes` tokens.

        Of sizes in `widths` they are for later chunks as well. Shorter chunks are padded to the
        next size, so sizes are best a factor of two or less apart, and the smallest one small; but
        only full chunks take the graph of `most_tokens`, unless that is a width.
        `matrices` has to return the same addresses each time, and whatever it launches is recorded
        too.
        """
        for size in sorted(set(sizes), reverse=True):  # the largest first: its memory serves others
            chunk = self.begin_capture(size)
            self._forward(chunk, want_logits=True)  # libraries set themselves up
            self.record(chunk)

    def begin_capture(self, size: int) -> Chunk:
        """A chunk of so many rows and no token: the pool stays as it is."""
        assert self._elementwise.capturable, "kernels read the place from the device"
        assert 0 < size <= self.most_tokens, "buffers are large enough"
        is_whole = size == self.most_tokens and not self.widths
        self._attends_whole = is_whole and self._can_attend_whole()
        nothing = torch.zeros(0, dtype=torch.int32)
        return self._upload.chunk(nothing, 0, nothing, size)

    def record(self, chunk: Chunk) -> None:
        """Record the pass that `begin_capture` began, once it has run."""
        device = self.pool.device
        torch.cuda.synchronize(device)
        graphs: list[torch.cuda.CUDAGraph] = []
        memory = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        parts, is_over = self._parts(chunk, want_logits=True), False
        with torch.cuda.device(device):
            if self._recorder is None:
                self._recorder = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            while not is_over:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=self._recorder):
                    is_over = next(parts, True) is not None
                graphs.append(graph)
                memory = graph.pool()
        self._graphs[chunk.num_rows] = graphs
        self._attends_whole = False

    # --- widths -----------------------------------------------------------------------------------

    def settle_widths(self) -> None:
        """See the base class. Only 16-bit libraries on CUDA are asked: elsewhere there are none."""
        if self.tries_widths:
            widths = agreeing_widths(self.behaviours(), self.padded)
            if widths is not None and self.agrees_on(widths.passes):
                self.take_widths(widths)

    @property
    def padded(self) -> Collection[str]:
        """Products that can have more rows than a pass."""
        return PADDED

    @property
    def tries_widths(self) -> bool:
        """Whether wider passes would be worth anything here."""
        return self.pool.device.type == "cuda" and self.pool.dtype.itemsize == 2

    @torch.inference_mode()
    def behaviours(self) -> Behaviours:
        """Of every candidate width and product, equal where widths agree: for `agreeing_widths`."""
        self._elementwise.start()
        candidates, like = candidate_widths(self.most_tokens), self._buffers.normed
        of_products: dict[str, list[dict[int, int | None]]] = {}
        for name, first in self._products():
            columns = self._matrices(name).shape[-1]
            multiply = partial(self._multiply_as_a_pass, name, first)
            seen = product_behaviours(multiply, columns, candidates, like)
            of_products.setdefault(name.rpartition(".")[2], []).append(seen)
        return {
            width: {
                short: combined([one[width] for one in several])
                for short, several in of_products.items()
            }
            for width in candidates
        }

    def _products(self) -> list[tuple[str, int]]:
        """Matrices that may be multiplied differently, and the row from which on."""
        keys_at = self._buffers.queries[0].numel()  # of the last layer all but the queries
        return [*((name, 0) for name in self._distinct_matrices()), (self._names[-1].qkv, keys_at)]

    def _multiply_as_a_pass(self, name: str, first: int, x: Tensor) -> Tensor:
        """A product where passes have it: that may decide which kernel multiplies."""
        b, short = self._buffers, name.rpartition(".")[2]
        source = {"attention_output": None, "down": b.activated}.get(short, b.normed)
        targets = {"qkv": b.qkv, "down": b.mlp_delta}
        target = targets.get(short, b.delta)[: len(x)]
        if source is not None:
            x = source[: len(x)].copy_(x)
        if short == "gate_up":
            b = b.rows(len(x))
            self._activate(b, next(i for i, of in enumerate(self._names) if of.gate_up == name))
            return b.activated
        self._multiply(x, name, target, first)
        return target[:, first:]

    def _distinct_matrices(self) -> list[str]:
        """One name for each kind of matrix and each way in which its address is aligned."""
        found: dict[tuple[str, int], str] = {}
        for names in self._names:
            for short, name in names._asdict().items():
                address = self._matrices(name).data_ptr()
                alignment = min(address & -address, _MOST_ALIGNMENT)
                found.setdefault((short, alignment), name)
        return list(found.values())

    @torch.inference_mode()
    def agrees_on(self, widths: tuple[int, ...]) -> bool:
        """Whether attention agrees at these widths."""
        a, most_keys = self.config.layers[0].attention, self.config.context_tokens
        heads = (a.num_query_heads, a.num_kv_heads, a.head_dim)
        windows = {layer.attention.window for layer in self.config.layers}
        like = self._buffers.normed
        return all(attention_agrees(heads, window, most_keys, widths, like) for window in windows)

    def take_widths(self, widths: Widths) -> None:
        """Have passes of these widths, and a place for gathered keys and values."""
        self.widths, self.most_tokens = widths.passes, widths.passes[-1]
        self._product_rows = widths.products
        a = self.config.layers[0].attention
        reach = min(REACH_TOKENS, len(self._elementwise.rope_table))
        shape = (reach, a.num_kv_heads, a.head_dim)
        keys, values = (self._empty(*shape, dtype=self.pool.dtype) for _ in range(2))
        self._gathered = keys, values

    # --- a pass -----------------------------------------------------------------------------------

    def _can_attend_whole(self) -> bool:
        if self._elementwise.attends:
            return False  # nobody asks for it
        b = self._buffers
        try:
            attend_whole(b.queries, b.keys, b.values)
        except RuntimeError:
            return False
        return True

    @property
    def num_bytes(self) -> int:
        """Size of the buffers, without graphs and what attention allocates."""
        held = (
            *self._buffers,
            *self._last_row,
            self._logits,
            self._upload.words,
            self._elementwise.rope_table,
            *(self._gathered or ()),
        )
        return sum(x.numel() * x.element_size() for x in held)

    def _forward(self, chunk: Chunk, *, want_logits: bool) -> None:
        """Queue one pass; logits go to `_logits`."""
        for _ in self._parts(chunk, want_logits=want_logits):
            pass

    def _parts(self, chunk: Chunk, *, want_logits: bool) -> Iterator[None]:
        """Queue one pass; stops where a recorded one is cut in two.

        Launching a graph takes the host a microsecond a kernel, and the device waits for it: so it
        gets a short one first.
        """
        e, b = self._elementwise, self._buffers.rows(chunk.num_rows)
        heads = Heads(b.queries, b.keys, b.values)
        e.start()
        e.embed(self._matrices("embedding"), chunk, b.residual)
        deltas: list[Delta] = []
        for i, (own, names) in enumerate(zip(e.layers, self._names, strict=True)):
            e.add_norm(b.residual, deltas, own.attention_norm, b.normed)
            if i + 1 == len(self._names):
                break
            self._multiply(b.normed, names.qkv, b.qkv)
            e.qkv_rope_store(b.qkv, i, chunk, heads)
            self._multiply(self._attend(i, chunk, heads), names.attention_output, b.delta)
            deltas = [Delta(b.delta, own.attention_output_bias)]
            e.add_norm(b.residual, deltas, own.mlp_norm, b.normed, keeps=False)
            self._mlp(b, i)
            deltas.append(Delta(b.mlp_delta, own.down_bias))
            if i == 0:
                yield
        self._last_layer(b, chunk, heads, want_logits=want_logits)

    def _last_layer(self, b: Buffers, chunk: Chunk, heads: Heads, *, want_logits: bool) -> None:
        """Keys and values of all tokens; nobody asks for more but of the last one."""
        e, layer, one = self._elementwise, len(self._names) - 1, self._last_row
        own, names = e.layers[layer], self._names[layer]
        keys_at = heads.queries[0].numel()
        self._multiply(b.normed, names.qkv, b.qkv, keys_at)
        e.qkv_rope_store(b.qkv, layer, chunk, heads)  # nobody reads these queries
        if not want_logits:
            return
        torch.index_select(b.residual, 0, chunk.last, out=one.residual)
        torch.index_select(b.normed, 0, chunk.last, out=one.normed)
        self._multiply(one.normed, names.qkv, one.qkv)
        head = Heads(one.queries, one.keys, one.values)
        e.qkv_rope_store(one.qkv, layer, chunk.last_alone(), head)
        attended = self._attend_last(layer, chunk, one.queries, heads)
        self._multiply(attended, names.attention_output, one.delta)
        deltas = [Delta(one.delta, own.attention_output_bias)]
        e.add_norm(one.residual, deltas, own.mlp_norm, one.normed, keeps=False)
        self._mlp(one, layer)
        deltas.append(Delta(one.mlp_delta, own.down_bias))
        e.add_norm(one.residual, deltas, e.final_norm, one.normed)
        self._multiply(one.normed, "embedding" if self.config.tied_head else "head", self._logits)

    def _mlp(self, b: Buffers, layer: int) -> None:
        """`mlp_delta` of `normed`."""
        self._activate(b, layer)
        self._multiply(b.activated, self._names[layer].down, b.mlp_delta)

    def _activate(self, b: Buffers, layer: int) -> None:
        """`activated` of `normed`."""
        e, name = self._elementwise, self._names[layer].gate_up
        matrix, bias = self._matrices(name), e.layers[layer].gate_up_bias
        count = self._rows_of_product(name, len(b.normed))
        x, product, out = (_lengthened(t, count) for t in (b.normed, b.gate_up, b.activated))
        if not e.gate_up(x, matrix, bias, out):
            self._multiply_by(x, matrix, product)
            e.silu_mul(b.gate_up, bias, b.activated)

    def _attend(self, layer: int, chunk: Chunk, heads: Heads) -> Tensor:
        """[T, Q · D]; keys of earlier chunks come back from the pool, with this one's."""
        window = self.config.layers[layer].attention.window
        if chunk.num_rows in self.widths:
            return self._attend_gathered(layer, chunk, heads.queries, chunk.query_bounds)
        if chunk.position == 0:
            sees_all = window is None or window >= chunk.num_rows
            if sees_all and self._attends_whole:
                return attend_whole(heads.queries, heads.keys, heads.values)
            return self._elementwise.attend(heads, window)
        return attend(heads.queries, *self._read(layer, chunk), window)

    def _attend_last(self, layer: int, chunk: Chunk, query: Tensor, heads: Heads) -> Tensor:
        """[1, Q · D] of the last token's query [1, Q, D]."""
        window = self.config.layers[layer].attention.window
        if chunk.num_rows in self.widths:
            return self._attend_gathered(layer, chunk, query, chunk.last_ends[:2])
        if chunk.position == 0:
            return attend_one(
                query, heads.keys, heads.values, chunk.num_tokens, chunk.last_ends, window
            )
        return attend(query, *self._read(layer, chunk), window)

    def _attend_gathered(
        self, layer: int, chunk: Chunk, queries: Tensor, query_bounds: Tensor
    ) -> Tensor:
        """The same for the last of a sequence's queries so far, by what the device knows of it."""
        assert self._gathered is not None, "it comes with widths"
        keys, values = self._gathered
        if chunk.stop > len(keys):
            keys, values = (x.new_empty(chunk.stop, *x.shape[1:]) for x in self._gathered)
        self._elementwise.gather(layer, chunk, keys, values)
        window = self.config.layers[layer].attention.window
        most_keys = self.config.context_tokens
        return attend_packed(
            queries, keys, values, query_bounds, chunk.key_bounds, most_keys, window
        )

    def _read(self, layer: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, D] that the chunk's queries see, its own among them."""
        window = self.config.layers[layer].attention.window
        start = 0 if window is None else max(0, chunk.position + 1 - window)
        keys, values = self.pool.read(
            layer, chunk.page_table, start, chunk.position + chunk.num_tokens
        )
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _multiply(self, x: Tensor, name: str, out: Tensor, first: int = 0) -> None:
        """`out` [T, rows] = `x` [T, columns] · matrixᵀ, summed in fp32; rows from `first` on."""
        count = self._rows_of_product(name, len(x))
        x, out = (_lengthened(t, count) for t in (x, out))
        self._multiply_by(x, self._matrices(name)[first:], out[:, first:])

    def _rows_of_product(self, name: str, rows: int) -> int:
        """What a pass of so many rows multiplies.

        Rows behind its own are of no use: it is for the order in which those before are summed.
        """
        return self._product_rows.get((name.rpartition(".")[2], rows), rows)

    @staticmethod
    def _multiply_by(x: Tensor, matrix: Tensor, out: Tensor) -> None:
        if out.dtype is x.dtype:
            torch.mm(x, matrix.mT, out=out)
        else:
            torch.mm(x, matrix.mT, out_dtype=out.dtype, out=out)

    def _allocate(self, rows: int) -> Buffers:
        attention, mlp = self.config.layers[0].attention, self.config.layers[0].mlp
        hidden, ffn, dim = self.config.hidden_size, mlp.intermediate_size, attention.head_dim
        fp32, product, dtype = torch.float32, self._product_dtype, self.pool.dtype
        kv = (rows, attention.num_kv_heads, dim)
        return Buffers(
            residual=self._empty(rows, hidden, dtype=fp32),
            normed=self._empty(rows, hidden, dtype=dtype),
            qkv=self._empty(rows, attention.qkv_rows, dtype=product),
            queries=self._empty(rows, attention.num_query_heads, dim, dtype=dtype),
            keys=self._empty(*kv, dtype=dtype),
            values=self._empty(*kv, dtype=dtype),
            delta=self._empty(rows, hidden, dtype=product),
            mlp_delta=self._empty(rows, hidden, dtype=product),
            gate_up=self._empty(rows, 2 * ffn, dtype=dtype),
            activated=self._empty(rows, ffn, dtype=dtype),
        )

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.pool.device)


def _lengthened(buffer: Tensor, rows: int) -> Tensor:
    """A buffer's first rows with those behind them."""
    return buffer.as_strided((rows, buffer.shape[1]), buffer.stride())


def combined(behaviours: Sequence[Hashable | None]) -> Hashable | None:
    """What several operations do at one width, as one."""
    return None if None in behaviours else tuple(behaviours)


def require_prefill(config: ModelConfig) -> None:
    """Refuse what prefill cannot do, before anything is allocated.

    Raises:
        ShapeUnsupported: the model has lanes, layers of different sizes or interleaved rope.
    """
    if config.lanes is not None:
        raise ShapeUnsupported(f"{config.lanes.num_lanes} lanes", "models without lanes")
    if config.rope.interleaved:
        raise ShapeUnsupported("interleaved rope", "rope that is not interleaved")
    sizes = {
        (a.num_query_heads, a.num_kv_heads, a.head_dim, mlp.intermediate_size)
        for a, mlp in ((layer.attention, layer.mlp) for layer in config.layers)
    }
    if len(sizes) > 1:
        raise ShapeUnsupported("layers of different sizes", "one size for all layers")
