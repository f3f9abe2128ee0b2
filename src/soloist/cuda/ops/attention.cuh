// qkv, attention over the paged KV cache, and the projection after it.
//
// Every KV head has kSplits blocks. A page (64 positions) of a sequence belongs to one of them, in turn;
// the cache streams through the weight ring. Inside a block kSoftmaxLanes running softmaxes take the
// granules (32 positions) in turn. Which split and lane a granule belongs to depends on its position
// only, and every merge has a fixed order: so a column's bits do not depend on the other columns.
#pragma once
#include "ops/hidden.cuh"

inline constexpr u32 kHeadRows = (kGroup + 2) * kHeadDim;  // rows of q, k, v of one KV head
inline constexpr u32 kQueryStride = kHeadDim + kQueryPadding;
inline constexpr u32 kHeadUnits = kHeadRows / 8;

// Consecutive columns of one sequence at consecutive positions.
struct ColumnGroup {
  u32 begin, end;
  i32 sequence, first_position, last_position;
};
__device__ __forceinline__ ColumnGroup column_group(const Control& c, u32 begin, u32 columns) {
  ColumnGroup g{begin, begin + 1, c.sequence[begin], c.position[begin], c.position[begin]};
  while (g.end < columns && c.sequence[g.end] == g.sequence) g.last_position = c.position[g.end++];
  return g;
}
__device__ __forceinline__ i32 window_start(u32 layer, i32 position) {
  const i32 w = kWindow[layer];
  return w ? max(0, position - w + 1) : 0;
}

// The pages of a group that one split owns in one layer; the producer and the consumers walk them alike.
struct PageWalk {
  i32 page, last, first_seen, last_seen;

  __device__ __forceinline__ PageWalk(const ColumnGroup& g, u32 layer, u32 split) {
    first_seen = window_start(layer, g.first_position);
    last_seen = g.last_position;
    const i32 first = first_seen / kPagePositions;
    page = first + static_cast<i32>((split + kSplits - (first + layer) % kSplits) % kSplits);
    last = last_seen / kPagePositions;
  }
  __device__ __forceinline__ bool any() const { return page <= last; }
  __device__ __forceinline__ void next() { page += kSplits; }
  __device__ __forceinline__ bool has(u32 granule) const {
    const i32 start = page * kPagePositions + granule * kGranulePositions;
    return start <= last_seen && start + kGranulePositions > first_seen;
  }
  __device__ __forceinline__ u32 first_granule() const { return has(0) ? 0 : 1; }
  __device__ __forceinline__ u32 last_granule() const { return has(1) ? 1 : 0; }
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
  ++cx.layers_done;
  const u32 units = num_units<Qkv>(cx.block), first = first_unit<Qkv>(cx.block) * 8;
  Ahead<Qkv> ahead;
  GlobalOperand operand(own_copy(cx.params, InStream::kOperand, InStream::kBytes, cx.hidden_in, cx.block), cx.warp, cx.lane, cx.columns);
  ahead.fill(operand);
  Scale<InStream> scale;
  scale.load(cx, cx.hidden_in);
  cx.mark();
  Sums<Qkv> sums;
  multiply_owned<Qkv>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
  const float factor = scale.take(cx, cx.hidden_in);
  cx.mark();
  Reduction reduction(cx, Qkv::kTiles * 16);
  const float* bias = kQkvBias ? cx.layer_vectors(layer) + kVecQkvBias : nullptr;
  float* now = projected(cx, cx.layers_done, cx.warp) + first;
  reduction.for_each_part(cx, sums, units, units * 8, [&](u32 start, u32 end) {
    for (u32 r = start + cx.lane; r < end; r += 32) {
      float y = reduction.get(cx.warp, r - start) * factor;
      if (bias) y += __ldg(bias + first + r);
      store_exchanged(now + r, present(y));
    }
  });
  cx.mark();
}

