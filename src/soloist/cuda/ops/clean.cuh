// The cleaner warp: fills the exchange buffers that this block wrote two epochs ago with sentinels again, off the
// path of the consumers, with the fence that this needs. Before it cleans it finds the norm before gate_up, where that is its task; between
// two cleanings it weighs the experts that were chosen.
#pragma once
#include "ops/route.cuh"
#include "tile/logits.cuh"
#include "tile/slots.cuh"

// Words `first` … `first + count - 1` (32 bits each) of every query.
__device__ __forceinline__ void clear_words(u8* copy, u32 query_bytes, u32 queries, u32 first, u32 count, u32 lane) {
#pragma unroll 1
  for (u32 i = lane; i < queries * count; i += 32)
    store_exchanged(copy + i / count * query_bytes + (first + i % count) * 4, kSentinel);
}
// Rows `first` … `first + rows - 1` of an operand, two to a word.
__device__ __forceinline__ void clear_operand(u8* copy, u32 queries, u32 first, u32 rows, u32 lane) {
#pragma unroll 1
  for (u32 i = lane; i < queries * rows / 2; i += 32)
    store_exchanged(operand_value(copy, i / (rows / 2), first + i % (rows / 2) * 2), kSentinel);
}

template <class Stream>
__device__ __forceinline__ void clear_stream(const Params& params, u32 epoch, u32 queries, u32 block, u32 lane) {
  using M = typename Stream::M;
  using Rows = typename M::Residual;
  clear_operand(exchange_copy<M>(params, Stream::kOperand, Stream::kBytes, epoch), queries, Rows::first_unit(block) * 8,
                Rows::num_units(block) * 8, lane);
  clear_words(exchange_copy<M>(params, Stream::kSquares, Stream::kSquaresBytes, epoch), M::kLaneBlocks * 8, queries, block * 2, 2, lane);
}

// This block's rows of all ranks' partial sums.
template <class Stream>
__device__ __forceinline__ void clear_sums(const Params& params, u32 epoch, u32 queries, u32 block, u32 lane) {
  using M = typename Stream::M;
  using Rows = typename M::Residual;
  if constexpr (M::kRanks > 1) {
#pragma unroll 1
    for (u32 rank = 0; rank < M::kRanks; ++rank)
      clear_words(reinterpret_cast<u8*>(rank_sums<Stream>(params.workspace, epoch, rank, 0)), Rows::kUnits * 8 * 4,
                  queries, Rows::first_unit(block) * 8, Rows::num_units(block) * 8, lane);
  }
}

// Logits of this block's rows of the router, and its share of what a layer's experts have room for, padding left out.
template <class L>
__device__ __forceinline__ void clear_experts(const Params& params, u32 epoch, u32 queries, u32 block, u32 lane) {
  using M = typename L::M;
  constexpr u32 kChunks = L::Down::kColumns / 8;
  const u32 first = L::first_router_row(block), chosen = queries * L::kChosen;
#pragma unroll
  for (u32 part = 0; part < kLogitParts<L>; ++part)
    clear_words(reinterpret_cast<u8*>(expert_logits<M>(params.workspace, epoch, part, 0)), M::kMostLogits * 4, queries, first,
                L::first_router_row(block + 1) - first, lane);
  u8* gated = exchange_copy<M>(params, L::kWsGated, L::kWsGatedBytes, epoch);
  const u32 count = (chosen < L::kExperts ? chosen : L::kExperts) * queries * kChunks;
#pragma unroll 1
  for (u32 i = block * 32 + lane; i < count; i += M::kLaneBlocks * 32)
    store_exchanged(operand_value(gated, i / kChunks % queries, i / kChunks / queries * L::kSlotColumns + i % kChunks * 8),
                    make_uint4(kSentinel, kSentinel, kSentinel, kSentinel));
  if constexpr (L::kHasSharedMlp) {
    using Mlp = typename L::SharedMlp;
    using GateUp = typename Mlp::GateUp;
    constexpr u32 kNeurons = GateUp::kUnitHalves * 4;
    clear_operand(exchange_copy<M>(params, Mlp::kWsGated, Mlp::kWsGatedBytes, epoch), queries, GateUp::first_unit(block) * kNeurons,
                  GateUp::num_units(block) * kNeurons, lane);
  }
}

// Shares of the experts that a round's only query chose, by this warp: consumers let it clean once they know the norm.
template <class L>
__device__ __forceinline__ void weigh_experts(const Params& params, Control* control, u32 epoch, u32 lane) {
  using M = typename L::M;
  using Choice = ExpertChoice<L>;
  ExpertSlots<M>& slots = expert_slots<M>(reinterpret_cast<u8*>(control) - M::kShControl);
  const float* logits = expert_logits<M>(params.workspace, epoch, 0, 0);
  const float scale = *const_cast<const volatile float*>(&control->scale);
  float logit[Choice::kEach];
#pragma unroll 1
  while (!load_logits<L, kLogitParts<L>>(logits, lane, logit)) {}
  Choice choice;
#pragma unroll
  for (u32 i = 0; i < Choice::kEach; ++i) {
    choice.chosen |= (slots.chosen[0][i] >> lane & 1) << i;
    logit[i] *= scale;
  }
  choice.weigh(logit, lane);
  slots.template fill_shares<L>(choice, lane);
  if constexpr (L::kGatesShared) {
    float gate;
    do gate = load_logit<kLogitParts<L>, M>(logits + L::kExperts);
    while (!is_present(gate));
    if (lane == 0) slots.shared_share[0] = sigmoid(gate * scale);
  }
}

