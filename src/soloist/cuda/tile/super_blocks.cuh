// The steps of a multiply of integers whose scales are integers within super-blocks.
//
// Sums over a group's columns times the group's integer are integers, and so are their sums over all of a warp's columns of a step or
// of a pair: high digits and low ones apart, since together they may take more than 32 bits. So no order of adding up shows. Once
// they become fp32, and are multiplied by what the super-block has. Offsets are multiplied with sums of activations.
#pragma once
#include "tile/integers.cuh"

// What sums of a lane's rows g and g + 8 come to, each of so many queries.
template <class Format, u32 kColumns>
struct SuperTotals {
  i32 high[2][kColumns] = {}, low[2][kColumns] = {}, high_offsets[2][kColumns] = {}, low_offsets[2][kColumns] = {};

  // Products with a group's columns, of a row, times its scale.
  __device__ __forceinline__ void add(u32 row, u32 column, i32 times, i32 of_high, i32 of_low) {
    high[row][column] += times * of_high;
    low[row][column] += times * of_low;
  }
  // Digits of activations, summed over the first and the last 32 columns, times two offsets.
  template <bool kHalf>
  __device__ __forceinline__ void add_offsets(u32 row, u32 column, const Format& w, u32 which, u32 of_high, u32 of_low) {
    const bool upper = kHalf ? which : row;
    high_offsets[row][column] = dot2(of_high, w.offsets, upper, high_offsets[row][column]);
    low_offsets[row][column] = dot2(of_low, w.offsets, upper, low_offsets[row][column]);
  }
  // The row's share of a sum.
  __device__ __forceinline__ void finish(float& sum, u32 row, u32 column, float scale, float offset, float power) const {
    float product = __fmul_rn(__fmaf_rn(256.0f, __int2float_rn(high[row][column]), __int2float_rn(low[row][column])), scale);
    if constexpr (Format::kOffsets) {
      const i32 taken = 256 * high_offsets[row][column] + low_offsets[row][column];
      product = __fmaf_rn(-__int2float_rn(taken), offset, product);
    }
    sum = __fmaf_rn(product, power, sum);
  }
};
// By what sums of row g or g + 8 are multiplied; `which`: as of `Format::super_scale`.
template <class Format>
__device__ __forceinline__ float super_scale_of(const Format& w, u32 row, u32 which) {
  return w.super_scale(which) * (row ? Format::kSecondInverse : Format::kInverse);
}
template <class Format>
__device__ __forceinline__ float super_offset_of(const Format& w, u32 which) {
  return Format::kOffsets ? w.super_offset(which) : 0.0f;
}
// Two sums of digits, which 16 bits hold.
__device__ __forceinline__ u32 two_sums(i32 first, i32 second) { return __byte_perm(first, second, 0x5410); }
// For the first 16 of 32 columns, which two lanes of four have.
__device__ __forceinline__ u32 first_lanes(u32 lane) { return lane % 4 < 2 ? ~0u : 0; }

// Several queries.
template <class Op, bool kAgain, bool = kConverts<Op>>
struct SuperBlockSteps {
  using Format = typename Op::Format;
  using Totals = SuperTotals<Format, 2>;
  static constexpr u32 kSpan = Op::kPairsSteps ? 2 : 1;
  const GlobalOperand<Op>& operand;
  Ahead<Op>& ahead;
  u32 lane;
  uint4 b[2][2];  // of two steps high digits, and low ones
  float powers[2][2];  // of the queries whose sums the lane has
  u32 high_sums[2][2], low_sums[2][2];  // of a step's columns, of these queries

