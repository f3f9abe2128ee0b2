// A slot of `down` that one warp multiplies, with all its columns. Where one query has as many slots as a block has warps, each warp has
// one: it waits for the activations of one slot and converts no others, if it converts any, its products do not wait for each other, and
// no warp has padding alone.
//
// Sums stay apart for each part of the columns that a warp would have of a slot that all warps share. So they are added in the order
// in which several queries' are, and have the same bits.
#pragma once
#include "tile/multiply.cuh"

// The matrix as one warp sees it. A step are 64 columns.
template <class Down>
struct SlotOfWarp : Down {
  static constexpr u32 kParts = warps_with_columns<Down>(0);  // as many warps would have columns
  static constexpr u32 kSteps = Down::kPairsSteps ? 2 * kParts : (Down::kColumns + 63) / 64, kStepsAtOnce = kSteps;
  static constexpr bool kIsPlain = kArithmetic<Down> == Arithmetic::kPlain;
  static constexpr u32 kDepth = kIsPlain ? kSteps : Down::kDepth;  // whose activations are in registers
  // Whether a slot fills no more than one of the ring, in whole steps, and a block's rows are one tile. Where threads have few registers
  // some spill.
  static constexpr bool kFits = kMovesRegisters && kMostQueries == 1 && Down::kSteps <= Down::kSlotTiles && !Down::kEndsInHalf &&
                                (kIsPlain || kSteps <= kConvertedSteps) && Down::kEven && Down::kMaxUnits * Down::kUnitHalves == 2 &&
                                Down::kTiles == 1;
};
template <class Down>
inline constexpr u32 kStride<SlotOfWarp<Down>> = 64;

// `activations`: of the slot. `of_warp`: where the warp converts them, if it does.
template <class Down>
__device__ __forceinline__ GlobalOperand<SlotOfWarp<Down>> operand_of_slot(const u8* activations, GlobalOperand<SlotOfWarp<Down>> of_warp,
                                                                          u32 lane) {
  of_warp.lane_base = activations + (SlotOfWarp<Down>::kIsPlain ? lane / 4 * 64 + lane % 4 * 16 : lane % 8 * 16);
  return of_warp;
}

// Multiplies the slot that is `warp` places from the ring's current one, and gives it back for all warps. Sums come to `to`, [part][row] in
// shared memory, which may be where activations were, once all parts are multiplied: so no part waits for the one before.
template <class Down, class M>
__device__ __forceinline__ void multiply_slot(const Ring<M>& ring, u32 warp, u32 lane, const GlobalOperand<SlotOfWarp<Down>>& operand,
                                              Ahead<SlotOfWarp<Down>>& ahead, u32 to) {
  using Op = SlotOfWarp<Down>;
  using Fragments = typename FragmentsOf<Down>::Type;
  // Weights of so many parts are on their way at once: of all, where there are registers for them.
  constexpr u32 kHeld = Down::kSteps * 2 * Down::kHalfTileValueBytes <= 32 * 256 ? Op::kParts : 2;
  typename StepsOf<Op, true, 2>::Type steps(operand, ahead, lane);
  const u32 tiles = ring.wait(warp);
  Fragments w[kHeld][Down::kSteps];
  u32 loaded = 0;
  const auto has = [](u32 part, u32 d) { return d == 0 || Down::kPairsSteps || part < warps_with_columns<Down>(d); };
  const auto load = [&](u32 part) {
    const typename Fragments::Place place(part, lane);
#pragma unroll
    for (u32 d = 0; d < Down::kSteps; ++d)
      if (has(part, d)) {
        w[part % kHeld][d].load(tiles + d * (2 * Down::kHalfTileBytes), place, true, false);
        loaded |= w[part % kHeld][d].loaded();
      }
  };
#pragma unroll
  for (u32 part = 0; part < kHeld; ++part) load(part);
  if constexpr (!Op::kIsPlain) steps.start();
  float of_part[Op::kParts][2];
#pragma unroll
  for (u32 part = 0; part < Op::kParts; ++part) {
    const auto& own = w[part % kHeld];
    Sums<Op> sums;
    sums.clear();
    if constexpr (Op::kIsPlain) {
      steps.multiply_tile(sums, 0, part, own[0]);
    } else if constexpr (Down::kPairsSteps) {
      steps.prepare(0, 2 * part);
      steps.multiply_tile(sums, 0, 0, own[0], own[1]);
    } else {
#pragma unroll
      for (u32 d = 0; d < Down::kSteps; ++d)
        if (has(part, d)) {
          steps.prepare(d, kConsumerWarps * d + part - d);
          steps.multiply_tile(sums, 0, d, own[d]);
        }
    }
    of_part[part][0] = sums.total(0, 0);
    of_part[part][1] = sums.total(0, 2);
    if (part + kHeld < Op::kParts) load(part + kHeld);
  }
  __syncwarp();  // all lanes have loaded what lies where sums come
  if (lane % 4 == 0)
#pragma unroll
    for (u32 part = 0; part < Op::kParts; ++part) {
      const u32 at = to + part * 64 + lane;
      store_shared1(at, __float_as_uint(of_part[part][0]));
      store_shared1(at + 32, __float_as_uint(of_part[part][1]));
    }
  ring.release_for_all(lane, warp, loaded);
}
