// Activations on their way from global memory to registers.
//
// Inside a block of 32 columns a lane's 16 bytes are 8 consecutive values of one query, which serve two multiplies. The
// exchanged activations lie as [queries / 32][queries of the round][32], see kRoomQueries.
#pragma once
#include "ptx/memory.cuh"
#include "sync/wait.cuh"
#include "tile/formats.cuh"

// Queries that exchanged activations have room for: [queries / 32][queries of the round][32].
inline constexpr u32 kRoomQueries = kMostQueries == 1 ? 1 : kMaxQueries;

template <class Op>
inline constexpr Arithmetic kArithmetic = Op::Format::kArithmetic;
// Activations become digits.
template <class Op>
inline constexpr bool kMakesDigits = kArithmetic<Op> == Arithmetic::kIntegers || kArithmetic<Op> == Arithmetic::kSuperBlocks;
// Of one query the sums of four tiles are dealt to the four lanes that would all have the same.
inline constexpr u32 kDealtTiles = 4;
template <class Op>
inline constexpr bool kDealsTiles = kRoomQueries == 1 && kArithmetic<Op> == Arithmetic::kSuperBlocks;
// Few tiles leave the tensor core waiting for its own sums: give them two chains, one for each half of a step, or four. Where
// the sums of a step are scaled each half has its own.
template <class Op>
inline constexpr u32 kChains = kArithmetic<Op> == Arithmetic::kScaled      ? 2
                               : kMakesDigits<Op>                          ? 1
                               : Op::kTiles <= 2                           ? kMostChains
                               : Op::kTiles <= 4                           ? 2
                                                                           : 1;
// With one query both halves of a step come by one load: the second half takes the place of a second query, and of
// each chain's sums only those with its own half are looked at. Fewer requests for what all blocks wait for.
template <class Op>
inline constexpr bool kPairs = kRoomQueries == 1 && kChains<Op> > 1;

// One query is converted for weights that are quantised, through shared memory: of all warps [warp][step][128 bytes], then a power of
// two of each warp's part of a step.
template <class Op>
inline constexpr bool kConverts = kRoomQueries == 1 && kArithmetic<Op> != Arithmetic::kPlain;

// From one step to the next, in columns: a step has those of all warps, or of one that has all columns.
template <class Op>
inline constexpr u32 kStride = kStepColumns;
// From the first column to those of a step that a warp has, in columns. Of a pair of steps a warp's columns are neighbours.
template <class Op>
__device__ __forceinline__ constexpr u32 step_column(u32 step) {
  return Op::kPairsSteps ? step / 2 * (2 * kStride<Op>) + step % 2 * 64 : step * kStride<Op>;
}
template <class Op>
inline constexpr u32 kWarpColumns = Op::kPairsSteps ? 128 : 64;

// Columns of a permuted matrix meet activations that a table in global memory names, 16 bits for each column. Threads gather
// them: a word has two, and is its own ready flag. As long as one is missing so are all 8.
struct Gathered8 {
  const u8* query;  // the activations of a query
  const u16* table;  // from the lane's first column on

  __device__ __forceinline__ uint4 load(u32 column) const {
    const uint4 places = __ldg(reinterpret_cast<const uint4*>(table + column));
    const u32 pairs[4] = {places.x, places.y, places.z, places.w};
    u32 words[8], v[4];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) words[i] = word(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xFFFF);
    bool ready = true;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) ready &= is_present(words[i]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 odd = pairs[i] & 0x00010001, halves = 0x5410 + (odd & 1) * 0x22 + (odd >> 16) * 0x2200;
      v[i] = ready ? present(__byte_perm(words[2 * i], words[2 * i + 1], halves)) : kSentinel;
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
  }

 private:
  __device__ __forceinline__ u32 word(u32 k) const {
    const u32 at = k / 32 * (kRoomQueries * 64) + k % 32 / 2 * 4;
    return __float_as_uint(load_exchanged(reinterpret_cast<const float*>(query + at)));
  }
};

// Activations of the round in global memory.
template <class Op>
struct GlobalOperand {
  static_assert(!Op::kPermuted || kArithmetic<Op> != Arithmetic::kPlain, "values of 16 bits lie in the order of columns");
  static constexpr u32 kLoads = kPairs<Op> ? 1 : 2;  // of a step
  const u8* lane_base;
  bool active;
  u32 converted, powers;  // of the warp, in shared memory
  // Of half a step: bytes from where a warp's columns of a whole one begin back to those that it has; whether the lane has any.
  u32 half_step;
  bool has_half;
  Gathered8 gathered;  // of a permuted matrix

