// The round's choice by sample.cuh, in the kernel that samples: temperature and filters, penalties, bias,
// bans. The kernel that only takes largest logits chooses in head.cuh, and nothing here costs it anything.
#pragma once
#include "ops/draft_control.cuh"
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
  SampleParams params[kMaxQueries];
  SampleStep steps[kMaxQueries];
  SampleArgs args;
  SampleEpochs epochs;
  u32 arrivals;  // that the last barrier waited for
  u32 masked;    // queries whose tokens the host may forbid, a bit each
  u32 apart;     // of several ranks each looks at the logits that it makes: no query needs those of others
  u32 plain;     // the only query's tokens are neither changed nor filtered
};
template <class M>
constexpr u32 kMostOwnIds = (M::kSampledRows / 8 + kNumBlocks - 1) / kNumBlocks * 8;

// Behind `Control`, from round to round; the plan has room for it in builds that draft.
__device__ __forceinline__ DraftControl& draft_control(Control& control) { return reinterpret_cast<DraftControl&>(*(&control + 1)); }
__device__ __forceinline__ const DraftControl& draft_control(const Control& control) {
  return reinterpret_cast<const DraftControl&>(*(&control + 1));
}

// All blocks run at once, so they may wait for each other.
template <class M>
struct WholeGrid {
  const Params& params;
  bool apart;  // as of SampleState: blocks of all ranks exchange records
  u32* counter;
  u32 arrivals;
  const Control& control;

