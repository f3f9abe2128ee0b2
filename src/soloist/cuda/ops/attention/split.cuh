// Who serves which part of the KV cache.
//
// Every KV head has kSplits blocks. How many of them share the cache of a query, its splits, follows from
// how many positions it sees: chunks of kChunkPages pages (of 64 positions) go round over them. Which block
// serves a split depends on the other queries: splits of all queries are dealt to the head's blocks in turn.
#pragma once
#include "tile/context.cuh"

template <class M>
__device__ __forceinline__ i32 window_start(u32 layer, i32 position) {
  const i32 w = M::kWindow[layer];
  return w ? max(0, position - w + 1) : 0;
}
// Blocks of a KV head that share the cache of a query: 2 to this power, up to all of them.
template <class M>
__device__ __forceinline__ u32 split_bits_of(u32 layer, i32 position) {
  const u32 seen = position - window_start<M>(layer, position);
  return seen < M::kUnsplitPositions ? 0 : min(M::kSplitBits, 32 - __clz(seen / M::kSplitPositions));
}

// What a block serves: a KV head, as one of its blocks. The last blocks may have none. An attention block (kAttentionBlocks) has a head,
// and no place among those that share a cache.
__device__ __forceinline__ bool is_attention_block(u32 block) { return kAttentionBlocks > 0 && block >= kNumBlocks; }
template <class M>
__device__ __forceinline__ u32 head_of_block(u32 block) {
  return is_attention_block(block) ? block - kNumBlocks : block / M::kSplits;
}
template <class M>
__device__ __forceinline__ u32 place_of_block(u32 block) { return is_attention_block(block) ? M::kSplits : block % M::kSplits; }
template <class M>
__device__ __forceinline__ u32 own_head(const Context<M>& cx) { return head_of_block<M>(cx.block); }
template <class M>
__device__ __forceinline__ u32 own_place(const Context<M>& cx) { return place_of_block<M>(cx.block); }

// Consecutive queries of one sequence at rising positions, which have as many splits.
struct QueryGroup {
  u32 begin, end;
  u32 fresh;  // from this query on, the sequence's keys and values come with this round
  u32 split_bits, split;  // how many splits, and which one is the block's
  i32 sequence, first_fresh, first_position, last_position;
};

__device__ __forceinline__ u32 highest(u32 bits) { return 31 - __clz(bits); }
__device__ __forceinline__ u32 up_to(u32 bit) { return (2u << bit) - 1; }

// Query tokens that a block has to do with: those that it attends for; those whose new keys and values it needs, all of a sequence before
// the end of an own group; and those whose new keys and values it stores.
struct OwnQueries {
  u32 attending, needed, stored;
};

// The groups of a layer and those whose cache the block has a split of: bits of their first queries. Executed by
// whole warps; what has no set of bits, lane c knows of query c.
template <class M>
struct QueryGroups {
  u32 begins, own, sequences;
  u32 queries, split_bits, split;
  bool all_unsplit = false;  // all queries are of one sequence, whose cache is one split, and each is a group

