// The steps of a multiply of weights that become fp16, and sums that are multiplied by a scale of the row.
//
// In a model of bf16 a query's 64 columns of a step that a warp has are scaled by a power of two: as fp16 they are exact down to 2^-27
// of the largest.
#pragma once
#include "tile/integers.cuh"

// What weights make of the activations of a step: sums of products with each half of its columns.
template <class Format>
struct ScaledProduct {
  float halves[2][4] = {};

  // Of a tile, and of a half tile.
  __device__ __forceinline__ ScaledProduct(const Format& w, uint4 first, uint4 second) {
    multiply(halves[0], w.low, first);
    multiply(halves[1], w.high, second);
  }
  __device__ __forceinline__ ScaledProduct(const Format& w, bool of_second_step, uint4 first, uint4 second) {
    const uint4 v = of_second_step ? w.high : w.low;
    multiply_half(halves[0], v.x, v.y, first);
    multiply_half(halves[1], v.z, v.w, second);
  }
  // Result `i` of the first half and `j` of the second.
  __device__ __forceinline__ void add(float& sum, u32 i, u32 j, const Format& w, u32 which, float power) const {
    if constexpr (Format::kGroups == 1) {
      sum = __fmaf_rn(__fmul_rn(halves[0][i] + halves[1][j], w.scales[0].get(which)), power, sum);
    } else {
      sum = __fmaf_rn(__fmul_rn(halves[0][i], w.scales[0].get(which)), power, sum);
      sum = __fmaf_rn(__fmul_rn(halves[1][j], w.scales[1].get(which)), power, sum);
    }
  }

 private:
  static __device__ __forceinline__ void multiply(float (&c)[4], uint4 values, uint4 b) {
    const uint2 x = Format::widened(values.x), y = Format::widened(values.y);
    mma<false>(c, x.x, x.y, y.x, y.y, b.x, b.y);
    const uint2 z = Format::widened(values.z), w = Format::widened(values.w);
    mma<false>(c, z.x, z.y, w.x, w.y, b.z, b.w);
  }
  static __device__ __forceinline__ void multiply_half(float (&c)[4], u32 first, u32 second, uint4 b) {
    const uint2 x = Format::widened(first), y = Format::widened(second);
    mma<false>(c, x.x, 0, x.y, 0, b.x, b.y);
    mma<false>(c, y.x, 0, y.y, 0, b.z, b.w);
  }
};

// Several queries.
template <class Op, bool kAgain, bool = kConverts<Op>>
struct ScaledSteps {
  using Format = typename Op::Format;
  const GlobalOperand<Op>& operand;
  Ahead<Op>& ahead;
  float power[2][2];  // of two steps, of the queries whose sums the lane has

  __device__ __forceinline__ ScaledSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32) : operand(operand), ahead(ahead) {}
  __device__ __forceinline__ void start() {}
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    ahead.await(operand, d, first);
    constexpr float kLarger = 1u << Format::kBits;
    if constexpr (!kBf16) {
      power[d % 2][0] = power[d % 2][1] = kLarger;
    } else {
      const Scaling scaling(largest_of_quad(max(magnitude(ahead.b[d][0]), magnitude(ahead.b[d][1]))));
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        ahead.b[d][i] = as_fp16(ahead.b[d][i], scaling.inverse);
        power[d % 2][i] = __shfl_sync(~0u, scaling.scale, (threadIdx.x % 4 * 2 + i) * 4) * kLarger;
      }
    }
  }
  __device__ __forceinline__ void release(u32 d, u32 first) { ahead.template ask_for_next<kAgain>(operand, d, first); }

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& sums, u32 t, u32 d, const Format& w) const {
    const ScaledProduct<Format> x(w, ahead.b[d][0], ahead.b[d][1]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) x.add(sums.c[t][0][i], i, i, w, i / 2, power[d % 2][i % 2]);
  }
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& sums, u32 t, u32 d, const Format& w, bool second) const {
    const ScaledProduct<Format> x(w, second, ahead.b[d][0], ahead.b[d][1]);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) x.add(sums.c[t][0][i], i, i, w, second, power[d % 2][i]);
  }
};

// One query.
template <class Op, bool kAgain>
struct ScaledSteps<Op, kAgain, true> {
  using Format = typename Op::Format;
  Conversion<Op, kAgain> conversion;
  Converted steps[2];

  __device__ __forceinline__ ScaledSteps(const GlobalOperand<Op>& operand, Ahead<Op>& ahead, u32 lane)
      : conversion{operand, ahead, lane} {}
  __device__ __forceinline__ void start() { conversion.start(); }
  __device__ __forceinline__ void prepare(u32 d, u32 first) {
    conversion.take(steps[d % 2], d, first);
    steps[d % 2].power *= 1u << Format::kBits;
  }
  __device__ __forceinline__ void release(u32, u32) {}

  template <class Sums>
  __device__ __forceinline__ void multiply_tile(Sums& sums, u32 t, u32 d, const Format& w) const {
    const Converted& s = steps[d % 2];
    const ScaledProduct<Format> x(w, s.b, s.b);
#pragma unroll
    for (u32 row = 0; row < 2; ++row) x.add(sums.c[t][0][row * 2], row * 2, row * 2 + 1, w, row, s.power);
  }
  template <class Sums>
  __device__ __forceinline__ void multiply_half_tile(Sums& sums, u32 t, u32 d, const Format& w, bool second) const {
    const Converted& s = steps[d % 2];
    const ScaledProduct<Format> x(w, second, s.b, s.b);
    x.add(sums.c[t][0][0], 0, 1, w, second, s.power);
  }
};
