// Queries, keys and values of a round's only query come to an attention block's shared memory. All blocks wait for what follows, so
// whatever does not depend on q, k and v is at hand before they come: factors, norms, rotations, places.
#pragma once
#include "ops/attention/prepare.cuh"

// Where the new key and value join their half page in the ring, if that has come.
struct FreshPlace {
  bool has_come = false;
  u32 half_page = 0, row = 0;
};

// By a warp with `kOwn` of the query's heads and its key; the last one may have its value, too.
template <u32 kOwn, bool kMayHaveValue, class L, class M>
__device__ __forceinline__ void prepare_own(const Context<M>& cx, u32 layer, u32 head, const FreshPlace& fresh) {
  using V = HeadVector<L>;
  constexpr u32 kPairs = V::kPairs, kHalf = V::kHalf, kVectors = kOwn + (kMayHaveValue ? 1 : 0);
  const bool has_value = kMayHaveValue && cx.warp == kConsumerWarps - 1;
  const bool has_key = kOwn > 0 && cx.warp + (kOwn - 1) * kConsumerWarps == M::kGroup;
  const u32 q_rows = shared_address(cx.shared.q_rows()), new_kv = shared_address(cx.shared.new_kv());
  const float* vectors = cx.vectors(L::vectors(layer));
  const float* source = projected<L>(cx, cx.layers_done, 0) + head * kHeadRows<M>;
  const auto member = [&](u32 v) { return v == kOwn ? M::kGroup + 1 : cx.warp + v * kConsumerWarps; };
  float low_bias[kVectors][kPairs], high_bias[kVectors][kPairs], low_norm[kVectors][kPairs], high_norm[kVectors][kPairs];
  PairPlaces<L> places[kVectors], in_slot[2];  // of the key, of the value
#pragma unroll
  for (u32 v = 0; v < kVectors; ++v) {
    const bool is_key = v + 1 == kOwn && has_key;
    if constexpr (L::kQkvBias)
      V::load_two(low_bias[v], high_bias[v], vectors + L::kVecQkvBias + head * kHeadRows<M> + member(v) * M::kHeadDim, cx.lane);
    if constexpr (L::kQkNorm && kOwn > 0)
      if (v < kOwn) V::load_two(low_norm[v], high_norm[v], vectors + (is_key ? L::kVecKNorm : L::kVecQNorm), cx.lane);
    places[v].find(cx.lane, [&](u32 d) {
      return v == kOwn ? new_kv + (M::kHeadDim + d) * 2 : is_key ? new_kv + d * 2 : q_rows + q_offset<M>(member(v), d);
    });
  }
  if constexpr (!kHasCodes<M>) {  // codes join later, once they are rounded
    if (has_key && fresh.has_come)
      in_slot[0].find(cx.lane, [&](u32 d) {
        return fresh.half_page + fresh.row * M::kKeyRowBytes + M::key_chunk(fresh.row, d / 8) * 16 + d % 8 * 2;
      });
    if (has_value && fresh.has_come)
      in_slot[1].find(cx.lane, [&](u32 d) { return fresh.half_page + M::kHalfPageBytes + M::value_place(fresh.row, d) * 2; });
  }
  float factor = cx.shared.control().factor[0];
  at_hand(factor);
  float2 turns[kPairs];
#pragma unroll
  for (u32 j = 0; j < kPairs; ++j) {
    turns[j] = M::kRotated[layer] ? cx.shared.rope()[min(V::place(cx.lane, j), kHalf - 1)] : make_float2(1.0f, 0.0f);
    at_hand(turns[j].x), at_hand(turns[j].y);
  }

  float low[kVectors][kPairs], high[kVectors][kPairs];
  await_vectors<L>(low, high, [&](u32 v) { return v == kOwn && !has_value ? nullptr : source + member(v) * M::kHeadDim; }, cx.lane);
#pragma unroll
  for (u32 v = 0; v < kVectors; ++v)
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      low[v][j] *= factor;
      high[v][j] *= factor;
      if constexpr (L::kQkvBias) {
        low[v][j] += low_bias[v][j];
        high[v][j] += high_bias[v][j];
      }
    }
  if constexpr (kOwn > 0) {
#pragma unroll
    for (u32 v = 0; v < kOwn; ++v) {
      float x[kPairs], y[kPairs];
      const auto norm = [&](u32 j) { return make_float2(low_norm[v][j], high_norm[v][j]); };
      V::turned(low[v], high[v], norm, [&](u32 j) { return turns[j]; }, x, y);
      places[v].store(x, y, cx.lane);
      if (v + 1 == kOwn && has_key && fresh.has_come) in_slot[0].store(x, y, cx.lane);
    }
  }
  if (!has_value) return;
  places[kVectors - 1].store(low[kVectors - 1], high[kVectors - 1], cx.lane);
  if (fresh.has_come) in_slot[1].store(low[kVectors - 1], high[kVectors - 1], cx.lane);
}

// All warps know the query's factor, and rotations lie in shared memory.
template <class L, class M>
__device__ __forceinline__ void prepare_one(const Context<M>& cx, u32 layer, u32 head, const FreshPlace& fresh) {
  constexpr u32 kVectors = M::kGroup + 1, kMost = (kVectors + kConsumerWarps - 1) / kConsumerWarps;
  constexpr u32 kOfLast = kVectors / kConsumerWarps;  // of the last warp, and of all that have not the most
  if (kOfLast == kMost || cx.warp + kOfLast * kConsumerWarps < kVectors)
    prepare_own<kMost, kOfLast == kMost, L>(cx, layer, head, fresh);
  else if (kOfLast > 0 || cx.warp == kConsumerWarps - 1)
    prepare_own<kOfLast, true, L>(cx, layer, head, fresh);
  cx.sync();
  if constexpr (kHasCodes<M>) {
    round_fresh(cx, 1);
    cx.sync();
  }
}
