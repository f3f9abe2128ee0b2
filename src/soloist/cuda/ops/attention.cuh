// qkv, attention over the paged KV cache, and the projection after it.
//
// Every KV head has kSplits blocks. How many of them share the cache of a column, its splits, follows from
// how many positions it sees: chunks of kChunkPages pages (of 64 positions) go round over them. A column of one
// split is near: its block publishes finished attention. Of a far one the splits' partial results are merged.
// The cache streams through the weight ring. Inside a block kSoftmaxLanes running softmaxes take the
// granules (32 positions) in turn. Which split and lane a granule belongs to depends on the column's position
// only, and every merge has a fixed order: so a column's bits do not depend on the other columns. Which
// block serves a split does depend on them: splits of all columns are dealt to the head's blocks in turn.
#pragma once
#include "ops/hidden.cuh"

inline constexpr u32 kHeadRows = (kGroup + 2) * kHeadDim;  // rows of q, k, v of one KV head
// Warps that share a granule: for other rows each or, where one column leaves them none, for other values. Warps of a
// quarter of the SM, which multiply in turn, do not share one.
inline constexpr u32 kLaneWarps = kRowTiles / kWarpTiles;
inline constexpr bool kSplitsValues = kMostColumns == 1 && kGroup <= 16 * kWarpTiles && kHeadDim % (32 * kLaneWarps) == 0;
inline constexpr u32 kTileSets = kSplitsValues ? 1 : kLaneWarps, kValueSets = kSplitsValues ? kLaneWarps : 1;
inline constexpr u32 kSetDim = kHeadDim / kValueSets;
// Rows 0 … 7 of a tile, and 8 … 15 where there may be so many.
inline constexpr u32 kRowHalves = kMostColumns * kGroup > 8 ? 2 : 1;
// A warp that takes several tiles knows a way for up to 8 rows, such as one column's: it multiplies a quarter as much.
inline constexpr bool kKnowsFewRows = kWarpTiles > 1;

__device__ __forceinline__ i32 window_start(u32 layer, i32 position) {
  const i32 w = kWindow[layer];
  return w ? max(0, position - w + 1) : 0;
}
// Blocks of a KV head that share the cache of a column: 2 to this power, up to all of them.
__device__ __forceinline__ u32 split_bits_of(u32 layer, i32 position) {
  const u32 seen = position - window_start(layer, position);
  return seen < kNearPositions ? 0 : min(kSplitBits, 32 - __clz(seen / kSplitPositions));
}

// What the block serves: a KV head, as one of its blocks. The last blocks may have none.
__device__ __forceinline__ u32 own_head(const Context& cx) { return cx.block / kSplits; }
__device__ __forceinline__ u32 own_place(const Context& cx) { return cx.block % kSplits; }

// A warp's part in attention.
__device__ __forceinline__ u32 softmax_lane(const Context& cx) { return kLaneWarps > 1 ? cx.warp % kSoftmaxLanes : cx.warp; }
__device__ __forceinline__ u32 row_set(const Context& cx) { return kTileSets > 1 ? cx.warp / kSoftmaxLanes : 0; }
__device__ __forceinline__ u32 value_set(const Context& cx) { return kValueSets > 1 ? cx.warp / kSoftmaxLanes : 0; }

// Consecutive columns of one sequence at rising positions, which have as many splits.
struct ColumnGroup {
  u32 begin, end;
  u32 fresh;  // from this column on, the sequence's keys and values come with this round
  u32 split_bits, split;  // how many splits, and which one is the block's
  i32 sequence, first_fresh, first_position, last_position;
};

__device__ __forceinline__ u32 highest(u32 bits) { return 31 - __clz(bits); }
__device__ __forceinline__ u32 up_to(u32 bit) { return (2u << bit) - 1; }

// The groups of a layer and those whose cache the block has a split of: bits of their first columns. Executed by
// whole warps; what has no set of bits, lane c knows of column c.
struct ColumnGroups {
  u32 begins, own, sequences;
  u32 columns, split_bits, split;

  __device__ __forceinline__ ColumnGroups(const Control& c, u32 layer, u32 place, u32 columns, u32 lane)
      : columns(columns) {
    if (columns == 1) {  // what follows comes to this as well
      begins = sequences = 1;
      split_bits = split_bits_of(layer, c.position[0]);
      split = (place - layer / kTurnLayers) % kSplits;
      own = split >> split_bits == 0;
      return;
    }
    const u32 mine = min(lane, columns - 1), all = (1u << columns) - 1;
    const i32 sequence = c.sequence[mine];
    split_bits = split_bits_of(layer, c.position[mine]);
    const i32 sequence_before = __shfl_up_sync(~0u, sequence, 1);
    const u32 bits_before = __shfl_up_sync(~0u, split_bits, 1);
    const bool first = lane == 0 || sequence != sequence_before;
    sequences = __ballot_sync(~0u, first) & all;
    const u32 alike = __ballot_sync(~0u, first || split_bits != bits_before) & all;
    // No more columns in a group than it takes to give each block of the head a split: a power of 2.
    const u32 size_bits = max(32 - __clz(columns - 1) + split_bits, kSplitBits) - kSplitBits;
    const bool begin = lane < columns && ((mine - highest(alike & up_to(mine))) & ((1u << size_bits) - 1)) == 0;
    begins = __ballot_sync(~0u, begin);
    u32 before = begin ? 1u << split_bits : 0;  // splits of earlier groups
#pragma unroll
    for (u32 o = 1; o < kMaxColumns; o *= 2) {
      const u32 x = __shfl_up_sync(~0u, before, o);
      if (lane >= o) before += x;
    }
    before -= begin ? 1u << split_bits : 0;
    // Whose turn it is moves on with the layers, so that all blocks have as much to do.
    split = (place - before - layer / kTurnLayers) % kSplits;
    own = __ballot_sync(~0u, begin && split >> split_bits == 0);
  }
  __device__ __forceinline__ ColumnGroup at(const Control& c, u32 begin) const {
    const u32 later = begins & ~up_to(begin), end = later ? __ffs(later) - 1 : columns;
    const u32 fresh = highest(sequences & up_to(begin));
    return ColumnGroup{begin, end, fresh, __shfl_sync(~0u, split_bits, begin), __shfl_sync(~0u, split, begin),
                       c.sequence[begin], c.position[fresh], c.position[begin], c.position[end - 1]};
  }
  // Columns whose queries the block needs.
  __device__ __forceinline__ u32 queried(u32 lane) const {
    return __ballot_sync(~0u, lane < columns && (own >> highest(begins & up_to(lane)) & 1));
  }
  // Columns whose new keys and values it needs: all of a sequence before the end of an own group.
  __device__ __forceinline__ u32 needed(u32 lane) const {
    const u32 later = sequences & ~up_to(lane), end = later ? __ffs(later) - 1 : columns;
    const u32 from = lane < columns ? highest(begins & up_to(lane)) : 0;
    return __ballot_sync(~0u, lane < columns && (own >> from & ((1u << (end - from)) - 1)) != 0);
  }
  // Columns whose new keys and values it stores.
  __device__ __forceinline__ u32 stored(const Control& c, u32 lane) const {
    if (columns == 1 && split_bits == 0) return 1;
    const u32 mine = min(lane, columns - 1), begin = highest(begins & up_to(mine));
    const u32 serving = __shfl_sync(~0u, split, begin), chunk = c.position[mine] / (kChunkPages * kPagePositions);
    return __ballot_sync(~0u, lane < columns && (own >> begin & 1) && (chunk & ((1u << split_bits) - 1)) == serving);
  }
};

