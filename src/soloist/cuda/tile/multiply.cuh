// Weights from the ring times activations: up to 8 columns in the n dimension of m16n8k16.
//
// The eight warps split K: of every step of 512 columns a warp takes 64. Inside a block of 32 columns
// a lane's 16 bytes of activations are 8 consecutive values, which serve two multiplies; packing.py
// puts the weights in the matching order. Every warp ends with partial sums of all rows.
#pragma once
#include "ptx/mma.cuh"
#include "tile/ring.cuh"

// Columns that exchanged activations have room for: [columns / 32][columns of the round][32].
inline constexpr u32 kRoomColumns = kMostColumns == 1 ? 1 : kMaxColumns;

// Few tiles leave the tensor core waiting for its own sums: give them two chains, one for each half of a step.
template <class Op>
inline constexpr u32 kChains = Op::kTiles <= 4 ? 2 : 1;
// With one column both halves of a step come by one load: the second half takes the place of a second column, and of
// each chain's sums only those with its own half are looked at. Fewer requests for what all blocks wait for.
template <class Op>
inline constexpr bool kPairs = kRoomColumns == 1 && kChains<Op> == 2;

// Activations of the round in global memory.
template <class Op>
struct GlobalOperand {
  static constexpr u32 kLoads = kPairs<Op> ? 1 : 2;  // of a step
  const u8* lane_base;
  bool active;

  __device__ __forceinline__ GlobalOperand(const u8* buffer, u32 warp, u32 lane, u32 columns)
      : lane_base(buffer + (warp * 2 * kRoomColumns + lane / 4) * 64 + lane % 4 * 16),
        active(lane / 4 < (kPairs<Op> ? 2 : columns)) {}
  __device__ __forceinline__ uint4 load(u32 step, u32 part) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (active) v = load_exchanged(lane_base + (step * 16 + part) * (kRoomColumns * 64));
    return v;
  }
};

// Activations of the next steps, in registers.
template <class Op>
struct Ahead {
  static constexpr u32 kLoads = GlobalOperand<Op>::kLoads;
  uint4 b[Op::kDepth][kLoads];

  __device__ __forceinline__ void load(const GlobalOperand<Op>& operand, u32 d, u32 step) {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) b[d][i] = operand.load(step, i);
  }
  // `absence` of a step.
  __device__ __forceinline__ float absent(u32 d, float of_others = 0.0f) const {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) of_others = absence(b[d][i], of_others);
    return of_others;
  }
  __device__ __forceinline__ bool is_there(u32 d) const {
    bool ready = true;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) ready = ready && is_present(b[d][i]);
    return ready;
  }
  // Load the first steps, all at once until all are there. `multiply` sees to the others one by one.
  __device__ __forceinline__ void fill(const GlobalOperand<Op>& operand) {
#pragma unroll 1
    for (;;) {
      bool ready = true;
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) load(operand, d, d);
      float absences[2] = {0.0f, 0.0f};
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) absences[d % 2] = absent(d, absences[d % 2]);
      if (__all_sync(~0u, absences[0] + absences[1] == 0.0f)) return;
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) ready = ready && is_there(d);
      if (__all_sync(~0u, ready)) return;
    }
  }
};

template <class Op>
struct Sums {
  float c[Op::kTiles][kChains<Op>][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 t = 0; t < Op::kTiles; ++t)
#pragma unroll
      for (u32 k = 0; k < kChains<Op>; ++k)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) c[t][k][i] = 0.0f;
  }
  __device__ __forceinline__ float total(u32 t, u32 i) const {
    return kChains<Op> == 2 ? c[t][0][i] + c[t][kChains<Op> - 1][kPairs<Op> ? i | 1 : i] : c[t][0][i];
  }
};

// Slots that a warp takes together, so that their loads and multiplies overlap.
inline constexpr u32 kBatch = 2;
static_assert(kBatch <= kRingSlots, "a warp takes that many before it releases one");

// A warp's weights of one slot: 16 rows, or 8, of 64 columns of K.
struct Fragments {
  uint4 low[2], high[2];

  __device__ __forceinline__ void load(u32 at, bool both) {
    low[0] = load_shared(at);
    low[1] = load_shared(at + 512);
    if (both) {
      high[0] = load_shared(at + kSlotBytes / 2);
      high[1] = load_shared(at + kSlotBytes / 2 + 512);
    }
  }
};

