"""Safetensors files whose tensors are written one by one, in any order: no file lies in memory.

Names, types and shapes are known before the first byte. Knows bytes only, no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from soloist.model.shards import INDEX_FILE, SINGLE_FILE

_SIZES = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file that is to be written.

    Attributes:
        name: its name.
        dtype: as safetensors spells it.
        shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        return math.prod(self.shape) * _SIZES[self.dtype]


class SafetensorsFile:
    """A file that is written; as a context it ends with every tensor there.

    Args:
        path: a file that does not exist.
        entries: its tensors. The largest numbers come first in the file, so that each tensor is
            aligned to its own.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._missing: dict[str, tuple[int, int]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in sorted(entries, key=lambda e: (-_SIZES[e.dtype], e.name)):
            start, end = end, end + entry.num_bytes
            self._missing[entry.name] = (start, end)
            header[entry.name] = {
                "dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end),
            }  # fmt: skip
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, data: memoryview) -> None:
        """All bytes of one tensor, once."""
        start, end = self._missing.pop(name)
        assert data.nbytes == end - start, f"{name} has {data.nbytes} bytes, not {end - start}"
        self._file.seek(self._data_start + start)
        self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        assert error is not None or not self._missing, f"never written: {list(self._missing)}"


def file_names(count: int) -> list[str]:
    """What the files of a checkpoint are called."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def write_index(folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    """Say which of several files holds which tensor."""
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    names = {entry.name: file for file, entries in files.items() for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
