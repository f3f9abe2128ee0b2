// Reads memory as fast as the chip does, the way the decode kernel does: staged in shared memory.
// What `soloist bench` holds speeds against.
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/stage.cuh"
#include "spec.cuh"

// Every block reads `slots` slots of its own, one after the other, kSlots of them in flight.
extern "C" __global__ void __launch_bounds__(32, 1) read(const u8* source, u32 slots) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ __align__(8) u64 full[kSlots];
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kSlots; ++i) mbarrier_init(shared_address(full + i), kStagingLanes);
    fence_async_proxy();
  }
  __syncthreads();
  if (threadIdx.x >= kStagingLanes) return;
  const u64 policy = read_once_policy();
  const u8* from = source + static_cast<u64>(blockIdx.x) * slots * kSlotBytes;
  for (u32 i = 0; i < slots + kSlots; ++i) {
    const u32 slot = i % kSlots, barrier = shared_address(full + slot);
    if (i >= kSlots) mbarrier_wait(barrier, (i / kSlots - 1) & 1);
    if (i >= slots) continue;
    stage(shared_address(ring) + slot * kSlotBytes, from + static_cast<u64>(i) * kSlotBytes, kSlotBytes, barrier, policy,
          threadIdx.x);
  }
}
