// The steps of a multiply of weights that are integers.
#pragma once
#include "tile/one_query.cuh"

// What the zeros of weights have to do with a sum: where all weights share one, sums begin with minus the zero times the integers of
// activations. Where zeros are stored, the integers' own sums are kept.
template <class Format>
struct Zeros {
  static constexpr bool kShared = !Format::kZeros && Format::kZero != 0, kSums = Format::kZeros || Format::kOffsets || kShared;
  // Values of rows g + 8 are as many times larger.
  static constexpr i32 kSecond = static_cast<i32>(1 / Format::kSecond);

  // "Weights" whose products are those sums.
  static __device__ __forceinline__ uint4 operand() {
    constexpr u32 kBytes = 0x01010101;
    constexpr u32 kFirst = kShared ? -Format::kZero & 0xFF : 1, kLast = kShared ? -Format::kZero * kSecond & 0xFF : 1;
    return make_uint4(kFirst * kBytes, kLast * kBytes, kFirst * kBytes, kLast * kBytes);
  }
  static __device__ __forceinline__ i32 of(const Format& w, u32 group, u32 row) {
    if constexpr (!Format::kZeros) return Format::kZero;
    const u32 byte = w.zeros[group] >> 8 * row;
    return Format::kSigned ? static_cast<i32>(static_cast<signed char>(byte)) : static_cast<i32>(byte & 0xFF);
  }
};
// `times`: whether `x` is as many times too large as kSecond says.
template <class Format>
__device__ __forceinline__ void add_scaled(float& sum, i32 x, float scale, float power, bool times) {
  sum = __fmaf_rn(__fmul_rn(__int2float_rn(x), scale), times ? power * Format::kSecond : power, sum);
}

// What a group's offset adds, where there is one: that times the sum of activations.
template <class Format>
__device__ __forceinline__ void add_offset(float& sum, const Format& w, u32 group, u32 row, i32 activations, float power) {
  if constexpr (Format::kOffsets) sum = __fmaf_rn(__fmul_rn(__int2float_rn(activations), w.offsets[group].get(row)), power, sum);
}

// Waits for the activations of `count` steps from `d` on, as `Ahead::await` does, and returns the largest magnitude of the query whose
// activations the lane has. Where a word is missing that is the sentinel's, which saves a test of its own.
template <class Op>
__device__ __forceinline__ u32 largest_that_came(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 d, u32 count, u32 first) {
  const auto largest = [&] {
    u32 most = 0;
#pragma unroll
    for (u32 k = 0; k < count; ++k) {
      const uint4 first = ahead.b[d + k][0], last = ahead.b[d + k][1];
      // Packed to the end takes fewer instructions, and in super-blocks more registers.
      if constexpr (kArithmetic<Op> == Arithmetic::kIntegers)
        most = larger_magnitudes(most, larger_magnitudes(larger_magnitudes(first), larger_magnitudes(last)));
      else most = max(most, max(magnitude(first), magnitude(last)));
    }
    return kArithmetic<Op> == Arithmetic::kIntegers ? larger_half(most & 0x7FFF7FFF) : most;
  };
  bool may_miss;
  u32 of_query;
  const auto look = [&] {  // the vote and the exchange do not wait for each other
    const u32 most = largest();
    may_miss = __any_sync(~0u, most == (kSentinel & 0x7FFF));
    of_query = largest_of_quad(most);
  };
  look();
  if (first == 0 && Op::kSteps <= Op::kDepth) return of_query;  // the first steps were waited for together
#pragma unroll 1
  while (may_miss) {
    bool ready = true;
#pragma unroll
    for (u32 k = 0; k < count; ++k) ready = ready && ahead.is_there(d + k);
    if (__all_sync(~0u, ready)) break;  // activations that are no numbers
#pragma unroll
    for (u32 k = 0; k < count; ++k) ahead.load_again(operand, d + k, first);
    look();
  }
  return of_query;
}