  __device__ __forceinline__ u32 block() const { return blockIdx.x; }
  __device__ __forceinline__ u32 num_blocks() const { return kNumBlocks; }
  __device__ __forceinline__ u32 thread() const { return threadIdx.x; }
  __device__ __forceinline__ void block_sync() { sync_consumers(); }
  __device__ __forceinline__ void acquire() { __threadfence(); }  // pairs with that of `head`
  __device__ __forceinline__ u64 from_lane(u64 value, u32 lane) const { return __shfl_sync(~0u, value, lane); }
  __device__ __forceinline__ u32 warp_max(u32 value) const { return __reduce_max_sync(~0u, value); }
  __device__ __forceinline__ u32 warp_add(u32 value) const { return __reduce_add_sync(~0u, value); }
  // In a launch that drafts all queries of a sequence but its first take drafts, which join its output when they are
  // accepted.
  __device__ __forceinline__ u32 num_unseen(u32 query, u32 id) const {
    u32 count = 0;
    if constexpr (kDrafts) {
      const DraftControl& drafting = draft_control(control);
#pragma unroll 1
      for (u32 i = drafting.column[drafting.owner[query]] + 1; i <= query; ++i) count += control.token[i] == id;
    }
    return count;
  }
  __device__ __forceinline__ u32 num_records() const { return apart ? kPeers * kNumBlocks : kNumBlocks; }
  __device__ __forceinline__ void publish(SampleScratch& scratch, u32 copy, u32 query, uint4 record) const {
    if (!apart) return store_exchanged(&scratch.records[copy][query][block()], record);
    if constexpr (kPeers > 1)
#pragma unroll
      for (u32 r = 0; r < kPeers; ++r)
        store_to_peer(best_records<M>(params.peers[r], copy, query, 0) + sender_rank(params, r) * kNumBlocks + block(), record);
  }
  __device__ __forceinline__ uint4 record(const SampleScratch& scratch, u32 copy, u32 query, u32 n) const {
    if constexpr (kPeers > 1)
      if (apart) return load_from_peers(best_records<M>(params.workspace, copy, query, 0) + n);
    return load_exchanged(&scratch.records[copy][query][n]);
  }
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

// Token ids that this block of the grid looks at, without rows of padding. apart: those whose logits it makes, as of one rank in any case;
// otherwise blocks of a rank have those of all ranks.
template <class M>
struct OwnIds {
  u32 begin, end;
  static __device__ __forceinline__ u32 first(u32 block) {
    return min(M::kVocab, block * (M::kSampledRows / 8) / kNumBlocks * 8);
  }
  static __device__ __forceinline__ u32 id(u32 first, u32 row) { return min(M::kVocab, first + min(M::kShareVocab, row)); }
  __device__ __forceinline__ OwnIds(const Params& params, u32 block, bool apart) {
    if ((M::kHasLanes && kPeers == 1) || (kPeers > 1 && apart)) {
      using Head = typename M::Head;
      const u32 own = block % M::kLaneBlocks, of_all = first_id<M>(params);
      begin = id(of_all, Head::first_unit(own) * 8);
      end = id(of_all, Head::first_unit(own + 1) * 8);
    } else {
      begin = first(block);
      end = first(block + 1);
    }
  }
};

template <class M>
__device__ __forceinline__ u8* shared_part(u32 offset) {
  return dynamic + M::kRingBytes + offset;
}
// Parameters, of which only builds that draft have all: a name that is looked up when a model is known.
template <class M>
struct ParamsOf {
  using Type = Params;
};
template <class M>
__device__ __forceinline__ const DraftBuffers& draft_buffers(const typename ParamsOf<M>::Type& params) { return params.draft; }

template <class M>
__device__ __forceinline__ SampleState& sample_state() { return *reinterpret_cast<SampleState*>(shared_part<M>(M::kShSampling)); }

// Histories of output are kept by who looks at a token's logits, whichever queries a launch has beside.
__device__ __forceinline__ bool needs_all_logits(const SampleParams& p) {
  return filters(p) || (p.flags & (kSampleMasked | kSamplePenalties));
}
__device__ __forceinline__ bool is_plain(const SampleParams& p) {
  return !needs_all_logits(p) && !(p.flags & kSampleGreedy) && p.bias_count == 0 && p.ban_count == 0;
}
// By all threads of a block, before the first round of a sampled launch.
template <class M>
__device__ __forceinline__ void prepare_sampling(const Launch& launch) {
  static_assert(sizeof(SampleState) <= M::kShSamplingBytes && (!kSamples || sizeof(SampleShared) <= M::kShReduceBytes + M::kShConvertedBytes),
                "shared memory of the plan");
  static_assert(kMostOwnIds<M> / 32 + 2 <= SampleShared::kMaskWords, "words of a block's part of a mask");
  static_assert(kMostOwnIds<M> <= SampleShared::kMostIds, "sums of a block's weights");
  SampleState& state = sample_state<M>();
  const u32 c = threadIdx.x;
  if (c < kMaxQueries) {
    state.params[c] = launch.sampling[c];
    state.steps[c] = launch.step[c];
  }
  if (c == 0) {
    state.epochs = SampleEpochs{};
    state.arrivals = 0;
    u32 masked = 0;
#pragma unroll
    for (u32 i = 0; i < kMaxQueries; ++i) masked |= launch.sampling[i].flags & kSampleMasked ? 1u << i : 0;
    state.masked = masked & ((1u << launch.queries) - 1);
    bool apart = kPeers > 1;
#pragma unroll 1
    for (u32 i = 0; i < launch.queries; ++i) apart = apart && !needs_all_logits(launch.sampling[i]);
    state.apart = apart;
    state.plain = launch.queries == 1 && is_plain(launch.sampling[0]);
  }
}

// What the host reads instead of a token.
__device__ __forceinline__ u32 no_token(float best) {
  return best != best ? kNoTokenNan : best > 0.0f ? kNoTokenInfinite : kNoTokenNegativeInfinite;
}

// Thread 0 of every block waits for the host to say what masked queries may choose: a bit for each query of
// which it said so. `ended`: it wants the launch to end with this round instead. One buffer a query is
// enough, since the host writes the next mask after it saw the round's token, for which all blocks had read
// this one.
template <class M>
__device__ __forceinline__ u32 wait_for_masks(const Params& params, u32 round, volatile Where* where, u32& ended) {
  const u32 may_be = sample_state<M>().masked;
  if (!may_be) return 0;
  u32 masked = 0;
  where->phase = static_cast<u32>(Phase::kMask);
#pragma unroll 1
  for (u32 c = 0; may_be >> c; ++c) {
    if (!(may_be >> c & 1)) continue;
    if (static_cast<i32>(round + 1) < params.launch->query[c].forced) continue;  // the host gives the next token
    u32 ready;
    do ready = load_host_acquire(params.masks.ready + c * kMaskReadyWords);  // pairs with `allow` of sampler.py
    while (ready != kMaskEnd && ready != round + 1);
    if (ready == kMaskEnd) ended = 1;
    else masked |= 1u << c;
  }
  where->phase = static_cast<u32>(Phase::kChoose);
  return masked;
}

// One word from every block of every rank, [rank][block]: the number of rounds that it has logits of, and beside it
// what block 0 of rank 0 publishes. A block overwrites its word, and logits, in the next round's head: the sums over ranks
// (or lanes' partial results) that it needed on the way there came after everybody's choice.
constexpr u32 kOutcomeBits = kMaxQueries + 1;  // masked queries, and whether the launch ends
template <class M>
__device__ __forceinline__ u32* arrivals(u8* workspace, u32 rank) {
  return reinterpret_cast<u32*>(workspace + M::kWsArrivals) + rank * kNumBlocks;
}
// All consumer threads: afterwards all ranks' logits of the round are here. Returns the word of block 0 of rank 0; only
// this block reads the host's wishes, which may change meanwhile.
template <class M>
__device__ __forceinline__ u32 meet_ranks(const Params& params, u32 block, u32 round, const Control& control,
                                          volatile Where* where) {
  sync_consumers();
  // Thread 0 speaks for its block, as at a barrier over the grid; its fence pairs with the loads below.
  if (threadIdx.x == 0) {
    u32 word = (round + 1) << kOutcomeBits;
    if (params.rank == 0 && block == 0) {
      u32 ended = *const_cast<const volatile u32*>(&control.yield);
      const u32 masked = wait_for_masks<M>(params, round, where, ended);
      word |= masked << 1 | (ended ? 1 : 0);
    }
    __threadfence_system();
#pragma unroll
    for (u32 r = 0; r < kPeers; ++r) store_to_peer(arrivals<M>(params.peers[r], params.rank) + block, word);
    if (sample_state<M>().masked) where->phase = static_cast<u32>(Phase::kMask);  // the host takes its time
  }
  const u32* words = arrivals<M>(params.workspace, 0);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < kPeers * kNumBlocks; i += kConsumerThreads)
    while (acquire_from_peers(words + i) >> kOutcomeBits != round + 1) {
    }
  sync_consumers();
  if (threadIdx.x == 0) where->phase = static_cast<u32>(Phase::kChoose);
  return acquire_from_peers(words) & ((1u << kOutcomeBits) - 1);
}