// One head vector of a column, in pairs (d, d + D/2): norm, rope, rounding. Executed by a warp.
template <class Store>
__device__ __forceinline__ void head_vector(const Context& cx, const float* source, const float* norm,
                                            const float2* rope, const Store& store) {
  constexpr u32 kHalf = kHeadDim / 2, kPairs = (kHalf + 31) / 32;
  float low[kPairs], high[kPairs], low_norm[kPairs], high_norm[kPairs];
  float2 turned[kPairs];
#pragma unroll
  for (u32 j = 0; j < kPairs; ++j) {
    const u32 p = cx.lane + 32 * j;
    turned[j] = rope && p < kHalf ? rope[p] : make_float2(1.0f, 0.0f);
    low_norm[j] = norm && p < kHalf ? __ldg(norm + p) : 1.0f;
    high_norm[j] = norm && p < kHalf ? __ldg(norm + p + kHalf) : 1.0f;
  }
#pragma unroll 1
  for (;;) {
    bool ready = true;
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = cx.lane + 32 * j;
      low[j] = p < kHalf ? load_exchanged(source + p) : 0.0f;
      high[j] = p < kHalf ? load_exchanged(source + p + kHalf) : 0.0f;
      ready = ready && is_present(low[j]) && is_present(high[j]);
    }
    if (__all_sync(~0u, ready)) break;
  }
  if (norm) {
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) squares += low[j] * low[j] + high[j] * high[j];
    const float scale = __frsqrt_rn(warp_sum(squares) * (1.0f / kHeadDim) + kEpsilon);
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      low[j] *= scale * low_norm[j];
      high[j] *= scale * high_norm[j];
    }
  }
#pragma unroll
  for (u32 j = 0; j < kPairs; ++j) {
    const u32 p = cx.lane + 32 * j;
    if (p >= kHalf) continue;
    if (rope) {
      const float2 cs = turned[j];
      const float x = low[j], y = high[j];
      low[j] = x * cs.x - y * cs.y;
      high[j] = y * cs.x + x * cs.y;
    }
    store(p, to_half(low[j]));
    store(p + kHalf, to_half(high[j]));
  }
}

// Cosines and sines of the round's positions come to shared memory once a round. Warp c serves column c.
__device__ __forceinline__ void load_rope(const Context& cx) {
  if (cx.warp >= cx.columns) return;
  const float2* from = cx.params.rope + static_cast<u64>(cx.shared.control->position[cx.warp]) * (kHeadDim / 2);
  for (u32 p = cx.lane; p < kHeadDim / 2; p += 32) cx.shared.rope[cx.warp * (kHeadDim / 2) + p] = __ldg(from + p);
}

// Queries of all columns to shared memory, keys and values of all columns beside them.
__device__ __forceinline__ void prepare_heads(const Context& cx, u32 layer, u32 head) {
  const float* vectors = cx.layer_vectors(layer);
  for (u32 i = cx.warp; i < cx.columns * (kGroup + 2); i += kConsumerWarps) {
    const u32 column = i / (kGroup + 2), member = i % (kGroup + 2);
    const float* source = projected(cx, cx.layers_done, column) + head * kHeadRows + member * kHeadDim;
    const float2* rope = kRotated[layer] ? cx.shared.rope + column * (kHeadDim / 2) : nullptr;
    u16* queries = reinterpret_cast<u16*>(cx.shared.attended) + (column * kGroup + member) * kQueryStride;
    u16* fresh = reinterpret_cast<u16*>(cx.shared.new_kv) + column * 2 * kHeadDim;
    if (member < kGroup)
      head_vector(cx, source, kQkNorm ? vectors + kVecQNorm : nullptr, rope, [=](u32 d, u16 x) { queries[d] = x; });
    else if (member == kGroup)
      head_vector(cx, source, kQkNorm ? vectors + kVecKNorm : nullptr, rope, [=](u32 d, u16 x) { fresh[d] = x; });
    else
      head_vector(cx, source, nullptr, nullptr, [=](u32 d, u16 x) { fresh[kHeadDim + d] = x; });
  }
}

