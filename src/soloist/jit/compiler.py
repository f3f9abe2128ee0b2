"""CUDA C++ to machine code with NVRTC, which needs no GPU, and what ptxas reports about the result.

Only this package's files are visible to the compiler: no toolkit headers, no folder of the machine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from soloist.errors import CompileError
from soloist.jit.bindings import nvrtc
from soloist.jit.source import Source

OPTIONS = (
    "--std=c++17",
    "--generate-line-info",
    "--ptxas-options=-v",
    "--no-source-include",  # or the working directory is searched for headers
    "--device-as-default-execution-space",  # lambdas belong to the device
    "--no-cache",  # what comes from the compiler's own cache has no resource report
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one entry function takes, the functions that it calls included.

    Attributes:
        registers: for each thread.
        stack_bytes: local memory of a thread: arrays indexed at run time, spilled registers, calls.
        spill_store_bytes: registers written to local memory for want of room, each thread.
        spill_load_bytes: read back.
        static_shared_bytes: shared memory of a block, without what is asked for at launch.
    """

    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a build log says: resources by entry function, and lines that warn."""

    entries: Mapping[str, Resources]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code for one architecture."""

    data: bytes
    report: Report
    log: str
    arch: str


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the compiler. Raises CudaMissing."""
    library = nvrtc()
    _, major, minor = library.nvrtcVersion()
    return int(major), int(minor)


def compile_source(source: Source, arch: str) -> Cubin:
    """Compile for `arch`, such as 'sm_90a'. Raises CompileError, BadInclude, CudaMissing."""
    library = nvrtc()
    headers = source.headers
    result, program = library.nvrtcCreateProgram(
        source.text.encode(),
        source.kernel.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    what = f"{source.kernel} for {arch}"
    _check(library, result, what, "")
    try:
        options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={arch}")]
        (result,) = library.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(library, program, "ProgramLog", what).rstrip(b"\0\n ").decode(errors="replace")
        _check(library, result, what, log)
        data = _fetch(library, program, "CUBIN", what)
    finally:
        library.nvrtcDestroyProgram(program)
    return Cubin(data, parse_report(log), log, arch)


def require_clean(
    cubin: Cubin, entry: str, dynamic_smem_bytes: int, smem_limit_bytes: int
) -> Resources:
    """Refuse code that would run, but not at full speed or not at all; return its resources.

    Raises CompileError for any warning, spill or stack frame, and where static and dynamic shared
    memory together exceed `smem_limit_bytes`.
    """
    what = f"entry function '{entry}' for {cubin.arch}"
    resources = cubin.report.entries.get(entry)
    if resources is None:
        raise CompileError(
            what, f"absent (there are: {', '.join(cubin.report.entries)})", cubin.log
        )
    shared_bytes = resources.static_shared_bytes + dynamic_smem_bytes
    faults = list(cubin.report.warnings)
    if resources.spill_store_bytes or resources.spill_load_bytes:
        faults.append(
            f"{resources.spill_store_bytes} bytes of registers are spilled and "
            f"{resources.spill_load_bytes} read back (allowed: 0)"
        )
    if resources.stack_bytes:
        faults.append(f"a thread needs {resources.stack_bytes} bytes of stack (allowed: 0)")
    if shared_bytes > smem_limit_bytes:
        faults.append(
            f"a block needs {shared_bytes:,} bytes of shared memory, "
            f"{resources.static_shared_bytes:,} of them static (allowed: {smem_limit_bytes:,})"
        )
    if faults:
        raise CompileError(what, "; ".join(faults), cubin.log)
    return resources


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"\bUsed (\d+) registers\b")
_STACK = re.compile(r"\b(\d+) bytes cumulative stack size\b")
_SHARED = re.compile(r"\b(\d+)(?:\+\d+)? bytes smem\b")
# 'kernels/decode.cu(2): warning #177-D: …', 'ptxas warning : …', and what ptxas calls information
# although it costs speed: '(C7510) Potential Performance Loss: wgmma.mma_async … serialized …'.
_WARNING = re.compile(
    r"^(?:[^\s(]+\(\d+\): |\w+:?\s+)?warning\b|\(C75\d\d\)|Potential Performance Loss"
    r"|\bwgmma\b.*\bserialized\b",
    re.IGNORECASE,
)


def parse_report(log: str) -> Report:
    """Read the log of a build made with `--ptxas-options=-v`.

    Functions that were not inlined are listed after the entry function that they were compiled with
    and count for it. A report in another form than expected is itself a warning.
    """
    entries: dict[str, Resources] = {}
    entry = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
            entries[entry] = Resources()
        elif entry:
            entries[entry] = _with_line(entries[entry], line)
    warnings = [line.strip() for line in log.splitlines() if _WARNING.search(line)]
    framed = len(_FRAME.findall(log)) >= len(entries)
    if not (entries and framed and all(entry.registers for entry in entries.values())):
        warnings.append("the compiler's resource report cannot be read")
    return Report(entries, tuple(warnings))


def _with_line(seen: Resources, line: str) -> Resources:
    """`seen` and what `line` adds to it."""
    if match := _FRAME.search(line):
        stack, stores, loads = map(int, match.groups())
        return replace(
            seen,
            stack_bytes=max(seen.stack_bytes, stack),
            spill_store_bytes=seen.spill_store_bytes + stores,
            spill_load_bytes=seen.spill_load_bytes + loads,
        )
    if match := _USED.search(line):
        stack_match, shared_match = _STACK.search(line), _SHARED.search(line)
        return replace(
            seen,
            registers=int(match[1]),
            stack_bytes=max(seen.stack_bytes, int(stack_match[1]) if stack_match else 0),
            static_shared_bytes=int(shared_match[1]) if shared_match else 0,
        )
    return seen


def _fetch(library: Any, program: Any, what: str, kernel: str) -> bytes:  # noqa: ANN401 - no types
    """One of NVRTC's results: its size, then its bytes."""
    result, size = getattr(library, f"nvrtcGet{what}Size")(program)
    _check(library, result, kernel, "")
    content = bytes(size)  # the bindings write into it
    (result,) = getattr(library, f"nvrtcGet{what}")(program, content)
    _check(library, result, kernel, "")
    return content


def _check(library: Any, result: Any, what: str, log: str) -> None:  # noqa: ANN401 - no types
    if int(result):
        _, text = library.nvrtcGetErrorString(result)
        raise CompileError(what, text.decode(), log)
