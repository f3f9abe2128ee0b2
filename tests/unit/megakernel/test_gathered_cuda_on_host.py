"""What lanes gather for a permuted matrix (`tile/activations.cuh`), compiled by g++."""

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
constexpr u32 kConvertedSteps = 16;
constexpr u32 kStepColumns = {STEP_COLUMNS}, kColumns = {STEPS} * kStepColumns;
"""

REST = r"""
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float __fmaf_rn(float a, float b, float c) { return a * b + c; }
inline float load_exchanged(const float* p) { float x; std::memcpy(&x, p, 4); return x; }
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

MAIN = r"""
#include "tile/activations.cuh"

struct Op {
  struct Format { static constexpr Arithmetic kArithmetic = Arithmetic::kIntegers; };
  static constexpr u32 kTiles = 1, kDepth = 1, kSteps = kColumns / kStepColumns, kTable = 4;
  static constexpr bool kPermuted = true, kPairsSteps = false, kEndsInHalf = false;
};
struct Context {
  u32 warp, lane, queries;
  const float* all;
  struct { u32 converted() const { return 0; } } shared;
  const float* vectors(u64 at) const { return all + at; }
};
alignas(16) static float vectors[8 + kColumns / 2];
alignas(16) static u16 activations[kColumns * kRoomQueries];
static u16* const table = reinterpret_cast<u16*>(vectors + 8);

static u16* value(u32 query, u32 k) {
  return activations + (k / 32 * kRoomQueries + query) * 32 + k % 32;
}
static GlobalOperand<Op> operand_of(u32 warp, u32 lane, u32 queries) {
  return {reinterpret_cast<u8*>(activations), Context{warp, lane, queries, vectors}, 4};
}
static void require(bool fine, u32 line) {
  if (!fine) std::printf("line %u\n", line), std::exit(1);
}
// All 8 are as the table says, or none while a word of one of them is missing.
static void look(const uint4& seen, u32 query, u32 first) {
  u16 halves[8];
  std::memcpy(halves, &seen, 16);
  bool missing = false;
  for (u32 i = 0; i < 8; ++i) {
    u32 word;
    std::memcpy(&word, value(query, table[first + i] & ~1u), 4);
    missing |= word == kSentinel;
  }
  for (u32 i = 0; i < 8; ++i) {
    const u16 wanted = *value(query, table[first + i]);
    require(halves[i] == (missing ? 0xFFFF : wanted), __LINE__);
  }
}
static void look_at_all(u32 queries) {
  for (u32 warp = 0; warp < kConsumerWarps; ++warp)
    for (u32 lane = 0; lane < 32; ++lane) {
      const GlobalOperand<Op> operand = operand_of(warp, lane, queries);
      for (u32 step = 0; step < Op::kSteps; ++step) {
        const u32 first = step * kStepColumns + warp * 64;
        if constexpr (kConverts<Op>) {
          look(operand.gathered.load(step * kStepColumns), 0, first + lane % 8 * 8);
          continue;
        }
        for (u32 part = 0; part < 2; ++part) {
          const uint4 seen = operand.load<true>(step, part);
          if (lane / 4 < queries) look(seen, lane / 4, first + part * 32 + lane % 4 * 8);
          else require(!seen.x && !seen.y && !seen.z && !seen.w, __LINE__);
        }
      }
    }
}

int main() {
  for (u32 k = 0; k < kColumns; ++k) table[k] = k * 601 % kColumns;  // 601 has no divisor in common
  for (u32 q = 0; q < kRoomQueries; ++q)
    for (u32 k = 0; k < kColumns; ++k) *value(q, k) = k * kRoomQueries + q;
  look_at_all(kRoomQueries);
  if (kRoomQueries > 1) look_at_all(3);
  const u32 missing[] = {0, 31, 700};
  for (u32 k : missing) *reinterpret_cast<u32*>(value(0, k & ~1u)) = kSentinel;
  look_at_all(kRoomQueries);
  // Halves that are no numbers come from two words, and together are none that is missing.
  for (u32 k = 0; k < kColumns; ++k) *value(0, k) = k % 2 ? 0xFFFF : 0x1234;
  for (u32 k = 0; k < kColumns; ++k) table[k] = (2 * k + 1) % kColumns;
  require(operand_of(0, 0, 1).gathered.load(0).x == 0x7fffffffu, __LINE__);
}
"""


@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
def test_lanes_gather_what_the_table_names(queries: int, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    files = {
        "ptx/memory.cuh": MEMORY + SPEC + f"constexpr u32 kMostQueries = {queries};\n" + REST,
        "ptx/types.cuh": (CUDA / "ptx/types.cuh").read_text(encoding="utf-8"),
        "sync/wait.cuh": "",
        "tile/formats.cuh": "",
        "tile/activations.cuh": (CUDA / "tile/activations.cuh").read_text(encoding="utf-8"),
        "main.cpp": MAIN,
    }
    for name, text in files.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8")
    program, options = tmp_path / "gather", ["-std=c++17", "-O1", "-w", f"-I{tmp_path}"]
    made = subprocess.run(
        [compiler, *options, tmp_path / "main.cpp", "-o", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
