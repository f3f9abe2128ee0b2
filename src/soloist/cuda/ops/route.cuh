// Logits of experts: a block has a row or a few of the router, and publishes what they give.
#pragma once
#include "ops/attention/exchange.cuh"
#include "ops/hidden.cuh"
#include "tile/logits.cuh"

// Eight numbers of a router's row, and their product with as many activations.
__device__ __forceinline__ void load_router(const float* at, float4 (&part)[2]) {
  part[0] = __ldg(reinterpret_cast<const float4*>(at));
  part[1] = __ldg(reinterpret_cast<const float4*>(at + 4));
}
__device__ __forceinline__ float router_product(const float4 (&part)[2], uint4 x) {
  const float4 low = part[0], high = part[1];
  return low.x * low_half(x.x) + low.y * high_half(x.x) + low.z * low_half(x.y) + low.w * high_half(x.y) +
         high.x * low_half(x.z) + high.y * high_half(x.z) + high.z * low_half(x.w) + high.w * high_half(x.w);
}

// A row of `kLength` numbers times all queries: eight columns to a thread at a time.
template <u32 kLength>
struct RouterRow {
  static constexpr u32 kColumns = kConsumerThreads * 8, kEach = (kLength + kColumns - 1) / kColumns;
  // Queries whose activations are in registers; those of more are asked for after them.
  static constexpr u32 kTogether = kMostQueries < 4 ? kMostQueries : 4;
  // Weights wait in registers for activations, but for those that would take too many beside several queries.
  static constexpr bool kWait = kMostQueries == 1 || kEach == 1;
  const float* row;
  float4 weights[kWait ? kEach : 1][2];

  __device__ __forceinline__ void load(const float* from, u32 thread) {
    row = from;
    if constexpr (kWait)
#pragma unroll
      for (u32 i = 0; i < kEach; ++i) load_part(i, thread, weights[i]);
  }
  __device__ __forceinline__ void load_part(u32 i, u32 thread, float4 (&part)[2]) const {
    const u32 k = i * kColumns + thread * 8;
    if (k < kLength) load_router(row + k, part);
  }
  // The thread's part of the products of `queries` queries from `first` on. Activations are waited for.
  __device__ __forceinline__ void multiply(u8* operand, u32 first, u32 queries, u32 thread, float (&sums)[kTogether]) const {
#pragma unroll
    for (u32 q = 0; q < kTogether; ++q) sums[q] = 0.0f;
#pragma unroll(kWait ? kEach : 1)
    for (u32 i = 0; i < kEach; ++i) {
      const u32 k = i * kColumns + thread * 8;
      if (k >= kLength) continue;
      float4 part[2] = {weights[kWait ? i : 0][0], weights[kWait ? i : 0][1]};
      if constexpr (!kWait) load_part(i, thread, part);
      uint4 x[kTogether];
      bool ready = false;
#pragma unroll 1
      while (!ready) {
        ready = true;
#pragma unroll
        for (u32 q = 0; q < kTogether; ++q)
          if (q < queries) x[q] = load_exchanged(operand_value(operand, first + q, k));
#pragma unroll
        for (u32 q = 0; q < kTogether; ++q)
          if (q < queries) ready &= is_present(x[q]);
      }
#pragma unroll
      for (u32 q = 0; q < kTogether; ++q)
        if (q < queries) sums[q] += router_product(part, x[q]);
    }
  }
  // The warp's part of the products of all queries, to `sums` [warp][query] in shared memory.
  template <class M>
  __device__ __forceinline__ void add_up(const Context<M>& cx, u8* operand, float* sums) const {
#pragma unroll 1
    for (u32 from = 0; from < cx.queries; from += kTogether) {
      float own[kTogether];
      multiply(operand, from, cx.queries - from, cx.thread, own);
#pragma unroll
      for (u32 q = 0; q < kTogether; ++q) {
        const float sum = warp_sum(own[q]);
        if (cx.lane == 0) sums[cx.warp * kMostQueries + from + q] = sum;
      }
    }
  }
};

// Where a logit of this warp's query goes, in the memory of all ranks that add it to those of others. Worked out while what it is made of
// is waited for.
template <class L>
struct LogitPlaces {
  using M = typename L::M;
  static constexpr u32 kPlaces = kLogitParts<L>;
  float* to[kPlaces];

  __device__ __forceinline__ LogitPlaces(const Context<M>& cx, u32 row) {
#pragma unroll
    for (u32 r = 0; r < kPlaces; ++r) {
      u8* workspace = kPlaces == 1 ? cx.params.workspace : cx.params.peers[r];
      to[r] = expert_logits<M>(workspace, cx.layers_done, kPlaces == 1 ? 0 : sender_rank(cx.params, r), cx.warp) + row;
      if constexpr (kPlaces > 1 && kMostQueries == 1) asm volatile("" : "+l"(to[r]));  // as of `RankRows`
    }
  }
  __device__ __forceinline__ void store(float logit) const {
    if constexpr (kPlaces == 1) {
      store_exchanged(to[0], present(logit));
    } else {
#pragma unroll
      for (u32 r = 0; r < kPlaces; ++r) store_to_peer(to[r], present(logit));
    }
  }
};

// Logits beside attention_output, one exchange before the residual is known. They are linear in what attention gives:
// R (x + Wo a) = R x + (R Wo) a, where the loader made R Wo. The first part is there while attention is on its way. Of several ranks each
// has the columns of R Wo that its part of attention is for, and the first one adds R x.
// Published without the residual's norm, which is positive and follows. `came`: called once, when what attention gives is there for all
// of the warp's logits.
template <class L, class Came, class M>
__device__ __forceinline__ void route_early(Context<M>& cx, u32 layer, const Came& came) {
  constexpr u32 kAttended = M::kQueryHeads * M::kHeadDim, kSums = kConsumerWarps * kMostQueries;
  const u32 first = L::first_router_row(cx.block), end = L::first_router_row(cx.block + 1);
  const float* vectors = cx.vectors(L::vectors(layer));
  u8* before = stream_operand<RouterStream<M>>(cx, cx.layers_done + cx.round);  // as qkv's
  u8* attended = attended_operand(cx, cx.layers_done);
  float* parts = reinterpret_cast<float*>(cx.shared.base + M::kShExpertLogits);  // [row % 2][of what][warp][query]
  RouterRow<M::kHidden> row;
  RouterRow<kAttended> product;
  if (first == end) came();
#pragma unroll 1
  for (u32 r = first; r < end; ++r) {
    float* now = parts + r % 2 * (2 * kSums);
    row.load(vectors + L::kVecRouter + r * M::kHidden, cx.thread);
    row.add_up(cx, before, now);
    product.load(vectors + L::kVecRouterOutput + r * kAttended, cx.thread);
    const LogitPlaces<L> places(cx, r);
    product.add_up(cx, attended, now + kSums);
    if (r + 1 == end) came();
    cx.sync();
    if (cx.warp < cx.queries && cx.lane == 0) {
      float of_stream = 0.0f, of_attention = 0.0f;
#pragma unroll
      for (u32 w = 0; w < kConsumerWarps; ++w) {
        of_stream += now[w * kMostQueries + cx.warp];
        of_attention += now[kSums + w * kMostQueries + cx.warp];
      }
      // The stream was published times the scale that was assumed: the true one over this factor.
      const float scaled = of_stream * __fdividef(cx.shared.control().factor[cx.warp], cx.scale);
      places.store(kLogitParts<L> == 1 || cx.params.rank == 0 ? scaled + of_attention : of_attention);
    }
  }
}
