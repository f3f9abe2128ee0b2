// The consumers' side of the weight ring: slots in shared memory that the producer warp fills in order.
#pragma once
#include "sync/wait.cuh"

struct Ring {
  u32 base;   // shared address of slot 0
  u32 full;   // barriers: one arrival and the slot's bytes
  u32 empty;  // barriers: one arrival from every consumer warp
  u32 slot;
  u32 parity;

  // Wait for the current slot; returns its shared address. Pairs with expect + copy in `producer`.
  __device__ __forceinline__ u32 wait() const {
    wait_barrier(Wait::kFull, full + slot * 8, parity);
    return base + slot * kSlotBytes;
  }
  __device__ __forceinline__ void advance() {
    // Opaque, or the compiler computes the slots of a whole unrolled loop ahead and runs out of registers.
    asm volatile(
        "{ .reg .pred p; add.u32 %0, %0, 1; setp.eq.u32 p, %0, %2; @p xor.b32 %1, %1, 1; selp.u32 %0, 0, %0, p; }"
        : "+r"(slot), "+r"(parity) : "n"(kRingSlots));
  }
  // The warp has read the current slot. Pairs with the producer's wait for the empty slot.
  __device__ __forceinline__ void release(u32 lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + slot * 8);
    advance();
  }
};
