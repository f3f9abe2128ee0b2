"""The kernels by which ranks sum and wait in prefill, compiled by g++ and run in random order.

Every rank has a queue of kernels, as its GPU would. Between two sums a rank writes its parts from
the norms that it finds, so that a rank which does not wait, or waits for the wrong thing, shows.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import soloist
from soloist.model.dtype import Dtype
from soloist.prefill.header import header
from unit.prefill.models import GQA, model

CUDA = Path(soloist.__file__).parent / "cuda"
ROWS, DEADLOCK = 13, -1.0

STUBS = r"""
#include <ucontext.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(n)
#define __grid_constant__
#define __restrict__
#include "ptx/types.cuh"
#include "spec.cuh"
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
struct Index { u32 x; };
static Index threadIdx, blockIdx, gridDim;
inline float4 __ldg(const float4* p) { return *p; }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline u32 pack_pair(float low, float high) {
  const auto half = [](float x) {
    u32 b;
    std::memcpy(&b, &x, 4);
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
  };
  return half(low) | half(high) << 16;
}
inline u64 clock_ns() { return 0; }
inline void __threadfence_system() {}
inline void store_host(u32* p, u32 v) { *p = v; }
inline void store_host_release(u32* p, u32 v) { *p = v; }
inline void store_to_peer(u32* p, u32 v) { *p = v; }
inline void store_to_peer(uint2* p, uint2 v) { *p = v; }
inline float4 load_from_peers(const float4* p) { return *p; }
using Four = float4;  // products are fp32 here
inline float4 widened(float4 x) { return x; }
inline float4 sum(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
inline float4 times(float4 a, float b, float4 c) {
  return {a.x * b * c.x, a.y * b * c.y, a.z * b * c.z, a.w * b * c.w};
}
inline uint2 packed(float4 x) { return {pack_pair(x.x, x.y), pack_pair(x.z, x.w)}; }
inline float squares_of(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }
inline u32 atomicAdd(u32* p, u32 v) { const u32 old = *p; *p += v; return old; }
u32 acquire_from_peers(const u32* p);
void __syncthreads();
float block_total(float x);
"""

HARNESS = r"""
enum State { kReady, kAtBlock, kEnded };
struct Thread {
  ucontext_t context;
  State state;
  char stack[16 * 1024];
};
enum Kind { kProduct, kTell, kSumNorm, kAwait };
struct Kernel {
  Kind kind;
  bool has_parts, last;
};
constexpr u32 kRow = kHidden / 4, kExchanges = 9;
struct Rank {
  std::vector<Kernel> queue;
  u32 kernel, block, blocks;
  Meeting meeting;
  float4 parts[kRows * kRow], residual[kRows * kRow], row_part[kRow];
  uint2 normed[kRows * kRow], row_norm[kRow];
  u32 stuck[2];
  float sums[kThreads];
};
static Rank ranks[kRanks];
static Thread threads[kRanks][kThreads];
static ucontext_t scheduler;
static u32 current, random_state;
static float4 weight[kRow], bias[kRow];
static const i32 last_row = kRows - 2;

static u32 next_random() { return (random_state = random_state * 1664525u + 1013904223u) >> 8; }
static void pause(State state) {
  Thread& thread = threads[current][threadIdx.x];
  thread.state = state;
  swapcontext(&thread.context, &scheduler);
}
u32 acquire_from_peers(const u32* p) { pause(kReady); return *p; }
void __syncthreads() { pause(kAtBlock); }
float block_total(float x) {
  ranks[current].sums[threadIdx.x] = x;
  __syncthreads();
  float total = 0.0f;
  for (float sum : ranks[current].sums) total += sum;
  __syncthreads();
  return total;
}

static float half(u32 bits) { bits <<= 16; float x; std::memcpy(&x, &bits, 4); return x; }
// A rank's parts, from norms.
static float4 part_of(u32 rank, uint2 norm, u32 i) {
  const float f = 0.25f * static_cast<float>(rank + 1), g = 0.01f * static_cast<float>(i % 7);
  const float x = half(norm.x & 0xFFFF), y = half(norm.x >> 16), z = half(norm.y & 0xFFFF);
  return make_float4(x * f + g, y * f - g, z * f, g);
}
static Peers peers_of(u32 rank, bool last) {
  Peers peers;
  for (u32 r = 0; r < kRanks; ++r) {
    peers.ranks.meetings[r] = &ranks[r].meeting;
    peers.parts[r] = last ? ranks[r].row_part : ranks[r].parts;
    peers.normed[r] = last ? ranks[r].row_norm : ranks[r].normed;
  }
  peers.ranks.stuck = ranks[rank].stuck;
  peers.ranks.rank = rank;
  return peers;
}
static u32 first_row(u32 rank) { return kRows * rank / kRanks; }

static void body() {
  Rank& own = ranks[current];
  const Kernel kernel = own.queue[own.kernel];
  const Peers peers = peers_of(current, kernel.last);
  const u32 first = first_row(current), rows = first_row(current + 1) - first;
  if (kernel.kind == kSumNorm) {
    const i32* last = kernel.last ? &last_row : nullptr;
    sum_norm(peers, own.residual, bias, weight, last, kernel.has_parts, first, rows);
  } else if (threadIdx.x == 0) {
    if (kernel.kind == kTell) tell(peers);
    else if (kernel.kind == kAwait) await(peers);
    else if (kernel.last)
      for (u32 i = 0; i < kRow; ++i)
        own.row_part[i] = part_of(current, own.normed[last_row * kRow + i], i);
    else
      for (u32 i = 0; i < kRows * kRow; ++i) own.parts[i] = part_of(current, own.normed[i], i);
  }
  pause(kEnded);
}
static void start_block() {
  Rank& own = ranks[current];
  for (Thread& thread : threads[current]) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack;
    thread.context.uc_stack.ss_size = sizeof thread.stack;
    thread.context.uc_link = &scheduler;
    thread.state = kReady;
    makecontext(&thread.context, body, 0);
  }
}
static void start_kernel() {
  Rank& own = ranks[current];
  const Kernel& kernel = own.queue[own.kernel];
  const u32 rows = first_row(current + 1) - first_row(current);
  own.block = 0;
  own.blocks = kernel.kind == kSumNorm && !kernel.last && rows > 1 ? rows : 1;
  start_block();
}
// Of the current rank: release its threads, or go on to its next block or kernel. Whether anything
// is left to do.
static bool advance() {
  Rank& own = ranks[current];
  if (own.kernel == own.queue.size()) return false;
  u32 waiting = 0, ended = 0;
  for (Thread& thread : threads[current]) {
    waiting += thread.state == kAtBlock;
    ended += thread.state == kEnded;
  }
  if (waiting == kThreads) for (Thread& thread : threads[current]) thread.state = kReady;
  if (ended < kThreads) return true;
  if (++own.block < own.blocks) {
    start_block();
  } else {
    if (++own.kernel == own.queue.size()) return false;
    start_kernel();
  }
  return true;
}

