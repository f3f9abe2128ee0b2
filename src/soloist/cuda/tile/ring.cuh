// The consumers' side of the weight ring: slots in shared memory that the producer warp fills in order.
#pragma once
#include "ptx/stage.cuh"
#include "sync/wait.cuh"

struct Ring {
  u32 base;   // shared address of slot 0
  u32 full;   // barriers: kStagingLanes arrivals, which wait for the slot's bytes
  u32 empty;  // barriers: one arrival from every consumer warp
  u32 slot;
  u32 parity;

  // Wait for the current slot and go on to the next; returns its shared address. Pairs with `stage` in
  // produce.cuh.
  __device__ __forceinline__ u32 take() {
    const u32 address = base + slot * kSlotBytes;
    if (kAblation < kNoStream) mbarrier_wait(full + slot * 8, parity);
    if (++slot == kRingSlots) {
      slot = 0;
      parity ^= 1;
    }
    return address;
  }
  // The warp has read `count` slots from `first` on. Pairs with the producer's wait for empty slots.
  __device__ __forceinline__ void release(u32 lane, u32 first, u32 count) const {
    if (kAblation >= kNoStream) return;
    __syncwarp();
    const u32 mine = first + lane;
    if (lane < count) mbarrier_arrive(empty + (mine < kRingSlots ? mine : mine - kRingSlots) * 8);
  }
};
