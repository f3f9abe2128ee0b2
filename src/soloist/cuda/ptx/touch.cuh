// What will be read comes to the L1 before there are registers for it.
#pragma once
#include "ptx/types.cuh"

// The 32 bytes around an address. Nobody waits for them.
__device__ __forceinline__ void touch(const float* p) {
  asm volatile("{ .reg .f32 x; ld.global.nc.f32 x, [%0]; }" ::"l"(p));
}
// Where the program says so, not before.
__device__ __forceinline__ float4 load_touched(const float* p) {
  float4 x;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p));
  return x;
}
