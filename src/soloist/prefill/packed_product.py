"""Products with matrices as they are packed for the decode kernel, by kernels of ours on Hopper."""

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.jit.cache import load_or_build
from soloist.jit.compiler import require_clean
from soloist.jit.module import Module
from soloist.jit.source import Source
from soloist.jit.tensor_map import Box, tensor_map
from soloist.model.dtype import Dtype
from soloist.prefill import hopper
from soloist.prefill.fragments import CHUNK_COLUMNS, Tiling
from soloist.prefill.packed_form import (
    ARCH,
    ENTRY,
    QUANTIZE_ENTRY,
    ROWS_ENTRIES,
    Form,
    quantize_source,
)

_THREADS = 256
_Arguments = tuple[ctypes.c_void_p | ctypes.c_uint32, ...]
_ARRANGED_AT_ONCE = 8  # values of a thread


class _Product(ctypes.Structure):
    """The kernel's `Product`."""

    _fields_ = (
        ("image", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tokens", ctypes.c_uint32),
        ("token_tiles", ctypes.c_uint32),
        ("tiles", ctypes.c_uint32),
        ("pitch", ctypes.c_uint32),
        ("results", ctypes.c_uint32),
        ("num_pieces", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("expert_bytes", ctypes.c_uint64),
        ("token_scales", ctypes.c_void_p),
    )


class Groups(NamedTuple):
    """Rows of several experts, each of which has a matrix of its own.

    Attributes:
        number: on the device, how many pieces there are.
        pieces: the kernel's `Piece`, of each so many.
        most: that there may be.
        expert_bytes: from one expert's matrix to the next's.
    """

    number: Tensor
    pieces: Tensor
    most: int
    expert_bytes: int


class PackedProduct:
    """The kernel of one form, compiled and loaded into the current context.

    Args:
        form: what it is compiled for.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: it cannot be compiled or loaded.
    """

    def __init__(self, form: Form, cache_root: Path | None) -> None:
        self.form = form
        self._module = hopper.load(form.source, ENTRY, form.shared_bytes, cache_root)

    def launch(
        self, x: Tensor, image: int, table: Tensor, tiling: Tiling, out: Tensor, stream: int,
        scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`out` [T, …] = `x` · matrixᵀ, or SwiGLU of it.

        A row's bits depend neither on T nor on the form's tokens, but on its parts.

        Args:
            x: [T, K], arranged (`PackedRows.arrange`), K a multiple of 32.
            image: address at which the first block has the matrix.
            table: of `tiling`, on the device.
            tiling: of the matrix's rows.
            out: [T, results], rows one after the other; in parts [parts, T, results] of fp32.
            stream: handle.
            scales: fp32, of each token in 8 bits (`PackedQuantize`), of which `x` is then uint8.
        """
        form, tokens = self.form, len(x)
        assert form.eight_bits == (scales is not None), "tokens in 8 bits have scales"
        assert not form.grouped, "rows of one matrix"
        parts = () if form.parts == 1 else (form.parts,)
        assert out.shape == (*parts, tokens, tiling.results), "a row for every token"
        assert out.is_contiguous(), "rows lie one after the other"
        assert tiling.each <= form.fragments, "as many groups as tiles need"
        token_tiles = -(-tokens // form.tokens)
        tiles = token_tiles * tiling.count * form.parts
        product = _Product(
            image, table.data_ptr(), out.data_ptr(),
            tokens, token_tiles, tiles, tiling.results, tiling.results, None, None, 0,
            None if scales is None else scales.data_ptr(),
        )  # fmt: skip
        self._launch(x, product, tiles, stream)

    def launch_grouped(
        self, x: Tensor, image: int, groups: Groups, table: Tensor, tiling: Tiling, out: Tensor,
        stream: int,
    ) -> None:  # fmt: skip
        """The same of rows that lie expert by expert, each multiplied by its expert's matrix.

        Args:
            x: [R, K], arranged.
            image: address of the first expert's matrix.
            groups: which rows are whose.
            table: of `tiling`, on the device.
            tiling: of an expert's rows.
            out: [R, results].
            stream: handle.
        """
        form, rows = self.form, len(x)
        assert form.grouped, "compiled for groups"
        assert out.shape == (rows, tiling.results), "a row for every row"
        assert out.is_contiguous(), "rows lie one after the other"
        product = _Product(
            image, table.data_ptr(), out.data_ptr(),
            rows, 0, tiling.count, tiling.results, tiling.results,
            groups.number.data_ptr(), groups.pieces.data_ptr(), groups.expert_bytes,
        )  # fmt: skip
        self._launch(x, product, groups.most * tiling.count, stream)

    def _launch(self, x: Tensor, product: _Product, most_tiles: int, stream: int) -> None:
        """Start it; `most_tiles` that blocks may take."""
        form = self.form
        # The copy engine takes two values of 8 bits for one of 16.
        x = x.view(torch.int16) if form.eight_bits else x
        args = (tensor_map(hopper.address(x), *x.shape, Box(form.tokens, CHUNK_COLUMNS)), product)
        self._module.launch(
            min(most_tiles, self._module.num_sms), form.threads, form.shared_bytes, args, stream,
            cooperative=False, overlaps=not form.grouped,
        )  # fmt: skip


class PackedRows:
    """Kernels beside these products: columns in their order, and rows of a packed embedding.

    Args:
        source: of `rows_source`.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: they cannot be compiled or loaded.
    """

    def __init__(self, source: Source, cache_root: Path | None) -> None:
        cubin = load_or_build(source, ARCH, cache_root)
        self._modules: dict[str, Module] = {}
        for entry in ROWS_ENTRIES:
            require_clean(cubin, entry, 0, 0)
            self._modules[entry] = Module(cubin, entry)
            self._modules[entry].make_ready(0)

    def arrange(self, x: Tensor, columns: Tensor | None, out: Tensor, stream: int) -> None:
        """`out` [T, K] = the columns of `x` in the order in which products read them.

        Args:
            x: [T, K], K a multiple of 32.
            columns: uint16 [K], which column of `x` each column of codes meets; None: its own.
            out: of the same type.
            stream: handle.
        """
        assert x.is_contiguous(), "rows lie one after the other"
        count = x.numel() // _ARRANGED_AT_ONCE
        args = (
            _pointer(x), _pointer(columns), _pointer(out),
            ctypes.c_uint32(x.shape[1]), ctypes.c_uint32(count),
        )  # fmt: skip
        self._launch("arrange", -(-count // _THREADS), args, stream)

    def add_parts(self, parts: Tensor, out: Tensor, stream: int) -> None:
        """`out` = the sum of `parts` [n, …] of fp32, in their order; rounded where it is narrower.

        The number of values is a multiple of 4.
        """
        count = out.numel()
        args = (
            _pointer(parts), _pointer(out), ctypes.c_uint32(len(parts)), ctypes.c_uint32(count),
            ctypes.c_uint32(out.dtype is torch.float32),
        )  # fmt: skip
        self._launch("add_parts", -(-count // (4 * _THREADS)), args, stream)

    def look_up(
        self, image: int, table: Tensor, ids: Tensor, residual: Tensor, stream: int
    ) -> None:
        """`residual` [T, H] = rows of a packed table, of values that stand for themselves.

        Args:
            image: address at which the first block has it.
            table: of all its halves (`halves_table`), on the device.
            ids: [T] int32.
            residual: fp32.
            stream: handle.
        """
        tensors = (table, ids, residual)
        row_values = ctypes.c_uint32(residual.shape[1])
        args: _Arguments = (ctypes.c_void_p(image), *map(_pointer, tensors), row_values)
        self._launch("look_up", len(ids), args, stream)

    def _launch(self, entry: str, blocks: int, args: _Arguments, stream: int) -> None:
        self._modules[entry].launch(blocks, _THREADS, 0, args, stream, cooperative=False)


class PackedQuantize:
    """The kernel that gives activations 8 bits, in the order in which products read these.

    Args:
        dtype: of activations.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: it cannot be compiled or loaded.
    """

    def __init__(self, dtype: Dtype, cache_root: Path | None) -> None:
        self._module = hopper.load(quantize_source(dtype), QUANTIZE_ENTRY, 0, cache_root)

    def __call__(
        self, x: Tensor, columns: Tensor | None, codes: Tensor, scales: Tensor, stream: int,
        *, arranged: bool,
    ) -> None:  # fmt: skip
        """`codes` · `scales` = `x`, rounded to FP8.

        Args:
            x: [T, K], K a multiple of 32.
            columns: as of `PackedRows.arrange`.
            codes: uint8 [T, K].
            scales: fp32 [T or more].
            stream: handle.
            arranged: `x` is, as the same products in 16 bits read it.
        """
        assert x.is_contiguous(), "rows lie one after the other"
        assert not (arranged and columns is not None), "one order"
        args = (
            _pointer(x), _pointer(columns), _pointer(codes), _pointer(scales),
            ctypes.c_uint32(x.shape[1]), ctypes.c_uint32(arranged),
        )  # fmt: skip
        self._module.launch(len(x), _THREADS, 0, args, stream, cooperative=False)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def on_device(table: bytes, device: torch.device) -> Tensor:
    """What a kernel reads of halves."""
    return torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device)