// The pages of a group that one split owns in one layer; the producer and the consumers walk them alike.
struct PageWalk {
  i32 page, last, first_seen, last_seen;
  u32 split_bits;

  __device__ __forceinline__ PageWalk(const ColumnGroup& g, u32 layer) : split_bits(g.split_bits) {
    first_seen = window_start(layer, g.first_position);
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
  __device__ __forceinline__ bool has(i32 of_page, u32 granule) const {
    const i32 start = of_page * kPagePositions + granule * kGranulePositions;
    return start <= last_seen && start + static_cast<i32>(kGranulePositions) > first_seen;
  }
  __device__ __forceinline__ u32 first_granule() const { return has(page, 0) ? 0 : 1; }
  __device__ __forceinline__ u32 last_granule() const { return has(page, 1) ? 1 : 0; }
};

__device__ __forceinline__ u64 granule_offset(u64 page_values, i32 page_id, u32 layer, u32 head, u32 granule) {
  return granule_place(page_values, page_id, layer, lane_here() * kKvHeads + head, granule);
}

__device__ __forceinline__ float* projected(const Context& cx, u32 epoch, u32 column) {
  return reinterpret_cast<float*>(turn(cx.params, kWsProjected, kWsProjectedBytes, epoch)) + column * (Qkv::kUnits * 8);
}

// Products with the activations as they came: what their norm makes of them, attention adds, since the squares that it
// follows from come last. It is known before the block attends.
__device__ __forceinline__ void qkv(Context& cx) {
  const u32 units = num_units<Qkv>(cx.block), first = first_unit<Qkv>(cx.block) * 8, in = cx.next_in();
  ++cx.layers_done;
  GlobalOperand<Qkv> operand(stream_operand<InStream>(cx, in), cx.warp, cx.lane, cx.columns);
  Scale<InStream> scale;
  Sums<Qkv> sums;
  multiply_owned<Qkv>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] {
    scale.load(cx, in);
    cx.mark();
  });
  cx.mark();
  Reduction reduction(cx, Qkv::kTiles * 16);
  float* now = projected(cx, cx.layers_done, cx.warp) + first;
  reduction.for_each_part(cx, sums, units, units * 8, [&](u32 start, u32 end) {
    if (cx.warp >= cx.columns) return;
#pragma unroll 1
    for (u32 r = start + cx.lane; r < end; r += 32) store_exchanged(now + r, present(reduction.get(cx.warp, r - start)));
  });
  scale.settle(cx, in);
  cx.mark();
}

// Cosines and sines of the round's positions come to shared memory once a round. Warp c serves column c.
__device__ __forceinline__ void load_rope(const Context& cx) {
  if (cx.warp >= cx.columns) return;
  const float2* from = cx.params.rope + static_cast<u64>(cx.shared.control().position[cx.warp]) * (kHeadDim / 2);
#pragma unroll 1
  for (u32 p = cx.lane; p < kHeadDim / 2; p += 32) cx.shared.rope()[cx.warp * (kHeadDim / 2) + p] = __ldg(from + p);
}

// Where queries lie in shared memory: as the lanes of a warp read them for the first operand of m16n8k16,
// [tile of 16 rows][32 of D][multiply][lane][16 bytes].
__device__ __forceinline__ u32 query_offset(u32 row, u32 d) {
  const u32 lane = row % 8 * 4 + d % 32 / 8, word = d % 4 / 2 * 2 + row % 16 / 8;
  return ((row / 16 * (kHeadDim / 32) + d / 32) * 2 + d % 8 / 4) * 512 + lane * 16 + word * 4 + d % 2 * 2;
}
constexpr u32 kNoRow = ~0u;

// One head vector [D] of a column, in pairs (d, d + D/2): norm, rope, rounding. Executed by a warp.
struct HeadVector {
  static constexpr u32 kHalf = kHeadDim / 2, kPairs = (kHalf + 31) / 32;
  float low_norm[2][kPairs], high_norm[2][kPairs];  // of queries and keys

