// How a warp reads its weights out of a slot of the ring: a structure for each format of weight_format.py.
//
// A lane's part of a tile are 16 rows of 64 columns of K; of a half tile 8 rows of them, and of those of the next step.
// Lane (g, q) = (lane / 4, lane % 4) has rows g and g + 8 and, of 32 columns, the 8 from 8q on. Behind a tile's values lie its
// scales, and behind those the zeros. Python's side is weights/packing.py.
//
// load(tile, place, both, half_tiles): `tile` is the address of a tile, or of half tiles of two steps (of one unless
// `both`); `place` says where in it a lane's values and scales lie.
#pragma once
#include "ptx/e4m3.cuh"
#include "ptx/e4m3_bits.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "spec.cuh"

enum class Arithmetic : u32 {
  kPlain,     // 16-bit values times 16-bit activations
  kScaled,    // values that become fp16, as activations do, times a scale for 64 columns or less
  kIntegers,  // integers of 4 or 8 bits times activations in two digits of 8 bits, times scales
  kSuperBlocks,  // integers of 4 or 6 bits times the same digits, times integers of their groups, times scales
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
  // Of half a step, which has the first half of a warp's columns.
  __device__ __forceinline__ void load_half_step(u32 tile, const Place& place) {
    low[0] = load_shared(tile + place.values);
    low[1] = load_shared(tile + place.values + 512);
    high[0] = high[1] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void clear() { low[0] = low[1] = high[0] = high[1] = make_uint4(0, 0, 0, 0); }
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
    return from_fp16(static_cast<u16>(which ? first >> 16 : first));
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
  static constexpr bool kZeros = kHasZeros, kOffsets = false;
  static constexpr ScaleType kScaleType = kScale;
  static constexpr u32 kGroupColumns = kGroup;
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

  __device__ __forceinline__ void load_values(u32 at) { values = load_shared(at); }
  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool half_tiles) {
    if (!half_tiles) {
      load_values(tile + place.values);
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
  // Of columns of padding, whose activations are zeros.
  __device__ __forceinline__ void clear() { values = make_uint4(0, 0, 0, 0); }
  // The operand of 32 columns of a tile.
  __device__ __forceinline__ uint4 operand(u32 part) const {
    const u32 first = part ? values.z : values.x, second = part ? values.w : values.y;
    return make_uint4(first & 0x0F0F0F0F, first & 0xF0F0F0F0, second & 0x0F0F0F0F, second & 0xF0F0F0F0);
  }
  // The operand as signed integers, less the zero that all share; values of both rows are sixteen times as large.
  __device__ __forceinline__ uint4 centred(u32 part) const {
    constexpr u32 kHigh = 0xF0F0F0F0, kZeros = 0x80808080;
    const u32 first = part ? values.z : values.x, second = part ? values.w : values.y;
    return make_uint4(flip_and_keep<kZeros, kHigh>(first << 4), flip_and_keep<kZeros, kHigh>(first),
                      flip_and_keep<kZeros, kHigh>(second << 4), flip_and_keep<kZeros, kHigh>(second));
  }
  // The same of a half tile: rows g + 8 are none.
  __device__ __forceinline__ uint4 half_operand(bool second_step, u32 part) const {
    const u32 first = second_step ? values.z : values.x, second = second_step ? values.w : values.y;
    const u32 mask = part ? 0xF0F0F0F0 : 0x0F0F0F0F;
    return make_uint4(first & mask, 0, second & mask, 0);
  }
};

// The same with a number of the scales' type for each group that is added to the products of the group: nothing is taken off codes.
template <ScaleType kScale, u32 kGroup>
struct Int4Offsets : Int4<kScale, kGroup, false> {
  using Base = Int4<kScale, kGroup, false>;
  using Place = typename Base::Place;
  static constexpr bool kOffsets = true;
  static constexpr i32 kZero = 0;
  static constexpr u32 kHalfBytes = Base::kValueBytes + 2 * Base::kHalfScales;
  ScalePair<kScale> offsets[Base::kGroups];

  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool half_tiles) {
    if (half_tiles) {
      load_half(tile, place, false);
      if (both) load_half(tile + kHalfBytes, place, true);
      return;
    }
    Base::load_values(tile + place.values);
    Base::load_scales(tile, place);
#pragma unroll
    for (u32 n = 0; n < Base::kGroups; ++n) offsets[n].load_both(tile + place.scales + 2 * Base::kHalfScales + n * 2 * Base::kRowsScales);
  }

 private:
  __device__ __forceinline__ void load_half(u32 half, const Place& place, bool second) {
    const uint2 v = load_shared2(half + place.half_values);
    second ? Base::values.z = v.x : Base::values.x = v.x;
    second ? Base::values.w = v.y : Base::values.y = v.y;
    Base::load_half_scales(half, place, second);
#pragma unroll
    for (u32 n = 0; n < Base::kGroups; ++n) offsets[n].load_one(half + place.half_scales + Base::kHalfScales + n * Base::kRowsScales, second);
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

  __device__ __forceinline__ void load_values(u32 at) {
    low = load_shared(at);
    high = load_shared(at + Base::kValueBytes);
  }
  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool half_tiles) {
    if (!half_tiles) {
      load_values(tile + place.values);
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
  __device__ __forceinline__ void clear() { low = high = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ uint4 operand(u32 part) const { return part ? high : low; }
  __device__ __forceinline__ uint4 half_operand(bool second_step, u32 part) const {
    const uint4& v = second_step ? high : low;
    return part ? make_uint4(v.z, 0, v.w, 0) : make_uint4(v.x, 0, v.y, 0);
  }
};

// A tile of integers whose step is one of a pair. A warp's columns of both steps are neighbours and in one group. The tile of the first
// step has the scales and zeros of rows g, the tile of the second those of rows g + 8: [group of a step][g][step].
template <class Format>
struct Paired : Format {
  struct Place {
    u32 values, scales, zeros;
    __device__ __forceinline__ Place(u32 warp, u32 lane) : values((warp * 32 + lane) * 16) {
      const u32 at = (warp % 4 * 128 / Format::kGroupColumns * 8 + lane / 4) * 2 + warp / 4;
      scales = 2 * Format::kValueBytes + at * kScaleBytes<Format::kScaleType>;
      zeros = 2 * Format::kValueBytes + 2 * Format::kHalfScales + at;
    }
  };
  __device__ __forceinline__ void load(u32 tile, const Place& place, bool, bool) {
    Format::load_values(tile + place.values);
    Format::scales[0].load_one(tile + place.scales, false);
    if (Format::kZeros) Format::zeros[0] = load_shared_byte(tile + place.zeros);
  }
};

// Integers of 4 or 6 bits whose groups have scales, and offsets, that are integers of 8 bits times fp16 of their super-block of 256
// columns. Of 4 bits a byte has values of rows g and g + 8 as of Int4. Of 6 bits three words stand for four of a multiply: a byte has
// one value of the word in its upper six bits, and below them two bits of the fourth word's value. What a lane reads of a whole tile
// beside its values lies side by side.
template <u32 kBits, u32 kGroup, bool kHasOffsets>
struct SuperBlocks {
  static constexpr Arithmetic kArithmetic = Arithmetic::kSuperBlocks;
  static constexpr u32 kSuperColumns = 256, kOffsetGroups = 2, kGroups = 64 / kGroup;  // groups of a warp's 64 columns
  static constexpr bool kOffsets = kHasOffsets, kSigned = kBits == 6;
  static constexpr u32 kFirstBytes = kHalfTileValues / 2, kValueBytes = kHalfTileValues * kBits / 8;
  static constexpr u32 kHalfScales = kHalfTileRows * 8 * kGroups, kHalfOffsets = kHasOffsets ? kHalfTileRows * 8 * kOffsetGroups : 0;
  static constexpr u32 kGroupsBytes = 2 * (kGroups + (kHasOffsets ? kOffsetGroups : 0)), kSuperBytes = kHasOffsets ? 4 : 2;
  static constexpr u32 kHalfSupers = kHalfTileRows * (kStepColumns / kSuperColumns) * 2;
  static constexpr u32 kHalfBytes = kValueBytes + kHalfScales + kHalfOffsets + kHalfSupers * (kHasOffsets ? 2 : 1);
  // What sums of a tile's rows g and g + 8, and of a half tile, are multiplied by: values are larger than they mean.
  static constexpr float kInverse = kBits == 6 ? 0.25f : 1.0f, kSecondInverse = kBits == 6 ? 0.25f : 0.0625f, kHalfInverse = kInverse;
  struct Place {
    u32 lane, of_warp, supers;  // of all of a block's lanes; its row of a warp; super-block and row
    __device__ __forceinline__ Place(u32 warp, u32 lane)
        : lane(warp * 32 + lane), of_warp(warp * 8 + lane / 4), supers(warp * 64 / kSuperColumns * 8 + lane / 4) {}
  };
  uint4 values;
  uint2 more;  // of 6 bits
  // Bytes: scales of a tile's groups, of rows g and g + 8; offsets of rows g and g + 8, of groups; of a half tile's steps, of groups.
  u32 scales[kGroups / 2], offsets;
  // Two of 16 bits: of rows g and g + 8 or of two steps a scale each, or a scale and an offset in a word each.
  u32 supers[kHasOffsets ? 2 : 1];

  __device__ __forceinline__ void load_values(u32 tile, const Place& place) {
    values = load_shared(tile + place.lane * 16);
    if constexpr (kBits == 6) more = load_shared2(tile + 2 * kFirstBytes + place.lane * 8);
  }
  // What groups and super-blocks of a tile have.
  __device__ __forceinline__ void load_scales(u32 tile, const Place& place) {
    load_groups(tile, place);
    const u32 at = tile + 2 * (kValueBytes + kHalfScales + kHalfOffsets) + place.supers * 2 * kSuperBytes;
    if constexpr (!kHasOffsets) {
      supers[0] = load_shared1(at);
    } else {
      const uint2 v = load_shared2(at);
      supers[0] = v.x, supers[1] = v.y;
    }
  }
  __device__ __forceinline__ void load_groups(u32 tile, const Place& place) {
    const u32 at = tile + 2 * kValueBytes + place.of_warp * kGroupsBytes;
    if constexpr (kGroups > 2 && kHasOffsets) {
      scales[0] = load_shared1(at), scales[kGroups / 2 - 1] = load_shared1(at + 4), offsets = load_shared1(at + 8);
    } else {
      const uint2 v = load_shared2(at);
      scales[0] = v.x;
      kHasOffsets ? offsets = v.y : scales[kGroups / 2 - 1] = v.y;
    }
  }
  __device__ __forceinline__ void load(u32 tile, const Place& place, bool both, bool half_tiles) {
    if (!half_tiles) {
      load_values(tile, place);
      load_scales(tile, place);
      return;
    }
    load_half(tile, place, false);
    if (both) load_half(tile + kHalfBytes, place, true);
  }
  __device__ __forceinline__ u32 loaded() const { return values.x; }

  // The operand of 32 columns of a tile.
  __device__ __forceinline__ uint4 operand(u32 part) const {
    if constexpr (kBits == 6) return part ? parted(values.w, more.x, more.y) : parted(values.x, values.y, values.z);
    const u32 first = part ? values.z : values.x, second = part ? values.w : values.y;
    // Differences take other units of an SM than masks do, which are as busy as the issue of instructions.
    const u32 low_first = first & 0x0F0F0F0F, low_second = second & 0x0F0F0F0F;
    return make_uint4(low_first, first - low_first, low_second, second - low_second);
  }
  // The same of a half tile: rows g + 8 are none.
  __device__ __forceinline__ uint4 half_operand(bool second_step, u32 part) const {
    const u32 first = second_step ? values.z : values.x, second = second_step ? values.w : values.y;
    if constexpr (kBits == 4) return make_uint4(first >> 4 * part & 0x0F0F0F0F, 0, second >> 4 * part & 0x0F0F0F0F, 0);
    const uint4 both = parted(first, second, second_step ? more.y : more.x);
    return part ? make_uint4(both.z, 0, both.w, 0) : make_uint4(both.x, 0, both.y, 0);
  }
  // Of group `n` of the warp's columns, of rows g or g + 8; of a half tile in its first or second step.
  template <bool kHalf>
  __device__ __forceinline__ i32 scale(u32 n, u32 which) const {
    const u32 byte = kHalf ? which * kGroups + n : n * 2 + which;
    return signed_byte(scales[byte / 4], byte % 4);
  }
  // All that a tile has beside its values, if it is the lane's.
  __device__ __forceinline__ void take_shared(const SuperBlocks& w, bool is_own) {
#pragma unroll
    for (u32 i = 0; i < kGroups / 2; ++i) scales[i] = is_own ? w.scales[i] : scales[i];
#pragma unroll
    for (u32 i = 0; i < (kHasOffsets ? 2 : 1); ++i) supers[i] = is_own ? w.supers[i] : supers[i];
    if constexpr (kHasOffsets) offsets = is_own ? w.offsets : offsets;
  }
  __device__ __forceinline__ float super_scale(u32 which) const {
    const u32 word = supers[kHasOffsets ? which : 0];
    return from_fp16(static_cast<u16>(which && !kHasOffsets ? word >> 16 : word));
  }
  __device__ __forceinline__ float super_offset(u32 which) const { return from_fp16(static_cast<u16>(supers[kHasOffsets ? which : 0] >> 16)); }

 private:
  // Four words whose bytes have four times a value of 6 bits with its sign.
  static __device__ __forceinline__ uint4 parted(u32 a, u32 b, u32 c) {
    constexpr u32 kUpper = 0xFCFCFCFC;
    const u32 last = (a << 6 & 0xC0C0C0C0) | (b << 4 & 0x30303030) | (c << 2 & 0x0C0C0C0C);
    return make_uint4(a & kUpper, b & kUpper, c & kUpper, last);
  }
  __device__ __forceinline__ void load_half(u32 half, const Place& place, bool second) {
    const uint2 v = load_shared2(half + place.lane * 8);
    second ? values.z = v.x : values.x = v.x;
    second ? values.w = v.y : values.y = v.y;
    if constexpr (kBits == 6) {
      const u32 last = load_shared1(half + kFirstBytes + place.lane * 4);
      second ? more.y = last : more.x = last;
    }
    const u32 at = half + kValueBytes + place.of_warp * kGroups, shift = second ? 16 : 0;
    if constexpr (kGroups == 2) scales[0] = merged(scales[0], load_shared_half(at), shift);
    else scales[second ? kGroups / 2 - 1 : 0] = load_shared1(at);
    const u32 of_super = half + kValueBytes + kHalfScales + kHalfOffsets + place.supers * 2;
    if constexpr (!kHasOffsets) {
      supers[0] = merged(supers[0], load_shared_half(of_super), shift);
    } else {
      offsets = merged(offsets, load_shared_half(half + kValueBytes + kHalfScales + place.of_warp * kOffsetGroups), shift);
      supers[second] = merged(load_shared_half(of_super), load_shared_half(of_super + kHalfSupers), 16);
    }
  }
  static __device__ __forceinline__ u32 merged(u32 first, u32 x, u32 shift) { return shift ? first | x << 16 : x; }
};
// One of a pair of steps: its tile has what super-blocks have for rows g in both steps, or for rows g + 8, as of the other integers.
template <u32 kBits, u32 kGroup, bool kHasOffsets>
struct Paired<SuperBlocks<kBits, kGroup, kHasOffsets>> : SuperBlocks<kBits, kGroup, kHasOffsets> {
  using Base = SuperBlocks<kBits, kGroup, kHasOffsets>;
  struct Place : Base::Place {
    __device__ __forceinline__ Place(u32 warp, u32 lane) : Base::Place(warp, lane) {
      Base::Place::supers = (warp % 4 * 128 / Base::kSuperColumns * 8 + lane / 4) * 2 + warp / 4;
    }
  };
  __device__ __forceinline__ void load(u32 tile, const Place& place, bool, bool) {
    Base::load_values(tile, place);
    load_scales(tile, place);
  }
  __device__ __forceinline__ void load_scales(u32 tile, const Place& place) {
    Base::load_groups(tile, place);
    const u32 at = tile + 2 * (Base::kValueBytes + Base::kHalfScales + Base::kHalfOffsets) + place.supers * Base::kSuperBytes;
    Base::supers[0] = kHasOffsets ? load_shared1(at) : load_shared_half(at);
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
  __device__ __forceinline__ void clear() { low = high = make_uint4(0, 0, 0, 0); }
  // Two registers of an operand, whose values are 2^-kBits as large.
#if __CUDA_ARCH__ >= 890
  static constexpr u32 kBits = 0;
  static __device__ __forceinline__ uint2 widened(u32 word) { return fp16_of_e4m3(word); }
#else
  static constexpr u32 kBits = 8;
  static __device__ __forceinline__ uint2 widened(u32 word) { return small_fp16_of_e4m3(word); }
#endif
};
