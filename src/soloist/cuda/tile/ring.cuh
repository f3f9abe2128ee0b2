// The consumers' side of the weight ring: slots in shared memory that the producer warp fills in order.
#pragma once
#include "sync/wait.cuh"

struct Ring {
  u32 base;   // shared address of slot 0
  u32 full;   // barriers: one arrival and the slot's bytes
  u32 empty;  // barriers: one arrival from every consumer warp
  u32 slot;
  u32 parity;

  // Wait for the current slot, go on to the next; returns its shared address. Pairs with expect + copy in
  // `produce`. The step is what the barrier returned, or the compiler would compute the slots of a whole
  // unrolled loop ahead and run out of registers.
  __device__ __forceinline__ u32 take() {
    const u32 address = base + slot * kSlotBytes;
    slot += wait_barrier<Wait::kFull>(full + slot * 8, parity);
    if (slot == kRingSlots) {
      slot = 0;
      parity ^= 1;
    }
    return address;
  }
  // The warp has read a slot. Pairs with the producer's wait for the empty slot.
  __device__ __forceinline__ void release(u32 lane, u32 taken) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + taken * 8);
  }
};
