// Weights as they are packed for the decode kernel, as operands of products with many tokens: 16 rows and 64 columns of a warp at a
// time, a *chunk* of a *fragment*. In registers they are the numbers that unpacking gives (weights/numbers.py), bit by bit.
// Where they lie is told by prefill/fragments.py; the orders of values are those of weights/layout.py.
//
// spec.cuh: kValueBits, kCodes, kPairsSteps, kSteps, kEndsInHalf, and of quantised weights kGroup, kScaleType, kScaleRows, kHasZeros,
// kHasOffsets, kSuperColumns (of a super-block, or 0).
#pragma once
#include "ptx/e4m3.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/pairs.cuh"
#include "ptx/prefetch.cuh"
#include "spec.cuh"

enum class HalfKind : u32 { kNone, kTile, kAlone };
// 8 rows; see `Half` of prefill/fragments.py.
struct Half {
  u64 at;
  u32 pair_bytes, step_bytes, last_less;
  i32 out;
  HalfKind kind;
  u32 is_upper;
};

inline constexpr bool kPlain = kCodes == Codes::kPlain;
inline constexpr u32 kChunkColumns = 64, kStepChunks = kStepColumns / kChunkColumns;
// Bytes of 8 rows of a chunk, and of those of half a tile's values.
// Integers of 6 bits lie in two places: two thirds of their bytes as integers of 4 bits do, and *more* behind all of those.
inline constexpr u32 kFirstBits = kValueBits == 6 ? 4 : kValueBits;
inline constexpr u32 kPieceBytes = kHalfTileRows * kChunkColumns * kFirstBits / 8, kMoreBytes = kValueBits == 6 ? kPieceBytes / 2 : 0;
inline constexpr u32 kFirstBytes = kHalfTileValues * kFirstBits / 8;
inline constexpr u32 kValueBytes = kHalfTileValues * kValueBits / 8;
inline constexpr u32 kFragmentBytes = 2 * (kPieceBytes + kMoreBytes);
inline constexpr u32 kWords = 2 * kPieceBytes / 512;  // of 16 bytes, of a lane
inline constexpr u32 kPieceWords = kWords > 1 ? kWords / 2 : 1;

// Of 64 neighbouring columns: which step has them, and which of the step's chunks they are.
struct ChunkPlace {
  u32 step, warp;
  __device__ __forceinline__ explicit ChunkPlace(u32 chunk)
      : step(kPairsSteps ? chunk / (2 * kStepChunks) * 2 + chunk % 2 : chunk / kStepChunks),
        warp(kPairsSteps ? chunk % (2 * kStepChunks) / 2 : chunk % kStepChunks) {}
};
// Bytes to the tile or half tile that has a half's rows in a step.
__device__ __forceinline__ u64 in_step(const Half& half, u32 step) {
  const u32 less = kSteps % 2 == 1 && step == kSteps - 1 ? half.last_less : 0;
  return half.at + static_cast<u64>(step / 2) * half.pair_bytes + (step % 2) * half.step_bytes - less;
}
// Whether of a tile the two parts of a chunk lie behind each other: in half a step a warp of the decode kernel has 32 columns, so a
// chunk is of two of them.
__device__ __forceinline__ bool parts_alternate(u32 step) { return kFirstBits == 4 || (kEndsInHalf && step == kSteps - 1); }
// Bytes to the part of a fragment's chunk that is copied for one of its halves: kPieceBytes from there. Of a tile the two parts hold
// rows of both: the columns' first 32 and last 32, or of integers of 4 bits the rows g < 4 and the others.
// `run_bytes`: of one half, where such parts of neighbouring chunks are copied together, which lie one behind the other.
__device__ __forceinline__ u64 piece_at(const Half& half, u32 which, u32 chunk, u32 run_bytes = kPieceBytes) {
  const ChunkPlace place(chunk);
  const u64 at = in_step(half, place.step);
  if (half.kind == HalfKind::kAlone) return at + place.warp * kPieceBytes;
  if (parts_alternate(place.step)) return at + 2 * place.warp * kPieceBytes + which * run_bytes;
  return at + which * kValueBytes + place.warp * kPieceBytes;
}

