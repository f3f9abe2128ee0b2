"""The watchdog of `sync/wait.cuh`, compiled by g++: what it calls stuck, on the test's clock."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from soloist.megakernel.abi import FAULT, WHERE, enumeration
from soloist.megakernel.program import PHASES
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

SPEC = r"""
#pragma once
struct Model { static constexpr unsigned kRingSlots = 4; };
constexpr unsigned kPeers = 1, kAblation = 0, kStuckNs = 2000000000;
constexpr unsigned long long kMaskNs = 60000000000ull;
constexpr bool kSamples = true, kRacecheck = false;
"""

# Seconds pass when the watchdog asks for the time; at one of them a consumer goes on.
REST = r"""
inline float __fmaf_rn(float a, float b, float c) { return a * b + c; }
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline u32 atomicExch(u32* p, u32 v) { u32 old = *p; *p = v; return old; }
inline void __threadfence_system() {}
inline u32 sm_id() { return 0; }
static struct { u32 x; } blockIdx;
inline void store_host(u32* p, u32 v) { *p = v; }
inline void store_host_release(u32* p, u32 v) { *p = v; }
inline bool mbarrier_test(u32, u32) { return true; }
struct Stuck {};
[[noreturn]] inline void trap() { throw Stuck(); }
void tick();
static u64 now_s;
inline u64 clock_ns() {
  ++now_s;
  tick();
  return now_s * 1000000000;
}
static u64 end_s;
inline bool mbarrier_try_wait(u32, u32, u32) { return now_s >= end_s; }
"""

MAIN = r"""
#include "sync/wait.cuh"

static Where where;
static u64 change_s;
static u32 next_phase;
void tick() {
  if (now_s == change_s) where.phase = next_phase;
}

// phase, second at which it changes, to which one, second of the end
int main(int, char** given) {
  where.phase = std::atoi(given[1]);
  change_s = std::atoi(given[2]);
  next_phase = std::atoi(given[3]);
  end_s = std::atoi(given[4]);
  Fault fault{};
  try {
    watch<Model>(&where, &fault, 0, 0, 0, [] { return 0u; });
  } catch (const Stuck&) {
    std::printf("stuck in %u after %d s\n", fault.where.phase, static_cast<int>(now_s));
    return fault.code == 1 ? 0 : 1;
  }
  std::printf("ended\n");
}
"""

NAMES = [phase.name for phase in PHASES]
CHOOSE, MASK = NAMES.index("choose"), NAMES.index("mask")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Runs the watchdog: (phase, second of a change, to which, second of the end) → its word."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the watchdog for the host")
    folder: Path = tmp_path_factory.mktemp("watch")
    source = (CUDA / "sync/wait.cuh").read_text(encoding="utf-8")
    assert 'asm volatile("trap;")' in source
    shared = "\n".join([enumeration("Phase", NAMES), WHERE.cuda, FAULT.cuda, ""])
    files = {
        "spec.cuh": SPEC + shared,
        "sync/wait.cuh": source.replace('asm volatile("trap;")', "trap()"),
        "ptx/memory.cuh": MEMORY + REST,
        "ptx/mbarrier.cuh": "#pragma once\n",
        "ptx/types.cuh": (CUDA / "ptx/types.cuh").read_text(encoding="utf-8"),
        "main.cpp": MAIN,
    }
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8")
    program = folder / "watch"
    made = subprocess.run(
        [compiler, "-std=c++17", "-O1", "-w", f"-I{folder}", folder / "main.cpp", "-o", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr

    def run(*given: int) -> str:
        arguments = [str(program), *map(str, given)]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()

    return run


def test_who_gets_nowhere_is_stuck(watched) -> None:
    assert watched(CHOOSE, 0, CHOOSE, 100).startswith(f"stuck in {CHOOSE} after")


def test_who_goes_on_is_not(watched) -> None:
    assert watched(CHOOSE - 1, 3, CHOOSE, 5) == "ended"


def test_a_mask_may_take_a_minute(watched) -> None:
    assert watched(MASK, 0, MASK, 50) == "ended"
    assert watched(MASK, 0, MASK, 100).startswith(f"stuck in {MASK} after 6")


@pytest.mark.parametrize("second", range(3, 12))
def test_who_has_just_waited_for_a_mask_is_not_stuck(watched, second: int) -> None:
    """Whenever the mask comes, between any two of the watchdog's looks."""
    assert watched(MASK, second, CHOOSE, second + 2) == "ended"
