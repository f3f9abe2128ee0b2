"""Activations in 8 bits, and products of them, as they are defined."""

import torch
from torch import Tensor

from interpreter.quantised import FORMATS, random_parts
from soloist.prefill.fragments import eight_bit_columns
from soloist.weights.numbers import numbers
from unit.prefill.packed_matrices import Shape

LARGEST_CODE, LEAST_LARGEST = 448.0, 2.0**-100


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(FP8 [T, K], fp32 [T]): a row's largest number becomes the largest code."""
    largest = x.float().abs().amax(dim=1).clamp(min=LEAST_LARGEST)
    # Rounded once: torch divides a number by a tensor as the product with its reciprocal.
    by = torch.full_like(largest, LARGEST_CODE) / largest
    codes = (x.float() * by[:, None]).clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.float8_e4m3fn)
    return codes, largest / LARGEST_CODE


def in_order(codes: Tensor) -> Tensor:
    """As products read them."""
    return codes.view(torch.uint8)[:, eight_bit_columns(codes.shape[1])].contiguous()


def fp8_numbers(kind: str, shape: Shape) -> Tensor:
    """What the matrix of `packed_matrix` stands for, in fp32: not rounded to 16 bits."""
    return numbers(FORMATS[kind], random_parts(shape[0], shape[1], FORMATS[kind]))


def product_in_eight_bits(x: Tensor, matrix: Tensor) -> Tensor:
    """In fp64."""
    codes, scales = quantised_rows(x)
    return codes.to(torch.float64) @ matrix.double().T * scales.double()[:, None]