  // Asked for before q, k, v are there.
  __device__ __forceinline__ void load_norms(const float* vectors, u32 lane) {
    if constexpr (kQkNorm) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i)
#pragma unroll
        for (u32 j = 0; j < kPairs; ++j) {
          const float* norm = vectors + (i ? kVecKNorm : kVecQNorm) + min(lane + 32 * j, kHalf - 1);
          low_norm[i][j] = __ldg(norm);
          high_norm[i][j] = __ldg(norm + kHalf);
        }
    }
  }
  // `turned` is null where nothing is rotated; a query has a row, a key lies as it comes. No branches before the
  // stores, so that several vectors overlap.
  __device__ __forceinline__ void finish(float (&low)[kPairs], float (&high)[kPairs], u8* to, u32 row, bool is_key,
                                         const float2* turned, u32 lane, bool stores) const {
    if constexpr (kQkNorm) {
      float squares = 0.0f;
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) squares += low[j] * low[j] + high[j] * high[j];
      const float scale = rsqrtf(warp_sum(squares) * (1.0f / kHeadDim) + kEpsilon);
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) {
        low[j] *= scale * (is_key ? low_norm[1][j] : low_norm[0][j]);
        high[j] *= scale * (is_key ? high_norm[1][j] : high_norm[0][j]);
      }
    }
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = lane + 32 * j;
      if (p >= kHalf) continue;
      const float2 cs = turned ? turned[p] : make_float2(1.0f, 0.0f);
      const float x = low[j] * cs.x - high[j] * cs.y, y = high[j] * cs.x + low[j] * cs.y;
      const u32 at = row == kNoRow ? p * 2 : query_offset(row, p);
      const u32 then = row == kNoRow ? (p + kHalf) * 2 : query_offset(row, p + kHalf);
      if (!stores) continue;
      *reinterpret_cast<u16*>(to + at) = to_half(x);
      *reinterpret_cast<u16*>(to + then) = to_half(y);
    }
  }
};

// The place of the n-th bit.
__device__ __forceinline__ u32 nth_bit(u32 bits, u32 n, u32 lane) {
  return __ffs(__ballot_sync(~0u, (bits >> lane & 1) && __popc(bits & ((1u << lane) - 1)) == n)) - 1;
}

// Queries and keys that the block needs come to shared memory: `vectors` in all, of every warp's the next kAtOnce
// from `first` on; and with them values, one to each of the last warps. The trip to the L2 is long, so that all
// are asked for together. `factors_known` returns once every column's is.
template <u32 kAtOnce, class FactorsKnown>
__device__ __forceinline__ void prepare_vectors(const Context& cx, const HeadVector& vector, u32 layer, u32 head,
                                                u32 queried, u32 needed, u32 first, u32 vectors, bool has_value,
                                                const FactorsKnown& factors_known) {
  constexpr u32 kPairs = HeadVector::kPairs, kHalf = HeadVector::kHalf;
  const Shared shared = cx.shared.anew();
  const u32 queries = vectors - __popc(needed);
  const float* source = projected(cx, cx.layers_done, 0) + head * kHeadRows;
  // The last ones are those of values.
  float low[kAtOnce + 1][kPairs], high[kAtOnce + 1][kPairs];
  u32 column[kAtOnce + 1], member[kAtOnce + 1];
#pragma unroll
  for (u32 v = 0; v < kAtOnce; ++v) {
    const u32 i = min(first + v * kConsumerWarps, vectors - 1);  // what there is none of is not stored
    const bool query = i < queries;
    column[v] = cx.columns == 1 ? 0 : nth_bit(query ? queried : needed, query ? i / kGroup : i - queries, cx.lane);
    member[v] = query ? i % kGroup : kGroup;
  }
  column[kAtOnce] = cx.columns == 1 || !has_value ? 0 : nth_bit(needed, kConsumerWarps - 1 - cx.warp, cx.lane);
  member[kAtOnce] = kGroup + 1;
  float low_bias[kAtOnce + 1][kPairs], high_bias[kAtOnce + 1][kPairs];
  if constexpr (kQkvBias) {
#pragma unroll
    for (u32 v = 0; v <= kAtOnce; ++v)
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) {
        const float* bias = cx.layer_vectors(layer) + kVecQkvBias + head * kHeadRows + member[v] * kHeadDim;
        low_bias[v][j] = __ldg(bias + min(cx.lane + 32 * j, kHalf - 1));
        high_bias[v][j] = __ldg(bias + kHalf + min(cx.lane + 32 * j, kHalf - 1));
      }
  }
#pragma unroll 1
  for (;;) {
    bool ready = true;
#pragma unroll
    for (u32 v = 0; v <= kAtOnce; ++v) {
      const float* raw = source + column[v] * (Qkv::kUnits * 8) + member[v] * kHeadDim;
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) {
        const u32 p = cx.lane + 32 * j;
        low[v][j] = high[v][j] = 0.0f;
        if (p >= kHalf || (v == kAtOnce && !has_value)) continue;
        low[v][j] = load_exchanged(raw + p);
        high[v][j] = load_exchanged(raw + p + kHalf);
      }
    }
#pragma unroll
    for (u32 v = 0; v <= kAtOnce; ++v)
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) ready = ready && is_present(low[v][j]) && is_present(high[v][j]);
    if (__all_sync(~0u, ready)) break;
  }
  factors_known();
#pragma unroll
  for (u32 v = 0; v <= kAtOnce; ++v) {
    const float factor = shared.control().factor[column[v]];
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      low[v][j] *= factor;
      high[v][j] *= factor;
      if constexpr (kQkvBias) {
        low[v][j] += low_bias[v][j];
        high[v][j] += high_bias[v][j];
      }
    }
  }
  u8* fresh = shared.new_kv();
#pragma unroll
  for (u32 v = 0; v < kAtOnce; ++v) {
    const u32 c = column[v], m = member[v];
    vector.finish(low[v], high[v], m < kGroup ? shared.queries() : fresh + c * (4 * kHeadDim),
                  m < kGroup ? c * kGroup + m : kNoRow, m == kGroup,
                  kRotated[layer] ? shared.rope() + c * (kHeadDim / 2) : nullptr, cx.lane,
                  first + v * kConsumerWarps < vectors);
  }
  if (!has_value) return;
  u16* value = reinterpret_cast<u16*>(fresh) + (column[kAtOnce] * 2 + 1) * kHeadDim + cx.lane;
