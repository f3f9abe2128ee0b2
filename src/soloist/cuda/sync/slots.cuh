// Prefill's kernels in which one warp loads into slots and two groups of four warps compute (sm_90a): whose turn it is, waits
// that end, and how warps share registers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "spec.cuh"

// The slots in turn; `round` is the parity of their barriers.
template <u32 kSlots>
struct SlotState {
  u32 slot = 0, round = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kSlots) slot = 0, round ^= 1;
  }
};

// Ends the kernel where nothing goes on: a hang would take the GPU with it.
__device__ __forceinline__ void wait_or_trap(u32 barrier, u32 parity) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const u64 since = clock_cycles();
  while (!mbarrier_try_wait(barrier, parity))
    if (clock_cycles() - since > kAwaitNs) asm volatile("trap;");  // no clock is much faster than 1 GHz
}

// By whole groups of four warps, of 168 registers a thread that a block of twelve warps starts with.
__device__ __forceinline__ void keep_registers_to_load() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
__device__ __forceinline__ void take_registers_to_compute() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }
