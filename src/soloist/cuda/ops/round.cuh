// The rounds of a launch, and who does what in a block.
//
// Warps 0-7 of a block multiply, attend and choose tokens (`consume`); warp 8 streams weights and KV
// pages into the ring ahead of them (`produce`); warp 9 of block 0 talks to the host (`report`); warp 10
// makes exchange buffers ready for their next use (`clean`); warp 11 sees to it that no wait lasts (`watch`).
// Of an attention block (ops/attention_block.cuh) warps 0-7 attend alone, and warp 8 streams pages alone.
// Order of phases only; each phase is a file in ops/, and the generated header says which a layer has.
#pragma once
#include "ops/attention_block.cuh"
#include "ops/choose.cuh"
#include "ops/clean.cuh"
#include "ops/experts.cuh"
#include "ops/head.cuh"
#include "ops/missing.cuh"
#include "ops/mlp.cuh"
#include "ops/produce.cuh"
#include "ops/speculate.cuh"
#include "ptx/registers.cuh"

struct Barriers {
  u32 round;     // consumers -> producer: the round's outcome is known
  u32 emit;      // consumers -> reporter: tokens are ready
  u32 reported;  // reporter -> consumers: they are with the host
  u32 cleanable, cleaned;  // consumers -> cleaner and back
  u32 chosen;    // the first of ChoiceBarriers, where there are experts
};

// The round's outcome: tokens to emit and the next round's queries. Lane c of warp 0 serves query c.
template <class M>
__device__ __forceinline__ void conclude(Context<M>& cx, const Barriers& barriers) {
  // The producer copies pages that this round's keys and values went to, by this block or by others, whose records
  // of the best tokens came after them: ordered by the barrier below, by the arrival at `round` and the
  // producer's wait for it, and, where copies go through a proxy of their own, by this fence and the producer's.
  fence_async_proxy();
  cx.sync();
  Control& control = cx.shared.control();
  if constexpr (kDrafts) {
    // Before what the reporter reads is overwritten.
    if (cx.warp == 0 && cx.is_first() && cx.round > 0) mbarrier_wait(barriers.reported, (cx.round - 1) & 1);
    speculate<M>(cx.params, cx.round);
    if (cx.warp == 0) {
      if (cx.lane < kMaxQueries) control.emit[cx.lane] = control.chosen[cx.lane];
      __syncwarp();
      if (cx.lane < kRoundArrivals) {
        mbarrier_arrive(barriers.round);
        if (cx.is_first()) mbarrier_arrive(barriers.emit);
      }
    }
    cx.let_clean(cx.layers_done + cx.round);
    cx.sync();
    cx.queries = control.queries;
    return;
  }
  if (cx.warp == 0) {
    if (cx.is_first() && cx.round > 0)
      mbarrier_wait(barriers.reported, (cx.round - 1) & 1);
    bool ended = false;
    if (cx.lane < cx.queries) {
      const QueryStart& start = cx.params.launch->query[cx.lane];
      const u32 token = control.chosen[cx.lane], next = cx.round + 1;
      control.emit[cx.lane] = token;
      if (static_cast<i32>(next) < start.forced) {
        control.token[cx.lane] = __ldg(cx.params.forced + cx.lane * control.rounds + next);
      } else {
        control.token[cx.lane] = min(token, M::kVocab - 1);  // no id where no score is a number
        if (static_cast<i32>(next) > start.keep)
#pragma unroll(kMovesRegisters ? kMaxStops : 1)  // or few registers would spill
          for (i32 i = 0; i < start.num_stops; ++i) ended |= token == start.stops[i];
      }
      if constexpr (kSamples) observe<M>(cx.params, cx.grid_block(), cx.lane, control.token[cx.lane]);
      control.position[cx.lane] += start.stride;
    }
    ended = __any_sync(~0u, ended);
    __syncwarp();  // what other lanes wrote belongs to the arrivals of lane 0
    if (cx.lane == 0) control.stop = ended || control.yield_agreed || cx.round + 1 == control.rounds;
    if constexpr (kAttentionBlocks > 0) {
      if (cx.is_first() && cx.lane == 0) tell_outcome<M>(cx.params, cx.round, control.stop);
      const i32 next = control.position[0];
      if (!ended) await_attention_blocks<M>(cx.params, next - cx.params.launch->query[0].stride, next, cx.lane);
    }
    if (cx.lane < kRoundArrivals) {
      mbarrier_arrive(barriers.round);
      if (cx.is_first()) mbarrier_arrive(barriers.emit);
    }
  }
  cx.let_clean(cx.layers_done + cx.round);
  cx.sync();
}

