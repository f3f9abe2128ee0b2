// qkv, attention over the paged KV cache, and the projection after it.
//
// Every KV head has kSplits blocks. A near column (position below kNearPositions) is served by one of
// them, which publishes finished attention. A far one is served by all: chunks of kChunkPages pages (of 64
// positions) go round, and the splits' partial results are merged. The cache streams through the weight
// ring. Inside a block kSoftmaxLanes running softmaxes take the granules (32 positions) in turn. Which
// split and lane a granule belongs to depends on the column's position only, and every merge has a fixed
// order: so a column's bits do not depend on the other columns.
#pragma once
#include "ops/hidden.cuh"

inline constexpr u32 kHeadRows = (kGroup + 2) * kHeadDim;  // rows of q, k, v of one KV head
inline constexpr u32 kTileSets = kRowTiles / kWarpTiles;  // warps that share a granule, for different rows

__device__ __forceinline__ bool is_near(i32 position) { return position < static_cast<i32>(kNearPositions); }

// Consecutive columns of one sequence at consecutive positions, all near or all far.
struct ColumnGroup {
  u32 begin, end;
  u32 fresh;  // from this column on, the sequence's keys and values come with this round
  i32 sequence, first_fresh, first_position, last_position;
};
__device__ __forceinline__ ColumnGroup column_group(const Control& c, u32 begin, u32 columns) {
  const i32 sequence = c.sequence[begin], position = c.position[begin];
  ColumnGroup g{begin, begin + 1, begin, sequence, position, position, position};
#pragma unroll 1
  while (g.fresh > 0 && c.sequence[g.fresh - 1] == sequence) g.first_fresh = c.position[--g.fresh];
#pragma unroll 1
  while (g.end < columns && c.sequence[g.end] == sequence && is_near(c.position[g.end]) == is_near(position))
    g.last_position = c.position[g.end++];
  return g;
}
__device__ __forceinline__ i32 window_start(u32 layer, i32 position) {
  const i32 w = kWindow[layer];
  return w ? max(0, position - w + 1) : 0;
}

// What the block serves: a split of a KV head. The last blocks may have none.
__device__ __forceinline__ u32 own_head(const Context& cx) { return cx.block / kSplits; }
__device__ __forceinline__ u32 own_split(const Context& cx) { return cx.block % kSplits; }

// Which split comes first moves on with the layer and the sequence, so that all have as much to do.
__device__ __forceinline__ u32 split_of(u32 chunk, u32 layer, i32 sequence) {
  return (chunk + layer + static_cast<u32>(sequence)) % kSplits;
}

// The pages of a group that one split owns in one layer; the producer and the consumers walk them alike.
struct PageWalk {
  i32 page, last, first_seen, last_seen;
  bool near;

  __device__ __forceinline__ PageWalk(const ColumnGroup& g, u32 layer, u32 split) {
    first_seen = window_start(layer, g.first_position);
    last_seen = g.last_position;
    near = is_near(last_seen);
    page = first_seen / kPagePositions;
    last = last_seen / kPagePositions;
    const u32 chunk = near ? 0 : page / kChunkPages;
    const u32 behind = (split + kSplits - split_of(chunk, layer, g.sequence)) % kSplits;
    if (behind > 0) page = near ? last + 1 : (chunk + behind) * kChunkPages;
  }
  __device__ __forceinline__ bool any() const { return page <= last; }
  // The page that comes `steps` after this one.
  __device__ __forceinline__ i32 ahead(u32 steps) const {
    if (near) return page + steps;
    const u32 in_chunk = page % kChunkPages + steps;
    return page - page % kChunkPages + in_chunk / kChunkPages * (kSplits * kChunkPages) + in_chunk % kChunkPages;
  }
  __device__ __forceinline__ void next() { page = ahead(1); }
  // Pages from this one on.
  __device__ __forceinline__ u32 count() const {
    if (!any()) return 0;
    if (near) return last - page + 1;
    const u32 in_chunk = page % kChunkPages, span = last - page + in_chunk;
    constexpr u32 kTurn = kSplits * kChunkPages;
    return span / kTurn * kChunkPages + min(span % kTurn + 1, kChunkPages) - in_chunk;
  }
  // Which of the split's pages of the whole sequence this one is.
  __device__ __forceinline__ u32 ordinal() const {
    return near ? page : page / kChunkPages / kSplits * kChunkPages + page % kChunkPages;
  }
  __device__ __forceinline__ bool has(i32 of_page, u32 granule) const {
    const i32 start = of_page * kPagePositions + granule * kGranulePositions;
    return start <= last_seen && start + static_cast<i32>(kGranulePositions) > first_seen;
  }
  __device__ __forceinline__ u32 first_granule() const { return has(page, 0) ? 0 : 1; }
  __device__ __forceinline__ u32 last_granule() const { return has(page, 1) ? 1 : 0; }
};

