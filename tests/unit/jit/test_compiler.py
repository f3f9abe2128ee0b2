"""Compiling without a GPU, and what the compiler's report says."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from soloist.errors import BadInclude, CompileError, CudaMissing, DeviceError
from soloist.jit import bindings
from soloist.jit.compiler import (
    Cubin,
    Report,
    Resources,
    compile_source,
    nvrtc_version,
    parse_report,
    require_clean,
)
from unit.jit.small import ARCH, one_file, small_source

compiles = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("nvidia") is None,
    reason="needs cuda-bindings and nvidia-cuda-nvrtc",
)

# As NVRTC 13.0 writes it, with names, numbers and a second line of warnings made up.
LOG = """\
kernels/decode.cu(2): warning #177-D: variable "warning" was declared but never referenced
  extern "C" __global__ void k(float* p) { int warning; }
                                               ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas warning : Value of threads per SM for entry spill is out of range. .minnctapersm is ignored
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'k'
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'spill' for 'sm_90a'
ptxas info    : Function properties for spill
ptxas         .     40 bytes stack frame, 44 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 40 bytes cumulative stack size
ptxas info    : Compile time = 8.303 ms
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 160 bytes cumulative stack size, 2560 bytes \
smem, 360 bytes cmem[0], 16 bytes cmem[2]
ptxas info    : Function properties for _Z1fPfi
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
"""

SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* values) {
  float kept[100];
#pragma unroll
  for (int i = 0; i < 100; i++) kept[i] = values[i * 1024 + threadIdx.x];
  __syncthreads();  // all values are live here
#pragma unroll
  for (int i = 0; i < 100; i++) values[i * 777 + threadIdx.x] = kept[i] * kept[99 - i];
}
"""


def clean(**changed: int) -> Cubin:
    resources = replace(Resources(registers=40, static_shared_bytes=1000), **changed)
    return Cubin(b"", Report({"k": resources}, ()), "the log", ARCH)


def test_the_report_is_read_by_entry_function() -> None:
    report = parse_report(LOG)
    assert report.entries == {
        "spill": Resources(32, 40, 44, 48, 0),
        "k": Resources(168, 160, 8, 4, 2560),  # with the function that it calls
    }


def test_warnings_of_the_compiler_and_of_ptxas_are_collected() -> None:
    first, second, third = parse_report(LOG).warnings
    assert first.startswith("kernels/decode.cu(2): warning #177-D")
    assert second.startswith("ptxas warning")
    assert "(C7510)" in third


@pytest.mark.parametrize("missing", ["bytes stack frame", "Used 168 registers", "Compiling entry"])
def test_a_report_of_another_form_is_a_warning(missing: str) -> None:
    plain = LOG[LOG.index("ptxas info    : Compiling entry function 'k'") :]
    assert parse_report(plain).warnings == ()
    assert parse_report(plain.replace(missing, "?")).warnings == (
        "the compiler's resource report cannot be read",
    )


def test_clean_code_passes_up_to_the_limit_of_shared_memory() -> None:
    assert require_clean(clean(), "k", 9000, 10_000).registers == 40
    with pytest.raises(CompileError, match=r"10,001 bytes .* 1,000 of them static .*10,000"):
        require_clean(clean(), "k", 9001, 10_000)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("spill_store_bytes", "7 bytes of registers are spilled"),
        ("spill_load_bytes", "7 read back"),
        ("stack_bytes", "7 bytes of stack"),
    ],
)
def test_slow_code_is_refused(fault: str, said: str) -> None:
    with pytest.raises(CompileError, match=said) as refused:
        require_clean(clean(**{fault: 7}), "k", 0, 10_000)
    assert "'k' for sm_90a" in str(refused.value)
    assert "\n    the log" in str(refused.value)


def test_a_warning_and_an_absent_entry_are_refused() -> None:
    warned = replace(clean(), report=replace(clean().report, warnings=("ptxas warning : odd",)))
    with pytest.raises(CompileError, match="ptxas warning : odd"):
        require_clean(warned, "k", 0, 10_000)
    with pytest.raises(CompileError, match=r"absent .*: k\)"):
        require_clean(clean(), "other", 0, 10_000)


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_every_architecture_compiles_cleanly(tmp_path: Path, arch: str) -> None:
    cubin = compile_source(small_source(tmp_path), arch)
    assert cubin.data.startswith(b"\x7fELF")
    assert cubin.arch == arch
    resources = require_clean(cubin, "scale", 0, 48 * 1024)
    assert 0 < resources.registers < 32


