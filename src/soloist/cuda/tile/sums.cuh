// A warp's partial sums of its rows, and how activations times weights join them.
#pragma once
#include "tile/scaled.cuh"
#include "tile/super_blocks.cuh"

// With one query tiles of super-blocks are dealt to the four lanes of a quad, see tile/super_blocks.cuh.
template <class Op>
struct Sums {
  // Where the sums of a step are scaled there is one chain of them.
  static constexpr u32 kKept = kArithmetic<Op> == Arithmetic::kPlain ? kChains<Op> : 1;
  float c[Op::kTiles][kKept][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 t = 0; t < Op::kTiles; ++t)
#pragma unroll
      for (u32 k = 0; k < kKept; ++k)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) c[t][k][i] = 0.0f;
  }
  // Chain k has quarters k, k + kChains, … of a step: of the first half, the second, the first, the second.
  __device__ __forceinline__ float(&chain(u32 t, u32 quarter))[4] { return c[t][quarter % kKept]; }
  __device__ __forceinline__ float total(u32 t, u32 i) const {
    if constexpr (kKept == 1) {
      return c[t][0][i];
    } else {
      const u32 second = kPairs<Op> ? i | 1 : i;
      const float half = c[t][0][i] + c[t][1][second];
      return kKept == 2 ? half : half + (c[t][kKept - 2][i] + c[t][kKept - 1][second]);
    }
  }
};

// The steps of a multiply of 16-bit values with activations that came to registers.
template <class Op, bool kAgain>
struct PlainSteps {
  const GlobalOperand<Op>& operand;
  Ahead<Op>& ahead;

  __device__ __forceinline__ PlainSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32) : operand(operand), ahead(ahead) {}
  __device__ __forceinline__ void prepare(u32 d, u32 first) { ahead.await(operand, d, first); }
  __device__ __forceinline__ void release(u32 d, u32 first) { ahead.template ask_for_next<kAgain>(operand, d, first); }

  __device__ __forceinline__ void multiply_tile(Sums<Op>& sums, u32 t, u32 d, const typename Op::Format& w) const {
    const uint4 b0 = ahead.b[d][0], b1 = ahead.b[d][Ahead<Op>::kLoads - 1];
    const uint4(&x)[2] = w.low;
    const uint4(&y)[2] = w.high;
    mma(sums.chain(t, 0), x[0].x, x[0].y, x[0].z, x[0].w, b0.x, b0.y);
    mma(sums.chain(t, 1), y[0].x, y[0].y, y[0].z, y[0].w, b1.x, b1.y);
    mma(sums.chain(t, 2), x[1].x, x[1].y, x[1].z, x[1].w, b0.z, b0.w);
    mma(sums.chain(t, 3), y[1].x, y[1].y, y[1].z, y[1].w, b1.z, b1.w);
  }
  // 8 rows, both halves of the step in half a tile.
  __device__ __forceinline__ void multiply_half_tile(Sums<Op>& sums, u32 t, u32 d, const typename Op::Format& w, bool second) const {
    const uint4 b0 = ahead.b[d][0], b1 = ahead.b[d][Ahead<Op>::kLoads - 1];
    const uint4(&x)[2] = second ? w.high : w.low;
    mma(sums.chain(t, 0), x[0].x, 0, x[0].y, 0, b0.x, b0.y);
    mma(sums.chain(t, 1), x[1].x, 0, x[1].y, 0, b1.x, b1.y);
    mma(sums.chain(t, 2), x[0].z, 0, x[0].w, 0, b0.z, b0.w);
    mma(sums.chain(t, 3), x[1].z, 0, x[1].w, 0, b1.z, b1.w);
  }
};

// kHalves: how many times 8 rows are multiplied.
template <class Op, bool kAgain, u32 kHalves, Arithmetic = kArithmetic<Op>, bool = Op::kPairsSteps>
struct StepsOf {
  using Type = PlainSteps<Op, kAgain>;
};
template <class Op, bool kAgain, u32 kHalves>
struct StepsOf<Op, kAgain, kHalves, Arithmetic::kScaled, false> {
  using Type = ScaledSteps<Op, kAgain>;
};
template <class Op, bool kAgain, u32 kHalves>
struct StepsOf<Op, kAgain, kHalves, Arithmetic::kIntegers, false> {
  using Type = IntegerSteps<Op, kAgain>;
};
template <class Op, bool kAgain, u32 kHalves>
struct StepsOf<Op, kAgain, kHalves, Arithmetic::kIntegers, true> {
  using Type = PairedSteps<Op, kAgain>;
};
template <class Op, bool kAgain, u32 kHalves, bool kPairsSteps>
struct StepsOf<Op, kAgain, kHalves, Arithmetic::kSuperBlocks, kPairsSteps> {
  using Type = SuperBlockSteps<Op, kAgain, kHalves>;
};

// Calls `store(row, value)` with the sums that a lane has where tiles were dealt: of tile t, whose rows g and g + 8 are the t % 4-th
// lane's of each quad, and of 8 rows that are left over.
template <class Op, class Store>
__device__ __forceinline__ void for_each_dealt(const Sums<Op>& sums, u32 half_tiles, u32 lane, const Store& store) {
#pragma unroll
  for (u32 t = 0; t < Op::kTiles; ++t) {
    if (2 * t >= half_tiles || lane % kDealtTiles != t % kDealtTiles) continue;
    const float(&own)[4] = sums.c[t / kDealtTiles * kDealtTiles][0];
    const u32 row = t * 16 + lane / 4;
    if (2 * t + 1 == half_tiles) {
      store(row, own[1]);
    } else {
      store(row, own[0]);
      store(row + 8, own[2]);
    }
  }
}
