// What an attention block does in a layer: it attends for its KV head to a round's only query, whose cache is one split.
#pragma once
#include "ops/attention/attend.cuh"
#include "ops/attention/prepare_one.cuh"

// All warps know the query's factor, and rotations lie in shared memory.
template <class L, class M>
__device__ __forceinline__ void attend_alone(L, Context<M>& cx, u32& layer) {
  const Control& control = cx.shared.control();
  const i32 position = control.position[0];
  QueryGroup g{0, 1, 0, 0, 0, control.sequence[0], position, position, position};
  u32 own = 1, stored = 1;
  const GroupWork<M> work(cx, g, layer);
  const GroupRows<M> rows(cx, g);
  const FreshPlace fresh = await_pages(cx, work, g);
  prepare_one<L>(cx, layer, own_head(cx), fresh);
  cx.mark();
  LaneMerge<M> merging;
  attend_group<true>(cx, layer, own, stored, g, work, rows, fresh.has_come, merging);
  cx.mark();
  if constexpr (kParks<M>) cx.forget_addresses();
  if (stored >> cx.warp & 1) store_fresh(cx, cx.warp, place_in_pool(cx, layer, own_head(cx), cx.warp));
  cx.mark();
}