  // `vectors`: where those of the layer begin.
  template <class C>
  __device__ __forceinline__ GlobalOperand(const u8* buffer, const C& cx, u64 vectors = 0)
      : lane_base(buffer + (cx.warp * (kWarpColumns<Op> / 32) * kRoomQueries + cx.lane / 4) * 64 + cx.lane % 4 * 16),
        active(cx.lane / 4 < (kPairs<Op> ? 2 : cx.queries)) {
    if constexpr (Op::kEndsInHalf) {
      half_step = cx.warp * (kRoomQueries * 64);
      has_half = !kPairs<Op> || cx.lane / 4 == 0;  // of two halves that come by one load there is the first
    }
    if constexpr (kConverts<Op>) {
      lane_base = buffer + cx.warp * (kWarpColumns<Op> * 2) + cx.lane % 8 * 16;
      converted = cx.shared.converted() + cx.warp * (kConvertedSteps * 128);
      powers = cx.shared.converted() + kConsumerWarps * kConvertedSteps * 128 + cx.warp * (kConvertedSteps * 4);
    }
    if constexpr (Op::kPermuted) {
      const u32 query = kConverts<Op> ? 0 : cx.lane / 4, column = cx.warp * 64 + cx.lane % (kConverts<Op> ? 8 : 4) * 8;
      gathered.query = buffer + query * 64;
      gathered.table = reinterpret_cast<const u16*>(cx.vectors(vectors + Op::kTable)) + column;
    }
  }
  template <bool kGathers>
  __device__ __forceinline__ uint4 load(u32 step, u32 part) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if constexpr (Op::kEndsInHalf)
      if (step + 1 == Op::kSteps) {
        if (active && has_half && part == 0) v = load_exchanged(lane_base + step * (kStepColumns / 32 * kRoomQueries * 64) - half_step);
        return v;
      }
    if constexpr (kGathers) {
      if (active) v = gathered.load(step * kStepColumns + part * 32);
    } else {
      if (active) v = load_exchanged(lane_base + (step_column<Op>(step) / 32 + part) * (kRoomQueries * 64));
    }
    return v;
  }
  // The same of step `d` of a turn of the loop whose steps are those from `first` on, an even number if steps are paired. What is not
  // loaded stays as it is.
  __device__ __forceinline__ void load(uint4& v, u32 first, u32 d, u32 part) const {
    constexpr u32 kBlockBytes = kRoomQueries * 64;
    if (active) v = load_exchanged(lane_base + first * (kStepColumns / 32 * kBlockBytes) + (step_column<Op>(d) / 32 + part) * kBlockBytes);
  }
};

// Activations of the next steps, in registers.
template <class Op, bool = kConverts<Op>>
struct Ahead {
  static constexpr u32 kLoads = GlobalOperand<Op>::kLoads;
  // A turn's activations have one address. Elsewhere the compiler spills more then, or nobody has looked.
  static constexpr bool kByTurns = !Op::kPermuted && kArithmetic<Op> == Arithmetic::kIntegers;
  uint4 b[Op::kDepth][kLoads];

  template <bool kGathers = Op::kPermuted>
  __device__ __forceinline__ void load(const GlobalOperand<Op>& operand, u32 d, u32 step) {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) b[d][i] = operand.template load<kGathers>(step, i);
  }
  // Step `d` of a turn, once more or in the place of the same step of another turn.
  __device__ __forceinline__ void load_again(const GlobalOperand<Op>& operand, u32 d, u32 first) {
    if constexpr (!kByTurns) {
      load(operand, d, first + d);
    } else {
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) operand.load(b[d][i], first, d, i);
    }
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
  // Load the first steps, all at once until all are there. `multiply` sees to the others one by one. To gather them takes many
  // times the traffic of loading as many in order, so these are waited for first.
  template <bool kGathers = Op::kPermuted>
  __device__ __forceinline__ void fill(const GlobalOperand<Op>& operand) {
    if constexpr (kGathers) fill<false>(operand);
#pragma unroll 1
    for (;;) {
      bool ready = true;
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) load<kGathers>(operand, d, d);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) sums[d % 2] = missing(d, sums[d % 2]);
      if (__all_sync(~0u, sums[0] + sums[1] == 0.0f)) return;
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) ready = ready && is_there(d);
      if (__all_sync(~0u, ready)) return;
    }
  }
  // Until those of a step are there. The first steps were asked for together.
  __device__ __forceinline__ void await(const GlobalOperand<Op>& operand, u32 d, u32 first) {
    if (first > 0 || Op::kSteps > Op::kDepth)
#pragma unroll 1
      while (!__all_sync(~0u, missing(d) == 0.0f) && !__all_sync(~0u, is_there(d))) load_again(operand, d, first);
  }
  // After the last use of these activations, of so many steps from `d` on: ask for those that take their registers.
  template <bool kAgain, u32 kCount = 1>
  __device__ __forceinline__ void ask_for_next(const GlobalOperand<Op>& operand, u32 d, u32 first) {
    constexpr bool kWhole = Op::kSteps % Op::kDepth == 0;
    const u32 next = first + d + Op::kDepth;
    const bool is_behind = next >= Op::kSteps && !(kAgain && kWhole);
    const u32 step = next < Op::kSteps ? next : next - Op::kSteps;
    if constexpr (kMovesRegisters && kByTurns && kCount == 2 && kLoads == 2) {  // elsewhere addresses are spilled
      constexpr u32 kBlockBytes = kRoomQueries * 64, kNext = step_column<Op>(1) / 32 * kBlockBytes;
      const u8* from = operand.lane_base + (step - d) * (kStepColumns / 32 * kBlockBytes) + step_column<Op>(d) / 32 * kBlockBytes;
      load_exchanged_if<kBlockBytes, kNext, kNext + kBlockBytes>(operand.active && !is_behind, from, b[d][0], b[d][1], b[d + 1][0],
                                                                 b[d + 1][1]);
      return;
    }
    if (is_behind) return;
#pragma unroll
    for (u32 k = 0; k < kCount; ++k) {
      if constexpr (kByTurns) load_again(operand, d + k, step - d);
      else load(operand, d + k, step + k);
    }
  }
};
