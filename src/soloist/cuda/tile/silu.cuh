// SwiGLU: one definition, so that no bit depends on which kernel computes it.
#pragma once
#include "ptx/mma.cuh"

// 0 where exp(-x) is too large for the quotient.
__device__ __forceinline__ float silu(float x) {
  return __fdividef(x, 1.0f + exp2_fast(-1.4426950408889634f * x));
}
// silu(gate) up of two neurons.
__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up) {
  return pack_pair(silu(low_half(gate)) * low_half(up), silu(high_half(gate)) * high_half(up));
}
