// Blocks that run beside each other and reach each other's shared memory (sm_90 on).
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks have come here, and what they did before is seen.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// The same place in the shared memory of another block.
__device__ __forceinline__ u32 address_in(u32 rank, u32 shared) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// At a barrier of any block of the cluster, as `address_in` gives it. Says nothing of what this thread wrote: with release at
// the cluster's scope it would be a fence for the whole GPU each time.
__device__ __forceinline__ void arrive_relaxed(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// After initialising barriers that other blocks arrive at, before meeting them.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
