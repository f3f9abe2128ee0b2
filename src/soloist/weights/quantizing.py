"""Quantise a matrix by rounding to nearest: the parts of `soloist.model.quantized`, on any device.

The convention is that of the library compressed-tensors without calibration: the largest magnitude
of a group maps to half the range of codes, so 4-bit codes have the scale max|w| / 7.5; the scale is
rounded to its own type before codes are chosen; ratios are clamped and then rounded, ties to even.
Ratios are fp32, as in the library's kernel for GPUs. Its way for CPUs rounds them to 16 bits first,
which misses the nearest of 256 codes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.model.quantized import SCALES, Codes, Quantized
from soloist.model.torch_types import TORCH_DTYPES

_VALUES_AT_ONCE = 1 << 22  # what is in fp32 at a time
_RANGES = {Codes.INT4: (-8.0, 7.0), Codes.INT8: (-128.0, 127.0), Codes.FP8: (-448.0, 448.0)}
_STORED = {
    Codes.INT4: torch.uint8,
    Codes.INT8: torch.int8,
    Codes.FP8: torch.float8_e4m3fn,
}


def quantize(values: Tensor, to: Quantized) -> dict[str, Tensor]:
    """Codes and scales of a matrix, by what their names end with: '' and '.scales'.

    A number that is not finite gives a scale that is not finite, and only such a number does. A
    group of zeros has a scale above zero.

    Args:
        values: [N, K], any float; K is even where codes have 4 bits.
        to: symmetric, with scales of a row's own.
    """
    assert not to.has_zeros, "rounding to nearest is symmetric here"
    assert to.scale_rows == 1, "rows share no scale here"
    rows, columns = values.shape
    width = columns * to.codes.bits // 8
    scale_dtype = TORCH_DTYPES[to.scale_dtype]
    codes = torch.empty(rows, width, dtype=_STORED[to.codes], device=values.device)
    scales = torch.empty(rows, to.groups(columns), dtype=scale_dtype, device=values.device)
    at_once = max(1, _VALUES_AT_ONCE // columns)
    for some, some_codes, some_scales in zip(
        values.split(at_once), codes.split(at_once), scales.split(at_once), strict=True
    ):
        _quantize_rows(some, to, some_codes, some_scales)
    return {"": codes, SCALES: scales}


def _quantize_rows(values: Tensor, to: Quantized, codes: Tensor, scales: Tensor) -> None:
    """Fill codes and scales."""
    columns, groups = values.shape[1], scales.shape[1]
    group, (low, high) = to.group or columns, _RANGES[to.codes]
    grouped = pad(values.float(), (0, groups * group - columns)).unflatten(1, (groups, group))
    # A divisor on the device: by one of Python's GPUs multiply with its inverse, in other bits.
    half = torch.full((), (high - low) / 2, device=values.device)
    scales.copy_(grouped.abs().amax(dim=2) / half)
    # Codes of zeros are zero whatever the scale; this one is what the field stores.
    scales.masked_fill_(scales == 0, torch.finfo(scales.dtype).eps)
    ratios = (grouped / scales.float().unsqueeze(2)).clamp_(low, high)
    ratios = ratios.flatten(1)[:, :columns]
    if to.codes is Codes.INT4:
        nibbles = (ratios.round() + 8).to(torch.uint8)
        torch.bitwise_or(nibbles[:, 0::2], nibbles[:, 1::2] << 4, out=codes)
    else:
        codes.copy_(ratios if to.codes is Codes.FP8 else ratios.round())
