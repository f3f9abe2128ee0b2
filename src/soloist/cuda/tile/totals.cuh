// Prefill's kernels: sums over warps and blocks of kThreads threads, and values as they lie in memory.
#pragma once
#include "ptx/mma.cuh"

inline constexpr u32 kWarps = kThreads / 32;

__device__ __forceinline__ float warp_total(float x) {
#pragma unroll
  for (u32 step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Blocks that come here several times use buffers 0 and 1 alternately, so that nobody overwrites what others still read.
__device__ __forceinline__ float block_total(float x, u32 buffer = 0) {
  __shared__ float sums[2][kWarps];
  x = warp_total(x);
  if (threadIdx.x % 32 == 0) sums[buffer][threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (u32 w = 0; w < kWarps; ++w) total += sums[buffer][w];
  return total;
}

__device__ __forceinline__ float4 widened(float4 x) { return x; }
__device__ __forceinline__ float4 widened(uint2 x) {
  return make_float4(low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y));
}

__device__ __forceinline__ float4 sum(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float squares_of(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }
__device__ __forceinline__ float4 times(float4 a, float b, float4 c) {
  return make_float4(a.x * b * c.x, a.y * b * c.y, a.z * b * c.z, a.w * b * c.w);
}
__device__ __forceinline__ uint2 packed(float4 x) { return make_uint2(pack_pair(x.x, x.y), pack_pair(x.z, x.w)); }
