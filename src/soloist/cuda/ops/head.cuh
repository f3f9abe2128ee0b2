// The LM head: logits to memory, and this block's best token of every query.
#pragma once
#include "ops/meet.cuh"

template <class M>
using HeadStream = typename StreamOf<M, M::kMeets>::Type;

struct Best {
  float value;
  u32 id;
};
// The lowest id among the largest values.
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (u32 o = 16; o; o >>= 1) {
    const Best other{__shfl_xor_sync(~0u, best.value, o), __shfl_xor_sync(~0u, best.id, o)};
    best = better(best, other);
  }
  return best;
}
// {value, id, the word of the first block of rank 0, round + 1}, [rank or lane][block]; two copies are used alternately, and the
// round says whose it is. Kernels that sample have records of another choice there.
template <class M>
inline constexpr u32 kRecordSets = M::kRanks * M::kLanes;
template <class M>
__device__ __forceinline__ uint4* best_records(u8* workspace, u32 round, u32 query, u32 set) {
  const u32 at = ((round & 1) * kMaxQueries + query) * kRecordSets<M> + set;
  return reinterpret_cast<uint4*>(workspace + M::kWsBest) + at * M::kLaneBlocks;
}
template <class M>
__device__ __forceinline__ void publish_best(const Context<M>& cx, uint4 record) {
  if constexpr (kPeers == 1) {
    store_exchanged(best_records<M>(cx.params.workspace, cx.round, cx.warp, lane_here<M>()) + cx.block, record);
  } else {
#pragma unroll
    for (u32 r = 0; r < kPeers; ++r) {
      const u32 set = M::kHasLanes ? sender_lane<M>(cx.params, r) : sender_rank(cx.params, r);
      store_to_peer(best_records<M>(cx.params.peers[r], cx.round, cx.warp, set) + cx.block, record);
    }
  }
}
// Kernels that sample choose from the logits of all ranks, [query][kSampledRows], which each rank holds.
template <class M>
__device__ __forceinline__ float* all_logits(u8* workspace, u32 query) {
  return reinterpret_cast<float*>(workspace + M::kWsLogits) + static_cast<u64>(query) * M::kSampledRows;
}

// Rows of the vocabulary before this rank's or lane's.
template <class M>
__device__ __forceinline__ u32 first_id(const Params& params) {
  return M::kHasLanes ? own_lane<M>(params) * M::kShareVocab : M::kRanks > 1 ? params.rank * M::kShareVocab : 0;
}

template <class M>
__device__ __forceinline__ float* logits_of_round(const Context<M>& cx) {
  return cx.params.logits + cx.round * cx.params.launch->logits_round_stride;
}

