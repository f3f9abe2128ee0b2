// Numbers of 8 bits with 4 bits of exponent on any GPU: by their bits.
#pragma once
#include "ptx/types.cuh"

// Four of them as two pairs of fp16 that are 2^-8 as large: a sign, and seven bits that are the first of an exponent and a fraction.
__device__ __forceinline__ uint2 small_fp16_of_e4m3(u32 four) {
  const auto placed = [](u32 pair) { return (pair & 0x80008000) | (pair >> 1 & 0x3F803F80); };
  return make_uint2(placed(__byte_perm(four, 0, 0x1404)), placed(__byte_perm(four, 0, 0x3424)));
}
