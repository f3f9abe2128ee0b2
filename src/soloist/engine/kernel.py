"""A model on the decode kernel of one GPU or several, with prefill on the same pools of pages."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from soloist.engine.columns import KernelExecutor
from soloist.engine.rooms import Host, num_pages_of
from soloist.megakernel.kv_layout import PAGE_POSITIONS
from soloist.megakernel.lanes import LaneShare
from soloist.megakernel.launch import Decoder
from soloist.megakernel.plan import Plan
from soloist.megakernel.ranks import Launcher, Ranks
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.prefill.elementwise import rope_table
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.fused_lanes import FusedLanes
from soloist.prefill.host_pages import HostPages, HostPagesOfRanks
from soloist.prefill.pages import PagePool
from soloist.prefill.part import Part
from soloist.prefill.products import Matrices
from soloist.prefill.runner import Prefill
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.weights.distribution import failures_of
from soloist.weights.packed import pack_weights
from soloist.weights.unpacking import Unpacked

# Prompt tokens a pass where several requests run: what running streams may have to wait for.
SHARED_CHUNK_TOKENS = 512

# First chunks of up to so many tokens run as captured graphs where weights stay at one address, and
# whole ones.
CAPTURED_TOKENS = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What all ranks have alike.

    Attributes:
        context_tokens: room in each sequence.
        sequences: rows of the page tables.
        num_pages: of every rank's pool.
        page_tables: pages of each sequence until requests take others.
    """

    context_tokens: int
    sequences: int
    num_pages: int
    page_tables: list[list[int]]


