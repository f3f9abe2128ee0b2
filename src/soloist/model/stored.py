"""One tensor on disk, as a header describes it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from soloist.model.dtype import Dtype

T = TypeVar("T")

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
class Piece:
    """Where a matrix lies that a safetensors file has not under the name that families know.

    Attributes:
        name: of the file's tensor.
        index: of the matrix in a tensor of three dimensions; None: the tensor is the matrix.
        first_row: of the tensor's matrix.
    """

    name: str
    index: int | None = None
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk.

    Attributes:
        name: what families call it.
        file: it is in.
        shape: of its numbers.
        dtype: as safetensors spells it (F32, BF16, F16, F8_E4M3, …), or GGUF (Q4_K, …).
        place: in the file; None where safetensors knows it by name.
        piece: of a tensor of the file; None where it is that of its name.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    place: Place | None = None
    piece: Piece | None = None

    @property
    def shown(self) -> str:
        """What its file calls it."""
        held = self.place or self.piece
        return self.name if held is None else held.name

    def in_file(self, tensor: "Callable[[str], T]") -> "T":
        """Its values, as an array or tensor, out of a file that gives tensors by name."""
        if self.piece is None:
            return tensor(self.name)
        whole: Any = tensor(self.piece.name)
        if self.piece.index is None:
            return cast("T", whole)
        rows = slice(self.piece.first_row, self.piece.first_row + self.shape[0])
        return cast("T", whole[self.piece.index, rows])

    @property
    def num_bytes(self) -> int:
        """What it takes; all other types that are read have a byte a number."""
        if self.place is not None:
            return self.place.num_bytes
        return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8
