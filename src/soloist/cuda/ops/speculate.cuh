// The end of a round of a launch that drafts, in the decode kernel: see drafted_round.cuh. Sequences' texts lie in global memory;
// what their drafts depend on in every block's shared memory, where all come to the same.
#pragma once
#include "ops/choose.cuh"
#include "ops/drafted_round.cuh"

// Who ends a round of a launch that drafts: see drafted_round.cuh.
template <class M>
struct DraftGrid {
  const Params& params;

  __device__ __forceinline__ u32 block() const { return blockIdx.x; }
  __device__ __forceinline__ u32 num_blocks() const { return kNumBlocks; }
  __device__ __forceinline__ u32 thread() const { return threadIdx.x; }
  __device__ __forceinline__ void block_sync() const { sync_consumers(); }
  __device__ __forceinline__ void warp_sync() const { __syncwarp(); }
  __device__ __forceinline__ u32 warp_max(u32 value) const { return __reduce_max_sync(~0u, value); }
  __device__ __forceinline__ void observe(u32 query, u32 id) const {
    if constexpr (kSamples) ::observe<M>(params, blockIdx.x, query, id);
  }
};

// Words of `SampleParams`, which threads copy one each.
constexpr u32 kSampleParamWords = sizeof(SampleParams) / 4;

// By all threads of a block: how queries choose in the next round, by their sequences.
template <class M>
__device__ __forceinline__ void take_params(const Params& params, const DraftControl& own, const i32* position, u32 t) {
  static_assert(kMaxQueries * kSampleParamWords <= kConsumerThreads, "a word for each thread");
  const DraftBuffers& buffers = draft_buffers<M>(params);
  SampleState& state = sample_state<M>();
  const u32 c = t / kSampleParamWords, word = t % kSampleParamWords;
  if (c >= own.queries) return;
  const u32 s = own.owner[c], began = buffers.starts[s].column;
  // A launch of one sequence has them everywhere from the beginning.
  if (buffers.num_sequences > 1)
    reinterpret_cast<u32*>(state.params + c)[word] = reinterpret_cast<const u32*>(params.launch->sampling + began)[word];
  if (word) return;
  const SampleStep& first = params.launch->step[began];
  const u32 made = position[c] - params.launch->query[began].position;
  state.steps[c].position_low = first.position_low + made;
  state.steps[c].num_output = first.num_output + made;
}

// All consumer threads, after a barrier that follows the choice. Not inlined: that would take registers from the rest
// of the round. What is left in `control` is for whoever meets this block's threads afterwards.
template <class M>
__device__ __noinline__ void speculate(const Params& params, u32 round) {
  Control& control = *reinterpret_cast<Control*>(shared_part<M>(M::kShControl));
  // Where reductions have their sums: nobody needs these between a choice and a head.
  Found& found = *reinterpret_cast<Found*>(shared_part<M>(M::kShReduce));
  static_assert(!kDrafts || (sizeof(Found) <= M::kShReduceBytes && sizeof(Control) + sizeof(DraftControl) <= M::kShControlBytes),
                "shared memory of the plan");
  DraftControl& own = draft_control(control);
  const Columns columns{control.sequence, control.position, control.token, control.chosen};
  DraftGrid<M> grid{params};
  const bool is_last = control.yield_agreed || round + 1 == control.rounds;
  const bool goes_on = end_drafted_round(grid, own, found, draft_buffers<M>(params), params.launch->query, columns, round, is_last,
                                         M::kVocab);
  if (threadIdx.x == 0) {
    control.stop = !goes_on;
    if (goes_on) control.queries = Queries{own.queries};
  }
  if constexpr (kSamples) {
    if (!goes_on) return;
    sync_consumers();
    take_params<M>(params, own, control.position, threadIdx.x);
  }
}