__device__ __forceinline__ u64 granule_offset(u64 page_values, i32 page_id, u32 layer, u32 head, u32 granule) {
  return page_id * page_values + ((static_cast<u64>(layer) * kKvHeads + head) * 2 + granule) * (kGranuleBytes);
}
// 16-byte chunk of a key row; odd rows swap halves of 128 bytes so that two rows never share banks.
__device__ __forceinline__ u32 key_chunk(u32 row, u32 chunk) {
  return kHeadDim % 64 == 0 ? chunk ^ ((row & 1) << 2) : chunk;
}

__device__ __forceinline__ float* projected(const Context& cx, u32 epoch, u32 column) {
  return reinterpret_cast<float*>(turn(cx.params, kWsProjected, kWsProjectedBytes, epoch)) + column * (Qkv::kUnits * 8);
}

__device__ __forceinline__ void qkv(Context& cx, u32 layer) {
  const u32 units = num_units<Qkv>(cx.block), first = first_unit<Qkv>(cx.block) * 8, in = cx.next_in();
  ++cx.layers_done;
  GlobalOperand operand(stream_operand<InStream>(cx, in), cx.warp, cx.lane, cx.columns);
  Scale<InStream> scale;
  Sums<Qkv> sums;
  multiply_owned<Qkv>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] {
    scale.load(cx, in);
    cx.mark();
  });
  const float factor = scale.take(cx, in);
  cx.mark();
  Reduction reduction(cx, Qkv::kTiles * 16);
  const float* bias = kQkvBias ? cx.layer_vectors(layer) + kVecQkvBias : nullptr;
  float* now = projected(cx, cx.layers_done, cx.warp) + first;
  reduction.for_each_part(cx, sums, units, units * 8, [&](u32 start, u32 end) {
    if (cx.warp >= cx.columns) return;
#pragma unroll 1
    for (u32 r = start + cx.lane; r < end; r += 32) {
      float y = reduction.get(cx.warp, r - start) * factor;
      if (bias) y += __ldg(bias + first + r);
      store_exchanged(now + r, present(y));
    }
  });
  cx.mark();
}

// Cosines and sines of the round's positions come to shared memory once a round. Warp c serves column c.
__device__ __forceinline__ void load_rope(const Context& cx) {
  if (cx.warp >= cx.columns) return;
  const float2* from = cx.params.rope + static_cast<u64>(cx.shared.control().position[cx.warp]) * (kHeadDim / 2);
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
  // `turned` is null for what is not rotated; a query has a row, others lie as they come.
  __device__ __forceinline__ void finish(const float* raw, u8* to, u32 row, bool is_key, bool is_value,
                                         const float2* turned, u32 lane) const {
    float low[kPairs], high[kPairs], squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = lane + 32 * j;
      low[j] = p < kHalf ? raw[p] : 0.0f;
      high[j] = p < kHalf ? raw[p + kHalf] : 0.0f;
      squares += low[j] * low[j] + high[j] * high[j];
    }
    if (kQkNorm && !is_value) {
      const float scale = __frsqrt_rn(warp_sum(squares) * (1.0f / kHeadDim) + kEpsilon);
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
      if (turned && !is_value) {
        const float2 cs = turned[p];
        const float x = low[j], y = high[j];
        low[j] = x * cs.x - y * cs.y;
        high[j] = y * cs.x + x * cs.y;
      }
      const u32 at = row == kNoRow ? p * 2 : query_offset(row, p);
      const u32 then = row == kNoRow ? (p + kHalf) * 2 : query_offset(row, p + kHalf);
      *reinterpret_cast<u16*>(to + at) = to_half(low[j]);
      *reinterpret_cast<u16*>(to + then) = to_half(high[j]);
    }
  }
};