// Several queries: all high digits are in one multiply, and all low ones in another. What multiplies take is at hand for two steps.
template <class Op, bool kAgain, bool = kConverts<Op>>
struct IntegerSteps {
  using Format = typename Op::Format;
  using Zero = Zeros<Format>;
  using Accumulators = i32[2][4];  // of high digits, and of low ones
  static constexpr u32 kGroups = Format::kGroups;
  const GlobalOperand<Op>& operand;
  Ahead<Op>& ahead;
  struct Step {
    uint4 b[2];
    float power[2];  // of the queries whose sums the lane has
    i32 sums[kGroups][2][4];
  } steps[2];

  __device__ __forceinline__ IntegerSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32) : operand(operand), ahead(ahead) {}

  __device__ __forceinline__ void start() {}
  // Step `d` of those from `first` on, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    Step& s = steps[d % 2];
    const Scaling scaling(largest_that_came(operand, ahead, d, 1, first));
    const uint4 low = ahead.b[d][0], high = ahead.b[d][1];
    const Digits<true> x(low, scaling.inverse), y(high, scaling.inverse);
    s.b[0] = make_uint4(x.high[0], x.high[1], y.high[0], y.high[1]);
    s.b[1] = make_uint4(x.low[0], x.low[1], y.low[0], y.low[1]);
#pragma unroll
    for (u32 c = 0; c < 2; ++c) s.power[c] = __shfl_sync(~0u, scaling.scale, (threadIdx.x % 4 * 2 + c) * 4);
    ahead.template ask_for_next<kAgain>(operand, d, first);
    add_up(s);
  }
  __device__ __forceinline__ void release(u32, u32) {}

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& sums, u32 t, u32 d, const Format& w) const {
    const Step& s = steps[d % 2];
#pragma unroll
    for (u32 n = 0; n < kGroups; ++n) {
      Accumulators c;
      begin(c, s, n);
      multiply<Format::kSigned>(c, w.operand(n), n, s);
      if constexpr (kGroups == 1) multiply<Format::kSigned>(c, w.operand(1), 1, s);
#pragma unroll
      for (u32 row = 0; row < 2; ++row)
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          i32 x = joined(c, row * 2 + i);
          if constexpr (Format::kZeros) x -= Zero::of(w, n, row) * joined(s.sums[n], row * 2 + i) * (row ? Zero::kSecond : 1);
          add_scaled<Format>(sums.c[t][0][row * 2 + i], x, w.scales[n].get(row), s.power[i], row);
          if constexpr (Format::kOffsets) add_offset(sums.c[t][0][row * 2 + i], w, n, row, joined(s.sums[n], row * 2 + i), s.power[i]);
        }
    }
  }
  // 8 rows; products with the last 32 columns are as many times larger as those of rows g + 8.
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& sums, u32 t, u32 d, const Format& w, bool second) const {
    const Step& s = steps[d % 2];
    Accumulators first, last = {};
    begin(first, s, 0);
    multiply<Format::kSigned>(first, w.half_operand(second, 0), 0, s);
    if constexpr (kGroups > 1) begin(last, s, 1, Zero::kSecond);
    multiply<Format::kSigned>(last, w.half_operand(second, 1), 1, s);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      i32 x = joined(first, i), y = joined(last, i);
      if constexpr (Format::kZeros) {
        x -= Zero::of(w, 0, second) * joined(s.sums[0], i);
        if constexpr (kGroups > 1) y -= Zero::of(w, 1, second) * joined(s.sums[kGroups - 1], i) * Zero::kSecond;
      }
      float& sum = sums.c[t][0][i];
      if constexpr (kGroups == 1) {
        add_scaled<Format>(sum, x * Zero::kSecond + y, w.scales[0].get(second), s.power[i], true);
      } else {
        add_scaled<Format>(sum, x, w.scales[0].get(second), s.power[i], false);
        if constexpr (Format::kOffsets) add_offset(sum, w, 0, second, joined(s.sums[0], i), s.power[i]);
        add_scaled<Format>(sum, y, w.scales[kGroups - 1].get(second), s.power[i], true);
        if constexpr (Format::kOffsets) add_offset(sum, w, kGroups - 1, second, joined(s.sums[kGroups - 1], i), s.power[i]);
      }
    }
  }

 private:
  // Products with 32 columns of weights, added to `c`.
  template <bool kSigned>
  static __device__ __forceinline__ void multiply(Accumulators& c, uint4 a, u32 part, const Step& s) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) mma<kSigned>(c[i], a, part ? s.b[i].z : s.b[i].x, part ? s.b[i].w : s.b[i].y, c[i]);
  }
  static __device__ __forceinline__ void add_up(Step& s) {
    if constexpr (Zero::kSums) {
      const uint4 a = Zero::operand();
#pragma unroll
      for (u32 n = 0; n < kGroups; ++n) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) s.sums[n][i / 4][i % 4] = 0;
        multiply<true>(s.sums[n], a, n, s);
        if constexpr (kGroups == 1) multiply<true>(s.sums[n], a, 1, s);
      }
    }
  }
  static __device__ __forceinline__ i32 joined(const Accumulators& c, u32 i) { return 256 * c[0][i] + c[1][i]; }
  static __device__ __forceinline__ void begin(Accumulators& c, const Step& s, u32 group, i32 times = 1) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i)