#pragma unroll
  for (u32 j = 0; j < kPairs; ++j) {
    if (cx.lane + 32 * j >= kHalf) continue;
    value[32 * j] = to_half(low[kAtOnce][j]);
    value[32 * j + kHalf] = to_half(high[kAtOnce][j]);
  }
}
__device__ __forceinline__ void prepare_heads(const Context& cx, u32 layer, u32 head, const ColumnGroups& groups) {
  static_assert(kMaxColumns <= kConsumerWarps, "a value to each warp");
  constexpr u32 kAtOnce = 2;
  HeadVector vector;
  vector.load_norms(cx.layer_vectors(layer), cx.lane);
  bool known = false;
  const auto factors_known = [&] {  // each warp meets the others once, the first time
    if (!known) cx.sync();
    known = true;
  };
  if (cx.columns == 1) {
#pragma unroll 1
    for (u32 first = cx.warp; first < kGroup + 1 || first == kConsumerWarps - 1; first += kConsumerWarps)
      prepare_vectors<1>(cx, vector, layer, head, 1, 1, first, kGroup + 1, first == kConsumerWarps - 1, factors_known);
  } else {
    const u32 queried = groups.queried(cx.lane), needed = groups.needed(cx.lane);
    const u32 vectors = __popc(queried) * kGroup + __popc(needed);
#pragma unroll 1
    for (u32 first = cx.warp; first < vectors || first == cx.warp; first += kAtOnce * kConsumerWarps)
      prepare_vectors<kAtOnce>(cx, vector, layer, head, queried, needed, first, vectors,
                               first == cx.warp && kConsumerWarps - 1 - cx.warp < __popc(needed), factors_known);
  }
  factors_known();
  cx.sync();
}

// Keys and values of columns `begin` … `end - 1` join a granule that starts at position `start`: in the
// ring's slot, or in the pool. Executed by a warp.
__device__ __forceinline__ void append(const Context& cx, u32 begin, u32 end, i32 start, u8* keys, u8* values) {
  constexpr u32 kAtOnce = 2, kValues = kHeadDim / 32;
#pragma unroll 1
  for (u32 c = begin; c < end; c += kAtOnce) {
    uint4 key[kAtOnce];
    u16 value[kAtOnce][kValues];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u16* fresh = reinterpret_cast<const u16*>(cx.shared.new_kv()) + min(c + i, end - 1) * 2 * kHeadDim;
      key[i] = reinterpret_cast<const uint4*>(fresh)[min(cx.lane, kHeadDim / 8 - 1)];
#pragma unroll
      for (u32 d = 0; d < kValues; ++d) value[i][d] = fresh[kHeadDim + d * 32 + cx.lane];
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const i32 row = cx.shared.control().position[min(c + i, end - 1)] - start;
      if (c + i >= end || row < 0 || row >= static_cast<i32>(kGranulePositions)) continue;
      if (cx.lane < kHeadDim / 8)
        reinterpret_cast<uint4*>(keys + row * kKeyRowBytes)[key_chunk(row, cx.lane)] = key[i];
#pragma unroll
      for (u32 d = 0; d < kValues; ++d)
        reinterpret_cast<u16*>(values)[value_place(row, d * 32 + cx.lane)] = value[i][d];
    }
  }
}

// The first operand of a multiply of 8 rows: those of one half of a tile.
__device__ __forceinline__ uint4 lower_rows(const uint4& tile, bool upper) {
  return make_uint4(upper ? tile.y : tile.x, 0, upper ? tile.w : tile.z, 0);
}

