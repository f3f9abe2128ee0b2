// Two groups of warps of a block that take turns, by named barriers; and what keeps the compiler from undoing it.
#pragma once
#include "ptx/types.cuh"

// Waits until as many threads as `threads` came, those that only arrive among them. All of a warp.
__device__ __forceinline__ void await_turn(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void give_turn(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// What `never` is made of is computed before any wait that follows. It never is so.
__device__ __forceinline__ void compute_first(bool never) {
  if (never) asm volatile("nanosleep.u32 0;" ::: "memory");
}
// What the compiler keeps, and does not make anew wherever it is used: an address in shared memory comes from the block's number in
// its cluster, which takes as long as a load.
__device__ __forceinline__ u32 kept(u32 address) {
  asm volatile("" : "+r"(address));
  return address;
}
// A factor in registers of products in flight: it is read up to here.
__device__ __forceinline__ void keep_factor(u32& word) { asm volatile("" : "+r"(word)::"memory"); }
