// Bounded waits. A wait that lasts too long writes what it waited for to host memory and traps.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "spec.cuh"

// Host memory; `launch.py` reads it as sixteen words.
struct Fault {
  u32 code;  // 0: none; otherwise 1 + what was waited for
  u32 block, thread;
  u32 unused;
  u32 round[2], layer[2], phase[2];
};

// What a wait is for; the order is that of `WAITS` in launch.py.
enum class Wait : u32 { kOperand, kSquares, kProjected, kPartial, kBest, kFull, kEmpty, kRound, kCleaner };

// Where the block is, for the report only: [0] consumers, [1] producer.
struct Where {
  Fault* fault;
  u32 round[2], layer[2], phase[2];
};
__shared__ Where where;

// The end of the thread, in one piece: a call, or a way back that the compiler sees, would cost the many
// waits of an unrolled loop registers.
template <Wait what>
__device__ __forceinline__ void trap_stuck() {
  asm volatile(
      "{\n"
      ".reg .u64 fault;\n"
      ".reg .u32 block, thread, a, b;\n"
      "ld.shared.u64 fault, [%0];\n"
      "mov.u32 block, %%ctaid.x;\n"
      "mov.u32 thread, %%tid.x;\n"
      "st.global.u32 [fault + 4], block;\n"
      "st.global.u32 [fault + 8], thread;\n"
      "ld.shared.v2.u32 {a, b}, [%0 + 8];\n"
      "st.global.v2.u32 [fault + 16], {a, b};\n"
      "ld.shared.v2.u32 {a, b}, [%0 + 16];\n"
      "st.global.v2.u32 [fault + 24], {a, b};\n"
      "ld.shared.v2.u32 {a, b}, [%0 + 24];\n"
      "st.global.v2.u32 [fault + 32], {a, b};\n"
      "fence.sc.sys;\n"
      "mov.u32 a, %1;\n"
      "st.global.u32 [fault], a;\n"
      "fence.sc.sys;\n"
      "trap;\n"
      "exit;\n"
      "}" ::"r"(shared_address(&where)), "n"(1 + static_cast<u32>(what)) : "memory");
  __builtin_unreachable();
}

// A barrier in shared memory passes the phase of this parity.
// Returns 1, which only the hardware knows.
template <Wait what>
__device__ __forceinline__ u32 wait_barrier(u32 barrier, u32 parity) {
  const u32 done = mbarrier_wait(barrier, parity, kMaxTries);
  if (!done) trap_stuck<what>();
  return done;
}

// Data from other blocks carries its own readiness: memory holds kAbsent in every 32-bit word until the
// word is written. kAbsent is a NaN that no arithmetic produces; `present` keeps data clear of it.
constexpr u32 kAbsent = 0xffffffffu;

__device__ __forceinline__ u32 present(u32 word) { return word == kAbsent ? 0x7fffffffu : word; }
__device__ __forceinline__ u32 present(float x) { return present(__float_as_uint(x)); }
__device__ __forceinline__ bool is_present(u32 x) { return x != kAbsent; }
__device__ __forceinline__ bool is_present(float x) { return __float_as_uint(x) != kAbsent; }
__device__ __forceinline__ bool is_present(float2 x) { return is_present(x.x) && is_present(x.y); }
__device__ __forceinline__ bool is_present(uint4 x) {
  return x.x != kAbsent && x.y != kAbsent && x.z != kAbsent && x.w != kAbsent;
}
__device__ __forceinline__ bool is_present(float4 x) {
  return is_present(x.x) && is_present(x.y) && is_present(x.z) && is_present(x.w);
}

template <Wait what>
__device__ __forceinline__ void ensure_present(uint4& v, const void* p) {
  if (!load_until_present(v, p, kAbsent, kMaxTries)) trap_stuck<what>();
}

// Counts the tries of a loop that polls. Written out where it is used: arrays that a callable captured
// would end up in local memory.
template <Wait what>
struct Tries {
  u32 count = 0;
  __device__ __forceinline__ void again() {
    if (++count > kMaxTries) trap_stuck<what>();
  }
};
