// Whose data a stuck block of several ranks lacks, for the watchdog's report.
#pragma once
#include "ops/choose.cuh"
#include "ops/route.cuh"

__device__ __forceinline__ bool lacks_sums(const float* own_rows, u32 rows) {
  bool any = false;
#pragma unroll 1
  for (u32 r = 0; r < rows; ++r) any |= acquire_from_peers(reinterpret_cast<const u32*>(own_rows) + r) == kSentinel;
  return any;
}
// Of a round's first query, in a layer whose logits are sums over ranks.
template <class M>
__device__ __forceinline__ bool lacks_logits(const Params& params, u32 layer, u32 epoch, u32 rank) {
  bool any = false;
  M::of_layer(layer, [&](auto kind) {
    using L = decltype(kind);
    if constexpr (kLogitParts<L> > 1) any = lacks_sums(expert_logits<M>(params.workspace, epoch, rank, 0), L::kExperts);
  });
  return any;
}
// Where ranks look at their own logits: of a round's first query, whose exchange counts on from the last finished choice.
template <class M>
__device__ __forceinline__ bool lacks_records(const Params& params, u32 rank) {
  const u32 done = sample_state<M>().epochs.exchanges;
  const uint4* records = best_records<M>(params.workspace, done + 1, 0, 0) + rank * kNumBlocks;
  bool any = false;
#pragma unroll 1
  for (u32 b = 0; b < kNumBlocks; ++b) any |= acquire_from_peers(&records[b].w) >> 1 <= done;
  return any;
}
template <class M>
__device__ __forceinline__ bool lacks_choice(const Params& params, u32 round, u32 rank) {
  if constexpr (kSamples)
    if (sample_state<M>().apart) return lacks_records<M>(params, rank);
  bool any = false;
#pragma unroll 1
  for (u32 b = 0; b < (kSamples ? kNumBlocks : M::kLaneBlocks); ++b) {
    if constexpr (kSamples) any |= acquire_from_peers(arrivals<M>(params.workspace, rank) + b) >> kOutcomeBits != round + 1;
    else any |= acquire_from_peers(&best_records<M>(params.workspace, round, 0, rank)[b].w) != round + 1;
  }
  return any;
}

// A lane's partial results have not come: `words` of `rows` rows, of an epoch that has begun.
__device__ __forceinline__ bool lacks_published(const u64* words, u32 rows, u32 epoch) {
  bool any = false;
#pragma unroll 1
  for (u32 r = 0; r < rows; ++r) any |= static_cast<u32>(load_from_peers(words + r) >> 32) != epoch;
  return any;
}
template <class Stream>
__device__ __forceinline__ bool lacks_epoch(const Params& params, u32 lane, u32 epoch, u32 first, u32 rows) {
  return lacks_published(published<Stream>(params.workspace, epoch, 0, first) + lane * kLaneWords<typename Stream::M>, rows, epoch);
}
// Whether a lane is missing, in what `joined`, `listen`, `meet` and `choose` wait for.
template <class M>
__device__ __forceinline__ bool lacks_lane(const Params& params, u32 lane, Phase phase, u32 layer, u32 round, u32 first,
                                           u32 rows) {
  const u32 done = round * M::kLayers + layer + 1;
  if (phase == Phase::kAttentionOutput) {
    if (sums<MidStream<M>>(layer)) return lacks_epoch<MidStream<M>>(params, lane, done, first, rows);
    return receives<InStream<M>>(layer) && lacks_epoch<InStream<M>>(params, lane, done - M::kDelayLayers, first, rows);
  }
  if (phase == Phase::kDown) {
    if (sums<InStream<M>>(layer)) return lacks_epoch<InStream<M>>(params, lane, done, first, rows);
    return layer + 1 < M::kLayers && receives<MidStream<M>>(layer + 1) &&
           lacks_epoch<MidStream<M>>(params, lane, done + 1 - M::kDelayLayers, first, rows);
  }
  if (phase == Phase::kHead)
    return M::kMeets &&
           lacks_published(published_at<M>(params.workspace, M::kWsPublishedOut, 0, 0, first) + lane * kLaneWords<M>, rows, round + 1);
  return (phase == Phase::kChoose || phase == Phase::kMask) &&
         lacks_choice<M>(params, round, kSamples ? lane / M::kLanesHere : lane);
}

// Bits of the ranks whose data the consumers' phase lacks. This rank's own is among them where the block has
// not yet published its own data: then it waits for blocks of its own rank.
template <class M>
__device__ __forceinline__ u32 missing_ranks(const Params& params, const volatile Where* where) {
  const u32 round = where->round, layers_done = round * M::kLayers + where->layer + 1;
  using Rows = typename M::Residual;
  const u32 first = Rows::first_unit(lane_block<M>()) * 8, rows = Rows::num_units(lane_block<M>()) * 8;
  const Phase phase = static_cast<Phase>(where->phase);
  u32 missing = 0;
  if constexpr (M::kHasLanes) {
#pragma unroll 1
    for (u32 lane = 0; lane < M::kLanes; ++lane)
      missing |= lacks_lane<M>(params, lane, phase, where->layer, round, first, rows) ? 1u << lane / M::kLanesHere : 0;
  } else {
#pragma unroll 1
    for (u32 rank = 0; rank < M::kRanks; ++rank) {
      bool any = false;
      if (phase == Phase::kAttentionOutput)
        any = lacks_sums(rank_sums<MidStream<M>>(params.workspace, layers_done, rank, 0) + first, rows);
      else if (phase == Phase::kDown)
        any = lacks_sums(rank_sums<InStream<M>>(params.workspace, layers_done + round + 1, rank, 0) + first, rows);
      else if (phase == Phase::kRouter)
        any = lacks_logits<M>(params, where->layer, layers_done, rank);
      else if (phase == Phase::kChoose || phase == Phase::kMask)
        any = lacks_choice<M>(params, round, rank);
      missing |= any ? 1u << rank : 0;
    }
  }
  return missing;
}