// A layer of a kind: the kind knows the order of its phases. For `run_layers` of the generated header.
template <class L, class M>
__device__ __forceinline__ void run_layer(L, Context<M>& cx, u32& layer) {
  if (cx.thread == 0) cx.where->layer = layer;
  L::run(cx, layer);
}

// Where the ring's slots and their barriers are.
template <class M>
__device__ __forceinline__ Slots ring_slots(const u64* barriers) {
  const u32 full = kept_address(barriers);
  return {kept_address(dynamic), full, full + M::kRingSlots * 8};
}

template <class M>
__device__ __forceinline__ void consume(Context<M>& cx, const Barriers& barriers, const u64* all_barriers) {
  for (;; ++cx.round) {
    // Uniform registers do not outlive the call that chooses. Made anew in each round these addresses are in such ones
    // while layers run; kept over the call they would take others, of which products of several columns have none left.
    if constexpr (kSamples) {
      const Slots ring = ring_slots<M>(all_barriers);
      cx.ring = {ring.base, ring.full, ring.empty, cx.ring.slot, cx.ring.parity};
    }
    if (cx.thread == 0) cx.where->round = cx.round;
    cx.marks = kTrace && cx.round == kTraceRound ? cx.params.trace + blockIdx.x * kTraceWords : nullptr;
    cx.mark_clocks();
    cx.mark();
    cx.begin(Phase::kEmbed);
    embed(cx);
    load_rope(cx);
    cx.mark();
    M::run_layers(cx);
    cx.begin(Phase::kHead);
    if constexpr (M::kMeets) meet(cx);
    head(cx, logits_of_round(cx), kSamples && kPeers > 1 && !sample_state<M>().apart);
    cx.begin(Phase::kChoose);
    if constexpr (kSamples) {
      cx.mark();
      choose_sampled<M>(cx.params, cx.round, cx.where);
    } else {
      choose(cx);
    }
    cx.mark();
    cx.begin(Phase::kConclude);
    conclude(cx, barriers);
    cx.mark();
    cx.mark_clocks();
    cx.mark_sm();
    if (cx.shared.control().stop) return;
  }
}

// Tokens go to host memory while the next round runs; the host's wish to stop comes back.
template <class M>
__device__ __forceinline__ void report(const Params& params, Control* control, const Barriers& barriers) {
  for (u32 round = 0;; ++round) {
    mbarrier_wait(barriers.emit, round & 1);
    volatile Control* c = control;
    if constexpr (kDrafts) {
      u32* words = params.emitted + round * kEmittedWords;
      for (u32 i = 0; i < kMaxQueries; ++i) store_host(words + i, c->emit[i]);
      const volatile u16* told = draft_control(*control).told;
      for (u32 s = 0; s < draft_buffers<M>(params).num_sequences; ++s) store_host(words + kMaxQueries + s, told[s]);
    } else {
      for (u32 i = 0; i < c->queries; ++i) store_host(params.emitted + round * kMaxQueries + i, c->emit[i]);
    }
    const bool stop = c->stop;
    store_host_release(params.progress, round + 1);
    if (stop) return;
    c->yield = load_host(params.yield_requested);
    mbarrier_arrive(barriers.reported);
  }
}

template <class M>
inline constexpr u32 kChoiceBarriers = M::kMostSlots > 0 ? 2 : 0;
template <class M>
inline constexpr u32 kNumBarriers = 2 * M::kRingSlots + 6 + kChoiceBarriers<M>;

// What a warp is known to be: registers move when it takes its role, in the kernel's first launch.
struct AnyWarp {
  static constexpr bool kIsNew = true, kHelps = false;
};
template <bool kIsHelper>
struct KnownWarp {
  static constexpr bool kIsNew = false, kHelps = kIsHelper;
};

