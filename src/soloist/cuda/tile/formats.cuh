// How a warp reads its weights out of a slot of the ring: a structure for each format of weight_format.py.
//
// A lane's part of a slot are 16 rows of 64 columns of K, or 8 rows of them (a half tile) and of those of the next step.
// `low` and `high` hold it as the registers of m16n8k16's first operand, in 16 bits: of a tile the first 32 columns and
// the last, of half tiles the first step's and the next one's. Python's side is packing.py.
//
// load(slot, place, both, half_tiles): `place` is where a lane's values lie, warp · kWarpBytes + lane · 16; `both` says
// whether the slot has two halves, `half_tiles` whether they are half tiles.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "spec.cuh"

// Values that stand for themselves.
struct Plain16 {
  static constexpr u32 kWarpBytes = 1024;
  uint4 low[2], high[2];

  __device__ __forceinline__ void load(u32 slot, u32 place, bool both, bool) {
    const u32 at = slot + place;
    low[0] = load_shared(at);
    low[1] = load_shared(at + 512);
    if (both) {
      high[0] = load_shared(at + kSlotBytes / 2);
      high[1] = load_shared(at + kSlotBytes / 2 + 512);
    }
  }
};

// Signed integers of 8 bits, times a power of two for 32 columns of a row, biased by 127 as in a float's exponent.
struct Int8Scaled {
  static constexpr u32 kWarpBytes = 512, kValuesBytes = 4096, kHalfBytes = kValuesBytes + 128;
  uint4 low[2], high[2];

  // Of half tiles a lane's two scales are those of its row's two halves, else of its two rows.
  __device__ __forceinline__ void load(u32 slot, u32 place, bool both, bool half_tiles) {
    load_half(slot, place, half_tiles, low);
    if (both) load_half(slot + kHalfBytes, place, half_tiles, high);
  }

 private:
  static __device__ __forceinline__ void load_half(u32 half, u32 place, bool half_tiles, uint4 (&to)[2]) {
    const uint4 values = load_shared(half + place);
    const u32 both = load_shared_half(half + kValuesBytes + (place / 32 & ~1u));
    const float first = __uint_as_float((both & 0xff) << 23), second = __uint_as_float((both >> 8) << 23);
    const float even = half_tiles ? second : first, odd = second;
    // Pairs of values, a register each: of a tile rows g and g + 8 in turn.
    to[0] = half_tiles ? widened(values.x, values.y, first, first) : widened(values.x, values.y, first, odd);
    to[1] = widened(values.z, values.w, even, odd);
  }
  static __device__ __forceinline__ uint4 widened(u32 low, u32 high, float even, float odd) {
    return make_uint4(pair(low, 0, even), pair(low, 16, odd), pair(high, 0, even), pair(high, 16, odd));
  }
  // Exact: seven bits and a power of two.
  static __device__ __forceinline__ u32 pair(u32 word, u32 shift, float scale) {
    const i32 x = static_cast<i32>(word << (24 - shift)) >> 24, y = static_cast<i32>(word << (16 - shift)) >> 24;
    return pack_pair(static_cast<float>(x) * scale, static_cast<float>(y) * scale);
  }
};
