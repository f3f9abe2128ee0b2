// The consumers' side of the weight ring: slots in shared memory that the producer warp fills in order.
#pragma once
#include "ptx/stage.cuh"
#include "sync/wait.cuh"

// Arrivals that free a slot: one from every consumer warp, after its lanes have met. compute-sanitizer is told
// by every lane.
inline constexpr u32 kReleases = kRacecheck ? kConsumerThreads : kConsumerWarps;

template <class M>
struct Ring {
  u32 base;   // shared address of slot 0
  u32 full;   // barriers: kStagingLanes arrivals, which wait for the slot's bytes
  u32 empty;  // barriers: kReleases arrivals
  u32 slot;
  u32 parity;

  // Wait for the slot that is `ahead` places from the current one; returns its shared address. Pairs with
  // expect + copy in `produce`.
  __device__ __forceinline__ u32 wait(u32 ahead) const {
    const bool wraps = slot + ahead >= M::kRingSlots;
    const u32 at = slot + ahead - (wraps ? M::kRingSlots : 0);
    if (kAblation < kNoStream) mbarrier_wait(full + at * 8, parity ^ wraps);
    return base + at * M::kSlotBytes;
  }
  // Of a slot that has come.
  __device__ __forceinline__ u32 place(u32 ahead) const {
    const u32 at = slot + ahead;
    return base + (at < M::kRingSlots ? at : at - M::kRingSlots) * M::kSlotBytes;
  }
  // Go on by `count` slots, at most as many as the ring has.
  __device__ __forceinline__ void advance(u32 count) {
    slot += count;
    if (slot < M::kRingSlots) return;
    slot -= M::kRingSlots;
    parity ^= 1;
  }
  // The slot that is `count` places behind the current one.
  __device__ __forceinline__ u32 before(u32 count) const { return slot - count + (slot < count ? M::kRingSlots : 0); }
  // Wait for the current slot and go on to the next.
  __device__ __forceinline__ u32 take() {
    const u32 address = base + slot * M::kSlotBytes;
    if (kAblation < kNoStream) mbarrier_wait(full + slot * 8, parity);
    advance(1);
    return address;
  }
  // The same as below, but once `loaded` is there. An arrival does not wait for loads from shared memory that came before it: where
  // requests of other warps delay them, the next copy would land before they are done.
  __device__ __forceinline__ void release(u32 lane, u32 first, u32 count, u32 loaded) const {
    if constexpr (kRacecheck) return release(lane, first, count);
    if (kAblation >= kNoStream) return;
    __syncwarp();
    const u32 mine = first + lane;
    if (lane < count) mbarrier_arrive_after(loaded, empty + (mine < M::kRingSlots ? mine : mine - M::kRingSlots) * 8);
  }
  // Of a slot that this warp alone reads, `ahead` places from the current one, once `loaded` is there: for all warps.
  __device__ __forceinline__ void release_for_all(u32 lane, u32 ahead, u32 loaded) const {
    if (kAblation >= kNoStream) return;
    __syncwarp();
    const u32 at = slot + ahead - (slot + ahead < M::kRingSlots ? 0 : M::kRingSlots);
    if (kRacecheck || lane == 0) mbarrier_arrive_after(loaded, empty + at * 8, kRacecheck ? kReleases / 32 : kReleases);
  }
  // The warp is done with `count` slots from `first` on. Pairs with the producer's wait for empty slots. It has waited
  // for all of them.
  __device__ __forceinline__ void release(u32 lane, u32 first, u32 count) const {
    if (kAblation >= kNoStream) return;
    if constexpr (kRacecheck) {
      for (u32 i = first; i < first + count; ++i) mbarrier_arrive(empty + (i < M::kRingSlots ? i : i - M::kRingSlots) * 8);
      return;
    }
    __syncwarp();
    const u32 mine = first + lane;
    if (lane < count) mbarrier_arrive(empty + (mine < M::kRingSlots ? mine : mine - M::kRingSlots) * 8);
  }
};
