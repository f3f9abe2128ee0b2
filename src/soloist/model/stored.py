"""One tensor on disk, as a header describes it."""

import math
from dataclasses import dataclass
from pathlib import Path

from soloist.model.dtype import Dtype

# Numbers that stand for themselves, as safetensors spells their types.
PLAIN = {"F32": Dtype.FP32, "BF16": Dtype.BF16, "F16": Dtype.FP16}
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32} | dict.fromkeys(
    ("BF16", "F16", "I16", "U16"), 16
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, F16, F8_E4M3, …

    @property
    def num_bytes(self) -> int:
        """What it takes; all other types that are read have a byte a number."""
        return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8
