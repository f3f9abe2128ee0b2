"""Entries of the kernel cache: found again, repaired, and shared by processes."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from soloist.errors import CompileError
from soloist.jit import cache
from soloist.jit.cache import load_or_build
from soloist.jit.compiler import OPTIONS, Cubin, nvrtc_version
from soloist.jit.source import Source
from unit.jit.small import ARCH, HEADER, one_file, small_source
from unit.jit.test_compiler import compiles

pytestmark = compiles

# A process that waits for the others to be ready, builds, and says what it got.
RACER = """\
import hashlib, sys
from pathlib import Path
from soloist.jit.cache import load_or_build
from soloist.jit.source import Source

root, kept = map(Path, sys.argv[1:])
source = Source("kernels/scale.cu", (root / "header").read_text(), root)
source.headers
print("ready", flush=True)
sys.stdin.readline()
cubin = load_or_build(source, "sm_90a", kept)
print(hashlib.sha256(cubin.data).hexdigest(), cubin.report.entries["scale"].registers)
"""


def entry_of(source: Source, kept: Path) -> Path:
    return kept / "kernels" / source.digest(ARCH, OPTIONS, nvrtc_version())


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architecture of each compilation that really happens."""
    seen: list[str] = []

    def counted(source: Source, arch: str) -> Cubin:
        seen.append(arch)
        return compile_source(source, arch)

    compile_source = cache.compile_source
    monkeypatch.setattr(cache, "compile_source", counted)
    return seen


def test_an_entry_holds_what_people_want_to_read(tmp_path: Path) -> None:
    source = small_source(tmp_path / "cuda")
    cubin = load_or_build(source, ARCH, tmp_path / "kept")
    entry = entry_of(source, tmp_path / "kept")
    assert {f.name for f in entry.iterdir()} == {
        "spec.cuh",
        "kernel.cubin",
        "build.log",
        "build.json",
    }
    assert (entry / "spec.cuh").read_text() == HEADER
    assert (entry / "kernel.cubin").read_bytes() == cubin.data
    assert "Used" in (entry / "build.log").read_text()
    build = json.loads((entry / "build.json").read_text())
    assert build["arch"] == ARCH
    assert build["options"] == list(OPTIONS)
    assert build["nvrtc"] == ".".join(map(str, nvrtc_version()))
    assert build["entries"]["scale"]["registers"] == cubin.report.entries["scale"].registers
    assert build["seconds"] > 0


def test_an_entry_is_built_once(tmp_path: Path, builds: list[str]) -> None:
    source = small_source(tmp_path / "cuda")
    first = load_or_build(source, ARCH, tmp_path / "kept")
    assert load_or_build(source, ARCH, tmp_path / "kept") == first
    assert builds == [ARCH]
    load_or_build(source, "sm_80", tmp_path / "kept")
    assert builds == [ARCH, "sm_80"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("kernel.cubin", b""),
        ("kernel.cubin", None),
        ("build.log", b"another log"),
        ("build.json", b'{"cubin_sha256": "'),
        ("build.json", b"[]"),
        ("build.json", None),
    ],
)
def test_a_damaged_entry_is_built_again(
    tmp_path: Path, builds: list[str], file: str, content: bytes | None
) -> None:
    source, kept = small_source(tmp_path / "cuda"), tmp_path / "kept"
    first = load_or_build(source, ARCH, kept)
    damaged = entry_of(source, kept) / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content)
    assert load_or_build(source, ARCH, kept).data == first.data
    assert load_or_build(source, ARCH, kept).data == first.data
    assert len(builds) == 2
    assert [p.name for p in (kept / "kernels").iterdir()] == [entry_of(source, kept).name]


@pytest.mark.parametrize("obstacle", ["file", "empty folder"])
def test_what_is_no_entry_makes_way(tmp_path: Path, builds: list[str], obstacle: str) -> None:
    source, kept = small_source(tmp_path / "cuda"), tmp_path / "kept"
    place = entry_of(source, kept)
    place.parent.mkdir(parents=True)
    place.touch() if obstacle == "file" else place.mkdir()
    assert load_or_build(source, ARCH, kept) == load_or_build(source, ARCH, kept)
    assert len(builds) == 1


@pytest.mark.parametrize("damaged", [False, True], ids=["absent", "damaged"])
def test_processes_that_build_at_once_share_one_entry(tmp_path: Path, damaged: bool) -> None:
    source, kept = small_source(tmp_path / "cuda"), tmp_path / "kept"
    (tmp_path / "cuda" / "header").write_text(HEADER)
    place = entry_of(source, kept)
    if damaged:
        place.mkdir(parents=True)
        (place / "kernel.cubin").write_bytes(b"half a")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "cuda"), str(kept)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 6
    assert len({out for out, _ in said}) == 1
    assert {err for _, err in said} == {""}
    assert [p.name for p in (kept / "kernels").iterdir()] == [place.name]
    assert load_or_build(source, ARCH, kept).data == (place / "kernel.cubin").read_bytes()


def test_the_entry_of_a_faster_process_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kept = small_source(tmp_path / "cuda"), tmp_path / "kept"
    build = cache.compile_source

    def slower(source: Source, arch: str) -> Cubin:
        monkeypatch.setattr(cache, "compile_source", build)
        theirs = load_or_build(source, arch, kept)
        return Cubin(b"ours", theirs.report, theirs.log, arch)

    monkeypatch.setattr(cache, "compile_source", slower)
    assert load_or_build(source, ARCH, kept).data.startswith(b"\x7fELF")


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = small_source(tmp_path / "cuda")
    (tmp_path / "kept").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        first = load_or_build(source, ARCH, tmp_path / "kept")
        second = load_or_build(source, ARCH, tmp_path / "kept")
    assert first.data == second.data
    (record,) = caplog.records
    assert str(tmp_path / "kept") in record.getMessage()
    assert "SOLOIST_CACHE" in record.getMessage()


def test_without_a_folder_a_process_builds_once(tmp_path: Path, builds: list[str]) -> None:
    first, second = (load_or_build(small_source(tmp_path / "cuda"), ARCH, None) for _ in range(2))
    assert first.data == second.data
    assert builds == [ARCH]


def test_what_does_not_compile_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CompileError):
        load_or_build(one_file(tmp_path / "cuda", "nonsense"), ARCH, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
