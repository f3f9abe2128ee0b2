// Kernels that begin while the one before them in the stream still runs (programmatic dependent launch, sm_90 on). One that was
// launched so (`Module.launch`) may do what no kernel before it has a part in, and then awaits these. Others notice nothing.
#pragma once
#include "ptx/types.cuh"

// The next kernel may begin, once every block of this one has come here or ended.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// The kernels before this one are over, and what they wrote is seen by this thread.
__device__ __forceinline__ void await_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