// The same of what integers of 6 bits have beside their first two thirds, kMoreBytes from there.
__device__ __forceinline__ u64 more_at(const Half& half, u32 which, u32 chunk, u32 run_bytes) {
  const ChunkPlace place(chunk);
  const u64 at = in_step(half, place.step);
  if (half.kind == HalfKind::kAlone) return at + kFirstBytes + place.warp * kMoreBytes;
  return at + 2 * kFirstBytes + 2 * place.warp * kMoreBytes + which * run_bytes;
}

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

// What rows of a group share, of rows g and g + 8; a chunk has kChunkGroups groups.
inline constexpr u32 kGroupColumns = kPlain ? kStepColumns : kGroup;
inline constexpr u32 kChunkGroups = kGroupColumns < kChunkColumns ? kChunkColumns / kGroupColumns : 1;
inline constexpr u32 kScaleBytes = kPlain ? 0 : kScaleType == ScaleType::kFp32 ? 4 : 2;
inline constexpr u32 kOwnScales = kPlain ? 1 : kHalfTileRows / kScaleRows;  // of a group, in half a tile
inline constexpr u32 kHalfScalesBytes = kStepColumns / kGroupColumns * kOwnScales * kScaleBytes;

// Where scales are of the type of the products, pairs of numbers are made at once: (code - zero) is exact in 16 bits, and its product
// with a scale rounded once, as where fp32 is rounded.
inline constexpr bool kSuper = kSuperColumns > 0;
inline constexpr bool kInPairs = !kPlain && kCodes != Codes::kFp8 && !kHasOffsets && !kSuper &&
                                 kScaleType == (kBf16 ? ScaleType::kBf16 : ScaleType::kFp16);

// Codes are the last bits of 128 in bf16, and of 1,024 in fp16: of either the upper byte, and of its negative the bits. In bf16 seven
// bits are: of codes of 8 bits, two's complement, the sign is apart.
inline constexpr u32 kBaseByte = kBf16 ? 0x43 : 0x64, kMinusBase = (kBaseByte | 0x80) << 8;
inline constexpr bool kSigned = kCodes == Codes::kInt8 || kCodes == Codes::kInt6, kSignApart = kSigned && kBf16;
// Two of the same numbers of 16 bits.
__device__ __forceinline__ u32 twice(u32 bits) { return bits * 0x10001u; }

template <bool kOfPairs>
struct ScaleOf {
  using Type = float;
};
template <>
struct ScaleOf<true> {
  using Type = u32;
};

// Within super-blocks of kSuperColumns columns: groups and offsets of a chunk, what half a tile has of each, and of a tile's rows g and
// g + 8 together what a warp's columns have, and what a row has of a super-block.
inline constexpr u32 kOwnGroups = kSuper ? 2 : kChunkGroups;  // whose scales a lane has
inline constexpr u32 kOffsetGroups = 2, kSuperGroups = kSuper ? kChunkColumns / kGroupColumns : 1;
inline constexpr u32 kHalfGroupsBytes = kHalfTileRows * kStepChunks * kSuperGroups;
inline constexpr u32 kHalfOffsetsBytes = kHasOffsets ? kHalfTileRows * kStepChunks * kOffsetGroups : 0;
inline constexpr u32 kTileGroupsBytes = 2 * (kSuperGroups + (kHasOffsets ? kOffsetGroups : 0)), kSuperBytes = kHasOffsets ? 4 : 2;
inline constexpr u32 kSuperSpan = kSuper ? kSuperColumns : kStepColumns, kHalfSupersBytes = kHalfTileRows * (kStepColumns / kSuperSpan) * 2;

struct Shared {
  using Scale = ScaleOf<kInPairs>::Type;

  // By half and group; within super-blocks the group of the lane's columns among 32. Zeros: of numbers in pairs what is added to codes in
  // place of what is taken off. Where there are offsets, what is added: of super-blocks, which have it taken off, its negative.
  __device__ __forceinline__ Scale scale(u32 h, u32 n) const {
    const u32 bits = scales[h][n];
    if constexpr (kInPairs) return twice(bits);
    else if constexpr (kSuper) return from_fp16(static_cast<u16>(supers[h])) * static_cast<float>(static_cast<signed char>(bits)) * kUnit;
    else return number_of(bits);
  }
  // Of 8 bits codes count from -128 on.
  __device__ __forceinline__ Scale zero(u32 h, u32 n) const {
    const u32 byte = zeros[h][n];
    if constexpr (kHasOffsets) {
      if constexpr (kSuper) return from_fp16(static_cast<u16>(supers[h] >> 16)) * -static_cast<float>(byte);
      else return number_of(byte);
    } else if constexpr (kInPairs && !kSignApart) {
      return twice(kMinusBase + (kSigned ? byte ^ 0x80u : byte));
    } else {
      const float zero = kSigned ? static_cast<float>(static_cast<i32>(static_cast<signed char>(byte))) : static_cast<float>(byte);
      if constexpr (kInPairs) return pack_pair(-zero, -zero);
      else return zero;
    }
  }

