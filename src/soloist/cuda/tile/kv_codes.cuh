// Keys and values in 8 or 4 bits: from shared memory to operands of multiplies, and rounding. The definition is kv/codes.py.
//
// Codes are exact in bf16, also over a power of two. Scores take on scales of keys, shares of values those of values: so no operand is rounded but
// shares, as they are in 16 bits. Which numbers are a pair follows from where codes lie in a word: of 8 bits bytes 0 and 2,
// 1 and 3, of 4 bits numbers i and i + 4; of values those of positions 0 and 2, 1 and 3 in any case. Queries and shares lie
// the same way.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

template <class M>
inline constexpr bool kHasCodes = M::kCodeBits < 16;

// What operands of integer codes are multiplied by to give the codes. Scores and sums of values take it on at their end: a
// power of two changes no bit.
template <class M>
constexpr float code_unit() {
  if constexpr (kHasCodes<M>) return M::kFloatCodes ? 1.0f : 64.0f;
  else return 1.0f;
}
template <class M>
inline constexpr float kCodeUnit = code_unit<M>();
// A sum over values, as codes or as they are.
template <class M>
__device__ __forceinline__ float in_full(float sum) {
  if constexpr (kCodeUnit<M> != 1.0f) return sum * kCodeUnit<M>;
  else return sum;
}

// Of bf16, a number up to 255 that stands alone in its 16 bits is so many times 2^-133: up to 127 it is subnormal, and from there
// on the lowest exponent begins. A multiply-add takes that to its number over 64, less the zero over 64, and so no
// instruction has to put an exponent there.
inline constexpr u32 kUnits = 0x7F007F00;      // 2^127
inline constexpr u32 kSixteenths = 0x7D007D00;  // 2^123

// Two codes of 8 bits, in bytes 0 and 2 of `word`, or 1 and 3 if it is `upper`, as a pair of bf16; integers over 64.
template <bool kFloats>
__device__ __forceinline__ u32 pair_of_bytes(u32 word, bool upper) {
  if constexpr (kFloats) {
    // Sign, exponent and mantissa move to their places in bf16; then an exponent is 120 too small.
    const u32 high = upper ? word : word << 8;
    return fma_bf16((high & 0x80008000) | (high >> 4 & 0x07F007F0), 0x7B807B80, 0);
  } else {
    const u32 plus_128 = word ^ 0x80808080;
    return fma_bf16(__byte_perm(plus_128, 0, upper ? 0x4341 : 0x4240), kUnits, 0xC000C000);  // 128 / 64 less
  }
}
// Codes of 4 bits over 64: those of numbers `first` and `first` + 4 of a word.
__device__ __forceinline__ u32 pair_of_nibbles(u32 word, u32 first) {
  const u32 two = first < 2 ? word : word >> 8;
  const u32 pair = first % 2 ? two & 0x00F000F0 : two & 0x000F000F;
  return fma_bf16(pair, first % 2 ? kSixteenths : kUnits, 0xBE00BE00);  // 8 / 64 less
}

// Eight neighbouring numbers of a key, as they lie.
template <class M>
struct EightOfKey {
  static constexpr u32 kWords = M::kCodeBits / 4;
  u32 words[kWords];

