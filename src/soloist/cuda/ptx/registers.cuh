// Registers move from the helper warps, which need few, to the consumers, where the architecture can.
#pragma once
#include "ptx/memory.cuh"
#include "spec.cuh"

// By whole groups of four warps. Together they may not exceed what the block started with (gpu.py).
__device__ __forceinline__ void give_registers() {
  if constexpr (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kHelperRegisters));
}
__device__ __forceinline__ void take_registers() {
  if constexpr (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
}

// An address in shared memory that is kept. The compiler would otherwise make it anew wherever it is used, from the
// block's number in its cluster, which takes as long as a load. Where registers do not move there are none for it, nor beside several
// queries that are sampled, but on Hopper.
__device__ __forceinline__ u32 kept_address(const void* p) {
  u32 address = shared_address(p);
  if constexpr (kMovesRegisters && (kBatch > 1 || !kSamples || kMostQueries == 1)) asm volatile("" : "+r"(address));
  return address;
}