class _Part:
    """One rank: its pool, its kernel, its prefill."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        weights: Weights,
        device: torch.device,
        sizes: _Sizes,
        cache_root: Path | None,
        *,
        keep_rows: bool,
    ) -> None:
        config, dtype = plan.share, TORCH_DTYPES[plan.dtype]
        self.pool = PagePool(
            config.num_layers,
            plan.shape.pool_kv_heads,
            plan.shape.head_dim,
            sizes.num_pages,
            dtype,
            device,
        )
        positions = len(sizes.page_tables[0]) * PAGE_POSITIONS
        rope = rope_table(config.rope, plan.shape.head_dim, positions, device)
        vectors = {
            name: values.to(device, torch.float32)
            for name, values in weights.items()
            if name.endswith(("norm", "bias"))
        }
        table = None if config.tied_head else weights["embedding"].to(device, dtype)
        if table is not None:
            weights["embedding"] = table  # prefill and the kernel share it
        packed = pack_weights(plan, weights, device, keep_rows=keep_rows)
        self.decoder = Decoder(
            plan,
            packed,
            rope,
            self.pool.tensor,
            rank=rank,
            max_sequences=sizes.sequences,
            cache=cache_root,
        )
        self.decoder.page_tables.copy_(torch.tensor(sizes.page_tables, dtype=torch.int32))
        matrices: Matrices = (
            weights.__getitem__ if keep_rows else Unpacked(plan, packed.image, table)
        )
        share = plan.part_of(rank)
        lanes = len(share.lanes) if isinstance(share, LaneShare) else 0
        operations = partial(
            FusedElementwise, arch=plan.gpu.arch, cache_root=cache_root, rope=rope,
            ranks=plan.ranks, lanes=lanes,
        )  # fmt: skip
        most = min(MOST_PASS_TOKENS, sizes.context_tokens)
        self.prefill = Part(share, matrices, vectors, self.pool, operations, most, FusedLanes)
        torch.cuda.synchronize(device)


class KernelModel(KernelExecutor):
    """A model on one GPU or several: packed weights and the kernel, KV pools, and prefill.

    Args:
        plan: of the decode kernel.
        weights: of each rank, a tensor for each of its share (`shard_all`) in the plan's precision,
            on its GPU if rows are kept, else there or on the host; taken over.
        context_tokens: room in each sequence.
        devices: the GPU of each rank.
        cache_root: where compiled kernels are kept; None keeps none on disk.
        keep_rows: leave `weights` in GPU memory beside the packed ones, for prefill; otherwise
            prefill unpacks one matrix at a time.
        sequences: rows of the page tables, or requests that run side by side.
        kv_tokens: positions in the pool, shared by all requests; None makes room for as many
            contexts as there are sequences.
        chunk_tokens: most prompt tokens a pass of prefill.
        keeps_prefixes: see `KernelExecutor`.
        host_bytes: of pinned host memory, at most, for kept prompts whose pages others need.

    Raises:
        DeviceError: the kernels cannot be compiled, loaded or started.
    """

    def __init__(  # noqa: PLR0913 - sizes that the server and benchmarks choose
        self,
        plan: Plan,
        weights: Sequence[Weights],
        context_tokens: int,
        devices: Sequence[torch.device],
        cache_root: Path | None,
        *,
        keep_rows: bool,
        sequences: int = 1,
        kv_tokens: int | None = None,
        chunk_tokens: int = MOST_PASS_TOKENS,
        keeps_prefixes: bool = False,
        host_bytes: int = 0,
    ) -> None:
        assert len(weights) == len(devices) == plan.ranks, "something for every rank"
        pages = num_pages_of(context_tokens)
        num_pages = pages * sequences if kv_tokens is None else num_pages_of(kv_tokens)
        self.plan = plan
        self.devices, self._keeps_rows = tuple(devices), keep_rows
        # Until requests take pages: each sequence its own, as far as the pool goes.
        self.page_tables = [
            [page % num_pages for page in range(s * pages, (s + 1) * pages)]
            for s in range(sequences)
        ]
        sizes = _Sizes(context_tokens, sequences, num_pages, self.page_tables)

        def part(rank: int) -> _Part:
            device = devices[rank]
            with torch.cuda.device(device):
                if plan.ranks == 1:
                    return _Part(
                        plan, 0, weights[0], device, sizes, cache_root, keep_rows=keep_rows
                    )
                with failures_of(rank, device):
                    return _Part(
                        plan, rank, weights[rank], device, sizes, cache_root, keep_rows=keep_rows
                    )

        parts = [part(0)]  # the first one compiles for all
        if plan.ranks > 1:
            with ThreadPoolExecutor(plan.ranks - 1, "soloist-rank") as pool:
                parts += pool.map(part, range(1, plan.ranks))
        self.pools = [p.pool for p in parts]
        self.decoder: Launcher = parts[0].decoder
        if plan.ranks > 1:
            self.decoder = Ranks([p.decoder for p in parts])
        self.prefill = Prefill([p.prefill for p in parts])
        if keeps_prefixes:
            with torch.cuda.device(self.device):
                self.prefill.settle_widths()
        own_bytes = host_bytes // plan.ranks
        hosts = [HostPages(pool.tensor, own_bytes) for pool in self.pools]
        host: Host = hosts[0] if plan.ranks == 1 else HostPagesOfRanks(hosts)
        super().__init__(
            self.decoder, self.prefill, num_pages, plan.model.vocab_size, chunk_tokens,
            keeps_prefixes=keeps_prefixes, host=host,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """The first rank's."""
        return self.devices[0]

    def fill_pools(self) -> None:
        """Random keys and values at all positions, to measure what reading them takes."""
        for pool in self.pools:
            pool.tensor.normal_()

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

        That is the kernel that samples and graphs of short prompts. Raises DeviceError.
        """
        with torch.cuda.device(self.device):
            self.decoder.prepare_sampling()
            if self._keeps_rows:
                sizes = self.prefill.widths or (self.grid.width(0),)
                self.prefill.capture([*(n for n in CAPTURED_TOKENS if n < sizes[0]), *sizes])
        self.synchronize()

    @property
    def streamed_bytes(self) -> int:
        """Weights that a round streams from all GPUs, the kernel's padding included."""
        return self.plan.image.streamed_bytes * self.plan.ranks
