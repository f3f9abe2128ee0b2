// The LM head: logits to memory, and this block's best token of every column.
#pragma once
#include "ops/hidden.cuh"

struct Best {
  float value;
  u32 id;
};
// The lowest id among the largest values.
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (u32 o = 16; o; o >>= 1) {
    const Best other{__shfl_xor_sync(~0u, best.value, o), __shfl_xor_sync(~0u, best.id, o)};
    best = better(best, other);
  }
  return best;
}
__device__ __forceinline__ uint4* best_records(const Context& cx, u32 column) {
  return reinterpret_cast<uint4*>(cx.params.workspace + kWsBest) +
         (((cx.round + 1) & 1) * kMaxColumns + column) * kNumBlocks;
}

__device__ __forceinline__ void head(Context& cx, float* logits) {
  cx.wait(kHiddenIn, cx.hidden_in * stream_arrivals(cx));
  const u32 units = num_units<Head>(cx.block), first = first_unit<Head>(cx.block) * 8;
  Ahead<Head> ahead;
  GlobalOperand operand(stream_operand<InStream>(cx, cx.hidden_in), cx.warp, cx.lane, cx.columns);
  ahead.fill(operand);
  const float factor = cx.warp < cx.columns ? take_scale<InStream>(cx, cx.hidden_in) : 0.0f;
  Best best{-kInfinity, 0xffffffffu};
  constexpr u32 kGroupUnits = 2 * Head::kTiles;
#pragma unroll 1
  for (u32 group = 0; group < units; group += kGroupUnits) {
    if (Head::kDepth < Head::kSteps && group) ahead.fill(operand);
    const u32 here = min(kGroupUnits, units - group);
    Sums<Head> sums;
    multiply<Head>(cx.ring, cx.warp, cx.lane, here, operand, ahead, sums);
    Reduction reduction(reinterpret_cast<float*>(cx.shared.reduce), cx.columns, Head::kTiles * 16);
    for (u32 start = 0; start < here * 8; start += reduction.rows) {
      if (group || start) cx.sync();
      reduction.put(sums, start, here, cx.columns, cx.warp, cx.lane);
      cx.sync();
      if (cx.warp < cx.columns) {
        const u32 end = min(here * 8, start + reduction.rows);
        for (u32 r = start + cx.lane; r < end; r += 32) {
          const u32 id = first + group * 8 + r;
          const float y = reduction.get(cx.warp, r - start) * factor;
          if (id < kVocab) {
            logits[static_cast<u64>(cx.warp) * kVocabRows + id] = y;
            best = better(best, Best{y, id});
          }
        }
      }
    }
  }
  if (cx.warp < cx.columns) {
    best = warp_best(best);
    if (cx.lane == 0) {
      const u32 yield = cx.block == 0 ? *const_cast<volatile u32*>(&cx.shared.control->yield) : 0;
      best_records(cx, cx.warp)[cx.block] = make_uint4(__float_as_uint(best.value), best.id, yield, 0);
    }
    cx.arrive_warp(kBest);
  }
}

// Every block reads every block's best and comes to the same token. Warp c serves column c.
__device__ __forceinline__ void choose(Context& cx) {
  cx.wait(kBest, (cx.round + 1) * kNumBlocks * cx.columns);
  if (cx.warp >= cx.columns) return;
  const uint4* records = best_records(cx, cx.warp);
  Best best{-kInfinity, 0xffffffffu};
  for (u32 b = cx.lane; b < kNumBlocks; b += 32) {
    const uint4 r = load_exchanged(records + b);
    if (b == 0 && cx.warp == 0) cx.shared.control->yield_agreed = r.z;
    best = better(best, Best{__uint_as_float(r.x), r.y});
  }
  best = warp_best(best);
  if (cx.lane == 0) cx.shared.control->chosen[cx.warp] = best.id;
}