  __device__ __forceinline__ SuperBlockSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : operand(operand), ahead(ahead), lane(lane) {}
  __device__ __forceinline__ void start() {}
  // Step `d` of those from `first` on, and of a pair the next one, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    const Scaling scaling(most_of_lanes(largest_that_came(operand, ahead, d, kSpan, first), 4));
#pragma unroll
    for (u32 k = 0; k < kSpan; ++k) {
      const u32 step = (d + k) % 2;
      const Digits<true> x(ahead.b[d + k][0], scaling.inverse), y(ahead.b[d + k][1], scaling.inverse);
      b[step][0] = make_uint4(x.high[0], x.high[1], y.high[0], y.high[1]);
      b[step][1] = make_uint4(x.low[0], x.low[1], y.low[0], y.low[1]);
      ahead.template ask_for_next<kAgain>(operand, d + k, first);
      if constexpr (Format::kOffsets) add_up(step);
    }
#pragma unroll
    for (u32 c = 0; c < 2; ++c) powers[d % 2][c] = __shfl_sync(~0u, scaling.scale, (threadIdx.x % 4 * 2 + c) * 4);
  }
  __device__ __forceinline__ void release(u32, u32) {}

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, u32 d, const Format& w) const {
    Totals x;
    add<false>(x, w, d % 2, 0);
#pragma unroll
    for (u32 row = 0; row < 2; ++row) finish(kept.c[t][0], x, row, d % 2, w, row);
  }
  // Tile `t` of both steps of a pair.
  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, const Format& one, const Format& other) const {
    Totals x;
    add<false>(x, one, 0, 0);
    add<false>(x, other, 1, 0);
    finish(kept.c[t][0], x, 0, 0, one, 0);
    finish(kept.c[t][0], x, 1, 0, other, 0);
  }
  // 8 rows, in the first or second of two steps.
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& kept, u32 t, u32 d, const Format& w, bool second) const {
    Totals x;
    add<true>(x, w, d % 2, second);
    finish(kept.c[t][0], x, 0, d % 2, w, second);
  }

 private:
  __device__ __forceinline__ void multiply(i32 (&high)[4], i32 (&low)[4], uint4 a, u32 step, u32 part, u32 mask) const {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) high[i] = low[i] = 0;
    const uint4 x = b[step][0], y = b[step][1];
    mma<Format::kSigned>(high, a, (part ? x.z : x.x) & mask, (part ? x.w : x.y) & mask, high);
    mma<Format::kSigned>(low, a, (part ? y.z : y.x) & mask, (part ? y.w : y.y) & mask, low);
  }
  __device__ __forceinline__ void add_up(u32 step) {
    const uint4 ones = make_uint4(0x01010101, 0x01010101, 0x01010101, 0x01010101);
    i32 high[2][4], low[2][4];
#pragma unroll
    for (u32 part = 0; part < 2; ++part) multiply(high[part], low[part], ones, step, part, ~0u);
#pragma unroll
    for (u32 c = 0; c < 2; ++c) high_sums[step][c] = two_sums(high[0][c], high[1][c]), low_sums[step][c] = two_sums(low[0][c], low[1][c]);
  }
  // Products with the 64 columns of a step; of a half tile those of its first or second step.
  template <bool kHalf>
  __device__ __forceinline__ void add(Totals& x, const Format& w, u32 step, u32 which) const {
    constexpr u32 kRows = kHalf ? 1 : 2;
#pragma unroll
    for (u32 part = 0; part < 2; ++part) {
      const uint4 a = kHalf ? w.half_operand(which, part) : w.operand(part);
      i32 high[4], low[4], first_high[4], first_low[4];
      multiply(high, low, a, step, part, ~0u);
      if constexpr (Format::kGroups > 2) multiply(first_high, first_low, a, step, part, first_lanes(lane));
#pragma unroll
      for (u32 row = 0; row < kRows; ++row) {
        const u32 n = part * Format::kGroups / 2, own = kHalf ? which : row;
        const i32 first = w.template scale<kHalf>(n, own), last = w.template scale<kHalf>(n + Format::kGroups / 2 - 1, own);
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
          const u32 i = row * 2 + c;
          // What both groups of 16 have is multiplied with the second one's scale.
          x.add(row, c, last, high[i], low[i]);
          if constexpr (Format::kGroups > 2) x.add(row, c, first - last, first_high[i], first_low[i]);
        }
      }
    }
    if constexpr (Format::kOffsets)
#pragma unroll
      for (u32 row = 0; row < kRows; ++row)
#pragma unroll
        for (u32 c = 0; c < 2; ++c) x.template add_offsets<kHalf>(row, c, w, which, high_sums[step][c], low_sums[step][c]);
  }
  __device__ __forceinline__ void finish(float (&sum)[4], const Totals& x, u32 row, u32 step, const Format& w, u32 which) const {
    const float scale = super_scale_of(w, row, which), offset = super_offset_of(w, which);
#pragma unroll
    for (u32 c = 0; c < 2; ++c) x.finish(sum[row * 2 + c], row, c, scale, offset, powers[step][c]);
  }
};

// One query. Its digits take two columns of a multiply, which has eight: four tiles in a row are multiplied with activations in two
// columns each, so that lane (g, q) ends with the sums of the tile that is q-th of them, and all lanes have something to do.
template <class Op, bool kAgain>
struct SuperBlockSteps<Op, kAgain, true> {
  using Format = typename Op::Format;
  using Totals = SuperTotals<Format, 1>;
  static constexpr u32 kSpan = Op::kPairsSteps ? 2 : 1;
  Conversion<Op, kAgain> conversion;
  u32 lane, tiles = 0;  // whole tiles of the block's rows
  Converted x[2];
  u32 high_sums[2], low_sums[2];
  // Of the tiles at hand: sums over 32 columns, and over the first 16 of them; what the lane's own tile has beside its values.
  i32 c[kSpan][2][Format::kGroups / 2][4];
  Format own[kSpan];

