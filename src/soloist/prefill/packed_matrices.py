"""Products with a model's packed matrices: prompts read what decoding reads, on one Hopper GPU."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.partition import RowOrder
from soloist.megakernel.plan import Plan
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.fragments import (
    ARRANGED_COLUMNS,
    BLOCK_FRAGMENTS,
    GROUP_FRAGMENTS,
    Fragment,
    Load,
    Tiling,
    best_shares,
    fragments,
    half_tiles_of_rows,
    halves_table,
    tiled,
)
from soloist.prefill.packed_form import (
    MOST_PARTED_TOKENS,
    MOST_PARTED_WIDTH,
    PARTS,
    SLICED_TOKEN_SLOTS,
    SLICED_WIDTH,
    WIDTHS,
    Form,
    Out,
    arranged_bytes,
    can_slice,
    form_of,
    gates_all,
    parted_bytes,
    parts_of,
    rows_source,
    takes_eight_bits,
)
from soloist.prefill.packed_product import (
    PackedProduct,
    PackedQuantize,
    PackedRows,
    is_gated,
    on_device,
)
from soloist.prefill.packed_prompts import require_eight_bit_prompts, require_packed_prompts
from soloist.prefill.products import Arranged, Factor, Products

_HEAD = "head"
# What a tile takes beside its products, in tokens by which it is multiplied.
_TILE_TOKENS = 16
# Wider tiles of quantised matrices leave no registers for results of this kind.
_MOST_GATED_TOKENS = 128


class _Launch(NamedTuple):
    """All that a product needs beside its factor."""

    kernel: PackedProduct
    image: int
    table: Tensor
    tiling: Tiling

    def __call__(self, x: Tensor, out: Tensor, stream: int, scales: Tensor | None) -> None:
        self.kernel.launch(x, self.image, self.table, self.tiling, out, stream, scales)


class PackedMatrices(Products):
    """Multiplies by a model's packed matrices.

    Factors that are not arranged are copied first. So are those of products in 8 bits: a token's
    bits depend on its own numbers alone, and not on those beside it.

    Args:
        plan: of the decode kernel, as `require_packed_prompts` wants it.
        packed: its weights.
        columns: of permuted matrices: which columns of activations theirs meet, by name.
        most_tokens: of a pass.
        cache_root: where compiled kernels are kept; None keeps none on disk.
        eight_bits: layers' matrices in FP8 with a scale per row meet activations in FP8. The head
            does not: of a prompt it has one token.
    """

    in_rows = False

    def __init__(
        self,
        plan: Plan,
        packed: PackedWeights,
        columns: dict[str, Tensor],
        most_tokens: int,
        cache_root: Path | None,
        *,
        eight_bits: bool = False,
    ) -> None:
        super().__init__(self._embedding)
        require_packed_prompts(plan)
        if eight_bits:
            require_eight_bit_prompts(plan)
        self._eight_bits, self.gates_all = eight_bits, gates_all(plan)
        self._plan, self._packed, self._cache_root = plan, packed, cache_root
        self._columns = columns
        image = packed.image
        self._address, self._device = image.data_ptr(), image.device
        room = arranged_bytes(plan, most_tokens) // plan.dtype.num_bytes
        dtype = TORCH_DTYPES[plan.dtype]
        self._arranged = torch.empty(room, dtype=dtype, device=image.device)
        # Of tokens in 8 bits; products read them in pairs.
        scales = -(-most_tokens // 2) * 2 if eight_bits else 0
        self._scales = torch.empty(scales, dtype=torch.float32, device=image.device)
        parts = parted_bytes(plan) // torch.float32.itemsize
        self._parts = torch.empty(parts, dtype=torch.float32, device=image.device)
        self._kernels: dict[Form, PackedProduct] = {}
        self._launches: dict[tuple[str, int, Out, int], _Launch] = {}
        self._found: dict[tuple[Operation, int, bool], tuple[Fragment, ...]] = {}
        self._tables: dict[tuple[Operation, int, bool, int], tuple[Tiling, Tensor]] = {}

    def _embedding(self, name: str) -> Tensor:
        assert name == "embedding", "matrices are packed"
        assert self._packed.embedding is not None, "the head's rows are looked up"
        return self._packed.embedding

    @cached_property
    def _rows(self) -> PackedRows:
        head = self._plan.image.head.matrix
        source = rows_source(head.format, self._plan.dtype, head.steps)
        with torch.cuda.device(self._device):
            return PackedRows(source, self._cache_root)

    @cached_property
    def _quantize(self) -> PackedQuantize:
        with torch.cuda.device(self._device):
            return PackedQuantize(self._plan.dtype, self._cache_root)

    @cached_property
    def _head_table(self) -> Tensor:
        plan = self._plan
        halves = half_tiles_of_rows(plan.shape, plan.image.head, plan.image.block_stride)
        return on_device(halves_table(halves), self._device)

    def operation(self, name: str) -> Operation:
        """The decode kernel's of a matrix."""
        layer, short = _place(name)
        return self._plan.image.operation(layer, short)

    def behaviour(self, name: str) -> tuple[int, Hashable]:
        """See Products: among more rows than short passes have, bits depend on the matrix alone."""
        operation = self.operation(name)
        return operation.matrix.columns, operation

    def look_up(self, ids: Tensor, residual: Tensor) -> bool:
        """See Products; an embedding that is no head's lies row by row."""
        if self._packed.embedding is not None:
            return False
        place = self._address + self._plan.image.matrix_offset(0, _HEAD)
        self._rows.look_up(place, self._head_table, ids, residual, self._stream)
        return True

    def multiply(self, x: Factor, name: str, out: Tensor, first: int = 0) -> None:
        """See Products."""
        parts = self._launch(x, name, out, _kind_of(out), first)
        if parts is not out:
            self._rows.add_parts(parts, out, self._stream)

    def multiply_in_parts(self, x: Factor, name: str, out: Tensor) -> Tensor:
        """See Products."""
        return self._launch(x, name, out, _kind_of(out), 0)

    def takes_arranged(self, name: str) -> bool:
        """See Products; codes in an order of their own meet columns in that."""
        return name not in self._columns

    def gated(self, x: Factor, name: str, out: Tensor) -> Factor | None:
        """See Products; neurons leave as `down` reads them, if it reads them in their order."""
        operation = self.operation(name)
        if operation.matrix.order is not RowOrder.PAIRED:
            return None
        down = name.rpartition(".")[0] + ".down"
        is_plain = down not in self._columns and out.shape[1] % ARRANGED_COLUMNS == 0
        self._launch(x, name, out, Out.ARRANGED if is_plain else Out.GATED, 0)
        return Arranged(out) if is_plain else out

    @property
    def forms(self) -> Collection[Form]:
        """Of the products that were made so far."""
        return self._kernels

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _launch(self, x: Factor, name: str, out: Tensor, kind: Out, first: int) -> Tensor:
        """The product, in `out`, or its parts."""
        stream = self._stream
        arranged, scales = self._factor(x, name, stream)
        which = (name, len(arranged), kind, first)
        if which not in self._launches:
            self._launches[which] = self._prepared(name, len(arranged), kind, first, out)
        launch = self._launches[which]
        if (count := launch.kernel.form.parts) == 1:
            launch(arranged, out, stream, scales)
            return out
        parts = self._parts[: count * out.numel()].view(count, *out.shape)
        launch(arranged, parts, stream, scales)
        return parts

    def _factor(self, x: Factor, name: str, stream: int) -> tuple[Tensor, Tensor | None]:
        """As the matrix's product reads it; of 8 bits the scales, too."""
        is_arranged = isinstance(x, Arranged)
        values = x.values if isinstance(x, Arranged) else x
        columns = self._columns.get(name)
        if self._in_eight_bits(self.operation(name)):
            codes = self._arranged.view(torch.uint8)[: values.numel()].view(values.shape)
            self._quantize(
                values, columns, codes, self._scales, stream, arranged=is_arranged
            )  # fmt: skip
            return codes, self._scales
        if is_arranged:
            return values, None
        arranged = self._arranged[: values.numel()].view(values.shape)
        self._rows.arrange(values, columns, arranged, stream)
        return arranged, None

    def _in_eight_bits(self, operation: Operation) -> bool:
        is_layers = operation is not self._plan.image.head
        return self._eight_bits and is_layers and takes_eight_bits(operation.matrix)

    def _prepared(self, name: str, tokens: int, kind: Out, first: int, out: Tensor) -> _Launch:
        layer, short = _place(name)
        operation = self.operation(name)
        form, each = self._form(operation, tokens, kind, first, out)
        if form not in self._kernels:
            with torch.cuda.device(self._device):
                self._kernels[form] = PackedProduct(form, self._cache_root)
        tiling, table = self._table(operation, first, each, gated=is_gated(kind))
        image = self._address + self._plan.image.matrix_offset(layer, short)
        return _Launch(self._kernels[form], image, table, tiling)

    def _form(
        self, operation: Operation, tokens: int, kind: Out, first: int, out: Tensor
    ) -> tuple[Form, int]:
        """How so many tokens are multiplied, and fragments of a tile of rows.

        Only short passes have sums in parts and slices: bits of others are the same for any number
        of tokens.
        """
        matrix, num_sms = operation.matrix, self._plan.gpu.num_sms
        eight_bits = self._in_eight_bits(operation)
        found = self._fragments(operation, first, gated=is_gated(kind))
        may_part = tokens <= MOST_PARTED_TOKENS and not is_gated(kind) and first == 0
        fits = may_part and PARTS[-1] * out.numel() <= self._parts.numel() and out.numel() % 4 == 0
        columns, value_bits = matrix.columns, matrix.format.value_bits

        def shares(width: int) -> tuple[int, int, float]:
            tiles = -(-tokens // width)
            return best_shares(
                Load(len(found), columns, value_bits, width, tiles, eight_bits), num_sms,
                parts=parts_of(columns) if fits and width <= MOST_PARTED_WIDTH else (1,),
                multiple=GROUP_FRAGMENTS if kind is Out.ARRANGED else 1,
            )  # fmt: skip

        row_tiles = -(-len(found) // BLOCK_FRAGMENTS)
        widths = widths_for(tokens, kind, row_tiles, num_sms)
        width = min(widths, key=lambda width: shares(width)[2])
        each, parts, _ = shares(width)
        form = form_of(matrix, self._plan.dtype, width, kind if parts == 1 else Out.WIDE)
        form = replace(form, parts=parts, eight_bits=eight_bits)
        is_short = tokens <= MOST_PARTED_TOKENS and width == SLICED_WIDTH
        if is_short and each <= GROUP_FRAGMENTS and can_slice(form):
            form = replace(form, sliced=True, token_slots=SLICED_TOKEN_SLOTS)
        return form, each

    def _fragments(self, operation: Operation, first: int, *, gated: bool) -> tuple[Fragment, ...]:
        which = (operation, first, gated)
        if which not in self._found:
            plan = self._plan
            self._found[which] = fragments(
                plan.shape, operation, plan.image.block_stride, gated=gated, first=first
            )
        return self._found[which]

    def _table(
        self, operation: Operation, first: int, each: int, *, gated: bool
    ) -> tuple[Tiling, Tensor]:
        which = (operation, first, gated, each)
        if which not in self._tables:
            found = self._fragments(operation, first, gated=gated)
            tiling, table = tiled(found, each, operation.matrix.rows // (2 if gated else 1))
            self._tables[which] = tiling, on_device(table, self._device)
        return self._tables[which]


def widths_for(tokens: int, out: Out, row_tiles: int, num_sms: int) -> Sequence[int]:
    """Of tiles that may be quickest for so many tokens.

    Of few tokens the narrowest that holds them, and what holds half of them: a warp is done with
    fewer tokens sooner, and more SMs have some.

    Args:
        tokens: of the pass.
        out: what becomes of sums.
        row_tiles: tiles of the matrix's rows.
        num_sms: of the GPU, each of which has a tile at a time.
    """
    least = WIDTHS[1] if out is Out.ARRANGED else WIDTHS[0]
    most = _MOST_GATED_TOKENS if out is Out.GATED else WIDTHS[-1]
    fit = [width for width in WIDTHS if least <= width <= most]
    if tokens <= fit[-1]:
        holds = next(width for width in fit if width >= tokens)
        halves = holds <= MOST_PARTED_TOKENS and holds // 2 in fit
        return (holds, holds // 2) if halves else (holds,)

    def taken(width: int) -> int:
        tiles = row_tiles * -(-tokens // width)
        return -(-tiles // num_sms) * (width + _TILE_TOKENS)

    wide = [width for width in fit if 2 * width >= fit[-1]]
    return (min(reversed(wide), key=taken),)


def _kind_of(out: Tensor) -> Out:
    return Out.WIDE if out.dtype is torch.float32 else Out.VALUES


def _place(name: str) -> tuple[int, str]:
    """(layer, the operation's name); the head's where the embedding is the same."""
    if name in ("embedding", _HEAD):
        return 0, _HEAD
    _, number, short = name.split(".")
    return int(number), short