  __device__ __forceinline__ void load(u32 address) {
    if constexpr (kWords == 4) {
      const uint4 x = load_shared(address);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if constexpr (kWords == 2) {
      const uint2 x = load_shared2(address);
      words[0] = x.x, words[1] = x.y;
    } else {
      words[0] = load_shared1(address);
    }
  }
  // For two multiplies: (x, y) and (z, w).
  __device__ __forceinline__ uint4 operand() const {
    if constexpr (kWords == 4) {
      return make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (kWords == 2) {
      constexpr bool kFloats = M::kFloatCodes != 0;
      return make_uint4(pair_of_bytes<kFloats>(words[0], false), pair_of_bytes<kFloats>(words[0], true),
                        pair_of_bytes<kFloats>(words[1], false), pair_of_bytes<kFloats>(words[1], true));
    } else {
      return make_uint4(pair_of_nibbles(words[0], 0), pair_of_nibbles(words[0], 1), pair_of_nibbles(words[0], 2),
                        pair_of_nibbles(words[0], 3));
    }
  }
};

// Values of eight neighbouring positions, in kCount times eight dimensions of which lane (g, q) has one each: as they lie.
// Of 4 bits a byte has two dimensions of a position, 16 i + 2 g and the next: even times eight take the first, odd ones the
// second. So the sums of lane (g, q) are of dimensions 16 i + 4 q and 16 i + 4 q + 2, and of those next to them.
template <class M, u32 kCount>
struct Values {
  static constexpr u32 kStep = M::kCodeBits == 4 ? 2 : 1;
  static constexpr u32 kWords = M::kCodeBits == 16 ? 4 : 2;
  static_assert(kCount % kStep == 0, "whole bytes");
  u32 words[kCount / kStep][kWords];

  // `first`: times eight, the first dimension.
  __device__ __forceinline__ void load(u32 values, u32 first, u32 g, u32 q) {
#pragma unroll
    for (u32 i = 0; i < kCount / kStep; ++i) {
      const u32 row = values + (8 * (first / kStep + i) + g) * (kStep * M::kValueRowBytes);
      if constexpr (kWords == 4) {
        const uint4 x = load_shared(row + q * 16);
        words[i][0] = x.x, words[i][1] = x.y, words[i][2] = x.z, words[i][3] = x.w;
      } else {
        const uint2 x = load_shared2(row + q * 8);
        words[i][0] = x.x, words[i][1] = x.y;
      }
    }
  }
  // The n-th times eight, for two multiplies.
  __device__ __forceinline__ uint4 operand(u32 n) const {
    const u32(&w)[kWords] = words[n / kStep];
    if constexpr (kWords == 4) {
      return make_uint4(w[0], w[1], w[2], w[3]);
    } else if constexpr (M::kCodeBits == 8) {
      constexpr bool kFloats = M::kFloatCodes != 0;
      return make_uint4(pair_of_bytes<kFloats>(w[0], false), pair_of_bytes<kFloats>(w[0], true),
                        pair_of_bytes<kFloats>(w[1], false), pair_of_bytes<kFloats>(w[1], true));
    } else {
      const u32 low = n % 2;
      return make_uint4(pair_of_nibbles(w[0], low), pair_of_nibbles(w[0], low + 2), pair_of_nibbles(w[1], low),
                        pair_of_nibbles(w[1], low + 2));
    }
  }
};
// Scales of a lane's eight positions.
struct EightScales {
  uint4 pairs;

  EightScales() = default;
  __device__ __forceinline__ explicit EightScales(u32 address) { load(address); }
  __device__ __forceinline__ void load(u32 address) { pairs = load_shared(address); }
  // Of positions 2 t and 2 t + 1.
  __device__ __forceinline__ float at(u32 t, u32 e) const {
    const u32 pair = t == 0 ? pairs.x : t == 1 ? pairs.y : t == 2 ? pairs.z : pairs.w;
    return __uint_as_float(e ? pair & 0xFFFF0000 : pair << 16);
  }
};

template <class T>
__device__ __forceinline__ T larger(T a, T b) { return a > b ? a : b; }

// x / scale as a code. Codes of 4 bits are stored plus 8.
template <class M>
__device__ __forceinline__ u32 code_of(float x, float scale) {
  const float step = x / (scale == 0.0f ? 1.0f : scale);
  if constexpr (!M::kFloatCodes) {
    constexpr i32 kLeast = M::kCodeBits == 4 ? -8 : -127, kMost = M::kCodeBits == 4 ? 7 : 127;
    const i32 code = __float2int_rn(step);
    const i32 bounded = code < kLeast ? kLeast : code > kMost ? kMost : code;
    return (M::kCodeBits == 4 ? bounded + 8 : bounded) & ((1u << M::kCodeBits) - 1);
  } else {
    // Halves go to even codes. Below 2^-6 codes count 2^-9; above, three bits of the mantissa stay.
    const u32 bits = __float_as_uint(step), size = bits & 0x7FFFFFFF;
    const u32 small = __float2int_rn(__uint_as_float(size) * 512.0f);
    const u32 normal = (size + 0x7FFFF + (size >> 20 & 1)) >> 20;
    const u32 code = size < 0x3C800000 ? small : normal - (120 << 3);
    return (code > 0x7E ? 0x7E : code) | bits >> 31 << 7;
  }
}

// Codes and scales of a head at one position. Of a warp, whose lanes have pairs (2 p, 2 p + 1), p = lane, lane + 32, ….
template <class M>
struct CodedHead {
  static constexpr u32 kHalf = M::kHeadDim / 2, kPairs = (kHalf + 31) / 32;
  static constexpr u32 kScaleValues = M::kHeadDim / M::kScales;  // numbers of a scale
  static constexpr bool kOneScale = M::kScales == 1;
  static_assert(kOneScale || kScaleValues == 32, "16 lanes have what a scale is of");
  u32 codes[kPairs];   // of 8 bits two in two bytes, of 4 bits two in one
  u32 scales[kPairs];  // bf16

  // What numbers in bf16 become.
  __device__ __forceinline__ void round(const u16* numbers, u32 lane) {
    u32 pair[kPairs], furthest[kPairs];
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = lane + 32 * j;
      pair[j] = p < kHalf ? reinterpret_cast<const u32*>(numbers)[p] : 0;
      furthest[j] = larger(ranked(pair[j] & 0xFFFF, 2 * p), ranked(pair[j] >> 16, 2 * p + 1));
    }
    if constexpr (kOneScale) {
#pragma unroll
      for (u32 j = 1; j < kPairs; ++j) furthest[0] = larger(furthest[0], furthest[j]);
      furthest[0] = largest<32>(furthest[0]);
    }
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      if constexpr (kOneScale) furthest[j] = furthest[0];
      else furthest[j] = largest<16>(furthest[j]);
      scales[j] = scale_of(furthest[j]);
      const float scale = __uint_as_float(scales[j] << 16);
      const u32 low = code_of<M>(__uint_as_float(pair[j] << 16), scale);
      const u32 high = code_of<M>(__uint_as_float(pair[j] & 0xFFFF0000), scale);
      codes[j] = low | high << M::kCodeBits;
    }
  }

