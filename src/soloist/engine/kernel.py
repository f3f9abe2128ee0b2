"""A model on the decode kernel of one GPU or several, with prefill on the same pools of pages."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path

import torch

from soloist.engine.drafting import queries_beside
from soloist.engine.identity import identity_of
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.tail_path import (
    MEASURED_ARCH,
    TailCosts,
    TailFacts,
    TailPath,
    TailRule,
    tail_costs,
)
from soloist.jit.ahead import built_beside
from soloist.jit.source import Source
from soloist.kv.allocator import num_pages_of
from soloist.kv.folder import ChunkFolder
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.offload import HostPages, HostPagesOfRanks
from soloist.kv.page_copies import PageCopies
from soloist.kv.pool import PagePool
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.drafting import MOST_TEXT_TOKENS
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan
from soloist.megakernel.ranks import Ranks
from soloist.model.families import tensors
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.prefill.batched_experts import ExpertMatrices
from soloist.prefill.elementwise import rope_table
from soloist.prefill.expert_form import reads_packed_experts
from soloist.prefill.experts import ExpertProducts
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.fused_lanes import FusedLanes
from soloist.prefill.packed_choice import FormChoice, packed_sources
from soloist.prefill.packed_experts import PackedExperts
from soloist.prefill.packed_matrices import PackedMatrices
from soloist.prefill.packed_prompts import require_eight_bit_prompts, require_packed_prompts
from soloist.prefill.page_form import page_form
from soloist.prefill.part import Part
from soloist.prefill.products import Matrices, Products
from soloist.prefill.runner import Prefill
from soloist.prefill.unpacked_matrices import UnpackedMatrices, unpack_sources
from soloist.prefill.widths import CAPTURED_TOKENS, MOST_PASS_TOKENS
from soloist.weights.distribution import failures_of
from soloist.weights.packed import pack_weights
from soloist.weights.unpacking import (
    UnpackedExperts,
    parts_to_rows,
    routers_of,
    tables_of_columns,
)

# Prompt tokens a pass where several requests run: what running streams may have to wait for.
SHARED_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a model on the kernel has room for, alike on all ranks.

    Attributes:
        context_tokens: in each sequence.
        sequences: rows of the page tables, or requests that run side by side.
        kv_tokens: positions in the pool, shared by all requests; None makes room for as many
            contexts as there are sequences.
        chunk_tokens: most prompt tokens a pass of prefill.
        keeps_prefixes: see `KernelExecutor`.
        host_bytes: of pinned host memory, at most, for cached prompts whose pages others need.
        page_attention: whether prefill attends to KV pages by a kernel of ours, and has memory for
            that (`PageAttention`); None: where it runs.
        tail_path: which way the tokens behind a prompt's last chunk are read (`TailRule`).
        eight_bit_prompts: activations of packed prompts have 8 bits where matrices are FP8.
    """

    context_tokens: int
    sequences: int = 1
    kv_tokens: int | None = None
    chunk_tokens: int = MOST_PASS_TOKENS
    keeps_prefixes: bool = False
    host_bytes: int = 0
    page_attention: bool | None = None
    tail_path: TailPath = "auto"
    eight_bit_prompts: bool = False

    @property
    def num_pages(self) -> int:
        """Of every rank's pool."""
        if self.kv_tokens is None:
            return num_pages_of(self.context_tokens) * self.sequences
        return num_pages_of(self.kv_tokens)

    @property
    def page_tables(self) -> list[list[int]]:
        """Until requests take pages: each sequence its own, as far as the pool goes."""
        pages = num_pages_of(self.context_tokens)
        return [
            [page % self.num_pages for page in range(s * pages, (s + 1) * pages)]
            for s in range(self.sequences)
        ]


class _Reads(Enum):
    """Which weights prefill multiplies by."""

    ROWS = auto()  # a second copy
    UNPACKED = auto()  # packed ones, which become rows matrix by matrix
    PACKED = auto()


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """One rank in its GPU's memory: its pool, its kernel, its prefill."""

    pool: PagePool
    decoder: Decoder
    prefill: Part


