"""The same operations as CUDA kernels of our own, one launch each (`cuda/kernels/prefill.cu`)."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from soloist.errors import DeviceError, KernelStuck, ShapeUnsupported
from soloist.jit.cache import load_or_build
from soloist.jit.compiler import require_clean
from soloist.jit.module import Module
from soloist.jit.source import Source
from soloist.kv.layout import HALF_PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.prefill.coded_pages import (
    BLOCK_HEADS,
    GATHER_ENTRY,
    STORE_ENTRY,
    coded_pages_source,
)
from soloist.prefill.elementwise import (
    DTYPES,
    Chunk,
    Delta,
    Elementwise,
    Heads,
    OwnRows,
    Reach,
    Vectors,
)
from soloist.prefill.first_attention import FirstAttention
from soloist.prefill.fragments import ARRANGED_COLUMNS
from soloist.prefill.gate_up import GateUp
from soloist.prefill.header import AWAIT_NS, THREADS
from soloist.prefill.page_attention import PageAttention
from soloist.prefill.page_form import PageForm
from soloist.prefill.sources import prefill_sources

_ACCESS_VALUES = 8
_STATIC_SMEM_BYTES = 48 * 1024
# Enough to fill a GPU; each takes one half page of a head after the other.
_GATHERING_BLOCKS = 1024
# The same for eight heads of positions.
_CODES_BLOCKS = 4096


# Of a delta in parts [parts, T, H].
_PARTS_DIMENSIONS = 3
_ENTRIES = ("embed", "add_norm", "add_norm_arranged", "qkv_rope_store", "gather", "silu_mul")
_OF_RANKS = ("tell", "await", "sum_norm")
# Words of `Meeting` before those of the ranks, and the one that says that nobody is waited for.
_MEETING_WORDS, _OPEN_AT = 3, 2


KernelArgs = tuple[ctypes.Structure | ctypes.c_void_p | ctypes.c_uint32 | ctypes.c_int32, ...]


class Kernels:
    """Kernels of one file, compiled and loaded; arguments as of `FusedElementwise.load`."""

    def __init__(
        self,
        source: Source,
        entries: Sequence[str],
        arch: str,
        cache_root: Path | None,
        device: torch.device,
    ) -> None:
        cubin = load_or_build(source, arch, cache_root)
        self._modules: dict[str, Module] = {}
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            for entry in entries:
                require_clean(cubin, entry, 0, _STATIC_SMEM_BYTES)
                self._modules[entry] = Module(cubin, entry)
                self._modules[entry].make_ready(0)

    def launch(
        self,
        entry: str,
        blocks: int,
        args: KernelArgs,
        stream: int,
        threads: int = THREADS,
    ) -> None:
        """Queue one of them; `stream` is a handle."""
        self._modules[entry].launch(blocks, threads, 0, args, stream, cooperative=False)


@cache
def peers_type(ranks: int) -> type[ctypes.Structure]:
    """The kernels' `Peers`, of so many ranks."""

    class Peers(ctypes.Structure):
        _fields_ = (
            ("meetings", ctypes.c_void_p * ranks),
            ("stuck", ctypes.c_void_p),
            ("rank", ctypes.c_uint32),
            ("parts", ctypes.c_void_p * ranks),
            ("results", ctypes.c_void_p * ranks),
        )

    return Peers


