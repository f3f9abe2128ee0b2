// A block attends to its split of a group of queries: half page after half page, as they come through the ring.
#pragma once
#include "ops/attention/append.cuh"
#include "ops/attention/gather.cuh"
#include "ops/attention/prepare_one.cuh"

// What a warp has to know of a group, computed while the queries are on their way: of the cache, the same in all
// lanes …
template <class M>
struct GroupWork {
  PageWalk<M> walk;
  u32 skipped, end;  // half pages, counted from the first page's first one
  u32 own;           // the first that may be this warp's, modulo kSoftmaxLanes

  __device__ __forceinline__ GroupWork(const Context<M>& cx, const QueryGroup& g, u32 layer)
      : walk(g, layer), skipped(0), end(0) {
    const u32 pages = walk.count();
    if (pages > 0) {
      skipped = walk.first_half_page();
      end = 2 * pages - (walk.has(walk.ahead(pages - 1), 1) ? 0 : 1);
    }
    own = softmax_lane(cx) - walk.ordinal() * 2;
  }
  __device__ __forceinline__ i32 start(u32 half_page) const {
    return walk.ahead(half_page / 2) * static_cast<i32>(kPagePositions) + static_cast<i32>(half_page % 2 * kHalfPagePositions);
  }
};
// … and of the rows.
template <class M>
struct GroupRows {
  u32 tiles = 0;  // bits: which of the warp's tiles hold rows of the group
  bool few;       // all of them are in one half of one tile
  u32 first;      // of the tiles, or of that half
  i32 last[M::kWarpTiles][kRowHalves<M>];

  __device__ __forceinline__ GroupRows(const Context<M>& cx, const QueryGroup& g) {
    const u32 begin = g.begin * M::kQueryRows, end = g.end * M::kQueryRows;
    // There may be as many row sets as a group needs, not all eight queries: they count from its first one.
    const u32 own = (M::kQueriesTogether < kMaxQueries ? begin : 0) + row_set(cx) * M::kWarpTiles * 16;
#pragma unroll
    for (u32 m = 0; m < M::kWarpTiles; ++m)
      if (own + m * 16 < end && own + m * 16 + 16 > begin) tiles |= 1u << m;
    few = kKnowsFewRows<M> && tiles && begin / 8 == (end - 1) / 8;
    first = few ? begin / 8 * 8 : own;
#pragma unroll
    for (u32 m = 0; m < M::kWarpTiles; ++m)
#pragma unroll
      for (u32 i = 0; i < kRowHalves<M>; ++i)
        last[m][i] = cx.shared.control().position[min((first + m * 16 + cx.lane / 4 + 8 * i) / M::kQueryRows, kMaxQueries - 1)];
  }
};

// Where threads have few registers, what a warp need not have at hand while it walks through the cache is parked in
// shared memory. All its lanes write and read the same.
template <class M>
struct Parked {
  u32 round, layer, layers_done, queries, reductions, own, stored, gathered;
  float scale;
  QueryGroup group;
  GroupWork<M> work;
};
template <class M>
__device__ __forceinline__ Parked<M>& parked(const Context<M>& cx) {
  __shared__ u32 of_warp[kConsumerWarps][sizeof(Parked<M>) / 4];
  return *reinterpret_cast<Parked<M>*>(of_warp[cx.warp]);
}
template <class M>
__device__ __forceinline__ void park(const Context<M>& cx, u32 layer, u32 own, u32 stored, u32 gathered, const QueryGroup& g,
                                     const GroupWork<M>& work) {
  if constexpr (kParks<M>) {
    parked(cx) = Parked<M>{cx.round, layer, cx.layers_done, cx.queries, cx.reductions, own, stored, gathered, cx.scale, g, work};
    __syncwarp();
  }
}
template <class M>
__device__ __forceinline__ void unpark(Context<M>& cx, u32& layer, u32& own, u32& stored, u32& gathered, QueryGroup& g) {
  if constexpr (kParks<M>) {
    const Parked<M>& p = parked(cx);
    cx.round = p.round;
    layer = p.layer;
    cx.layers_done = p.layers_done;
    cx.queries = Queries{p.queries};
    cx.reductions = p.reductions;
    own = p.own;
    stored = p.stored;
    gathered = p.gathered;
    cx.scale = p.scale;
    g = p.group;
    cx.forget_addresses();
  }
}

