// The activations of one query on their way to weights that are quantised.
//
// A warp converts those of a few steps at once, and multiplies them while others have not come yet. Its lanes pass them on through shared
// memory, which has room for kConvertedSteps steps.
#pragma once
#include "tile/digits.cuh"

static_assert(kLoadedSteps * 64 == 32 * 8, "a warp's lanes have 8 columns each of so many steps");

constexpr u32 greatest_common(u32 a, u32 b) { return b ? greatest_common(b, a % b) : a; }

// The activations of one query: those of the next steps, a chunk that is converted at once. A lane has 8 columns of every fourth step.
template <class Op>
struct Ahead<Op, true> {
  static constexpr u32 kChunkSteps = Op::kStepsAtOnce < Op::kSteps ? Op::kStepsAtOnce : Op::kSteps;
  static constexpr u32 kChunks = (Op::kSteps + kChunkSteps - 1) / kChunkSteps;
  static constexpr u32 kLoads = (kChunkSteps + kLoadedSteps - 1) / kLoadedSteps;
  // There is room for all, so what is converted stays for further groups of tiles.
  static constexpr bool kStays = kChunks * kLoads * kLoadedSteps <= kConvertedSteps;
  static_assert(kLoads * kLoadedSteps <= kConvertedSteps && (kChunks == 1 || kChunkSteps % kLoadedSteps == 0), "whole loads that fit");
  uint4 b[kLoads];
  u32 made = 0;  // chunks that are converted and stay

  template <bool kGathers = Op::kPermuted>
  __device__ __forceinline__ void load(const GlobalOperand<Op>& operand, u32 chunk) {
    if constexpr (kGathers) {
      gather(operand, chunk);
    } else {
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) {
        const u32 step = chunk * kChunkSteps + i * kLoadedSteps + threadIdx.x % 32 / 8;
        b[i] = make_uint4(0, 0, 0, 0);
        if (step < Op::kSteps) b[i] = load_exchanged(operand.lane_base + step_column<Op>(step) * 2);
      }
    }
  }
  // The same for a permuted matrix; no loop, since the compiler does not unroll one as long as this.
  template <u32 kFirst = 0>
  __device__ __forceinline__ void gather(const GlobalOperand<Op>& operand, u32 chunk) {
    const u32 step = chunk * kChunkSteps + kFirst * kLoadedSteps + threadIdx.x % 32 / 8;
    b[kFirst] = operand.gathered.load(min(step, Op::kSteps - 1) * kStepColumns);
    if (step >= Op::kSteps) b[kFirst] = make_uint4(0, 0, 0, 0);
    if constexpr (kFirst + 1 < kLoads) gather<kFirst + 1>(operand, chunk);
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
  // Load the first steps, until all of them are there; gathered ones are looked at once as many others are.
  template <bool kGathers = Op::kPermuted>
  __device__ __forceinline__ void fill(const GlobalOperand<Op>& operand) {
    if constexpr (kGathers) fill<false>(operand);
#pragma unroll 1
    do load<kGathers>(operand, 0);
    while (!is_there());
  }
  // Until those that were asked for are there.
  __device__ __forceinline__ void await(const GlobalOperand<Op>& operand, u32 chunk) {
#pragma unroll 1
    while (!is_there()) load(operand, chunk);
  }
};

// What multiplies take of a step: integers in two digits, which are columns 0 and 1 of one multiply, or fp16, of which the second 32
// are in column 1. The other columns are zeros: a tensor core takes power for numbers that nobody asks for, too, and an H200 that reads at
// its full bandwidth has none to spare. A power of two takes the scaling back.
struct Converted {
  uint4 b = {0, 0, 0, 0};
  float power;
};

// Conversion of the steps of a multiply.
template <class Op, bool kAgain>
struct Conversion {
  using Own = Ahead<Op>;
  static constexpr u32 kLoads = Own::kLoads, kChunks = Own::kChunks, kChunkSteps = Own::kChunkSteps;
  static constexpr bool kStays = Own::kStays, kDigits = kMakesDigits<Op>, kScales = kDigits || kBf16;
  const GlobalOperand<Op>& operand;
  Own& ahead;
  u32 lane;

