// Columns of padding that stay out of copies: of a matrix whose row of tiles fills a slot of the ring at most, those of whole warps.
#pragma once
#include "ptx/stage.cuh"
#include "spec.cuh"

// Warps that have columns of a step; those of the others are padding.
template <class Op>
constexpr __device__ __forceinline__ u32 warps_with_columns(u32 step) {
  const u32 each = Op::kPairsSteps ? 128 : 64, first = (Op::kPairsSteps ? step & ~1u : step) * kStepColumns;
  const u32 warps = (Op::kColumns - first + each - 1) / each;
  return warps < kConsumerWarps ? warps : kConsumerWarps;
}
template <class Op>
inline constexpr bool kLeavesOutPadding = Op::kSkipsPadding && kStagingLanes == 1;

// What has no padding to leave out.
struct AllBytes {
  static constexpr bool kSkipsPadding = false;
};

// A slot with the tiles of all steps, without padding. A warp has an eighth of a tile's values, or of each half of them.
template <class Op>
__device__ __forceinline__ void stage_without_padding(u32 shared, const u8* global, u32 barrier, u64 policy) {
  constexpr u32 kTile = 2 * Op::kHalfTileBytes, kValues = 2 * Op::kHalfTileValueBytes, kPart = kValues > 4096 ? kValues / 2 : kValues;
  constexpr auto bytes = [] {
    u32 sum = 0;
    for (u32 s = 0; s < Op::kSteps; ++s) sum += kTile - kValues + kValues / kConsumerWarps * warps_with_columns<Op>(s);
    return sum;
  };
  mbarrier_expect(barrier, bytes());
#pragma unroll
  for (u32 s = 0; s < Op::kSteps; ++s) {
    const u32 tile = s * kTile, warps = warps_with_columns<Op>(s);
    if (warps == kConsumerWarps) {
      copy_expected(shared + tile, global + tile, kTile, barrier, policy);
      continue;
    }
#pragma unroll
    for (u32 part = tile; part < tile + kValues; part += kPart)
      copy_expected(shared + part, global + part, kPart / kConsumerWarps * warps, barrier, policy);
    if (kTile > kValues) copy_expected(shared + tile + kValues, global + tile + kValues, kTile - kValues, barrier, policy);
  }
}
