"""Rows of a model's packed matrices, made when a pass needs them, for a library to multiply by.

Where no product reads packed matrices, and rows of all of them do not fit beside these or are not
wanted: on other GPUs than Hopper, on several, and with lanes.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from soloist.jit.source import Source
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import place_of
from soloist.megakernel.tile import HALF_TILE_ROWS
from soloist.model.dtype import Dtype
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.fragments import fragments, halves_table
from soloist.prefill.fused import Kernels
from soloist.prefill.packed_form import weights_header

KERNEL, ENTRY = "kernels/unpack.cu", "unpack"
_THREADS = 256


class UnpackedMatrices:
    """Row-major matrices by name, each valid until the next call.

    They are always at the same address, so passes can be recorded.

    Args:
        plan: how the weights of a rank are packed.
        packed: these, on the GPU.
        columns: as of `PackedMatrices`.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: a kernel cannot be compiled or loaded.
    """

    def __init__(
        self,
        plan: Plan,
        packed: PackedWeights,
        columns: Mapping[str, Tensor],
        cache_root: Path | None,
    ) -> None:
        self._plan, self._packed, self._columns = plan, packed, columns
        device, operations = packed.image.device, _operations(plan)
        sources = {op: unpack_source(op.matrix, plan.dtype) for op in operations}
        kernels = {
            source: Kernels(source, (ENTRY,), plan.gpu.arch, cache_root, device)
            for source in dict.fromkeys(sources.values())
        }
        self._kernels = {op: kernels[source] for op, source in sources.items()}
        self._tables = {op: _table(plan, op).to(device) for op in operations}
        most = max(op.matrix.rows * op.matrix.columns for op in operations)
        dtype = TORCH_DTYPES[plan.dtype]
        self._room = torch.empty(self._lanes * most, dtype=dtype, device=device)

    @property
    def _lanes(self) -> int:
        return len(self._packed.image) // self._plan.blocks

    def __call__(self, name: str) -> Tensor:
        """[out, in], of lanes [l, out, in], contiguous."""
        if name == "embedding" and self._packed.embedding is not None:
            return self._packed.embedding
        layer, short = (0, "head") if name in ("embedding", "head") else place_of(name)
        operation = self._plan.image.operation(layer, short)
        matrix = operation.matrix
        shape = (self._lanes, matrix.rows, matrix.columns)
        found = self._room[: shape[0] * shape[1] * shape[2]].view(shape)
        offset = self._plan.image.matrix_offset(layer, short)
        for lane, image in enumerate(torch.split(self._packed.image, self._plan.blocks)):
            columns = self._columns.get("head" if short == "head" else name)
            self._unpack(operation, image.data_ptr() + offset, columns, found[lane])
        return found if self._plan.shape.has_lanes else found[0]

    def _unpack(
        self, operation: Operation, image: int, columns: Tensor | None, out: Tensor
    ) -> None:
        matrix, table = operation.matrix, self._tables[operation]
        args = (
            ctypes.c_void_p(image),
            ctypes.c_void_p(table.data_ptr()),
            ctypes.c_void_p(None if columns is None else columns.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_uint32(matrix.rows),
            ctypes.c_uint32(matrix.columns),
            ctypes.c_uint32(more_rows(matrix)),
        )
        stream = torch.cuda.current_stream(out.device).cuda_stream
        self._kernels[operation].launch(ENTRY, len(table), args, stream, _THREADS)


def unpack_source(matrix: Matrix, dtype: Dtype) -> Source:
    """Of the kernel that makes rows of a matrix in 16 bits."""
    header = weights_header(
        matrix.format, dtype, matrix.steps, pairs_steps=matrix.pairs_steps,
        ends_in_half=matrix.ends_in_half,
    )  # fmt: skip
    return Source(KERNEL, header + "\n")


def unpack_sources(plan: Plan) -> tuple[Source, ...]:
    """All that unpacking a plan's matrices compiles, each once."""
    return tuple(dict.fromkeys(unpack_source(op.matrix, plan.dtype) for op in _operations(plan)))


def more_rows(matrix: Matrix) -> int:
    """How much further on the last 4 rows of a half are than behind its first 4: those of up."""
    if matrix.order is not RowOrder.FINELY_PAIRED:
        return 0
    return matrix.rows // 2 - HALF_TILE_ROWS // 2


def _operations(plan: Plan) -> tuple[Operation, ...]:
    """Of matrices that all tokens meet, each once; experts are unpacked elsewhere."""
    layers = (op for kind in plan.image.kinds for op in kind.in_blocks.values())
    return tuple(dict.fromkeys([*layers, plan.image.head]))


def _table(plan: Plan, operation: Operation) -> Tensor:
    """[fragments, bytes of two halves], as the kernel reads them."""
    found = fragments(plan.shape, operation, plan.image.block_stride, gated=False)
    words = halves_table(half for fragment in found for half in fragment)
    return torch.frombuffer(bytearray(words), dtype=torch.uint8).view(len(found), -1)
