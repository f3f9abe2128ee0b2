// Copies from global to shared memory that run on by themselves and complete a barrier when they landed.
//
// From sm_90 on one lane asks the copy engine for a whole slot. Before, all lanes of a warp ask for 16 bytes at
// a time. Either way `stage` is called by kStagingLanes lanes of a warp, each of which is one arrival of the
// barrier, and whoever has waited for the barrier sees the bytes.
#pragma once
#include "ptx/mbarrier.cuh"

// What is read once a round leaves the L2 first, or it would push out what blocks exchange.
__device__ __forceinline__ u64 read_once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

#if __CUDA_ARCH__ >= 900
inline constexpr u32 kStagingLanes = 1;

// The lane that all lanes of the warp elect, always the same one; and whether this is it. Where it is asked right there, the compiler knows
// that the lane is alone and makes no loop over lanes of a copy, which takes half as many instructions then.
__device__ __forceinline__ u32 elected_lane() {
  u32 lane;
  asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; }" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ bool is_elected() {
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

// A copy of bytes that the barrier expects.
__device__ __forceinline__ void copy_expected(u32 shared, const u8* global, u32 bytes, u32 barrier, u64 policy) {
  // To shared::cta: a copy to shared::cluster is a call of the system on sm_120.
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void stage(u32 shared, const u8* global, u32 bytes, u32 barrier, u64 policy, u32) {
  mbarrier_expect(barrier, bytes);
  copy_expected(shared, global, bytes, barrier, policy);
}

// A copy of it will find it there.
__device__ __forceinline__ void fetch_to_l2(const u8* global, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// The copy engine is a proxy of its own: these order ordinary accesses before its later ones, to all memory or
// to shared memory.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#else
inline constexpr u32 kStagingLanes = 32;

// No lane is alone: all of them stage.
__device__ __forceinline__ u32 elected_lane() { return 0; }
__device__ __forceinline__ bool is_elected() { return true; }

// `bytes` is a multiple of 16.
__device__ __forceinline__ void stage(u32 shared, const u8* global, u32 bytes, u32 barrier, u64 policy, u32 lane) {
#pragma unroll 4
  for (u32 at = lane * 16; at < bytes; at += 32 * 16)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;"
                 ::"r"(shared + at), "l"(global + at), "l"(policy) : "memory");
  // Arrives for this lane once all it asked for so far has landed; noinc: the barrier counts it already.
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void fetch_to_l2(const u8*, u32) {}  // no plan asks for it
// Nor for these.
__device__ __forceinline__ void mbarrier_expect(u32, u32) {}
__device__ __forceinline__ void copy_expected(u32, const u8*, u32, u32, u64) {}

// cp.async belongs to the same (generic) proxy as ordinary accesses, and .cg reads past the L1: barriers alone
// order them, no fence exists or is needed.
__device__ __forceinline__ void fence_async_proxy() {}
__device__ __forceinline__ void fence_async_proxy_shared() {}
#endif