  __device__ __forceinline__ QueryGroups(const Control& c, u32 layer, u32 place, u32 queries, u32 lane)
      : queries(queries) {
    if (queries == 1) {  // what follows comes to this as well
      begins = sequences = 1;
      split_bits = split_bits_of<M>(layer, c.position[0]);
      split = (place - layer / M::kRotationLayers) % M::kSplits;
      own = split >> split_bits == 0;
      if (kAttentionBlocks > 0 && split_bits == 0) split = 0, own = place == M::kSplits;
      return;
    }
    const u32 mine = min(lane, queries - 1), all = (1u << queries) - 1;
    const i32 sequence = c.sequence[mine];
    split_bits = split_bits_of<M>(layer, c.position[mine]);
    const u32 turn = place - layer / M::kRotationLayers;
    // What follows comes to this as well, and takes longer. Beside experts registers would spill.
    all_unsplit = M::kMostSlots == 0 && __all_sync(~0u, queries <= M::kSplits && sequence == c.sequence[0] && split_bits == 0);
    if (all_unsplit) {
      begins = all, sequences = 1;
      split = 0;
      own = turn % M::kSplits < queries ? 1u << turn % M::kSplits : 0;
      return;
    }
    const i32 sequence_before = __shfl_up_sync(~0u, sequence, 1);
    const u32 bits_before = __shfl_up_sync(~0u, split_bits, 1);
    const bool first = lane == 0 || sequence != sequence_before;
    sequences = __ballot_sync(~0u, first) & all;
    const u32 alike = __ballot_sync(~0u, first || split_bits != bits_before) & all;
    // No more queries in a group than it takes to give each block of the head a split: a power of 2.
    const u32 enough_bits = max(32 - __clz(queries - 1) + split_bits, M::kSplitBits) - M::kSplitBits;
    const u32 size_bits = M::kQueriesTogether < kMaxQueries ? min(enough_bits, highest(M::kQueriesTogether)) : enough_bits;
    const bool begin = lane < queries && ((mine - highest(alike & up_to(mine))) & ((1u << size_bits) - 1)) == 0;
    begins = __ballot_sync(~0u, begin);
    u32 before = begin ? 1u << split_bits : 0;  // splits of earlier groups
#pragma unroll
    for (u32 o = 1; o < kMaxQueries; o *= 2) {
      const u32 x = __shfl_up_sync(~0u, before, o);
      if (lane >= o) before += x;
    }
    before -= begin ? 1u << split_bits : 0;
    // Whose turn it is moves on with the layers, so that all blocks have as much to do.
    split = (turn - before) % M::kSplits;
    own = __ballot_sync(~0u, begin && split >> split_bits == 0);
  }
  __device__ __forceinline__ QueryGroup at(const Control& c, u32 begin) const {
    if (all_unsplit) return QueryGroup{begin, begin + 1, 0, 0, 0, c.sequence[0], c.position[0], c.position[begin], c.position[begin]};
    const u32 later = begins & ~up_to(begin), end = later ? __ffs(later) - 1 : queries;
    const u32 fresh = highest(sequences & up_to(begin));
    return QueryGroup{begin, end, fresh, __shfl_sync(~0u, split_bits, begin), __shfl_sync(~0u, split, begin),
                       c.sequence[begin], c.position[fresh], c.position[begin], c.position[end - 1]};
  }
  __device__ __forceinline__ OwnQueries own_queries(const Control& c, u32 lane) const {
    if (queries == 1 && split_bits == 0) return {1, 1, 1};
    if (all_unsplit) return {own, 2 * own - 1, own};
    const u32 mine = min(lane, queries - 1), begin = highest(begins & up_to(mine)), chunk = c.position[mine] / (kChunkPages * kPagePositions);
    const bool is_query = lane < queries, is_own = is_query && (own >> begin & 1);
    const u32 later = sequences & ~up_to(lane), end = later ? __ffs(later) - 1 : queries;
    const bool serves = (chunk & ((1u << split_bits) - 1)) == __shfl_sync(~0u, split, begin);
    return {__ballot_sync(~0u, is_own), __ballot_sync(~0u, is_query && (own >> begin & ((1u << (end - begin)) - 1)) != 0),
            __ballot_sync(~0u, is_own && serves)};
  }
};

// The pages of a group that one split owns in one layer; the producer and the consumers walk them alike.
template <class M>
struct PageWalk {
  i32 page, last, first_seen, last_seen;
  u32 split_bits;

  __device__ __forceinline__ PageWalk(const QueryGroup& g, u32 layer) : split_bits(g.split_bits) {
    first_seen = window_start<M>(layer, g.first_position);
    last_seen = g.last_position;
    page = first_seen / kPagePositions;
    last = last_seen / kPagePositions;
    const u32 chunk = page / kChunkPages, behind = (g.split - chunk) & ((1u << split_bits) - 1);
    if (behind > 0) page = (chunk + behind) * kChunkPages;
  }
  __device__ __forceinline__ bool any() const { return page <= last; }
  // The page that comes `steps` after this one.
  __device__ __forceinline__ i32 ahead(u32 steps) const {
    const u32 in_chunk = page % kChunkPages + steps;
    return page - page % kChunkPages + (in_chunk / kChunkPages << split_bits) * kChunkPages + in_chunk % kChunkPages;
  }
  __device__ __forceinline__ void next() { page = ahead(1); }
  // Pages from this one on.
  __device__ __forceinline__ u32 count() const {
    if (!any()) return 0;
    const u32 in_chunk = page % kChunkPages, span = last - page + in_chunk, chunks = span / kChunkPages;
    const u32 others = chunks & ((1u << split_bits) - 1);  // since the split's last one
    return ((chunks >> split_bits) + 1) * kChunkPages - in_chunk - (others ? 0 : kChunkPages - 1 - span % kChunkPages);
  }
  // Which of the split's pages of the whole sequence this one is.
  __device__ __forceinline__ u32 ordinal() const {
    return (page / kChunkPages >> split_bits) * kChunkPages + page % kChunkPages;
  }
  __device__ __forceinline__ bool has(i32 of_page, u32 half_page) const {
    const i32 start = of_page * kPagePositions + half_page * kHalfPagePositions;
    return start <= last_seen && start + static_cast<i32>(kHalfPagePositions) > first_seen;
  }
  __device__ __forceinline__ u32 first_half_page() const { return has(page, 0) ? 0 : 1; }
  __device__ __forceinline__ u32 last_half_page() const { return has(page, 1) ? 1 : 0; }
};

// The splits that hold something a query sees: `count` of them from `first` on, in turn.
template <class M>
struct Splits {
  u32 first, count, mask;

  __device__ __forceinline__ Splits(const Control& control, u32 layer, u32 query) {
    constexpr u32 kChunkPositions = kChunkPages * kPagePositions;
    const i32 position = control.position[query];
    const u32 to = position / kChunkPositions;
    first = window_start<M>(layer, position) / kChunkPositions;
    mask = (1u << split_bits_of<M>(layer, position)) - 1;
    count = min(mask, to - first) + 1;
  }
  __device__ __forceinline__ u32 at(u32 i) const { return first + i & mask; }
};
