"""How a quantised matrix stands for its numbers: (code - zero) · scale. Pure: no torch, no files.

Every format that checkpoints are quantised in is read into this one. A matrix [N, K] is then up to
three tensors, named after the matrix and the part: 'layers.0.qkv' has its codes,
'layers.0.qkv.scales' and 'layers.0.qkv.zeros' [N, G] what each row's G groups of columns share.
"""

from dataclasses import dataclass
from enum import StrEnum

from soloist.model.dtype import Dtype

SCALES, ZEROS = ".scales", ".zeros"


class Codes(StrEnum):
    """What is stored of every number."""

    INT4 = "int4"  # 0 … 15; uint8 [N, K / 2], an even column in the low half of its byte
    INT8 = "int8"  # -128 … 127; int8 [N, K]
    FP8 = "fp8"  # e4m3 without infinities; float8_e4m3fn [N, K]

    @property
    def bits(self) -> int:
        """Of one code."""
        return 4 if self is Codes.INT4 else 8


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a matrix's tensors mean.

    Attributes:
        codes: of its numbers.
        group: consecutive columns of a row that share a scale, and a zero; 0: all of them. The last
            group of a row may have fewer.
        scale_dtype: of the scales.
        has_zeros: zeros are stored, uint8 beside INT4 and int8 beside INT8. Otherwise INT4's zero
            is 8, and that of others 0.
        scale_rows: consecutive rows, counted from the first, that have the same scales, although
            each has its own in the tensor.
    """

    codes: Codes
    group: int
    scale_dtype: Dtype
    has_zeros: bool = False
    scale_rows: int = 1

    @property
    def parts(self) -> tuple[str, ...]:
        """What is added to a matrix's name to name each of its tensors."""
        return ("", SCALES, ZEROS) if self.has_zeros else ("", SCALES)

    @property
    def label(self) -> str:
        """What result files and people call it."""
        return f"{self.codes.value}-block" if self.scale_rows > 1 else self.codes.value

    def groups(self, columns: int) -> int:
        """G of a matrix with so many columns."""
        return -(-columns // self.group) if self.group else 1
