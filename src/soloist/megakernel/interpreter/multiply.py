"""A block's weights times activations, as the kernel multiplies each format or without rounding."""

import torch
from torch import Tensor

from soloist.megakernel.interpreter.tiles import Numbers
from soloist.megakernel.limits import CONSUMER_WARPS
from soloist.megakernel.partition import Matrix
from soloist.megakernel.tile import WARP_COLUMNS
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.quantized import OFFSET_COLUMNS

# Bits of the largest activation of a warp's step or pair of steps, but for the highest one.
_DIGIT_BITS = 13
# The smallest exponent that the largest of them is taken to have.
_LEAST_EXPONENT = {torch.bfloat16: _DIGIT_BITS + 1 - 127, torch.float16: -14}


def product(
    numbers: Numbers, matrix: Matrix, x: Tensor, half: torch.dtype, *, rounds: bool
) -> Tensor:
    """[rows, 8] in fp32.

    Args:
        numbers: of a block.
        matrix: whose they are.
        x: activations [columns, 8].
        half: the 16-bit type of activations.
        rounds: quantised weights are multiplied as the kernel does; otherwise what they stand for
            is, in fp32. Values that stand for themselves are multiplied so in any case.
    """
    if numbers.scales is None:
        return numbers.values @ x
    if not rounds:
        return meant(numbers, matrix.format) @ x
    if numbers.super_scales is not None:
        return _super_blocks(numbers, matrix, x, half)
    if not matrix.format.is_integer:
        return _scaled(numbers, matrix.format, x, half)
    return _integers(numbers, matrix.format, x, half, WARP_COLUMNS * (1 + matrix.pairs_steps))


def meant(numbers: Numbers, stored: WeightFormat) -> Tensor:
    """The numbers [rows, columns] that values and scales stand for."""
    if numbers.scales is None:
        return numbers.values
    scales = numbers.scales.double().repeat_interleave(stored.group, 1)
    if numbers.super_scales is not None:
        scales *= numbers.super_scales.double().repeat_interleave(stored.super_block, 1)
    products = numbers.values.double() * scales
    if numbers.offsets is not None:
        offsets = numbers.offsets.double().repeat_interleave(OFFSET_COLUMNS, 1)
        if numbers.super_offsets is None:
            return (products.float() + offsets.float()).float()
        own = numbers.super_offsets.double().repeat_interleave(stored.super_block, 1)
        products -= offsets * own
    return products.float()