  __device__ __forceinline__ SuperBlockSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : conversion{operand, ahead, lane}, lane(lane) {}
  __device__ __forceinline__ void start() { conversion.start(); }
  // Step `d` of those from `first` on, and of a pair the next one, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
#pragma unroll
    for (u32 k = 0; k < kSpan; ++k) {
      const u32 step = (d + k) % 2;
      x[step] = conversion.take(d + k, first);
      if constexpr (Format::kOffsets) add_up(step);
    }
  }
  __device__ __forceinline__ void release(u32, u32) {}

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, u32 d, const Format& w) {
    add(w, 0, d % 2, t % kDealtTiles);
    finish_last(kept, t, d % 2);
  }
  // Tile `t` of both steps of a pair.
  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, const Format& one, const Format& other) {
    add(one, 0, 0, t % kDealtTiles);
    add(other, 1, 1, t % kDealtTiles);
    finish_last(kept, t, 0);
  }
  // 8 rows, in the first or second of two steps. All lanes of a quad have their sum.
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& kept, u32 t, u32 d, const Format& w, bool second) const {
    Totals total;
    const Converted& activations = x[d % 2];
#pragma unroll
    for (u32 part = 0; part < 2; ++part) {
      i32 all[4], first[4];
      multiply<Format::kSigned>(all, w.half_operand(second, part), activations.b, part, ~0u, false);
      if constexpr (Format::kGroups > 2)
        multiply<Format::kSigned>(first, w.half_operand(second, part), activations.b, part, first_lanes(lane), false);
      const u32 n = part * Format::kGroups / 2;
      add_times<true>(total, w, n, 0, second, all, first);
    }
    if constexpr (Format::kOffsets) total.template add_offsets<true>(0, 0, w, second, high_sums[d % 2], low_sums[d % 2]);
    total.finish(kept.c[t / kDealtTiles * kDealtTiles][0][1], 0, 0, w.super_scale(second) * Format::kHalfInverse,
                 super_offset_of(w, second), activations.power);
  }

 private:
  // Products with 32 columns of activations, and what is there if `goes_on`.
  template <bool kSigned>
  static __device__ __forceinline__ void multiply(i32 (&d)[4], uint4 a, uint4 b, u32 part, u32 mask, bool goes_on) {
    if (!goes_on)
#pragma unroll
      for (u32 i = 0; i < 4; ++i) d[i] = 0;
    mma<kSigned>(d, a, (part ? b.z : b.x) & mask, (part ? b.w : b.y) & mask, d);
  }
  __device__ __forceinline__ void add_up(u32 step) {
    const uint4 ones = make_uint4(0x01010101, 0x01010101, 0x01010101, 0x01010101);
    i32 of[2][4];
#pragma unroll
    for (u32 part = 0; part < 2; ++part) multiply<true>(of[part], ones, x[step].b, part, ~0u, false);
    high_sums[step] = two_sums(of[0][0], of[1][0]), low_sums[step] = two_sums(of[0][1], of[1][1]);
  }
  // The `k`-th tile's products with the 64 columns of a step, which is the `s`-th of a span.
  __device__ __forceinline__ void add(const Format& w, u32 s, u32 step, u32 k) {
    const u32 mask = lane / 8 == k ? ~0u : 0;  // columns 2 k and 2 k + 1
#pragma unroll
    for (u32 part = 0; part < 2; ++part) {
      const uint4 a = w.operand(part);
      multiply<Format::kSigned>(c[s][part][0], a, x[step].b, part, mask, k > 0);
      if constexpr (Format::kGroups > 2) multiply<Format::kSigned>(c[s][part][1], a, x[step].b, part, mask & first_lanes(lane), k > 0);
    }
    own[s].take_shared(w, k == 0 || lane % 4 == k);
  }
  template <class Sums>
  __device__ __forceinline__ void finish_last(Sums& kept, u32 t, u32 step) const {
    if (t % kDealtTiles + 1 < kDealtTiles && t + 1 < tiles) return;
    Totals total;
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
#pragma unroll
      for (u32 s = 0; s < kSpan; ++s) {
#pragma unroll
        for (u32 part = 0; part < 2; ++part)
          add_times<false>(total, own[s], part * Format::kGroups / 2, row, row, c[s][part][0], c[s][part][Format::kGroups / 2 - 1]);
        if constexpr (Format::kOffsets) {
          const u32 of = Op::kPairsSteps ? s : step;
          total.template add_offsets<false>(row, 0, own[s], 0, high_sums[of], low_sums[of]);
        }
      }
      // Of a pair the first tile has what super-blocks have for rows g, and the second one for rows g + 8.
      const Format& w = own[Op::kPairsSteps ? row : 0];
      const u32 which = Op::kPairsSteps ? 0 : row;
      float& sum = kept.c[t / kDealtTiles * kDealtTiles][0][row * 2];
      total.finish(sum, row, 0, super_scale_of(w, row, which), super_offset_of(w, which), x[step].power);
    }
  }
  // What both groups of 16 have is multiplied with the second one's scale.
  template <bool kHalf>
  static __device__ __forceinline__ void add_times(Totals& total, const Format& w, u32 n, u32 row, u32 which, const i32 (&all)[4],
                                                   const i32 (&of_first)[4]) {
    const i32 first = w.template scale<kHalf>(n, which), last = w.template scale<kHalf>(n + Format::kGroups / 2 - 1, which);
    total.add(row, 0, last, all[row * 2], all[row * 2 + 1]);
    if constexpr (Format::kGroups > 2) total.add(row, 0, first - last, of_first[row * 2], of_first[row * 2 + 1]);
  }
};
