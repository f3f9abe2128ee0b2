// Activations as integers, for weights that are integers.
//
// A query's 64 columns of a step that a warp has are scaled by a power of two to 14 bits and a sign, and cut into two digits of
// 8 bits: x is scale · (256 high + low). That is exact for values of bf16 down to a 64th of the largest. Sums of integers do not
// depend on their order, and the scale depends on the query's own values only: bits are the same for any number of queries.
#pragma once
#include "tile/activations.cuh"

// The largest magnitude of a query's 64 columns lies between 2^kDigitBits and twice that.
inline constexpr u32 kDigitBits = 13;

// The largest magnitude of 8 values, as the bits of 16-bit values without signs, which order like them.
__device__ __forceinline__ u32 magnitude(uint4 v) {
  constexpr u32 kMask = 0x7FFF7FFF;
  const u32 most = __vmaxu2(__vmaxu2(v.x & kMask, v.y & kMask), __vmaxu2(v.z & kMask, v.w & kMask));
  return max(most & 0xFFFF, most >> 16);
}
__device__ __forceinline__ u32 most_of_lanes(u32 x, u32 lanes) {
#pragma unroll
  for (u32 step = 1; step < lanes; step *= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// The power of two that makes integers of a query's columns, and the one that takes it back.
struct Scaling {
  float inverse, scale;

  // Where the largest magnitude is no number, no product is one.
  explicit __device__ __forceinline__ Scaling(u32 most) {
    const u32 exponent = kBf16 ? most >> 7 : max(most >> 10, 1u) + 112, used = max(exponent, kDigitBits + 1);
    const bool finite = exponent < (kBf16 ? 255 : 143);
    inverse = __uint_as_float((254 + kDigitBits - used) << 23);
    scale = __uint_as_float(finite ? (used - kDigitBits) << 23 : 0x7FC00000);
  }
};

struct Digits {
  u32 high[2], low[2];

  __device__ __forceinline__ Digits() {}
  __device__ __forceinline__ Digits(uint4 v, float inverse) {
    four(v.x, v.y, inverse, high[0], low[0]);
    four(v.z, v.w, inverse, high[1], low[1]);
  }

 private:
  static __device__ __forceinline__ void four(u32 first, u32 second, float inverse, u32& high, u32& low) {
    // The integer lands in the low bits, 128 more than it is: then its high byte is the high digit, and its low byte 128 more than
    // the low digit.
    constexpr float kMagic = 12582912.0f + 128.0f;
    const u32 a = __float_as_uint(__fmaf_rn(low_half(first), inverse, kMagic));
    const u32 b = __float_as_uint(__fmaf_rn(high_half(first), inverse, kMagic));
    const u32 c = __float_as_uint(__fmaf_rn(low_half(second), inverse, kMagic));
    const u32 d = __float_as_uint(__fmaf_rn(high_half(second), inverse, kMagic));
    const u32 ab = __byte_perm(a, b, 0x4051), cd = __byte_perm(c, d, 0x4051);
    high = __byte_perm(ab, cd, 0x5410);
    low = __byte_perm(ab, cd, 0x7632) ^ 0x80808080;
  }
};

// The activations of one query, four steps at once: a lane has 8 columns of one of them.
template <class Op>
struct Ahead<Op, true> {
  static constexpr u32 kFours = (Op::kSteps + kDigitSteps - 1) / kDigitSteps, kMost = kFours < 4 ? kFours : 4;
  uint4 b[kMost];

  __device__ __forceinline__ void load(const GlobalOperand<Op>& operand, u32 at, u32 four, u32 lane) {
    const u32 step = four * kDigitSteps + lane / 8;
    b[at] = make_uint4(0, 0, 0, 0);
    if (step < Op::kSteps) b[at] = load_exchanged(operand.lane_base + step * (kStepColumns * 2));
  }
  // Load the first steps, all at once until all are there.
  __device__ __forceinline__ void fill(const GlobalOperand<Op>& operand) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (;;) {
      bool ready = true;
#pragma unroll
      for (u32 i = 0; i < kMost; ++i) load(operand, i, i, lane);
      float sum = 0.0f;
#pragma unroll
      for (u32 i = 0; i < kMost; ++i) sum = sentinel_sum(b[i], sum);
      if (__all_sync(~0u, sum == 0.0f)) return;
#pragma unroll
      for (u32 i = 0; i < kMost; ++i) ready = ready && is_present(b[i]);
      if (__all_sync(~0u, ready)) return;
    }
  }
  // The next four steps; what comes after those in flight takes their registers.
  template <bool kAgain>
  __device__ __forceinline__ uint4 take(const GlobalOperand<Op>& operand, u32 four, u32 lane) {
    if (kFours > kMost)
#pragma unroll 1
      while (!__all_sync(~0u, sentinel_sum(b[0], 0.0f) == 0.0f) && !__all_sync(~0u, is_present(b[0]))) load(operand, 0, four, lane);
    const uint4 taken = b[0];
#pragma unroll
    for (u32 i = 0; i + 1 < kMost; ++i) b[i] = b[i + 1];
    constexpr bool kWhole = Op::kSteps % Op::kDepth == 0;
    const u32 next = four + kMost;
    if (next < kFours || (kAgain && kWhole)) load(operand, kMost - 1, next < kFours ? next : next - kFours, lane);
    return taken;
  }
};

// What the multiplies of a step take: digits as operands of m16n8k32, powers of two, and for each group of columns what sums begin
// with: minus the zero that all weights have times the integers. Where zeros are stored, the integers' sums.
template <class Op>
struct IntegerStep {
  static constexpr bool kOne = kRoomQueries == 1;
  static constexpr u32 kGroups = Op::Format::kGroups, kOperands = kOne ? 1 : 2, kColumns = kOne ? 1 : 2;
  static constexpr bool kSums = Op::Format::kZeros || Op::Format::kZero != 0;
  // One query: digits in columns 0 and 1, so that a lane has the sums of both. Several: all high digits, and all low ones.
  uint4 b[kOperands];
  float scale[kColumns];
  i32 sums[kGroups][kOperands][4];

  // Products with 32 columns of weights, added to `c`.
  template <bool kSigned>
  __device__ __forceinline__ void multiply(i32 (&d)[kOperands][4], uint4 a, u32 part, const i32 (&c)[kOperands][4]) const {
#pragma unroll
    for (u32 i = 0; i < kOperands; ++i)
      mma<kSigned>(d[i], a, part ? b[i].z : b[i].x, part ? b[i].w : b[i].y, c[i]);
  }
  __device__ __forceinline__ void add_up() {
    if constexpr (kSums) {
      using Format = typename Op::Format;
      constexpr u32 kFirst = Format::kZeros ? 1 : -Format::kZero & 0xFF;
      constexpr u32 kLast = Format::kZeros ? 1 : -Format::kZero * static_cast<i32>(1 / Format::kSecond) & 0xFF;
      constexpr u32 kBytes = 0x01010101;
      const uint4 a = make_uint4(kFirst * kBytes, kLast * kBytes, kFirst * kBytes, kLast * kBytes);
#pragma unroll
      for (u32 n = 0; n < kGroups; ++n) {
        const i32 none[kOperands][4] = {};
        multiply<true>(sums[n], a, n, none);
        if constexpr (kGroups == 1) multiply<true>(sums[n], a, 1, sums[n]);
      }
    }
  }
  __device__ __forceinline__ static i32 joined(const i32 (&c)[kOperands][4], u32 i) {
    return 256 * c[0][i] + (kOne ? c[0][i + 1] : c[kOperands - 1][i]);
  }
};

// The steps of a multiply with integers: of two steps at a time the operands are at hand.
template <class Op, bool kAgain>
struct IntegerSteps {
  using Step = IntegerStep<Op>;
  using Format = typename Op::Format;
  using Accumulators = i32[Step::kOperands][4];
  static constexpr u32 kGroups = Step::kGroups;
  static constexpr i32 kSecond = static_cast<i32>(1 / Format::kSecond);
  const GlobalOperand<Op>& operand;
  Ahead<Op>& ahead;
  u32 lane;
  Step steps[2];
  float scale_of_four;  // of the lane's step

  __device__ __forceinline__ IntegerSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : operand(operand), ahead(ahead), lane(lane) {}

  // Step `d` of those from `first` on, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    Step& s = steps[d % 2];
    if constexpr (Step::kOne) {
      const bool is_fixed = Op::kDepth % kDigitSteps == 0 || Op::kDepth == Op::kSteps;
      const u32 place = is_fixed ? d % kDigitSteps : (first + d) % kDigitSteps;
      if (place == 0) make_four((first + d) / kDigitSteps);
      s.b[0] = load_shared(operand.digits + place * 128 + (lane / 4 % 2 ^ place % 2) * 64 + lane % 4 * 16);
      s.scale[0] = __shfl_sync(~0u, scale_of_four, place * 8);
    } else {
      ahead.await(operand, d, first);
      const uint4 low = ahead.b[d][0], high = ahead.b[d][1];
      const Scaling scaling(most_of_lanes(max(magnitude(low), magnitude(high)), 4));
      const Digits x(low, scaling.inverse), y(high, scaling.inverse);
      s.b[0] = make_uint4(x.high[0], x.high[1], y.high[0], y.high[1]);
      s.b[1] = make_uint4(x.low[0], x.low[1], y.low[0], y.low[1]);
      // A lane's sums are those of two queries.
#pragma unroll
      for (u32 c = 0; c < 2; ++c) s.scale[c] = __shfl_sync(~0u, scaling.scale, (lane % 4 * 2 + c) * 4);
      ahead.template ask_for_next<kAgain>(operand, d, first);
    }
    s.add_up();
  }
  __device__ __forceinline__ void release(u32, u32) {}

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& sums, u32 t, u32 d, const Format& w) const {
    const Step& s = steps[d % 2];
#pragma unroll
    for (u32 n = 0; n < kGroups; ++n) {
      Accumulators c;
      begin(c, s, n);
      s.template multiply<Format::kSigned>(c, w.operand(n), n, c);
      if constexpr (kGroups == 1) s.template multiply<Format::kSigned>(c, w.operand(1), 1, c);
#pragma unroll
      for (u32 row = 0; row < 2; ++row)
#pragma unroll
        for (u32 i = 0; i < Step::kColumns; ++i) {
          i32 x = Step::joined(c, row * 2 + i);
          if constexpr (Format::kZeros) x -= zero(w, n, row) * Step::joined(s.sums[n], row * 2 + i) * (row ? kSecond : 1);
          add(sums.c[t][0][row * 2 + i], x, w.scales[n].get(row), s.scale[i], row);
        }
    }
  }
  // 8 rows; products with the last 32 columns are as many times larger as those of rows g + 8.
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& sums, u32 t, u32 d, const Format& w, bool second) const {
    const Step& s = steps[d % 2];
    Accumulators first, last;
    begin(first, s, 0);
    const Accumulators none = {};
    if constexpr (kGroups == 1) {
      s.template multiply<Format::kSigned>(first, w.half_operand(second, 0), 0, first);
      s.template multiply<Format::kSigned>(last, w.half_operand(second, 1), 1, none);
    } else {
      s.template multiply<Format::kSigned>(first, w.half_operand(second, 0), 0, first);
      begin(last, s, 1, kSecond);
      s.template multiply<Format::kSigned>(last, w.half_operand(second, 1), 1, last);
    }
#pragma unroll
    for (u32 i = 0; i < Step::kColumns; ++i) {
      i32 x = Step::joined(first, i), y = Step::joined(last, i);
      if constexpr (Format::kZeros) {
        x -= zero(w, 0, second) * Step::joined(s.sums[0], i);
        if constexpr (kGroups > 1) y -= zero(w, kGroups - 1, second) * Step::joined(s.sums[kGroups - 1], i) * kSecond;
      }
      float& sum = sums.c[t][0][i];
      if constexpr (kGroups == 1) {
        add(sum, x * kSecond + y, w.scales[0].get(second), s.scale[i], true);
      } else {
        add(sum, x, w.scales[0].get(second), s.scale[i], false);
        add(sum, y, w.scales[kGroups - 1].get(second), s.scale[i], true);
      }
    }
  }

 private:
  __device__ __forceinline__ void make_four(u32 four) {
    const uint4 v = ahead.template take<kAgain>(operand, four, lane);
    const Scaling scaling(most_of_lanes(magnitude(v), 8));
    const Digits x(v, scaling.inverse);
    scale_of_four = scaling.scale;
    // [step][digit][quarter of 32 columns][which 32]; of odd steps the digits change places, or two steps would share banks.
    const u32 step = lane / 8, at = operand.digits + step * 128 + step % 2 * 64 + lane % 4 * 16 + lane / 4 % 2 * 8;
    __syncwarp();
    store_shared2(at, x.high[0], x.high[1]);
    store_shared2(at ^ 64, x.low[0], x.low[1]);
    __syncwarp();
  }
  static __device__ __forceinline__ void begin(Accumulators& c, const Step& s, u32 group, i32 times = 1) {
#pragma unroll
    for (u32 i = 0; i < Step::kOperands; ++i)
#pragma unroll
      for (u32 k = 0; k < 4; ++k) c[i][k] = Format::kZero != 0 && !Format::kZeros ? s.sums[group][i][k] * times : 0;
  }
  static __device__ __forceinline__ i32 zero(const Format& w, u32 group, u32 row) {
    const u32 byte = w.zeros[group] >> 8 * row;
    return Format::kSigned ? static_cast<i32>(static_cast<signed char>(byte)) : static_cast<i32>(byte & 0xFF);
  }
  // `times`: whether `x` is as many times too large as kSecond says.
  static __device__ __forceinline__ void add(float& sum, i32 x, float scale, float power, bool times) {
    sum = __fmaf_rn(__fmul_rn(__int2float_rn(x), scale), times ? power * Format::kSecond : power, sum);
  }
};
