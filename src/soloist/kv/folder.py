"""A folder of saved chunks: keys and values of prompts that outlive the process.

Below the folder has one folder for each *identity*, which is a hash of everything that the bits of
keys and values depend on (`engine/identity.py`). In it every chunk is a file. Its name has the keys
of the chunk before it and of the chunk itself; a key is a hash of all tokens up to the chunk's end.
So to look a chunk up is to open a file, and no file has to be read when a server starts:

    FOLDER/IDENTITY/PARENT-KEY.kv

A file has a header, the chunk's tokens and its keys and values, each with a checksum. The tokens
are compared: a hash finds a file, and does not vouch for it. Files are written under another name
and renamed, so several servers may share a folder without locks. Where a file ends, and whether it
is whole, its header says; what is not as it says is deleted and never used.

Pure: bytes are opaque, and who has them says how many there are.
"""

import logging
import os
import re
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path

log = logging.getLogger(__name__)

_MAGIC = b"soloKV\0\1"
# Identity, parent, key; tokens, payload bytes; checksums of tokens and payload, and of all these.
_HEADER = struct.Struct("<8s16s16s16sIQIII")
_KEY_BYTES = 16
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.kv")
_PART_PREFIX, _PART_AGE_S = ".part-", 3600.0
_IDENTITY = re.compile(r"[0-9a-f]{32}")
# Where the bound is reached so much more is freed, so that not every further file lists the folder.
_FREED_SHARE = 16

# Whatever is written: nobody else may read prompts.
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700


@dataclass(frozen=True, slots=True)
class Link:
    """A chunk by what it is, and not by where it lies.

    Attributes:
        parent: key of the chunk before it; zeros for a prompt's first one.
        key: of this one.
        tokens: its own.
    """

    parent: bytes
    key: bytes
    tokens: tuple[int, ...]


def links(chunks: Iterable[Sequence[int]]) -> Iterator[Link]:
    """A prompt's chunks, from its beginning on."""
    parent = bytes(_KEY_BYTES)
    for tokens in chunks:
        key = blake2b(parent + _stored(tokens), digest_size=_KEY_BYTES).digest()
        yield Link(parent, key, tuple(tokens))
        parent = key


class Damaged(Exception):
    """A file is not what its name says; what is wrong with it."""


