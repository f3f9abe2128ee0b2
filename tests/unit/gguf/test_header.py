"""Headers of GGUF files: what gguf-py writes is read, and files that lie are refused at once."""

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.errors import (
    BadGguf,
    CheckpointError,
    MissingFile,
    NotAFile,
    TruncatedFile,
    UnsupportedGguf,
)
from soloist.gguf.header import read_header
from soloist.gguf.names import first_of, is_gguf, parts_of, stem_of
from soloist.gguf.splits import read_gguf
from unit.gguf.writing import add, encoded


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...] = (2, 3), kind: int = 0, offset: int = 0) -> bytes:
    """As in a file: the columns first."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def file_of(
    folder: Path,
    keys: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    data: bytes = bytes(64),
    start: bytes = b"GGUF\3\0\0\0",
    counts: tuple[int, int] | None = None,
) -> Path:
    keys, infos = keys or [], infos or []
    header = start + struct.pack("<QQ", *(counts or (len(infos), len(keys))))
    header += b"".join(keys) + b"".join(infos)
    path = folder / "model.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def test_what_gguf_py_writes_is_read_back(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a.text": "ä\n", "a.yes": True, "a.count": 7, "a.share": 0.25,
        "a.list": [1, 2, 3], "a.words": ["x", "", "ü"], "general.alignment": 64,
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in values.items():
        add(writer, name, value)
    writer.data_alignment = 64
    rng = np.random.default_rng(0)
    first, second = rng.random((3, 5), np.float32), rng.random((4, 64), np.float32)
    writer.add_tensor("first", first)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = encoded(second, kind)
    writer.add_tensor("second", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(tmp_path / "x.gguf")
    assert {name: found.metadata[name] for name in values} == values
    assert (found.tensors["first"].shape, found.tensors["second"].shape) == ((3, 5), (4, 64))
    data = (tmp_path / "x.gguf").read_bytes()
    for name, wanted in (("first", first.tobytes()), ("second", blocks.tobytes())):
        place = found.tensors[name]
        assert data[place.start : place.start + place.num_bytes] == wanted
        assert place.start % 64 == 0


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = file_of(tmp_path, [key("a", 4, struct.pack("<I", 1))])
    assert read_header(path).metadata == {"a": 1}
    path = file_of(tmp_path, [key("a", 4, struct.pack("<I", 2)), key("b", 7, b"\1")])
    assert read_header(path).metadata == {"a": 2, "b": True}


ENDLESS = 1 << 62
BAD: dict[str, tuple[dict[str, Any], type[CheckpointError], str]] = {
    "no magic": ({"start": b"GGML\3\0\0\0"}, BadGguf, "begins with b'GGML'"),
    "old version": ({"start": b"GGUF\1\0\0\0"}, UnsupportedGguf, "version of GGUF is 1"),
    "new version": ({"start": b"GGUF\4\0\0\0"}, UnsupportedGguf, "allowed: 2 and 3"),
    "big endian": ({"start": b"GGUF\0\0\0\3"}, UnsupportedGguf, "big endian"),
    "endless tensors": ({"counts": (ENDLESS, 0)}, BadGguf, "tensors"),
    "endless keys": ({"counts": (0, ENDLESS)}, BadGguf, "keys"),
    "more tensors than bytes": ({"counts": (200_000, 0)}, TruncatedFile, "more than fit"),
    "more keys than bytes": ({"counts": (0, 60_000)}, TruncatedFile, "more than fit"),
    "endless name": (
        {"counts": (0, 1), "keys": [struct.pack("<Q", ENDLESS)]}, BadGguf, "a key has",
    ),
    "endless text": (
        {"keys": [text("a") + struct.pack("<IQ", 8, ENDLESS)]}, BadGguf, "key 'a' has",
    ),
    "text beyond the end": (
        {"keys": [text("a") + struct.pack("<IQ", 8, 5_000)]}, TruncatedFile, "goes on after",
    ),
    "endless list": (
        {"keys": [text("a") + struct.pack("<IIQ", 9, 4, ENDLESS)]}, BadGguf, "entries in 'a'",
    ),
    "list beyond the end": (
        {"keys": [text("a") + struct.pack("<IIQ", 9, 4, 5_000)]}, TruncatedFile, "entries in 'a'",
    ),
    "texts beyond the end": (
        {"keys": [text("a") + struct.pack("<IIQQ", 9, 8, 2, 5_000)]}, TruncatedFile, "header",
    ),
    "list of lists": (
        {"keys": [text("a") + struct.pack("<IIQ", 9, 9, 1)]}, BadGguf, "value of type 9",
    ),
    "unknown value": ({"keys": [key("a", 13, bytes(8))]}, BadGguf, "value of type 13"),
    "no UTF-8": ({"keys": [key("a", 8, text(b"\xff"))]}, BadGguf, "key 'a' is not UTF-8"),
    "same key": ({"keys": [key("a", 7, b"\0")] * 2}, BadGguf, "key 'a' is there twice"),
    "same tensor": ({"infos": [info("a"), info("a", offset=32)]}, BadGguf, "is there twice"),
    "overlapping": ({"infos": [info("a", (3, 4)), info("b", offset=32)]}, BadGguf, "overlap"),
    "out of line": ({"infos": [info("a", offset=4)]}, BadGguf, "no multiple of 32"),
    "beyond the end": ({"infos": [info("a", offset=64)]}, TruncatedFile, "ends at byte"),
    "endless tensor": ({"infos": [info("a", (ENDLESS, 4))]}, TruncatedFile, "ends at byte"),
    "no dimension": ({"infos": [info("a", ())]}, BadGguf, "has 0 dimensions"),
    "five dimensions": ({"infos": [info("a", (1,) * 5)]}, BadGguf, "has 5 dimensions"),
    "nothing in it": ({"infos": [info("a", (0, 3))]}, BadGguf, "shape"),
    "half a block": ({"infos": [info("a", (2, 48), 8)]}, BadGguf, "a multiple of 32"),
    "known type": ({"infos": [info("a", (2, 256), 10)]}, UnsupportedGguf, "'a' is Q2_K"),
    "unknown type": ({"infos": [info("a", (2, 256), 99)]}, UnsupportedGguf, "is number 99"),
    "alignment": (
        {"keys": [key("general.alignment", 4, struct.pack("<I", 24))]}, BadGguf, "a power of two",
    ),
    "steering": ({"infos": [info("a\x1b[2J", offset=4)]}, BadGguf, r"a\\x1b\[2J"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_header_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    options, error, words = BAD[name]
    with pytest.raises(error, match=words) as caught:
        read_header(file_of(tmp_path, **options))
    assert "model.gguf" in caught.value.message
    assert caught.value.hint
    assert "\x1b" not in str(caught.value)


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = file_of(
        tmp_path,
        [key("a", 8, text("b")), key("c", 9, struct.pack("<IQ", 8, 2) + text("d") + text("e"))],
        [info("f", (4, 4))],
    )
    data = whole.read_bytes()
    assert read_header(whole).tensors["f"].num_bytes == 64
    for length in range(len(data)):
        whole.write_bytes(data[:length])
        with pytest.raises(TruncatedFile):
            read_header(whole)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 150), st.binary(min_size=1, max_size=9))
def test_any_bytes_end_in_one_of_our_errors(
    tmp_path_factory: pytest.TempPathFactory, at: int, other: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    keys = [key("a", 8, text("b")), key("c", 9, struct.pack("<IQ", 5, 2) + bytes(8))]
    path = file_of(folder, keys, [info("f", (4, 4))])
    data = bytearray(path.read_bytes())
    data[at : at + len(other)] = other
    path.write_bytes(data)
    with suppress(CheckpointError):
        read_header(path)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(NotAFile, match=kind):
        read_header(path)
    assert is_gguf(path) is (kind == "pipe")  # it was meant as one


def test_a_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    blob = path.rename(tmp_path / "sha256-0")
    assert is_gguf(blob)
    (tmp_path / "config.json").write_text("{}")
    assert not is_gguf(tmp_path / "config.json")
    assert not is_gguf(tmp_path / "absent")


def split(no: int, count: int, total: int | None = None) -> list[bytes]:
    keys = [
        key("split.no", 2, struct.pack("<H", no)),
        key("split.count", 2, struct.pack("<H", count)),
    ]
    told = [] if total is None else [key("split.tensors.count", 5, struct.pack("<i", total))]
    return keys + told


def write_parts(folder: Path, total: int = 2) -> list[Path]:
    paths = []
    for no, name in enumerate(("a", "b")):
        made = file_of(folder, split(no, 2, total if no == 0 else None), [info(name)])
        paths.append(made.rename(folder / f"m-{no + 1:05}-of-00002.gguf"))
    return paths


def test_parts_are_read_together(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    found = read_gguf(first)
    assert dict(found.files) == {"a": first, "b": second}
    assert first_of(second.name) == first.name
    assert parts_of(second.name) == [first.name, second.name]
    assert stem_of(second.name) == "m"


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    with pytest.raises(BadGguf, match="its name does not end in -00001-of-00002") as caught:
        read_gguf(first.rename(tmp_path / "m.gguf"))
    assert "named as gguf-split names it" in caught.value.hint
    (tmp_path / "m.gguf").rename(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(BadGguf, match="it is file 0 of 2, not 1 of 2"):
        read_gguf(first)
    second.unlink()
    with pytest.raises(MissingFile, match=r"m-00002-of-00002\.gguf"):
        read_gguf(first)
    write_parts(tmp_path, total=3)
    with pytest.raises(BadGguf, match=r"'split\.tensors\.count' is 3, but the 2 files hold 2"):
        read_gguf(first)