  // Past the slots, since few bytes are no copy's: of a lane's rows.
  __device__ __forceinline__ void load(const u8* image, const Half (&halves)[2], u32 chunk, u32 lane) {
    if constexpr (kSuper) {
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const SuperPlace place(image, halves[h], h, chunk, lane / 4);
#pragma unroll
        for (u32 p = 0; p < 2; ++p) {
          // A group of 16 columns has two lanes of a quad.
          const u32 n = kSuperGroups > 2 ? 2 * p + lane % 4 / 2 : p;
          scales[h][p] = __ldg(place.groups + n * place.apart);
          if constexpr (kHasOffsets) zeros[h][p] = __ldg(place.offsets + p);
        }
        supers[h] = __ldg(reinterpret_cast<const u16*>(place.supers));
        if constexpr (kHasOffsets) supers[h] |= static_cast<u32>(__ldg(reinterpret_cast<const u16*>(place.super_offsets))) << 16;
      }
    } else if constexpr (!kPlain) {
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const Place place(image, halves[h], h, chunk);
#pragma unroll
        for (u32 n = 0; n < kChunkGroups; ++n) {
          const u32 number = place.number(n, lane / 4);
          const u8* const at = place.scales + number * kScaleBytes;
          scales[h][n] = read_number(at);
          if constexpr (kHasZeros) zeros[h][n] = __ldg(place.zeros + number);
          if constexpr (kHasOffsets) zeros[h][n] = read_number(place.zeros + number * kScaleBytes);
        }
      }
    }
  }
  // The first and the last of 8 rows; a tile's halves lie between each other.
  static __device__ __forceinline__ void prefetch(const u8* image, const Half& half, u32 h, u32 chunk) {
    if constexpr (kSuper) {
      const SuperPlace first(image, half, h, chunk, 0), last(image, half, h, chunk, kHalfTileRows - 1);
      prefetch_to_l2(first.groups);
      prefetch_to_l2(last.groups);
      prefetch_to_l2(first.supers);
    } else if constexpr (!kPlain) {
      if (!kPairsSteps && h == 1 && half.kind == HalfKind::kTile) return;
      const Place place(image, half, h, chunk);
      const u32 first = place.number(0, 0), last = place.number(kChunkGroups - 1, kHalfTileRows - 1);
      prefetch_to_l2(place.scales + first * kScaleBytes);
      if constexpr (kOwnScales > 1) prefetch_to_l2(place.scales + last * kScaleBytes);
      if constexpr (kHasZeros) prefetch_to_l2(place.zeros + first);
      if constexpr (kHasOffsets) prefetch_to_l2(place.zeros + first * kScaleBytes), prefetch_to_l2(place.zeros + last * kScaleBytes);
    }
  }

 private:
  // Of what `codes_of` gives: codes of 6 bits have two bits below them.
  static constexpr float kUnit = kCodes == Codes::kInt6 ? 0.25f : 1.0f;
  static __device__ __forceinline__ u32 read_number(const u8* at) {
    if constexpr (kScaleBytes == 4) return __ldg(reinterpret_cast<const u32*>(at));
    else return __ldg(reinterpret_cast<const u16*>(at));
  }
  static __device__ __forceinline__ float number_of(u32 bits) {
    if constexpr (kScaleType == ScaleType::kFp32) return __uint_as_float(bits);
    else if constexpr (kScaleType == ScaleType::kBf16) return __uint_as_float(bits << 16);
    else return from_fp16(static_cast<u16>(bits));
  }
  // Where half `h` of a fragment has the bytes of a chunk's groups and offsets, and what the chunk's super-block has; see SuperBlockLayout
  // of weights/layout.py. `apart`: from a group's byte to the next one's.
  struct SuperPlace {
    const u8 *groups, *offsets, *supers, *super_offsets;
    u32 apart;
    __device__ __forceinline__ SuperPlace(const u8* image, const Half& half, u32 h, u32 number, u32 g) {
      const ChunkPlace chunk(number);
      const bool is_tile = half.kind == HalfKind::kTile;
      const u32 tiles = is_tile ? 2 : 1, row = chunk.warp * kHalfTileRows + g;
      const u8* const behind = image + in_step(half, chunk.step) + tiles * kValueBytes;
      groups = behind + row * (is_tile ? kTileGroupsBytes : kSuperGroups) + (is_tile ? h : 0);
      apart = tiles;
      offsets = is_tile ? behind + row * kTileGroupsBytes + 2 * kSuperGroups + h * kOffsetGroups
                        : behind + kHalfGroupsBytes + row * kOffsetGroups;
      const u32 step = kPairsSteps ? chunk.step / 2 * 2 + h : chunk.step;
      const u8* const last = image + in_step(half, step) + tiles * (kValueBytes + kHalfGroupsBytes + kHalfOffsetsBytes);
      const u32 block = (kPairsSteps ? chunk.warp % 4 * 2 : chunk.warp) * kChunkColumns / kSuperSpan;
      const u32 own = block * kHalfTileRows + g;
      if (is_tile) {
        supers = last + (own * 2 + (kPairsSteps ? chunk.warp / 4 : h)) * kSuperBytes;
        super_offsets = supers + 2;
      } else {
        supers = last + own * 2;
        super_offsets = supers + kHalfSupersBytes;
      }
    }
  };
  // Where half `h` of a fragment has those of a chunk.
  struct Place {
    ChunkPlace chunk;
    u32 tiles, first;
    const u8 *scales, *zeros;
    __device__ __forceinline__ Place(const u8* image, const Half& half, u32 h, u32 number) : chunk(number) {
      const bool is_tile = half.kind == HalfKind::kTile;
      tiles = is_tile ? 2 : 1, first = is_tile ? h : 0;
      scales = image + in_step(half, kPairsSteps ? chunk.step / 2 * 2 + h : chunk.step) + tiles * kValueBytes;
      zeros = scales + tiles * kHalfScalesBytes;
    }
    // Of row `g` of the 8, in group `n` of the chunk.
    __device__ __forceinline__ u32 number(u32 n, u32 g) const {
      if constexpr (kPairsSteps) return (chunk.warp % 4 * 2 * kChunkColumns / kGroupColumns * kOwnScales + g) * 2 + chunk.warp / 4;
      const u32 group = chunk.warp * kChunkColumns / kGroupColumns + n;
      return (group * kOwnScales + g / kScaleRows) * tiles + first;
    }
  };
  // As they are stored: what is made of them at once would be waited for at once.
  u32 scales[2][kOwnGroups], zeros[2][kOwnGroups], supers[kSuper ? 2 : 1];
};

