// Integers times the activations of one query: both digits are columns of one multiply, so that a lane has the sums of both.
//
// A warp makes the digits of up to kDigitSteps steps at once, which overlaps all that one of them waits for. Its lanes pass them on
// through shared memory.
#pragma once
#include "tile/integers.cuh"

// The activations of one query: those of the next kDigitSteps steps, or fewer. A lane has 8 columns of every fourth step.
template <class Op>
struct Ahead<Op, true> {
  static constexpr u32 kChunks = (Op::kSteps + kDigitSteps - 1) / kDigitSteps, kChunkSteps = kChunks > 1 ? kDigitSteps : Op::kSteps;
  static constexpr u32 kLoads = (kChunkSteps + 3) / 4;
  uint4 b[kLoads];
  bool made = false;  // digits of the only chunk

  __device__ __forceinline__ void load(const GlobalOperand<Op>& operand, u32 chunk) {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      const u32 step = chunk * kDigitSteps + i * 4 + threadIdx.x % 32 / 8;
      b[i] = make_uint4(0, 0, 0, 0);
      if (step < Op::kSteps) b[i] = load_exchanged(operand.lane_base + step * (kStepColumns * 2));
    }
  }
  __device__ __forceinline__ bool is_there() const {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) sum = sentinel_sum(b[i], sum);
    if (__all_sync(~0u, sum == 0.0f)) return true;
    bool ready = true;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) ready = ready && is_present(b[i]);
    return __all_sync(~0u, ready);
  }
  // Load the first steps, until all of them are there.
  __device__ __forceinline__ void fill(const GlobalOperand<Op>& operand) {
#pragma unroll 1
    do load(operand, 0);
    while (!is_there());
  }
  // Until those that were asked for are there.
  __device__ __forceinline__ void await(const GlobalOperand<Op>& operand, u32 chunk) {
#pragma unroll 1
    while (!is_there()) load(operand, chunk);
  }
};

template <class Op, bool kAgain>
struct IntegerSteps<Op, kAgain, true> {
  using Format = typename Op::Format;
  static constexpr u32 kGroups = Format::kGroups, kLoads = Ahead<Op>::kLoads, kChunks = Ahead<Op>::kChunks;
  // Sums begin with minus the zero that all weights have times the digits. Where zeros are stored, the digits' sums are kept.
  static constexpr bool kSums = Format::kZeros || Format::kZero != 0;
  static constexpr i32 kSecond = static_cast<i32>(1 / Format::kSecond);
  const GlobalOperand<Op>& operand;
  Ahead<Op>& ahead;
  u32 lane;
  struct Step {
    uint4 b;
    float power;
    i32 sums[kGroups][4];
  } steps[2];

  __device__ __forceinline__ IntegerSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : operand(operand), ahead(ahead), lane(lane) {}

  // The first activations are there.
  __device__ __forceinline__ void start() {
    if (kChunks > 1 || !ahead.made) make(0);
    ahead.made = true;
  }
  // Step `d` of those from `first` on, in order.
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    if (kChunks > 1 && d == 0 && first > 0 && first % kDigitSteps == 0) {
      ahead.await(operand, first / kDigitSteps);
      make(first / kDigitSteps);
    }
    Step& s = steps[d % 2];
    const u32 place = kChunks > 1 ? first % kDigitSteps + d : first + d;
    s.b = load_shared(operand.digits + place * 128 + (lane / 4 ^ place) % 2 * 64 + lane % 4 * 16);
    s.power = __uint_as_float(load_shared1(operand.powers + place * 4));
    if constexpr (kSums) {
      constexpr u32 kFirst = Format::kZeros ? 1 : -Format::kZero & 0xFF, kLast = Format::kZeros ? 1 : -Format::kZero * kSecond & 0xFF;
      constexpr u32 kBytes = 0x01010101;
      const uint4 a = make_uint4(kFirst * kBytes, kLast * kBytes, kFirst * kBytes, kLast * kBytes);
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
        if constexpr (Format::kZeros) x -= zero_of(w, n, row) * joined(s.sums[n], row * 2) * (row ? kSecond : 1);
        add_scaled<Format>(sums.c[t][0][row * 2], x, w.scales[n].get(row), s.power, row);
      }
    }
  }
  // 8 rows; products with the last 32 columns are as many times larger as those of rows g + 8.
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& sums, u32 t, u32 d, const Format& w, bool second) const {
    const Step& s = steps[d % 2];
    i32 first[4], last[4] = {0, 0, 0, 0};
    begin(first, s, 0, 1);
    if constexpr (kGroups > 1) begin(last, s, 1, kSecond);
    multiply<Format::kSigned>(first, w.half_operand(second, 0), 0, s, first);
    multiply<Format::kSigned>(last, w.half_operand(second, 1), 1, s, last);
    i32 x = joined(first, 0), y = joined(last, 0);
    if constexpr (Format::kZeros) {
      x -= zero_of(w, 0, second) * joined(s.sums[0], 0);
      if constexpr (kGroups > 1) y -= zero_of(w, 1, second) * joined(s.sums[kGroups - 1], 0) * kSecond;
    }
    float& sum = sums.c[t][0][0];
    if constexpr (kGroups == 1) {
      add_scaled<Format>(sum, x * kSecond + y, w.scales[0].get(second), s.power, true);
    } else {
      add_scaled<Format>(sum, x, w.scales[0].get(second), s.power, false);
      add_scaled<Format>(sum, y, w.scales[kGroups - 1].get(second), s.power, true);
    }
  }

 private:
  // Digits of the activations at hand; then the next ones are asked for.
  __device__ __forceinline__ void make(u32 chunk) {
    u32 most[kLoads];
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) most[i] = magnitude(ahead.b[i]);
#pragma unroll
    for (u32 lanes = 1; lanes < 8; lanes *= 2)
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], lanes));
    if (kChunks > 1 || kAgain) __syncwarp();  // all lanes are done with the last ones
    // [step][digit][quarter of 32 columns][which 32]; of odd steps the digits change places, or two steps would share banks.
    const u32 step = lane / 8, at = operand.digits + step * 128 + step % 2 * 64 + lane % 4 * 16 + lane / 4 % 2 * 8;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      const Scaling scaling(most[i]);
      const Digits x(ahead.b[i], scaling.inverse);
      store_shared2(at + i * 512, x.high[0], x.high[1]);
      store_shared2((at ^ 64) + i * 512, x.low[0], x.low[1]);
      if (lane % 8 == 0) store_shared1(operand.powers + (i * 4 + step) * 4, __float_as_uint(scaling.scale));
    }
    if constexpr (kChunks > 1)
      if (kAgain || chunk + 1 < kChunks) ahead.load(operand, chunk + 1 < kChunks ? chunk + 1 : 0);
    __syncwarp();
  }
  // Products with 32 columns of weights, and `c`.
  template <bool kSigned>
  static __device__ __forceinline__ void multiply(i32 (&d)[4], uint4 a, u32 part, const Step& s, const i32 (&c)[4]) {
    mma<kSigned>(d, a, part ? s.b.z : s.b.x, part ? s.b.w : s.b.y, c);
  }
  static __device__ __forceinline__ void begin(i32 (&c)[4], const Step& s, u32 group, i32 times) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) c[i] = kSums && !Format::kZeros ? s.sums[group][i] * times : 0;
  }
  static __device__ __forceinline__ i32 joined(const i32 (&c)[4], u32 i) { return 256 * c[i] + c[i + 1]; }
};