@compiles
def test_the_same_source_gives_the_same_code_anywhere(tmp_path: Path) -> None:
    here = compile_source(small_source(tmp_path / "here"), ARCH)
    there = compile_source(small_source(tmp_path / "there"), ARCH)
    assert here.data == there.data


@compiles
def test_static_shared_memory_is_reported(tmp_path: Path) -> None:
    text = (
        'extern "C" __global__ void k(int* p) { __shared__ int s[256]; s[threadIdx.x] = *p;\n'
        "  __syncthreads(); *p = s[threadIdx.x ^ 1]; }\n"
    )
    entry = compile_source(one_file(tmp_path, text), ARCH).report.entries["k"]
    assert entry.static_shared_bytes == 1024


@compiles
def test_spills_are_found(tmp_path: Path) -> None:
    cubin = compile_source(one_file(tmp_path, SPILLING), ARCH)
    entry = cubin.report.entries["spilling"]
    assert entry.registers <= 32
    assert entry.spill_store_bytes > 0
    assert entry.spill_load_bytes > 0
    with pytest.raises(CompileError, match="spilled"):
        require_clean(cubin, "spilling", 0, 48 * 1024)


@compiles
def test_an_array_in_local_memory_is_found(tmp_path: Path) -> None:
    text = (
        'extern "C" __global__ void k(int* p, int n) { int a[16];\n'
        "  for (int i = 0; i < n; i++) a[(i * 7) & 15] = p[i];\n  p[0] = a[n & 15]; }\n"
    )
    cubin = compile_source(one_file(tmp_path, text), ARCH)
    with pytest.raises(CompileError, match="64 bytes of stack"):
        require_clean(cubin, "k", 0, 48 * 1024)


@compiles
def test_warnings_are_found(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void k(int* p) { int unused; *p = 1; }\n'
    (warning,) = compile_source(one_file(tmp_path, text), ARCH).report.warnings
    assert warning.startswith("kernels/one.cu(1): warning #177-D")


@compiles
def test_an_error_shows_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as refused:
        compile_source(one_file(tmp_path, "__global__ void k() { nowhere(); }\n"), ARCH)
    text = str(refused.value)
    assert text.startswith("kernels/one.cu for sm_90a: NVRTC_ERROR_COMPILATION\n\n    kernels/one")
    assert 'identifier "nowhere" is undefined' in text
    assert "\n\nhint: " in text
    assert isinstance(refused.value, DeviceError)


@compiles
def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="sm_7: NVRTC_ERROR_INVALID_OPTION"):
        compile_source(small_source(tmp_path), "sm_7")


@compiles
def test_files_of_the_working_directory_are_not_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = tmp_path / "working" / "kernels"
    working.mkdir(parents=True)
    (working / "local.cuh").write_text("// found\n")
    monkeypatch.chdir(working.parent)
    source = one_file(tmp_path / "root", '#define NAME "local.cuh"\n#\\\ninclude NAME\n')
    with pytest.raises((CompileError, BadInclude)):
        compile_source(source, ARCH)


@compiles
def test_the_version_is_one_that_the_project_allows() -> None:
    assert (12, 8) <= nvrtc_version() < (14, 0)


def test_without_the_bindings_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(bindings.importlib, "import_module", absent)
    with pytest.raises(CudaMissing, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
        nvrtc_version()


@compiles
def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unloadable:
        @staticmethod
        def nvrtcVersion() -> None:  # noqa: N802 - NVIDIA's name
            raise RuntimeError("no libnvrtc.so.13")

    monkeypatch.setattr(bindings.importlib, "import_module", lambda _: Unloadable)
    with pytest.raises(
        CudaMissing, match=r"libnvrtc.so.13\n\nhint: install the packages: pip install"
    ):
        nvrtc_version()


def test_importing_the_package_imports_nothing_of_cuda() -> None:
    import subprocess
    import sys

    code = (
        "import sys, soloist.jit.cache, soloist.jit.module;"
        "sys.exit(any(m == 'torch' or m.startswith('cuda') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
