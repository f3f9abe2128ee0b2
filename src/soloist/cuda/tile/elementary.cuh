// ln, exp and Gumbel noise from exactly rounded operations: the same bits as soloist.sampling on the
// host (docs/sampling.md). Never compile with flush to zero or fast division. Knows nothing of blocks
// and memory; constants come from spec.cuh, namespace sampling.
#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

namespace exact {

// The _rn intrinsics are never fused into one multiply-add.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fadd_rn(a, -b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }

// Horner's rule, highest power first.
template <int N>
__device__ __forceinline__ float polynomial(const float (&coefficients)[N], float x) {
  float value = coefficients[0];
#pragma unroll
  for (int i = 1; i < N; ++i) value = add(mul(value, x), coefficients[i]);
  return value;
}

// x > 0 as 2^exponent * (1 + fraction), 1 + fraction in [sqrt(1/2), sqrt(2)).
struct Parts {
  float exponent;
  float fraction;
};
__device__ __forceinline__ Parts split(float x) {
  const i32 bits = __float_as_int(x);
  const i32 exponent = (bits - static_cast<i32>(sampling::kSqrtHalfBits)) >> 23;
  const float mantissa = __int_as_float(bits - exponent * (1 << 23));
  return {__int2float_rn(exponent), sub(mantissa, 1.0f)};
}

__device__ __forceinline__ float ln(Parts x) {
  const float square = mul(x.fraction, x.fraction);
  float tail = mul(mul(polynomial(sampling::kLnPolynomial, x.fraction), x.fraction), square);
  tail = add(tail, mul(x.exponent, sampling::kLn2Low));
  tail = sub(tail, mul(square, 0.5f));
  return add(add(x.fraction, tail), mul(x.exponent, sampling::kLn2High));
}

// round(2^32 * exp(gap)) for gap <= 0.
__device__ __forceinline__ u64 integer_weight(float gap) {
  const float g = gap > sampling::kExpFloor ? gap : sampling::kExpFloor;
  const i32 n = __float2int_rn(mul(g, sampling::kLog2E));
  const float halvings = __int2float_rn(n);
  float rest = sub(g, mul(halvings, sampling::kLn2High));
  rest = sub(rest, mul(halvings, sampling::kLn2Low));
  const float tail = mul(polynomial(sampling::kExpPolynomial, rest), mul(rest, rest));
  const float power = add(add(tail, rest), 1.0f);
  const i32 exponent = n + 127 + static_cast<i32>(sampling::kWeightBits);
  return __float2ull_rn(mul(power, __int_as_float(exponent * (1 << 23))));
}

// -ln(-ln(u)), u = 1 - (word + 1/2) / 2^32.
__device__ __forceinline__ float gumbel_of_word(u32 word) {
  const float below_one = mul(add(__uint2float_rn(word), sampling::kHalf), sampling::kWordScale);
  const float uniform = mul(add(__uint2float_rn(~word), sampling::kHalf), sampling::kWordScale);
  Parts parts = split(uniform);
  if (word < sampling::kNearOneWords) parts.fraction = -below_one;
  return -ln(split(-ln(parts)));
}

// Philox4x32-10 (Salmon et al., SC'11).
struct Words {
  u32 x, y, z, w;
};
__device__ __forceinline__ Words philox(Words counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (u32 i = 0; i < sampling::kPhiloxRounds; ++i) {
    const u32 low_0 = sampling::kPhiloxMultipliers[0] * counter.x;
    const u32 low_1 = sampling::kPhiloxMultipliers[1] * counter.z;
    const u32 high_0 = __umulhi(sampling::kPhiloxMultipliers[0], counter.x);
    const u32 high_1 = __umulhi(sampling::kPhiloxMultipliers[1], counter.z);
    counter = {high_1 ^ counter.y ^ key_low, low_1, high_0 ^ counter.w ^ key_high, low_0};
    key_low += sampling::kPhiloxKeySteps[0];
    key_high += sampling::kPhiloxKeySteps[1];
  }
  return counter;
}

// A key that orders like the value: -0 equals +0, a NaN is above everything, and 0 is no value.
constexpr u32 kExponentMask = 0x7F800000u;
__device__ __forceinline__ u32 order_key(float x) {
  const u32 bits = __float_as_uint(x);
  const u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kExponentMask) return 0xFFFFFFFFu;
  if (magnitude == 0) return 0x80000000u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of_key(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}
__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7FFFFFFFu) < kExponentMask;
}

}  // namespace exact
