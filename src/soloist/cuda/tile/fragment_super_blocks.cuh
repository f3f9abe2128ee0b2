// What rows g and g + 8 share of a chunk whose groups lie within super-blocks: a scale, and where there are some an offset, of as many
// bits as a group has, times what the super-block has. See SuperBlockLayout of weights/layout.py.
//
// Of a tile one load has all that the groups of both rows have, and of both rows one each what their super-blocks have: so words are
// loaded, and their bytes chosen once they are there. A load for each byte would be a third of what a warp does for a chunk.
#pragma once
#include "tile/fragment_scales.cuh"

// Groups and offsets of a row in a chunk, and what half a tile has of each.
inline constexpr u32 kOffsetGroups = kHasOffsets ? 2 : 0, kSuperGroups = kSuper ? kChunkColumns / kGroupColumns : 2;
inline constexpr u32 kHalfGroupsBytes = kHalfTileRows * kStepChunks * kSuperGroups;
inline constexpr u32 kHalfOffsetsBytes = kHalfTileRows * kStepChunks * kOffsetGroups;
// Of rows g and g + 8 of a tile: groups and offsets of a chunk, and what a row has of a super-block.
inline constexpr u32 kTileGroupsBytes = 2 * (kSuperGroups + kOffsetGroups), kSuperBytes = kHasOffsets ? 4 : 2;
inline constexpr u32 kSuperSpan = kSuper ? kSuperColumns : kStepColumns, kHalfSupersBytes = kHalfTileRows * (kStepColumns / kSuperSpan) * 2;

static_assert(kSuperGroups == 2 || kSuperGroups == 4, "groups of 32 columns or of 16");
static_assert(!kSuper || kFirstBits == 4, "a code times its scale is exact in fp32: 6 + 7 + 11 bits");

struct SuperBlockScales {
  using Scale = float;
  static constexpr u32 kOwnGroups = 2;

  // By half, and by the group of the lane's columns among 32.
  __device__ __forceinline__ float scale(u32 h, u32 n) const {
    // From -128 to 127.
    const u32 bytes = __byte_perm(groups[0], groups[1], group_bytes) ^ 0x80808080u;
    return (widened_byte(bytes, 2 * n + h) - (kIntegerBase + 128.0f)) * (of_super(super_scales[h]) * kUnit);
  }
  // The offset, which is taken off, as what is added.
  __device__ __forceinline__ float zero(u32 h, u32 n) const {
    if constexpr (!kHasOffsets) return 0;
    const u32 bytes = __byte_perm(offsets[0], offsets[1], is_tile ? 0x3120 : 0x5140);
    const u32 super = is_tile ? super_scales[h] >> 16 : super_offsets[h];
    return (kIntegerBase - widened_byte(bytes, 2 * n + h)) * of_super(super);
  }

  __device__ __forceinline__ void load(const u8* image, const Half (&halves)[2], u32 chunk, u32 lane) {
    is_tile = halves[0].kind == HalfKind::kTile;
    // Bytes of rows g and g + 8 in the first 16 or 32 columns, then in the others. Of two groups of 16 columns a lane has one.
    const u32 second = lane % 4 / 2;
    group_bytes = kSuperGroups == 2 ? is_tile ? 0x3210 : 0x5140 : is_tile ? 0x5410 + second * 0x2222 : 0x6240 + second * 0x1111;
    const Place first(image, halves[0], 0, chunk, lane / 4), last(image, halves[1], 1, chunk, lane / 4);
    if (is_tile) {
      const u32* const from = reinterpret_cast<const u32*>(first.groups);
      if constexpr (kTileGroupsBytes % 8 == 0) {
        const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
        groups[0] = words.x;
        (kSuperGroups == 4 ? groups[1] : offsets[0]) = words.y;
      } else {
        groups[0] = __ldg(from);
        if constexpr (kTileGroupsBytes > 4) groups[1] = __ldg(from + 1), offsets[0] = __ldg(from + 2);
      }
      super_scales[0] = read_super(first.supers), super_scales[1] = read_super(last.supers);
    } else {
      read_alone(first, 0);
      read_alone(last, 1);
    }
  }
  // The first and the last of 8 rows.
  static __device__ __forceinline__ void prefetch(const u8* image, const Half& half, u32 h, u32 chunk) {
    const Place first(image, half, h, chunk, 0), last(image, half, h, chunk, kHalfTileRows - 1);
    prefetch_to_l2(first.groups);
    prefetch_to_l2(last.groups);
    prefetch_to_l2(first.supers);
  }

 private:
  // Of what `codes_of` gives: codes of 6 bits have two bits below them.
  static constexpr float kUnit = kCodes == Codes::kInt6 ? 0.25f : 1.0f;
  // Where half `h` of a fragment has what row g has. Of a tile that is rows g and g + 8 for groups and offsets, side by side.
  struct Place {
    const u8 *groups, *offsets, *supers, *super_offsets;
    __device__ __forceinline__ Place(const u8* image, const Half& half, u32 h, u32 number, u32 g) {
      const ChunkPlace chunk(number);
      const bool is_tile = half.kind == HalfKind::kTile;
      const u32 tiles = is_tile ? 2 : 1, row = chunk.warp * kHalfTileRows + g;
      const u8* const behind = image + in_step(half, chunk.step) + tiles * kValueBytes;
      groups = behind + row * (is_tile ? kTileGroupsBytes : kSuperGroups);
      offsets = behind + kHalfGroupsBytes + row * kOffsetGroups;
      const u32 step = kPairsSteps ? chunk.step / 2 * 2 + h : chunk.step;
      const u8* const last = image + in_step(half, step) + tiles * (kValueBytes + kHalfGroupsBytes + kHalfOffsetsBytes);
      const u32 block = (kPairsSteps ? chunk.warp % 4 * 2 : chunk.warp) * kChunkColumns / kSuperSpan;
      const u32 own = block * kHalfTileRows + g;
      supers = last + (is_tile ? (own * 2 + (kPairsSteps ? chunk.warp / 4 : h)) * kSuperBytes : own * 2);
      super_offsets = last + own * 2 + kHalfSupersBytes;
    }
  };
  static __device__ __forceinline__ float of_super(u32 bits) { return from_fp16(static_cast<u16>(bits)); }
  static __device__ __forceinline__ u32 read_super(const u8* at) {
    if constexpr (kHasOffsets) return __ldg(reinterpret_cast<const u32*>(at));
    else return __ldg(reinterpret_cast<const u16*>(at));
  }
  __device__ __forceinline__ void read_alone(const Place& from, u32 h) {
    const auto read_two = [](const u8* at) -> u32 { return __ldg(reinterpret_cast<const u16*>(at)); };
    groups[h] = kSuperGroups == 4 ? __ldg(reinterpret_cast<const u32*>(from.groups)) : read_two(from.groups);
    super_scales[h] = read_two(from.supers);
    if constexpr (kHasOffsets) offsets[h] = read_two(from.offsets), super_offsets[h] = read_two(from.super_offsets);
  }

  // As they are stored: what is made of them at once would be waited for at once. Of a tile `groups` and `offsets` follow each other in
  // their words, and `super_scales` have the offsets, too.
  u32 groups[2], offsets[2], super_scales[2], super_offsets[2];
  u32 group_bytes;
  bool is_tile;
};
