// What will be read comes to the L2.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