#pragma unroll
      for (u32 k = 0; k < 4; ++k) c[i][k] = Zero::kShared ? s.sums[group][i][k] * times : 0;
  }
};

// What multiplies take of two steps that are a pair: twice as many products have one sum.
template <class Op, bool kAgain, bool = kConverts<Op>>
struct PairedSteps {
  using Format = typename Op::Format;
  using Zero = Zeros<Format>;
  using Accumulators = i32[2][4];  // of high digits, and of low ones
  const GlobalOperand<Op>& operand;
  Ahead<Op>& ahead;
  uint4 b[2][2];  // of each step high digits, and low ones, which are unsigned
  float power[2];  // of the queries whose sums the lane has
  i32 sums[2][4];
  // A zero that all weights share is taken off them where threads have few registers; and where there are few tiles, since the
  // sums of activations that it would be multiplied with take tensor cores as long as a tile does.
  static constexpr bool kCentred = Zero::kShared && (!kMovesRegisters || Op::kTiles <= 4);
  __device__ __forceinline__ PairedSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32) : operand(operand), ahead(ahead) {}

  __device__ __forceinline__ void start() {}
  // Steps `d` and `d + 1` of those from `first` on, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    const Scaling scaling(largest_that_came(operand, ahead, d, 2, first));
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
      const Digits<false> x(ahead.b[d + k][0], scaling.inverse), y(ahead.b[d + k][1], scaling.inverse);
      b[k][0] = make_uint4(x.high[0], x.high[1], y.high[0], y.high[1]);
      b[k][1] = make_uint4(x.low[0], x.low[1], y.low[0], y.low[1]);
    }
    ahead.template ask_for_next<kAgain, 2>(operand, d, first);
    const float scale = scaling.scale * (kCentred ? Format::kSecond : 1.0f);
#pragma unroll
    for (u32 c = 0; c < 2; ++c) power[c] = __shfl_sync(~0u, scale, (threadIdx.x % 4 * 2 + c) * 4);
    if constexpr (Zero::kSums && !kCentred) {
      const uint4 ones = Zero::operand();
#pragma unroll
      for (u32 i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0;
      multiply<true>(sums, ones, ones, 0);
      multiply<true>(sums, ones, ones, 1);
    }
  }
  // Tile `t` of both steps.
  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, u32, const Format& first, const Format& second) const {
    Accumulators c;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) c[i / 4][i % 4] = Zero::kShared && !kCentred ? sums[i / 4][i % 4] : 0;
    if constexpr (kCentred) {
      multiply<true>(c, first.centred(0), first.centred(1), 0);
      multiply<true>(c, second.centred(0), second.centred(1), 1);
    } else {
      multiply<Format::kSigned>(c, first.operand(0), first.operand(1), 0);
      multiply<Format::kSigned>(c, second.operand(0), second.operand(1), 1);
    }
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
      const Format& own = row ? second : first;
      const float scale = own.scales[0].get(0);
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        i32 x = joined(c, row * 2 + i);
        if constexpr (Format::kZeros) x -= Zero::of(own, 0, 0) * joined(sums, row * 2 + i) * (row ? Zero::kSecond : 1);
        add_scaled<Format>(kept.c[t][0][row * 2 + i], x, scale, power[i], row && !kCentred);
      }
    }
  }

 private:
  // Products with the 64 columns of weights of a step, added to `c`.
  template <bool kSigned>
  __device__ __forceinline__ void multiply(Accumulators& c, uint4 first, uint4 last, u32 step) const {
    mma<kSigned>(c[0], first, b[step][0].x, b[step][0].y, c[0]);
    mma<kSigned, false>(c[1], first, b[step][1].x, b[step][1].y, c[1]);
    mma<kSigned>(c[0], last, b[step][0].z, b[step][0].w, c[0]);
    mma<kSigned, false>(c[1], last, b[step][1].z, b[step][1].w, c[1]);
  }
  static __device__ __forceinline__ i32 joined(const Accumulators& c, u32 i) { return 256 * c[0][i] + c[1][i]; }
};