def _integers(
    numbers: Numbers, stored: WeightFormat, x: Tensor, half: torch.dtype, warp_columns: int
) -> Tensor:
    """Sums of integers are exact; they are scaled once for each step, or pair, warp and group."""
    width = min(stored.group, warp_columns)
    of_warps = _by_warp(x, warp_columns, warp_columns)
    power = _power(of_warps, half)
    digits = (of_warps / power).round().unflatten(-2, (-1, width)).flatten(2, 3)
    sums = _values_by_warp(numbers, width, warp_columns) @ digits
    # Some values of 4 bits are sixteen times as large in the kernel.
    largest = sums.nan_to_num(0.0, 0.0, 0.0).abs().max() * (16 if stored.value_bits == 4 else 1)
    assert largest < 2**31, "sums have 32 bits"
    scales = _scales_by_warp(numbers, stored, width, warp_columns)
    power = _that_is_a_number(power, of_warps)
    total = torch.zeros(CONSUMER_WARPS, *sums.shape[-2:])
    added = None
    if numbers.offsets is not None:
        ones = Numbers(torch.ones_like(numbers.values), numbers.offsets)
        offsets = _scales_by_warp(ones, stored, width, warp_columns)
        added = (_values_by_warp(ones, width, warp_columns) @ digits).float() * offsets
    for step in range(len(sums)):
        for n in range(warp_columns // width):
            scaled = sums[step, :, n].float() * scales[step, :, n]
            total = _fma(scaled, power[step, :, 0], total)
            if added is not None:
                total = _fma(added[step, :, n], power[step, :, 0], total)
    return _summed(total)


def _super_blocks(numbers: Numbers, matrix: Matrix, x: Tensor, half: torch.dtype) -> Tensor:
    """Sums of high and of low digits times scales, and of all digits times offsets, are exact.

    They become fp32 once for each step, or pair, and warp.
    """
    stored, warp_columns = matrix.format, WARP_COLUMNS * (1 + matrix.pairs_steps)
    of_warps = _by_warp(x, warp_columns, warp_columns)
    power = _power(of_warps, half)
    digits = (of_warps / power).round().flatten(0, 2).flatten(0, 1)  # [columns, 8]
    high = ((digits + 128) / 256).floor()
    scales = _required(numbers.scales).double().repeat_interleave(stored.group, 1)
    times = Numbers(numbers.values * scales)

    def sums(of: Numbers, by: Tensor) -> Tensor:
        """[steps, warps, rows, 8]."""
        pieces = _by_warp(by, warp_columns, warp_columns)
        found = (_values_by_warp(of, warp_columns, warp_columns) @ pieces)[:, :, 0]
        largest = found.nan_to_num(0.0, 0.0, 0.0).abs().max()
        assert largest * 16 < 2**31, "sums have 32 bits, and are up to sixteen times as large"
        return found.float()

    supers = _of_warps(_required(numbers.super_scales), stored.super_block, warp_columns)
    products = _fma(torch.tensor(256.0), sums(times, high), sums(times, digits - 256 * high))
    products = products * supers
    if numbers.offsets is not None:
        offsets = Numbers(numbers.offsets.double().repeat_interleave(OFFSET_COLUMNS, 1))
        own = _of_warps(_required(numbers.super_offsets), stored.super_block, warp_columns)
        products = _fma(-sums(offsets, digits), own, products)
    power = _that_is_a_number(power, of_warps)[:, :, 0]
    total = torch.zeros(CONSUMER_WARPS, *products.shape[-2:])
    for step in range(len(products)):
        total = _fma(products[step], power[step], total)
    return _summed(total)


def _of_warps(shared: Tensor, each: int, warp_columns: int) -> Tensor:
    """What super-blocks of so many columns have: [steps, warps, rows, 1]."""
    by_warp = shared.repeat_interleave(each // warp_columns, 1)
    found: Tensor = by_warp.unflatten(1, (-1, CONSUMER_WARPS)).permute(1, 2, 0)
    return found[..., None]


def _required(values: Tensor | None) -> Tensor:
    assert values is not None, "super-blocks have it"
    return values


def _scaled(numbers: Numbers, stored: WeightFormat, x: Tensor, half: torch.dtype) -> Tensor:
    """Products of each half of a warp's columns are summed in fp16, and both sums scaled."""
    width = WARP_COLUMNS // 2
    of_warps = _by_warp(x, WARP_COLUMNS, WARP_COLUMNS)
    power = torch.ones_like(of_warps[..., :1, :])
    if half is torch.bfloat16:
        power = _power(of_warps, half)
        of_warps = (of_warps / power).half().double()
        power = _that_is_a_number(power, of_warps)
    halves = of_warps.unflatten(-2, (-1, width)).flatten(2, 3)
    sums = (_values_by_warp(numbers, width, WARP_COLUMNS) @ halves).float()
    scales = _scales_by_warp(numbers, stored, width, WARP_COLUMNS)
    total = torch.zeros(CONSUMER_WARPS, *sums.shape[-2:])
    for step in range(len(sums)):
        of_step, own, scale = sums[step].unbind(1), scales[step].unbind(1), power[step, :, 0]
        if stored.group >= WARP_COLUMNS:
            total = _fma((of_step[0] + of_step[1]) * own[0], scale, total)
        else:
            total = _fma(of_step[0] * own[0], scale, total)
            total = _fma(of_step[1] * own[1], scale, total)
    return _summed(total)


def _power(of_warps: Tensor, half: torch.dtype) -> Tensor:
    """The power of two by which a warp's columns are scaled: integers of 14 bits."""
    most, least = of_warps.abs().amax(-2, keepdim=True), _LEAST_EXPONENT[half]
    exponent = torch.frexp(most).exponent.sub(1).masked_fill(most == 0, least).clamp(min=least)
    return torch.ldexp(torch.ones_like(most), exponent - _DIGIT_BITS)


def _that_is_a_number(power: Tensor, of_warps: Tensor) -> Tensor:
    """Where the largest magnitude is no number, no product is one."""
    most = of_warps.abs().amax(-2, keepdim=True)
    return power.masked_fill(~most.isfinite(), torch.nan)


def _by_warp(x: Tensor, width: int, warp_columns: int) -> Tensor:
    """[steps, warps, pieces of so many columns, columns of a piece, 8], exact."""
    return x.double().view(-1, CONSUMER_WARPS, warp_columns // width, width, x.shape[1])


def _values_by_warp(numbers: Numbers, width: int, warp_columns: int) -> Tensor:
    """[steps, warps, pieces, rows, columns of a piece], exact."""
    pieces = (-1, CONSUMER_WARPS, warp_columns // width, width)
    by_piece: Tensor = numbers.values.double().unflatten(1, pieces)
    return by_piece.permute(1, 2, 3, 0, 4)


def _scales_by_warp(
    numbers: Numbers, stored: WeightFormat, width: int, warp_columns: int
) -> Tensor:
    """[steps, warps, pieces, rows, 1]."""
    assert numbers.scales is not None, "there are scales"
    each = numbers.scales.repeat_interleave(stored.group // width, 1)
    pieces = (-1, CONSUMER_WARPS, warp_columns // width)
    by_piece: Tensor = each.unflatten(1, pieces)
    return by_piece.permute(1, 2, 3, 0)[..., None]


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The sum of a product and c, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def _summed(of_warps: Tensor) -> Tensor:
    """In the order of warps."""
    first, *others = of_warps.unbind()
    return sum(others, first)
