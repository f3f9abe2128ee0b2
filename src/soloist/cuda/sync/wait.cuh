// Waiting: for barriers in shared memory and for data of other blocks; and the watchdog that bounds it.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "spec.cuh"

// Builds that leave something out, to see what the rest costs: no waiting for other blocks (the stream and
// the multiplies alone), no stream (weights as they lie in shared memory), no stream and no multiplies.
constexpr u32 kNoWaits = 1, kNoStream = 2, kNoMultiply = 3;

// A build for tests, in which block kSilentBlock never publishes its activations.
constexpr u32 kNoBlock = 0xffffffffu;

// The first block to report; the others keep quiet, or the host would see a mixture.
__device__ u32 reporters;

// Slots whose barrier has not passed the phase of the slot's last copy; it is never further behind, since
// the producer waits for it before it copies again. Slots take the launch's `copies` in turn.
template <class M>
__device__ __forceinline__ u32 slots_behind(u32 barriers, u32 copies) {
  u32 behind = 0;
#pragma unroll 1
  for (u32 i = 0; i < M::kRingSlots; ++i) {
    const u32 issued = (copies + M::kRingSlots - 1 - i) / M::kRingSlots;
    behind += issued && !mbarrier_test(barriers + i * 8, (issued - 1) & 1);
  }
  return behind;
}

// A warp of its own, so that the waits cost the others nothing: if neither consumers nor producer get
// anywhere for kStuckNs (kMaskNs where the host may be computing), it tells the host where they are and
// ends the kernel. `missing` tells which ranks' data the consumers' phase lacks.
template <class M, class Missing>
__device__ __forceinline__ void watch(const volatile Where* where, Fault* fault, u32 finished, u32 full, u32 empty,
                                      const Missing& missing) {
  u32 last = ~0u;
  u64 since = clock_ns();
  while (!mbarrier_try_wait(finished, 0, 1000000)) {
    if (kRacecheck) continue;  // these looks are meant to be unordered
    // The phase is read once, or the wait could be held to the bound of a phase that has just begun.
    const u32 phase = where->phase, now = (where->round * 64 + where->layer) * 64 + phase + (where->copies << 16);
    if (now != last) {
      last = now;
      since = clock_ns();
    } else if (clock_ns() - since > (kSamples && phase == static_cast<u32>(Phase::kMask) ? kMaskNs : kStuckNs)) {
      if (atomicExch(&reporters, 1)) continue;
      const u32 copies = where->copies;
      store_host(&fault->block, blockIdx.x);
      store_host(&fault->sm, sm_id());
      store_host(&fault->where.round, where->round);
      store_host(&fault->where.layer, where->layer);
      store_host(&fault->where.phase, where->phase);
      store_host(&fault->where.producer_round, where->producer_round);
      store_host(&fault->where.producer_layer, where->producer_layer);
      store_host(&fault->where.copies, copies);
      store_host(&fault->landed, copies - slots_behind<M>(full, copies));
      store_host(&fault->released, copies - slots_behind<M>(empty, copies));
      if constexpr (kPeers > 1) store_host(&fault->missing, missing());
      store_host_release(&fault->code, 1);
      __threadfence_system();
      asm volatile("trap;");
    }
  }
}

// Data from other blocks carries its own readiness: memory holds kSentinel in every 32-bit word until the
// word is written. kSentinel is a NaN that no arithmetic produces; `present` keeps data clear of it.
constexpr u32 kSentinel = 0xffffffffu;

__device__ __forceinline__ u32 present(u32 word) { return word == kSentinel ? 0x7fffffffu : word; }
__device__ __forceinline__ u32 present(float x) { return present(__float_as_uint(x)); }
__device__ __forceinline__ bool is_present(u32 x) { return kAblation == kNoWaits || x != kSentinel; }
__device__ __forceinline__ bool is_present(float x) { return is_present(__float_as_uint(x)); }
__device__ __forceinline__ bool is_present(float2 x) { return is_present(x.x) && is_present(x.y); }
__device__ __forceinline__ bool is_present(uint4 x) {
  return is_present(x.x) && is_present(x.y) && is_present(x.z) && is_present(x.w);
}
__device__ __forceinline__ bool is_present(float4 x) {
  return is_present(x.x) && is_present(x.y) && is_present(x.z) && is_present(x.w);
}

// The same for many words at once, by the units for floating point, which have little to do: 0 where all words are there.
// kSentinel makes it NaN, and so may data that is no finite number; then the looks above decide.
__device__ __forceinline__ float sentinel_sum(uint4 x, float of_others) {
  of_others = __fmaf_rn(__uint_as_float(x.x), 0.0f, of_others);
  of_others = __fmaf_rn(__uint_as_float(x.y), 0.0f, of_others);
  of_others = __fmaf_rn(__uint_as_float(x.z), 0.0f, of_others);
  return __fmaf_rn(__uint_as_float(x.w), 0.0f, of_others);
}
