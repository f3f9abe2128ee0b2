// Where weights lie as they are packed for the decode kernel: 16 rows and 64 columns, a *chunk* of a *fragment*. Told by
// prefill/fragments.py; the orders of values are those of weights/layout.py.
//
// spec.cuh: kValueBits, kCodes, kPairsSteps, kSteps, kEndsInHalf.
#pragma once
#include "ptx/types.cuh"
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
