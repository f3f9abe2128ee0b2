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
    sizes, strides = [columns, rows], [columns * _VALUE_BYTES]
    return _encoded(address, sizes, strides, [box.columns, box.rows])


@lru_cache(maxsize=4096)
def heads_map(address: int, rows: int, heads: int, head_dim: int, box_rows: int) -> TensorMap:
    """Heads [rows, heads, head_dim] of 16-bit values, without gaps; a copy takes rows of one head.

    Its columns come as boxes beside each other, of 64 columns where these divide a head, or else of
    32, swizzled as wide; `box` of `load_boxes` counts them over all heads.

    Args:
        address: of the first value, a multiple of `ALIGNMENT`.
        rows: from here on copies read zeros, and write nothing.
        heads: beside each other in a row.
        head_dim: a multiple of 32.
        box_rows: of each copy, up to 256.

    Raises LaunchError.
    """
    width = next(width for width in (64, 32) if head_dim % width == 0)
    count = head_dim // width
    sizes = [width, rows, heads * count]
    strides = [heads * head_dim * _VALUE_BYTES, width * _VALUE_BYTES]
    return _encoded(address, sizes, strides, [width, box_rows, count])


class Boxes(NamedTuple):
    """16-bit values in five dimensions, and what a copy takes of each; a box's rows are swizzled.

    Attributes:
        offset: from an address to the first value, in bytes, a multiple of `ALIGNMENT`.
        sizes: of all dimensions, in values; the first one as wide as a box, 32 or 64.
        strides: of all but the first one, in bytes, multiples of `ALIGNMENT`, in any order.
        box: in values.
    """

    offset: int
    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int]
    box: tuple[int, int, int, int, int]


@lru_cache(maxsize=4096)
def boxes_map(address: int, boxes: Boxes) -> TensorMap:
    """The same for values that lie in any way. Raises LaunchError."""
    sizes, strides, box = (list(x) for x in (boxes.sizes, boxes.strides, boxes.box))
    return _encoded(address + boxes.offset, sizes, strides, box)


def _encoded(address: int, sizes: list[int], strides: list[int], box: list[int]) -> TensorMap:
    """Sizes and box in values, strides of all dimensions but the first in bytes."""
    cuda = driver()
    swizzles = cuda.CUtensorMapSwizzle
    swizzle = {
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[box[0] * _VALUE_BYTES]
    result, made = cuda.cuTensorMapEncodeTiled(
        cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        len(sizes),
        address,
        [cuda.cuuint64_t(size) for size in sizes],
        [cuda.cuuint64_t(stride) for stride in strides],
        [cuda.cuuint32_t(size) for size in box],
        [cuda.cuuint32_t(1) for _ in box],
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(result):
        _, name = cuda.cuGetErrorName(result)
        raise LaunchError(
            f"describing values {sizes} at {address:#x} to the copy engine",
            f"{name.decode()} (cuTensorMapEncodeTiled)",
        )
    return TensorMap.from_buffer_copy(
        ctypes.string_at(int(made.getPtr()), ctypes.sizeof(TensorMap))
    )
