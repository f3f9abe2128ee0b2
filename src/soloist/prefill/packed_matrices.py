"""Products with a model's packed matrices: prompts read what decoding reads, on one Hopper GPU."""

from collections.abc import Collection, Hashable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.partition import RowOrder
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.fragments import RowCut, Tiling, half_tiles_of_rows, halves_table, tiled
from soloist.prefill.packed_choice import FormChoice, gated_out
from soloist.prefill.packed_form import (
    Form,
    Out,
    arranged_bytes,
    gates_all,
    is_gated,
    parted_bytes,
    rows_source,
)
from soloist.prefill.packed_product import (
    PackedProduct,
    PackedQuantize,
    PackedRows,
    on_device,
)
from soloist.prefill.packed_prompts import require_eight_bit_prompts, require_packed_prompts
from soloist.prefill.products import Arranged, Factor, Products

_HEAD = "head"


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
        choice: of forms, for a plan as `require_packed_prompts` wants it.
        packed: the plan's weights.
        columns: of permuted matrices: which columns of activations theirs meet, by name.
        most_tokens: of a pass.
        cache_root: where compiled kernels are kept; None keeps none on disk.
    """

    in_rows = False

    def __init__(
        self,
        choice: FormChoice,
        packed: PackedWeights,
        columns: dict[str, Tensor],
        most_tokens: int,
        cache_root: Path | None,
    ) -> None:
        super().__init__(self._embedding)
        plan, eight_bits = choice.plan, choice.eight_bits
        require_packed_prompts(plan)
        if eight_bits:
            require_eight_bit_prompts(plan)
        self._choice, self.gates_all = choice, gates_all(plan)
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
        self._tables: dict[tuple[Operation, int, bool, RowCut], tuple[Tiling, Tensor]] = {}

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
        kind = gated_out(operation, self.operation(name.rpartition(".")[0] + ".down"))
        self._launch(x, name, out, kind, 0)
        return Arranged(out) if kind is Out.ARRANGED else out

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
            self._launches[which] = self._prepared(name, len(arranged), kind, first)
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
        if self._choice.in_eight_bits(self.operation(name)):
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

    def _prepared(self, name: str, tokens: int, kind: Out, first: int) -> _Launch:
        layer, short = _place(name)
        operation = self.operation(name)
        form, rows = self._choice.of(operation, tokens, kind, first)
        if form not in self._kernels:
            with torch.cuda.device(self._device):
                self._kernels[form] = PackedProduct(form, self._cache_root)
        tiling, table = self._table(operation, first, rows, gated=is_gated(kind))
        image = self._address + self._plan.image.matrix_offset(layer, short)
        return _Launch(self._kernels[form], image, table, tiling)

    def _table(
        self, operation: Operation, first: int, rows: RowCut, *, gated: bool
    ) -> tuple[Tiling, Tensor]:
        which = (operation, first, gated, rows)
        if which not in self._tables:
            found = self._choice.fragments(operation, first, gated=gated)
            tiling, table = tiled(found, rows, operation.matrix.rows // (2 if gated else 1))
            self._tables[which] = tiling, on_device(table, self._device)
        return self._tables[which]


def _kind_of(out: Tensor) -> Out:
    return Out.WIDE if out.dtype is torch.float32 else Out.VALUES


def _place(name: str) -> tuple[int, str]:
    """(layer, the operation's name); the head's where the embedding is the same."""
    if name in ("embedding", _HEAD):
        return 0, _HEAD
    _, number, short = name.split(".")
    return int(number), short