class FusedElementwise(Elementwise):
    """On a CUDA device, for 16-bit pools; products as `ResidualStreams` says, gate and up 16-bit.

    Args:
        config: see the base class.
        vectors: fp32 norm weights and biases, by the name of their `TensorSpec`.
        pool: gains keys and values.
        arch: architecture of the device, such as 'sm_90a'.
        cache_root: where compiled kernels are kept; None keeps none on disk.
        rope: see the base class.
        ranks: over how many the model is spread whose share `config` is; see `connect`.
        pages: how all passes attend to KV pages by a kernel of ours; None has these gathered.

    Attributes:
        stream: handle of that in which a pass runs.
        sources: of its kernels.

    Raises:
        ShapeUnsupported: a size that 16-byte accesses do not divide.
        DeviceError: the kernels cannot be compiled or loaded.
    """

    capturable = True

    def __init__(  # noqa: PLR0913 - what models, devices and starts may differ in
        self,
        config: ModelConfig,
        vectors: Vectors,
        pool: PagePool,
        arch: str,
        cache_root: Path | None,
        rope: Tensor | None = None,
        ranks: int = 1,
        pages: PageForm | None = None,
    ) -> None:
        super().__init__(config, vectors, pool, rope)
        attention = config.layers[0].attention
        self._heads = attention.num_query_heads + 2 * attention.num_kv_heads
        assert pool.dtype in DTYPES, "a 16-bit pool"
        assert pages is None or pages.layout == pool.layout, "of this pool"
        self.ranks = ranks
        self.sources = prefill_sources(config, DTYPES[pool.dtype], arch, ranks, pages)
        sizes = [("hidden", config.hidden_size), *(("FFN", n) for n in self.sources.swiglu)]
        for name, size in sizes:
            if size % _ACCESS_VALUES:
                raise ShapeUnsupported(f"{name} size {size}", f"multiples of {_ACCESS_VALUES}")
        self._arch, self._cache_root = arch, cache_root
        entries = (*_ENTRIES, *(_OF_RANKS if ranks > 1 else ()))
        first = self.sources.elementwise
        self._kernels = self.load(first, entries)
        # By neurons of an MLP: kernels are compiled for each size.
        self._swiglu = {
            n: self._kernels if source == first else self.load(source, ("silu_mul",))
            for n, source in self.sources.swiglu.items()
        }
        self._coded: Kernels | None = None
        if not pool.layout.format.is_plain:
            self._coded = self.load(coded_pages_source(pool.layout), (STORE_ENTRY, GATHER_ENTRY))
        with torch.cuda.device(pool.device):
            self._gate_up = {n: GateUp(s, cache_root) for n, s in self.sources.gate_up.items()}
            self._pages = None if pages is None else PageAttention(pages, pool, cache_root)
            own = self.sources.attention if pages is None else None
            self._attention = (
                None if own is None else FirstAttention(attention.head_dim, own, cache_root)
            )
        self.stream = 0
        self._rank = 0
        self._peers: Sequence[FusedElementwise] = [self]
        self._reached: dict[int, tuple[Reach, ctypes.Structure]] = {}
        words = _MEETING_WORDS + ranks
        self._meeting = torch.zeros(words, dtype=torch.int32, device=pool.device)
        self._stuck = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._without_tokens = torch.tensor([1, 0], dtype=torch.int32, device=pool.device)

    def load(self, source: Source, entries: Sequence[str]) -> Kernels:
        """More kernels of the same model. Raises DeviceError."""
        return Kernels(source, entries, self._arch, self._cache_root, self.pool.device)

    def connect(self, rank: int, peers: Sequence["FusedElementwise"]) -> None:
        """Before the first pass of several ranks: which one this is, and all of them in order."""
        self._rank, self._peers = rank, peers
        assert self._pages is None or self._is_alone, "see `page_form`"

    def wait_for_nobody(self, *, alone: bool) -> None:
        """Whether `sum_norm` and `meet` go on at once, though nobody else runs."""
        self._meeting[_OPEN_AT] = int(alone)

    @property
    def failure(self) -> DeviceError | None:
        """Whom this rank waited for in vain."""
        is_stuck, awaited = self._stuck.tolist()
        if not is_stuck:
            return None
        return KernelStuck(
            f"rank {self._rank} on {self.pool.device} in prefill", f"rank {awaited}",
            f"nothing of it for {AWAIT_NS // 10**9} seconds",
        )  # fmt: skip

    def start(self) -> None:
        """See the base class."""
        self.stream = torch.cuda.current_stream(self.pool.device).cuda_stream

    def embed(self, table: Tensor, chunk: Chunk, residual: Tensor) -> None:
        """See the base class."""
        assert table.is_contiguous(), "rows lie one after the other"
        args = (pointer(table), pointer(chunk.ids), pointer(residual))
        self._launch("embed", chunk.num_rows, args)

    def add_norm(
        self,
        residual: Tensor,
        deltas: Sequence[Delta],
        weight: Tensor,
        out: Tensor,
        *,
        keeps: bool = True,
        arranged: bool = False,
    ) -> None:
        """See the base class."""
        added = [x for delta in deltas for x in delta]
        tensors = (residual, *added, *[None] * (4 - len(added)), weight, out)
        does_keep = ctypes.c_uint32(keeps and bool(deltas))
        parts = _num_parts(deltas)
        args: tuple[ctypes.c_void_p | ctypes.c_uint32, ...] = (
            *map(pointer, tensors), does_keep, ctypes.c_uint32(parts),
        )  # fmt: skip
        assert not arranged or residual.shape[1] % ARRANGED_COLUMNS == 0, "whole groups of columns"
        entry = "add_norm_arranged" if arranged else "add_norm"
        self._launch(entry, residual.shape[0], args)

    def tell(self, reach: Reach) -> None:
        """See the base class."""
        self._launch("tell", 1, (self.reaching(reach),), threads=1)

    def meet(self, reach: Reach) -> None:
        """See the base class."""
        self._launch("await", 1, (self.reaching(reach),), threads=1)

    def sum_norm(
        self, reach: Reach, own: OwnRows, bias: Tensor | None, weight: Tensor, *, has_parts: bool
    ) -> None:
        """See the base class."""
        args = (
            self.reaching(reach), pointer(own.residual), pointer(bias), pointer(weight),
            pointer(own.last), ctypes.c_uint32(has_parts), ctypes.c_uint32(own.rows.start),
            ctypes.c_uint32(len(own.rows)),
        )  # fmt: skip
        self._launch("sum_norm", 1 if own.last is not None else max(1, len(own.rows)), args)

    def reaching(self, reach: Reach) -> ctypes.Structure:
        """The kernels' `Peers`."""
        if id(reach) not in self._reached:
            pointers = ctypes.c_void_p * len(self._peers)
            peers = peers_type(len(self._peers))(
                pointers(*(peer._meeting.data_ptr() for peer in self._peers)),  # noqa: SLF001 - same class
                self._stuck.data_ptr(), self._rank,
                pointers(*(part.data_ptr() for part in reach.parts)),
                pointers(*(result.data_ptr() for result in reach.results)),
            )  # fmt: skip
            self._reached[id(reach)] = (reach, peers)
        return self._reached[id(reach)][1]

    def qkv_rope_store(self, product: Tensor, layer: int, chunk: Chunk, heads: Heads) -> None:
        """See the base class."""
        vectors, rows = self.layers[layer], chunk.num_rows
        rope = self.rope_table if self.config.layers[layer].attention.rope else None
        # The kernel stores 16 bits; of a chunk without tokens it stores nothing.
        has_codes = not self.pool.layout.format.is_plain
        place = chunk.place * self._without_tokens if has_codes else chunk.place
        args = (
            pointer(product),
            pointer(vectors.qkv_bias),
            pointer(vectors.q_norm),
            pointer(vectors.k_norm),
            pointer(rope),
            pointer(heads.queries),
            pointer(heads.keys),
            pointer(heads.values),
            pointer(self.pool.tensor),
            pointer(chunk.page_table),
            pointer(place),
            ctypes.c_uint32(layer),
            ctypes.c_int32(rows),
            ctypes.c_int32(self.rope_table.shape[0]),
        )
        # A chunk may begin anywhere in a half page.
        half_pages = -(-(rows + HALF_PAGE_POSITIONS - 1) // HALF_PAGE_POSITIONS)
        self._launch("qkv_rope_store", half_pages * self._heads, args)
        if has_codes:
            self._round_store(layer, chunk, heads)

    def _round_store(self, layer: int, chunk: Chunk, heads: Heads) -> None:
        """`store` of codes."""
        assert self._coded is not None, "a pool of codes"
        rows = chunk.num_rows
        args = (
            pointer(heads.keys), pointer(heads.values), pointer(self.pool.tensor),
            pointer(chunk.page_table), pointer(chunk.place), ctypes.c_uint32(layer),
            ctypes.c_int32(rows),
        )  # fmt: skip
        blocks = -(-rows * self.pool.num_kv_heads // BLOCK_HEADS)
        self._coded.launch(STORE_ENTRY, blocks, args, self.stream)

    def gather(self, layer: int, chunk: Chunk, keys: Tensor, values: Tensor) -> None:
        """See the base class."""
        assert keys.is_contiguous(), "rows lie one after the other"
        assert values.is_contiguous(), "rows lie one after the other"
        args = (
            pointer(self.pool.tensor),
            pointer(chunk.page_table),
            pointer(chunk.place),
            ctypes.c_uint32(layer),
            ctypes.c_int32(self.config.layers[layer].attention.window or 0),
            pointer(keys),
            pointer(values),
        )
        # How many half pages there are the device knows: a captured graph serves every position.
        units = -(-keys.shape[0] // HALF_PAGE_POSITIONS) * self.pool.num_kv_heads
        if self._coded is not None:
            blocks = min(-(-keys.shape[0] * self.pool.num_kv_heads // BLOCK_HEADS), _CODES_BLOCKS)
            self._coded.launch(GATHER_ENTRY, blocks, args, self.stream)
            return
        self._launch("gather", min(units, _GATHERING_BLOCKS), args)

    def silu_mul(self, product: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See the base class."""
        count = out.numel() // _ACCESS_VALUES
        args = (pointer(product), pointer(bias), pointer(out), ctypes.c_uint32(count))
        kernels = self._swiglu[out.shape[-1]]
        kernels.launch("silu_mul", -(-count // THREADS), args, self.stream)

    def gate_up(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> bool:
        """See the base class."""
        kernel = self._gate_up.get(out.shape[-1])
        if kernel is None or bias is not None or not self._is_alone:
            return False
        if not kernel.suits(x, matrix):
            return False
        kernel.launch(x, matrix, out, self.stream)
        return True

    @property
    def attends(self) -> bool:
        """See the base class."""
        return self._attention is not None and self._is_alone

    @property
    def _is_alone(self) -> bool:
        """Whether kernels may take SMs whole: a rank that waits may hold a part of each."""
        return sum(peer.pool.device == self.pool.device for peer in self._peers) == 1

    def attend(self, heads: Heads, window: int | None) -> Tensor:
        """See the base class."""
        if self._attention is None or not self._is_alone:
            return super().attend(heads, window)
        out = torch.empty_like(heads.queries)
        self._attention.launch(heads.queries, heads.keys, heads.values, out, window, self.stream)
        return out.flatten(1)

    @property
    def attends_pages(self) -> bool:
        """See the base class."""
        return self._pages is not None

    def attend_pages(
        self,
        layer: int,
        chunk: Chunk,
        queries: Tensor,
        query_bounds: Tensor,
        *,
        arranged: bool = False,
    ) -> Tensor:
        """See the base class."""
        assert self._pages is not None, "it attends to pages"
        window, out = self.config.layers[layer].attention.window, torch.empty_like(queries)
        self._pages.launch(
            queries, chunk, query_bounds, layer, window, out, self.stream, arranged=arranged
        )
        return out.flatten(1)

    @property
    def page_attention_bytes(self) -> int:
        """What `attend_pages` has in memory."""
        return 0 if self._pages is None else self._pages.num_bytes

    def _launch(self, entry: str, blocks: int, args: KernelArgs, threads: int = THREADS) -> None:
        self._kernels.launch(entry, blocks, args, self.stream, threads)


def _num_parts(deltas: Sequence[Delta]) -> int:
    """Of the second delta, in which the kernel adds parts; 0 where there are none."""
    in_parts = [delta.product.ndim == _PARTS_DIMENSIONS for delta in deltas]
    if not any(in_parts):
        return 0
    assert in_parts == [False, True], "the second one alone"
    assert deltas[1].product.dtype is torch.float32, "parts are fp32"
    return len(deltas[1].product)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Its address as a kernel parameter, null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