// Queries of all columns to shared memory, keys and values of all columns beside them. All threads fetch raw
// vectors at once, so that many columns cost one trip.
__device__ __forceinline__ void prepare_heads(const Context& cx, u32 layer, u32 head) {
  constexpr u32 kPieces = kHeadRows / 4;  // 16 bytes of a column
  constexpr u32 kFitting = kReduceBytes / (kHeadRows * 4), kAtOnce = kFitting < kMaxColumns ? kFitting : kMaxColumns;
  constexpr u32 kEach = (kAtOnce * kPieces + kConsumerThreads - 1) / kConsumerThreads;
  HeadVector vector;
  vector.load_norms(cx.layer_vectors(layer), cx.lane);
  const float* source = projected(cx, cx.layers_done, 0) + head * kHeadRows;
  float4* raw = reinterpret_cast<float4*>(cx.shared.reduce());
#pragma unroll 1
  for (u32 first = 0; first < cx.columns; first += kAtOnce) {
    const u32 columns = min(kAtOnce, cx.columns - first), pieces = columns * kPieces;
    float4 x[kEach];
#pragma unroll 1
    for (;;) {
      bool ready = true;
#pragma unroll
      for (u32 j = 0; j < kEach; ++j) {
        const u32 i = cx.thread + j * kConsumerThreads;
        x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < pieces) x[j] = load_exchanged4(source + (first + i / kPieces) * (Qkv::kUnits * 8) + i % kPieces * 4);
      }
#pragma unroll
      for (u32 j = 0; j < kEach; ++j) ready = ready && is_present(x[j]);
      if (__all_sync(~0u, ready)) break;
    }
    cx.sync();  // what lay in the buffer has been read
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) {
      const u32 i = cx.thread + j * kConsumerThreads;
      if (i < pieces) raw[i] = x[j];
    }
    cx.sync();
#pragma unroll 1
    for (u32 i = cx.warp; i < columns * (kGroup + 2); i += kConsumerWarps) {
      const u32 column = first + i / (kGroup + 2), member = i % (kGroup + 2);
      u16* fresh = reinterpret_cast<u16*>(cx.shared.new_kv()) + column * 2 * kHeadDim;
      const u32 row = column * kGroup + member;
      vector.finish(reinterpret_cast<const float*>(raw) + i * kHeadDim,
                    member < kGroup ? cx.shared.queries() : reinterpret_cast<u8*>(fresh + (member - kGroup) * kHeadDim),
                    member < kGroup ? row : kNoRow, member == kGroup, member > kGroup,
                    kRotated[layer] ? cx.shared.rope() + column * (kHeadDim / 2) : nullptr, cx.lane);
    }
  }
  cx.sync();
}