// `shared_logits`: of several ranks each stores those that it makes to all.
template <class M>
__device__ __forceinline__ void head(Context<M>& cx, float* logits, bool shared_logits) {
  using Head = typename M::Head;
  const u32 units = Head::num_units(cx.block), first = Head::first_unit(cx.block) * 8;
  using Stream = HeadStream<M>;
  const u32 in = M::kMeets ? cx.round + 1 : cx.next_in();
  // Who has this block's record reads its rows of the next round's embedding: a copy that the last layer had cleaned.
  cx.wait_for_cleaner(cx.layers_done + cx.round);
  if constexpr (!kMovesRegisters) cx.forget_addresses();  // or some of them would be spilled during the wait
  GlobalOperand<Head> operand(stream_operand<Stream>(cx, in), cx);
  Ahead<Head> ahead;
  Scale<Stream> scale;
  ahead.fill(operand);
  float factor = 1.0f;
  if constexpr (!M::kMeets || M::kSumBeforeNorm) {
    scale.load(cx, in);
    factor = scale.take(cx, in);
  }
  cx.arrived();
  // Other blocks may read the keys and values that this one stored in the round: its record, which they wait for,
  // comes after them. The consumers have met since, and the stream hides what the fence takes.
  if (cx.lane == 0) {
    fence_async_proxy();
    __threadfence();
  }
  Best best{-kInfinity, kNoTokenNan};
  constexpr u32 kGroupUnits = 2 * Head::kTiles;
#pragma unroll 1
  for (u32 group = 0; group < units; group += kGroupUnits) {
    if (Head::kSteps % Head::kDepth != 0 && group) ahead.fill(operand);
    Sums<Head> sums;
    multiply<kGroupUnits, true>(cx.ring, cx.warp, cx.lane, operand, ahead, sums, [] {});
    if constexpr (!kMovesRegisters) {  // or these, and predicates that follow from addresses, would be spilled
      cx.forget_addresses();
      if constexpr (kSamples) logits = logits_of_round(cx);  // beside a greedy choice it is that which spills
    }
    Reduction reduction(cx, Head::kTiles * 16, true);
    reduction.for_each_part(cx, sums, kGroupUnits, kGroupUnits * 8, [&](u32 start, u32 end) {
      if (cx.warp >= cx.queries) return;
#pragma unroll 1
      for (u32 r = start + cx.lane; r < end; r += 32) {
        const u32 row = first + group * 8 + r, id = first_id<M>(cx.params) + row;
        const float y = reduction.get(cx.warp, r - start) * factor;
        if (id < M::kVocab && ((M::kRanks == 1 && !M::kHasLanes) || row < M::kShareVocab)) {
          logits[static_cast<u64>(cx.warp) * M::kVocabRows + lane_here<M>() * M::kShareVocab + row] = y;
          if constexpr (kSamples && kPeers > 1) {
#pragma unroll
            for (u32 r = 0; r < kPeers; ++r)
              if (shared_logits || r == cx.params.rank) store_to_peer(all_logits<M>(cx.params.peers[r], cx.warp) + id, __float_as_uint(y));
          }
          if constexpr (!kSamples) best = better(best, Best{y, id});
        }
      }
    });
  }
  cx.mark();
  if constexpr (kSamples) return;  // records are of another choice
  if (cx.warp < cx.queries) {
    best = warp_best(best);
    if (cx.lane == 0) {
      // The reporter's word is taken whenever it comes: this read is unordered on purpose.
      const bool looks = cx.is_first() && !kRacecheck;
      const u32 yield = looks ? *const_cast<volatile u32*>(&cx.shared.control().yield) : 0;
      publish_best(cx, make_uint4(__float_as_uint(best.value), best.id, yield, cx.round + 1));
    }
  }
}

// Every block reads every block's best and comes to the same token. Warp c serves query c.
template <class M>
__device__ __forceinline__ void choose(Context<M>& cx) {
  if (cx.warp >= cx.queries) return;
  // Of several ranks or lanes some at once, as far as registers go: each time is a trip to the L2.
  constexpr u32 kSets = kRecordSets<M> < 4 ? kRecordSets<M> : 4, kMost = 512;
  constexpr u32 kRecords = kRecordSets<M> * M::kLaneBlocks, kFitting = kRecords < kMost ? kRecords : kMost;
  constexpr u32 kAtOnce = M::kHasLanes ? kFitting : kSets * M::kLaneBlocks, kEach = (kAtOnce + 31) / 32;
  Best best{-kInfinity, kNoTokenNan};
#pragma unroll 1
  for (u32 begin = 0; begin < kRecords; begin += kAtOnce) {
    const uint4* records = best_records<M>(cx.params.workspace, cx.round, cx.warp, 0) + begin;
    const u32 count = kRecords % kAtOnce == 0 ? kAtOnce : min(kAtOnce, kRecords - begin);
    uint4 record[kEach] = {};  // or it would stay alive over the whole round where a lane loads nothing
#pragma unroll 1
    for (;;) {
      bool ready = true;
#pragma unroll
      for (u32 i = 0; i < kEach; ++i) {
        const u32 b = cx.lane + 32 * i;
        if (b >= count) continue;
        record[i] = kPeers == 1 ? load_exchanged(records + b) : load_from_peers(records + b);
        ready = ready && record[i].w == cx.round + 1;
      }
      if (__all_sync(~0u, ready)) break;
    }
    if (cx.lane == 0 && cx.warp == 0 && begin == 0) cx.shared.control().yield_agreed = record[0].z;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i)
      if (cx.lane + 32 * i < count) best = better(best, Best{__uint_as_float(record[i].x), record[i].y});
  }
  __threadfence();  // pairs with that of `head`
  cx.mark();
  best = warp_best(best);
  if (cx.lane == 0) cx.shared.control().chosen[cx.warp] = best.id;
}