// Once a layer, in gate_up, for the layer after the next one: all but gated values of this layer are published, and
// nobody reads those of two layers before. Once more at the end of a round, for the embedding's epoch.
template <class M>
__device__ __forceinline__ void clean(const Params& params, Control* control, u32 cleanable, u32 cleaned, u32 chosen, u32 lane) {
  const u32 block = lane_block<M>(), head = block / M::kSplits, split = block % M::kSplits;
  // Rounds that draft have as many as they come to.
  const u32 queries = kDrafts ? kMaxQueries : control->queries;
  u32 hidden_in = 0, layers = 0;
  [[maybe_unused]] const ChoiceBarriers barriers{chosen, 0};
#pragma unroll 1
  for (u32 cleanings = 0;; ++cleanings) {
    mbarrier_wait(cleanable, cleanings & 1);
    if constexpr (kMostQueries == 1)
      if (const u32 layer = cleanings % (M::kLayers + 1); layer < M::kLayers)
        M::of_layer(layer, [=, &params](auto kind) {
          if constexpr (kFindsFactorApart<typename decltype(kind)::GateUp, M>) FoundFactor::find<M>(params, control, layers + 1, lane);
        });
    if constexpr (kCleanerCycles > 0)
      for (const u64 until = clock_cycles() + kCleanerCycles; clock_cycles() < until;) {}
    if constexpr (kHasWeigher<M>)
      if (const u32 layer = cleanings % (M::kLayers + 1); layer < M::kLayers) {
        M::of_layer(layer, [=, &params](auto kind) {
          if constexpr (kWeighsApart<decltype(kind)>) {
            weigh_experts<decltype(kind)>(params, control, layers + 1, lane);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(barriers.weighed());
          }
        });
      }
    ++hidden_in;
    clear_stream<InStream<M>>(params, hidden_in + 2, queries, block, lane);
    if constexpr (M::kFeedsRouters)
      clear_operand(exchange_copy<M>(params, M::kWsHiddenRouter, M::kWsHiddenRouterBytes, hidden_in + 2), queries,
                    M::Residual::first_unit(block) * 8, M::Residual::num_units(block) * 8, lane);
    clear_sums<InStream<M>>(params, hidden_in + 3, queries, block, lane);  // of this layer's down: hidden_in + 1
    if (cleanings % (M::kLayers + 1) == M::kLayers) {
      if constexpr (M::kMeets)  // of this round: round + 1
        clear_stream<OutStream<M>>(params, cleanings / (M::kLayers + 1) + 3, queries, block, lane);
      if (*const_cast<const volatile u32*>(&control->stop)) return;
    } else {
      ++layers;
      clear_stream<MidStream<M>>(params, layers + 2, queries, block, lane);
      clear_sums<MidStream<M>>(params, layers + 2, queries, block, lane);
      // The layer of the epoch that is cleaned.
      M::of_layer((cleanings % (M::kLayers + 1) + 2) % M::kLayers, [=, &params](auto kind) {
        using L = decltype(kind);
        using GateUp = typename L::GateUp;
        using Qkv = typename decltype(kind)::Qkv;
        if constexpr (L::kExperts > 0)
          clear_experts<L>(params, layers + 2, queries, block, lane);
        else
          clear_operand(exchange_copy<M>(params, L::kWsGated, L::kWsGatedBytes, layers + 2), queries,
                        GateUp::first_unit(block) * (GateUp::kUnitHalves * 4),
                        GateUp::num_units(block) * (GateUp::kUnitHalves * 4), lane);
        clear_words(exchange_copy<M>(params, M::kWsProjected, M::kWsProjectedBytes, layers + 2), Qkv::kUnits * 8 * 4, queries,
                    Qkv::first_unit(block) * 8, Qkv::num_units(block) * 8, lane);
      });
      if (head < M::kKvHeads) {
        u8* partial = exchange_copy<M>(params, M::kWsPartial, M::kWsPartialBytes, layers + 2);
        u8* stats = exchange_copy<M>(params, M::kWsPartialStats, M::kWsPartialStatsBytes, layers + 2);
        u8* attended = exchange_copy<M>(params, M::kWsAttended, M::kWsAttendedBytes, layers + 2);
#pragma unroll 1
        for (u32 i = 0; i < queries * M::kGroup; ++i) {
          const u32 row = (i / M::kGroup * M::kQueryHeads + head * M::kGroup + i % M::kGroup) * M::kSplits + split;
          clear_words(partial, 0, 1, row * M::kHeadDim, M::kHeadDim, lane);
          clear_words(stats, 0, 1, row * 2, 2, lane);
        }
        constexpr u32 kChunks = M::kGroup * M::kHeadDim / 8;
#pragma unroll 1
        for (u32 i = lane * M::kSplits + split; i < queries * kChunks; i += 32 * M::kSplits)
          store_exchanged(operand_value(attended, i / kChunks, head * M::kGroup * M::kHeadDim + i % kChunks * 8),
                          make_uint4(kSentinel, kSentinel, kSentinel, kSentinel));
      }
    }
    if constexpr (M::kRanks > 1) __threadfence_system();
    else __threadfence();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(cleaned);
  }
}
