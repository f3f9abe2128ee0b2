// Weights from the ring times activations: up to 8 queries in the n dimension of m16n8k16.
//
// The eight warps split K: of every step of 512 columns a warp takes 64. Inside a block of 32 columns
// a lane's 16 bytes of activations are 8 consecutive values, which serve two multiplies; packing.py
// puts the weights in the matching order. Every warp ends with partial sums of all rows.
#pragma once
#include "tile/formats.cuh"
#include "tile/ring.cuh"

// Queries that exchanged activations have room for: [queries / 32][queries of the round][32].
inline constexpr u32 kRoomQueries = kMostQueries == 1 ? 1 : kMaxQueries;

// Few tiles leave the tensor core waiting for its own sums: give them two chains, one for each half of a step, or four.
template <class Op>
inline constexpr u32 kChains = Op::kTiles <= 2 ? kMostChains : Op::kTiles <= 4 ? 2 : 1;
// With one query both halves of a step come by one load: the second half takes the place of a second query, and of
// each chain's sums only those with its own half are looked at. Fewer requests for what all blocks wait for.
template <class Op>
inline constexpr bool kPairs = kRoomQueries == 1 && kChains<Op> > 1;

// Activations of the round in global memory.
template <class Op>
struct GlobalOperand {
  static constexpr u32 kLoads = kPairs<Op> ? 1 : 2;  // of a step
  const u8* lane_base;
  bool active;

  __device__ __forceinline__ GlobalOperand(const u8* buffer, u32 warp, u32 lane, u32 queries)
      : lane_base(buffer + (warp * 2 * kRoomQueries + lane / 4) * 64 + lane % 4 * 16),
        active(lane / 4 < (kPairs<Op> ? 2 : queries)) {}
  __device__ __forceinline__ uint4 load(u32 step, u32 part) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (active) v = load_exchanged(lane_base + (step * 16 + part) * (kRoomQueries * 64));
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
  // The sum over sentinels of a step: 0 if all of its activations are there.
  __device__ __forceinline__ float missing(u32 d, float of_others = 0.0f) const {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) of_others = sentinel_sum(b[d][i], of_others);
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
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) sums[d % 2] = missing(d, sums[d % 2]);
      if (__all_sync(~0u, sums[0] + sums[1] == 0.0f)) return;
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
  // Chain k has quarters k, k + kChains, … of a step: of the first half, the second, the first, the second.
  __device__ __forceinline__ float(&chain(u32 t, u32 quarter))[4] { return c[t][quarter % kChains<Op>]; }
  __device__ __forceinline__ float total(u32 t, u32 i) const {
    if constexpr (kChains<Op> == 1) {
      return c[t][0][i];
    } else {
      const u32 second = kPairs<Op> ? i | 1 : i;
      const float half = c[t][0][i] + c[t][1][second];
      return kChains<Op> == 2 ? half : half + (c[t][kChains<Op> - 2][i] + c[t][kChains<Op> - 1][second]);
    }
  }
};

// Which slots come in `kDepth` steps: of two steps at a time the tiles of the first, those of the second, and the 8 rows
// that both have left over if `kHalves` is odd.
template <u32 kHalves, u32 kDepth>
struct SlotOrder {
  static constexpr u32 kTiles = kHalves / 2, kStepTiles = kTiles ? kTiles : 1;
  static constexpr bool kOdd = kHalves % 2;
  static constexpr u32 kCount = kDepth / 2 * kHalves + kDepth % 2 * (kTiles + kOdd);

  static constexpr __device__ __forceinline__ bool is_lone(u32 i) { return i / kHalves == kDepth / 2; }
  // 8 rows each of this step and, if there is one, of the next.
  static constexpr __device__ __forceinline__ bool is_left_over(u32 i) {
    return kOdd && i % kHalves == (is_lone(i) ? kTiles : 2 * kTiles);
  }
  static constexpr __device__ __forceinline__ u32 tile(u32 i) {
    return is_left_over(i) ? kTiles : i % kHalves % kStepTiles;
  }
  // Among the `kDepth`.
  static constexpr __device__ __forceinline__ u32 step(u32 i) {
    return i / kHalves * 2 + (is_left_over(i) ? 0 : i % kHalves / kStepTiles);
  }
  static constexpr __device__ __forceinline__ bool is_full(u32 i) { return !is_left_over(i) || !is_lone(i); }
};

