// What rows g and g + 8 of a group of columns share, of a chunk of a fragment (fragment_places.cuh).
//
// spec.cuh: kGroup, kScaleType, kScaleRows, kHasZeros, kHasOffsets, kSuperColumns (of a super-block, or 0).
#pragma once
#include "ptx/mma.cuh"
#include "ptx/pairs.cuh"
#include "ptx/prefetch.cuh"
#include "tile/fragment_places.cuh"

// What rows of a group share, of rows g and g + 8; a chunk has kChunkGroups groups.
inline constexpr u32 kGroupColumns = kPlain ? kStepColumns : kGroup;
inline constexpr u32 kChunkGroups = kGroupColumns < kChunkColumns ? kChunkColumns / kGroupColumns : 1;
inline constexpr u32 kScaleBytes = kPlain ? 0 : kScaleType == ScaleType::kFp32 ? 4 : 2;
inline constexpr u32 kOwnScales = kPlain ? 1 : kHalfTileRows / kScaleRows;  // of a group, in half a tile
inline constexpr u32 kHalfScalesBytes = kStepColumns / kGroupColumns * kOwnScales * kScaleBytes;

// Where scales are of the type of the products, pairs of numbers are made at once: (code - zero) is exact in 16 bits, and its product
// with a scale rounded once, as where fp32 is rounded.
inline constexpr bool kSuper = kSuperColumns > 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasPairs = !kBf16;  // such arithmetic
#else
inline constexpr bool kHasPairs = true;
#endif
inline constexpr bool kInPairs = kHasPairs && !kPlain && kCodes != Codes::kFp8 && !kHasOffsets && !kSuper &&
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

// Integers from 0 to 255 become fp32 as the last bits of 2^23's.
inline constexpr float kIntegerBase = 8388608.0f;
__device__ __forceinline__ float widened_byte(u32 word, u32 byte) {
  return __uint_as_float(__byte_perm(0x4B000000u, word, 0x3004 | byte));
}

struct GroupScales {
  using Scale = ScaleOf<kInPairs>::Type;
  static constexpr u32 kOwnGroups = kChunkGroups;

  // By half and group. Zeros: of numbers in pairs what is added to codes in place of what is taken off; where there are offsets, these.
  __device__ __forceinline__ Scale scale(u32 h, u32 n) const {
    const u32 bits = scales[h][n];
    if constexpr (kInPairs) return twice(bits);
    else return number_of(bits);
  }
  // Of 8 bits codes count from -128 on.
  __device__ __forceinline__ Scale zero(u32 h, u32 n) const {
    const u32 byte = zeros[h][n];
    if constexpr (kHasOffsets) {
      return number_of(byte);
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
    if constexpr (!kPlain) {
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
    if constexpr (!kPlain) {
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
  static __device__ __forceinline__ u32 read_number(const u8* at) {
    if constexpr (kScaleBytes == 4) return __ldg(reinterpret_cast<const u32*>(at));
    else return __ldg(reinterpret_cast<const u16*>(at));
  }
  static __device__ __forceinline__ float number_of(u32 bits) {
    if constexpr (kScaleType == ScaleType::kFp32) return __uint_as_float(bits);
    else if constexpr (kScaleType == ScaleType::kBf16) return __uint_as_float(bits << 16);
    else return from_fp16(static_cast<u16>(bits));
  }
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
  u32 scales[2][kChunkGroups], zeros[2][kChunkGroups];
};
