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
  // The row's share of a sum, but for the power of two of activations.
  __device__ __forceinline__ float product(u32 row, u32 column, float scale, float offset) const {
    float product = __fmul_rn(__fmaf_rn(256.0f, __int2float_rn(high[row][column]), __int2float_rn(low[row][column])), scale);
    if constexpr (Format::kOffsets) {
      const i32 taken = 256 * high_offsets[row][column] + low_offsets[row][column];
      product = __fmaf_rn(-__int2float_rn(taken), offset, product);
    }
    return product;
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
template <class Op, bool kAgain, u32 kHalves, bool = kConverts<Op>>
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
    const Scaling scaling(largest_that_came(operand, ahead, d, kSpan, first));
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
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, u32, const Format& one, const Format& other) const {
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
    for (u32 c = 0; c < 2; ++c) sum[row * 2 + c] = __fmaf_rn(x.product(row, c, scale, offset), powers[step][c], sum[row * 2 + c]);
  }
};

// One query. Its digits take two columns of a multiply, which has eight: four tiles in a row are multiplied with activations in two
// columns each, so that lane (g, q) ends with the sums of the tile that is q-th of them, and all lanes have something to do. Of groups
// of 16 columns both digits take two columns for the first 16 of 32 and two for the others: even tiles meet in one sum, odd ones in
// another, and two lanes exchange what the other one's tile has. Blocks with no more than two tiles have those of two pairs of steps
// dealt together.
template <class Op, bool kAgain, u32 kHalves>
struct SuperBlockSteps<Op, kAgain, kHalves, true> {
  using Format = typename Op::Format;
  using Totals = SuperTotals<Format, 1>;
  static constexpr u32 kSpan = Op::kPairsSteps ? 2 : 1, kTileBytes = 2 * Format::kHalfBytes;
  static constexpr u32 kTiles = kHalves / 2, kSlot = Op::kSlotTiles > kSpan ? Op::kSlotTiles / kSpan : 1;
  static constexpr bool kOdd = kHalves % 2;
  static constexpr bool kTwice = kTiles <= kDealtTiles / 2 && Op::kPairsSteps && Op::kDepth % 4 == 0 && Op::kSteps % 4 == 0;
  // Sums of tiles: of even and odd ones where groups have 16 columns.
  static constexpr u32 kSets = Format::kGroups / 2, kPlaces = kDealtTiles / kSets;
  // So many tiles, or pairs of one in two steps, lie in a slot of which all are dealt together.
  static constexpr u32 kRun = kSets == 1 && !kOdd && kTiles % kSlot == 0 ? kSlot : 1;
  Conversion<Op, kAgain> conversion;
  u32 lane;
  // Of two steps: digits in the columns of each place, which are zero in all others, and in all columns.
  uint4 b[2][kPlaces], all[2];
  float powers[2];                // of a pair of steps, or of two
  u32 high_sums[2], low_sums[2];  // of the steps whose sums the lane has
  // Of the tiles at hand: sums over 32 columns; what the lane's own tile has beside its values, and scales of all whose sums it has.
  i32 c[kSpan][2][kSets][4];
  Format own[kSpan];
  u32 scales[kSpan][kSets][2];