  // In one piece: codes, then scales.
  __device__ __forceinline__ void keep(u8* at, u32 lane) const {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = lane + 32 * j;
      if (p >= kHalf) continue;
      if constexpr (M::kCodeBits == 8) reinterpret_cast<u16*>(at)[p] = static_cast<u16>(codes[j]);
      else at[p] = static_cast<u8>(codes[j]);
    }
    store_scales(at + M::kKeyRowBytes, 2, lane);
  }
  __device__ __forceinline__ void load(const u8* at, u32 lane) {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = pair_of(lane, j);
      codes[j] = M::kCodeBits == 8 ? reinterpret_cast<const u16*>(at)[p] : at[p];
    }
    load_scales(at + M::kKeyRowBytes, 2, lane);
  }
  // `codes` and `scales`: of the keys, or of the values, of a half page.
  __device__ __forceinline__ void store_key(u8* of_codes, u8* of_scales, u32 row, u32 lane) const {
    u8* to = of_codes + row * M::kKeyRowBytes;
    const u32 turn = M::key_turn(row) * M::kKeyBlockBytes;
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = lane + 32 * j;
      if (p >= kHalf) continue;
      if constexpr (M::kCodeBits == 8) reinterpret_cast<u16*>(to)[(2 * p ^ turn) / 2] = static_cast<u16>(codes[j]);
      else to[p ^ turn] = static_cast<u8>(codes[j]);
    }
    store_scales(of_scales + row * 2, M::kScaleRowBytes, lane);
  }
  __device__ __forceinline__ void store_value(u8* of_codes, u8* of_scales, u32 row, u32 lane) const {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = lane + 32 * j;
      if (p >= kHalf) continue;
      if constexpr (M::kCodeBits == 8) {
        of_codes[2 * p * kHalfPagePositions + row] = static_cast<u8>(codes[j]);
        of_codes[(2 * p + 1) * kHalfPagePositions + row] = static_cast<u8>(codes[j] >> 8);
      } else {
        of_codes[p * kHalfPagePositions + row] = static_cast<u8>(codes[j]);
      }
    }
    store_scales(of_scales + row * 2, M::kScaleRowBytes, lane);
  }
  // The opposite.
  __device__ __forceinline__ void load_key(const u8* of_codes, const u8* of_scales, u32 row, u32 lane) {
    const u8* from = of_codes + row * M::kKeyRowBytes;
    const u32 turn = M::key_turn(row) * M::kKeyBlockBytes;
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = pair_of(lane, j);
      codes[j] = M::kCodeBits == 8 ? reinterpret_cast<const u16*>(from)[(2 * p ^ turn) / 2] : from[p ^ turn];
    }
    load_scales(of_scales + row * 2, M::kScaleRowBytes, lane);
  }
  __device__ __forceinline__ void load_value(const u8* of_codes, const u8* of_scales, u32 row, u32 lane) {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u8* from = of_codes + pair_of(lane, j) * (M::kCodeBits == 8 ? 2 : 1) * kHalfPagePositions + row;
      codes[j] = M::kCodeBits == 8 ? from[0] | static_cast<u32>(from[kHalfPagePositions]) << 8 : from[0];
    }
    load_scales(of_scales + row * 2, M::kScaleRowBytes, lane);
  }
  // What they stand for, in bf16: products, rounded once.
  __device__ __forceinline__ void store_numbers(u16* numbers, u32 lane) const {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = lane + 32 * j;
      if (p >= kHalf) continue;
      const float scale = __uint_as_float(scales[j] << 16), unit = kCodeUnit<M>;
      u32 pair;
      if constexpr (M::kCodeBits == 8) pair = pair_of_bytes<M::kFloatCodes != 0>((codes[j] & 0xFF) | codes[j] >> 8 << 16, false);
      else pair = pair_of_nibbles((codes[j] & 0xF) | codes[j] >> 4 << 16, 0);
      reinterpret_cast<u32*>(numbers)[p] = pack_pair(low_half(pair) * unit * scale, high_half(pair) * unit * scale);
    }
  }

 private:
  // A lane's j-th pair, or the last one.
  static __device__ __forceinline__ u32 pair_of(u32 lane, u32 j) {
    const u32 p = lane + 32 * j;
    return p < kHalf ? p : kHalf - 1;
  }
  __device__ __forceinline__ void load_scales(const u8* at, u32 stride, u32 lane) {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j)
      scales[j] = *reinterpret_cast<const u16*>(at + (kOneScale ? 0 : pair_of(lane, j) / 16) * stride);
  }
  // By distance from 0, and of those as far the first one.
  static __device__ __forceinline__ u32 ranked(u32 number, u32 d) {
    return (number & 0x7FFF) << 16 | (31 - d % 32) << 1 | number >> 15;
  }
  template <u32 kLanes>
  static __device__ __forceinline__ u32 largest(u32 x) {
#pragma unroll
    for (u32 o = kLanes / 2; o; o /= 2) x = larger(x, __shfl_xor_sync(~0u, x, o));
    return x;
  }
  static __device__ __forceinline__ u32 scale_of(u32 furthest) {
    const float size = __uint_as_float(furthest >> 16 << 16);
    float scale = size / (M::kFloatCodes ? 448.0f : 127.0f);
    if constexpr (M::kCodeBits == 4) scale = (furthest & 1 ? size : -size) * 0.125f;
    return pack_pair(scale, 0.0f);
  }
  __device__ __forceinline__ void store_scales(u8* to, u32 stride, u32 lane) const {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 number = kOneScale ? lane + 32 * j : (lane + 32 * j) / 16;
      if (number >= M::kScales || (!kOneScale && lane % 16)) continue;
      *reinterpret_cast<u16*>(to + number * stride) = static_cast<u16>(scales[j]);
    }
  }
};

// A head's numbers in bf16 make room for their codes and scales. Executed by a warp.
template <class M>
__device__ __forceinline__ void round_in_place(u16* numbers, u32 lane) {
  CodedHead<M> head;
  head.round(numbers, lane);
  __syncwarp();  // all were read
  head.keep(reinterpret_cast<u8*>(numbers), lane);
}
// Key and value of a position, which were rounded in place, [2][2 D bytes], join a half page as its row. Executed by a warp.
template <class M>
__device__ __forceinline__ void store_rounded(const u8* rounded, u8* half_page, u32 row, u32 lane) {
  CodedHead<M> key, value;
  key.load(rounded, lane);
  value.load(rounded + 2 * M::kHeadDim, lane);
  u8* scales = half_page + 2 * M::kCodeBytes;
  key.store_key(half_page, scales, row, lane);
  value.store_value(half_page + M::kCodeBytes, scales + M::kScales * M::kScaleRowBytes, row, lane);
}
