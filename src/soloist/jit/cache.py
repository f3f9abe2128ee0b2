"""Compiled kernels kept on disk, in `<cache>/kernels/<digest>/`.

People may read an entry as well: `spec.cuh`, `kernel.cubin`, `build.log` and `build.json`, which
says how they were made. It is built in a folder beside its place and renamed into it, so that
processes may build the same kernel at once: the first one's is used by all. An entry that is not
what its `build.json` says is built again. Must not know what the kernels compute.
"""

import errno
import hashlib
import json
import logging
import shutil
import time
import uuid
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path

from soloist.jit.compiler import (
    OPTIONS,
    Cubin,
    Report,
    Resources,
    compile_source,
    nvrtc_version,
)
from soloist.jit.source import SPEC_HEADER, Source

_CUBIN, _LOG, _BUILD = "kernel.cubin", "build.log", "build.json"
_ATTEMPTS = 8


def load_or_build(source: Source, arch: str, cache_root: Path | None) -> Cubin:
    """Machine code of `source` for `arch`, compiled at most once for each content.

    Args:
        source: what to compile.
        arch: architecture, such as 'sm_90a'.
        cache_root: where entries are kept; None keeps them in this process only. A folder that
            cannot be written is said once, and the kernel is compiled nevertheless.

    Raises CompileError, BadInclude, CudaMissing.
    """
    if cache_root is None:
        return _built_here(source, arch)
    place = _place(source, arch, cache_root)
    if (kept := _read(place)) is not None:
        return kept
    start = time.perf_counter()
    built = compile_source(source, arch)
    try:
        return _keep(place, source, built, time.perf_counter() - start)
    except OSError as error:
        _say_not_kept(cache_root, error.strerror or str(error))
        return built


def is_kept(source: Source, arch: str, cache_root: Path) -> bool:
    """Whether `load_or_build` finds the machine code of `source` in the cache."""
    return _read(_place(source, arch, cache_root)) is not None


def _place(source: Source, arch: str, cache_root: Path) -> Path:
    return cache_root / "kernels" / source.digest(arch, OPTIONS, nvrtc_version())


@lru_cache(maxsize=32)  # all ranks of a model ask for the same
def _built_here(source: Source, arch: str) -> Cubin:
    return compile_source(source, arch)


def _read(place: Path) -> Cubin | None:
    """The entry at `place`; None where there is none or it is damaged."""
    try:
        data = (place / _CUBIN).read_bytes()
        log = (place / _LOG).read_bytes().decode("utf-8")
        build = json.loads((place / _BUILD).read_text(encoding="utf-8"))
        entries = {name: Resources(**values) for name, values in build["entries"].items()}
        if _sha256(data) != build["cubin_sha256"] or _sha256(log.encode()) != build["log_sha256"]:
            return None
        return Cubin(data, Report(entries, tuple(build["warnings"])), log, build["arch"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keep(place: Path, source: Source, built: Cubin, seconds: float) -> Cubin:
    """Move `built` to `place`, or find that another process was faster and return what it left."""
    major, minor = nvrtc_version()
    build = {
        "kernel": source.kernel,
        "arch": built.arch,
        "options": OPTIONS,
        "nvrtc": f"{major}.{minor}",
        "seconds": round(seconds, 3),
        "cubin_sha256": _sha256(built.data),
        "log_sha256": _sha256(built.log.encode()),
        "entries": {name: asdict(entry) for name, entry in built.report.entries.items()},
        "warnings": built.report.warnings,
    }
    ours = _beside(place)
    try:
        ours.mkdir(parents=True)
        (ours / SPEC_HEADER).write_text(source.header, encoding="utf-8")
        (ours / _CUBIN).write_bytes(built.data)
        (ours / _LOG).write_bytes(built.log.encode())
        (ours / _BUILD).write_text(json.dumps(build, indent=2) + "\n", encoding="utf-8")
        return _publish(ours, place) or built
    finally:
        shutil.rmtree(ours, ignore_errors=True)


def _publish(ours: Path, place: Path) -> Cubin | None:
    """Rename `ours` to `place`, unless a sound entry is there already; what is there in the end."""
    for _ in range(_ATTEMPTS):
        try:
            ours.rename(place)  # refused by the system where a filled folder is in the way
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise
            if (theirs := _read(place)) is not None:
                return theirs
        else:
            return _read(place)
        _set_aside(place)
    return None


def _set_aside(place: Path) -> None:
    """Take a damaged entry out of the way; another process may have done so already."""
    damaged = _beside(place)
    try:
        place.rename(damaged)
    except FileNotFoundError:
        return
    if damaged.is_dir():
        shutil.rmtree(damaged, ignore_errors=True)
    else:
        damaged.unlink()


def _beside(place: Path) -> Path:
    """A name in the same folder that nobody else uses."""
    return place.with_name(f".{place.name}.{uuid.uuid4().hex}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache  # once for each folder and reason
def _say_not_kept(cache_root: Path, reason: str) -> None:
    logging.getLogger(__name__).warning(
        "compiled kernels cannot be cached in %s: %s; set SOLOIST_CACHE to a writable folder",
        cache_root,
        reason,
    )