// `kHalves`: how many times 8 rows this block has in this group of tiles. The code of a kernel has to fit
// the instruction cache, so loops are unrolled only as far as registers need constant indices.
// kAgain: another group with the same activations follows.
//
// Weights of the first slots come to registers before the activations are waited for: that makes room in
// the ring, and the stream goes on. `arrived` is called once the first activations are there.
template <u32 kHalves, bool kAgain, class Op, class Arrived, class M>
__device__ __forceinline__ void multiply(Ring<M>& ring, u32 warp, u32 lane, const GlobalOperand<Op>& operand, Ahead<Op>& ahead,
                                         Sums<Op>& sums, const Arrived& arrived) {
  using Order = SlotOrder<kHalves, Op::kDepth>;
  constexpr bool kWhole = Op::kSteps % Op::kDepth == 0;
  constexpr u32 kSlots = Order::kCount;
  // Beside all that sampling several queries takes, sums in four chains leave registers for fewer.
  constexpr u32 kMostEarly = kSamples && kMostQueries > 1 && kChains<Op> == 4 ? M::kEarlySlots / 2 : M::kEarlySlots;
  constexpr i32 kEarly = kAgain ? 0 : kSlots < kMostEarly ? kSlots : kMostEarly;  // groups need not wait
  // A warp takes kBatch slots together, so that their loads and multiplies overlap.
  static_assert(kBatch <= M::kRingSlots, "a warp takes that many before it releases one");
  static_assert(kEarly % kBatch == 0 || kEarly == kSlots, "whole batches");
  static_assert(!Order::kOdd || Op::kDepth % 2 == 0 || Op::kDepth == Op::kSteps, "steps come in pairs");
  sums.clear();
  if (kAblation == kNoMultiply) return arrived();
  using Fragments = typename Op::Format;
  const u32 place = warp * Fragments::kWarpBytes + lane * 16;
  Fragments early[kSlots + 1];  // no more of them are used
  if (kEarly) {
    const u32 taken = ring.slot;
#pragma unroll
    for (i32 i = 0; i < kEarly; ++i) early[i].load(ring.take(), place, Order::is_full(i), Order::is_left_over(i));
    ring.release(lane, taken, kEarly);
  }
  arrived();
#pragma unroll 1
  for (u32 first = 0; first < Op::kSteps; first += Op::kDepth) {
    const auto exists = [&](u32 d) { return d < Op::kDepth && (kWhole || first + d < Op::kSteps); };
    // The first steps were asked for together and are all there.
    const auto await_activations = [&](u32 d) {
      if (first > 0 || Op::kSteps > Op::kDepth)
#pragma unroll 1
        while (!__all_sync(~0u, ahead.missing(d) == 0.0f) && !__all_sync(~0u, ahead.is_there(d)))
          ahead.load(operand, d, first + d);
    };
    // After the last use of these activations: ask for those that take their registers.
    const auto ask_for_next = [&](u32 d) {
      const u32 next = first + d + Op::kDepth;
      if (next < Op::kSteps || (kAgain && kWhole)) ahead.load(operand, d, next < Op::kSteps ? next : next - Op::kSteps);
    };
    const auto multiply_tile = [&](u32 t, u32 d, const Fragments& w) {
      const uint4 b0 = ahead.b[d][0], b1 = ahead.b[d][Ahead<Op>::kLoads - 1];
      const uint4(&x)[2] = w.low;
      const uint4(&y)[2] = w.high;
      mma(sums.chain(t, 0), x[0].x, x[0].y, x[0].z, x[0].w, b0.x, b0.y);
      mma(sums.chain(t, 1), y[0].x, y[0].y, y[0].z, y[0].w, b1.x, b1.y);
      mma(sums.chain(t, 2), x[1].x, x[1].y, x[1].z, x[1].w, b0.z, b0.w);
      mma(sums.chain(t, 3), y[1].x, y[1].y, y[1].z, y[1].w, b1.z, b1.w);
    };
    // 8 rows, both halves of the step in half a slot.
    const auto multiply_left_over = [&](u32 t, u32 d, const uint4(&x)[2]) {
      const uint4 b0 = ahead.b[d][0], b1 = ahead.b[d][Ahead<Op>::kLoads - 1];
      mma(sums.chain(t, 0), x[0].x, 0, x[0].y, 0, b0.x, b0.y);
      mma(sums.chain(t, 1), x[1].x, 0, x[1].y, 0, b1.x, b1.y);
      mma(sums.chain(t, 2), x[0].z, 0, x[0].w, 0, b0.z, b0.w);
      mma(sums.chain(t, 3), x[1].z, 0, x[1].w, 0, b1.z, b1.w);
    };
#pragma unroll
    for (u32 i = 0; i < kSlots; i += kBatch) {
      const bool is_early = static_cast<i32>(i) < kEarly;
      const u32 taken = ring.slot;
      u32 count = 0;
      Fragments later[kBatch];
      if (!is_early || first > 0) {
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
          if (i + j >= kSlots || !exists(Order::step(i + j))) continue;
          Fragments& w = is_early ? early[i + j] : later[j];
          w.load(ring.take(), place, Order::is_full(i + j), Order::is_left_over(i + j));
          ++count;
        }
      }
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 d = Order::step(i + j), t = Order::tile(i + j);
        if (i + j >= kSlots || !exists(d)) continue;
        const Fragments& w = is_early ? early[i + j] : later[j];
        if (!Order::is_left_over(i + j)) {
          if (t == 0) await_activations(d);
          multiply_tile(t, d, w);
          if (t + 1 == Order::kTiles && !Order::kOdd) ask_for_next(d);
        } else {
#pragma unroll
          for (u32 e = 0; e < 2; ++e) {
            if (!exists(d + e)) continue;
            if (t == 0) await_activations(d + e);
            multiply_left_over(t, d + e, e ? w.high : w.low);
            ask_for_next(d + e);
          }
        }
      }
      if (count) ring.release(lane, taken, count);
    }
  }
}

// The multiply of a block that owns `units` units: all blocks own as many, or some own one less, which may be none.
template <class Op, class Arrived, class M>
__device__ __forceinline__ void multiply_owned(Ring<M>& ring, u32 warp, u32 lane, u32 units, const GlobalOperand<Op>& operand,
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
