// Weights as they are packed for the decode kernel, as operands of products with many tokens: 16 rows and 64 columns of a warp at a
// time, a *chunk* of a *fragment*. In registers they are the numbers that unpacking gives (weights/numbers.py), bit by bit.
//
// spec.cuh: as of fragment_places.cuh and fragment_scales.cuh.
#pragma once
#include "ptx/e4m3.cuh"
#include "ptx/e4m3_bits.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment_super_blocks.cuh"

// What a lane has of a chunk as it is stored. `read(piece, offset)`: 16 bytes so far into a half's piece, or into both where they are a tile's
// integers of 4 bits, which follow each other; `read_few`: 8 bytes. `read_more`: 4 bytes of what integers of 6 bits have more.
struct Stored {
  uint4 words[kWords];
  u32 more[kMoreBytes ? 2 : 1];

  template <class Read, class ReadFew, class ReadMore>
  __device__ __forceinline__ void load(u32 lane, bool is_tile, const Read& read, const ReadFew& read_few, const ReadMore& read_more) {
    if constexpr (kFirstBits == 4) {
      if (is_tile) {
        words[0] = read(0, lane * 16);
      } else {
        const uint2 first = read_few(0, lane * 8), second = read_few(1, lane * 8);
        words[0] = make_uint4(first.x, first.y, second.x, second.y);
      }
      if constexpr (kMoreBytes > 0) {
        more[0] = read_more(0, lane * (is_tile ? 8 : 4));
        more[1] = is_tile ? read_more(0, lane * 8 + 4) : read_more(1, lane * 4);
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < kWords; ++i) words[i] = read(i / kPieceWords, i % kPieceWords * 512 + lane * 16);
    }
  }
  // What was read last.
  __device__ __forceinline__ u32 last() const { return kMoreBytes ? more[kMoreBytes ? 1 : 0] : words[kWords - 1].w; }
};

#define WORD(v, i) ((i) == 0 ? (v).x : (i) == 1 ? (v).y : (i) == 2 ? (v).z : (v).w)

// Codes of rows g (`half` 0) or g + 8 for multiply `m` of 32 columns `p`: a byte for each of the columns 4 m … 4 m + 3 of the lane's 8.
__device__ __forceinline__ u32 codes_of(const Stored& stored, bool is_tile, u32 p, u32 m, u32 half) {
  if constexpr (kCodes == Codes::kInt4) {
    const uint4& v = stored.words[0];
    const u32 word = is_tile ? WORD(v, 2 * p + m) : WORD(v, 2 * half + m);
    return word >> (is_tile ? 4 * half : 4 * p) & 0x0F0F0F0F;
  } else if constexpr (kCodes == Codes::kInt6) {
    // A byte has a code in its upper bits. Three words have a fourth one's codes, two bits of each in a byte's lower ones.
    const uint4& v = stored.words[0];
    const bool second = is_tile ? p : half;
    const u32 a = second ? is_tile ? v.w : v.z : v.x, b = second ? is_tile ? stored.more[0] : v.w : v.y;
    const u32 c = second ? stored.more[kMoreBytes ? 1 : 0] : is_tile ? v.z : stored.more[0];
    const u32 i = is_tile ? 2 * m + half : 2 * p + m;
    if (i < 3) return (i == 0 ? a : i == 1 ? b : c) & 0xFCFCFCFC;
    return (a << 6 & 0xC0C0C0C0) | (b << 4 & 0x30303030) | (c << 2 & 0x0C0C0C0C);
  } else {
    const uint4 &tile = stored.words[p % kWords], &alone = stored.words[half % kWords];
    const u32 of_alone = WORD(alone, 2 * p + m);
    if constexpr (kCodes == Codes::kInt8) return is_tile ? WORD(tile, 2 * m + half) : of_alone;
    const u32 of_tile = __byte_perm(WORD(tile, 2 * m), WORD(tile, 2 * m + 1), half ? 0x7632 : 0x5410);
    return is_tile ? of_tile : of_alone;
  }
}

template <bool kOfSuperBlocks>
struct SharedOf {
  using Type = GroupScales;
};
template <>
struct SharedOf<true> {
  using Type = SuperBlockScales;
};
using Shared = SharedOf<kSuper>::Type;

