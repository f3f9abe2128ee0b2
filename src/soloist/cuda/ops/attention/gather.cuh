// Inside a block: running softmaxes of its warps are merged and published.
#pragma once
#include "ops/attention/exchange.cuh"
#include "ops/attention/softmax.cuh"
#include "ops/attention/split.cuh"

// Queries whose running softmaxes lie in shared memory until no more fit there or none is left: they are merged
// together, and a warp that has none of one group's rows goes on with the next group's.
template <class M>
inline constexpr u32 kQueryLanesBytes = M::kSoftmaxLanes * M::kGroup * M::kHeadDim * 4;
template <class M>
inline constexpr u32 kFitting = kMostQueries == 1 ? 1 : M::kReduceBytes / kQueryLanesBytes<M>;  // the plan has room for one
template <class M>
inline constexpr u32 kGatheredQueries = kFitting<M> < kMostQueries ? kFitting<M> : kMostQueries;
// Rows swap groups of 8 values, so that lanes with different rows do not share banks.
template <class M>
inline constexpr u32 kRowSwap = M::kHeadDim % 64 == 0 ? 7 : 3;

// What is to become of a gathered query: its attention (unsplit), or the part of one split.
struct Gathered {
  u32 bits;  // unsplit, query, split

  static __device__ __forceinline__ Gathered of(u32 query, const QueryGroup& g) {
    return {(g.split_bits == 0 ? 1u : 0u) | query << 1 | g.split << 4};
  }
  __device__ __forceinline__ bool is_unsplit() const { return bits & 1; }
  __device__ __forceinline__ u32 query() const { return bits >> 1 & 7; }
  __device__ __forceinline__ u32 split() const { return bits >> 4; }
};
static_assert(kMaxQueries <= 8, "three bits");

template <class M>
struct LaneMerge {
  static_assert(kFitting<M> > 0, "one query at least");
  u32 count = 0;    // of queries gathered
  Gathered newest;  // the last of them; of more, shared memory knows

  static __device__ __forceinline__ Gathered* gathered() {
    __shared__ u32 bits[kGatheredQueries<M>];
    return reinterpret_cast<Gathered*>(bits);
  }

  // Softmaxes of a group's queries come to shared memory, [lane][row][D]; none of an empty split. `last`: no group comes
  // after it.
  template <bool kTogether>
  __device__ __forceinline__ void gather(const Context<M>& cx, const Softmax<M>& softmax, const QueryGroup& g, u32 first_row,
                                         u32 head, bool empty, bool last) {
    if constexpr (kMostQueries == 1) {
      if (empty) return;
      gather_one<kTogether>(cx, softmax, first_row);
      count = 1, newest = Gathered::of(0, g);
      merge<kTogether>(cx, head);
    } else {
      gather_several(cx, softmax, g, first_row, head, empty, last);
    }
  }

 private:
  // Rows of wide queries are padded to tiles where they are multiplied, and lie side by side where they are merged.
  static __device__ __forceinline__ u32 of_queries(u32 held) {
    return M::kWideQueries ? held / M::kQueryRows * M::kGroup + held % M::kQueryRows : held;
  }
  static __device__ __forceinline__ bool is_padding(u32 held) { return M::kWideQueries && held % M::kQueryRows >= M::kGroup; }

  __device__ __forceinline__ void gather_several(const Context<M>& cx, const Softmax<M>& softmax, const QueryGroup& g, u32 first_row,
                                                 u32 head, bool empty, bool last) {
    constexpr u32 kRows = kGatheredQueries<M> * M::kGroup;
    const u32 dims = value_set(cx) * kSetDim<M>, mine = softmax_lane(cx), q = cx.lane % 4;
    float* values = reinterpret_cast<float*>(cx.shared.reduce());
    float2* stats = cx.shared.stats();     // [lane][row]
    float totals[M::kWarpTiles][kRowHalves<M>];  // every lane of a quad holds the maximum but only a part of the sum
#pragma unroll
    for (u32 m = 0; m < M::kWarpTiles; ++m)
#pragma unroll
      for (u32 i = 0; i < kRowHalves<M>; ++i) {
        totals[m][i] = softmax.total[m][i];
        totals[m][i] += __shfl_xor_sync(~0u, totals[m][i], 1);
        totals[m][i] += __shfl_xor_sync(~0u, totals[m][i], 2);
      }
#pragma unroll 1
    for (u32 first = empty ? g.end : g.begin;;) {
      const u32 queries = min(kGatheredQueries<M> - count, g.end - first);
#pragma unroll
      for (u32 m = 0; m < M::kWarpTiles; ++m)
#pragma unroll
        for (u32 i = 0; i < kRowHalves<M>; ++i) {
          const u32 held = first_row + m * 16 + 8 * i + cx.lane / 4, of_group = of_queries(held) - first * M::kGroup;
          const u32 row = count * M::kGroup + of_group;
          if (of_group >= queries * M::kGroup || is_padding(held)) continue;
          if (q == 0 && dims == 0) stats[mine * kRows + row] = make_float2(softmax.best[m][i], totals[m][i]);
          store_row<M>(values + (mine * kRows + row) * M::kHeadDim, row & kRowSwap<M>, dims, softmax.out[m], i, q);
        }
      // All warps write the same.
      if (kGatheredQueries<M> > 1 && cx.lane < queries) gathered()[count + cx.lane] = Gathered::of(first + cx.lane, g);
      newest = Gathered::of(first, g);
      count += queries;
      first += queries;
      if (count == kGatheredQueries<M> || (last && first == g.end)) merge<false>(cx, head);
      if (first == g.end) break;
    }
  }

