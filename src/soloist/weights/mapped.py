"""Tensors of files that have no reader of their own: bytes of the mapped file, seen as a type."""

from pathlib import Path

import torch
from torch import Tensor

from soloist.model.stored import PLAIN, Place, StoredTensor
from soloist.model.torch_types import TORCH_DTYPES


def map_file(file: Path) -> Tensor:
    """All bytes of a file; what is not looked at is not read."""
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)


def tensor_in(mapped: Tensor, stored: StoredTensor, place: Place) -> Tensor:
    """One tensor, with rows in the order that families have.

    Returns:
        Numbers in the tensor's shape; of a type of blocks uint8 [N, bytes of a row].
    """
    raw = mapped[place.start : place.start + place.num_bytes]
    plain = PLAIN.get(stored.dtype)
    if plain is None:
        values = raw.view(stored.shape[0], -1)
    else:
        dtype = TORCH_DTYPES[plain]
        aligned = raw.clone() if place.start % dtype.itemsize else raw
        values = aligned.view(dtype).view(stored.shape)
    return in_halves(values, place.paired_heads) if place.paired_heads else values


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows [N, …] of heads whose two halves were dealt out in turns, one half after the other."""
    pairs: Tensor = rows.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)
