// What goes with products of a mixture's experts in prompts: which a token chooses, whose rows they are, their activations, and each
// token's sum.
//
// A *slot* is a token and one of the experts that it chose: token · k + which. Slots are sorted by expert, and by number within one.
//
// spec.cuh: sizes of the model and of blocks, the router, and `Piece`; prefill/expert_form.py.
#include "ptx/mma.cuh"
#include "spec.cuh"
#include "tile/arranged.cuh"

// logits [T, E] = x [T, H] · routerᵀ in fp32, by rising columns whatever T is. A block has so many tokens and experts; a thread has one
// token and two experts. H is a multiple of 32.
inline constexpr u32 kRoutedColumns = 128, kQuads = kRoutedColumns / 4;
static_assert(kRoutedTokens == 16 && kRoutedExperts == 32, "256 threads have two logits each");
inline constexpr u32 kExpertGroups = (kExperts + kRoutedExperts - 1) / kRoutedExperts;
extern "C" __global__ void __launch_bounds__(256)
    route(const u16* __restrict__ x, const float4* __restrict__ router, float* __restrict__ logits, u32 tokens) {
  // A row more than it has lies in other banks.
  __shared__ float4 of_tokens[kRoutedTokens][kQuads + 1], of_experts[kRoutedExperts][kQuads + 1];
  const u32 first_token = blockIdx.x / kExpertGroups * kRoutedTokens, first_expert = blockIdx.x % kExpertGroups * kRoutedExperts;
  constexpr u32 kTakes = kRoutedTokens * kQuads / 256, kOfExperts = kRoutedExperts * kQuads / 256;
  uint2 next_tokens[kTakes];
  float4 next_experts[kOfExperts];
  const auto take = [&](u32 column) {
#pragma unroll
    for (u32 i = 0; i < kTakes; ++i) {
      const u32 at = i * 256 + threadIdx.x, token = first_token + at / kQuads, own = column + at % kQuads * 4;
      next_tokens[i] = token < tokens && own < kRowValues
                           ? *reinterpret_cast<const uint2*>(x + static_cast<u64>(token) * kRowValues + own)
                           : make_uint2(0, 0);
    }
#pragma unroll
    for (u32 i = 0; i < kOfExperts; ++i) {
      const u32 at = i * 256 + threadIdx.x, expert = first_expert + at / kQuads, own = column + at % kQuads * 4;
      next_experts[i] =
          expert < kExperts && own < kRowValues ? router[(expert * kRowValues + own) / 4] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  };
  const u32 token = threadIdx.x / 16, expert = threadIdx.x % 16;
  float sums[2] = {0.0f, 0.0f};
  take(0);
  for (u32 column = 0; column < kRowValues; column += kRoutedColumns) {
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kTakes; ++i) {
      const u32 at = i * 256 + threadIdx.x;
      const uint2 v = next_tokens[i];
      of_tokens[at / kQuads][at % kQuads] = make_float4(low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y));
    }
#pragma unroll
    for (u32 i = 0; i < kOfExperts; ++i) {
      const u32 at = i * 256 + threadIdx.x;
      of_experts[at / kQuads][at % kQuads] = next_experts[i];
    }
    __syncthreads();
    if (column + kRoutedColumns < kRowValues) take(column + kRoutedColumns);
#pragma unroll 8
    for (u32 q = 0; q < kQuads; ++q) {
      const float4 a = of_tokens[token][q];
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const float4 b = of_experts[expert + 16 * i][q];
        sums[i] = __fmaf_rn(a.x, b.x, sums[i]), sums[i] = __fmaf_rn(a.y, b.y, sums[i]);
        sums[i] = __fmaf_rn(a.z, b.z, sums[i]), sums[i] = __fmaf_rn(a.w, b.w, sums[i]);
      }
    }
  }
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const u32 own = first_expert + expert + 16 * i;
    if (first_token + token < tokens && own < kExperts) logits[(first_token + token) * kExperts + own] = sums[i];
  }
}

// Which experts a token takes, in ascending order, and their shares; see `choose` of reference/experts.py. A warp has a token. Of equal
// scores the lower index counts, and NaN is above all, so whatever logits are, experts are kChosen different ones that there are.
inline constexpr u32 kScores = (kExperts + 31) / 32;
extern "C" __global__ void __launch_bounds__(kChoosingWarps * 32)
    choose(const float* __restrict__ logits, const float* __restrict__ correction, i64* __restrict__ experts,
           float* __restrict__ shares, u32 tokens) {
  __shared__ float chosen_scores[kChoosingWarps][kChosen];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * kChoosingWarps + warp;
  if (token >= tokens) return;
  float scores[kScores];
  u32 ranks[kScores];  // in the order of scores; 0 for those that do not count any more
  float most = -kInfinity;
#pragma unroll
  for (u32 i = 0; i < kScores; ++i) {
    const u32 e = i * 32 + lane;
    scores[i] = e < kExperts ? logits[token * kExperts + e] : -kInfinity;
    most = fmaxf(most, scores[i]);
  }
  if constexpr (kIsSoftmax) {
#pragma unroll
    for (u32 d = 16; d; d /= 2) most = fmaxf(most, __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(most), d)));
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kScores; ++i) scores[i] = expf(scores[i] - most), sum += scores[i];
#pragma unroll
    for (u32 d = 16; d; d /= 2) sum += __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(sum), d));
#pragma unroll
    for (u32 i = 0; i < kScores; ++i) scores[i] = scores[i] / sum;
  } else {
#pragma unroll
    for (u32 i = 0; i < kScores; ++i) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
  }
#pragma unroll
  for (u32 i = 0; i < kScores; ++i) {
    const u32 e = i * 32 + lane;
    const float ranked = e >= kExperts ? 0.0f : kIsCorrected ? scores[i] + correction[e] : scores[i];
    const u32 bits = ranked == ranked ? __float_as_uint(ranked) : 0x7FFFFFFFu;
    ranks[i] = e >= kExperts ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  u32 taken = 0;  // of this lane's experts
  for (u32 k = 0; k < kChosen; ++k) {
    u32 best = 0, index = 0;
#pragma unroll
    for (u32 i = kScores; i-- > 0;)
      if (ranks[i] >= best) best = ranks[i], index = i;
    const u32 highest = __reduce_max_sync(~0u, best);
    const u32 lowest = __reduce_min_sync(~0u, best == highest ? index * 32 + lane : ~0u);
#pragma unroll
    for (u32 i = 0; i < kScores; ++i)
      if (i * 32 + lane == lowest) ranks[i] = 0, taken |= 1u << i;
  }
  u32 before = 0;
#pragma unroll
  for (u32 i = 0; i < kScores; ++i) {
    const bool is_taken = taken >> i & 1;
    const u32 all = __ballot_sync(~0u, is_taken), at = before + __popc(all & ((1u << lane) - 1));
    if (is_taken) experts[static_cast<u64>(token) * kChosen + at] = i * 32 + lane, chosen_scores[warp][at] = scores[i];
    before += __popc(all);
  }
  __syncwarp();
  if (lane >= kChosen) return;
  float share = chosen_scores[warp][lane];
  if constexpr (kNormalises) {
    float sum = 0.0f;
#pragma unroll
    for (u32 k = 0; k < kChosen; ++k) sum += chosen_scores[warp][k];
    share /= sum + kLeastSum;
  }
  shares[token * kChosen + lane] = share * kShareScale;
}

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
  const u32 row = i / (kRowValues / 8), at = i % (kRowValues / 8);
  const u16* const from = x + static_cast<u64>(token_of[row]) * kRowValues + first_arranged_column(at);
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
