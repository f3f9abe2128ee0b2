// Barriers in shared memory. What completes them when a copy has landed is in ptx/stage.cuh.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same once `loaded` is there: the address depends on it, since none is as small as 3, which the compiler does not know.
__device__ __forceinline__ void mbarrier_arrive_after(u32 loaded, u32 barrier) {
  asm volatile(
      "{ .reg .b32 at; and.b32 at, %0, 3; max.u32 at, at, %1; mbarrier.arrive.shared.b64 _, [at]; }"
      ::"r"(loaded), "r"(barrier) : "memory");
}

// So many arrivals at once, likewise.
__device__ __forceinline__ void mbarrier_arrive_after(u32 loaded, u32 barrier, u32 count) {
  asm volatile(
      "{ .reg .b32 at; and.b32 at, %0, 3; max.u32 at, at, %1; mbarrier.arrive.shared.b64 _, [at], %2; }"
      ::"r"(loaded), "r"(barrier), "r"(count) : "memory");
}

// Whether the phase of this parity has passed, at once.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}

#if __CUDA_ARCH__ >= 900
// Arrive, and expect copies of so many bytes before the phase ends.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of this parity has passed; suspends the thread for at most about `ns`.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity, u32 ns) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(barrier), "r"(parity), "r"(ns) : "memory");
  return done != 0;
}
// The same for as long as the system sees fit.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}
// Wait until it has; the watchdog sees to it that this ends.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra wait_%=;\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}
#else  // no try_wait: the same by asking again and again
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity, u32 ns) {
  constexpr u32 kNap = 1000;  // ns, or up to twice as many
  for (u32 slept = 0; slept < ns; slept += kNap) {
    if (mbarrier_test(barrier, parity)) return true;
    asm volatile("nanosleep.u32 %0;" ::"n"(kNap) : "memory");
  }
  return mbarrier_test(barrier, parity);
}
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "wait_%=:\n"
      "mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra wait_%=;\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}
#endif
