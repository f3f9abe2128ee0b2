// Numbers of 8 bits with 4 bits of exponent (sm_89 on).
#pragma once
#include "ptx/types.cuh"

// Four of them as two pairs of fp16, of which they are a part. A conversion takes either half of a word, if it is named and not
// shifted to the lower one.
__device__ __forceinline__ uint2 fp16_of_e4m3(u32 four) {
  uint2 pairs;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(four));
  return pairs;
}
// The nearest ones; what is larger than 448 becomes that, and no number the code 0x7F.
__device__ __forceinline__ u16 e4m3_of_pair(float low, float high) {
  u16 two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}
