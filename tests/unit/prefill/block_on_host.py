"""Kernels whose blocks copy and multiply on their own, compiled by g++.

A block's threads are coroutines in random order. Copies land at random times, and products are made
as late as the kernel's waits allow: what is written too early, or read too soon, shows.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import soloist

CUDA = Path(soloist.__file__).parent / "cuda"
_OPTIONS = ("-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-fno-gnu-unique")

# What every kernel needs; what it copies and multiplies with comes behind it.
_WORLD = r"""
#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#include "ptx/types.cuh"
#include "spec.cuh"
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { u32 x; };
static Index threadIdx, blockIdx, gridDim;
template <class To, class From> To bits_to(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline u32 __float_as_uint(float x) { return bits_to<u32>(x); }
inline float __uint_as_float(u32 x) { return bits_to<float>(x); }
inline float __int_as_float(i32 x) { return bits_to<float>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline u32 __popc(u32 x) { return __builtin_popcount(x); }
template <class T> T __ldg(const T* p) { T x; std::memcpy(&x, p, sizeof x); return x; }
inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 made = 0;
  for (u32 i = 0; i < 4; ++i) made |= (bytes >> (places >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return made;
}

constexpr u32 kRoom = 240 * 1024, kMost = 1024;
alignas(1024) static u8 shared[kRoom];
static u64 barriers[128];
constexpr u32 kBarriersAt = 1u << 20;
struct Thread {
  ucontext_t context;
  bool ended;
  char stack[48 * 1024];
};
static Thread threads[kMost];
static ucontext_t scheduler;
static u32 random_state, idle;
static u32 next_random() { return (random_state = random_state * 1664525u + 1013904223u) >> 8; }
inline void pause() { swapcontext(&threads[threadIdx.x].context, &scheduler); }

struct Meeting { u32 count = 0, round = 0; };
static u32 block_threads;
static Meeting of_warps[kMost / 32], of_groups[3], of_block, named[16];
inline void meet(Meeting& at, u32 count) {
  const u32 round = at.round;
  if (++at.count == count) at.count = 0, ++at.round, idle = 0;
  while (at.round == round) pause();
}
inline void __syncwarp() { meet(of_warps[threadIdx.x / 32], 32); }
inline void __syncthreads() { meet(of_block, block_threads); }
inline void meet_at(u32 barrier, u32 count) { meet(named[barrier], count); }
inline void await_turn(u32 barrier, u32 count) { meet(named[barrier], count); }
inline void give_turn(u32 barrier, u32 count) {
  Meeting& at = named[barrier];
  if (++at.count == count) at.count = 0, ++at.round, idle = 0;
}
inline u32 kept(u32 x) { return x; }
static u32 left[kMost];
inline u32 __shfl_sync(u32, u32 x, u32 from) {
  left[threadIdx.x] = x;
  __syncwarp();
  const u32 found = left[threadIdx.x / 32 * 32 + from];
  __syncwarp();
  return found;
}
inline u32 __shfl_up_sync(u32, u32 x, u32 by) {
  left[threadIdx.x] = x;
  __syncwarp();
  const u32 found = left[threadIdx.x - (threadIdx.x % 32 >= by ? by : 0)];
  __syncwarp();
  return found;
}
inline u32 __shfl_xor_sync(u32, u32 x, u32 by) {
  return __shfl_sync(~0u, x, threadIdx.x % 32 ^ by);
}
template <class Fold> u32 folded(u32 x, const Fold& fold) {
  left[threadIdx.x] = x;
  __syncwarp();
  u32 all = x;
  for (u32 i = 0; i < 32; ++i) all = fold(all, left[threadIdx.x / 32 * 32 + i]);
  __syncwarp();
  return all;
}
inline u32 __reduce_max_sync(u32, u32 x) {
  return folded(x, [](u32 a, u32 b) { return a > b ? a : b; });
}
inline u32 __reduce_min_sync(u32, u32 x) {
  return folded(x, [](u32 a, u32 b) { return a < b ? a : b; });
}
inline u32 __ballot_sync(u32, bool x) {
  left[threadIdx.x] = x;
  __syncwarp();
  u32 all = 0;
  for (u32 i = 0; i < 32; ++i) all |= left[threadIdx.x / 32 * 32 + i] << i;
  __syncwarp();
  return all;
}

// Barriers of shared memory, and copies that land when the scheduler says so.
struct Barrier { u32 arrivals, missing, phase; i64 bytes; };
static Barrier all_barriers[128];
inline Barrier& barrier_at(u32 at) { return all_barriers[(at - kBarriersAt) / 8]; }
inline void settle(Barrier& b) {
  if (b.missing || b.bytes) return;
  b.missing = b.arrivals, ++b.phase, idle = 0;
}
inline void mbarrier_init(u32 at, u32 arrivals) { barrier_at(at) = {arrivals, arrivals, 0, 0}; }
inline void mbarrier_arrive(u32 at) {
  Barrier& b = barrier_at(at);
  if (!b.missing--) std::abort();
  settle(b);
}
inline void mbarrier_arrive_after(u32, u32 at) { mbarrier_arrive(at); }
inline void mbarrier_expect(u32 at, u32 bytes) {
  barrier_at(at).bytes += bytes;
  mbarrier_arrive(at);
}
inline void wait_or_trap(u32 at, u32 parity) {
  while (barrier_at(at).phase % 2 == parity) pause();
}
inline void publish_barriers() {}
// No other kernel is there.
inline void let_next_begin() {}
inline void await_kernels_before() {}
struct Copy { std::function<void()> land; };
static std::deque<Copy> copies;
inline void land_one() {
  if (copies.empty()) return;
  std::swap(copies[next_random() % copies.size()], copies.back());
  copies.back().land();
  copies.pop_back();
  idle = 0;
}
inline void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
  if (to % 16 || reinterpret_cast<u64>(from) % 16 || bytes % 16 || to + bytes > kRoom) std::abort();
  copies.push_back({[=] {
    std::memcpy(shared + to, from, bytes);
    barrier_at(barrier).bytes -= bytes, settle(barrier_at(barrier));
  }});
}

template <class T> T load_from(u32 at) { T x; std::memcpy(&x, shared + at, sizeof(T)); return x; }
inline u32 shared_address(const void* p) { return p == barriers ? kBarriersAt : 0; }
inline uint4 load_shared(u32 at) { return load_from<uint4>(at); }
inline uint2 load_shared2(u32 at) { return load_from<uint2>(at); }
inline u32 load_shared1(u32 at) { return load_from<u32>(at); }
inline void prefetch_to_l2(const void*) {}
template <class T> T* at_shared(u32 at) { return reinterpret_cast<T*>(shared + at); }
inline void store_shared1(u32 at, u32 x) { std::memcpy(shared + at, &x, 4); }

inline float from_fp16(u16 x) { return static_cast<float>(bits_to<_Float16>(x)); }
inline float from_half(u16 x) {
  return kBf16 ? __uint_as_float(static_cast<u32>(x) << 16) : from_fp16(x);
}
inline float low_half(u32 pair) { return from_half(static_cast<u16>(pair)); }
inline float high_half(u32 pair) { return from_half(static_cast<u16>(pair >> 16)); }
inline u16 to_half(float x) {
  if (!kBf16) return bits_to<u16>(static_cast<_Float16>(x));
  const u32 bits = bits_to<u32>(x);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_pair(float low, float high) { return to_half(low) | to_half(high) << 16; }
inline u32 add_pairs(u32 a, u32 b) {
  return pack_pair(low_half(a) + low_half(b), high_half(a) + high_half(b));
}
inline u32 multiply_pairs(u32 a, u32 b) {
  return pack_pair(low_half(a) * low_half(b), high_half(a) * high_half(b));
}
inline float exp2_fast(float x) { return std::exp2(x); }
template <u32 kCount> void keep_registers() {}
template <u32 kCount> void gain_registers() {}

template <u32 kSlots>
struct SlotState {
  u32 slot = 0, round = 0;
  void next() { if (++slot == kSlots) slot = 0, round ^= 1; }
};

// Runs a block of so many threads; whether all ended, and nothing is under way.
static bool run_block(void (*thread)(), u32 count) {
  block_threads = count;
  std::memset(shared, 0xFF, sizeof shared);
  for (Thread& thread : threads) thread.ended = true;
  for (u32 i = 0; i < count; ++i) {
    getcontext(&threads[i].context);
    threads[i].context.uc_stack.ss_sp = threads[i].stack;
    threads[i].context.uc_stack.ss_size = sizeof threads[i].stack;
    threads[i].ended = false;
    makecontext(&threads[i].context, thread, 0);
  }
  for (Meeting& at : named) at = Meeting{};  // where a turn was given that nobody took
  idle = 0;
  for (bool runs = true; runs;) {
    runs = false;
    if (++idle > 2000) return false;
    const u32 start = next_random() % count;
    for (u32 i = 0; i < count; ++i) {
      threadIdx.x = (start + i) % count;
      if (threads[threadIdx.x].ended) continue;
      runs = true;
      swapcontext(&scheduler, &threads[threadIdx.x].context);
    }
    for (u32 n = next_random() % 8; n; --n) land_one();
  }
  return copies.empty();
}
"""

# Of kernels whose products run on by themselves: behind their own `multiply_oldest`, which does
# those of the oldest group of `issued`.
PRODUCTS_IN_FLIGHT = r"""
template <u32 kInFlight> void wait_for_products() {
  const u32 first = threadIdx.x / 128 * 128;
  Meeting& group = of_groups[threadIdx.x / 128];
  meet(group, 128);
  if (threadIdx.x == first) {
    const auto in_flight = [&] {
      u32 count = 0;
      for (const Issued& one : issued[first]) count += one.commits;
      return count;
    };
    while (in_flight() > kInFlight) multiply_oldest(first);
  }
  meet(group, 128);
}
template <u32 kSums> void take_sums(float (&)[kSums]) {}
"""


def without_shared(text: str) -> str:
    """A kernel without its shared memory and barriers, which are those of the world."""
    text, found = re.subn(r"^ *(extern )?__shared__ .*$", "", text, flags=re.MULTILINE)
    assert found == 2, "one of each"
    return text


# Files of ptx/ without any PTX.
_AS_THEY_ARE = ("ptx/types.cuh", "ptx/e4m3_bits.cuh")


def compiled(
    header: str,
    kernel: str,
    main: str,
    folder: Path,
    *,
    own: str,
    shims: Sequence[str],
    tiles: Sequence[str],
) -> ctypes.CDLL:
    """A library of `main`, which includes the kernel.

    Args:
        header: spec.cuh.
        kernel: text of the kernel.
        main: text that calls it.
        folder: for all files.
        own: the kernel's part of the world.
        shims: files that the world stands for.
        tiles: files of tile/ that are as they are.
    """
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    files = {
        **dict.fromkeys(shims, '#include "world.h"\n'),
        **{name: (CUDA / name).read_text(encoding="utf-8") for name in _AS_THEY_ARE},
        **{f"tile/{n}.cuh": (CUDA / f"tile/{n}.cuh").read_text(encoding="utf-8") for n in tiles},
        "spec.cuh": header, "world.h": _WORLD + own, "kernel.cu": kernel, "main.cpp": main,
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text, encoding="utf-8")
    made = folder / "product.so"
    command = [compiler, *_OPTIONS, f"-I{folder}", folder / "main.cpp", "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(made))
