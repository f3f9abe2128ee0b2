// Activations in 8 bits, for products with FP8 matrices (kernels/packed_product.cu): e4m3 with a scale for each token.
#include "ptx/dependent.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/mma.cuh"

inline constexpr u32 kThreads = 256, kThreadValues = 16;
// A row that is nearly zero has this largest number: neither a quotient by it nor its scale leaves fp32's normal numbers.
inline constexpr float kLeastLargest = 0x1p-100f, kLargestCode = 448.0f;

// Words of two values without their signs are compared as integers: no number is larger than all numbers.
__device__ __forceinline__ u32 larger_of(u32 most, u32 pair) {
  const u32 low = pair & 0x7FFF, high = pair >> 16 & 0x7FFF, larger = low > high ? low : high;
  return larger > most ? larger : most;
}
__device__ __forceinline__ u32 codes_of_pairs(u32 first, u32 second, float by) {
  const u32 low = e4m3_of_pair(__fmul_rn(low_half(first), by), __fmul_rn(high_half(first), by));
  return low | static_cast<u32>(e4m3_of_pair(__fmul_rn(low_half(second), by), __fmul_rn(high_half(second), by))) << 16;
}

// codes [T, K], scales [T]: the largest number of a row becomes 448. Of 32 columns the words of four codes come in the order
// `eight_bit_column` of prefill/fragments.py. x has its columns in their order or, if `arranged`, in that of `arranged_column`; or
// columns are taken in the order of a table. One block a row; K is a multiple of 32.
extern "C" __global__ void __launch_bounds__(kThreads)
    quantize_rows(const u16* __restrict__ x, const u16* __restrict__ columns, uint4* __restrict__ codes, float* __restrict__ scales,
                  u32 row_values, u32 arranged) {
  __shared__ u32 of_warps[kThreads / 32];
  let_next_begin();
  const u16* const row = x + static_cast<u64>(blockIdx.x) * row_values;
  u32 most = 0;
  for (u32 i = threadIdx.x; i < row_values / 8; i += kThreads) {
    const uint4 v = reinterpret_cast<const uint4*>(row)[i];
    most = larger_of(larger_of(larger_of(larger_of(most, v.x), v.y), v.z), v.w);
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (u32 i = 0; i < kThreads / 32; ++i) most = of_warps[i] > most ? of_warps[i] : most;
  const float number = low_half(most), largest = number < kLeastLargest ? kLeastLargest : number;
  const float by = __fdiv_rn(kLargestCode, largest);
  if (threadIdx.x == 0) scales[blockIdx.x] = __fdiv_rn(largest, kLargestCode);
  for (u32 i = threadIdx.x; i < row_values / kThreadValues; i += kThreads) {
    u32 words[4];  // columns 0 … 3 of each 8, or 4 … 7
    if (arranged) {
      const uint4 first = reinterpret_cast<const uint4*>(row)[2 * i], second = reinterpret_cast<const uint4*>(row)[2 * i + 1];
      words[0] = codes_of_pairs(first.x, second.x, by), words[1] = codes_of_pairs(first.y, second.y, by);
      words[2] = codes_of_pairs(first.z, second.z, by), words[3] = codes_of_pairs(first.w, second.w, by);
    } else {
#pragma unroll
      for (u32 q = 0; q < 4; ++q) {
        const u32 column = i / 2 * 32 + q * 8 + i % 2 * 4;
        uint2 pairs;
        if (columns) {
          const u16* const of = columns + column;
          pairs = make_uint2(row[of[0]] | static_cast<u32>(row[of[1]]) << 16, row[of[2]] | static_cast<u32>(row[of[3]]) << 16);
        } else {
          pairs = *reinterpret_cast<const uint2*>(row + column);
        }
        words[q] = codes_of_pairs(pairs.x, pairs.y, by);
      }
    }
    codes[static_cast<u64>(blockIdx.x) * (row_values / kThreadValues) + i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