// `kHalves`: how many times 8 rows this block has in this group of tiles. The code of a kernel has to fit
// the instruction cache, so loops are unrolled only as far as registers need constant indices.
// kAgain: another group with the same activations follows.
//
// Weights of the first slots come to registers before the activations are waited for: that makes room in
// the ring, and the stream goes on. `arrived` is called once the first activations are there.
template <u32 kHalves, bool kAgain, class Op, class Arrived>
__device__ __forceinline__ void multiply(Ring& ring, u32 warp, u32 lane, const GlobalOperand<Op>& operand, Ahead<Op>& ahead,
                                         Sums<Op>& sums, const Arrived& arrived) {
  constexpr bool kWhole = Op::kSteps % Op::kDepth == 0;
  constexpr u32 kStepSlots = (kHalves + 1) / 2, kSlots = Op::kDepth * kStepSlots;
  constexpr i32 kEarly = kAgain ? 0 : kSlots < kEarlySlots ? kSlots : kEarlySlots;  // groups need not wait
  static_assert(kEarly % kBatch == 0 || kEarly == kSlots, "whole batches");
  sums.clear();
  if (kAblation == kNoMultiply) return arrived();
  const u32 offset = warp * 1024 + lane * 16;
  Fragments early[kSlots + 1];  // no more of them are used
  if (kEarly) {
    const u32 taken = ring.slot;
#pragma unroll
    for (i32 i = 0; i < kEarly; ++i)
      early[i].load(ring.take() + offset, 2 * (i % kStepSlots) + 1 < kHalves);
    ring.release(lane, taken, kEarly);
  }
  arrived();
#pragma unroll 1
  for (u32 first = 0; first < Op::kSteps; first += Op::kDepth) {
#pragma unroll
    for (u32 i = 0; i < kSlots; i += kBatch) {
      const bool is_early = static_cast<i32>(i) < kEarly;
      const u32 taken = ring.slot;
      u32 count = 0;
      Fragments later[kBatch];
      if (!is_early || first > 0) {
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
          const u32 d = (i + j) / kStepSlots, t = (i + j) % kStepSlots;
          if (i + j >= kSlots || (!kWhole && first + d >= Op::kSteps)) continue;
          const u32 at = ring.take() + offset;
          ++count;
          if (is_early) early[i + j].load(at, 2 * t + 1 < kHalves);
          else later[j].load(at, 2 * t + 1 < kHalves);
        }
      }
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 d = (i + j) / kStepSlots, t = (i + j) % kStepSlots, step = first + d;
        if (i + j >= kSlots || (!kWhole && step >= Op::kSteps)) continue;
        // The first steps were asked for together and are all there.
        if (t == 0 && (first > 0 || Op::kSteps > Op::kDepth))
#pragma unroll 1
          while (!__all_sync(~0u, ahead.absent(d) == 0.0f) && !__all_sync(~0u, ahead.is_there(d)))
            ahead.load(operand, d, step);
        const uint4 b0 = ahead.b[d][0], b1 = ahead.b[d][Ahead<Op>::kLoads - 1];
        float(&c0)[4] = sums.c[t][0];
        float(&c1)[4] = sums.c[t][kChains<Op> - 1];
        const Fragments& w = is_early ? early[i + j] : later[j];
        const uint4(&x)[2] = w.low;
        const uint4(&y)[2] = w.high;
        if (2 * t + 1 < kHalves) {
          mma(c0, x[0].x, x[0].y, x[0].z, x[0].w, b0.x, b0.y);
          mma(c1, y[0].x, y[0].y, y[0].z, y[0].w, b1.x, b1.y);
          mma(c0, x[1].x, x[1].y, x[1].z, x[1].w, b0.z, b0.w);
          mma(c1, y[1].x, y[1].y, y[1].z, y[1].w, b1.z, b1.w);
        } else {  // 8 rows, both halves of the step in half a slot
          mma(c0, x[0].x, 0, x[0].y, 0, b0.x, b0.y);
          mma(c1, x[1].x, 0, x[1].y, 0, b1.x, b1.y);
          mma(c0, x[0].z, 0, x[0].w, 0, b0.z, b0.w);
          mma(c1, x[1].z, 0, x[1].w, 0, b1.z, b1.w);
        }
        // The last use of these activations: ask for those that take their registers.
        const u32 next = step + Op::kDepth;
        if (t + 1 == kStepSlots && (next < Op::kSteps || (kAgain && kWhole))) {
          const u32 wrapped = next < Op::kSteps ? next : next - Op::kSteps;
          ahead.load(operand, d, wrapped);
        }
      }
      if (count) ring.release(lane, taken, count);
    }
  }
}

// The multiply of a block that owns `units` units: all blocks own as many, or some own one less, which may be none.
template <class Op, class Arrived>
__device__ __forceinline__ void multiply_owned(Ring& ring, u32 warp, u32 lane, u32 units, const GlobalOperand<Op>& operand,
                                               Sums<Op>& sums, const Arrived& arrived) {
  constexpr u32 kMost = Op::kMaxUnits * Op::kUnitHalves, kFewer = kMost - Op::kUnitHalves;
  Ahead<Op> ahead;
  const auto fill = [&] {
    ahead.fill(operand);
    arrived();
  };
  if constexpr (Op::kEven) {
    multiply<kMost, false>(ring, warp, lane, operand, ahead, sums, fill);
  } else if (units == Op::kMaxUnits) {
    multiply<kMost, false>(ring, warp, lane, operand, ahead, sums, fill);
  } else if constexpr (kFewer > 0) {
    multiply<kFewer, false>(ring, warp, lane, operand, ahead, sums, fill);
  } else {
    arrived();
  }
}
