"""Number formats, named without torch so that plans can speak of them."""

from enum import Enum


class Dtype(Enum):
    """A plain floating-point format."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def num_bytes(self) -> int:
        """Bytes a number."""
        return 4 if self is Dtype.FP32 else 2
