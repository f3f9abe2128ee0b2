"""A GGUF file's tensors under the names that families know, and where their bytes lie. Pure."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from soloist.errors import BadGguf, quoted
from soloist.gguf.header import TensorInfo
from soloist.gguf.splits import Gguf
from soloist.model.gguf.configuration import (
    ARCHITECTURES,
    architecture_of,
    family_of,
    head_counts,
)
from soloist.model.gguf.naming import ROPE_FREQS, STACKED, to_families, to_gguf
from soloist.model.stored import Place, StoredTensor

_PAIRED = ("attn_q", "attn_k")
_ONE_ROW = ".ffn_gate_inp_shexp.weight"


def stored_tensors(gguf: Gguf) -> dict[str, StoredTensor]:
    """All tensors of a model's files; one that no family knows keeps the file's name.

    Raises:
        BadGguf: a tensor has a name that is not GGUF's, or rows that are not so many heads'.
        ConfigError, UnsupportedGguf: as from `head_counts`.
    """
    architecture, family = ARCHITECTURES[architecture_of(gguf)], family_of(gguf)
    heads = dict(zip(_PAIRED, head_counts(gguf), strict=True)) if architecture.pairs else {}
    found: dict[str, StoredTensor] = {}
    for info in gguf.tensors.values():
        if info.name == ROPE_FREQS and architecture.divides:
            continue  # read with the configuration
        if to_gguf(info.name, family) != info.name:
            raise BadGguf(
                str(gguf.files[info.name]),
                f"tensor {quoted(info.name)} has a name of another format, which GGUF calls "
                f"{quoted(to_gguf(info.name, family))}",
            )
        name, file = to_families(info.name, family) or info.name, gguf.files[info.name]
        if info.name.endswith(STACKED) and len(info.shape) == 3:
            found |= {stored.name: stored for stored in _experts(info, name, file)}
            continue
        place = Place(info.name, info.start, info.num_bytes, _heads_of(gguf, info, heads))
        # Files have no dimension of one, as the only row of a matrix.
        shape = (1, *info.shape) if info.name.endswith(_ONE_ROW) else info.shape
        found[name] = StoredTensor(name, file, shape, info.type.name, place)
    return found


def _experts(info: TensorInfo, name: str, file: Path) -> Iterator[StoredTensor]:
    """The matrix of each expert, which lie one after the other."""
    count, *shape = info.shape
    each = info.num_bytes // count
    for expert in range(count):
        place = Place(info.name, info.start + expert * each, each)
        own = name.replace("*", str(expert))
        yield StoredTensor(own, file, tuple(shape), info.type.name, place)


def _heads_of(gguf: Gguf, info: TensorInfo, heads: Mapping[str, int]) -> int:
    parts = info.name.split(".")
    count = heads.get(parts[2], 0) if parts[0] == "blk" and len(parts) == 4 else 0
    if count and info.shape[0] % (2 * count):
        raise BadGguf(
            str(gguf.files[info.name]),
            f"tensor {quoted(info.name)} has {info.shape[0]:,} rows, which are not those of "
            f"{count} heads",
        )
    return count
