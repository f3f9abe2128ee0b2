// Numbers of 8 bits with 4 bits of exponent (sm_89 on).
#pragma once
#include "ptx/types.cuh"

// Two of them as a pair of fp16, of which they are a part.
__device__ __forceinline__ u32 fp16_of_e4m3(u16 two) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
  return pair;
}
// The nearest ones; what is larger than 448 becomes that, and no number the code 0x7F.
__device__ __forceinline__ u16 e4m3_of_pair(float low, float high) {
  u16 two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}
