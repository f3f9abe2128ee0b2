// qkv, attention over the paged KV cache, and the projection after it.
//
// A query whose cache is unsplit has one block, which publishes finished attention. Of a split one the partial results
// are merged. The cache streams through the weight ring. Inside a block kSoftmaxLanes running softmaxes take the
// half pages (32 positions) in turn. Which split and lane a half page belongs to depends on the query's position
// only, and every merge has a fixed order: so a query's bits do not depend on the other queries.
#pragma once
#include "ops/attention/attend.cuh"
#include "ops/attention/merge.cuh"
#include "ops/attention/prepare.cuh"
#include "ops/hidden.cuh"
#include "ops/route.cuh"

// Products with the activations as they came: what their norm makes of them, attention adds, since the squares that it
// follows from come last. It is known before the block attends.
template <class L, class M>
__device__ __forceinline__ void qkv(L, Context<M>& cx, u32 layer) {
  using Qkv = typename L::Qkv;
  cx.begin(Phase::kQkv);
  const u32 units = Qkv::num_units(cx.block), first = Qkv::first_unit(cx.block) * 8, in = cx.next_in();
  ++cx.layers_done;
  GlobalOperand<Qkv> operand(stream_operand<InStream<M>>(cx, in), cx, L::vectors(layer));
  Scale<InStream<M>> scale;
  Sums<Qkv> sums;
  multiply_owned<Qkv>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] {
    scale.load(cx, in);
    cx.arrived();
  });
  cx.mark();
  Reduction reduction(cx, Qkv::kTiles * 16);
  if constexpr (kAttentionBlocks > 0) {  // all warps add up rows of the only query; elsewhere registers spill
    float* now = projected<L>(cx, cx.layers_done, 0) + first;
    reduction.for_each_part(cx, sums, units, units * 8, [&](u32 start, u32 end) {
#pragma unroll 1
      for (u32 r = start + cx.thread; r < end; r += kConsumerThreads) store_exchanged(now + r, present(reduction.get(0, r - start)));
    });
  } else {
    float* now = projected<L>(cx, cx.layers_done, cx.warp) + first;
    reduction.for_each_part(cx, sums, units, units * 8, [&](u32 start, u32 end) {
      if (cx.warp >= cx.queries) return;
#pragma unroll 1
      for (u32 r = start + cx.lane; r < end; r += 32) store_exchanged(now + r, present(reduction.get(cx.warp, r - start)));
    });
  }
  scale.settle(cx, in);
  cx.mark();
}

inline constexpr u32 kAttentionMarks = 4;

// Blocks that attend take longer than so many cycles. Until then a block that does not attend leaves the L2 to them.
template <class M>
__device__ __forceinline__ void rest_while_others_attend(u32 queries) {
  if constexpr (M::kRestCycles > 0 && kAblation == 0) {
    if (queries == 1) return;
    const u32 since = static_cast<u32>(clock_cycles());
    do nap();
    while (static_cast<u32>(clock_cycles()) - since < M::kRestCycles);
  }
}

// `layer` is a reference: where threads have few registers it is parked meanwhile.
template <class L, class M>
__device__ __forceinline__ void attention(L, Context<M>& cx, u32& layer) {
  cx.begin(Phase::kAttention);
  if (own_head(cx) >= M::kKvHeads) {
    for (u32 i = 0; i < kAttentionMarks; ++i) cx.mark();
    rest_while_others_attend<M>(cx.queries);
    return;
  }
  u32 own = 0, stored = 0;  // groups to attend to, and queries to store
  const auto grouped = [&] { return QueryGroups<M>(cx.shared.control(), layer, own_place(cx), cx.queries, cx.lane); };
  QueryGroups<M> groups = grouped();
  if (groups.own) {
    own = groups.own;
    const OwnQueries queries = groups.own_queries(cx.shared.control(), cx.lane);
    stored = queries.stored;
    QueryGroup g = groups.at(cx.shared.control(), __ffs(own) - 1);
    GroupWork<M> work(cx, g, layer);
    GroupRows<M> rows(cx, g);
    // Of several queries a warp stores one. Where the block has one of them, that is a warp without rows, while others attend.
    const u32 storing = kMostQueries > 1 ? (cx.warp + kConsumerWarps / 2) % kConsumerWarps : cx.warp;
    u8* const pool = kMostQueries > 1 && stored >> storing & 1 ? place_in_pool(cx, layer, own_head(cx), storing) : nullptr;
    prepare_heads<L>(cx, layer, own_head(cx), queries);
    cx.mark();
    if (kMostQueries > 1 && pool) store_fresh(cx, storing, pool);
    LaneMerge<M> merging;
#pragma unroll 1
    for (;;) {
      attend_group<false>(cx, layer, own, stored, g, work, rows, false, merging);
      own &= own - 1;
      if (!own) break;
      if constexpr (kParks<M> || M::kMostSlots > 0) groups = grouped();  // there is no room to keep them
      g = groups.at(cx.shared.control(), __ffs(own) - 1);
      work = GroupWork<M>(cx, g, layer);
      rows = GroupRows<M>(cx, g);
    }
    cx.mark();
    if constexpr (kParks<M>) cx.forget_addresses();
    if (kMostQueries == 1 && stored >> storing & 1) store_fresh(cx, storing, place_in_pool(cx, layer, own_head(cx), storing));
    cx.mark();
  } else {
    for (u32 i = 1; i < kAttentionMarks; ++i) cx.mark();
    rest_while_others_attend<M>(cx.queries);
  }
  merge_far(cx, layer, own_head(cx), own_place(cx));
  cx.mark();
}

template <class L, class M>
__device__ __forceinline__ void attention_output(L, Context<M>& cx, u32 layer) {
  using AttentionOutput = typename L::AttentionOutput;
  cx.begin(Phase::kAttentionOutput);
  const u32 units = AttentionOutput::num_units(cx.block);
  if constexpr (kFindsFactorApart<typename L::GateUp, M>)
    if (cx.thread == 0) FoundFactor::forget();
  RowVectors<AttentionOutput> vectors;
  vectors.load(cx, cx.vectors(L::vectors(layer)) + L::kVecMlpNorm,
               L::kOutputBias ? cx.vectors(L::vectors(layer)) + L::kVecAttentionOutputBias : nullptr);
  const RankRows<MidStream<M>> ranks(cx, cx.layers_done, M::Residual::first_unit(cx.block) * 8 + cx.lane);
  GlobalOperand<AttentionOutput> operand(attended_operand(cx, cx.layers_done), cx, L::vectors(layer));
  Sums<AttentionOutput> sums;
  const auto arrived = [&] { cx.arrived(); };
  if constexpr (L::kRoutesEarly && kAttentionBlocks > 0 && !AttentionOutput::kPermuted) {
    // Logits are added up while activations, which have come for them, are on their way once more, in the order of the product. In
    // other builds registers spill.
    Ahead<AttentionOutput> ahead;
    route_early<L>(cx, layer, [&] { ask_for_first(ahead, operand); });
    multiply_owned<true>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums, arrived);
  } else {
    if constexpr (L::kRoutesEarly) route_early<L>(cx, layer, [] {});
    multiply_owned<AttentionOutput>(cx.ring, cx.warp, cx.lane, units, operand, sums, arrived);
  }
  cx.mark();
  add_to_stream<MidStream<M>>(cx, sums, cx.layers_done, vectors, ranks, layer);
  listen<InStream<M>>(cx, layer);
  cx.mark();
}