  __device__ __forceinline__ SuperBlockSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : conversion{operand, ahead, lane}, lane(lane) {
#pragma unroll
    for (u32 step = 0; step < 2; ++step)
#pragma unroll
      for (u32 i = 0; i < kPlaces; ++i) b[step][i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void start() { conversion.start(); }

  // The `i`-th tile of a turn. A lane takes what its own tile has beside its values, with the first of a run.
  template <class Order, class Fragments>
  __device__ __forceinline__ void load(Fragments& w, u32 i, u32 tile, const typename Fragments::Place& place) const {
    if (Order::is_left_over(i)) return w.load(tile, place, Order::is_full(i), true);
    w.load_values(tile, place);
    const u32 t = Op::kPairsSteps ? i / 2 % kTiles : Order::tile(i);
    if (t % kRun == 0) w.load_scales(tile + lane % kRun * (kSpan * kTileBytes), place);
  }

  // Step `d` of those from `first` on, and of a pair the next one, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    u32 at = 0;
#pragma unroll
    for (u32 k = 0; k < kSpan; ++k) {
      const u32 step = (d + k) % 2;
      at = conversion.place(d + k, first);
      // Lanes of other columns keep their zeros.
#pragma unroll
      for (u32 i = 0; i < kPlaces; ++i)
        if (is_met(i, d)) load_shared_if(takes(i), b[step][i], conversion.address(at));
      if constexpr (Format::kOffsets || kOdd) all[step] = load_shared(conversion.address(at));
      if constexpr (Format::kOffsets) add_up(step, d);
    }
    powers[Op::kPairsSteps ? d / 2 % 2 : d % 2] = conversion.power(at);
  }
  __device__ __forceinline__ void release(u32, u32) {}

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, u32 d, const Format& w) {
    add(w, 0, d, t);
    finish_last(kept, t, d);
  }
  // Tile `t` of both steps of a pair.
  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, u32 d, const Format& one, const Format& other) {
    add(one, 0, d, t);
    add(other, 1, d + 1, t);
    finish_last(kept, t, d);
  }
  // 8 rows, in the first or second of two steps. All lanes of a quad have their sum.
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& kept, u32 t, u32 d, const Format& w, bool second) const {
    Totals total;
#pragma unroll
    for (u32 part = 0; part < 2; ++part) {
      i32 of_both[4], of_first[4];
      multiply<Format::kSigned>(of_both, w.half_operand(second, part), all[d % 2], part, ~0u);
      const u32 n = part * Format::kGroups / 2;
      const i32 first = w.template scale<true>(n, second), last = w.template scale<true>(n + Format::kGroups / 2 - 1, second);
      // What both groups of 16 have is multiplied with the second one's scale.
      total.add(0, 0, last, of_both[0], of_both[1]);
      if constexpr (kSets > 1) {
        multiply<Format::kSigned>(of_first, w.half_operand(second, part), all[d % 2], part, first_lanes(lane));
        total.add(0, 0, first - last, of_first[0], of_first[1]);
      }
    }
    if constexpr (Format::kOffsets) total.template add_offsets<true>(0, 0, w, second, high_sums[d % 2], low_sums[d % 2]);
    const float product = total.product(0, 0, w.super_scale(second) * Format::kHalfInverse, super_offset_of(w, second));
    float& sum = kept.c[t / kDealtTiles * kDealtTiles][0][1];
    sum = __fmaf_rn(product, powers[d % 2], sum);
  }

 private:
  // Whether step `d` is one of the second pair of two whose tiles are dealt together.
  static __device__ __forceinline__ bool is_second(u32 d) { return kTwice && d / 2 % 2; }
  // Which of the tiles that are dealt together tile `t` is.
  static __device__ __forceinline__ u32 dealt(u32 t, u32 d) { return is_second(d) ? t + 2 : t % kDealtTiles; }
  // Whether tiles of step `d` meet digits in the `i`-th place.
  static __device__ __forceinline__ bool is_met(u32 i, u32 d) {
    const u32 first = dealt(0, d) / kSets, tiles = kTiles < kDealtTiles ? kTiles : kDealtTiles;
    return i >= first && i < first + (tiles + kSets - 1) / kSets;
  }
  // Whether the lane has digits for columns of the `i`-th place.
  __device__ __forceinline__ bool takes(u32 i) const {
    if constexpr (kSets == 1) return lane / 8 == i;
    else return lane / 16 == i && lane % 4 / 2 == lane / 8 % 2;
  }
  // Products with 32 columns of activations.
  template <bool kSigned>
  static __device__ __forceinline__ void multiply(i32 (&d)[4], uint4 a, uint4 b, u32 part, u32 mask) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) d[i] = 0;
    mma<kSigned>(d, a, (part ? b.z : b.x) & mask, (part ? b.w : b.y) & mask, d);
  }
  __device__ __forceinline__ void add_up(u32 step, u32 d) {
    const uint4 ones = make_uint4(0x01010101, 0x01010101, 0x01010101, 0x01010101);
    i32 of[2][4];
#pragma unroll
    for (u32 part = 0; part < 2; ++part) multiply<true>(of[part], ones, all[step], part, ~0u);
    if (is_second(d) && lane % 4 < 2) return;  // its tile is one of the first pair of steps
    high_sums[step] = two_sums(of[0][0], of[1][0]), low_sums[step] = two_sums(of[0][1], of[1][1]);
  }
  // Products of tile `t` with the 64 columns of step `d`, which is the `s`-th of a span.
  __device__ __forceinline__ void add(const Format& w, u32 s, u32 d, u32 t) {
    const u32 k = dealt(t, d), place = k / kSets, set = k % kSets;
    const uint4 x = b[d % 2][place];
#pragma unroll
    for (u32 part = 0; part < 2; ++part) {
      i32(&sums)[4] = c[s][part][set];
      if (place == 0)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sums[i] = 0;
      mma<Format::kSigned>(sums, w.operand(part), part ? x.z : x.x, part ? x.w : x.y, sums);
      if (kSets > 1) scales[s][set][part] = place == 0 || lane % 4 / 2 == place ? w.scales[part % kSets] : scales[s][set][part];
    }
    if (t % kRun == 0) own[s].take_shared(w, k == 0 || lane % 4 - k < kRun);
  }
  template <class Sums>
  __device__ __forceinline__ void finish_last(Sums& kept, u32 t, u32 d) const {
    if ((t % kDealtTiles + 1 < kDealtTiles && t + 1 < kTiles) || (kTwice && !is_second(d))) return;
    Totals total = scaled(t % kDealtTiles > 0);
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
      if constexpr (Format::kOffsets)
#pragma unroll
        for (u32 s = 0; s < kSpan; ++s) {
          const u32 of = Op::kPairsSteps ? s : d % 2;
          total.template add_offsets<false>(row, 0, own[s], 0, high_sums[of], low_sums[of]);
        }
      // Of a pair the first tile has what super-blocks have for rows g, and the second one for rows g + 8.
      const Format& w = own[Op::kPairsSteps ? row : 0];
      const u32 which = Op::kPairsSteps ? 0 : row;
      const float product = total.product(row, 0, super_scale_of(w, row, which), super_offset_of(w, which));
      float& sum = kept.c[t / kDealtTiles * kDealtTiles][0][row * 2];
      if constexpr (kTwice) {
        const float other = __shfl_xor_sync(~0u, product, 2);
        const bool has_first = lane % 4 < 2;
        sum = __fmaf_rn(has_first ? product : other, powers[0], sum);
        sum = __fmaf_rn(has_first ? other : product, powers[1], sum);
      } else {
        sum = __fmaf_rn(product, powers[Op::kPairsSteps ? d / 2 % 2 : d % 2], sum);
      }
    }
  }
  // Sums of groups times their scales. `both`: there are odd tiles, too.
  __device__ __forceinline__ Totals scaled(bool both) const {
    Totals total[kSets];
#pragma unroll
    for (u32 set = 0; set < kSets; ++set)
#pragma unroll
      for (u32 row = 0; row < 2; ++row)
#pragma unroll
        for (u32 s = 0; s < kSpan; ++s)
#pragma unroll
          for (u32 part = 0; part < 2; ++part) {
            if (set > 0 && !both) continue;
            const i32 scale = kSets > 1 ? signed_byte(scales[s][set][part], lane % 2 * 2 + row) : own[s].template scale<false>(part, row);
            total[set].add(row, 0, scale, c[s][part][set][row * 2], c[s][part][set][row * 2 + 1]);
          }
    if constexpr (kSets > 1)
#pragma unroll
      for (u32 row = 0; row < 2; ++row) {
        total[0].high[row][0] = joined(total[0].high[row][0], total[1].high[row][0], both);
        total[0].low[row][0] = joined(total[0].low[row][0], total[1].low[row][0], both);
      }
    return total[0];
  }
  // A neighbour has what the other 16 of 32 columns make of both lanes' tiles.
  __device__ __forceinline__ i32 joined(i32 even, i32 odd, bool both) const {
    if (!both) return even + static_cast<i32>(__shfl_xor_sync(~0u, static_cast<u32>(even), 1));
    const bool is_odd = lane % 2;
    return (is_odd ? odd : even) + static_cast<i32>(__shfl_xor_sync(~0u, static_cast<u32>(is_odd ? even : odd), 1));
  }
};
