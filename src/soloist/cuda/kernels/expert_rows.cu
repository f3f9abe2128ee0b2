// What goes with products of a mixture's experts in prompts: whose rows they are, their activations, and each token's sum.
//
// A *slot* is a token and one of the experts that it chose: token · k + which. Slots are sorted by expert, and by number within one.
#include "ptx/mma.cuh"
#include "spec.cuh"

// Rows of x that one expert has; see kernels/packed_product.cu.
struct Piece {
  u32 expert, first, stop, nothing;
};
inline constexpr u32 kCutWarps = 32;

// Slots of each expert, in ascending order, and pieces of at most `rows` of them. One block, since all of it waits for the counts of all.
//
// chosen [slots]: experts. row_of [slots]: where a slot's row lies; token_of [slots]: of each row. A warp has every kCutWarps'th expert and
// looks at all slots, so the order of rows is the same every time.
extern "C" __global__ void __launch_bounds__(kCutWarps * 32)
    cut(const i64* __restrict__ chosen, u32 slots, u32 rows, u32* __restrict__ num_pieces, Piece* __restrict__ pieces,
        i32* __restrict__ row_of, i32* __restrict__ token_of) {
  __shared__ u32 counts[kExperts], firsts[kExperts], first_pieces[kExperts];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (u32 e = threadIdx.x; e < kExperts; e += kCutWarps * 32) counts[e] = 0;
  __syncthreads();
  for (u32 s = threadIdx.x; s < slots; s += kCutWarps * 32) atomicAdd(&counts[static_cast<u32>(chosen[s])], 1);
  __syncthreads();
  if (warp == 0) {
    u32 row = 0, piece = 0;
    for (u32 start = 0; start < kExperts; start += 32) {
      const u32 e = start + lane, count = e < kExperts ? counts[e] : 0, own = (count + rows - 1) / rows;
      u32 rows_before = count, pieces_before = own;
#pragma unroll
      for (u32 d = 1; d < 32; d *= 2) {
        const u32 more_rows = __shfl_up_sync(~0u, rows_before, d), more_pieces = __shfl_up_sync(~0u, pieces_before, d);
        if (lane >= d) rows_before += more_rows, pieces_before += more_pieces;
      }
      if (e < kExperts) firsts[e] = row + rows_before - count, first_pieces[e] = piece + pieces_before - own;
      row += __shfl_sync(~0u, rows_before, 31), piece += __shfl_sync(~0u, pieces_before, 31);
    }
    if (lane == 0) *num_pieces = piece;
  }
  __syncthreads();
  for (u32 e = warp; e < kExperts; e += kCutWarps) {
    const u32 first = firsts[e], stop = first + counts[e];
    for (u32 i = lane; first + i * rows < stop; i += 32) {
      const u32 at = first + i * rows;
      pieces[first_pieces[e] + i] = Piece{e, at, at + rows < stop ? at + rows : stop, 0};
    }
    u32 row = first;
    for (u32 start = 0; start < slots && row < stop; start += 32) {
      const u32 s = start + lane;
      const bool is_own = s < slots && static_cast<u32>(chosen[s]) == e;
      const u32 own = __ballot_sync(~0u, is_own);
      if (is_own) {
        const u32 at = row + __popc(own & ((1u << lane) - 1));
        row_of[s] = static_cast<i32>(at), token_of[at] = static_cast<i32>(s / kChosen);
      }
      row += __popc(own);
    }
  }
}

// out [slots, H]: each row's token, its columns in the order in which products with packed matrices read them (`arranged_column` of
// prefill/fragments.py). A thread has 16 bytes of the result.
extern "C" __global__ void __launch_bounds__(256)
    take(const u16* __restrict__ x, const i32* __restrict__ token_of, uint4* __restrict__ out, u32 count) {
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  const u32 row = i / (kRowValues / 8), at = i % (kRowValues / 8), first = at / 4 * 32 + at % 4 * 2;
  const u16* const from = x + static_cast<u64>(token_of[row]) * kRowValues + first;
  u32 words[4];
#pragma unroll
  for (u32 q = 0; q < 4; ++q) words[q] = *reinterpret_cast<const u32*>(from + q * 8);
  out[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

// out [T, H] = what a token's experts give, times their shares, added in fp32 in their order. One block a token; a thread has four values.
extern "C" __global__ void __launch_bounds__(256)
    add_shares(const float4* __restrict__ given, const i32* __restrict__ row_of, const float* __restrict__ shares,
               void* __restrict__ out, u32 wide) {
  const u32 token = blockIdx.x;
  for (u32 i = threadIdx.x; i < kRowValues / 4; i += 256) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (u32 k = 0; k < kChosen; ++k) {
      const u32 slot = token * kChosen + k;
      const float share = shares[slot];
      const float4 x = given[static_cast<u64>(row_of[slot]) * (kRowValues / 4) + i];
      sum = make_float4(__fmaf_rn(share, x.x, sum.x), __fmaf_rn(share, x.y, sum.y), __fmaf_rn(share, x.z, sum.z),
                        __fmaf_rn(share, x.w, sum.w));
    }
    const u64 at = static_cast<u64>(token) * (kRowValues / 4) + i;
    if (wide) reinterpret_cast<float4*>(out)[at] = sum;
    else reinterpret_cast<uint2*>(out)[at] = make_uint2(pack_pair(sum.x, sum.y), pack_pair(sum.z, sum.w));
  }
}
