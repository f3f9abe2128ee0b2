// The end of a round of a launch that drafts: what is accepted, where its text has been before, what the next round checks.
// The sequence's texts lie in global memory; what its drafts depend on in every block's shared memory, where all come to the same.
#pragma once
#include "ops/choose.cuh"
#include "ops/draft.cuh"

// In shared memory behind `Control`, from round to round.
struct DraftControl {
  Drafter drafter;
  u32 told;  // of a round, for the host: tokens, drafted tokens and their kind
};
template <class M>
__device__ __forceinline__ DraftControl& draft_control() {
  static_assert(!kDrafts || sizeof(Control) + sizeof(DraftControl) <= M::kShControlBytes, "shared memory of the plan");
  return *reinterpret_cast<DraftControl*>(shared_part<M>(M::kShControl) + sizeof(Control));
}

// Parameters, of which only builds that draft have all: a name that is looked up when a model is known.
template <class M>
struct ParamsOf {
  using Type = Params;
};
template <class M>
__device__ __forceinline__ const DraftBuffers& draft_buffers(const typename ParamsOf<M>::Type& params) { return params.draft; }

// What the warps of a block find, where reductions have their sums: nobody needs these between a choice and a head.
struct Found {
  Accepted accepted;
  Wanted wanted;
  u32 place[kConsumerWarps], match[kConsumerWarps];
};

__device__ __forceinline__ u32 warp_largest(u32 x) {
#pragma unroll
  for (u32 o = 16; o; o >>= 1) x = max(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// By all threads of a block, before the first round.
template <class M>
__device__ __forceinline__ void prepare_drafting(const DraftStart& start) {
  if (threadIdx.x == 0) draft_control<M>().drafter = start.drafter;
}

// By one thread: tokens of the round count or not, and the launch ends or goes on.
template <class M>
__device__ __forceinline__ void settle(const Params& params, const Texts& texts, u32 round, Control& control, Found& found) {
  DraftControl& own = draft_control<M>();
  const DraftStart& start = *draft_buffers<M>(params).start;
  const u32 num_drafted = own.drafter.count, kind = own.drafter.kind;
  const u32* stops = draft_buffers<M>(params).stops;
  const Accepted accepted = accept(own.drafter, start, control.token, control.chosen, stops, start.num_stops,
                                   params.launch->query[0].keep, M::kVocab);
  own.told = accepted.count | num_drafted << kEmittedCountBits | kind << 2 * kEmittedCountBits;
  control.stop = accepted.ends || control.yield_agreed || round + 1 == control.rounds;
  const bool is_left = take(own.drafter, texts, control.chosen, accepted.count);
  if constexpr (kSamples)
#pragma unroll 1
    for (u32 i = 0; i < accepted.count; ++i) observe<M>(params, blockIdx.x, 0, control.chosen[i]);
  found.accepted = accepted;
  found.wanted = control.stop ? Wanted{false, false} : wanted(own.drafter, start, own.drafter.num_prediction > 0, is_left);
}

// Largest keys of all blocks, by all lanes of a warp. A block overwrites its record in the next round, behind a choice that
// every block took part in after it read this one.
__device__ __forceinline__ uint2 largest_keys(const uint4* records, u32 round, u32 lane) {
  u32 place = 0, match = 0;
#pragma unroll 1
  for (u32 b = lane; b < kNumBlocks; b += 32) {
    uint4 record;
    do record = load_exchanged(records + b);
    while (record.w != round + 1);
    place = max(place, record.x);
    match = max(match, record.y);
  }
  return make_uint2(warp_largest(place), warp_largest(match));
}

// By one thread: the queries of the next round.
template <class M>
__device__ __forceinline__ void feed(const Params& params, const Texts& texts, u32 count, u32 match, Control& control) {
  DraftControl& own = draft_control<M>();
  control.token[0] = min(control.chosen[count - 1], M::kVocab - 1);  // no id where no score is a number
  if (control.stop) return;
  const DraftBuffers& buffers = draft_buffers<M>(params);
  draft(own.drafter, *buffers.start, texts, match, control.token + 1);
  own.drafter.count = num_fitting(own.drafter, control.token + 1, buffers.stops, buffers.start->num_stops, M::kVocab);
  control.queries = Queries{own.drafter.count + 1};
  const i32 position = control.position[0] + count;
#pragma unroll 1
  for (u32 c = 0; c < kMaxQueries; ++c) {
    control.position[c] = position + c;
    if constexpr (kSamples) {
      SampleStep& step = sample_state<M>().steps[c];
      const SampleStep& first = params.launch->step[0];
      step.position_low = first.position_low + own.drafter.made + c;
      step.num_output = first.num_output + own.drafter.made + c;
    }
  }
}

// All consumer threads, after a barrier that follows the choice. Not inlined: that would take registers from the rest
// of the round. What thread 0 leaves in `control` is for whoever meets it afterwards.
template <class M>
__device__ __noinline__ void speculate(const Params& params, u32 round) {
  Control& control = *reinterpret_cast<Control*>(shared_part<M>(M::kShControl));
  Found& found = *reinterpret_cast<Found*>(shared_part<M>(M::kShReduce));
  static_assert(!kDrafts || sizeof(Found) <= M::kShReduceBytes, "shared memory of the plan");
  const DraftControl& own = draft_control<M>();
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32, num_stored = own.drafter.num_history;
  const DraftBuffers& buffers = draft_buffers<M>(params);
  const Texts texts{buffers.history, buffers.prediction, buffers.archive, num_stored, control.chosen};
  sync_consumers();
  if (t == 0) settle<M>(params, texts, round, control, found);
  sync_consumers();
  const u32 count = found.accepted.count;
  // Others read it in later rounds: block 0's record of its best token, which they wait for, comes after it.
  if (blockIdx.x == 0 && t < count) store_exchanged(buffers.history + num_stored + t, control.chosen[t]);
  const Wanted want = found.wanted;
  u32 match = 0;
  if (want.place || want.match) {
    // Neighbouring threads of the grid have neighbouring places.
    const u32 part = blockIdx.x * kConsumerThreads + t, parts = kNumBlocks * kConsumerThreads;
    u32 place = 0;
    if (want.place) place = search_place(own.drafter, texts, part, parts);
    if (want.match) match = search_match(own.drafter, texts, part, parts);
    place = warp_largest(place);
    match = warp_largest(match);
    if (lane == 0) {
      found.place[warp] = place;
      found.match[warp] = match;
    }
    sync_consumers();
    if (warp == 0) {
      const bool has = lane < kConsumerWarps;
      place = warp_largest(has ? found.place[lane] : 0);
      match = warp_largest(has ? found.match[lane] : 0);
      if (lane == 0) store_exchanged(buffers.records + blockIdx.x, make_uint4(place, match, 0, round + 1));
      const uint2 best = largest_keys(buffers.records, round, lane);
      match = best.y;
      if (lane == 0 && want.place) move(draft_control<M>().drafter, best.x);
    }
  }
  if (t == 0) feed<M>(params, texts, count, match, control);
}
