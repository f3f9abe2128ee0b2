"""Kernels that other threads compile while something else is done."""

from pathlib import Path

import pytest

from soloist.errors import CompileError
from soloist.jit import ahead, cache
from soloist.jit.ahead import built_beside
from soloist.jit.compiler import Cubin, Report
from soloist.jit.source import Source


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def compile_source(source: Source, arch: str) -> Cubin:
        found.append(source.header)
        if source.header == "bad":
            raise CompileError("a kernel", "it is bad", "")
        return Cubin(b"code", Report({}, ()), "log", arch)

    monkeypatch.setattr(cache, "compile_source", compile_source)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 0))
    return found


def sources(*headers: str) -> list[Source]:
    return [Source("kernels/read.cu", header) for header in headers]


def test_what_the_cache_lacks_is_there_afterwards(tmp_path: Path, compiled: list[str]) -> None:
    cache.load_or_build(*sources("first"), "sm_90a", tmp_path)
    with built_beside(sources("first", "second", "third"), "sm_90a", tmp_path):
        pass
    assert sorted(compiled) == ["first", "second", "third"]
    with built_beside(sources("first", "second", "third"), "sm_90a", tmp_path):
        pass
    assert len(compiled) == 3


def test_who_asks_is_told_of_a_kernel_that_cannot_be_compiled(
    tmp_path: Path, compiled: list[str]
) -> None:
    with built_beside(sources("bad", "good"), "sm_90a", tmp_path):
        pass
    assert sorted(compiled) == ["bad", "good"]
    with pytest.raises(CompileError):
        cache.load_or_build(*sources("bad"), "sm_90a", tmp_path)


def test_without_a_folder_nothing_is_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    monkeypatch.setattr(ahead, "ThreadPoolExecutor", None)
    with built_beside(sources("first"), "sm_90a", None):
        pass
    assert compiled == []
