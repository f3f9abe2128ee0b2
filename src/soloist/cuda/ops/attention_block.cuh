// Blocks without weights, one for each KV head, that attend to a round's only query as long as its cache is one split. They do nothing
// else: their ring holds pages alone, which come before q, k and v do, and no block with weights is late for what follows attention.
//
// They choose no token. Block 0 tells them how each round ended. Once the cache is split they end, and tell the other blocks so, which
// read pages then that attention blocks wrote.
#pragma once
#include "ops/attention.cuh"
#include "ops/attention/attend_alone.cuh"
#include "ops/producer.cuh"

// Twice the number of rounds that have ended, and 1 more where the launch ends with them.
template <class M>
__device__ __forceinline__ u32* round_outcome(const Params& params) { return reinterpret_cast<u32*>(params.workspace + M::kWsOutcome); }
// Of each attention block, once it has left.
template <class M>
__device__ __forceinline__ u32* left_blocks(const Params& params) { return reinterpret_cast<u32*>(params.workspace + M::kWsLeft); }

template <class M>
__device__ __forceinline__ bool is_split(i32 position) { return split_bits_of<M>(0, position) > 0; }

// By one thread of block 0.
template <class M>
__device__ __forceinline__ void tell_outcome(const Params& params, u32 round, bool stop) {
  store_exchanged(round_outcome<M>(params), (round + 1) << 1 | (stop ? 1 : 0));
}
// By a warp of a block with weights, before its producer asks for pages from `next` on.
template <class M>
__device__ __forceinline__ void await_attention_blocks(const Params& params, i32 position, i32 next, u32 lane) {
  if (is_split<M>(position) || !is_split<M>(next)) return;
  if (lane < kAttentionBlocks)
    while (!is_present(load_exchanged_word(left_blocks<M>(params) + lane))) {
    }
  __threadfence();  // pairs with that of `end_round`
  __syncwarp();
}

// The round is over. Whether the block leaves.
template <class M>
__device__ __forceinline__ bool end_round(Context<M>& cx, u32 round_barrier) {
  fence_async_proxy();  // as in `conclude`
  cx.sync();
  Control& control = cx.shared.control();
  if (cx.warp == 0) {
    if (cx.lane == 0) {
      if constexpr (kSamples) cx.where->phase = static_cast<u32>(Phase::kMask);  // the host may take its time
      u32 word;
      do word = load_exchanged_word(round_outcome<M>(cx.params));
      while (word == kSentinel || word >> 1 < cx.round + 1);
      control.position[0] += cx.params.launch->query[0].stride;
      const bool splits = is_split<M>(control.position[0]);
      control.stop = word & 1 || splits;
      if (splits) {
        __threadfence();  // keys and values are in the pool
        store_exchanged(left_blocks<M>(cx.params) + (cx.block - kNumBlocks), 1u);
      }
    }
    __syncwarp();
    if (cx.lane < kRoundArrivals) mbarrier_arrive(round_barrier);
  }
  cx.sync();
  return control.stop;
}

// What the block does not do takes no time in its trace.
template <class M>
__device__ __forceinline__ void mark_times(Context<M>& cx, u32 count) {
  if constexpr (kTrace)
    for (u32 i = 0; i < count; ++i) cx.mark();
}

// Layers of an attention block, for `run_layers` of the generated header.
template <class M>
struct AttentionBlock {
  Context<M>& cx;
};
template <class L, class M>
__device__ __forceinline__ void run_layer(L, AttentionBlock<M>& own, u32& layer) {
  Context<M>& cx = own.cx;
  if (cx.thread == 0) {
    cx.where->layer = layer;
    cx.where->phase = static_cast<u32>(Phase::kAttention);
  }
  const u32 in = cx.next_in();
  ++cx.layers_done;
  mark_times(cx, L::kMarksBefore);
  Scale<InStream<M>> scale;
  scale.load(cx, in);
  scale.settle(cx, in);
  cx.sync();  // all warps know the factor, and rotations
  attend_alone(L{}, cx, layer);
  mark_times(cx, L::kMarksBehind + 1);  // nothing to merge
}

// By consumer warps.
template <class M>
__device__ __noinline__ void attend_rounds(const Params& params, Control* control, volatile Where* where, Slots ring, u32 round_barrier) {
  const u32 thread = threadIdx.x;
  u8* const fixed = reinterpret_cast<u8*>(control) - M::kShControl;
  Context<M> cx{params, Shared<M>{fixed}, Ring<M>{ring.base, ring.full, ring.empty, 0, 0}, 0, lane_block<M>(), thread / 32, thread % 32, thread,
               control->queries, nullptr, 0, where, 0, 0, 0, 1.0f, 0, 0};
  for (;; ++cx.round) {
    if (cx.thread == 0) cx.where->round = cx.round;
    cx.marks = kTrace && cx.round == kTraceRound ? cx.params.trace + blockIdx.x * kTraceWords : nullptr;
    cx.mark_clocks();
    cx.mark();
    load_rope(cx);
    cx.mark();
    AttentionBlock<M> own{cx};
    M::run_layers(own);
    const bool leaves = end_round(cx, round_barrier);
    mark_times(cx, kMarksOfRoundsEnd);
    cx.mark_clocks();
    cx.mark_sm();
    if (leaves) return;
  }
}
// By the producer warp.
template <class M>
__device__ __forceinline__ void produce_pages(const Params& params, Control* control, volatile Where* where, const Slots& slots,
                                              u32 round_barrier, u32 lane) {
  Producer<M> p{params, slots, where, &control->waits, read_once_policy(), lane, staging_lane<M>(), 0, 0, 0, false, nullptr, 0};
#pragma unroll 1
  for (u32 round = 0; round < params.launch->rounds; ++round) {
    where->producer_round = round;
    if (round > 0) {
      mbarrier_wait(round_barrier, (round - 1) & 1);  // pairs with `end_round`
      if (*const_cast<volatile u32*>(&control->stop)) return;
      fence_async_proxy();
    }
#pragma unroll 1
    for (u32 layer = 0; layer < M::kLayers; ++layer) {
      where->producer_layer = layer;
      p.pages(*control, layer);
    }
  }
}
