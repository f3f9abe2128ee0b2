// Activations as integers, for weights that are integers.
//
// A query's columns of a step that a warp has, 64 or the 128 of a pair of steps, are scaled by a power of two to 14 bits and a sign,
// and cut into two digits of 8 bits: x is scale · (256 high + low). That is exact for values of bf16 down to a 64th of the largest. Sums of integers do not
// depend on their order, and the scale depends on the query's own values only: bits are the same for any number of queries.
#pragma once
#include "tile/activations.cuh"

// The largest magnitude of these columns lies between 2^kDigitBits and twice that.
inline constexpr u32 kDigitBits = 13;

// The largest magnitudes of 8 values, as the bits of 16-bit values without signs, which order like them: of the even ones in the low
// half, of the others in the high half.
__device__ __forceinline__ u32 magnitudes(uint4 v) {
  constexpr u32 kMask = 0x7FFF7FFF;
  return __vmaxu2(__vmaxu2(v.x & kMask, v.y & kMask), __vmaxu2(v.z & kMask, v.w & kMask));
}
// The same with any signs, in fewer instructions; 0x7FFF where one is no number.
__device__ __forceinline__ u32 larger_magnitudes(uint4 v) {
  return larger_magnitudes(larger_magnitudes(v.x, v.y), larger_magnitudes(v.z, v.w));
}
__device__ __forceinline__ u32 larger_half(u32 pair) { return max(pair & 0xFFFF, pair >> 16); }
__device__ __forceinline__ u32 magnitude(uint4 v) { return larger_half(magnitudes(v)); }
// Over the four lanes that have activations of a query. None of the exchanges waits for another.
__device__ __forceinline__ u32 largest_of_quad(u32 x) {
  const u32 a = __shfl_xor_sync(~0u, x, 1), b = __shfl_xor_sync(~0u, x, 2), c = __shfl_xor_sync(~0u, x, 3);
  return max(max(x, a), max(b, c));
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

// kSignedLow: low digits are from -128 to 127, as high ones are. From 0 to 255 they take an instruction less.
template <bool kSignedLow>
struct Digits {
  u32 high[2], low[2];

  __device__ __forceinline__ Digits() {}
  __device__ __forceinline__ Digits(uint4 v, float inverse) {
    four(v.x, v.y, inverse, high[0], low[0]);
    four(v.z, v.w, inverse, high[1], low[1]);
  }

 private:
  static __device__ __forceinline__ void four(u32 first, u32 second, float inverse, u32& high, u32& low) {
    // The integer lands in the low bits, 128 more than it is where digits are signed: then its high byte is the high digit, and its
    // low byte 128 more than the low digit.
    constexpr float kMagic = 12582912.0f + (kSignedLow ? 128.0f : 0.0f);
    const u32 a = __float_as_uint(__fmaf_rn(low_half(first), inverse, kMagic));
    const u32 b = __float_as_uint(__fmaf_rn(high_half(first), inverse, kMagic));
    const u32 c = __float_as_uint(__fmaf_rn(low_half(second), inverse, kMagic));
    const u32 d = __float_as_uint(__fmaf_rn(high_half(second), inverse, kMagic));
    const u32 ab = __byte_perm(a, b, 0x4051), cd = __byte_perm(c, d, 0x4051);
    high = __byte_perm(ab, cd, 0x5410);
    low = __byte_perm(ab, cd, 0x7632) ^ (kSignedLow ? 0x80808080 : 0);
  }
};

// 8 activations as fp16.
__device__ __forceinline__ u32 as_fp16(u32 pair, float inverse) { return pack_fp16(low_half(pair) * inverse, high_half(pair) * inverse); }
__device__ __forceinline__ uint4 as_fp16(uint4 v, float inverse) {
  return make_uint4(as_fp16(v.x, inverse), as_fp16(v.y, inverse), as_fp16(v.z, inverse), as_fp16(v.w, inverse));
}