// Running softmaxes over kWarpTiles · 16 rows (column, query head): sums of values, maxima, sums of weights.
struct Softmax {
  float out[kWarpTiles][kSetDim / 8][4];
  float best[kWarpTiles][kRowHalves], total[kWarpTiles][kRowHalves];  // best: of scores to base 2

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m) {
#pragma unroll
      for (u32 n = 0; n < kSetDim / 8; ++n)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
#pragma unroll
      for (u32 r = 0; r < kRowHalves; ++r) best[m][r] = -kInfinity, total[m][r] = 0.0f;
    }
  }

  // Lane (g, q) holds rows g and g + 8 of each tile and positions 8q … 8q + 7 of the granule. `queries`: the
  // lane's part of the first tile, in shared memory; bits of `tiles`: which of them matter; `values`: from the warp's
  // first dimension on; `last`: the position of each row; `partly`: some row does not see some position.
  // Of 8 rows, kTiles = kHalves = 1, `upper` says which half of a tile they are; they come to the same bits in the lower.
  template <u32 kTiles, u32 kHalves>
  __device__ __forceinline__ void add(u32 queries, u32 tiles, bool upper, u32 keys, u32 values, i32 start,
                                      const i32 (&last)[kWarpTiles][kRowHalves], i32 window, bool partly, u32 lane) {
    const u32 g = lane / 4, q = lane % 4, swapped = (g & 1) * kSwappedKeyBytes;
    float score[kTiles][4][4];
#pragma unroll
    for (u32 m = 0; m < kTiles; ++m)
#pragma unroll
      for (u32 t = 0; t < 4; ++t) score[m][t][0] = score[m][t][1] = score[m][t][2] = score[m][t][3] = 0.0f;
    // Lane (g, q) reads keys 8 (g / 2) + g % 2, and each second one after it; see key_chunk for the swap.
    const u32 row = keys + (8 * (g >> 1) + (g & 1)) * kKeyRowBytes + q * 16;
    const u32 even = row + swapped, odd = row - swapped;
#pragma unroll(kHeadDim % 64 == 0 ? 2 : 3)
    for (u32 k = 0; k < kHeadDim / 32; ++k) {
      uint4 x[4];
#pragma unroll
      for (u32 t = 0; t < 4; ++t) x[t] = load_shared((k % 2 ? odd : even) + k * 64 + 2 * t * kKeyRowBytes);
#pragma unroll
      for (u32 m = 0; m < kTiles; ++m) {
        const u32 at = queries + (m * (kHeadDim / 32) + k) * 1024;
        uint4 low = load_shared(at), high = load_shared(at + 512);
        if (kHalves < kRowHalves) low = lower_rows(low, upper), high = lower_rows(high, upper);
#pragma unroll
        for (u32 t = 0; t < 4; ++t) mma(score[m][t], low.x, low.y, low.z, low.w, x[t].x, x[t].y);
#pragma unroll
        for (u32 t = 0; t < 4; ++t) mma(score[m][t], high.x, high.y, high.z, high.w, x[t].z, x[t].w);
      }
    }
    u32 weight[kTiles][4][2];
#pragma unroll
    for (u32 m = 0; m < kTiles; ++m) {
      if (kTiles > 1 && !(tiles >> m & 1)) {  // nobody asks for these rows
#pragma unroll
        for (u32 t = 0; t < 4; ++t) weight[m][t][0] = weight[m][t][1] = 0;
        continue;
      }
#pragma unroll
      for (u32 r = 0; r < kHalves; ++r) {
        if (partly) {
#pragma unroll
          for (u32 t = 0; t < 4; ++t)
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
              const i32 position = start + static_cast<i32>(8 * q + 2 * t + e);
              const bool seen = position <= last[m][r] && (window == 0 || position > last[m][r] - window);
              if (!seen) score[m][t][2 * r + e] = -kInfinity;
            }
        }
        float top = -kInfinity;
#pragma unroll
        for (u32 t = 0; t < 4; ++t) top = fmaxf(top, fmaxf(score[m][t][2 * r], score[m][t][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(best[m][r], top * kScoreScale);
        const float base = top == -kInfinity ? 0.0f : top;
        const float shrink = exp2_fast(best[m][r] - base);
        const bool shrinks = __any_sync(~0u, shrink != 1.0f && best[m][r] != -kInfinity);
        best[m][r] = top;
        float sum = 0.0f;
#pragma unroll
        for (u32 t = 0; t < 4; ++t)
#pragma unroll
          for (u32 e = 0; e < 2; ++e) {
            float& s = score[m][t][2 * r + e];
            s = exp2_fast(s * kScoreScale - base);
            sum += s;
          }
        total[m][r] = total[m][r] * shrink + sum;
        if (shrinks) {
#pragma unroll
          for (u32 n = 0; n < kSetDim / 8; ++n) {
            out[m][n][2 * r] *= shrink;
            out[m][n][2 * r + 1] *= shrink;
          }
        }
      }
#pragma unroll
      for (u32 t = 0; t < 4; ++t) {
        weight[m][t][0] = pack_pair(score[m][t][0], score[m][t][1]);
        weight[m][t][1] = kHalves == 2 ? pack_pair(score[m][t][2], score[m][t][3]) : 0;
      }
    }
#pragma unroll
    for (u32 n = 0; n < kSetDim / 8; n += 4) {
      uint4 v[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        v[i] = load_shared(values + (8 * (n + i) + g) * kValueRowBytes + q * 16);
#pragma unroll
      for (u32 m = 0; m < kTiles; ++m) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
          mma(out[m][n + i], weight[m][0][0], weight[m][0][1], weight[m][1][0], weight[m][1][1], v[i].x, v[i].y);
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
          mma(out[m][n + i], weight[m][2][0], weight[m][2][1], weight[m][3][0], weight[m][3][1], v[i].z, v[i].w);
      }
    }
  }
};

__device__ __forceinline__ float* partial_values(const Context& cx, u32 epoch, u32 column, u32 query_head) {
  return reinterpret_cast<float*>(turn(cx.params, kWsPartial, kWsPartialBytes, epoch)) +
         (column * kQueryHeads + query_head) * (kSplits * kHeadDim);
}
__device__ __forceinline__ float2* partial_stats(const Context& cx, u32 epoch, u32 column, u32 query_head) {
  return reinterpret_cast<float2*>(turn(cx.params, kWsPartialStats, kWsPartialStatsBytes, epoch)) +
         (column * kQueryHeads + query_head) * kSplits;
}

__device__ __forceinline__ u8* attended_operand(const Context& cx, u32 epoch) {
  return turn(cx.params, kWsAttended, kWsAttendedBytes, epoch);
}

// Columns whose running softmaxes lie in shared memory until no more fit there or none is left: they are merged
// together, and a warp that has none of one group's rows goes on with the next group's.
inline constexpr u32 kColumnLanesBytes = kSoftmaxLanes * kGroup * kHeadDim * 4, kFitting = kReduceBytes / kColumnLanesBytes;
static_assert(kFitting > 0, "one column at least");
inline constexpr u32 kGatheredColumns = kFitting < kMostColumns ? kFitting : kMostColumns;
// Rows swap groups of 8 values, so that lanes with different rows do not share banks.
inline constexpr u32 kRowSwap = kHeadDim % 64 == 0 ? 7 : 3;

// What is to become of a gathered column: its attention (near), or a split's part of it (far).
struct Gathered {
  u32 bits;  // near, column, split

  static __device__ __forceinline__ Gathered of(u32 column, const ColumnGroup& g) {
    return {(g.split_bits == 0 ? 1u : 0u) | column << 1 | g.split << 4};
  }
  __device__ __forceinline__ bool near() const { return bits & 1; }
  __device__ __forceinline__ u32 column() const { return bits >> 1 & 7; }
  __device__ __forceinline__ u32 split() const { return bits >> 4; }
};
static_assert(kMaxColumns <= 8, "three bits");

struct LaneMerge {
  u32 count = 0;    // of columns gathered
  Gathered newest;  // the last of them; of more, shared memory tells

  static __device__ __forceinline__ Gathered* gathered() {
    __shared__ u32 bits[kGatheredColumns];
    return reinterpret_cast<Gathered*>(bits);
  }

  // Softmaxes of a group's columns come to shared memory, [lane][row][D]; none of an empty split. `last`: no group comes
  // after it.
  __device__ __forceinline__ void gather(const Context& cx, const Softmax& softmax, const ColumnGroup& g, u32 first_row,
                                         u32 head, bool empty, bool last) {
    constexpr u32 kRows = kGatheredColumns * kGroup;
    const u32 dims = value_set(cx) * kSetDim, mine = softmax_lane(cx), q = cx.lane % 4;
    float* values = reinterpret_cast<float*>(cx.shared.reduce());
    float2* stats = cx.shared.stats();     // [lane][row]
    float totals[kWarpTiles][kRowHalves];  // every lane of a quad holds the maximum but only a part of the sum
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m)
#pragma unroll
      for (u32 i = 0; i < kRowHalves; ++i) {
        totals[m][i] = softmax.total[m][i];
        totals[m][i] += __shfl_xor_sync(~0u, totals[m][i], 1);
        totals[m][i] += __shfl_xor_sync(~0u, totals[m][i], 2);
      }
#pragma unroll 1
    for (u32 first = empty ? g.end : g.begin;;) {
      const u32 columns = min(kGatheredColumns - count, g.end - first);
#pragma unroll
      for (u32 m = 0; m < kWarpTiles; ++m)
#pragma unroll
        for (u32 i = 0; i < kRowHalves; ++i) {
          const u32 of_group = first_row + m * 16 + 8 * i + cx.lane / 4 - first * kGroup, row = count * kGroup + of_group;
          if (of_group >= columns * kGroup) continue;
          if (q == 0 && dims == 0) stats[mine * kRows + row] = make_float2(softmax.best[m][i], totals[m][i]);
          float2* to = reinterpret_cast<float2*>(values + (mine * kRows + row) * kHeadDim + 2 * q);
          const u32 swap = row & kRowSwap;
#pragma unroll
          for (u32 n = 0; n < kSetDim / 8; ++n)
            to[(dims / 8 + n ^ swap) * 4] = make_float2(softmax.out[m][n][2 * i], softmax.out[m][n][2 * i + 1]);
        }
      // All warps write the same.
      if (kGatheredColumns > 1 && cx.lane < columns) gathered()[count + cx.lane] = Gathered::of(first + cx.lane, g);
      newest = Gathered::of(first, g);
      count += columns;
      first += columns;
      if (count == kGatheredColumns || (last && first == g.end)) merge(cx, head);
      if (first == g.end) break;
    }
  }

  // What was gathered is merged, lane after lane, and published.
  __device__ __forceinline__ void merge(const Context& cx, u32 head) {
    constexpr u32 kRows = kGatheredColumns * kGroup;
    const float* values = reinterpret_cast<const float*>(cx.shared.reduce());
    const float2* stats = cx.shared.stats();
    u8* attended = attended_operand(cx, cx.layers_done);
    cx.sync();
#pragma unroll 1
    for (u32 i = cx.thread; i < count * kGroup * (kHeadDim / 2); i += kConsumerThreads) {
      const u32 row = i / (kHeadDim / 2), d = i % (kHeadDim / 2) * 2;
      const Gathered of = kGatheredColumns > 1 ? gathered()[row / kGroup] : newest;
      float2 part[kSoftmaxLanes];
      float top = -kInfinity;
#pragma unroll
      for (u32 v = 0; v < kSoftmaxLanes; ++v) {
        part[v] = stats[v * kRows + row];
        top = fmaxf(top, part[v].x);
      }
      const float base = top == -kInfinity ? 0.0f : top;
      float x = 0.0f, y = 0.0f, total = 0.0f;
#pragma unroll
      for (u32 v = 0; v < kSoftmaxLanes; ++v) {
        const float2 sum = *reinterpret_cast<const float2*>(values + (v * kRows + row) * kHeadDim + (d ^ (row & kRowSwap) * 8));
        const float weight = exp2_fast(part[v].x - base);
        x += sum.x * weight;
        y += sum.y * weight;
        total += part[v].y * weight;
      }
      const u32 query_head = head * kGroup + row % kGroup;
      if (of.near()) {
        const float scale = __fdividef(1.0f, total);
        store_exchanged(operand_value(attended, of.column(), query_head * kHeadDim + d),
                        present(pack_pair(x * scale, y * scale)));
        continue;
      }
      float* to = partial_values(cx, cx.layers_done, of.column(), query_head) + of.split() * kHeadDim;
      store_exchanged(to + d, present(x), present(y));
      if (d == 0)
        store_exchanged(partial_stats(cx, cx.layers_done, of.column(), query_head) + of.split(), present(top), present(total));
    }
    cx.sync();
    count = 0;
  }
};