// Keys and values of this round's columns join a granule: in the ring's slot, or in the pool.
__device__ __forceinline__ void append(const Context& cx, const ColumnGroup& g, i32 start, u8* keys, u8* values) {
  const u32 thread = recomputed(cx.thread);
  const bool value_part = thread >= kConsumerThreads / 2;
  const u32 d = thread % (kConsumerThreads / 2);
  for (u32 c = recomputed(g.begin); c < g.end; ++c) {
    const i32 row = cx.shared.control->position[c] - start;
    if (row < 0 || row >= kGranulePositions || d >= kHeadDim) continue;
    const u16 x = reinterpret_cast<const u16*>(cx.shared.new_kv)[(c * 2 + value_part) * kHeadDim + d];
    const u32 offset = value_part ? d * (kGranulePositions * 2) + row * 2
                                  : row * (kHeadDim * 2) + key_chunk(row, d / 8) * 16 + d % 8 * 2;
    *reinterpret_cast<u16*>((value_part ? values : keys) + offset) = x;
  }
}

// Fragments of 16 rows of queries: this lane's rows g and g + 8. In registers where there are enough of them, else
// read from shared memory for each granule.
struct Queries {
  u32 row[2];  // shared addresses
  uint4 kept[2][kKeptQueries ? kHeadDim / 32 : 1];

  __device__ __forceinline__ void set(u32 i, u32 address) {
    row[i] = recomputed(address);
    if constexpr (kKeptQueries)
#pragma unroll
      for (u32 k = 0; k < kHeadDim / 32; ++k) kept[i][k] = load_shared(address + k * 64);
  }
  __device__ __forceinline__ uint4 get(u32 i, u32 k) const {
    if constexpr (kKeptQueries)
      return kept[i][k];
    else
      return load_shared(row[i] + k * 64);
  }
};

// A running softmax over 16 rows (column, query head): sums of values, maxima, sums of weights.
struct Softmax {
  float out[kHeadDim / 8][4];
  float best[2], total[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (u32 i = 0; i < 4; ++i) out[n][i] = 0.0f;
    best[0] = best[1] = -kInfinity;
    total[0] = total[1] = 0.0f;
  }

  // Lane (g, q) holds rows g and g + 8 and positions 8q … 8q + 7 of the granule.
  __device__ __forceinline__ void add(const Queries& queries, u32 keys, u32 values, i32 start,
                                      const i32 (&last)[2], i32 window, u32 lane) {
    if constexpr (!kKeptQueries) lane = recomputed(lane);
    const u32 g = lane / 4, q = lane % 4;
    float score[4][4];
#pragma unroll
    for (u32 t = 0; t < 4; ++t) score[t][0] = score[t][1] = score[t][2] = score[t][3] = 0.0f;
#pragma unroll
    for (u32 k = 0; k < kHeadDim / 32; ++k) {
      const uint4 low = queries.get(0, k), high = queries.get(1, k);
      uint4 x[4];
#pragma unroll
      for (u32 t = 0; t < 4; ++t) {
        const u32 row = 8 * (g >> 1) + 2 * t + (g & 1);
        x[t] = load_shared(keys + row * (kHeadDim * 2) + key_chunk(row, 4 * k + q) * 16);
      }
#pragma unroll
      for (u32 t = 0; t < 4; ++t)
        mma(score[t], low.x, high.x, low.y, high.y, x[t].x, x[t].y);
#pragma unroll
      for (u32 t = 0; t < 4; ++t)
        mma(score[t], low.z, high.z, low.w, high.w, x[t].z, x[t].w);
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      float top = best[r];
#pragma unroll
      for (u32 t = 0; t < 4; ++t)
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
          const i32 position = start + static_cast<i32>(8 * q + 2 * t + e);
          const bool seen = position <= last[r] && (window == 0 || position > last[r] - window);
          float& s = score[t][2 * r + e];
          s = seen ? s * kScoreScale : -kInfinity;
          top = fmaxf(top, s);
        }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float base = top == -kInfinity ? 0.0f : top;
      const float shrink = exp2_fast(best[r] - base);
      best[r] = top;
      float sum = 0.0f;
#pragma unroll
      for (u32 t = 0; t < 4; ++t)
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
          float& s = score[t][2 * r + e];
          s = exp2_fast(s - base);
          sum += s;
        }
      total[r] = total[r] * shrink + sum;
#pragma unroll
      for (u32 n = 0; n < kHeadDim / 8; ++n) {
        out[n][2 * r] *= shrink;
        out[n][2 * r + 1] *= shrink;
      }
    }
    u32 weight[4][2];
