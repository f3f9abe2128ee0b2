"""How the values of a matrix are stored for the kernel. Pure: bits, groups and parts, no torch."""

from dataclasses import dataclass

from soloist.errors import ShapeUnsupported
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS
from soloist.model.dtype import Dtype
from soloist.model.quantized import OFFSET_COLUMNS, Codes, Quantized

# Of a tile's parts, in bytes: bulk copies and loads of whole lanes want it.
_ALIGNMENT = 16
# Columns of a row that share a scale in the kernel. Wider groups have theirs several times.
GROUPS = (STEP_COLUMNS, 128, 64, 32)
# Columns of a super-block that the kernel reads, and of its groups.
SUPER_BLOCK, SUPER_GROUPS = 256, (32, 16)
_SUPER_BITS = 16
_SCALE_TYPES = {Dtype.BF16: "kBf16", Dtype.FP16: "kFp16", Dtype.FP32: "kFp32"}
# CUDA text: the types that formats name, before they are defined.
READERS = (
    f"enum class ScaleType : u32 {{ {', '.join(_SCALE_TYPES.values())} }};",
    "struct Plain16;",
    "template <u32 kGroup, u32 kScaleRows> struct Fp8;",
    "template <ScaleType kScale, u32 kGroup, bool kZeros> struct Int4;",
    "template <ScaleType kScale, u32 kGroup> struct Int4Offsets;",
    "template <ScaleType kScale, u32 kGroup, bool kZeros> struct Int8;",
    "template <u32 kBits, u32 kGroup, bool kOffsets> struct SuperBlocks;",
)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store a matrix.

    A format's parts lie side by side in every tile and half tile: first the values, then the
    scales, then the zeros or offsets, then what super-blocks have, so that one copy brings all. A
    matrix's tensors are named after it and the part: 'layers.0.qkv' has the values,
    'layers.0.qkv.scales' the scales.

    Attributes:
        name: what people call it.
        reader: the CUDA structure that reads it, of tile/formats.cuh.
        value_bits: of one value.
        group: columns of a row that share a scale, one of `GROUPS`, or of `SUPER_GROUPS` where
            there are super-blocks; 0 where there is none.
        scale_bits: of one scale.
        scale_rows: consecutive rows that share a scale.
        zero_bits: of a group's zero; 0 where there is none.
        offset_bits: of the offset of `OFFSET_COLUMNS` columns; 0 where there is none. Without
            super-blocks it is added, and has the scales' type.
        super_block: columns whose scales, and offsets, are integers times one number; 0 where they
            are no integers.
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
    offset_bits: int = 0
    super_block: int = 0
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
    def scaled_columns(self) -> int:
        """Columns of a row whose products may be summed in integers."""
        return (self.super_block or self.group) if self.is_integer else 0

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
    def half_tile_offsets_bytes(self) -> int:
        """Bytes of a half tile's offsets."""
        return HALF_TILE_ROWS * (STEP_COLUMNS // OFFSET_COLUMNS) * self.offset_bits // 8

    @property
    def half_tile_super_bytes(self) -> int:
        """Bytes of what a half tile's super-blocks have for their scales; for offsets as many."""
        blocks = STEP_COLUMNS // self.super_block if self.super_block else 0
        return HALF_TILE_ROWS * blocks * _SUPER_BITS // 8

    @property
    def half_tile_parts_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a half tile, in order."""
        supers = self.half_tile_super_bytes
        return (
            self.half_tile_values_bytes,
            self.half_tile_scales_bytes,
            self.half_tile_zeros_bytes + self.half_tile_offsets_bytes,
            supers,
            supers if self.offset_bits else 0,
        )

    @property
    def half_tile_bytes(self) -> int:
        """Bytes of a half tile with all its parts; a tile has twice as many."""
        return -(-sum(self.half_tile_parts_bytes) // _ALIGNMENT) * _ALIGNMENT


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
        ShapeUnsupported: its groups are no multiples of the smallest one, or other ones than the
            kernel has for offsets and super-blocks.
    """
    if stored.super_block or stored.codes is Codes.INT6:
        return _of_super_blocks(stored)
    if stored.has_offsets:
        return _with_offsets(stored)
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


def _of_super_blocks(stored: Quantized) -> WeightFormat:
    bits = stored.codes.bits
    if stored.super_block != SUPER_BLOCK or stored.group not in SUPER_GROUPS or bits not in (4, 6):
        given = f"{stored.codes.value} in groups of {stored.group} of {stored.super_block} columns"
        groups = " or ".join(map(str, SUPER_GROUPS))
        allowed = f"int4 or int6 in groups of {groups} of {SUPER_BLOCK}"
        raise ShapeUnsupported(given, allowed)
    offsets = str(stored.has_offsets).lower()
    return WeightFormat(
        stored.label, f"SuperBlocks<{bits}u, {stored.group}u, {offsets}>", bits, stored.group,
        scale_bits=8, offset_bits=8 if stored.has_offsets else 0, super_block=SUPER_BLOCK,
        tiles=4 if bits == 4 else 2, is_integer=True, meaning=stored,
    )  # fmt: skip


def _with_offsets(stored: Quantized) -> WeightFormat:
    if stored.codes is not Codes.INT4 or stored.group != OFFSET_COLUMNS or stored.has_zeros:
        given = f"{stored.codes.value} in groups of {stored.group} with offsets"
        raise ShapeUnsupported(given, f"int4 in groups of {OFFSET_COLUMNS}")
    bits, kind = 8 * stored.scale_dtype.num_bytes, _SCALE_TYPES[stored.scale_dtype]
    return WeightFormat(
        stored.label, f"Int4Offsets<ScaleType::{kind}, {stored.group}u>", 4, stored.group,
        scale_bits=bits, offset_bits=bits, tiles=4, is_integer=True, meaning=stored,
    )  # fmt: skip
