// Arithmetic of pairs of the model's 16-bit numbers, each rounded once; subnormal numbers count (sm_90 on).
#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  u32 r;
  if constexpr (kBf16) asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 r;
  if constexpr (kBf16) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
