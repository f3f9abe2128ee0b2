// Weights from the ring times activations: up to 8 queries in the n dimension of m16n8k16 or m16n8k32.
//
// The eight warps split K: of every step of 512 columns a warp takes 64. weights/packing.py puts the weights in the order in
// which lanes take them. Every warp ends with partial sums of all rows.
#pragma once
#include "tile/ring.cuh"
#include "tile/sums.cuh"

// Which tiles come in `kDepth` steps: of two steps at a time the tiles of the first, those of the second, and the 8 rows
// that both have left over if `kHalves` is odd.
template <u32 kHalves, u32 kDepth>
struct TileOrder {
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
  using Order = TileOrder<kHalves, Op::kDepth>;
  using Fragments = typename Op::Format;
  constexpr bool kWhole = Op::kSteps % Op::kDepth == 0;
  constexpr u32 kTiles = Order::kCount, kSlotTiles = Op::kSlotTiles, kTileBytes = 2 * Fragments::kHalfBytes;
  // Beside all that sampling several queries takes, sums in four chains leave registers for fewer. Scaled values share registers
  // with sums, scales and digits.
  constexpr bool kIsPlain = kArithmetic<Op> == Arithmetic::kPlain;
  constexpr bool kFew = kSamples && kMostQueries > 1 && kChains<Op> == 4;
  constexpr u32 kScaledEarly = Op::kTiles > 4 ? 0 : kMostQueries > 1 ? 1 : 3;
  constexpr u32 kMostEarly = kIsPlain ? M::kEarlySlots / (kFew ? 2 : 1) : M::kEarlySlots < kScaledEarly ? M::kEarlySlots : kScaledEarly;
  // A warp takes kBatch slots together, or the tiles of one, so that their loads and multiplies overlap.
  constexpr u32 kTogether = kBatch > kSlotTiles ? kBatch : kSlotTiles;
  constexpr u32 kEarlyTiles = kMostEarly * kSlotTiles / kTogether * kTogether;
  constexpr i32 kEarly = kAgain ? 0 : kTiles < kEarlyTiles ? kTiles : kEarlyTiles;  // groups need not wait
  // Values that are worked on before they are multiplied leave time in which the next ones come.
  constexpr bool kPipelined = kArithmetic<Op> != Arithmetic::kPlain && kMostQueries == 1;
  static_assert(kBatch <= M::kRingSlots, "a warp takes that many before it releases one");
  static_assert(kEarly % kTogether == 0 || kEarly == kTiles, "whole batches");
  static_assert(kTiles % kSlotTiles == 0 || Op::kDepth == Op::kSteps, "a turn begins with a slot");
  static_assert(!Order::kOdd || Op::kDepth % 2 == 0 || Op::kDepth == Op::kSteps, "steps come in pairs");
  static_assert(Fragments::kHalfBytes == Op::kHalfTileBytes, "the plan's layout");
  sums.clear();
  if (kAblation == kNoMultiply) return arrived();
  const typename Fragments::Place place(warp, lane);
  typename StepsOf<Op, kAgain>::Type steps(operand, ahead, lane);
  u32 slot = 0;
  // Tile `i` of a turn, from the slot that it lies in.
  const auto load = [&](Fragments& w, u32 i) {
    if (i % kSlotTiles == 0) slot = ring.take();
    w.load(slot + i % kSlotTiles * kTileBytes, place, Order::is_full(i), Order::is_left_over(i));
  };
  Fragments early[kTiles + 1];  // no more of them are used
  Fragments later[kPipelined ? 2 : 1][kTogether];
  const auto is_early = [&](u32 i) { return static_cast<i32>(i) < kEarly; };
  const auto fragments = [&](u32 i, u32 j) -> Fragments& {
    return is_early(i) ? early[i + j] : later[kPipelined ? i / kTogether % 2 : 0][j];
  };
  // Steps `d` from `first` on.
  const auto exists = [&](u32 d, u32 first) { return d < Op::kDepth && (kWhole || first + d < Op::kSteps); };
  // A batch comes to registers, if it has not yet; returns how many slots it was.
  const auto load_batch = [&](u32 i, u32 first) {
    u32 count = 0;
#pragma unroll
    for (u32 j = 0; j < kTogether; ++j) {
      if (i + j >= kTiles || !exists(Order::step(i + j), first)) continue;
      load(fragments(i, j), i + j);
      count += (i + j) % kSlotTiles == 0;
    }
    return count;
  };
  const auto multiply_batch = [&](u32 i, u32 first) {
#pragma unroll
    for (u32 j = 0; j < kTogether; ++j) {
      const u32 d = Order::step(i + j), t = Order::tile(i + j);
      if (i + j >= kTiles || !exists(d, first)) continue;
      const Fragments& w = fragments(i, j);
      if (!Order::is_left_over(i + j)) {
        if (t == 0) steps.prepare(d, first);
        steps.multiply_tile(sums, t, d, w);
        if (t + 1 == Order::kTiles && !Order::kOdd) steps.release(d, first);
      } else {
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
          if (!exists(d + e, first)) continue;
          if (t == 0) steps.prepare(d + e, first);
          steps.multiply_half_tile(sums, t, d + e, w, e);
          steps.release(d + e, first);
        }
      }
    }
  };
  const auto take_batch = [&](u32 i, u32 first) {
    const u32 taken = ring.slot, count = load_batch(i, first);
    if (count) ring.release(lane, taken, count);
  };
  if (kEarly) {
    const u32 taken = ring.slot;
#pragma unroll
    for (i32 i = 0; i < kEarly; ++i) load(early[i], i);
    ring.release(lane, taken, (kEarly + kSlotTiles - 1) / kSlotTiles);
  } else if (kPipelined) {
    take_batch(0, 0);
  }
  arrived();
#pragma unroll 1
  for (u32 first = 0; first < Op::kSteps; first += Op::kDepth) {
    if (kPipelined && first > 0) take_batch(0, first);
#pragma unroll
    for (u32 i = 0; i < kTiles; i += kTogether) {
      if constexpr (kPipelined) {
        // The next batch is on its way while this one is multiplied.
        const u32 next = i + kTogether;
        if (next < kTiles && (!is_early(next) || first > 0)) take_batch(next, first);
        multiply_batch(i, first);
      } else {
        const u32 taken = ring.slot, count = !is_early(i) || first > 0 ? load_batch(i, first) : 0;
        multiply_batch(i, first);
        if (count) ring.release(lane, taken, count);
      }
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