def load_kernel(
    plan: Plan,
    weights: Sequence[Weights],
    devices: Sequence[torch.device],
    capacity: Capacity,
    cache_root: Path | None,
    *,
    keep_rows: bool,
    packed_prompts: bool = False,
) -> "KernelModel":
    """Pack every rank's weights, and build what runs them.

    Args:
        plan: of the decode kernel.
        weights: of each rank, a tensor for each of its share (`shard_all`) in the plan's precision,
            of matrices with formats of their own all parts; on its GPU or on the host; taken over.
        devices: the GPU of each rank.
        capacity: what there shall be room for.
        cache_root: where compiled kernels are kept; None keeps none on disk.
        keep_rows: leave `weights` in GPU memory beside the packed ones, for prefill, with numbers
            in place of parts; otherwise prefill unpacks one matrix at a time. Experts it unpacks in
            any case.
        packed_prompts: prefill reads the packed weights (`PackedMatrices`); rows are not kept.

    Raises:
        SettingError: no matrix is FP8 as 8 bits for prompts want it.
        ShapeUnsupported: prompts cannot be read from packed weights, or attention not from pages.
        DeviceError: the kernels cannot be compiled, loaded or started.
    """
    assert len(weights) == len(devices) == plan.ranks, "something for every rank"
    assert not (keep_rows and packed_prompts), "one copy"
    assert packed_prompts or not capacity.eight_bit_prompts, "of packed weights"
    shares_gpu = len(set(devices)) < len(devices)
    pages = page_form(plan, asked=capacity.page_attention, shares_gpu=shares_gpu)
    capacity = replace(capacity, page_attention=pages is not None)
    reads = _Reads.ROWS if keep_rows else _Reads.UNPACKED
    if packed_prompts:
        require_packed_prompts(plan)
        reads = _Reads.PACKED
        if capacity.eight_bit_prompts:
            require_eight_bit_prompts(plan)

    def load(rank: int) -> LoadedRank:
        device, own = devices[rank], weights[rank]
        naming_rank = nullcontext() if plan.ranks == 1 else failures_of(rank, device)
        with torch.cuda.device(device), naming_rank:
            return _load_rank(plan, rank, own, device, capacity, cache_root, reads)

    ranks = [load(0)]  # the first one compiles for all
    if plan.ranks > 1:
        with ThreadPoolExecutor(plan.ranks - 1, "soloist-rank") as pool:
            ranks += pool.map(load, range(1, plan.ranks))
    return KernelModel(plan, ranks, devices, capacity)


def _load_rank(
    plan: Plan,
    rank: int,
    weights: Weights,
    device: torch.device,
    capacity: Capacity,
    cache_root: Path | None,
    reads: _Reads,
) -> LoadedRank:
    config, dtype = plan.share, TORCH_DTYPES[plan.dtype]
    pool = PagePool(
        config.num_layers,
        plan.shape.pool_kv_heads,
        plan.shape.head_dim,
        capacity.num_pages,
        dtype,
        device,
        plan.kv,
    )
    page_tables = capacity.page_tables
    positions = len(page_tables[0]) * PAGE_POSITIONS
    rope = rope_table(config.rope, plan.shape.head_dim, positions, device)
    vectors = {
        name: values.to(device, torch.float32)
        for name, values in weights.items()
        if name.endswith(("norm", "bias"))
    }
    table = None if config.tied_head else weights["embedding"].to(device, dtype)
    if table is not None:
        weights["embedding"] = table  # prefill and the kernel share it
    packed = pack_weights(plan, weights, device, keep_rows=reads is _Reads.ROWS)
    vectors |= routers_of(plan, packed)
    if reads is _Reads.ROWS:
        for name, values in weights.items():
            weights[name] = values.to(device)
        parts_to_rows(plan, weights)
    choice = FormChoice(plan, eight_bits=capacity.eight_bit_prompts)
    of_prompts: tuple[Source, ...] = ()
    if reads is _Reads.PACKED:
        of_prompts = packed_sources(choice)
    elif reads is _Reads.UNPACKED:
        of_prompts = unpack_sources(plan)
    with built_beside(of_prompts, plan.gpu.arch, cache_root):
        decoder = Decoder(
            plan, packed, rope, pool.tensor,
            rank=rank, max_sequences=capacity.sequences, cache=cache_root,
        )  # fmt: skip
    decoder.page_tables.copy_(torch.tensor(page_tables, dtype=torch.int32))
    share = plan.part_of(rank)
    operations = partial(
        FusedElementwise, arch=plan.gpu.arch, cache_root=cache_root, rope=rope, ranks=plan.ranks,
        pages=page_form(plan, asked=capacity.page_attention),
    )  # fmt: skip
    most = min(MOST_PASS_TOKENS, capacity.context_tokens)
    matrices: Products
    if reads is not _Reads.PACKED:
        rows: Matrices = weights.__getitem__
        if reads is _Reads.UNPACKED:
            rows = UnpackedMatrices(plan, packed, tables_of_columns(plan, packed), cache_root)
        matrices = Products(rows, _experts(plan, packed, most, cache_root))
    else:
        tables = tables_of_columns(plan, packed)
        matrices = PackedMatrices(choice, packed, tables, most, cache_root)
    prefill = Part(share, matrices, vectors, pool, operations, most, FusedLanes)
    torch.cuda.synchronize(device)
    return LoadedRank(pool, decoder, prefill)