// Keys and values of columns `begin` … `end - 1` join a granule that starts at position `start`: in the
// ring's slot, or in the pool. Executed by a warp.
__device__ __forceinline__ void append(const Context& cx, u32 begin, u32 end, i32 start, u8* keys, u8* values) {
#pragma unroll 1
  for (u32 c = begin; c < end; ++c) {
    const i32 row = cx.shared.control().position[c] - start;
    if (row < 0 || row >= static_cast<i32>(kGranulePositions)) continue;
    const u16* key = reinterpret_cast<const u16*>(cx.shared.new_kv()) + c * 2 * kHeadDim;
    if (cx.lane < kHeadDim / 8)
      reinterpret_cast<uint4*>(keys + row * (kHeadDim * 2))[key_chunk(row, cx.lane)] = reinterpret_cast<const uint4*>(key)[cx.lane];
#pragma unroll
    for (u32 d = 0; d < kHeadDim; d += 32)
      reinterpret_cast<u16*>(values)[(d + cx.lane) * kGranulePositions + row] = key[kHeadDim + d + cx.lane];
  }
}

// Running softmaxes over kWarpTiles · 16 rows (column, query head): sums of values, maxima, sums of weights.
struct Softmax {
  float out[kWarpTiles][kHeadDim / 8][4];
  float best[kWarpTiles][2], total[kWarpTiles][2];  // best: of scores to base 2

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m) {
#pragma unroll
      for (u32 n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
      best[m][0] = best[m][1] = -kInfinity;
      total[m][0] = total[m][1] = 0.0f;
    }
  }

  // Lane (g, q) holds rows g and g + 8 of each tile and positions 8q … 8q + 7 of the granule. `queries`: the
  // lane's part of the first tile, in shared memory; bits of `tiles`: which of them matter; `last`: the
  // position of each row; `partly`: some row does not see some position.
  __device__ __forceinline__ void add(u32 queries, u32 tiles, u32 keys, u32 values, i32 start,
                                      const i32 (&last)[kWarpTiles][2], i32 window, bool partly, u32 lane) {
    const u32 g = lane / 4, q = lane % 4, swapped = kHeadDim % 64 == 0 ? g & 1 : 0;
    float score[kWarpTiles][4][4];
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m)
#pragma unroll
      for (u32 t = 0; t < 4; ++t) score[m][t][0] = score[m][t][1] = score[m][t][2] = score[m][t][3] = 0.0f;
    // Lane (g, q) reads keys 8 (g / 2) + g % 2, and each second one after it; see key_chunk for the swap.
    const u32 row = keys + (8 * (g >> 1) + (g & 1)) * (kHeadDim * 2) + q * 16;
    const u32 even = row + swapped * 64, odd = row - swapped * 64;
#pragma unroll(kHeadDim % 64 == 0 ? 2 : 3)
    for (u32 k = 0; k < kHeadDim / 32; ++k) {
      uint4 x[4];
#pragma unroll
      for (u32 t = 0; t < 4; ++t) x[t] = load_shared((k % 2 ? odd : even) + k * 64 + 2 * t * (kHeadDim * 2));
#pragma unroll
      for (u32 m = 0; m < kWarpTiles; ++m) {
        const u32 at = queries + (m * (kHeadDim / 32) + k) * 1024;
        const uint4 low = load_shared(at), high = load_shared(at + 512);
#pragma unroll
        for (u32 t = 0; t < 4; ++t) mma(score[m][t], low.x, low.y, low.z, low.w, x[t].x, x[t].y);
#pragma unroll
        for (u32 t = 0; t < 4; ++t) mma(score[m][t], high.x, high.y, high.z, high.w, x[t].z, x[t].w);
      }
    }
    u32 weight[kWarpTiles][4][2];
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m) {
      if (kWarpTiles > 1 && !(tiles >> m & 1)) {  // nobody asks for these rows
#pragma unroll
        for (u32 t = 0; t < 4; ++t) weight[m][t][0] = weight[m][t][1] = 0;
        continue;
      }
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
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
          for (u32 n = 0; n < kHeadDim / 8; ++n) {
            out[m][n][2 * r] *= shrink;
            out[m][n][2 * r + 1] *= shrink;
          }
        }
      }
#pragma unroll
      for (u32 t = 0; t < 4; ++t) {
        weight[m][t][0] = pack_pair(score[m][t][0], score[m][t][1]);
        weight[m][t][1] = pack_pair(score[m][t][2], score[m][t][3]);
      }
    }
