// How a warp reads its weights out of a slot of the ring: a structure for each format of weight_format.py.
//
// A lane's part of a tile are 16 rows of 64 columns of K; of a half tile 8 rows of them, and of those of the next step.
// Lane (g, q) = (lane / 4, lane % 4) has rows g and g + 8 and, of 32 columns, the 8 from 8q on. Behind a tile's values lie its
// scales, and behind those the zeros. Python's side is weights/packing.py.
//
// load(tile, place, both, half_tiles): `tile` is the address of a tile, or of half tiles of two steps (of one unless
// `both`); `place` says where in it a lane's values and scales lie.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "spec.cuh"

enum class Arithmetic : u32 {
  kPlain,     // 16-bit values times 16-bit activations
  kScaled,    // values that become fp16, as activations do, times a scale for 64 columns or less
  kIntegers,  // integers of 4 or 8 bits times activations in two digits of 8 bits, times scales
};

// Values that stand for themselves. `low` and `high` are the registers of m16n8k16's first operand, of a tile for the first
// 32 columns and the last, of half tiles for the first step and the next one.
struct Plain16 {
  static constexpr Arithmetic kArithmetic = Arithmetic::kPlain;
  static constexpr u32 kHalfBytes = kHalfTileValues * 2;
  struct Place {
    u32 values;
    __device__ __forceinline__ Place(u32 warp, u32 lane) : values(warp * 1024 + lane * 16) {}
  };
  uint4 low[2], high[2];

  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool) {
    const u32 at = tile + place.values;
    low[0] = load_shared(at);
    low[1] = load_shared(at + 512);
    if (both) {
      high[0] = load_shared(at + kHalfBytes);
      high[1] = load_shared(at + kHalfBytes + 512);
    }
  }
  // Of the loads something: they are neighbours in the queue to shared memory.
  __device__ __forceinline__ u32 loaded() const { return low[1].x; }
};

template <ScaleType kScale>
inline constexpr u32 kScaleBytes = kScale == ScaleType::kFp32 ? 4 : 2;
// Scales as they are stored, of rows g and g + 8, or of row g in two steps.
template <ScaleType kScale>
struct ScalePair {
  u32 first, second;

  __device__ __forceinline__ void load_both(u32 at) {
    if constexpr (kScale == ScaleType::kFp32) {
      const uint2 v = load_shared2(at);
      first = v.x, second = v.y;
    } else {
      first = load_shared1(at);
    }
  }
  __device__ __forceinline__ void load_one(u32 at, bool of_second) {
    const u32 v = kScale == ScaleType::kFp32 ? load_shared1(at) : load_shared_half(at);
    if constexpr (kScale == ScaleType::kFp32) {
      of_second ? second = v : first = v;
    } else {
      first = of_second ? first | v << 16 : v;
    }
  }
  __device__ __forceinline__ float get(u32 which) const {
    if constexpr (kScale == ScaleType::kFp32) return __uint_as_float(which ? second : first);
    if constexpr (kScale == ScaleType::kBf16) return __uint_as_float(which ? first & 0xFFFF0000u : first << 16);
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<u16>(which ? first >> 16 : first)));
    return x;
  }
};
// Groups of columns that a warp's 64 of a step are in, and the first of them.
template <u32 kGroup>
inline constexpr u32 kWarpGroups = kGroup < 64 ? 64 / kGroup : 1;
template <u32 kGroup>
__device__ __forceinline__ u32 first_group(u32 warp) { return warp * 64 / kGroup; }