// A launch of one model, by all threads of a block. `all_barriers` and `progress` lie in shared memory. `then`: what each
// warp goes on with in its role, such as the launch of another model in the same kernel.
template <class M, class Role, class Then>
__device__ __forceinline__ void run_launch(Role, const Params& params, u64 (&all_barriers)[kNumBarriers<M>], Where& progress,
                                           const Then& then) {
  const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Slots ring = ring_slots<M>(all_barriers);
  const u32 first = ring.empty + M::kRingSlots * 8, finished = first + 40;
  const Barriers barriers{first, first + 8, first + 16, first + 24, first + 32, first + 48};
  u8* const fixed = at_shared<u8>(ring.base + M::kRingBytes);
  Control* const control = reinterpret_cast<Control*>(fixed + M::kShControl);
  Where* const where = at_shared<Where>(kept_address(&progress));
  if (thread == 0) {
    for (u32 i = 0; i < M::kRingSlots; ++i) {
      mbarrier_init(ring.full + i * 8, kStagingLanes);
      mbarrier_init(ring.empty + i * 8, kReleases);
    }
    for (u32 i = 0; i < 6 + kChoiceBarriers<M>; ++i) mbarrier_init(first + i * 8, i < 2 ? kRoundArrivals : 1);
    *where = Where{0, 0, 0, 0, 0, 0};
    control->queries = Queries{params.launch->queries};
    control->rounds = params.launch->rounds;
    control->stop = control->yield = control->yield_agreed = 0;
    fence_async_proxy();
  }
  if (thread < kMaxQueries) {
    const QueryStart& start = params.launch->query[thread];
    control->sequence[thread] = start.sequence;
    control->position[thread] = start.position;
    control->token[thread] = start.forced ? params.forced[thread * params.launch->rounds] : 0;
  }
  if constexpr (kSamples) prepare_sampling<M>(*params.launch);
  if constexpr (kDrafts) begin_drafting(draft_control(*control), draft_buffers<M>(params), blockIdx.x, thread);
  __syncthreads();
  const bool attends = is_attention_block(blockIdx.x);
  if constexpr (kAttentionBlocks > 0)
    if (attends && is_split<M>(control->position[0])) return;
  if (Role::kIsNew ? warp >= kConsumerWarps : Role::kHelps) {
    if constexpr (Role::kIsNew) give_registers();
    if (kAttentionBlocks > 0 && attends && warp == kConsumerWarps)
      produce_pages<M>(params, control, where, ring, barriers.round, lane);
    else if (warp == kConsumerWarps)
      produce<M>(params, control, where, ring, barriers.round, barriers.chosen, lane);
    else if (warp == kConsumerWarps + 1 && blockIdx.x == 0 && lane == 0)
      // Its address anew: the compiler spills it rather than keep it until here.
      report<M>(params, at_shared<Control>(kept_address(dynamic) + M::kRingBytes + M::kShControl), barriers);
    else if (warp == kConsumerWarps + 3 && lane == 0)
      watch<M>(where, params.fault, finished, ring.full, ring.empty, [&] { return missing_ranks<M>(params, where); });
    else if (warp == kConsumerWarps + 2 && !attends)
      // As above; but on Hopper, which takes two slots in a batch, it costs nothing to keep.
      clean<M>(params, kBatch > 1 ? control : at_shared<Control>(kept_address(dynamic) + M::kRingBytes + M::kShControl),
               barriers.cleanable, barriers.cleaned, barriers.chosen, lane);
    then(KnownWarp<true>{});
  } else {
    if constexpr (Role::kIsNew) take_registers();
    Context<M> cx{params, Shared<M>{fixed}, Ring<M>{ring.base, ring.full, ring.empty, 0, 0}, 0, lane_block<M>(), warp, lane, thread,
               control->queries, nullptr, 0, where, barriers.cleanable, barriers.cleaned, 0, 1.0f, barriers.chosen, 0};
    if (kAttentionBlocks > 0 && attends) attend_rounds<M>(params, control, where, ring, barriers.round);
    else consume(cx, barriers, all_barriers);
    if (thread == 0) mbarrier_arrive(finished);  // the watchdog may go
    then(KnownWarp<false>{});
  }
}
