// Registers move from the helper warps, which need few, to the consumers, where the architecture can.
#pragma once
#include "spec.cuh"

// By whole groups of four warps. Together they may not exceed what the block started with (gpu.py).
__device__ __forceinline__ void give_registers() {
  if constexpr (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kHelperRegisters));
}
__device__ __forceinline__ void take_registers() {
  if constexpr (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
}
