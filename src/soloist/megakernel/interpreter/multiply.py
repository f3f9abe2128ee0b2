"""A block's weights times activations, as the kernel multiplies each format or without rounding."""

import torch
from torch import Tensor

from soloist.megakernel.interpreter.tiles import Numbers
from soloist.megakernel.limits import CONSUMER_WARPS
from soloist.megakernel.tile import STEP_COLUMNS
from soloist.megakernel.weight_format import WeightFormat

# Bits of the largest activation of a warp's step, but for the highest one.
_DIGIT_BITS = 13
# The smallest exponent that the largest of them is taken to have.
_LEAST_EXPONENT = {torch.bfloat16: _DIGIT_BITS + 1 - 127, torch.float16: -14}
_WARP_COLUMNS = STEP_COLUMNS // CONSUMER_WARPS


def product(
    numbers: Numbers, stored: WeightFormat, x: Tensor, half: torch.dtype, *, rounds: bool
) -> Tensor:
    """[rows, 8] in fp32.

    Args:
        numbers: of a block.
        stored: their format.
        x: activations [columns, 8].
        half: the 16-bit type of activations.
        rounds: quantised weights are multiplied as the kernel does; otherwise what they stand for
            is, in fp32. Values that stand for themselves are multiplied so in any case.
    """
    if numbers.scales is None:
        return numbers.values @ x
    if not rounds:
        return meant(numbers, stored) @ x
    multiply = _integers if stored.is_integer else _scaled
    return multiply(numbers, stored, x, half)


def meant(numbers: Numbers, stored: WeightFormat) -> Tensor:
    """The numbers [rows, columns] that values and scales stand for."""
    if numbers.scales is None:
        return numbers.values
    scales = numbers.scales.double().repeat_interleave(stored.group, 1)
    return (numbers.values.double() * scales).float()


def _integers(numbers: Numbers, stored: WeightFormat, x: Tensor, half: torch.dtype) -> Tensor:
    """Sums of integers are exact; they are scaled once for each step, warp and group."""
    width = min(stored.group, _WARP_COLUMNS)
    of_warps = _by_warp(x, _WARP_COLUMNS)
    power = _power(of_warps, half)
    digits = (of_warps / power).round().unflatten(-2, (-1, width)).flatten(2, 3)
    sums = _values_by_warp(numbers, width) @ digits
    scales = _scales_by_warp(numbers, stored, width)
    power = _that_is_a_number(power, of_warps)
    total = torch.zeros(CONSUMER_WARPS, *sums.shape[-2:])
    for step in range(len(sums)):
        for n in range(_WARP_COLUMNS // width):
            scaled = sums[step, :, n].float() * scales[step, :, n]
            total = _fma(scaled, power[step, :, 0], total)
    return _summed(total)


def _scaled(numbers: Numbers, stored: WeightFormat, x: Tensor, half: torch.dtype) -> Tensor:
    """Products of each half of a warp's columns are summed in fp16, and both sums scaled."""
    width = _WARP_COLUMNS // 2
    of_warps = _by_warp(x, _WARP_COLUMNS)
    power = torch.ones_like(of_warps[..., :1, :])
    if half is torch.bfloat16:
        power = _power(of_warps, half)
        of_warps = (of_warps / power).half().double()
        power = _that_is_a_number(power, of_warps)
    halves = of_warps.unflatten(-2, (-1, width)).flatten(2, 3)
    sums = (_values_by_warp(numbers, width) @ halves).float()
    scales = _scales_by_warp(numbers, stored, width)
    total = torch.zeros(CONSUMER_WARPS, *sums.shape[-2:])
    for step in range(len(sums)):
        of_step, own, scale = sums[step].unbind(1), scales[step].unbind(1), power[step, :, 0]
        if stored.group >= _WARP_COLUMNS:
            total = _fma((of_step[0] + of_step[1]) * own[0], scale, total)
        else:
            total = _fma(of_step[0] * own[0], scale, total)
            total = _fma(of_step[1] * own[1], scale, total)
    return _summed(total)


def _power(of_warps: Tensor, half: torch.dtype) -> Tensor:
    """The power of two by which a warp's columns of a step are scaled: integers of 14 bits."""
    most, least = of_warps.abs().amax(-2, keepdim=True), _LEAST_EXPONENT[half]
    exponent = torch.frexp(most).exponent.sub(1).masked_fill(most == 0, least).clamp(min=least)
    return torch.ldexp(torch.ones_like(most), exponent - _DIGIT_BITS)


def _that_is_a_number(power: Tensor, of_warps: Tensor) -> Tensor:
    """Where the largest magnitude is no number, no product is one."""
    most = of_warps.abs().amax(-2, keepdim=True)
    return power.masked_fill(~most.isfinite(), torch.nan)


def _by_warp(x: Tensor, width: int) -> Tensor:
    """[steps, warps, pieces of so many columns, columns of a piece, 8], exact."""
    return x.double().view(-1, CONSUMER_WARPS, _WARP_COLUMNS // width, width, x.shape[1])


def _values_by_warp(numbers: Numbers, width: int) -> Tensor:
    """[steps, warps, pieces, rows, columns of a piece], exact."""
    pieces = (-1, CONSUMER_WARPS, _WARP_COLUMNS // width, width)
    by_piece: Tensor = numbers.values.double().unflatten(1, pieces)
    return by_piece.permute(1, 2, 3, 0, 4)


def _scales_by_warp(numbers: Numbers, stored: WeightFormat, width: int) -> Tensor:
    """[steps, warps, pieces, rows, 1]."""
    assert numbers.scales is not None, "there are scales"
    each = numbers.scales.repeat_interleave(stored.group // width, 1)
    pieces = (-1, CONSUMER_WARPS, _WARP_COLUMNS // width)
    by_piece: Tensor = each.unflatten(1, pieces)
    return by_piece.permute(1, 2, 3, 0)[..., None]


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The sum of a product and c, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def _summed(of_warps: Tensor) -> Tensor:
    """In the order of warps."""
    first, *others = of_warps.unbind()
    return sum(others, first)