// What integers of 4 and 8 bits have in common: scales and zeros of each of the warp's groups.
template <ScaleType kScale, u32 kGroup, bool kHasZeros, u32 kBits>
struct Integers {
  static constexpr Arithmetic kArithmetic = Arithmetic::kIntegers;
  static constexpr u32 kGroups = kWarpGroups<kGroup>, kStepGroups = kStepColumns / kGroup;
  static constexpr u32 kValueBytes = kHalfTileValues * kBits / 8, kRowsScales = kHalfTileRows * kScaleBytes<kScale>;
  static constexpr u32 kHalfScales = kStepGroups * kRowsScales, kHalfZeros = kHasZeros ? kStepGroups * kHalfTileRows : 0;
  static constexpr u32 kHalfBytes = (kValueBytes + kHalfScales + kHalfZeros + 15) / 16 * 16;
  static constexpr bool kZeros = kHasZeros;
  struct Place {
    u32 values, half_values, scales, half_scales, zeros, half_zeros;
    __device__ __forceinline__ Place(u32 warp, u32 lane)
        : values((warp * 32 + lane) * 16),
          half_values((warp * 32 + lane) * 2 * kBits),
          scales(2 * kValueBytes + (first_group<kGroup>(warp) * 8 + lane / 4) * 2 * kScaleBytes<kScale>),
          half_scales(kValueBytes + (first_group<kGroup>(warp) * 8 + lane / 4) * kScaleBytes<kScale>),
          zeros(2 * kValueBytes + 2 * kHalfScales + (first_group<kGroup>(warp) * 8 + lane / 4) * 2),
          half_zeros(kValueBytes + kHalfScales + first_group<kGroup>(warp) * 8 + lane / 4) {}
  };
  ScalePair<kScale> scales[kGroups];
  u32 zeros[kGroups];  // a byte of each row

  __device__ __forceinline__ void load_scales(u32 tile, const Place& place) {
#pragma unroll
    for (u32 n = 0; n < kGroups; ++n) {
      scales[n].load_both(tile + place.scales + n * 2 * kRowsScales);
      if (kHasZeros) zeros[n] = load_shared_half(tile + place.zeros + n * 16);
    }
  }
  __device__ __forceinline__ void load_half_scales(u32 half, const Place& place, bool second) {
#pragma unroll
    for (u32 n = 0; n < kGroups; ++n) {
      scales[n].load_one(half + place.half_scales + n * kRowsScales, second);
      if (!kHasZeros) continue;
      const u32 zero = load_shared_byte(half + place.half_zeros + n * 8);
      zeros[n] = second ? zeros[n] | zero << 8 : zero;
    }
  }
};

// Unsigned integers of 4 bits. A byte has in its low half a value of row g, in its high half the one of row g + 8, or of row g
// in the next 32 columns: each is an operand of m16n8k32 under a mask, the second one sixteen times as large.
template <ScaleType kScale, u32 kGroup, bool kHasZeros>
struct Int4 : Integers<kScale, kGroup, kHasZeros, 4> {
  using Base = Integers<kScale, kGroup, kHasZeros, 4>;
  using Place = typename Base::Place;
  static constexpr bool kSigned = false;
  static constexpr i32 kZero = 8;           // where none is stored
  static constexpr float kSecond = 0.0625f;  // by what the sums of rows g + 8 are multiplied
  uint4 values;

  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool half_tiles) {
    if (!half_tiles) {
      values = load_shared(tile + place.values);
      Base::load_scales(tile, place);
      return;
    }
    const uint2 first = load_shared2(tile + place.half_values);
    values.x = first.x, values.y = first.y;
    Base::load_half_scales(tile, place, false);
    if (both) {
      const uint2 second = load_shared2(tile + Base::kHalfBytes + place.half_values);
      values.z = second.x, values.w = second.y;
      Base::load_half_scales(tile + Base::kHalfBytes, place, true);
    }
  }
  __device__ __forceinline__ u32 loaded() const { return values.x; }
  // The operand of 32 columns of a tile.
  __device__ __forceinline__ uint4 operand(u32 part) const {
    const u32 first = part ? values.z : values.x, second = part ? values.w : values.y;
    return make_uint4(first & 0x0F0F0F0F, first & 0xF0F0F0F0, second & 0x0F0F0F0F, second & 0xF0F0F0F0);
  }
  // The same of a half tile: rows g + 8 are none.
  __device__ __forceinline__ uint4 half_operand(bool second_step, u32 part) const {
    const u32 first = second_step ? values.z : values.x, second = second_step ? values.w : values.y;
    const u32 mask = part ? 0xF0F0F0F0 : 0x0F0F0F0F;
    return make_uint4(first & mask, 0, second & mask, 0);
  }
};

