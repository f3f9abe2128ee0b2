// What goes with products of packed matrices: activations whose columns are arranged, and rows of an embedding that is packed.
#include "ptx/dependent.cuh"
#include "tile/arranged.cuh"
#include "tile/fragments.cuh"

// out [T, K]: `arranged_column` of prefill/fragments.py says which column of x each place has, or of x's columns in the order of a
// table. A thread has 16 bytes of the result; K is a multiple of 32.
extern "C" __global__ void __launch_bounds__(256)
    arrange(const u16* __restrict__ x, const u16* __restrict__ columns, uint4* __restrict__ out, u32 row_values, u32 count) {
  let_next_begin();
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  const u32 row = i / (row_values / 8), at = i % (row_values / 8), first = first_arranged_column(at);
  const u16* const from = x + static_cast<u64>(row) * row_values;
  u32 words[4];
#pragma unroll
  for (u32 q = 0; q < 4; ++q) {
    const u32 column = first + q * 8;
    if (columns) words[q] = from[columns[column]] | static_cast<u32>(from[columns[column + 1]]) << 16;
    else words[q] = *reinterpret_cast<const u32*>(from + column);
  }
  out[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

// out [count] = the sum of so many parts [count] of fp32 values, in their order; in 16 bits unless `wide`. A thread has four values.
extern "C" __global__ void __launch_bounds__(256)
    add_parts(const float4* __restrict__ parts, uint2* __restrict__ out, u32 num_parts, u32 count, u32 wide) {
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count / 4) return;
  float4 sum = parts[i];
  for (u32 k = 1; k < num_parts; ++k) {
    const float4 x = parts[static_cast<u64>(k) * (count / 4) + i];
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  if (wide) reinterpret_cast<float4*>(out)[i] = sum;
  else out[i] = make_uint2(pack_pair(sum.x, sum.y), pack_pair(sum.z, sum.w));
}

// residual [T, H] = rows of a packed table [V, H] of values that stand for themselves. One block a token; `table` has 8 rows each.
extern "C" __global__ void __launch_bounds__(256)
    look_up(const u8* __restrict__ image, const Half* __restrict__ table, const i32* __restrict__ ids, float4* __restrict__ residual,
            u32 row_values) {
  if constexpr (kPlain) {
    const u32 row = ids[blockIdx.x], g = row % kHalfTileRows;
    const Half half = table[row / kHalfTileRows];
    const bool is_tile = half.kind == HalfKind::kTile;
    for (u32 i = threadIdx.x; i < row_values / 8; i += 256) {
      const u32 chunk = i / 8, p = i / 4 % 2, lane = g * 4 + i % 4;
      const u8* const at = image + piece_at(half, is_tile ? p : 0, chunk) + (is_tile ? 0 : p * 512) + lane * 16;
      float4* const to = residual + (static_cast<u64>(blockIdx.x) * row_values / 4 + 2 * i);
      uint4 words;  // columns 0 and 1, 2 and 3, and so on
      if (is_tile) {
        const u32* const first = reinterpret_cast<const u32*>(at) + half.is_upper;
        words = make_uint4(first[0], first[2], first[128], first[130]);
      } else {
        words = *reinterpret_cast<const uint4*>(at);
      }
      to[0] = make_float4(low_half(words.x), high_half(words.x), low_half(words.y), high_half(words.y));
      to[1] = make_float4(low_half(words.z), high_half(words.z), low_half(words.w), high_half(words.w));
    }
  }
}
