"""Rotary position embedding: the inverse frequencies of each scaling rule. Pure arithmetic.

Sources: RoPE, arXiv 2104.09864; linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071;
the llama3 rule as released with Llama 3.1.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK-by-parts interpolation with a temperature on the attention scores.

    Attributes:
        factor: how many times the context grew.
        original_context_tokens: context before scaling.
        beta_fast: rotations over the original context above which a frequency is kept.
        beta_slow: rotations below which it is divided by `factor`.
        attention_factor: multiplies cos and sin.
        truncate: round the borders of the blend to whole dimensions.
    """

    factor: float
    original_context_tokens: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class DividedScaling:
    """Each frequency divided by a number of its own, as GGUF files store the llama3 rule."""

    divisors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | DividedScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        scaling: context extension rule, or None.
        interleaved: rotate neighbours (0,1), (2,3), … instead of halves (0,D/2), (1,D/2+1), ….
    """

    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each of the head_dim / 2 rotated pairs."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return [f / factor for f in plain]
            case Llama3Scaling():
                return [_llama3(f, self.scaling) for f in plain]
            case DividedScaling(divisors):
                return [f / divisor for f, divisor in zip(plain, divisors, strict=True)]
            case YarnScaling():
                return _yarn(plain, self.theta, head_dim, self.scaling)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's recommended temperature, 0.1 · mscale · ln(factor) + 1 (section 3.4 of the paper)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequency: float, s: Llama3Scaling) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < s.original_context_tokens / s.high_freq_factor:
        return frequency
    if wavelength > s.original_context_tokens / s.low_freq_factor:
        return frequency / s.factor
    kept = (s.original_context_tokens / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    return (1 - kept) * frequency / s.factor + kept * frequency


def _yarn(plain: list[float], theta: float, head_dim: int, s: YarnScaling) -> list[float]:
    def dimension(rotations: float) -> float:
        """Which pair turns `rotations` times over the original context."""
        turns = s.original_context_tokens / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    blended = []
    for i, frequency in enumerate(plain):
        interpolated = min(max((i - low) / width, 0.0), 1.0)
        blended.append(frequency / s.factor * interpolated + frequency * (1 - interpolated))
    return blended