#pragma unroll
    for (u32 n = 0; n < kHeadDim / 8; n += 4) {
      uint4 v[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        v[i] = load_shared(values + (8 * (n + i) + g) * (kGranulePositions * 2) + q * 16);
#pragma unroll
      for (u32 m = 0; m < kWarpTiles; ++m) {
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

// The lanes' running softmaxes of one group become its attention (near), or this split's part of it (far).
__device__ __forceinline__ void merge_lanes(const Context& cx, const Softmax& softmax, const ColumnGroup& g, u32 head,
                                            u32 split) {
  // Columns that fit the buffer at once.
  constexpr u32 kColumnBytes = kSoftmaxLanes * kGroup * kHeadDim * 4, kFitting = kReduceBytes / kColumnBytes;
  static_assert(kFitting > 0, "one column at least");
  constexpr u32 kAtOnce = kFitting < kMaxColumns ? kFitting : kMaxColumns;
  constexpr u32 kRows = kAtOnce * kGroup;
  // Rows swap groups of 8 values, so that lanes with different rows do not share banks.
  constexpr u32 kSwap = kHeadDim % 64 == 0 ? 7 : 3;
  const u32 set = cx.warp % kTileSets, mine = cx.warp / kTileSets, r = cx.lane / 4, q = cx.lane % 4;
  const bool near = is_near(g.last_position);
  float* gather = reinterpret_cast<float*>(cx.shared.reduce());  // [lane][row][D]
  float2* stats = cx.shared.stats();                             // [lane][row]
  u8* attended = attended_operand(cx, cx.layers_done);
  float totals[kWarpTiles][2];  // every lane of a quad holds the maximum but only a part of the sum
#pragma unroll
  for (u32 m = 0; m < kWarpTiles; ++m)
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      totals[m][i] = softmax.total[m][i];
      totals[m][i] += __shfl_xor_sync(~0u, totals[m][i], 1);
      totals[m][i] += __shfl_xor_sync(~0u, totals[m][i], 2);
    }
#pragma unroll 1
  for (u32 first = g.begin; first < g.end; first += kAtOnce) {
    const u32 rows = min(kAtOnce, g.end - first) * kGroup;
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m)
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 row = (set * kWarpTiles + m) * 16 + r + 8 * i - first * kGroup;
        if (row >= rows) continue;
        if (q == 0) stats[mine * kRows + row] = make_float2(softmax.best[m][i], totals[m][i]);
        float2* to = reinterpret_cast<float2*>(gather + (mine * kRows + row) * kHeadDim + 2 * q);
        const u32 swap = row & kSwap;
#pragma unroll
        for (u32 n = 0; n < kHeadDim / 8; ++n)
          to[(n ^ swap) * 4] = make_float2(softmax.out[m][n][2 * i], softmax.out[m][n][2 * i + 1]);
      }
    cx.sync();
#pragma unroll 1
    for (u32 i = cx.thread; i < rows * (kHeadDim / 2); i += kConsumerThreads) {
      const u32 row = i / (kHeadDim / 2), d = i % (kHeadDim / 2) * 2;
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
        const float2 sum = *reinterpret_cast<const float2*>(gather + (v * kRows + row) * kHeadDim + (d ^ (row & kSwap) * 8));
        const float weight = exp2_fast(part[v].x - base);
        x += sum.x * weight;
        y += sum.y * weight;
        total += part[v].y * weight;
      }
      const u32 column = first + row / kGroup, query_head = head * kGroup + row % kGroup;
      if (near) {
        const float scale = __fdividef(1.0f, total);
        store_exchanged(operand_value(attended, column, query_head * kHeadDim + d), present(pack_pair(x * scale, y * scale)));
        continue;
      }
      store_exchanged(partial_values(cx, cx.layers_done, column, query_head) + split * kHeadDim + d, present(x), present(y));
      if (d == 0)
        store_exchanged(partial_stats(cx, cx.layers_done, column, query_head) + split, present(top), present(total));
    }
    cx.sync();
  }
}

