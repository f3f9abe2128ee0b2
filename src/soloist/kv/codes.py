"""Keys and values in 8 or 4 bits: codes, and scales in bf16. The definition, in PyTorch.

A number is code · scale, which in fp32 is exact. The codes of a position depend on nothing but the
numbers of its own head. int8: -127 … 127, the largest is ±127. fp8: e4m3, the largest is ±448.
int4: -8 … 7, and the number that is furthest from 0 is -8, so its scale may be negative; stored as
code + 8, two in a byte, the first in the low bits.
"""

import torch
from torch import Tensor

from soloist.model.kv_format import KvFormat

_MOST_INT8, _MOST_FP8, _LEAST_INT4, _MOST_INT4 = 127, 448, -8, 7
_SCALES = torch.bfloat16
_FP8 = torch.float8_e4m3fn
_NIBBLE = 4


def code_type(stored: KvFormat) -> torch.dtype:
    """Of tensors of codes."""
    return torch.int8 if stored.name == "int8" else torch.uint8


def scale_type() -> torch.dtype:
    """Of tensors of scales: as wide a range as the numbers have."""
    return _SCALES


def codes_of(x: Tensor, stored: KvFormat) -> tuple[Tensor, Tensor]:
    """Numbers [..., D] as codes [..., bytes] and scales [..., D / numbers of a scale]."""
    groups = x.float().reshape(*x.shape[:-1], -1, stored.scale_values)
    if stored.name == "int4":
        furthest = groups.abs().argmax(-1, keepdim=True)
        scales = (groups.gather(-1, furthest) / _LEAST_INT4).to(_SCALES)
    else:
        most = _MOST_INT8 if stored.name == "int8" else _MOST_FP8
        scales = (groups.abs().amax(-1, keepdim=True) / most).to(_SCALES)
    wide = scales.float()
    # A scale of 0 has numbers of 0, or of less than any scale.
    steps = (groups / torch.where(wide == 0, 1.0, wide)).flatten(-2)
    scales = scales.squeeze(-1)
    if stored.name == "fp8":
        return steps.to(_FP8).view(torch.uint8), scales
    if stored.name == "int8":
        return steps.round_().clamp_(-_MOST_INT8, _MOST_INT8).to(torch.int8), scales
    codes = steps.round_().clamp_(_LEAST_INT4, _MOST_INT4).sub_(_LEAST_INT4).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << _NIBBLE, scales


def numbers_of(codes: Tensor, scales: Tensor, stored: KvFormat, dtype: torch.dtype) -> Tensor:
    """What codes and scales stand for, [..., D] in a new tensor: the product, rounded once."""
    numbers = code_numbers(codes, stored)
    groups = numbers.view(*scales.shape, stored.scale_values)
    groups.mul_(scales.float().unsqueeze(-1))
    return numbers.to(dtype)


def code_numbers(codes: Tensor, stored: KvFormat) -> Tensor:
    """Codes without their scales, [..., D] fp32 in a new tensor."""
    if stored.name == "int4":
        low, high = codes & 15, codes >> _NIBBLE
        return torch.stack((low, high), -1).flatten(-2).float().add_(_LEAST_INT4)
    return (codes.view(_FP8) if stored.name == "fp8" else codes).float()


def bytes_of(x: Tensor, stored: KvFormat) -> Tensor:
    """What is stored of numbers [..., D], as bytes: codes, then scales."""
    codes, scales = codes_of(x, stored)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)


def of_bytes(x: Tensor, stored: KvFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of what `bytes_of` made; of any contiguous tensor's copy."""
    num_scales = x.shape[-1] * 8 // (stored.scale_values * stored.value_bits + stored.scale_bits)
    num_codes = x.shape[-1] - num_scales * stored.scale_bits // 8
    codes, scales = x[..., :num_codes].contiguous(), x[..., num_codes:].contiguous()
    return codes.view(code_type(stored)), scales.view(_SCALES)
