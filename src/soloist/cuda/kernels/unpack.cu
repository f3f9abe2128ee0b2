// A packed matrix as rows, for a library that multiplies by these: out [rows, row_values].
//
// spec.cuh: as of tile/fragments.cuh.
#include "tile/fragments.cuh"

inline constexpr u32 kUnpackingWarps = 8;

// Eight neighbouring values of a row. `columns`: which column of the matrix each column of codes is, where they have an order of
// their own.
__device__ __forceinline__ void write_values(u16* row, const u16* columns, u32 first, u32 row_values, uint4 values) {
  if (!columns && row_values % 8 == 0) {
    *reinterpret_cast<uint4*>(row + first) = values;
    return;
  }
  const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (u32 i = 0; i < 8; ++i)
    if (const u32 column = first + i; column < row_values)
      row[columns ? columns[column] : column] = static_cast<u16>(words[i / 2] >> (i % 2 * 16));
}

// A block has a fragment, its warps take chunks of it in turn; `table` has its halves. Rows 4 to 7 of a half are `more_rows` further
// on than the first of them say.
extern "C" __global__ void __launch_bounds__(kUnpackingWarps * 32, 4)
    unpack(const u8* __restrict__ image, const Half* __restrict__ table, const u16* __restrict__ columns, u16* __restrict__ out, u32 rows,
           u32 row_values, u32 more_rows) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const Half halves[2] = {table[2 * blockIdx.x], table[2 * blockIdx.x + 1]};
  const bool is_tile = halves[0].kind == HalfKind::kTile;
  u16* to[2];
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    const u32 row = halves[h].out + g + (g >= kHalfTileRows / 2 ? more_rows : 0);
    to[h] = halves[h].kind != HalfKind::kNone && row < rows ? out + static_cast<u64>(row) * row_values : nullptr;
  }
  for (u32 chunk = warp; chunk * kChunkColumns < row_values; chunk += kUnpackingWarps) {
    const auto place = [&](u32 piece, u32 at) { return image + piece_at(halves[piece], piece, chunk) + at; };
    Stored stored;
    stored.load(
        lane, is_tile, [&](u32 piece, u32 at) { return __ldg(reinterpret_cast<const uint4*>(place(piece, at))); },
        [&](u32 piece, u32 at) { return __ldg(reinterpret_cast<const uint2*>(place(piece, at))); },
        [&](u32 piece, u32 at) {
          return __ldg(reinterpret_cast<const u32*>(image + more_at(halves[piece], piece, chunk, kMoreBytes) + at));
        });
    Shared shared;
    shared.load(image, halves, chunk, lane);
#pragma unroll
    for (u32 p = 0; p < 2; ++p) {
      const uint4 first = operand_of(stored, shared, is_tile, p, 0), second = operand_of(stored, shared, is_tile, p, 1);
      const u32 column = chunk * kChunkColumns + p * 32 + lane % 4 * 8;
      if (column >= row_values) continue;
      if (to[0]) write_values(to[0], columns, column, row_values, make_uint4(first.x, first.z, second.x, second.z));
      if (to[1]) write_values(to[1], columns, column, row_values, make_uint4(first.y, first.w, second.y, second.w));
    }
  }
}