// Half pages that are in the ring together, from `begin` on: those of `most` slots. A slot that holds a page begins with the page's
// first half page that is seen.
template <class M>
struct Batch {
  static constexpr u32 kSlotHalfPages = M::kPageSlot ? 2 : 1;
  u32 begin, stop, slots;

  __device__ __forceinline__ Batch(u32 begin, u32 end, u32 most)
      : begin(begin), stop(min(end, origin() + most * kSlotHalfPages)), slots((stop - origin() + kSlotHalfPages - 1) / kSlotHalfPages) {}
  __device__ __forceinline__ u32 slot(u32 half_page) const { return (half_page - origin()) / kSlotHalfPages; }
  __device__ __forceinline__ u32 offset(u32 half_page) const {
    return M::kPageSlot ? (half_page - max(begin, half_page & ~1u)) * (2 * M::kHalfPageBytes) : 0;
  }

 private:
  __device__ __forceinline__ u32 origin() const { return M::kPageSlot ? begin & ~1u : begin; }
};
// An attention block has all of the ring, since it has time until the next layer. Otherwise the rest of it is filled meanwhile.
template <bool kOnlyAttends, class M>
inline constexpr u32 kBatchSlots = kOnlyAttends ? M::kRingSlots : M::kPageBatchSlots;

// New keys and values of several queries join a batch, where they lie in one of its half pages: one to each warp. All warps wait for that.
template <class M>
__device__ __forceinline__ void append_to_batch(const Context<M>& cx, const QueryGroup& g, const GroupWork<M>& work, const Batch<M>& batch) {
  const u32 query = g.fresh + cx.warp;
  if (query < g.end) {
    const i32 position = cx.shared.control().position[query];
    // Half pages from the last one back: new positions are the last.
    const u32 half_page = batch.stop - 1 - cx.lane;
    const i32 within = position - work.start(half_page);
    const u32 found = __ballot_sync(~0u, cx.lane < batch.stop - batch.begin && within >= 0 && within < static_cast<i32>(kHalfPagePositions));
    if (found) {
      const u32 own = batch.stop - __ffs(found);
      append(cx, query, work.start(own), at_shared<u8>(cx.ring.wait(batch.slot(own)) + batch.offset(own)));
    }
  }
  cx.sync();
}

// Until pages of an attention block have come, as many as it has room for: it has time before q, k and v do. Where the new key and
// value join them.
template <class M>
__device__ __forceinline__ FreshPlace await_pages(const Context<M>& cx, const GroupWork<M>& work, const QueryGroup& g) {
  const Batch<M> batch(work.skipped, work.end, kBatchSlots<true, M>);
  if (cx.lane < batch.slots) cx.ring.wait(cx.lane);
  __syncwarp();
  if (kHasCodes<M> || batch.stop < work.end) return {};
  const u32 last = work.end - 1;
  return {true, cx.ring.place(batch.slot(last)) + batch.offset(last), static_cast<u32>(g.last_position) % kHalfPagePositions};
}