#pragma unroll
    for (u32 t = 0; t < 4; ++t) {
      weight[t][0] = pack_pair(score[t][0], score[t][1]);
      weight[t][1] = pack_pair(score[t][2], score[t][3]);
    }
#pragma unroll
    for (u32 n = 0; n < kHeadDim / 8; n += 4) {
      uint4 v[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        v[i] = load_shared(values + (8 * (n + i) + g) * (kGranulePositions * 2) + q * 16);
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        mma(out[n + i], weight[0][0], weight[0][1], weight[1][0], weight[1][1], v[i].x, v[i].y);
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        mma(out[n + i], weight[2][0], weight[2][1], weight[3][0], weight[3][1], v[i].z, v[i].w);
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

// The lanes' running softmaxes of one group become this split's partial result.
__device__ __forceinline__ void merge_lanes(const Context& cx, const Softmax& softmax, const ColumnGroup& g, u32 head,
                                            u32 split) {
  head = recomputed(head), split = recomputed(split);
  const u32 warp = recomputed(cx.warp), lane = recomputed(cx.lane);
  const u32 rows = (g.end - g.begin) * kGroup, tile = warp % kRowTiles, mine = warp / kRowTiles;
  const u32 r = lane / 4, q = lane % 4;
  float* gather = reinterpret_cast<float*>(cx.shared.reduce);
  const u32 width = kSoftmaxLanes * rows * kHeadDim * 4 <= kReduceBytes ? kHeadDim : 32;
  const auto row_of = [&](u32 i) { return tile * 16 + r + 8 * i; };
  float2* stats = reinterpret_cast<float2*>(cx.shared.stats);  // [lane][row]
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    // Every lane of the quad holds the maximum but only a part of the sum.
    float total = softmax.total[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (q == 0 && row_of(i) < rows) stats[mine * (kRowTiles * 16) + row_of(i)] = make_float2(softmax.best[i], total);
  }
  for (u32 first = 0; first < kHeadDim; first += width) {
#pragma unroll
    for (u32 n = 0; n < kHeadDim / 8; ++n) {
      if (n * 8 < first || n * 8 >= first + width) continue;
#pragma unroll
      for (u32 i = 0; i < 2; ++i)
        if (row_of(i) < rows)
          *reinterpret_cast<float2*>(gather + (mine * rows + row_of(i)) * width + (n * 8 - first) + 2 * q) =
              make_float2(softmax.out[n][2 * i], softmax.out[n][2 * i + 1]);
    }
    cx.sync();
    for (u32 i = cx.thread; i < rows * width; i += kConsumerThreads) {
      const u32 row = i / width, d = i % width;
      float top = -kInfinity;
#pragma unroll
      for (u32 v = 0; v < kSoftmaxLanes; ++v) top = fmaxf(top, stats[v * (kRowTiles * 16) + row].x);
      const float base = top == -kInfinity ? 0.0f : top;
      float sum = 0.0f, total = 0.0f;
#pragma unroll
      for (u32 v = 0; v < kSoftmaxLanes; ++v) {
        const float2 s = stats[v * (kRowTiles * 16) + row];
        const float weight = exp2_fast(s.x - base);
        sum += gather[(v * rows + row) * width + d] * weight;
        total += s.y * weight;
      }
      const u32 column = g.begin + row / kGroup, query_head = head * kGroup + row % kGroup;
      store_exchanged(partial_values(cx, cx.layers_done, column, query_head) + split * kHeadDim + first + d, present(sum));
      if (first + d == 0)
        store_exchanged(partial_stats(cx, cx.layers_done, column, query_head) + split, present(top), present(total));
    }
    cx.sync();
  }
}

__device__ __forceinline__ void attend_group(Context& cx, const ColumnGroup& g, u32 layer, u32 head, u32 split) {
  PageWalk walk(g, layer, split);
  if (!walk.any()) return;
  const u32 rows = (g.end - g.begin) * kGroup, tile = cx.warp % kRowTiles, mine = cx.warp / kRowTiles;
  const bool working = tile * 16 < rows;
  Queries queries;
  i32 last[2];
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const u32 row = min(tile * 16 + cx.lane / 4 + 8 * i, rows - 1);
    last[i] = cx.shared.control->position[g.begin + row / kGroup];
    queries.set(i, shared_address(cx.shared.attended) + ((g.begin * kGroup + row) * kQueryStride + cx.lane % 4 * 8) * 2);
  }
  const i32 window = kWindow[layer];
  Softmax softmax;
  softmax.clear();
#pragma unroll 1
  for (; walk.any(); walk.next()) {
    u32 slot = 0, taken = 0;
#pragma unroll 1
    for (u32 granule = 0; granule < 2; ++granule) {
      if (!walk.has(granule)) continue;
      const i32 start = walk.page * kPagePositions + granule * kGranulePositions;
      if (!kPageSlot || taken == 0) {
        slot = cx.ring.slot;
        taken = cx.ring.take();
      }
      const u32 keys = taken + (kPageSlot && granule != walk.first_granule() ? 2 * kGranuleBytes : 0);
      const u32 values = keys + kGranuleBytes;
      if (start + kGranulePositions > g.first_position && start <= g.last_position) {
        u8* ring = reinterpret_cast<u8*>(__cvta_shared_to_generic(keys));
        append(cx, g, start, ring, ring + (values - keys));
        fence_async_proxy_shared();
        cx.sync();
      }
      const u32 index = static_cast<u32>(walk.page) / kSplits * 2 + granule;
      if (working && index % kSoftmaxLanes == mine) softmax.add(queries, keys, values, start, last, window, cx.lane);
      if (!kPageSlot || granule == walk.last_granule()) cx.ring.release(cx.lane, slot, 1);
    }
  }
  merge_lanes(cx, softmax, g, head, split);
}

// The splits that hold something a column sees: `count` of them from `first` on, round robin.
struct Splits {
  u32 first, count;

  __device__ __forceinline__ Splits(u32 layer, i32 position) {
    const u32 from = window_start(layer, position) / kPagePositions, to = position / kPagePositions;
    first = (from + layer) % kSplits;
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

__device__ __forceinline__ u8* attended_operand(const Context& cx, u32 epoch) {
  return turn(cx.params, kWsAttended, kWsAttendedBytes, epoch);
}

// One column at a short context: every block merges the splits for itself and saves an exchange.
__device__ __forceinline__ bool merges_directly(const Context& cx, u32 layer) {
  return cx.columns == 1 && Splits(layer, cx.shared.control->position[0]).count <= kDirectSplits;
}

// New keys and values go to the pool, where later rounds find them.
__device__ __forceinline__ void store_fresh(const Context& cx, const ColumnGroup& g, u32 layer, u32 head, u32 split) {
  const i32* table = cx.params.page_tables + g.sequence * cx.params.page_table_stride;
  for (i32 start = g.first_position / kGranulePositions * kGranulePositions; start <= g.last_position;
       start += kGranulePositions) {
    const u32 page = start / kPagePositions;
    if ((page + layer) % kSplits != split) continue;
    u8* pool = reinterpret_cast<u8*>(
        cx.params.pool +
        granule_offset(cx.params.page_values, table[page], layer, head, start % kPagePositions / kGranulePositions));
    append(cx, g, start, pool, pool + kGranuleBytes);
  }
}

inline constexpr u32 kAttentionMarks = 4;

__device__ __forceinline__ void attention(Context& cx, u32 layer) {
  const u32 head = cx.block / kSplits, split = cx.block % kSplits;
  if (head >= kKvHeads) {
    for (u32 i = 0; i < kAttentionMarks; ++i) cx.mark();
    return;
  }
  const Control& control = *cx.shared.control;
  bool any = false;
  for (u32 c = 0; c < cx.columns;) {
    const ColumnGroup g = column_group(control, c, cx.columns);
    any |= PageWalk(g, layer, split).any();
    c = g.end;
  }
  if (any) {
    cx.mark();
    prepare_heads(cx, layer, head);
    cx.sync();
    cx.mark();
    for (u32 c = 0; c < cx.columns;) {
      const ColumnGroup g = column_group(control, c, cx.columns);
      attend_group(cx, g, layer, head, split);
      c = g.end;
    }
    cx.mark();
    for (u32 c = 0; c < cx.columns;) {
      const ColumnGroup g = column_group(control, c, cx.columns);
      store_fresh(cx, g, layer, head, split);
      c = g.end;
    }
  } else {
    for (u32 i = 1; i < kAttentionMarks; ++i) cx.mark();
  }
  if (!merges_directly(cx, layer)) {
    constexpr u32 kChunks = kGroup * kHeadDim / 8;
    u8* now = attended_operand(cx, cx.layers_done);
    for (u32 i = cx.thread * kSplits + split; i < cx.columns * kChunks; i += kConsumerThreads * kSplits) {
      const u32 column = i / kChunks, k = head * kGroup * kHeadDim + i % kChunks * 8;
      const uint4 merged = merge_splits(cx, Splits(layer, control.position[column]), column, k);
#pragma unroll
      for (u32 copy = 0; copy < kCopies; ++copy)
        store_exchanged(operand_value(now + copy * copy_stride(kWsAttendedBytes), column, k),
                        make_uint4(present(merged.x), present(merged.y), present(merged.z), present(merged.w)));
    }
  }
  cx.mark();
}

__device__ __forceinline__ void attention_output(Context& cx, u32 layer) {
  const u32 units = num_units<AttentionOutput>(cx.block);
  RowVectors<AttentionOutput> vectors;
  vectors.load(cx, cx.layer_vectors(layer) + kVecMlpNorm,
               kOutputBias ? cx.layer_vectors(layer) + kVecAttentionOutputBias : nullptr);
  Ahead<AttentionOutput> ahead;
  Sums<AttentionOutput> sums;
  if (merges_directly(cx, layer)) {
    const Splits splits(layer, cx.shared.control->position[0]);
    for (u32 i = cx.thread; i < AttentionOutput::kSteps * 64; i += kConsumerThreads) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (i * 8 < kQueryHeads * kHeadDim) v = merge_splits(cx, splits, 0, i * 8);
      reinterpret_cast<uint4*>(cx.shared.attended)[i] = v;
    }
    cx.mark();
    cx.sync();
    SharedOperand operand(shared_address(cx.shared.attended), cx.warp, cx.lane);
    ahead.fill(operand);
    cx.mark();
    multiply_owned<AttentionOutput>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
  } else {
    GlobalOperand operand(own_copy(cx.params, kWsAttended, kWsAttendedBytes, cx.layers_done, cx.block), cx.warp, cx.lane, cx.columns);
    cx.mark();
    ahead.fill(operand);
    cx.mark();
    multiply_owned<AttentionOutput>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
  }
  cx.mark();
  cx.hidden_mid = cx.layers_done;
  add_to_stream<MidStream>(cx, sums, cx.hidden_mid, vectors);
  cx.mark();
}