def _experts(
    plan: Plan, packed: PackedWeights, most_tokens: int, cache_root: Path | None
) -> ExpertProducts | ExpertMatrices | None:
    """How prompts are multiplied by experts, of which there is one copy in any case."""
    if not plan.has_experts:
        return None
    if reads_packed_experts(plan):
        return PackedExperts(plan, packed, most_tokens, cache_root)
    return UnpackedExperts(plan, packed)


def _costs_of_tails(plan: Plan, *, attends_pages: bool) -> TailCosts | None:
    """None where nothing was measured."""
    if plan.gpu.arch != MEASURED_ARCH or plan.ranks > 1:
        return None
    if plan.shape.has_lanes or plan.has_experts:
        return None
    if plan.kv is not None:
        return None
    values = sum(spec.num_values for spec in tensors(plan.model) if spec.is_layer_matrix)
    facts = TailFacts(
        plan.image.streamed_bytes, values, plan.kv_layout.pool_bytes(1) / PAGE_POSITIONS,
        plan.model.num_layers, plan.shape.head_dim, attends_pages,
    )  # fmt: skip
    return tail_costs(facts)


class KernelModel(KernelExecutor):
    """A model on one GPU or several, as `load_kernel` makes it.

    Args:
        plan: of the decode kernel.
        ranks: all of them, in order.
        devices: the GPU of each rank.
        capacity: what its ranks have room for, with `page_attention` decided.

    Raises:
        DeviceError: ranks cannot work together.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Sequence[LoadedRank],
        devices: Sequence[torch.device],
        capacity: Capacity,
    ) -> None:
        self.plan, self.devices = plan, tuple(devices)
        self.page_tables = capacity.page_tables
        self.pools = [rank.pool for rank in ranks]
        decoders = [rank.decoder for rank in ranks]
        decoder = decoders[0] if plan.ranks == 1 else Ranks(decoders)
        prefill = Prefill([rank.prefill for rank in ranks])
        if capacity.keeps_prefixes:
            with torch.cuda.device(self.device):
                prefill.settle_widths()
        own_bytes = capacity.host_bytes // plan.ranks
        host = HostPagesOfRanks([HostPages(pool.tensor, own_bytes) for pool in self.pools])
        super().__init__(
            decoder, prefill, capacity.num_pages, plan.model.vocab_size, capacity.chunk_tokens,
            keeps_prefixes=capacity.keeps_prefixes, host=host,
        )  # fmt: skip
        self.drafts_in_kernel = capacity.context_tokens < MOST_TEXT_TOKENS
        self.most_beside = queries_beside(plan)
        costs = _costs_of_tails(plan, attends_pages=bool(capacity.page_attention))
        self.tails = TailRule(capacity.tail_path, costs, prefill.widths)

    @property
    def device(self) -> torch.device:
        """The first rank's."""
        return self.devices[0]

    def save_to(self, root: Path, most_bytes: int, facts: tuple[object, ...]) -> None:
        """See Executor; how prompts are cut and read is part of what bits depend on."""
        pools = [pool.tensor for pool in self.pools]
        own = (
            "pages", self.chunks, self.prefill.widths, self.plan.ranks, self.plan.gpu,
            [tuple(pool.shape[1:]) for pool in pools],
        )  # fmt: skip
        folder = ChunkFolder(root, identity_of([*facts, *own]))
        self.save_in(folder, most_bytes, PageCopies(pools))

    def fill_pools(self) -> None:
        """Random keys and values at all positions, to measure what reading them takes."""
        for pool in self.pools:
            pool.fill()

    def bind(self) -> None:
        """See Executor; the driver launches into the context of the calling thread."""
        torch.cuda.set_device(self.device)
        self.synchronize()

    def check(self) -> None:
        """See Executor; an error of the device that is still to show does so here."""
        self.synchronize()
        super().check()

    def synchronize(self) -> None:
        """Return once nothing runs on its GPUs."""
        for device in self.devices:
            torch.cuda.synchronize(device)

    def prepare(self) -> None:
        """Build and record now what first requests would wait for.

        That is kernels that sample and that draft, and graphs of short prompts. Raises DeviceError.
        """
        with torch.cuda.device(self.device):
            self.decoder.prepare_sampling()
            if self.drafts_in_kernel and self.drafting is not None:
                self.decoder.prepare_drafting()
            first = self.chunks.width(0)
            short = [n for n in CAPTURED_TOKENS if n < first]
            self.prefill.capture(self.prefill.widths or (first,), short)
        self.synchronize()

    @property
    def streamed_bytes(self) -> int:
        """Weights that a round streams from all GPUs, the kernel's padding included."""
        return self.plan.image.streamed_bytes * self.plan.ranks