// The same of one query.
template <class Op, bool kAgain>
struct PairedSteps<Op, kAgain, true> {
  using Format = typename Op::Format;
  using Zero = Zeros<Format>;
  // With one tile the sums of activations would take tensor cores as long as the tile does. Where threads have few registers some spill.
  static constexpr bool kCentred = Zero::kShared && kMovesRegisters && Op::kTiles == 1;
  Conversion<Op, kAgain> conversion;
  Converted x[2];
  i32 sums[4];

  __device__ __forceinline__ PairedSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : conversion{operand, ahead, lane} {}

  __device__ __forceinline__ void start() { conversion.start(); }
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    conversion.take(x[0], d, first);
    conversion.take(x[1], d + 1, first);
    if constexpr (Zero::kSums && !kCentred) {
      const i32 none[4] = {0, 0, 0, 0};
      const uint4 ones = Zero::operand();
      multiply<true>(sums, ones, ones, 0, none);
      multiply<true>(sums, ones, ones, 1, sums);
    }
  }
  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& kept, u32 t, u32, const Format& first, const Format& second) const {
    // Each step has its own sums: four multiplies in a row would wait for each other.
    i32 c[4], d[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) c[i] = Zero::kShared && !kCentred ? sums[i] : 0;
    if constexpr (kCentred) {
      multiply<true>(c, first.centred(0), first.centred(1), 0, c);
      multiply<true>(d, second.centred(0), second.centred(1), 1, d);
    } else {
      multiply<Format::kSigned>(c, first.operand(0), first.operand(1), 0, c);
      multiply<Format::kSigned>(d, second.operand(0), second.operand(1), 1, d);
    }
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
      const Format& own = row ? second : first;
      i32 sum = 256 * (c[row * 2] + d[row * 2]) + (c[row * 2 + 1] + d[row * 2 + 1]);
      if constexpr (Format::kZeros) sum -= Zero::of(own, 0, 0) * (256 * sums[row * 2] + sums[row * 2 + 1]) * (row ? Zero::kSecond : 1);
      add_scaled<Format>(kept.c[t][0][row * 2], sum, own.scales[0].get(0), x[0].power, kCentred || row);
    }
  }

 private:
  // Products with the 64 columns of weights of a step, and `c`.
  template <bool kSigned>
  __device__ __forceinline__ void multiply(i32 (&d)[4], uint4 first, uint4 last, u32 step, const i32 (&c)[4]) const {
    mma<kSigned>(d, first, x[step].b.x, x[step].b.y, c);
    mma<kSigned>(d, last, x[step].b.z, x[step].b.w, d);
  }
};

// One query.
template <class Op, bool kAgain>
struct IntegerSteps<Op, kAgain, true> {
  using Format = typename Op::Format;
  using Zero = Zeros<Format>;
  static constexpr u32 kGroups = Format::kGroups;
  Conversion<Op, kAgain> conversion;
  struct Step {
    Converted x;
    i32 sums[kGroups][4];
  } steps[2];