// kOnlyAttends: by an attention block, whose first batch has come; `appended`: its new key and value have joined it.
template <bool kOnlyAttends, class M>
__device__ __forceinline__ void attend_group(Context<M>& cx, u32& layer, u32& own, u32& stored, QueryGroup& group,
                                             const GroupWork<M>& known, const GroupRows<M>& rows, bool appended,
                                             LaneMerge<M>& merging) {
  if (known.end == 0 && merging.count == 0) return;
  park(cx, layer, own, stored, merging.count, group, known);
  const QueryGroup& g = kParks<M> ? parked(cx).group : group;
  const GroupWork<M>& work = kParks<M> ? parked(cx).work : known;
  const u32 q_rows = shared_address(cx.shared.q_rows()) + rows.first / 16 * (M::kHeadDim / 32) * 1024 + cx.lane * 16;
  const i32 window = M::kWindow[layer];
  QueryRows<M> query;
  if constexpr (kKeepsQuery<M>) query.load(q_rows);
  // Of codes not the thread's number, which the compiler would read anew for each half page rather than keep.
  const u32 lane = kHasCodes<M> && kKeepsQuery<M> ? __shfl_sync(~0u, cx.lane, cx.lane) : cx.lane;
  Softmax<M> softmax;
  softmax.clear();
  const auto publish = [&] {
    merging.template gather<kOnlyAttends>(cx, softmax, group, rows.first, own_head(cx), work.end == 0, (own & (own - 1)) == 0);
  };
  constexpr bool kPublishesFirst = kOnlyAttends || (kMostQueries > 1 && !kParks<M>);
  const bool joined = kOnlyAttends && appended;
  u32 begin = work.skipped;
#pragma unroll 1
  do {  // once where the split is empty
    const Batch<M> batch(begin, work.end, kBatchSlots<kOnlyAttends, M>);
    if (kOnlyAttends && begin > work.skipped) {
      if (cx.lane < batch.slots) cx.ring.wait(cx.lane);
      __syncwarp();
    }
    if constexpr (kMostQueries > 1) {
      appended = batch.slots && work.start(batch.stop - 1) + static_cast<i32>(kHalfPagePositions) > g.first_fresh;
      if (appended) append_to_batch(cx, g, work, batch);
    }
#pragma unroll 1
    for (u32 half_page = begin + (work.own - begin) % M::kSoftmaxLanes; half_page < batch.stop; half_page += M::kSoftmaxLanes) {
      if (!rows.tiles) break;
      const i32 start = work.start(half_page), behind = start + static_cast<i32>(kHalfPagePositions);
      const u32 slot = batch.slot(half_page);
      const u32 keys = (kOnlyAttends ? cx.ring.place(slot) : cx.ring.wait(slot)) + batch.offset(half_page);
      if (kMostQueries == 1 && behind > g.first_fresh && !joined) {
        // All warps that share the half page write the same.
        append(cx, 0, start, at_shared<u8>(keys));
        appended = true;
        __syncwarp();
      }
      const u32 values = keys + M::kCodeBytes + value_set(cx) * kSetDim<M> * M::kValueRowBytes;
      const Scales<M> scales(keys, value_set(cx));
      const bool partly = window || behind > g.first_position;
      if constexpr (kKeepsQuery<M>)
        softmax.add(query, keys, values, scales, start, rows.last, window, partly, lane);
      else if (kKnowsFewRows<M> && rows.few)
        softmax.template add<1, 1>(q_rows, 1, rows.first & 8, keys, values, scales, start, rows.last, window, partly,
                                    cx.lane);
      else
        softmax.template add<M::kWarpTiles, kRowHalves<M>>(q_rows, rows.tiles, kBeginsInHalf<M> && rows.first & 8, keys, values,
                                                           scales, start, rows.last, window, partly, cx.lane);
    }
    if (kPublishesFirst && batch.stop >= work.end) publish();  // all blocks wait for it, none for slots
    // For all slots, also those that other warps read, as copies need not land in order: who went ahead of one would
    // take its old phase for the next one's end.
    if (!kOnlyAttends && cx.lane < batch.slots) cx.ring.wait(cx.lane);
    if (appended) fence_async_proxy_shared();  // slots are copied to again
    appended = false;
    __syncwarp();
    cx.ring.release(cx.lane, cx.ring.slot, batch.slots);
    cx.ring.advance(batch.slots);
    begin = batch.stop;
  } while (begin < work.end);
  unpark(cx, layer, own, stored, merging.count, group);
  if (!kPublishesFirst) publish();
}
