// Shared-memory barriers and the bulk copies that complete on them (sm_90 and later).
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Wait until the phase of this parity has passed: 1, or 0 after so many tries (each may suspend the
// thread for a while). The loop is here, in five instructions, because it stands in many places.
__device__ __forceinline__ u32 mbarrier_wait(u32 barrier, u32 parity, u32 tries) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      ".reg .u32 n;\n"
      "mov.u32 n, 0;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
      "add.u32 n, n, 1;\n"
      "setp.lt.u32 q, n, %3;\n"
      "@!p bra.uni again_%=;\n"
      "bra.uni done_%=;\n"
      "again_%=:\n"
      "@q bra.uni wait_%=;\n"
      "done_%=:\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done) : "r"(barrier), "r"(parity), "r"(tries) : "memory");
  return done;
}
__device__ __forceinline__ void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bulk_prefetch(const void* global, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