// What a warp has to know of a group, computed while the queries are on their way: of the cache, the same in all
// lanes …
struct GroupWork {
  PageWalk walk;
  u32 skipped, end;  // granules, counted from the first page's first one
  u32 own;           // the first that may be this warp's, modulo kSoftmaxLanes

  __device__ __forceinline__ GroupWork(const Context& cx, const ColumnGroup& g, u32 layer, u32 split)
      : walk(g, layer, split), skipped(0), end(0) {
    const u32 pages = walk.count();
    if (pages > 0) {
      skipped = walk.first_granule();
      end = 2 * pages - (walk.has(walk.ahead(pages - 1), 1) ? 0 : 1);
    }
    own = cx.warp / kTileSets - walk.ordinal() * 2;
  }
  __device__ __forceinline__ i32 start(u32 granule) const {
    return walk.ahead(granule / 2) * static_cast<i32>(kPagePositions) + static_cast<i32>(granule % 2 * kGranulePositions);
  }
};
// … and of the rows.
struct GroupRows {
  u32 tiles = 0;  // bits: which of the warp's tiles hold rows of the group
  i32 last[kWarpTiles][2];

  __device__ __forceinline__ GroupRows(const Context& cx, const ColumnGroup& g) {
#pragma unroll
    for (u32 m = 0; m < kWarpTiles; ++m) {
      const u32 row = (cx.warp % kTileSets * kWarpTiles + m) * 16;
      if (row < g.end * kGroup && row + 16 > g.begin * kGroup) tiles |= 1u << m;
#pragma unroll
      for (u32 i = 0; i < 2; ++i)
        last[m][i] = cx.shared.control().position[min((row + cx.lane / 4 + 8 * i) / kGroup, kMaxColumns - 1)];
    }
  }
};

// Where threads have few registers, what a warp need not have at hand while it walks through the cache is parked in
// shared memory. All its lanes write and read the same.
struct Parked {
  u32 round, layer, layers_done, columns, reductions;
  float scale;
  ColumnGroup group;
  GroupWork work;
};
__device__ __forceinline__ Parked& parked(const Context& cx) {
  __shared__ u32 of_warp[kConsumerWarps][sizeof(Parked) / 4];
  return *reinterpret_cast<Parked*>(of_warp[cx.warp]);
}
__device__ __forceinline__ void park(const Context& cx, u32 layer, const ColumnGroup& g, const GroupWork& work) {
  if constexpr (!kMovesRegisters) {
    parked(cx) = Parked{cx.round, layer, cx.layers_done, cx.columns, cx.reductions, cx.scale, g, work};
    __syncwarp();
  }
}
__device__ __forceinline__ void unpark(Context& cx, u32& layer, ColumnGroup& g) {
  if constexpr (!kMovesRegisters) {
    const Parked& p = parked(cx);
    cx.round = p.round;
    layer = p.layer;
    cx.layers_done = p.layers_done;
    cx.columns = p.columns;
    cx.reductions = p.reductions;
    cx.scale = p.scale;
    g = p.group;
    cx.forget_addresses();
  }
}