class ChunkFolder:
    """Reads, writes and bounds the files; may be used from several threads.

    Args:
        root: the folder that users name; it exists.
        identity: of what is read and written, 16 bytes.
    """

    def __init__(self, root: Path, identity: bytes) -> None:
        assert len(identity) == _KEY_BYTES, "it has a place in headers"
        self.root, self._identity = root, identity
        self._own = root / identity.hex()
        self._counter = count()

    def path(self, link: Link) -> Path:
        """Of a chunk's file."""
        return self._own / f"{link.parent.hex()}-{link.key.hex()}.kv"

    def has(self, link: Link) -> bool:
        """Whether a chunk has a file, sound or not."""
        return self.path(link).exists()

    def touch(self, link: Link) -> None:
        """Let a chunk, and those before it, count as used now."""
        now = time.time_ns()  # the system's own choice may be some milliseconds old
        with suppress(OSError):  # it was deleted meanwhile
            os.utime(self.path(link), ns=(now, now))

    # --- one file ---------------------------------------------------------------------------------

    def write(self, link: Link, parts: Sequence[memoryview]) -> int:
        """Save a chunk's bytes, all or none; how many bytes the file has.

        Nothing is flushed to the drive: after a crash of the machine checksums find what is torn.

        Raises:
            OSError: the machine does not take them.
        """
        tokens = _stored(link.tokens)
        num_bytes, checksum = 0, 0
        for part in parts:
            num_bytes += part.nbytes
            checksum = zlib.crc32(part, checksum)
        header = _HEADER.pack(
            _MAGIC, self._identity, link.parent, link.key,
            len(link.tokens), num_bytes, zlib.crc32(tokens), checksum, 0,
        )[:-4]  # fmt: skip
        header += struct.pack("<I", zlib.crc32(header))
        self._own.mkdir(_FOLDER_MODE, exist_ok=True)
        part_path = self._own / f"{_PART_PREFIX}{os.getpid()}-{next(self._counter)}"
        try:
            descriptor = os.open(part_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
            try:
                for piece in (memoryview(header), memoryview(tokens), *parts):
                    _write_all(descriptor, piece)
            finally:
                os.close(descriptor)
            part_path.replace(self.path(link))
        except BaseException:
            part_path.unlink(missing_ok=True)
            raise
        return len(header) + len(tokens) + num_bytes

    def read(self, link: Link, into: memoryview) -> bool:
        """Read a chunk's bytes; whether it has a file.

        Args:
            link: the chunk.
            into: as many bytes as were saved; undefined where there is no sound file.

        Raises:
            Damaged: it has one that is not sound; it was deleted.
        """
        path = self.path(link)
        try:
            self._read(path, link, into)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s: a saved chunk of a prompt cannot be read (%s)", path, error)
            return False
        except Damaged as damaged:
            path.unlink(missing_ok=True)
            raise Damaged(f"{path}: {damaged}") from None
        return True

    def _read(self, path: Path, link: Link, into: memoryview) -> None:
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size) or b""
            if len(header) < _HEADER.size:
                raise Damaged("its header is cut off")
            magic, identity, parent, key, num_tokens, num_bytes, of_tokens, of_bytes, own = (
                _HEADER.unpack(header)
            )
            if magic != _MAGIC:
                raise Damaged("it is no file of this form")
            if zlib.crc32(header[:-4]) != own:
                raise Damaged("its header fails its checksum")
            if identity != self._identity:
                raise Damaged("it belongs to another model")
            if (parent, key, num_tokens) != (link.parent, link.key, len(link.tokens)):
                raise Damaged("it is another chunk")
            if num_bytes != into.nbytes:
                raise Damaged(f"it has {num_bytes:,} bytes, and {into.nbytes:,} are wanted")
            wanted = _stored(link.tokens)
            tokens = bytearray(len(wanted))
            _read_all(file.fileno(), memoryview(tokens))
            if zlib.crc32(tokens) != of_tokens or tokens != wanted:
                raise Damaged("its tokens are others")
            _read_all(file.fileno(), into)
            if zlib.crc32(into) != of_bytes:
                raise Damaged("its keys and values fail their checksum")

    # --- the bound --------------------------------------------------------------------------------

    def make_room(self, needed_bytes: int, most_bytes: int) -> tuple[int, int]:
        """Delete what is longest without use until so many bytes more are within the bound.

        Files of all identities count, whoever wrote them. A chunk is as old as the latest of those
        behind it, which are of no use without it.

        Returns:
            Bytes of the files that are left, and how many files were deleted.
        """
        by_folder = [list(_files(folder)) for folder in self._folders()]
        total, deleted = sum(file.num_bytes for files in by_folder for file in files), 0
        if total + needed_bytes <= most_bytes:
            return total, deleted
        files = [file for files in by_folder for file in _with_ages(files)]
        left_bytes = most_bytes - most_bytes // _FREED_SHARE - needed_bytes
        # Of files of the same age those farthest from the prompt's beginning first.
        for file in sorted(files, key=lambda file: (file.used_at, -file.depth)):
            if total <= left_bytes:
                break
            file.path.unlink(missing_ok=True)  # another server may have been quicker
            total -= file.num_bytes
            deleted += 1
        return total, deleted

    def _folders(self) -> Iterator[Path]:
        try:
            with os.scandir(self.root) as entries:
                names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            return
        yield from (self.root / name for name in names if _IDENTITY.fullmatch(name))


@dataclass(slots=True)
class _File:
    path: Path
    parent: str
    key: str
    num_bytes: int
    used_at: float
    depth: int = 0


def _files(folder: Path) -> Iterator[_File]:
    """Files of chunks; what a writer left that ended before it could rename is deleted."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    known = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # deleted meanwhile
                if found := _NAME.fullmatch(entry.name):
                    yield _File(Path(entry.path), found[1], found[2], known.st_size, known.st_mtime)
                elif (
                    entry.name.startswith(_PART_PREFIX)
                    and known.st_mtime < time.time() - _PART_AGE_S
                ):
                    Path(entry.path).unlink(missing_ok=True)
    except OSError:
        return


def _with_ages(files: list[_File]) -> list[_File]:
    """The same files, each as young as the youngest of those behind it, with its depth."""
    by_key = {file.key: file for file in files}
    # From each file towards the beginning: once somebody younger passed nothing is left to do.
    for file in sorted(files, key=lambda file: file.used_at, reverse=True):
        before = by_key.get(file.parent)
        while before is not None and before.used_at < file.used_at:
            before.used_at = file.used_at
            before = by_key.get(before.parent)
    for file in files:
        path: list[_File] = []
        one: _File | None = file
        while one is not None and not one.depth:
            path.append(one)
            one.depth = 1  # names that form a circle were not written here, and end here
            one = by_key.get(one.parent)
        depth = 0 if one is None else one.depth
        for later in reversed(path):
            depth += 1
            later.depth = depth
    return files


def _stored(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _write_all(descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, into: memoryview) -> None:
    into = into.cast("B")
    while into:
        count_read = os.readv(descriptor, [into])
        if not count_read:
            raise Damaged("it is cut off")
        into = into[count_read:]
