"""Logarithm and exponential built only of operations that IEEE 754 rounds exactly.

fp32 additions and multiplications in a fixed order, never fused, and integer operations on their
bits: any device that follows the same steps gets the same bits. numpy rounds after every operation.
"""

import numpy as np
from numpy.typing import NDArray

from soloist.sampling import constants

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

# A first token waits for its choice: numbers of so many tokens stay in a core's cache, and those of
# a whole vocabulary take several times as long.
PART_TOKENS = 32_768


def negative_ln(x: FloatArray) -> FloatArray:
    """-ln(x) for normal, positive `x`."""
    exponent, fraction = split(x)
    return -ln_of_parts(exponent, fraction)


def split(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`x` > 0 as 2^exponent · (1 + fraction), 1 + fraction in [√½, √2); both parts are exact."""
    bits = x.view(np.int32)
    exponent = (bits - constants.SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(np.float32)
    return exponent.astype(np.float32), mantissa - np.float32(1)


def ln_of_parts(exponent: FloatArray, fraction: FloatArray) -> FloatArray:
    """ln(2^exponent · (1 + fraction)); relatively accurate for a tiny fraction at exponent 0."""
    square = fraction * fraction
    tail = polynomial(constants.LN_POLYNOMIAL, fraction) * fraction * square
    tail = tail + exponent * np.float32(constants.LN2_LOW)
    tail = tail - square * np.float32(0.5)
    total: FloatArray = (fraction + tail) + exponent * np.float32(constants.LN2_HIGH)
    return total


def integer_weights(gaps: FloatArray) -> IntArray:
    """round(2^32 · exp(gap)) for `gaps` <= 0, so that sums of weights do not depend on their order.

    Args:
        gaps: score minus best score; -inf weighs nothing.
    """
    parts = [_weights(gaps[i : i + PART_TOKENS]) for i in range(0, len(gaps), PART_TOKENS)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _weights(gaps: FloatArray) -> IntArray:
    gaps = np.maximum(gaps, np.float32(constants.EXP_FLOOR))
    halvings = np.rint(gaps * np.float32(constants.LOG2_E))
    rest = gaps - halvings * np.float32(constants.LN2_HIGH)
    rest = rest - halvings * np.float32(constants.LN2_LOW)
    tail = polynomial(constants.EXP_POLYNOMIAL, rest) * (rest * rest)
    power = (tail + rest) + np.float32(1)
    bias = 127 + constants.WEIGHT_BITS
    scale = ((halvings.astype(np.int32) + np.int32(bias)) << np.int32(23)).view(np.float32)
    weights: IntArray = np.rint(power * scale).astype(np.int64)
    return weights


def polynomial(coefficients: tuple[float, ...], x: FloatArray) -> FloatArray:
    """Horner's rule: one product, one sum per step, each rounded."""
    value = x * np.float32(coefficients[0]) + np.float32(coefficients[1])
    for coefficient in coefficients[2:]:
        value *= x
        value += np.float32(coefficient)
    return value