  // The first activations are there.
  __device__ __forceinline__ void start() {
    if (!kStays || ahead.made == 0) make(0);
  }
  // Where those of step `d` of a turn that begins with `first` are; steps come in order.
  __device__ __forceinline__ u32 place(u32 d, u32 first) {
    if constexpr (kChunks == 1) return first + d;
    // With every so many of a turn's steps a chunk may begin.
    constexpr bool kInOne = kChunkSteps % Op::kDepth == 0;
    constexpr u32 kEvery = kInOne ? Op::kDepth : greatest_common(kChunkSteps, Op::kDepth);
    const u32 step = first + d, chunk = step / kChunkSteps;
    if (d % kEvery == 0 && step > 0 && step % kChunkSteps == 0 && (!kStays || ahead.made <= chunk)) {
      ahead.await(operand, chunk);
      make(chunk);
    }
    if constexpr (kStays) return step;
    return kInOne ? first % kConvertedSteps + d : step % kConvertedSteps;
  }
  // Those of the lane, whose column of a multiply is one of the two digits.
  __device__ __forceinline__ u32 address(u32 place) const {
    const u32 swap = kDigits ? place : 0;
    return operand.converted + place * 128 + (lane / 4 ^ swap) % 2 * 64 + lane % 4 * 16;
  }
  __device__ __forceinline__ float power(u32 place) const {
    return kScales ? __uint_as_float(load_shared1(operand.powers + place * 4)) : 1.0f;
  }
  __device__ __forceinline__ void take(Converted& x, u32 d, u32 first) {
    const u32 at = place(d, first);
    load_shared_if(lane / 4 < 2, x.b, address(at));
    x.power = power(at);
  }

 private:
  // Where a chunk lies.
  static __device__ __forceinline__ u32 kept(u32 chunk) {
    if constexpr (kStays) return chunk * kChunkSteps;
    return kChunkSteps == kConvertedSteps ? 0 : chunk * kChunkSteps % kConvertedSteps;
  }
  // Of the activations at hand; then the next ones are asked for.
  __device__ __forceinline__ void make(u32 chunk) {
    u32 most[kLoads];
    if constexpr (kScales) {
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) most[i] = magnitude(ahead.b[i]);
#pragma unroll
      for (u32 lanes = 1; lanes < kWarpColumns<Op> / 8; lanes *= 2)
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], lanes));
    }
    if (kChunks > 1 || kAgain) __syncwarp();  // all lanes are done with the last ones
    const u32 step = kept(chunk) + lane / 8, at = operand.converted + step * 128;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      if constexpr (kScales) {
        const Scaling scaling(most[i]);
        if constexpr (kDigits) {
          // [step][digit][quarter of 32 columns][which 32]; of odd steps the digits change places, or two steps would share banks.
          const Digits<true> x(ahead.b[i], scaling.inverse);
          const u32 high = at + i * 512 + step % 2 * 64 + lane % 4 * 16 + lane / 4 % 2 * 8;
          store_shared2(high, x.high[0], x.high[1]);
          store_shared2(high ^ 64, x.low[0], x.low[1]);
        } else {
          store_shared(at + i * 512 + lane % 8 * 16, as_fp16(ahead.b[i], scaling.inverse));
        }
        if (lane % 8 == 0) store_shared1(operand.powers + (i * 4 + step) * 4, __float_as_uint(scaling.scale));
      } else {
        store_shared(at + i * 512 + lane % 8 * 16, ahead.b[i]);
      }
    }
    if constexpr (kChunks > 1)
      if (chunk + 1 < kChunks || (kAgain && !kStays)) ahead.load(operand, chunk + 1 < kChunks ? chunk + 1 : 0);
    if constexpr (kStays) ahead.made = chunk + 1;
    __syncwarp();
  }
};