// What a warp has to know of a group, computed while the queries are on their way: of the cache, the same in all
// lanes …
struct GroupWork {
  PageWalk walk;
  u32 skipped, end;  // granules, counted from the first page's first one
  u32 own;           // the first that may be this warp's, modulo kSoftmaxLanes

  __device__ __forceinline__ GroupWork(const Context& cx, const ColumnGroup& g, u32 layer)
      : walk(g, layer), skipped(0), end(0) {
    const u32 pages = walk.count();
    if (pages > 0) {
      skipped = walk.first_granule();
      end = 2 * pages - (walk.has(walk.ahead(pages - 1), 1) ? 0 : 1);
    }
    own = softmax_lane(cx) - walk.ordinal() * 2;
  }
  __device__ __forceinline__ i32 start(u32 granule) const {
    return walk.ahead(granule / 2) * static_cast<i32>(kPagePositions) + static_cast<i32>(granule % 2 * kGranulePositions);
  }
};
// … and of the rows.
struct GroupRows {
  u32 tiles = 0;  // bits: which of the warp's tiles hold rows of the group
  bool few;       // all of them are in one half of one tile
  u32 first;      // of the tiles, or of that half
  i32 last[kWarpTiles][kRowHalves];

  __device__ __forceinline__ GroupRows(const Context& cx, const ColumnGroup& g) {
    const u32 begin = g.begin * kGroup, end = g.end * kGroup, own = row_set(cx) * kWarpTiles * 16;
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m)
      if (own + m * 16 < end && own + m * 16 + 16 > begin) tiles |= 1u << m;
    few = kKnowsFewRows && tiles && begin / 8 == (end - 1) / 8;
    first = few ? begin / 8 * 8 : own;
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m)
#pragma unroll
      for (u32 i = 0; i < kRowHalves; ++i)
        last[m][i] = cx.shared.control().position[min((first + m * 16 + cx.lane / 4 + 8 * i) / kGroup, kMaxColumns - 1)];
  }
};

