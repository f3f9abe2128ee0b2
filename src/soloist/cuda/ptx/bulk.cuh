// Copies of a few bytes at a time by the copy engine (sm_90 on), of which several complete one barrier.
#pragma once
#include "ptx/mbarrier.cuh"

// `bytes` is a multiple of 16. Whoever awaits the barrier has said how many bytes come (`mbarrier_expect`).
__device__ __forceinline__ void copy_bulk(u32 shared, const u8* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
