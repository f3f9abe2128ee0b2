// Groups of four warps trade registers (sm_90a). All warps of a group come here, and know the number.
#pragma once
#include "ptx/types.cuh"

// From here on a thread has so many: fewer, or more, which waits until others have given theirs.
template <u32 kCount>
__device__ __forceinline__ void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)); }
template <u32 kCount>
__device__ __forceinline__ void gain_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)); }