// Where threads have few registers, what a warp need not have at hand while it walks through the cache is parked in
// shared memory. All its lanes write and read the same.
struct Parked {
  u32 round, layer, layers_done, columns, reductions, own, stored, gathered;
  float scale;
  ColumnGroup group;
  GroupWork work;
};
__device__ __forceinline__ Parked& parked(const Context& cx) {
  __shared__ u32 of_warp[kConsumerWarps][sizeof(Parked) / 4];
  return *reinterpret_cast<Parked*>(of_warp[cx.warp]);
}
__device__ __forceinline__ void park(const Context& cx, u32 layer, u32 own, u32 stored, u32 gathered, const ColumnGroup& g,
                                     const GroupWork& work) {
  if constexpr (!kMovesRegisters) {
    parked(cx) = Parked{cx.round, layer, cx.layers_done, cx.columns, cx.reductions, own, stored, gathered, cx.scale, g, work};
    __syncwarp();
  }
}
__device__ __forceinline__ void unpark(Context& cx, u32& layer, u32& own, u32& stored, u32& gathered, ColumnGroup& g) {
  if constexpr (!kMovesRegisters) {
    const Parked& p = parked(cx);
    cx.round = p.round;
    layer = p.layer;
    cx.layers_done = p.layers_done;
    cx.columns = Columns{p.columns};
    cx.reductions = p.reductions;
    own = p.own;
    stored = p.stored;
    gathered = p.gathered;
    cx.scale = p.scale;
    g = p.group;
    cx.forget_addresses();
  }
}

__device__ __forceinline__ void attend_group(Context& cx, u32& layer, u32& own, u32& stored, ColumnGroup& group,
                                             const GroupWork& known, const GroupRows& rows, LaneMerge& merging) {
  if (known.end == 0 && merging.count == 0) return;
  park(cx, layer, own, stored, merging.count, group, known);
  const ColumnGroup& g = kMovesRegisters ? group : parked(cx).group;
  const GroupWork& work = kMovesRegisters ? known : parked(cx).work;
  const u32 queries = shared_address(cx.shared.queries()) + rows.first / 16 * (kHeadDim / 32) * 1024 + cx.lane * 16;
  const i32 window = kWindow[layer];
  Softmax softmax;
  softmax.clear();
  // Half of the ring at a time: the other half is filled meanwhile. A slot that holds a page begins with the
  // page's first granule that is seen.
  constexpr u32 kSlotGranules = kPageSlot ? 2 : 1, kSlots = kRingSlots / 2;
  bool appended = false;
#pragma unroll 1
  for (u32 begin = work.skipped; begin < work.end;) {
    const u32 origin = kPageSlot ? begin & ~1u : begin, stop = min(work.end, origin + kSlots * kSlotGranules);
    const u32 slots = (stop - origin + kSlotGranules - 1) / kSlotGranules;
    const auto keys_of = [&](u32 granule) {
      const u32 slot = (granule - origin) / kSlotGranules;
      const u32 in_slot = kPageSlot ? granule - max(begin, granule & ~1u) : 0;
      return cx.ring.wait(slot) + in_slot * (2 * kGranuleBytes);
    };
#pragma unroll 1
    for (u32 granule = begin + (work.own - begin) % kSoftmaxLanes; granule < stop; granule += kSoftmaxLanes) {
      if (!rows.tiles) break;
      const i32 start = work.start(granule), behind = start + static_cast<i32>(kGranulePositions);
      const u32 keys = keys_of(granule);
      if (behind > g.first_fresh) {
        // All warps that share the granule write the same.
        u8* slot = at_shared<u8>(keys);
        append(cx, g.fresh, g.end, start, slot, slot + kGranuleBytes);
        appended = true;
        __syncwarp();
      }
      const u32 values = keys + kGranuleBytes + value_set(cx) * kSetDim * kValueRowBytes;
      const bool partly = window || behind > g.first_position;
      if (kKnowsFewRows && rows.few)
        softmax.add<1, 1>(queries, 1, rows.first & 8, keys, values, start, rows.last, window, partly, cx.lane);
      else
        softmax.add<kWarpTiles, kRowHalves>(queries, rows.tiles, false, keys, values, start, rows.last, window, partly,
                                            cx.lane);
    }
    // For all slots, also those that other warps read, as copies need not land in order: who went ahead of one would
    // take its old phase for the next one's end.
    if (cx.lane < slots) cx.ring.wait(cx.lane);
    if (appended) fence_async_proxy_shared();  // slots are copied to again
    appended = false;
    __syncwarp();
    cx.ring.release(cx.lane, cx.ring.slot, slots);
    cx.ring.advance(slots);
    begin = stop;
  }
  unpark(cx, layer, own, stored, merging.count, group);
  merging.gather(cx, softmax, group, rows.first, own_head(cx), work.end == 0, (own & (own - 1)) == 0);
}

// The splits that hold something a column sees: `count` of them from `first` on, in turn.
struct Splits {
  u32 first, count, mask;

  __device__ __forceinline__ Splits(const Control& control, u32 layer, u32 column) {
    constexpr u32 kChunkPositions = kChunkPages * kPagePositions;
    const i32 position = control.position[column];
    const u32 to = position / kChunkPositions;
    first = window_start(layer, position) / kChunkPositions;
    mask = (1u << split_bits_of(layer, position)) - 1;
    count = min(mask, to - first) + 1;
  }
  __device__ __forceinline__ u32 at(u32 i) const { return first + i & mask; }
};

