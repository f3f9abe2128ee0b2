"""How the values of a matrix are stored for the kernel. Pure: bits, groups and parts, no torch."""

from dataclasses import dataclass

from soloist.errors import ShapeUnsupported
from soloist.megakernel.tile import HALF_TILE_VALUES
from soloist.model.dtype import Dtype


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store a matrix.

    A format's parts lie side by side in every half tile: first the values, then the scales, so that
    one copy brings both. A matrix's tensors are named after it and the part: 'layers.0.qkv' has the
    values, 'layers.0.qkv.scales' the scales.

    Attributes:
        name: what people call it.
        reader: the CUDA structure that reads it, of tile/formats.cuh.
        value_bits: of one value.
        scale_bits: of one scale; 0 where values stand for themselves.
        group: columns of a row that share a scale; 0 where there is none.
    """

    name: str
    reader: str
    value_bits: int
    scale_bits: int = 0
    group: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """What is added to a matrix's name to name each of its tensors."""
        return ("", ".scales") if self.group else ("",)

    @property
    def is_plain(self) -> bool:
        """Values stand for themselves, in the precision of the model's activations."""
        return not self.group

    @property
    def half_tile_values_bytes(self) -> int:
        """Bytes of a half tile's values."""
        return HALF_TILE_VALUES * self.value_bits // 8

    @property
    def half_tile_scales_bytes(self) -> int:
        """Bytes of a half tile's scales."""
        return HALF_TILE_VALUES // self.group * self.scale_bits // 8 if self.group else 0

    @property
    def half_tile_bytes(self) -> int:
        """Bytes of a half tile, scales included."""
        return self.half_tile_values_bytes + self.half_tile_scales_bytes


BF16 = WeightFormat("bf16", "Plain16", 16)
FP16 = WeightFormat("fp16", "Plain16", 16)
# For tests of the seam alone: signed integers, times a power of two for 32 columns of a row.
INT8_SCALED = WeightFormat("int8_scaled", "Int8Scaled", 8, scale_bits=8, group=32)


READERS = tuple(dict.fromkeys(stored.reader for stored in (BF16, FP16, INT8_SCALED)))


def format_of(dtype: Dtype) -> WeightFormat:
    """That of matrices whose values stand for themselves.

    Raises:
        ShapeUnsupported: fp32, which the kernel does not multiply.
    """
    formats = {Dtype.BF16: BF16, Dtype.FP16: FP16}
    if dtype not in formats:
        raise ShapeUnsupported(f"{dtype.value} weights", "bf16 or fp16")
    return formats[dtype]