// The choice for a round's only query whose tokens nothing changes or filters. All consumer threads.
template <class M>
__device__ __forceinline__ void choose_plain(const Params& params, u32 round, Control& control, SampleState& state, SampleShared& shared,
                                             SampleWorkspace& workspace) {
  const bool apart = kPeers > 1;
  const i32 stride = params.launch->query[0].stride, forced = params.launch->query[0].forced;
  WholeGrid<M> grid{params, apart, &workspace.arrivals, state.arrivals, control};
  SampleEpochs epochs = state.epochs;
  const OwnIds<M> own(params, grid.block(), apart);
  const float* logits = params.logits + round * params.launch->logits_round_stride;
  if constexpr (kPeers > 1) logits = all_logits<M>(params.workspace, 0);
  SampleArgs args{};
  args.params = state.params, args.steps = state.steps, args.logits = logits;
  args.row_begin = own.begin, args.row_end = own.end, args.queries = 1;
  // That of the first block of all counts.
  args.note = (kPeers == 1 || params.rank == 0) && *const_cast<volatile u32*>(&control.yield) ? 1 : 0;
  grid.block_sync();  // the last reduction is read, and logits are written
  sample_plain<kMostOwnIds<M> <= 4 * kConsumerThreads ? 1 : 2>(grid, args, workspace.scratch, shared, epochs);
  if (grid.thread() != 0) return;
  const SampleResult result = shared.results[0];
  control.chosen[0] = result.status == kSampled ? result.token : no_token(result.best);
  state.steps[0].position_low += stride;
  state.steps[0].num_output += stride;
  control.yield_agreed = shared.note | (result.status != kSampled && static_cast<i32>(round + 1) >= forced);
  state.epochs = epochs;
}