// Signed integers of 8 bits.
template <ScaleType kScale, u32 kGroup, bool kHasZeros>
struct Int8 : Integers<kScale, kGroup, kHasZeros, 8> {
  using Base = Integers<kScale, kGroup, kHasZeros, 8>;
  using Place = typename Base::Place;
  static constexpr bool kSigned = true;
  static constexpr i32 kZero = 0;
  static constexpr float kSecond = 1.0f;
  uint4 low, high;

  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool half_tiles) {
    if (!half_tiles) {
      low = load_shared(tile + place.values);
      high = load_shared(tile + Base::kValueBytes + place.values);
      Base::load_scales(tile, place);
      return;
    }
    low = load_shared(tile + place.half_values);
    Base::load_half_scales(tile, place, false);
    if (both) {
      high = load_shared(tile + Base::kHalfBytes + place.half_values);
      Base::load_half_scales(tile + Base::kHalfBytes, place, true);
    }
  }
  __device__ __forceinline__ u32 loaded() const { return low.x; }
  __device__ __forceinline__ uint4 operand(u32 part) const { return part ? high : low; }
  __device__ __forceinline__ uint4 half_operand(bool second_step, u32 part) const {
    const uint4& v = second_step ? high : low;
    return part ? make_uint4(v.z, 0, v.w, 0) : make_uint4(v.x, 0, v.y, 0);
  }
};

// e4m3 with scales in fp32, of single rows or of four. Values become fp16, of which e4m3 is a part, in any model.
template <u32 kGroup, u32 kScaleRows>
struct Fp8 {
  static constexpr Arithmetic kArithmetic = Arithmetic::kScaled;
  static constexpr u32 kGroups = kWarpGroups<kGroup>, kStepGroups = kStepColumns / kGroup;
  static constexpr u32 kRows = kHalfTileRows / kScaleRows;  // with scales of their own, in a half tile
  static constexpr u32 kHalfBytes = kHalfTileValues + kStepGroups * kRows * 4;
  struct Place {
    u32 values, scales, half_scales;
    __device__ __forceinline__ Place(u32 warp, u32 lane)
        : values((warp * 32 + lane) * 16),
          scales(2 * kHalfTileValues + (first_group<kGroup>(warp) * kRows + lane / 4 / kScaleRows) * 8),
          half_scales(kHalfTileValues + (first_group<kGroup>(warp) * kRows + lane / 4 / kScaleRows) * 4) {}
  };
  uint4 low, high;
  ScalePair<ScaleType::kFp32> scales[kGroups];

  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool half_tiles) {
    low = load_shared(tile + place.values);
    if (!half_tiles) high = load_shared(tile + kHalfTileValues + place.values);
    else if (both) high = load_shared(tile + kHalfBytes + place.values);
#pragma unroll
    for (u32 n = 0; n < kGroups; ++n) {
      if (!half_tiles) {
        scales[n].load_both(tile + place.scales + n * kRows * 8);
        continue;
      }
      scales[n].load_one(tile + place.half_scales + n * kRows * 4, false);
      if (both) scales[n].load_one(tile + kHalfBytes + place.half_scales + n * kRows * 4, true);
    }
  }
  __device__ __forceinline__ u32 loaded() const { return low.x; }
  // Two registers of an operand, whose values are 2^-kBits as large.
#if __CUDA_ARCH__ >= 890
  static constexpr u32 kBits = 0;
  static __device__ __forceinline__ uint2 widened(u32 word) {
    uint2 v;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v.x) : "h"(static_cast<u16>(word)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v.y) : "h"(static_cast<u16>(word >> 16)));
    return v;
  }
#else
  static constexpr u32 kBits = 8;
  static __device__ __forceinline__ u32 placed(u32 pair) { return (pair & 0x80008000) | (pair >> 1 & 0x3F803F80); }
  static __device__ __forceinline__ uint2 widened(u32 word) {
    return make_uint2(placed(__byte_perm(word, 0, 0x1404)), placed(__byte_perm(word, 0, 0x3424)));
  }
#endif
};