  // The rows of one query, which are in one tile, or in half of one.
  template <bool kTogether>
  __device__ __forceinline__ void gather_one(const Context<M>& cx, const Softmax<M>& softmax, u32 first_row) {
    u32 lane = cx.lane;
    if constexpr (kTogether) at_hand(lane);  // addresses are found here, not before the first half page
    float totals[kRowHalves<M>];
#pragma unroll
    for (u32 i = 0; i < kRowHalves<M>; ++i) {
      totals[i] = softmax.total[0][i];
      totals[i] += __shfl_xor_sync(~0u, totals[i], 1);
      totals[i] += __shfl_xor_sync(~0u, totals[i], 2);
    }
#pragma unroll
    for (u32 i = 0; i < kRowHalves<M>; ++i) {
      const u32 row = first_row + 8 * i + lane / 4, q = lane % 4, at = softmax_lane(cx) * M::kGroup + row;
      if (row >= M::kGroup) return;
      const u32 dims = value_set(cx) * kSetDim<M>, swap = row & kRowSwap<M>;
      if (q == 0 && dims == 0) cx.shared.stats()[at] = make_float2(softmax.best[0][i], totals[i]);
      store_row<M>(reinterpret_cast<float*>(cx.shared.reduce()) + at * M::kHeadDim, swap, dims, softmax.out[0], i, q);
    }
  }

  // What was gathered is merged, lane after lane, and published. kTogether: of an attention block, whose query is
  // unsplit; a thread merges all pairs that it has first.
  template <bool kTogether>
  __device__ __forceinline__ void merge(const Context<M>& cx, u32 head) {
    constexpr u32 kRows = kGatheredQueries<M> * M::kGroup;
    constexpr u32 kPairs = M::kGroup * (M::kHeadDim / 2);  // of a query
    const float* values = reinterpret_cast<const float*>(cx.shared.reduce());
    const float2* stats = cx.shared.stats();
    u8* attended = attended_operand(cx, cx.layers_done);
    struct Merged {
      float x, y, top, total;
    };
    // A pair of values, over all softmaxes.
    const auto merged = [&](u32 i) -> Merged {
      const u32 row = i / (M::kHeadDim / 2), d = i % (M::kHeadDim / 2) * 2;
      float2 part[M::kSoftmaxLanes];
      float top = -kInfinity;
#pragma unroll
      for (u32 v = 0; v < M::kSoftmaxLanes; ++v) {
        part[v] = stats[v * kRows + row];
        top = fmaxf(top, part[v].x);
      }
      const float base = top == -kInfinity ? 0.0f : top;
      float x = 0.0f, y = 0.0f, total = 0.0f;
#pragma unroll
      for (u32 v = 0; v < M::kSoftmaxLanes; ++v) {
        const float* of_row = values + (v * kRows + row) * M::kHeadDim;
        const float2 sum = *reinterpret_cast<const float2*>(of_row + (d ^ (row & kRowSwap<M>) * 8));
        const float weight = exp2_fast(part[v].x - base);
        x += sum.x * weight;
        y += sum.y * weight;
        total += part[v].y * weight;
      }
      return {x, y, top, total};
    };
    const auto publish = [&](u32 i, const Merged& all) {
      const u32 row = i / (M::kHeadDim / 2), d = i % (M::kHeadDim / 2) * 2;
      const Gathered of = kGatheredQueries<M> > 1 ? gathered()[row / M::kGroup] : newest;
      const u32 query_head = head * M::kGroup + row % M::kGroup;
      if (kTogether || of.is_unsplit()) {
        const float scale = __fdividef(1.0f, all.total);
        store_exchanged(operand_value(attended, kMostQueries == 1 ? 0 : of.query(), query_head * M::kHeadDim + d),
                        present(pack_pair(all.x * scale, all.y * scale)));
        return;
      }
      float* to = partial_values(cx, cx.layers_done, kMostQueries == 1 ? 0 : of.query(), query_head) + of.split() * M::kHeadDim;
      store_exchanged(to + d, present(all.x), present(all.y));
      if (d == 0)
        store_exchanged(partial_stats(cx, cx.layers_done, of.query(), query_head) + of.split(), present(all.top), present(all.total));
    };
    cx.sync();
    if constexpr (kTogether) {
      constexpr u32 kEach = (kPairs + kConsumerThreads - 1) / kConsumerThreads;
      Merged own[kEach];
#pragma unroll
      for (u32 n = 0; n < kEach; ++n) own[n] = merged(min(cx.thread + n * kConsumerThreads, kPairs - 1));
#pragma unroll
      for (u32 n = 0; n < kEach; ++n)
        if (const u32 i = cx.thread + n * kConsumerThreads; i < kPairs) publish(i, own[n]);
    } else {
#pragma unroll 1
      for (u32 i = cx.thread; i < (kMostQueries == 1 ? 1 : count) * kPairs; i += kConsumerThreads) publish(i, merged(i));
    }
    cx.sync();
    count = 0;
  }
};