__device__ __forceinline__ void attend_group(Context& cx, u32& layer, ColumnGroup& group, const GroupWork& known,
                                             const GroupRows& rows) {
  if (known.end == 0) return;
  park(cx, layer, group, known);
  const ColumnGroup& g = kMovesRegisters ? group : parked(cx).group;
  const GroupWork& work = kMovesRegisters ? known : parked(cx).work;
  const u32 queries = shared_address(cx.shared.queries()) + cx.warp % kTileSets * kWarpTiles * (kHeadDim / 32) * 1024 + cx.lane * 16;
  const i32 window = kWindow[layer];
  Softmax softmax;
  softmax.clear();
  // Half of the ring at a time: the other half is filled meanwhile. A slot that holds a page begins with the
  // page's first granule that is seen.
  constexpr u32 kSlotGranules = kPageSlot ? 2 : 1, kSlots = kRingSlots / 2;
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
        u8* slot = reinterpret_cast<u8*>(__cvta_shared_to_generic(keys));
        append(cx, g.fresh, g.end, start, slot, slot + kGranuleBytes);
        fence_async_proxy_shared();  // the slot is copied to again
        __syncwarp();
      }
      softmax.add(queries, rows.tiles, keys, keys + kGranuleBytes, start, rows.last, window,
                  window || behind > g.first_position, cx.lane);
    }
    cx.ring.wait(slots - 1);
    cx.ring.release(cx.lane, cx.ring.slot, slots);
    cx.ring.advance(slots);
    begin = stop;
  }
  unpark(cx, layer, group);
  merge_lanes(cx, softmax, group, own_head(cx), own_split(cx));
}

// The splits that hold something a far column sees: `count` of them from `first` on, in turn.
struct Splits {
  u32 first, count;

  __device__ __forceinline__ Splits(const Control& control, u32 layer, u32 column) {
    constexpr u32 kChunkPositions = kChunkPages * kPagePositions;
    const i32 position = control.position[column];
    const u32 from = window_start(layer, position) / kChunkPositions, to = position / kChunkPositions;
    first = split_of(from, layer, control.sequence[column]);
    count = min(kSplits, to - from + 1);
  }
  __device__ __forceinline__ u32 at(u32 i) const { return (first + i) % kSplits; }
};

// Eight consecutive values of one head's attention, merged over splits in order and packed.
__device__ __forceinline__ uint4 merge_splits(const Context& cx, const Splits& splits, u32 column, u32 k) {
  const u32 query_head = k / kHeadDim, d = k % kHeadDim;
  const float2* stats = partial_stats(cx, cx.layers_done, column, query_head);
  const float* values = partial_values(cx, cx.layers_done, column, query_head) + d;
  constexpr u32 kBatch = 4;
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, total = 0.0f, top = -kInfinity;
#pragma unroll 1
  for (u32 i = 0; i < splits.count; i += kBatch) {
    float2 s[kBatch];
    float4 low[kBatch], high[kBatch];
#pragma unroll 1
    for (;;) {
      bool ready = true;
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        s[j] = make_float2(-kInfinity, 0.0f);
        low[j] = high[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i + j >= splits.count) continue;
        const u32 split = splits.at(i + j);
        s[j] = load_exchanged2(&stats[split].x);
        low[j] = load_exchanged4(values + split * kHeadDim);
        high[j] = load_exchanged4(values + split * kHeadDim + 4);
      }
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) ready = ready && is_present(s[j]) && is_present(low[j]) && is_present(high[j]);
      if (ready) break;
    }
    float best = top;
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) best = fmaxf(best, s[j].x);
    const float shrink = exp2_fast(top - best);
    top = best;
    total *= shrink;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) sum[n] *= shrink;
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) {
      const float w = exp2_fast(s[j].x - top);
      total += s[j].y * w;
      sum[0] += low[j].x * w, sum[1] += low[j].y * w, sum[2] += low[j].z * w, sum[3] += low[j].w * w;
      sum[4] += high[j].x * w, sum[5] += high[j].y * w, sum[6] += high[j].z * w, sum[7] += high[j].w * w;
    }
  }
  const float scale = 1.0f / total;
  return make_uint4(pack_pair(sum[0] * scale, sum[1] * scale), pack_pair(sum[2] * scale, sum[3] * scale),
                    pack_pair(sum[4] * scale, sum[5] * scale), pack_pair(sum[6] * scale, sum[7] * scale));
}