  __device__ __forceinline__ IntegerSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : conversion{operand, ahead, lane} {}

  __device__ __forceinline__ void start() { conversion.start(); }
  // Step `d` of those from `first` on, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    Step& s = steps[d % 2];
    conversion.take(s.x, d, first);
    if constexpr (Zero::kSums) {
      const uint4 a = Zero::operand();
#pragma unroll
      for (u32 n = 0; n < kGroups; ++n) {
        const i32 none[4] = {0, 0, 0, 0};
        multiply<true>(s.sums[n], a, n, s, none);
        if constexpr (kGroups == 1) multiply<true>(s.sums[n], a, 1, s, s.sums[n]);
      }
    }
  }
  __device__ __forceinline__ void release(u32, u32) {}

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& sums, u32 t, u32 d, const Format& w) const {
    const Step& s = steps[d % 2];
#pragma unroll
    for (u32 n = 0; n < kGroups; ++n) {
      i32 c[4];
      begin(c, s, n, 1);
      multiply<Format::kSigned>(c, w.operand(n), n, s, c);
      if constexpr (kGroups == 1) multiply<Format::kSigned>(c, w.operand(1), 1, s, c);
#pragma unroll
      for (u32 row = 0; row < 2; ++row) {
        i32 x = joined(c, row * 2);
        if constexpr (Format::kZeros) x -= Zero::of(w, n, row) * joined(s.sums[n], row * 2) * (row ? Zero::kSecond : 1);
        add_scaled<Format>(sums.c[t][0][row * 2], x, w.scales[n].get(row), s.x.power, row);
        if constexpr (Format::kOffsets) add_offset(sums.c[t][0][row * 2], w, n, row, joined(s.sums[n], row * 2), s.x.power);
      }
    }
  }
  // 8 rows; products with the last 32 columns are as many times larger as those of rows g + 8.
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& sums, u32 t, u32 d, const Format& w, bool second) const {
    const Step& s = steps[d % 2];
    i32 first[4], last[4] = {0, 0, 0, 0};
    begin(first, s, 0, 1);
    if constexpr (kGroups > 1) begin(last, s, 1, Zero::kSecond);
    multiply<Format::kSigned>(first, w.half_operand(second, 0), 0, s, first);
    multiply<Format::kSigned>(last, w.half_operand(second, 1), 1, s, last);
    i32 x = joined(first, 0), y = joined(last, 0);
    if constexpr (Format::kZeros) {
      x -= Zero::of(w, 0, second) * joined(s.sums[0], 0);
      if constexpr (kGroups > 1) y -= Zero::of(w, 1, second) * joined(s.sums[kGroups - 1], 0) * Zero::kSecond;
    }
    float& sum = sums.c[t][0][0];
    if constexpr (kGroups == 1) {
      add_scaled<Format>(sum, x * Zero::kSecond + y, w.scales[0].get(second), s.x.power, true);
    } else {
      add_scaled<Format>(sum, x, w.scales[0].get(second), s.x.power, false);
      if constexpr (Format::kOffsets) add_offset(sum, w, 0, second, joined(s.sums[0], 0), s.x.power);
      add_scaled<Format>(sum, y, w.scales[kGroups - 1].get(second), s.x.power, true);
      if constexpr (Format::kOffsets) add_offset(sum, w, kGroups - 1, second, joined(s.sums[kGroups - 1], 0), s.x.power);
    }
  }

 private:
  // Products with 32 columns of weights, and `c`.
  template <bool kSigned>
  static __device__ __forceinline__ void multiply(i32 (&d)[4], uint4 a, u32 part, const Step& s, const i32 (&c)[4]) {
    mma<kSigned>(d, a, part ? s.x.b.z : s.x.b.x, part ? s.x.b.w : s.x.b.y, c);
  }
  static __device__ __forceinline__ void begin(i32 (&c)[4], const Step& s, u32 group, i32 times) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) c[i] = Zero::kShared ? s.sums[group][i] * times : 0;
  }
  static __device__ __forceinline__ i32 joined(const i32 (&c)[4], u32 i) { return 256 * c[i] + c[i + 1]; }
};
