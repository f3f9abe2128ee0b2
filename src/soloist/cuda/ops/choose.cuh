// The round's choice by sample.cuh, in the kernel that samples: temperature and filters, penalties, bias,
// bans. The kernel that only takes largest logits chooses in head.cuh, and nothing here costs it anything.
#pragma once
#include "ops/head.cuh"
#include "ops/sample.cuh"

// Global memory, zeroed by the host for each sampled launch.
struct SampleWorkspace {
  SampleScratch scratch;
  u32 arrivals;  // of blocks at barriers over the grid, since the launch began
};
static_assert(sizeof(SampleWorkspace) == kSampleWorkspaceBytes, "sample_workspace_bytes in sampling_header.py");

// In shared memory, from round to round.
struct SampleState {
  SampleParams params[kMaxColumns];
  SampleStep steps[kMaxColumns];
  SampleArgs args;
  SampleTurns turns;
  u32 arrivals;  // that the last barrier waited for
};
static_assert(sizeof(SampleState) <= kShSamplingBytes && sizeof(SampleShared) <= kShReduceBytes,
              "shared memory of the plan");
static_assert(Head::kMaxUnits * 8 / 32 + 2 <= SampleShared::kMaskWords, "words of a block's part of a mask");

// All blocks run at once, so they may wait for each other.
struct WholeGrid {
  u32* counter;
  u32 arrivals;

  __device__ __forceinline__ u32 block() const { return blockIdx.x; }
  __device__ __forceinline__ u32 num_blocks() const { return kNumBlocks; }
  __device__ __forceinline__ u32 thread() const { return threadIdx.x; }
  __device__ __forceinline__ void block_sync() { sync_consumers(); }
  // Thread 0 speaks for its block: what the others wrote before the first block barrier is released
  // with its arrival, and what it acquires is theirs after the second.
  __device__ __forceinline__ void sync() {
    arrivals += kNumBlocks;
    block_sync();
    if (thread() == 0) {
      add_release(counter, 1);
      while (static_cast<i32>(load_acquire(counter) - arrivals) < 0) {
      }
    }
    block_sync();
  }
};

// Token ids whose logits a block makes, without rows of padding. For one rank.
struct OwnIds {
  u32 begin, end;
  __device__ __forceinline__ explicit OwnIds(u32 block)
      : begin(id(first_unit<Head>(block) * 8)), end(id(first_unit<Head>(block + 1) * 8)) {}
  __device__ static __forceinline__ u32 id(u32 row) {
    return min(kVocab, kHasLanes ? lane_here() * kShareVocab + min(kShareVocab, row) : row);
  }
};

__device__ __forceinline__ u8* shared_part(u32 offset) {
  return dynamic + kRingSlots * kSlotBytes + offset;
}
__device__ __forceinline__ SampleState& sample_state() { return *reinterpret_cast<SampleState*>(shared_part(kShSampling)); }

// By all threads of a block, before the first round of a sampled launch.
__device__ __forceinline__ void prepare_sampling(const Launch& launch) {
  SampleState& state = sample_state();
  const u32 c = threadIdx.x;
  if (c < kMaxColumns) {
    state.params[c] = launch.sampling[c];
    state.steps[c] = launch.step[c];
  }
  if (c == 0) {
    state.turns = SampleTurns{};
    state.arrivals = 0;
  }
}

// What the host reads instead of a token.
__device__ __forceinline__ u32 no_token(float best) {
  return best != best ? kNoTokenNan : best > 0.0f ? kNoTokenInfinite : kNoTokenNegativeInfinite;
}

// Thread 0 of every block waits for the host to say what masked columns may choose: a bit for each column of
// which it said so. `ended`: it wants the launch to end with this round instead. One buffer a column is
// enough, since the host writes the next mask after it saw the round's token, for which all blocks had read
// this one.
__device__ __forceinline__ u32 wait_for_masks(const Params& params, u32 round, u32 columns, volatile Where* where,
                                              u32& ended) {
  u32 masked = 0;
  where->phase = static_cast<u32>(Phase::kMask);
#pragma unroll 1
  for (u32 c = 0; c < columns; ++c) {
    if (!(sample_state().params[c].flags & kSampleMasked)) continue;
    if (static_cast<i32>(round + 1) < params.launch->column[c].forced) continue;  // the host gives the next token
    u32 turn;
    do turn = load_host_acquire(params.masks.turns + c * kMaskTurnWords);  // pairs with `allow` of launch.py
    while (turn != kMaskEnd && turn != round + 1);
    if (turn == kMaskEnd) ended = 1;
    else masked |= 1u << c;
  }
  where->phase = static_cast<u32>(Phase::kChoose);
  return masked;
}

// All consumer threads. Not inlined: that would take registers from the rest of the round.
__device__ __noinline__ void choose_sampled(const Params& params, u32 round, volatile Where* where) {
  Control& control = *reinterpret_cast<Control*>(shared_part(kShControl));
  SampleState& state = sample_state();
  // Nobody needs the reductions' buffer before conclude() has met all warps again.
  SampleShared& shared = *reinterpret_cast<SampleShared*>(shared_part(kShReduce));
  SampleWorkspace& workspace = *reinterpret_cast<SampleWorkspace*>(params.sample.workspace);
  WholeGrid grid{&workspace.arrivals, state.arrivals};
  SampleTurns turns = state.turns;
  const float* logits = params.logits + round * params.launch->logits_round_stride;
  const OwnIds own(lane_block());
  const SampleArgs& args = state.args;
  if (grid.thread() == 0) {
    u32 yield = *const_cast<volatile u32*>(&control.yield);
    const u32 masked = wait_for_masks(params, round, control.columns, where, yield);
    state.args = {state.params, state.steps, logits, params.sample.adjusted, params.sample.seen,
                  params.sample.list_ids, params.sample.list_values, kVocabRows, own.begin, own.end,
                  control.columns, yield, params.masks.words, kVocabWords, masked};
  }
  grid.block_sync();  // all warps' logits are written, and the last reduction is read
  sample_tokens(grid, args, workspace.scratch, shared, turns);
  const u32 t = grid.thread();
  if (t < args.columns) {
    const SampleResult result = shared.results[t];
    const u32 stride = params.launch->column[t].stride;
    control.chosen[t] = result.status == kSampled ? result.token : no_token(result.best);
    state.steps[t].position_low += stride;
    state.steps[t].num_output += stride;
  }
  if (t == 0) {
    bool ended = shared.note;
#pragma unroll 1
    for (u32 c = 0; c < args.columns; ++c)
      ended |= shared.results[c].status != kSampled && static_cast<i32>(round + 1) >= params.launch->column[c].forced;
    control.yield_agreed = ended;
    state.turns = turns;
    state.arrivals = grid.arrivals;
  }
}

// The column's next token joins its output. By the thread that settles the column's round.
__device__ __forceinline__ void observe(const Params& params, u32 block, u32 column, u32 id) {
  const SampleParams& p = sample_state().params[column];
  const OwnIds own(block);
  if (p.flags & kSamplePenalties)
    record_token(params.sample.seen + static_cast<u64>(p.history) * kVocabRows, id, own.begin, own.end);
}
