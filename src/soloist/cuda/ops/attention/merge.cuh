// Over the blocks of a KV head: partial results of splits are merged and published.
#pragma once
#include "ops/attention/exchange.cuh"
#include "ops/attention/split.cuh"

// Partial results of several splits: eight values, and what they are scaled by.
inline constexpr u32 kMergeLanes = 4, kMergeSplits = 4;  // splits that each of so many lanes asks for at once
template <class M>
struct Merging {
  float top = -kInfinity, total = 0.0f, sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};

  __device__ __forceinline__ void scale(float weight) {
    total *= weight;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) sum[n] *= weight;
  }
  // Those of one lane; where there are few splits, each lane has one.
  __device__ __forceinline__ void add(const Splits<M>& splits, u32 lane, const float2* stats, const float* values) {
#pragma unroll 1
    for (u32 i = lane; i < splits.count; i += kMergeLanes * kMergeSplits) {
      float2 s[kMergeSplits];
      float4 low[kMergeSplits], high[kMergeSplits];
#pragma unroll 1
      for (;;) {
        bool ready = true;
#pragma unroll
        for (u32 j = 0; j < kMergeSplits; ++j) {
          s[j] = make_float2(-kInfinity, 0.0f);
          low[j] = high[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (i + j * kMergeLanes >= splits.count) continue;
          const u32 split = splits.at(i + j * kMergeLanes);
          s[j] = load_exchanged2(&stats[split].x);
          low[j] = load_exchanged4(values + split * M::kHeadDim);
          high[j] = load_exchanged4(values + split * M::kHeadDim + 4);
        }
#pragma unroll
        for (u32 j = 0; j < kMergeSplits; ++j) ready = ready && is_present(s[j]) && is_present(low[j]) && is_present(high[j]);
        if (ready) break;
      }
      float best = top;
#pragma unroll
      for (u32 j = 0; j < kMergeSplits; ++j) best = fmaxf(best, s[j].x);
      scale(exp2_fast(top - best));
      top = best;
#pragma unroll
      for (u32 j = 0; j < kMergeSplits; ++j) {
        if (i + j * kMergeLanes >= splits.count) break;
        const float w = exp2_fast(s[j].x - top);
        total += s[j].y * w;
        sum[0] += low[j].x * w, sum[1] += low[j].y * w, sum[2] += low[j].z * w, sum[3] += low[j].w * w;
        sum[4] += high[j].x * w, sum[5] += high[j].y * w, sum[6] += high[j].z * w, sum[7] += high[j].w * w;
      }
    }
  }
  // With the lane `apart`: both come to the same.
  __device__ __forceinline__ void join(u32 apart) {
    const float best = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
    scale(best == -kInfinity ? 0.0f : exp2_fast(top - best));
    top = best;
    total += __shfl_xor_sync(~0u, total, apart);
#pragma unroll
    for (u32 n = 0; n < 8; ++n) sum[n] += __shfl_xor_sync(~0u, sum[n], apart);
  }
};

// Queries with split caches: the blocks of a head share the work of merging its splits' results and publish the outcome. Four
// lanes merge eight values.
template <class M>
__device__ __forceinline__ void merge_far(const Context<M>& cx, u32 layer, u32 head, u32 place) {
  constexpr u32 kPieces = M::kGroup * M::kHeadDim / 8, kAtOnce = kConsumerThreads / kMergeLanes;
  const Control& control = cx.shared.control();
  const u32 split = __ballot_sync(~0u, split_bits_of<M>(layer, control.position[min(cx.lane, cx.queries - 1)]) > 0);
  if (!split) return;
  u8* now = attended_operand(cx, cx.layers_done);
  const u32 pieces = cx.queries * kPieces, q = cx.lane % kMergeLanes;
#pragma unroll 1
  for (u32 i = cx.thread / kMergeLanes * M::kSplits + place; __any_sync(~0u, i < pieces); i += kAtOnce * M::kSplits) {
    const u32 query = min(i / kPieces, cx.queries - 1), k = i % kPieces * 8;
    const bool valid = i < pieces && (split >> query & 1);
    Merging<M> merging;
    if (valid)
      merging.add(Splits<M>(control, layer, query), q,
                  partial_stats(cx, cx.layers_done, query, head * M::kGroup + k / M::kHeadDim),
                  partial_values(cx, cx.layers_done, query, head * M::kGroup + k / M::kHeadDim) + k % M::kHeadDim);
    __syncwarp();
#pragma unroll
    for (u32 apart = 1; apart < kMergeLanes; apart *= 2) merging.join(apart);
    if (!valid || q != 0) continue;
    const float scale = 1.0f / merging.total;
    const float(&x)[8] = merging.sum;
    store_exchanged(operand_value(now, query, head * M::kGroup * M::kHeadDim + k),
                    make_uint4(present(pack_pair(x[0] * scale, x[1] * scale)), present(pack_pair(x[2] * scale, x[3] * scale)),
                               present(pack_pair(x[4] * scale, x[5] * scale)), present(pack_pair(x[6] * scale, x[7] * scale))));
  }
}
