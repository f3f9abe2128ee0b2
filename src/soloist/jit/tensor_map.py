"""Matrices in global memory as the copy engine is told of them, from Hopper on. Knows no torch."""

import ctypes
from functools import lru_cache
from typing import NamedTuple

from soloist.errors import LaunchError
from soloist.jit.bindings import driver

_VALUE_BYTES = 2
# The engine's own demand.
ALIGNMENT = 16


class TensorMap(ctypes.Structure):
    """What kernels take as `TensorMap`."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Box(NamedTuple):
    """What one copy takes of a matrix; a row is 128 bytes, swizzled."""

    rows: int
    columns: int


# Few matrices and numbers of rows come again and again; a map is half a kilobyte.
@lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, box: Box) -> TensorMap:
    """A row-major matrix [rows, columns] of 16-bit values, without gaps.

    Args:
        address: of the first value, a multiple of `ALIGNMENT`.
        rows: from here on copies read zeros, and write nothing.
        columns: a multiple of 8.
        box: of each copy.

    Raises LaunchError.
    """
    cuda = driver()
    promotion = cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    result, made = cuda.cuTensorMapEncodeTiled(
        cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        2,
        address,
        [cuda.cuuint64_t(columns), cuda.cuuint64_t(rows)],
        [cuda.cuuint64_t(columns * _VALUE_BYTES)],
        [cuda.cuuint32_t(box.columns), cuda.cuuint32_t(box.rows)],
        [cuda.cuuint32_t(1), cuda.cuuint32_t(1)],
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotion,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(result):
        _, name = cuda.cuGetErrorName(result)
        raise LaunchError(
            f"describing a matrix [{rows}, {columns}] at {address:#x} to the copy engine",
            f"{name.decode()} (cuTensorMapEncodeTiled)",
        )
    return TensorMap.from_buffer_copy(
        ctypes.string_at(int(made.getPtr()), ctypes.sizeof(TensorMap))
    )
