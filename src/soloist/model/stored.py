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
class Place:
    """Where a tensor's bytes lie, in a file that has no reader of its own.

    Attributes:
        name: what the file calls the tensor.
        start: of its bytes, from the file's beginning.
        num_bytes: that it takes.
        paired_heads: rows belong to so many heads, and in each head the first row of its second
            half follows the first row of the first half, and so on; 0 where rows are in order.
    """

    name: str
    start: int
    num_bytes: int
    paired_heads: int = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk.

    Attributes:
        name: what families call it.
        file: it is in.
        shape: of its numbers.
        dtype: as safetensors spells it (F32, BF16, F16, F8_E4M3, …), or GGUF (Q4_K, …).
        place: in the file; None where safetensors knows it by name.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    place: Place | None = None

    @property
    def shown(self) -> str:
        """What its file calls it."""
        return self.name if self.place is None else self.place.name

    @property
    def num_bytes(self) -> int:
        """What it takes; all other types that are read have a byte a number."""
        if self.place is not None:
            return self.place.num_bytes
        return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8
