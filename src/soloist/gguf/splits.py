"""A model over several GGUF files, as llama.cpp's gguf-split names and numbers them.

The first file has the metadata; each has `split.no`, from 0 on, `split.count`, and its own tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soloist.errors import BadGguf, MissingFile, quoted
from soloist.files import is_there
from soloist.gguf.header import Header, TensorInfo, read_header
from soloist.gguf.names import MOST_FILES, parts_of

_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class Gguf:
    """A model's files.

    Attributes:
        file: the first.
        metadata: of the first.
        tensors: of all, by name.
        files: of each tensor, by name.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, Path]


def read_gguf(file: Path) -> Gguf:
    """The headers of a file and of those that belong to it.

    Args:
        file: the only one, or the first.

    Raises:
        MissingFile: one of the others is not there.
        CheckpointError: as from `read_header`; or the files do not belong together.
    """
    first = read_header(file)
    count = first.metadata.get(_COUNT, 1)
    if type(count) is not int or not 0 <= count <= MOST_FILES:
        raise BadGguf(str(file), f"'{_COUNT}' is {count!r} (allowed: 0 … {MOST_FILES:,})")
    if count <= 1:
        return Gguf(file, first.metadata, first.tensors, dict.fromkeys(first.tensors, file))
    headers = [_part(first, path, no, count) for no, path in enumerate(_paths(file, count))]
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise BadGguf(
                    str(header.file), f"tensor {quoted(name)} is in {files[name].name} as well"
                )
            tensors[name], files[name] = info, header.file
    told = first.metadata.get(_TENSORS, len(tensors))
    if told != len(tensors):
        raise BadGguf(
            str(file), f"'{_TENSORS}' is {told!r}, but the {count} files hold {len(tensors):,}"
        )
    return Gguf(file, first.metadata, tensors, files)


def _paths(file: Path, count: int) -> list[Path]:
    names = parts_of(file.name)
    if len(names) != count or names[0] != file.name:
        no = f"{1:05}-of-{count:05}"
        raise BadGguf(
            str(file),
            f"it is one of {count} files of a model, but its name does not end in -{no}.gguf",
            "give the first file, named as gguf-split names it, with the others beside it",
        )
    for name in names:
        if not is_there(file.parent / name):
            found = sorted(p.name for p in file.parent.iterdir())
            raise MissingFile(
                str(file.parent), f"{quoted(name)}, one of {count} files of a model", found,
                "download the missing file",
            )  # fmt: skip
    return [file.parent / name for name in names]


def _part(first: Header, path: Path, no: int, count: int) -> Header:
    header = first if path == first.file else read_header(path)
    told = (header.metadata.get(_NO), header.metadata.get(_COUNT))
    if told != (no, count):
        raise BadGguf(
            str(path), f"it says that it is file {told[0]!r} of {told[1]!r}, not {no} of {count}",
            "take all files from one download",
        )  # fmt: skip
    return header
