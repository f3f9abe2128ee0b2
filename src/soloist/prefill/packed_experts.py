"""Prompts of mixtures: products with experts as they are packed for the decode kernel, on Hopper.

Rows of all tokens are sorted by expert on the device, and one launch multiplies those of all
experts: the host waits for nothing. A row's sum has one order, so its bits depend neither on who
else chose its experts nor on the rows of its pass.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from soloist.jit.cache import load_or_build
from soloist.jit.source import Source
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import OF_EXPERTS
from soloist.model.config import Router
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill import hopper
from soloist.prefill.expert_form import (
    CHOOSING_WARPS,
    CUT_WARPS,
    ROUTED_EXPERTS,
    ROUTED_TOKENS,
    ROWS_ENTRIES,
    expert_form,
    expert_rows_source,
    expert_sources,
    most_experts,
    most_neurons,
    most_pieces,
    most_slots,
    piece_rows,
    reads_packed_experts,
    table_bytes,
)
from soloist.prefill.experts import ExpertProducts
from soloist.prefill.fragments import BLOCK_FRAGMENTS, RowCut, Tiling, expert_fragments, tiled
from soloist.prefill.packed_form import ARCH, PIECE, Form, is_gated
from soloist.prefill.packed_product import Groups, PackedProduct, on_device
from soloist.reference.experts import Choice

_THREADS, _WARP = 256, 32
_VALUES_AT_ONCE = 8  # of a thread that takes rows


class PackedExperts(ExpertProducts):
    """Multiplies by experts that lie as the decode kernel streams them.

    Args:
        plan: of the decode kernel, as `reads_packed_experts` wants it.
        packed: its weights.
        most_tokens: of a pass.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: a kernel cannot be compiled or loaded.
    """

    def __init__(
        self, plan: Plan, packed: PackedWeights, most_tokens: int, cache_root: Path | None
    ) -> None:
        assert reads_packed_experts(plan), "experts that these kernels know"
        assert packed.experts is not None, "there are experts"
        self._plan, self._experts, self._cache_root = plan, packed.experts, cache_root
        self._device, dtype = packed.experts.device, TORCH_DTYPES[plan.dtype]
        slots, hidden = most_slots(plan, most_tokens), plan.model.hidden_size

        def empty(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=kind, device=self._device)

        self._x = empty(dtype, slots, hidden)
        self._activated = empty(dtype, slots * most_neurons(plan))
        self._given = empty(torch.float32, slots, hidden)
        self._row_of, self._token_of = empty(torch.int32, slots), empty(torch.int32, slots)
        self._logits = empty(torch.float32, most_tokens * most_experts(plan))
        self._shares, self._chosen = empty(torch.float32, slots), empty(torch.int64, slots)
        # How many pieces there are, then the pieces.
        self._table = empty(torch.uint8, table_bytes(plan, most_tokens))
        self._products: dict[Form, PackedProduct] = {}
        self._rows: dict[Router, ExpertRows] = {}
        self._tables: dict[Operation, tuple[Tiling, Tensor]] = {}
        build = partial(load_or_build, arch=ARCH, cache_root=cache_root)
        with ThreadPoolExecutor(thread_name_prefix="soloist-compile") as pool:
            list(pool.map(build, expert_sources(plan)))

    @property
    def num_bytes(self) -> int:
        """See ExpertProducts."""
        held = (
            self._x, self._activated, self._given, self._row_of, self._token_of, self._logits,
            self._shares, self._chosen, self._table,
        )  # fmt: skip
        return sum(x.numel() * x.element_size() for x in held)

    def choose(
        self, layer: int, normed: Tensor, router: Tensor, correction: Tensor | None
    ) -> Choice:
        """See ExpertProducts."""
        experts = self._plan.image.layer(layer).experts
        assert experts is not None, "a mixture"
        tokens, k, stream = len(normed), experts.router.num_chosen, self._stream
        launch, logits = self._rows_of(experts.router), self._logits[: tokens * len(router)]
        choice = Choice(
            self._chosen[: tokens * k].view(tokens, k), self._shares[: tokens * k].view(tokens, k)
        )
        launch.route(normed, router, logits, stream)
        launch.choose(logits, correction, choice, stream)
        return choice

    def __call__(
        self, layer: int, normed: Tensor, choice: Choice, out: Tensor, beside: Tensor | None = None
    ) -> None:
        """See ExpertProducts."""
        experts = self._plan.image.layer(layer).experts
        assert experts is not None, "a mixture"
        (tokens, k), stream = choice.experts.shape, self._stream
        slots, rows = tokens * k, piece_rows(experts.router, tokens)
        launch, columns = self._rows_of(experts.router), experts.down.columns
        number, pieces = self._table[: PIECE.num_bytes], self._table[PIECE.num_bytes :]
        x, given = self._x[:slots], self._given[:slots]
        activated = self._activated[: slots * columns].view(slots, columns)
        launch.cut(choice.experts, rows, number, pieces, self._row_of, self._token_of, stream)
        launch.take(normed, self._token_of, x, stream)
        groups = Groups(number, pieces, most_pieces(experts.router, tokens), experts.num_bytes)
        gate_up, down = (self._plan.image.operation(layer, name) for name in OF_EXPERTS)
        image = self._experts.data_ptr() + self._plan.image.experts_offset(layer)
        self._multiply(gate_up, rows, x, image, groups, activated, stream)
        image += gate_up.matrix.num_bytes
        self._multiply(down, rows, activated, image, groups, given, stream)
        if beside is None:
            launch.add_shares(given, self._row_of, choice.shares, out, stream)
            return
        total = torch.empty_like(beside, dtype=torch.float32)
        launch.add_shares(given, self._row_of, choice.shares, total, stream)
        torch.add(total, beside, out=out)

    def keeps_bits(self, layer: int, row: Tensor, router: Tensor) -> bool:  # noqa: ARG002 - by construction
        """See ExpertProducts."""
        return True

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _multiply(
        self, operation: Operation, rows: int, x: Tensor, image: int, groups: Groups,
        out: Tensor, stream: int,
    ) -> None:  # fmt: skip
        form = expert_form(self._plan, operation, rows)
        if form not in self._products:
            with torch.cuda.device(self._device):
                self._products[form] = PackedProduct(form, self._cache_root)
        if operation not in self._tables:
            gated = is_gated(form.out)
            found = expert_fragments(self._plan.shape, operation, gated=gated)
            results = operation.matrix.rows // (2 if gated else 1)
            tiling, words = tiled(found, RowCut(BLOCK_FRAGMENTS), results)
            self._tables[operation] = tiling, on_device(words, self._device)
        tiling, table = self._tables[operation]
        self._products[form].launch_grouped(x, image, groups, table, tiling, out, stream)

    def _rows_of(self, router: Router) -> "ExpertRows":
        if router not in self._rows:
            with torch.cuda.device(self._device):
                source = expert_rows_source(self._plan, router)
                self._rows[router] = ExpertRows(source, self._cache_root)
        return self._rows[router]


class ExpertRows:
    """Kernels beside these products: rows sorted by expert, and what experts give, added.

    Args:
        source: of `expert_rows_source`.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: they cannot be compiled or loaded.
    """

    def __init__(self, source: Source, cache_root: Path | None) -> None:
        self._modules = {entry: hopper.load(source, entry, 0, cache_root) for entry in ROWS_ENTRIES}

    def route(self, x: Tensor, router: Tensor, logits: Tensor, stream: int) -> None:
        """`logits` [T · E] = `x` [T, H] · `router` [E, H]ᵀ, in fp32."""
        blocks = -(-len(x) // ROUTED_TOKENS) * -(-len(router) // ROUTED_EXPERTS)
        self._launch("route", blocks, _THREADS, stream, x, router, logits, len(x))

    def choose(
        self, logits: Tensor, correction: Tensor | None, choice: Choice, stream: int
    ) -> None:
        """What `reference.experts.choose` makes of `logits` [T · E], into `choice`."""
        tokens = len(choice.experts)
        args = (logits, correction, choice.experts, choice.shares, tokens)
        blocks, threads = -(-tokens // CHOOSING_WARPS), CHOOSING_WARPS * _WARP
        self._launch("choose", blocks, threads, stream, *args)

    def cut(
        self, chosen: Tensor, rows: int, number: Tensor, pieces: Tensor, row_of: Tensor,
        token_of: Tensor, stream: int,
    ) -> None:  # fmt: skip
        """Sort slots by expert, and cut each expert's into pieces of at most so many rows.

        Args:
            chosen: [T, k] int64.
            rows: of a piece.
            number: 4 bytes, how many pieces there are.
            pieces: `PIECE` of each.
            row_of: int32, of each slot.
            token_of: int32, of each row.
            stream: handle.
        """
        args = (chosen, chosen.numel(), rows, number, pieces, row_of, token_of)
        self._launch("cut", 1, CUT_WARPS * _WARP, stream, *args)

    def take(self, x: Tensor, token_of: Tensor, out: Tensor, stream: int) -> None:
        """`out` [R, H] = each row's token of `x` [T, H], arranged."""
        count = out.numel() // _VALUES_AT_ONCE
        self._launch("take", -(-count // _THREADS), _THREADS, stream, x, token_of, out, count)

    def add_shares(
        self, given: Tensor, row_of: Tensor, shares: Tensor, out: Tensor, stream: int
    ) -> None:
        """`out` [T, H] = `given` [R, H] fp32 of each token's slots, times `shares` [T, k]."""
        args = (given, row_of, shares, out, int(out.dtype is torch.float32))
        self._launch("add_shares", len(out), _THREADS, stream, *args)

    def _launch(
        self, entry: str, blocks: int, threads: int, stream: int, *given: Tensor | int | None
    ) -> None:
        args = tuple(ctypes.c_uint32(x) if isinstance(x, int) else _address(x) for x in given)
        self._modules[entry].launch(blocks, threads, 0, args, stream, cooperative=False)


def _address(x: Tensor | None) -> ctypes.c_void_p:
    if x is None:
        return ctypes.c_void_p(None)
    assert x.is_contiguous(), "rows lie one after the other"
    return ctypes.c_void_p(x.data_ptr())