// All consumer threads. Not inlined: that would take registers from the rest of the round.
template <class M>
__device__ __noinline__ void choose_sampled(const Params& params, u32 round, volatile Where* where) {
  Control& control = *reinterpret_cast<Control*>(shared_part<M>(M::kShControl));
  SampleState& state = sample_state<M>();
  // Nobody needs the reductions' buffer before conclude() has met all warps again.
  SampleShared& shared = *reinterpret_cast<SampleShared*>(shared_part<M>(M::kShReduce));
  SampleWorkspace& workspace = *reinterpret_cast<SampleWorkspace*>(params.sample.workspace);
  if constexpr (kMostQueries == 1)
    if (state.plain) return choose_plain<M>(params, round, control, state, shared, workspace);
  const bool apart = kPeers > 1 && state.apart;
  WholeGrid<M> grid{params, apart, &workspace.arrivals, state.arrivals, control};
  SampleEpochs epochs = state.epochs;
  const float* logits = params.logits + round * params.launch->logits_round_stride;
  const OwnIds<M> own(params, grid.block(), apart);
  u32 outcome = 0;
  if constexpr (kPeers > 1) {
    logits = all_logits<M>(params.workspace, 0);
    if (!apart) outcome = meet_ranks<M>(params, grid.block(), round, control, where);
    else if (params.rank == 0) outcome = *const_cast<volatile u32*>(&control.yield) ? 1 : 0;  // its first block's counts
  }
  const SampleArgs& args = state.args;
  if (grid.thread() == 0) {
    u32 yield, masked;
    const u32* masks = params.masks.words;
    if constexpr (kPeers == 1) {
      yield = *const_cast<volatile u32*>(&control.yield);
      masked = wait_for_masks<M>(params, round, where, yield);
    } else {
      yield = outcome & 1;
      masked = outcome >> 1;
      masks += (round + 1) % 2 * (kMaxQueries * M::kVocabWords);  // as the host does
    }
    state.args = {state.params, state.steps, logits, params.sample.adjusted, params.sample.seen,
                  params.sample.list_ids, params.sample.list_values, M::kSampledRows, own.begin, own.end,
                  control.queries, yield ? 1u : 0u, masks, M::kVocabWords, masked};
  }
  grid.block_sync();  // all warps' logits are written, and the last reduction is read
  sample_tokens(grid, args, workspace.scratch, shared, epochs);
  const u32 t = grid.thread();
  if (t < args.queries) {
    const SampleResult result = shared.results[t];
    const u32 stride = params.launch->query[t].stride;
    control.chosen[t] = result.status == kSampled ? result.token : no_token(result.best);
    state.steps[t].position_low += stride;
    state.steps[t].num_output += stride;
  }
  if (t == 0) {
    bool ended = shared.note;
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c)
      ended |= shared.results[c].status != kSampled && static_cast<i32>(round + 1) >= params.launch->query[c].forced;
    control.yield_agreed = ended;
    state.epochs = epochs;
    state.arrivals = grid.arrivals;
  }
}

// The query's next token joins its output. By the thread that settles the query's round.
template <class M>
__device__ __forceinline__ void observe(const Params& params, u32 block, u32 query, u32 id) {
  const SampleParams& p = sample_state<M>().params[query];
  const OwnIds<M> own(params, block, false);
  if (p.flags & kSamplePenalties)
    record_token(params.sample.seen + static_cast<u64>(p.history) * M::kSampledRows, id, own.begin, own.end);
}
