"""`tile/activations.cuh` in a program for the host, compiled by g++, which looks at it itself."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from soloist.megakernel.limits import CONSUMER_WARPS, MAX_QUERIES
from soloist.megakernel.tile import STEP_COLUMNS
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

STEPS = 3

SPEC = f"""
constexpr u32 kMaxQueries = {MAX_QUERIES}, kConsumerWarps = {CONSUMER_WARPS}, kMostChains = 4;
constexpr u32 kLoadedSteps = 4, kConvertedSteps = 16;
constexpr u32 kStepColumns = {STEP_COLUMNS}, kColumns = {STEPS} * kStepColumns;
constexpr bool kMovesRegisters = true;
"""

REST = r"""
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float __fmaf_rn(float a, float b, float c) { return a * b + c; }
inline float load_exchanged(const float* p) { float x; std::memcpy(&x, p, 4); return x; }
template <u32 kSecond, u32 kThird, u32 kFourth>
void load_exchanged_if(bool loads, const u8* from, uint4& a, uint4& b, uint4& c, uint4& d) {
  if (!loads) return;
  std::memcpy(&a, from, 16), std::memcpy(&b, from + kSecond, 16);
  std::memcpy(&c, from + kThird, 16), std::memcpy(&d, from + kFourth, 16);
}
template <class T> T __ldg(const T* p) { return *p; }
inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 made = 0;
  for (u32 i = 0; i < 4; ++i) made |= (bytes >> (places >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return made;
}
constexpr u32 kSentinel = 0xffffffffu;
inline u32 present(u32 word) { return word == kSentinel ? 0x7fffffffu : word; }
inline bool is_present(u32 x) { return x != kSentinel; }
inline bool is_present(uint4) { return true; }
inline float sentinel_sum(uint4, float x) { return x; }
inline bool __all_sync(u32, bool x) { return x; }
enum class Arithmetic : u32 { kPlain, kScaled, kIntegers, kSuperBlocks };
"""


def run(main: str, queries: int, folder: Path, more: str = "") -> None:
    """Compile and run it.

    Args:
        main: the program's text; it says what is wrong, and returns something else than 0 then.
        queries: of the build.
        folder: for its files.
        more: what the kernel's text also finds in `ptx/memory.cuh`.
    """
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    queried = f"constexpr u32 kMostQueries = {queries};\n"
    files = {
        "ptx/memory.cuh": MEMORY + SPEC + queried + REST + more,
        "ptx/types.cuh": (CUDA / "ptx/types.cuh").read_text(encoding="utf-8"),
        "sync/wait.cuh": "",
        "tile/formats.cuh": "",
        "tile/activations.cuh": (CUDA / "tile/activations.cuh").read_text(encoding="utf-8"),
        "main.cpp": main,
    }
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8")
    program, options = folder / "main", ["-std=c++17", "-O1", "-w", f"-I{folder}"]
    made = subprocess.run(
        [compiler, *options, folder / "main.cpp", "-o", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