// The largest difference from the same passes one step after the other; -1 where ranks wait
// forever, -2 where they do not agree in every bit.
extern "C" float run(u32 seed) {
  random_state = seed;
  const auto value = [] { return static_cast<float>(next_random() % 2001) / 1000.0f - 1.0f; };
  static float4 wanted[kRows * kRow], row[kRow];
  static uint2 norms[kRows * kRow];
  std::memset(static_cast<void*>(norms), 0, sizeof norms);
  for (u32 i = 0; i < kRow; ++i) {
    weight[i] = make_float4(value() + 1.5f, value() + 1.5f, 1.0f, 1.0f);
    bias[i] = make_float4(value(), value(), value(), value());
  }
  for (float4& x : wanted) x = make_float4(value(), value(), value(), value());
  for (u32 r = 0; r < kRanks; ++r) {
    ranks[r] = Rank{};
    const u32 first = first_row(r) * kRow, end = first_row(r + 1) * kRow;
    for (u32 i = first; i < end; ++i) ranks[r].residual[i - first] = wanted[i];
    for (u32 e = 0; e < kExchanges; ++e) {
      const bool has_parts = e % 3 > 0, last = e + 1 == kExchanges;
      if (has_parts) ranks[r].queue.push_back({kProduct, false, last});
      ranks[r].queue.push_back({kTell, false, last});
      ranks[r].queue.push_back({kSumNorm, has_parts, last});
      ranks[r].queue.push_back({kAwait, false, last});
    }
    current = r;
    start_kernel();
  }
  for (u32 e = 0; e < kExchanges; ++e) {
    const bool last = e + 1 == kExchanges;
    for (u32 t = last ? last_row : 0; t <= static_cast<u32>(last ? last_row : kRows - 1); ++t) {
      float squares = 0.0f;
      for (u32 i = 0; i < kRow; ++i) {
        float4& x = wanted[t * kRow + i];
        if (e % 3 > 0) {
          const u32 at = last ? i : t * kRow + i;
          float4 all = part_of(0, norms[t * kRow + i], at);
          for (u32 r = 1; r < kRanks; ++r) all = sum(all, part_of(r, norms[t * kRow + i], at));
          x = sum(x, sum(all, bias[i]));
        }
        squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
      }
      const float scale = __frsqrt_rn(squares / kHidden + kEpsilon);
      for (u32 i = 0; i < kRow; ++i) {
        const float4 x = wanted[t * kRow + i], w = weight[i];
        const uint2 norm = make_uint2(pack_pair(x.x * scale * w.x, x.y * scale * w.y),
                                      pack_pair(x.z * scale * w.z, x.w * scale * w.w));
        if (!last) norms[t * kRow + i] = norm;
        row[i] = x;
      }
    }
  }
  u32 idle = 0;
  for (u32 left = kRanks; left; ) {
    if (++idle > 20000000) return -1.0f;
    current = next_random() % kRanks;
    // A burst of one rank's threads, so that ranks are far apart at times.
    const Rank& own = ranks[current];
    for (u32 n = next_random() % 3000; n && own.kernel < own.queue.size(); --n) {
      threadIdx.x = next_random() % kThreads;
      blockIdx.x = own.block;
      gridDim.x = own.blocks;
      Thread& thread = threads[current][threadIdx.x];
      if (thread.state == kReady) swapcontext(&scheduler, &thread.context);
      else if (next_random() % 8 == 0 && !advance()) --left;
    }
  }
  float worst = 0.0f;
  const auto compare = [&](float a, float b) { worst = std::fmax(worst, std::fabs(a - b)); };
  for (u32 r = 0; r < kRanks; ++r) {
    if (std::memcmp(ranks[r].normed, ranks[0].normed, sizeof ranks[r].normed)) return -2.0f;
    if (std::memcmp(ranks[r].row_norm, ranks[0].row_norm, sizeof ranks[r].row_norm)) return -2.0f;
    for (u32 t = first_row(r); t < first_row(r + 1); ++t)
      for (u32 i = 0; i < kRow; ++i) {
        const float4 a = ranks[r].residual[(t - first_row(r)) * kRow + i], b = wanted[t * kRow + i];
        compare(a.x, b.x), compare(a.y, b.y), compare(a.z, b.z), compare(a.w, b.w);
      }
  }
  return worst;
}
"""


@pytest.fixture(scope="module", params=[2, 3, 8])
def run(request, tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile CUDA sources for the host")
    folder = tmp_path_factory.mktemp("ranks")
    text = (CUDA / "kernels" / "prefill.cu").read_text()
    part = text[text.index("struct Peers") : text.index("// Lanes that share a row")]
    meeting = (CUDA / "sync" / "meeting.cuh").read_text()
    part = re.sub(r"^#.*$", "", meeting, flags=re.MULTILINE) + part
    part = part.replace('asm volatile("trap;");', "std::abort();")
    spec = header(model(GQA), Dtype.BF16, request.param).replace(
        "constexpr unsigned kThreads = 256u;", "constexpr unsigned kThreads = 32u;"
    )
    assert re.search(r"kThreads = 32u", spec)
    (folder / "spec.cuh").write_text(spec + f"constexpr unsigned kRows = {ROWS}u;\n")
    (folder / "harness.cc").write_text(STUBS + part + HARNESS)
    built = folder / "ranks.so"
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-Wno-unused", "-fPIC", "-shared"]
    includes = [f"-I{folder}", f"-I{CUDA}"]
    subprocess.run([*command, *includes, "-o", built, folder / "harness.cc"], check=True)
    library = ctypes.CDLL(str(built))
    library.run.restype = ctypes.c_float
    return library.run


@pytest.mark.parametrize("seed", range(4))
def test_ranks_sum_the_same_bits_however_far_apart_they_run(run, seed: int) -> None:
    difference = run(seed)
    assert difference != DEADLOCK, "ranks wait for each other forever"
    assert 0 <= difference < 1e-3
