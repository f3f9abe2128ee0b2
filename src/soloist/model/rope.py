"""Rotary position embedding: the inverse frequencies of each scaling rule. Pure arithmetic.

Sources: RoPE, arXiv 2104.09864; linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071;
LongRoPE, arXiv 2402.13753; the llama3 rule as released with Llama 3.1.
"""

import math
from dataclasses import dataclass, replace


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
class LongScaling:
    """LongRoPE: each frequency divided by a factor of its own, out of one of two lists.

    One list serves all positions of all sequences of a model. So keys that are cached stay valid,
    and no bit depends on how a prompt is cut.

    Attributes:
        short_factors: of each rotated pair, for contexts that are not longer than the original one.
        long_factors: the same for longer ones.
        original_context_tokens: context before scaling.
        context_tokens: the context that the model is used with.
        attention_factor: multiplies cos and sin, with either list.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context_tokens: int
    context_tokens: int
    attention_factor: float

    @property
    def is_long(self) -> bool:
        """Whether the long factors serve this context."""
        return self.context_tokens > self.original_context_tokens

    @property
    def factors(self) -> tuple[float, ...]:
        """Those that serve it."""
        return self.long_factors if self.is_long else self.short_factors


@dataclass(frozen=True, slots=True)
class DividedScaling:
    """Each frequency divided by a number of its own, as GGUF files store the llama3 rule."""

    divisors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling | DividedScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        scaling: context extension rule, or None.
        interleaved: rotate neighbours (0,1), (2,3), … instead of halves (0,R/2), (1,R/2+1), ….
        share: how much of a head rotates: its first R dimensions; the others stay as they are.
    """

    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False
    share: float = 1.0

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if isinstance(self.scaling, YarnScaling | LongScaling):
            return self.scaling.attention_factor
        return 1.0

    def rotated_dims(self, head_dim: int) -> int:
        """R: dimensions of a head that rotate."""
        return int(head_dim * self.share)

    def order_in_halves(self, head_dim: int) -> list[int]:
        """Which of a head's values comes at each place, if i and i + D / 2 are to turn together.

        Pairs that do not turn come after those that do.
        """
        dims = self.rotated_dims(head_dim)
        half = dims // 2
        first, second = list(range(half)), list(range(half, dims))
        if self.interleaved:
            first, second = list(range(0, dims, 2)), list(range(1, dims, 2))
        rest = list(range(dims, head_dim))
        middle = len(rest) // 2
        return [*first, *rest[:middle], *second, *rest[middle:]]

    def is_in_halves(self, head_dim: int) -> bool:
        """Whether i and i + D / 2 turn together as they are."""
        return self.order_in_halves(head_dim) == list(range(head_dim))

    def for_context(self, context_tokens: int) -> "Rope":
        """The rule in contexts of so many tokens."""
        if not isinstance(self.scaling, LongScaling):
            return self
        return replace(self, scaling=replace(self.scaling, context_tokens=context_tokens))

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each of the R / 2 rotated pairs."""
        dims = self.rotated_dims(head_dim)
        plain = [self.theta ** (-2 * i / dims) for i in range(dims // 2)]
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
                return _yarn(plain, self.theta, dims, self.scaling)
            case LongScaling():
                return [f / own for f, own in zip(plain, self.scaling.factors, strict=True)]


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's recommended temperature, 0.1 · mscale · ln(factor) + 1 (section 3.4 of the paper)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def long_attention_factor(factor: float, original_context_tokens: int) -> float:
    """LongRoPE's temperature for a context that grew: sqrt(1 + ln factor / ln original)."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context_tokens))


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
