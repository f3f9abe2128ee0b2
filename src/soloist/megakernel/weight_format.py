"""How the values of a matrix are stored for the kernel. Pure: bits, groups and parts, no torch."""

from dataclasses import dataclass

from soloist.errors import ShapeUnsupported
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes, Quantized

# Of a tile's parts, in bytes: bulk copies and loads of whole lanes want it.
_ALIGNMENT = 16
# Columns of a row that share a scale in the kernel. Wider groups have theirs several times.
GROUPS = (STEP_COLUMNS, 128, 64, 32)
_SCALE_TYPES = {Dtype.BF16: "kBf16", Dtype.FP16: "kFp16", Dtype.FP32: "kFp32"}
# CUDA text: the types that formats name, before they are defined.
READERS = (
    f"enum class ScaleType : u32 {{ {', '.join(_SCALE_TYPES.values())} }};",
    "struct Plain16;",
    "template <u32 kGroup, u32 kScaleRows> struct Fp8;",
    "template <ScaleType kScale, u32 kGroup, bool kZeros> struct Int4;",
    "template <ScaleType kScale, u32 kGroup, bool kZeros> struct Int8;",
)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store a matrix.

    A format's parts lie side by side in every tile and half tile: first the values, then the
    scales, then the zeros, so that one copy brings all. A matrix's tensors are named after it and
    the part: 'layers.0.qkv' has the values, 'layers.0.qkv.scales' the scales.

    Attributes:
        name: what people call it.
        reader: the CUDA structure that reads it, of tile/formats.cuh.
        value_bits: of one value.
        group: columns of a row that share a scale, one of `GROUPS`; 0 where there is none.
        scale_bits: of one scale.
        scale_rows: consecutive rows that share a scale.
        zero_bits: of a group's zero; 0 where there is none.
        tiles: that a slot of the ring holds, at most.
        is_integer: it is multiplied with activations in integers.
        meaning: of its tensors; None where values stand for themselves.
    """

    name: str
    reader: str
    value_bits: int
    group: int = 0
    scale_bits: int = 0
    scale_rows: int = 1
    zero_bits: int = 0
    tiles: int = 1
    is_integer: bool = False
    meaning: Quantized | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """What is added to a matrix's name to name each of its tensors."""
        return ("",) if self.meaning is None else self.meaning.parts

    @property
    def is_plain(self) -> bool:
        """Values stand for themselves, in the precision of the model's activations."""
        return self.meaning is None

    @property
    def is_permuted(self) -> bool:
        """Columns are in an order of their own: they meet activations that a table names."""
        return self.meaning is not None and self.meaning.permuted

    @property
    def step_groups(self) -> int:
        """Groups of a row in one step of columns."""
        return STEP_COLUMNS // self.group if self.group else 0

    @property
    def half_tile_values_bytes(self) -> int:
        """Bytes of a half tile's values."""
        return HALF_TILE_VALUES * self.value_bits // 8

    @property
    def half_tile_scales_bytes(self) -> int:
        """Bytes of a half tile's scales."""
        return HALF_TILE_ROWS // self.scale_rows * self.step_groups * self.scale_bits // 8

    @property
    def half_tile_zeros_bytes(self) -> int:
        """Bytes of a half tile's zeros."""
        return HALF_TILE_ROWS * self.step_groups * self.zero_bits // 8

    @property
    def half_tile_bytes(self) -> int:
        """Bytes of a half tile with scales and zeros; a tile has twice as many."""
        used = self.half_tile_values_bytes + self.half_tile_scales_bytes
        return -(-(used + self.half_tile_zeros_bytes) // _ALIGNMENT) * _ALIGNMENT


BF16 = WeightFormat("bf16", "Plain16", 16)
FP16 = WeightFormat("fp16", "Plain16", 16)


def format_of(dtype: Dtype) -> WeightFormat:
    """That of matrices whose values stand for themselves.

    Raises:
        ShapeUnsupported: fp32, which the kernel does not multiply.
    """
    formats = {Dtype.BF16: BF16, Dtype.FP16: FP16}
    if dtype not in formats:
        raise ShapeUnsupported(f"{dtype.value} weights", "bf16 or fp16")
    return formats[dtype]


def quantized_format(stored: Quantized) -> WeightFormat:
    """That of a quantised matrix.

    Raises:
        ShapeUnsupported: its groups are no multiples of the smallest one, or it has offsets.
    """
    if stored.has_offsets:
        raise ShapeUnsupported(
            f"{stored.codes.value} with offsets", "scales, with or without zeros"
        )
    group = next((g for g in GROUPS if stored.group % g == 0), 0)
    if not group:
        given = f"{stored.codes.value} in groups of {stored.group} columns"
        raise ShapeUnsupported(given, f"multiples of {GROUPS[-1]}")
    if stored.codes is Codes.FP8:
        rows = 4 if stored.scale_rows % 4 == 0 else 1
        reader = f"Fp8<{group}u, {rows}u>"
        return WeightFormat(
            stored.label, reader, 8, group, scale_bits=32, scale_rows=rows, tiles=2, meaning=stored
        )
    kind = f"ScaleType::{_SCALE_TYPES[stored.scale_dtype]}"
    zeros = str(stored.has_zeros).lower()
    return WeightFormat(
        stored.label, f"{stored.codes.value.capitalize()}<{kind}, {group}u, {zeros}>",
        stored.codes.bits, group, scale_bits=8 * stored.scale_dtype.num_bytes,
        zero_bits=8 if stored.has_zeros else 0, tiles=16 // stored.codes.bits, is_integer=True,
        meaning=stored,
    )  # fmt: skip
