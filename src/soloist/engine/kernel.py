"""A model on the decode kernel of one GPU, with prefill on the same pool of pages."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from soloist.engine.columns import KernelExecutor
from soloist.engine.rooms import num_pages_of
from soloist.megakernel.launch import Decoder
from soloist.megakernel.packing import gather, unpack
from soloist.megakernel.plan import PAGE_POSITIONS, Plan
from soloist.megakernel.sharding import rope_in_halves
from soloist.model.weights import TORCH_DTYPES, Weights
from soloist.prefill.elementwise import rope_table
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.host_pages import HostPages
from soloist.prefill.lanes import LANE_CHUNK_TOKENS, LanePrefill
from soloist.prefill.pages import PagePool
from soloist.prefill.runner import CHUNK_TOKENS, Matrices, Prefill

# Prompt tokens a pass where several requests run: what running streams may have to wait for.
SHARED_CHUNK_TOKENS = 512

# First chunks of up to so many tokens run as captured graphs where weights stay at one address, and
# whole ones.
CAPTURED_TOKENS = (32, 64, 128, 256)


class KernelModel(KernelExecutor):
    """A model on one GPU: packed weights and the kernel, a KV pool, and prefill on the same pool.

    Args:
        plan: of the decode kernel.
        weights: a tensor for each `TensorSpec` in the plan's precision, on the GPU if rows are
            kept, else there or on the host; taken over.
        context_tokens: room in each sequence.
        device: the GPU.
        cache_root: where compiled kernels are kept; None keeps nothing.
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
        weights: Weights,
        context_tokens: int,
        device: torch.device,
        cache_root: Path | None,
        *,
        keep_rows: bool,
        sequences: int = 1,
        kv_tokens: int | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        keeps_prefixes: bool = False,
        host_bytes: int = 0,
    ) -> None:
        config, dtype = plan.model, TORCH_DTYPES[plan.dtype]
        pages = num_pages_of(context_tokens)
        num_pages = pages * sequences if kv_tokens is None else num_pages_of(kv_tokens)
        self.plan = plan
        self._device, self._keeps_rows = device, keep_rows
        # Until requests take pages: each sequence its own, as far as the pool goes.
        self.page_tables = [
            [page % num_pages for page in range(s * pages, (s + 1) * pages)]
            for s in range(sequences)
        ]
        with torch.cuda.device(device):
            self.pool = PagePool(
                config.num_layers, plan.pool_kv_heads, plan.head_dim, num_pages, dtype, device
            )
            rope = rope_table(config.rope, plan.head_dim, pages * PAGE_POSITIONS, device)
            vectors = {
                name: values.to(device, torch.float32)
                for name, values in weights.items()
                if name.endswith(("norm", "bias"))
            }
            table = None if plan.share.tied_head else weights["embedding"].to(device, dtype)
            if table is not None:
                weights["embedding"] = table  # prefill and the decoder share it
            self.decoder = Decoder(
                plan,
                weights,
                rope,
                self.pool.tensor,
                max_sequences=sequences,
                cache=cache_root,
                keep_rows=keep_rows,
            )
            self.decoder.page_tables.copy_(torch.tensor(self.page_tables, dtype=torch.int32))
            matrices: Matrices = (
                weights.__getitem__ if keep_rows else Unpacked(plan, self.decoder.image, table)
            )
            self.prefill: Prefill | LanePrefill
            if config.lanes is None:
                self.prefill = Prefill(
                    config,
                    matrices,
                    vectors,
                    self.pool,
                    partial(FusedElementwise, arch=plan.gpu.arch, cache_root=cache_root, rope=rope),
                    most_tokens=min(CHUNK_TOKENS, context_tokens),
                )
            else:
                if keep_rows:
                    turn_halves(plan, weights)
                most = min(LANE_CHUNK_TOKENS, context_tokens)
                self.prefill = LanePrefill(config, matrices, vectors, self.pool, rope, most)
            host = HostPages(self.pool.tensor, host_bytes)
            torch.cuda.synchronize(device)
        super().__init__(
            self.decoder, self.prefill, self.pool.num_pages, config.vocab_size, chunk_tokens,
            keeps_prefixes=keeps_prefixes, host=host,
        )  # fmt: skip

    def bind(self) -> None:
        """See Executor; the driver launches into the context of the calling thread."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize(self._device)

    def prepare(self) -> None:
        """Build and record now what first requests would wait for.

        That is the kernel that samples and graphs of short prompts. Raises DeviceError.
        """
        with torch.cuda.device(self._device):
            self.decoder.prepare_sampling()
            if self._keeps_rows and isinstance(self.prefill, Prefill):
                first = self.grid.width(0)
                self.prefill.capture([*(n for n in CAPTURED_TOKENS if n < first), first])
            torch.cuda.synchronize(self._device)

    @property
    def streamed_bytes(self) -> int:
        """Weights that a round streams, the kernel's padding included."""
        return self.plan.streamed_bytes


def turn_halves(plan: Plan, weights: Weights) -> None:
    """Bring rows of q and k of all lanes into the order that the decoder's keys have."""
    for layer in range(plan.model.num_layers):
        name = f"layers.{layer}.qkv"
        weights[name] = rope_in_halves(plan.share.layers[0].attention, weights[name])


class Unpacked:
    """Row-major matrices by name, each unpacked from the kernel's image when asked for.

    Of a model with lanes they have lanes first, where the checkpoint has them so.

    Args:
        plan: how the image is laid out.
        image: packed weights [blocks, values].
        table: the embedding where the head is not tied to it.
    """

    def __init__(self, plan: Plan, image: Tensor, table: Tensor | None) -> None:
        self._plan, self._image, self._table = plan, image, table
        self._operations = {op.matrix.name: op for op in plan.layer_operations}

    def __call__(self, name: str) -> Tensor:
        """[out, in] or [L, out, in], contiguous."""
        if name == "embedding" and self._table is not None:
            return self._table
        layer, operation = 0, self._plan.head
        if name not in ("embedding", "head"):
            _, number, short = name.split(".")
            layer, operation = int(number), self._operations[short]
        lanes = self._plan.model.lanes
        parts = [
            unpack(self._plan, operation, gather(self._plan, operation, layer, image))
            for image in torch.split(self._image, self._plan.blocks)
        ]
        if lanes is None:
            return parts[0].contiguous()
        if operation is self._plan.head and lanes.head == "replicate":
            return torch.cat(parts)[: self._plan.model.vocab_size]
        return torch.stack(parts)
