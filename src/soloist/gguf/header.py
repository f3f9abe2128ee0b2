"""The header of a GGUF file, read once and held against the file's length.

Everything that a file says of counts and lengths is checked before memory is taken for it, so a
file that lies costs no more than the time to read what it holds. Tensors are only located.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from soloist.errors import BadGguf, TruncatedFile, UnsupportedGguf, quoted
from soloist.files import require_file
from soloist.gguf.names import MAGIC
from soloist.gguf.tensor_types import BY_NAME, TYPES, TensorType, name_of

ALIGNMENT: Final = "general.alignment"

_VERSIONS = (2, 3)  # 3 only adds files of the other byte order
_PREAMBLE = struct.Struct("<4sIQQ")
_LENGTH = struct.Struct("<Q")
_INFO = struct.Struct("<IQ")

# Far above what models have: vocabularies of some 300,000 tokens, files of some thousand tensors.
MOST_METADATA_BYTES: Final = 1 << 28
MOST_ENTRIES: Final = 1 << 22
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_NAME_BYTES = 1 << 16
_MOST_DIMENSIONS = 4
_LEAST_KEY_BYTES, _LEAST_INFO_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8

# Value types by number; 8 is a text, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: of the file's own.
        type: how its numbers are stored.
        shape: rows first, as everywhere but in the file.
        start: of its bytes, from the file's beginning.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) // self.type.values * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says of itself.

    Attributes:
        file: its path.
        metadata: values by key: numbers, texts, and lists of either.
        tensors: by name.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(file: Path) -> Header:
    """The header of one file; one that did not change since is not read again.

    Raises:
        NotAFile: it is a folder, a pipe or a device.
        TruncatedFile: it is shorter than it says.
        BadGguf: it contradicts itself.
        UnsupportedGguf: it is of another version or byte order, or has a tensor of a type that is
            not read.
    """
    try:
        require_file(file)
        seen = file.stat()
        return _read(file, seen.st_size, seen.st_mtime_ns, seen.st_ino)
    except OSError as error:
        raise BadGguf(str(file), f"it cannot be read: {error.strerror or error}") from error


@lru_cache(maxsize=8)
def _read(file: Path, size: int, changed: int, inode: int) -> Header:
    del changed, inode  # of the cache's key
    if size < _PREAMBLE.size:
        raise TruncatedFile(str(file), f"it has {size:,} bytes, too few for a header of GGUF")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(file, data, size).header()


class _Reader:
    """A place in a file, which moves on with all that is read."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self._file, self._data, self._size = str(file), data, size
        self._path = file
        self._at = 0

    def header(self) -> Header:
        """All of it, from the first byte."""
        num_tensors, num_keys = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("a key")
            if key in metadata:
                raise BadGguf(self._file, f"key {quoted(key)} is there twice")
            metadata[key] = self._value(key)
        alignment = metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise BadGguf(self._file, f"'{ALIGNMENT}' is {alignment!r}, not a power of two")
        infos = [self._info() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, number, shape, offset in infos:
            if name in tensors:
                raise BadGguf(self._file, f"tensor {quoted(name)} is there twice")
            if offset % alignment:
                raise BadGguf(
                    self._file,
                    f"tensor {quoted(name)} begins at {offset:,}, no multiple of {alignment}",
                )
            tensors[name] = self._located(name, number, shape, start + offset)
        self._require_apart(tensors)
        return Header(self._path, metadata, tensors)

    def _preamble(self) -> tuple[int, int]:
        magic, version, num_tensors, num_keys = _PREAMBLE.unpack_from(self._data)
        self._at = _PREAMBLE.size
        if magic != MAGIC:
            raise BadGguf(self._file, f"it begins with {magic!r}, not with {MAGIC!r}")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise UnsupportedGguf(self._file, "the byte order", "big endian", "little endian")
            allowed = " and ".join(map(str, _VERSIONS))
            raise UnsupportedGguf(self._file, "the version of GGUF", str(version), allowed)
        for what, count, most, least_bytes in (
            ("tensors", num_tensors, _MOST_TENSORS, _LEAST_INFO_BYTES),
            ("keys", num_keys, _MOST_KEYS, _LEAST_KEY_BYTES),
        ):
            self._require_count(what, count, most, least_bytes)
        return num_tensors, num_keys

    def _info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._name("a tensor's name")
        (rank,) = self._numbers("I", 1)
        if not 1 <= rank <= _MOST_DIMENSIONS:
            raise BadGguf(
                self._file,
                f"tensor {quoted(name)} has {rank:,} dimensions (allowed: 1 … {_MOST_DIMENSIONS})",
            )
        shape = tuple(reversed(self._numbers("Q", rank)))
        number, offset = _INFO.unpack(self._bytes(_INFO.size))
        return name, number, shape, offset

    def _located(self, name: str, number: int, shape: tuple[int, ...], start: int) -> TensorInfo:
        stored = TYPES.get(number)
        if stored is None:
            what = f"the type of tensor {quoted(name)}"
            raise UnsupportedGguf(self._file, what, name_of(number), ", ".join(BY_NAME))
        if 0 in shape or shape[-1] % stored.values:
            raise BadGguf(
                self._file,
                f"tensor {quoted(name)} has shape {list(shape)}, but {stored.name} stores rows of "
                f"a multiple of {stored.values} numbers",
            )
        info = TensorInfo(name, stored, shape, start)
        if start + info.num_bytes > self._size:
            raise TruncatedFile(
                self._file,
                f"tensor {quoted(name)} ends at byte {start + info.num_bytes:,}, but the file has "
                f"{self._size:,} bytes",
            )
        return info

    def _require_apart(self, tensors: Mapping[str, TensorInfo]) -> None:
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.start):
            if info.start < end:
                raise BadGguf(
                    self._file, f"tensors {quoted(before)} and {quoted(info.name)} overlap"
                )
            end, before = info.start + info.num_bytes, info.name

    def _value(self, key: str) -> Any:  # noqa: ANN401 - whatever the file holds
        (kind,) = self._numbers("I", 1)
        if kind == _TEXT:
            return self._text(lambda: f"key {quoted(key)}")
        if kind != _ARRAY:
            return self._scalars(key, kind, 1)[0]
        (kind,) = self._numbers("I", 1)
        (count,) = self._numbers("Q", 1)
        if kind == _TEXT:
            self._require_count(f"entries in {quoted(key)}", count, MOST_ENTRIES, _LENGTH.size)
            return self._texts(key, count)
        return list(self._scalars(key, kind, count))

    def _scalars(self, key: str, kind: int, count: int) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise BadGguf(
                self._file,
                f"key {quoted(key)} has a value of type {kind}, which GGUF does not have there",
            )
        size = struct.calcsize(f"<{code}")
        self._require_count(f"entries in {quoted(key)}", count, MOST_ENTRIES, size)
        return self._numbers(code, count)

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        packed = struct.Struct(f"<{count}{code}")
        return packed.unpack(self._bytes(packed.size))

    def _texts(self, key: str, count: int) -> list[str]:
        """Texts of an array: hundreds of thousands, so nothing is called for each but the codec."""
        data, at, end = self._data, self._at, min(self._size, MOST_METADATA_BYTES)
        length_at, found = _LENGTH.unpack_from, []
        try:
            for _ in range(count):
                start = at + 8
                if start > end:
                    break
                at = start + length_at(data, at)[0]
                if at > end:
                    break
                found.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise BadGguf(self._file, f"an entry of {quoted(key)} is not UTF-8") from error
        self._at = at
        if len(found) < count:
            raise self._ended()
        return found

    def _name(self, what: str) -> str:
        return self._text(lambda: what, _MOST_NAME_BYTES)

    def _text(self, what: Callable[[], str], most: int = MOST_METADATA_BYTES) -> str:
        (length,) = self._numbers("Q", 1)
        if length > most:
            raise BadGguf(self._file, f"{what()} has {length:,} bytes (allowed: up to {most:,})")
        try:
            return str(self._bytes(length), "utf-8")
        except UnicodeDecodeError as error:
            raise BadGguf(self._file, f"{what()} is not UTF-8") from error

    def _bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > min(self._size, MOST_METADATA_BYTES):
            raise self._ended()
        return self._data[start : self._at]

    def _ended(self) -> TruncatedFile | BadGguf:
        if self._size <= MOST_METADATA_BYTES:
            return TruncatedFile(
                self._file, f"its header goes on after its last byte, {self._size:,}"
            )
        return BadGguf(self._file, f"its header has more than {MOST_METADATA_BYTES:,} bytes")

    def _require_count(self, what: str, count: int, most: int, least_bytes: int) -> None:
        if count > most:
            raise BadGguf(self._file, f"it says that it has {count:,} {what} (allowed: {most:,})")
        if count * least_bytes > self._size - self._at:
            raise TruncatedFile(
                self._file, f"it says that it has {count:,} {what}, more than fit into its "
                f"{self._size:,} bytes",
            )  # fmt: skip