// Of four codes two pairs of numbers, (code - zero) · scale or code · scale + offset.
__device__ __forceinline__ uint2 numbers_of(u32 codes, float scale, float zero) {
  float v[4];
  if constexpr (kCodes == Codes::kFp8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    constexpr float kUnit = 256;
    const uint2 pairs = small_fp16_of_e4m3(codes);
#else
    constexpr float kUnit = 1;
    const uint2 pairs = fp16_of_e4m3(codes);
#endif
    v[0] = from_fp16(static_cast<u16>(pairs.x)) * kUnit, v[1] = from_fp16(static_cast<u16>(pairs.x >> 16)) * kUnit;
    v[2] = from_fp16(static_cast<u16>(pairs.y)) * kUnit, v[3] = from_fp16(static_cast<u16>(pairs.y >> 16)) * kUnit;
  } else {
    const u32 unsigned_codes = kSigned ? codes ^ 0x80808080u : codes;
    const float base = kIntegerBase + (kSigned ? 128.0f : kHasZeros || kHasOffsets ? 0.0f : 8.0f) + (kHasZeros ? zero : 0.0f);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = widened_byte(unsigned_codes, i) - base;
    if constexpr (kHasOffsets) {
      // Within super-blocks the product is exact.
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[i] = kSuper ? __fmaf_rn(v[i], scale, zero) : __fadd_rn(__fmul_rn(v[i], scale), zero);
      return make_uint2(pack_pair(v[0], v[1]), pack_pair(v[2], v[3]));
    }
  }
  return make_uint2(pack_pair(__fmul_rn(v[0], scale), __fmul_rn(v[1], scale)),
                    pack_pair(__fmul_rn(v[2], scale), __fmul_rn(v[3], scale)));
}

// The same by pairs of 16-bit numbers.
__device__ __forceinline__ uint2 numbers_of(u32 codes, u32 scale, u32 zero) {
  const u32 bits = kSignApart ? codes & 0x7F7F7F7F : kSigned ? codes ^ 0x80808080 : codes;
  const u32 signs = codes & 0x80808080;
  const auto pair = [&](u32 bytes) {
    const u32 based = __byte_perm(bits, kBaseByte, bytes);
    if constexpr (kSignApart) {
      const u32 code = add_pairs(based, __byte_perm(signs, kMinusBase >> 8, bytes));
      return multiply_pairs(kHasZeros ? add_pairs(code, zero) : code, scale);
    } else {
      return multiply_pairs(add_pairs(based, kHasZeros ? zero : twice(kMinusBase + (kSigned ? 128 : 8))), scale);
    }
  };
  return make_uint2(pair(0x4140), pair(0x4342));
}

// The registers of multiply `m` of 32 columns `p`: rows g and g + 8, 2 columns of 16, then the same of the 2 columns after those.
__device__ __forceinline__ uint4 operand_of(const Stored& stored, const Shared& shared, bool is_tile, u32 p, u32 m) {
  if constexpr (kPlain) {
    const uint4 &tile = stored.words[(2 * p + m) % kWords], &low = stored.words[p % kWords], &high = stored.words[(2 + p) % kWords];
    return make_uint4(is_tile ? tile.x : m ? low.z : low.x, is_tile ? tile.y : m ? high.z : high.x,
                      is_tile ? tile.z : m ? low.w : low.y, is_tile ? tile.w : m ? high.w : high.y);
  } else {
    const u32 n = p % Shared::kOwnGroups;
    const uint2 first = numbers_of(codes_of(stored, is_tile, p, m, 0), shared.scale(0, n), shared.zero(0, n));
    const uint2 last = numbers_of(codes_of(stored, is_tile, p, m, 1), shared.scale(1, n), shared.zero(1, n));
    return make_uint4(first.x, last.x, first.y, last.y);
  }
}

// The registers of a product of 32 columns in 8 bits, FP8: rows g and g + 8, columns 0 … 3 of the lane's 8, then the same of the other 4.
__device__ __forceinline__ uint4 codes_operand(const Stored& stored, bool is_tile, u32 p) {
  return make_uint4(codes_of(stored, is_tile, p, 0, 0), codes_of(stored, is_tile, p, 0, 1),
                    codes_of(stored, is_tile, p, 1, 0), codes_of(stored, is_tile, p, 1, 1));
}
#undef WORD