// Integers from 0 to 255 become fp32 as the last bits of 2^23's.
inline constexpr float kIntegerBase = 8388608.0f;
__device__ __forceinline__ float widened_byte(u32 word, u32 byte) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 | byte));
}

// Of four codes two pairs of numbers, (code - zero) · scale or code · scale + offset.
__device__ __forceinline__ uint2 numbers_of(u32 codes, float scale, float zero) {
  float v[4];
  if constexpr (kCodes == Codes::kFp8) {
    const uint2 pairs = fp16_of_e4m3(codes);
    v[0] = from_fp16(static_cast<u16>(pairs.x)), v[1] = from_fp16(static_cast<u16>(pairs.x >> 16));
    v[2] = from_fp16(static_cast<u16>(pairs.y)), v[3] = from_fp16(static_cast<u16>(pairs.y >> 16));
  } else {
    const u32 unsigned_codes = kSigned ? codes ^ 0x80808080u : codes;
    const float base = kIntegerBase + (kSigned ? 128.0f : kHasZeros || kHasOffsets ? 0.0f : 8.0f) + (kHasZeros ? zero : 0.0f);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = widened_byte(unsigned_codes, i) - base;
    if constexpr (kHasOffsets) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[i] = __fadd_rn(__fmul_rn(v[i], scale), zero);
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
    const u32 n = p % kOwnGroups;
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
