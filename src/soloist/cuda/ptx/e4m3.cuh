// Numbers of 8 bits with 4 bits of exponent (sm_89 on).
#pragma once
#include "ptx/types.cuh"

// Two of them as a pair of fp16, of which they are a part.
__device__ __forceinline__ u32 fp16_of_e4m3(u16 two) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
  return pair;
}
