// The warps' partial sums meet in shared memory and are added in a fixed order.
#pragma once
#include "ptx/memory.cuh"
#include "tile/context.cuh"

// [warp][query][row]. Rows rotate within 32 by 8 for every two queries, so that no two lanes of a warp share a
// bank. One or two queries leave room for two reductions, so that a fast warp may start the next one while
// the last is still read.
struct Reduction {
  float* buffer;
  u32 queries;  // allocated: 1, 2, 4 or 8
  u32 rows;     // in one part of the exchange
  u32 stride;
  bool alone;

  // Where one query's activations are converted there is little room: reductions that follow each other lie at either end of it,
  // and each takes as much as its rows do. `wide`: outside of attention, so that its rows of q, keys and values may be overwritten.
  template <class M>
  __device__ __forceinline__ Reduction(Context<M>& cx, u32 all_rows, bool wide = false) {
    if constexpr (kMostQueries == 1 && M::kShConvertedBytes > 0) {
      alone = false, queries = 1, rows = all_rows;
      stride = (rows + 31) & ~31u;
      const u32 behind = M::kReduceBytes - kConsumerWarps * stride * 4;
      buffer = reinterpret_cast<float*>(cx.shared.reduce() + (++cx.reductions % 2 ? behind : 0));
      return;
    }
    // Where threads have few registers none is left to count reductions.
    alone = cx.queries > 2 || (kMostQueries > 1 && !kMovesRegisters);
    queries = alone ? (cx.queries <= 4 ? 4 : 8) : cx.queries;
    const u32 bytes = !alone ? M::kReduceBytes / 2 : wide ? M::kWideReduceBytes : M::kReduceBytes;
    const u32 most = bytes / 4 / kConsumerWarps / queries & ~31u;
    rows = min(most, all_rows);
    stride = (rows + 31) & ~31u;
    buffer = reinterpret_cast<float*>(cx.shared.reduce() + (alone ? 0 : ++cx.reductions % 2 * bytes));
  }

  // Calls `consume(first row, end row)` in all warps, part by part.
  template <class Op, class Consume, class M>
  __device__ __forceinline__ void for_each_part(const Context<M>& cx, const Sums<Op>& sums, u32 half_tiles, u32 all_rows,
                                                const Consume& consume) {
#pragma unroll 1
    for (u32 start = 0; start < all_rows; start += rows) {
      if (alone) cx.sync();
      put(sums, start, half_tiles, cx.queries, cx.warp, cx.lane);
      cx.sync();
      consume(start, min(all_rows, start + rows));
      if (!alone && start + rows < all_rows) cx.sync();
    }
  }

  template <class Op>
  __device__ __forceinline__ void put(const Sums<Op>& sums, u32 first_row, u32 half_tiles, u32 active_queries,
                                      u32 warp, u32 lane) {
    if constexpr (kDealsTiles<Op>) {
      for_each_dealt(sums, half_tiles, lane, [&](u32 row, float sum) {
        if (row >= first_row && row < first_row + rows) buffer[warp * stride + row - first_row] = sum;
      });
      return;
    }
    const u32 query = lane % 4 * 2;
    if (query >= active_queries) return;
    float* at = buffer + (warp * queries + query) * stride + lane / 4;
#pragma unroll
    for (u32 t = 0; t < Op::kTiles; ++t) {
      const u32 start = t * 16;
      if (start < first_row || start >= first_row + rows || 2 * t >= half_tiles) continue;
      float* low = at + (start - first_row & ~31u) + (start + lane % 4 * 8) % 32;
      float* high = at + (start - first_row & ~31u) + (start + 8 + lane % 4 * 8) % 32;
      *low = sums.total(t, 0);
      *high = sums.total(t, 2);
      if (query + 1 < active_queries) {
        low[stride] = sums.total(t, 1);
        high[stride] = sums.total(t, 3);
      }
    }
  }
  // The same of one query and one tile, whose rows come to `first_row` and after it.
  template <class Op>
  __device__ __forceinline__ void put_tile(const Sums<Op>& sums, u32 first_row, u32 warp, u32 lane) {
    float* at = buffer + warp * stride + first_row;
    if constexpr (kDealsTiles<Op>) {
      for_each_dealt(sums, 2, lane, [&](u32 row, float sum) { at[row] = sum; });
      return;
    }
    if (lane % 4) return;
    at[lane / 4] = sums.total(0, 0);
    at[lane / 4 + 8] = sums.total(0, 2);
  }
  // The sum over warps, always in the same order.
  __device__ __forceinline__ float get(u32 query, u32 row) const {
    const float* p = buffer + query * stride + (row & ~31u) + (row + query / 2 * 8) % 32;
    float sum = p[0];
#pragma unroll
    for (u32 w = 1; w < kConsumerWarps; ++w) sum += p[w * queries * stride];
    return sum;
  }
};

// Many rows of several queries: tiles as the lanes of a warp hold them, [tile][warp][lane], and each is summed by one warp.
// A lane then has rows g and g + 8 of two queries, as it had its own part of them; no word is moved by itself.
struct TileReduction {
  static constexpr u32 kWarpBytes = 32 * 16, kTileBytes = kConsumerWarps * kWarpBytes;
  template <class M>
  static constexpr u32 kMostAtOnce = M::kWideReduceBytes / kTileBytes;

  // Calls `consume(tile, sums)` in one warp for each tile from kFirst to kEnd, as far as the block has them: it has `count`. It uses
  // what a `wide` reduction does.
  template <u32 kFirst, u32 kEnd, class Op, class Consume, class M>
  static __device__ __forceinline__ void for_each_tile(const Context<M>& cx, const Sums<Op>& sums, u32 count, const Consume& consume) {
    static_assert(!kDealsTiles<Op>, "a lane has its rows of every tile");
    constexpr u32 kParts = (kEnd - kFirst + kMostAtOnce<M> - 1) / kMostAtOnce<M>;
    constexpr u32 kAtOnce = (kEnd - kFirst + kParts - 1) / kParts;
    const u32 buffer = shared_address(cx.shared.reduce()) + cx.lane * 16;
    if constexpr (kEnd < Op::kTiles) count = min(count, kEnd);
#pragma unroll 1
    for (u32 start = kFirst; start < count; start += kAtOnce) {
      cx.sync();  // what was here is read
      const u32 own = buffer + cx.warp * kWarpBytes - start * kTileBytes, end = min(count, start + kAtOnce);
#pragma unroll
      for (u32 t = kFirst; t < kEnd; ++t)
        if (t >= start && t < end)
          store_shared(own + t * kTileBytes, make_uint4(__float_as_uint(sums.total(t, 0)), __float_as_uint(sums.total(t, 1)),
                                                        __float_as_uint(sums.total(t, 2)), __float_as_uint(sums.total(t, 3))));
      cx.sync();
#pragma unroll 1
      for (u32 t = start + cx.warp; t < end; t += kConsumerWarps) {
        const u32 tile = buffer + (t - start) * kTileBytes;
        const uint4 first = load_shared(tile);
        float all[4] = {__uint_as_float(first.x), __uint_as_float(first.y), __uint_as_float(first.z), __uint_as_float(first.w)};
#pragma unroll
        for (u32 w = 1; w < kConsumerWarps; ++w) {  // in the order of `Reduction::get`
          const uint4 part = load_shared(tile + w * kWarpBytes);
          all[0] += __uint_as_float(part.x);
          all[1] += __uint_as_float(part.y);
          all[2] += __uint_as_float(part.z);
          all[3] += __uint_as_float(part.w);
        }
        consume(t, all);
      }
    }
  }
};