// Far columns: the blocks of a head share the work of merging its splits' results and publish the outcome.
__device__ __forceinline__ void merge_far(const Context& cx, u32 layer, u32 head, u32 split) {
  constexpr u32 kPieces = kGroup * kHeadDim / 8;
  const Control& control = cx.shared.control();
  u8* now = attended_operand(cx, cx.layers_done);
#pragma unroll 1
  for (u32 i = cx.thread * kSplits + split; i < cx.columns * kPieces; i += kConsumerThreads * kSplits) {
    const u32 column = i / kPieces, k = head * kGroup * kHeadDim + i % kPieces * 8;
    if (is_near(control.position[column])) continue;
    const uint4 merged = merge_splits(cx, Splits(control, layer, column), column, k);
    store_exchanged(operand_value(now, column, k),
                    make_uint4(present(merged.x), present(merged.y), present(merged.z), present(merged.w)));
  }
}

// New keys and values go to the pool, where later rounds find them. A column to each warp.
__device__ __forceinline__ void store_fresh(const Context& cx, u32 layer, u32 head, u32 split) {
  if (cx.warp >= cx.columns) return;
  const Control& control = cx.shared.control();
  const i32 sequence = control.sequence[cx.warp], position = control.position[cx.warp];
  const u32 page = position / kPagePositions, granule = position % kPagePositions / kGranulePositions;
  if (split_of(is_near(position) ? 0 : page / kChunkPages, layer, sequence) != split) return;
  const i32 id = cx.params.page_tables[sequence * cx.params.page_table_stride + page];
  u8* pool = reinterpret_cast<u8*>(cx.params.pool + granule_offset(cx.params.page_values, id, layer, head, granule));
  append(cx, cx.warp, cx.warp + 1, position & ~static_cast<i32>(kGranulePositions - 1), pool, pool + kGranuleBytes);
}

inline constexpr u32 kAttentionMarks = 4;

__device__ __forceinline__ void attention(Context& cx, u32& layer) {
  const u32 head = own_head(cx), split = own_split(cx);
  if (head >= kKvHeads) {
    for (u32 i = 0; i < kAttentionMarks; ++i) cx.mark();
    return;
  }
  const Control& control = cx.shared.control();
  bool any = false;
#pragma unroll 1
  for (u32 c = 0; c < cx.columns;) {
    const ColumnGroup g = column_group(control, c, cx.columns);
    any |= PageWalk(g, layer, split).any();
    c = g.end;
  }
  if (any) {
    ColumnGroup g = column_group(control, 0, cx.columns);
    GroupWork work(cx, g, layer, split);
    GroupRows rows(cx, g);
    prepare_heads(cx, layer, head);
    cx.mark();
#pragma unroll 1
    for (;;) {
      attend_group(cx, layer, g, work, rows);
      if (g.end == cx.columns) break;
      g = column_group(control, g.end, cx.columns);
      work = GroupWork(cx, g, layer, own_split(cx));
      rows = GroupRows(cx, g);
    }
    cx.mark();
    store_fresh(cx, layer, own_head(cx), own_split(cx));
    cx.mark();
  } else {
    for (u32 i = 1; i < kAttentionMarks; ++i) cx.mark();
  }
  merge_far(cx, layer, own_head(cx), own_split(cx));
  cx.mark();
}

__device__ __forceinline__ void attention_output(Context& cx, u32 layer) {
  const u32 units = num_units<AttentionOutput>(cx.block);
  RowVectors<AttentionOutput> vectors;
  vectors.load(cx, cx.layer_vectors(layer) + kVecMlpNorm,
               kOutputBias ? cx.layer_vectors(layer) + kVecAttentionOutputBias : nullptr);
  GlobalOperand operand(attended_operand(cx, cx.layers_done), cx.warp, cx.lane, cx.columns);
  Sums<AttentionOutput> sums;
  multiply_owned<AttentionOutput>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] { cx.mark(); });
  cx.mark();
  add_to_stream<MidStream>(cx, sums, cx.layers_done, vectors);
  cx.mark();
}
