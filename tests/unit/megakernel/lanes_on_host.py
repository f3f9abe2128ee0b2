"""The lanes of a warp, or of a block's warps, as threads of the host that take turns.

For tests that compile the kernel's text with a C++ compiler of the machine.
"""

import ctypes

from torch import Tensor

LANES = r"""
#include <functional>
struct uint2 { u32 x, y; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { u32 x; };
static Index threadIdx;
alignas(128) static u8 shared[8 << 20];
constexpr u32 kConvertedAt = 7 << 20;

// Lanes leave what they have, and go on once all of the warp have done so.
struct Left { u32 words[6]; };
struct Lane {
  ucontext_t context;
  bool ended;
  u32 meetings;
  char stack[256 * 1024];
};
static Lane lanes[256];  // of a block
static ucontext_t scheduler;
static Left left[8][2][32];
inline const Left* meet(const Left& mine) {
  const u32 thread = threadIdx.x, place = lanes[thread].meetings++ % 2;
  left[thread / 32][place][thread % 32] = mine;
  swapcontext(&lanes[thread].context, &scheduler);
  return left[thread / 32][place];
}
// A barrier of the block opens when all lanes wait for it that have not ended.
static u32 waiting, opened;
inline void meet_block() {
  const u32 thread = threadIdx.x, before = opened;
  for (++waiting; opened == before;) swapcontext(&lanes[thread].context, &scheduler);
}
inline u32 __shfl_sync(u32, u32 x, u32 from) { return meet({{x}})[from % 32].words[0]; }
inline float __shfl_sync(u32 all, float x, u32 from) {
  return bits_to<float>(__shfl_sync(all, bits_to<u32>(x), from));
}
inline u32 __shfl_xor_sync(u32, u32 x, u32 mask) {
  const u32 lane = threadIdx.x % 32;
  return meet({{x}})[lane ^ mask].words[0];
}
inline float __shfl_xor_sync(u32 all, float x, u32 mask) {
  return bits_to<float>(__shfl_xor_sync(all, bits_to<u32>(x), mask));
}
inline bool __all_sync(u32, bool x) {
  const Left* all = meet({{x}});
  for (u32 i = 0; i < 32; ++i) if (!all[i].words[0]) return false;
  return true;
}
inline bool __any_sync(u32, bool x) { return !__all_sync(0, !x); }
inline void __syncwarp() { meet({}); }

template <class T> T load_from(u32 at) { T x; std::memcpy(&x, shared + at, sizeof(T)); return x; }
inline uint4 load_shared(u32 at) { return load_from<uint4>(at); }
inline void load_shared_if(bool wanted, uint4& v, u32 at) { if (wanted) v = load_shared(at); }
inline uint2 load_shared2(u32 at) { return load_from<uint2>(at); }
inline u32 load_shared1(u32 at) { return load_from<u32>(at); }
inline u32 load_shared_half(u32 at) { return load_from<u16>(at); }
inline u32 load_shared_byte(u32 at) { return shared[at]; }
inline void store_shared(u32 at, uint4 x) { std::memcpy(shared + at, &x, 16); }
inline void store_shared1(u32 at, u32 x) { std::memcpy(shared + at, &x, 4); }
inline void store_shared2(u32 at, u32 x, u32 y) { store_shared1(at, x), store_shared1(at + 4, y); }
inline float load_exchanged(const float* p) { float x; std::memcpy(&x, p, 4); return x; }
template <u32 kSecond, u32 kThird, u32 kFourth>
void load_exchanged_if(bool loads, const u8* from, uint4& a, uint4& b, uint4& c, uint4& d) {
  if (!loads) return;
  std::memcpy(&a, from, 16), std::memcpy(&b, from + kSecond, 16);
  std::memcpy(&c, from + kThird, 16), std::memcpy(&d, from + kFourth, 16);
}
template <class T> T __ldg(const T* p) { return *p; }
template <class T> void at_hand(T&) {}

inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline u32 __vmaxu2(u32 a, u32 b) {
  return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16;
}
template <u32 kFlipped, u32 kKept> inline u32 flip_and_keep(u32 x) {
  return (x ^ kFlipped) & kKept;
}
inline u32 larger_magnitudes(u32 a, u32 b) {
  return __vmaxu2(a & 0x7FFF7FFF, b & 0x7FFF7FFF);
}
inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 made = 0;
  for (u32 i = 0; i < 4; ++i) made |= (bytes >> (places >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return made;
}

// Lanes `first` ... `end` - 1 of a block do something, each for itself, until all have ended. They
// take turns in their order, or the last one first.
static bool backwards;
static std::function<void(u32)> lane_does;
static void start_lane() {
  lane_does(threadIdx.x);
  lanes[threadIdx.x].ended = true;
  swapcontext(&lanes[threadIdx.x].context, &scheduler);
}
inline void run_lanes(u32 first, u32 end, std::function<void(u32)> does) {
  lane_does = does;
  for (u32 i = first; i < end; ++i) {
    getcontext(&lanes[i].context);
    lanes[i].context.uc_stack.ss_sp = lanes[i].stack;
    lanes[i].context.uc_stack.ss_size = sizeof lanes[i].stack;
    makecontext(&lanes[i].context, start_lane, 0);
    lanes[i].ended = false, lanes[i].meetings = 0;
  }
  for (u32 running = 1; running;) {
    running = 0;
    for (u32 turn = first; turn < end; ++turn) {
      const u32 i = backwards ? first + end - 1 - turn : turn;
      if (lanes[i].ended) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &lanes[i].context);
      running += !lanes[i].ended;
    }
    if (waiting && waiting == running) waiting = 0, ++opened;
  }
}
inline void run_warp(u32 warp, std::function<void(u32)> does) {
  run_lanes(warp * 32, warp * 32 + 32, [&](u32 thread) { does(thread % 32); });
}
"""


def place(x: Tensor) -> ctypes.c_void_p:
    """Where its values lie."""
    return ctypes.c_void_p(x.data_ptr())