// Partial results of several splits: eight values, and what they are scaled by.
inline constexpr u32 kMergeLanes = 4, kMergeSplits = 4;  // splits that each of so many lanes asks for at once
struct Merging {
  float top = -kInfinity, total = 0.0f, sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};

  __device__ __forceinline__ void scale(float weight) {
    total *= weight;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) sum[n] *= weight;
  }
  // Those of one lane; where there are few splits, each lane has one.
  __device__ __forceinline__ void add(const Splits& splits, u32 lane, const float2* stats, const float* values) {
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
          low[j] = load_exchanged4(values + split * kHeadDim);
          high[j] = load_exchanged4(values + split * kHeadDim + 4);
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

// Far columns: the blocks of a head share the work of merging its splits' results and publish the outcome. Four
// lanes merge eight values.
__device__ __forceinline__ void merge_far(const Context& cx, u32 layer, u32 head, u32 place) {
  constexpr u32 kPieces = kGroup * kHeadDim / 8, kAtOnce = kConsumerThreads / kMergeLanes;
  const Control& control = cx.shared.control();
  const u32 far = __ballot_sync(~0u, split_bits_of(layer, control.position[min(cx.lane, cx.columns - 1)]) > 0);
  if (!far) return;
  u8* now = attended_operand(cx, cx.layers_done);
  const u32 pieces = cx.columns * kPieces, q = cx.lane % kMergeLanes;
#pragma unroll 1
  for (u32 i = cx.thread / kMergeLanes * kSplits + place; __any_sync(~0u, i < pieces); i += kAtOnce * kSplits) {
    const u32 column = min(i / kPieces, cx.columns - 1), k = i % kPieces * 8;
    const bool valid = i < pieces && (far >> column & 1);
    Merging merging;
    if (valid)
      merging.add(Splits(control, layer, column), q,
                  partial_stats(cx, cx.layers_done, column, head * kGroup + k / kHeadDim),
                  partial_values(cx, cx.layers_done, column, head * kGroup + k / kHeadDim) + k % kHeadDim);
    __syncwarp();
#pragma unroll
    for (u32 apart = 1; apart < kMergeLanes; apart *= 2) merging.join(apart);
    if (!valid || q != 0) continue;
    const float scale = 1.0f / merging.total;
    const float(&x)[8] = merging.sum;
    store_exchanged(operand_value(now, column, head * kGroup * kHeadDim + k),
                    make_uint4(present(pack_pair(x[0] * scale, x[1] * scale)), present(pack_pair(x[2] * scale, x[3] * scale)),
                               present(pack_pair(x[4] * scale, x[5] * scale)), present(pack_pair(x[6] * scale, x[7] * scale))));
  }
}

// New keys and values of the columns in `stored` go to the pool, where later rounds find them. A column to each warp.
__device__ __forceinline__ void store_fresh(const Context& cx, u32 layer, u32 head, u32 stored) {
  if (!(stored >> cx.warp & 1)) return;
  const Control& control = cx.shared.control();
  const i32 sequence = control.sequence[cx.warp], position = control.position[cx.warp];
  const u32 page = position / kPagePositions, granule = position % kPagePositions / kGranulePositions;
  const i32 id = cx.params.page_tables[sequence * cx.params.page_table_stride + page];
  u8* pool = reinterpret_cast<u8*>(cx.params.pool + granule_offset(cx.params.page_values, id, layer, head, granule));
  append(cx, cx.warp, cx.warp + 1, position & ~static_cast<i32>(kGranulePositions - 1), pool, pool + kGranuleBytes);
}

inline constexpr u32 kAttentionMarks = 4;

__device__ __forceinline__ void attention(Context& cx, u32& layer) {
  if (own_head(cx) >= kKvHeads) {
    for (u32 i = 0; i < kAttentionMarks; ++i) cx.mark();
    return;
  }
  u32 own = 0, stored = 0;  // groups to attend to, and columns to store
  const auto grouped = [&] { return ColumnGroups(cx.shared.control(), layer, own_place(cx), cx.columns, cx.lane); };
  ColumnGroups groups = grouped();
  if (groups.own) {
    own = groups.own;
    stored = groups.stored(cx.shared.control(), cx.lane);
    ColumnGroup g = groups.at(cx.shared.control(), __ffs(own) - 1);
    GroupWork work(cx, g, layer);
    GroupRows rows(cx, g);
    prepare_heads(cx, layer, own_head(cx), groups);
    cx.mark();
    LaneMerge merging;
#pragma unroll 1
    for (;;) {
      attend_group(cx, layer, own, stored, g, work, rows, merging);
      own &= own - 1;
      if (!own) break;
      if constexpr (!kMovesRegisters) groups = grouped();
      g = groups.at(cx.shared.control(), __ffs(own) - 1);
      work = GroupWork(cx, g, layer);
      rows = GroupRows(cx, g);
    }
    cx.mark();
    if constexpr (!kMovesRegisters) cx.forget_addresses();
    store_fresh(cx, layer, own_head(cx), stored);
    cx.mark();
  } else {
    for (u32 i = 1; i < kAttentionMarks; ++i) cx.mark();
  }
  merge_far(cx, layer, own_head(cx), own_place(cx));
  cx.mark();
}

__device__ __forceinline__ void attention_output(Context& cx, u32 layer) {
  const u32 units = num_units<AttentionOutput>(cx.block);
  RowVectors<AttentionOutput> vectors;
  vectors.load(cx, cx.layer_vectors(layer) + kVecMlpNorm,
               kOutputBias ? cx.layer_vectors(layer) + kVecAttentionOutputBias : nullptr);
  const RankRows<MidStream> ranks(cx, cx.layers_done, first_unit<Down>(cx.block) * 8 + cx.lane);
  GlobalOperand<AttentionOutput> operand(attended_operand(cx, cx.layers_done), cx.warp, cx.lane, cx.columns);
  Sums<AttentionOutput> sums;
  multiply_owned<AttentionOutput>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] { cx.mark(); });
  cx.mark();
  add_to_stream<MidStream>(cx, sums, cx.layers_done, vectors, ranks, layer);
  listen<InStream, Down>(cx, layer);
  cx.mark();
}
