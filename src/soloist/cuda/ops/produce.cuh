// The producer warp: keeps the ring full of what the consumers will read next, in their order.
//
// Weights do not depend on anything, so it runs ahead of every exchange, up to the ring's size. Experts do.
#pragma once
#include "ops/producer.cuh"
#include "tile/slots.cuh"

// How many parts a block streams of chosen experts in a phase: each tile of gate_up, or of `down` each slot.
template <class M>
__device__ __forceinline__ u32 num_expert_parts(const ExpertSlots<M>& slots, u32 layer, u32 phase) {
  u32 count = slots.count;
  if (phase == kGateUpPhase)
    M::of_layer(layer, [&](auto kind) {
      using L = decltype(kind);
      const u32 block = lane_block<M>();
      if constexpr (L::kExperts > 0) count = L::first_tile(block + 1, slots.count) - L::first_tile(block, slots.count);
    });
  return count;
}
// The n-th of them.
template <class M>
__device__ __forceinline__ Part expert_part(const Params& params, const ExpertSlots<M>& slots, u32 layer, u32 phase, u32 n) {
  Part part;
  M::of_layer(layer, [&](auto kind) {
    using L = decltype(kind);
    if constexpr (L::kExperts > 0) {
      using GateUp = typename L::GateUp;
      using Down = typename L::Down;
      const u32 block = lane_block<M>();
      const bool is_down = phase > kGateUpPhase;
      const u32 tile = L::first_tile(block, slots.count) + n, slot = is_down ? n : tile / GateUp::kUnits;
      const u64 within = is_down ? L::kGateUpBytes + static_cast<u64>(Down::first_unit(block)) * L::kRowBytes
                                 : static_cast<u64>(tile % GateUp::kUnits) * L::kTileBytes;
      part = Part{params.experts + L::experts(layer) + static_cast<u64>(slots.expert[slot]) * L::kExpertBytes + within,
                  !is_down ? 2 : Down::kEndsInHalf ? 1 : Down::num_units(block),
                  !is_down ? GateUp::kSteps : Down::kEndsInHalf ? 2 * Down::kSteps - 1 : Down::kSteps,
                  2 * (is_down ? Down::kHalfTileBytes * Down::kSlotTiles : GateUp::kHalfTileBytes * GateUp::kSlotTiles),
                  is_down ? Down::kHalfTileBytes : GateUp::kHalfTileBytes};
    }
  });
  return part;
}
// Streams it.
template <class M>
__device__ __forceinline__ void stream_expert_part(Producer<M>& p, const ExpertSlots<M>& slots, u32 layer, u32 phase, u32 n) {
  const Part part = expert_part<M>(p.params, slots, layer, phase, n);
  bool streams = true;
  if (phase > kGateUpPhase)
    M::of_layer(layer, [&](auto kind) {
      using L = decltype(kind);
      if constexpr (L::kExperts > 0)
        if constexpr (kLeavesOutPadding<typename L::Down>) {
          p.template row_without_padding<typename L::Down>(part.source);
          streams = false;
        }
    });
  if (streams) p.weights(part);
}
// Whether lanes find the addresses of all tiles and rows at once, as soon as a round's only query has chosen: where a tile is one copy.
// Larger ones take long enough to come.
template <class L>
constexpr bool addresses_at_once() {
  if constexpr (kMostQueries == 1 && L::kExperts > 0 && kStagingLanes == 1) {
    constexpr u32 kMostTiles = (L::kChosen * L::GateUp::kUnits + L::M::kLaneBlocks - 1) / L::M::kLaneBlocks;
    using GateUp = typename L::GateUp;
    constexpr bool kIsOneCopy = L::kTileBytes <= 2 * GateUp::kHalfTileBytes * GateUp::kSlotTiles;
    return kIsOneCopy && kLeavesOutPadding<typename L::Down> && kMostTiles <= 32 && L::kChosen <= 32;
  } else {
    return false;
  }
}
// Streams so; whether it did.
template <class M>
__device__ __forceinline__ bool stream_chosen(Producer<M>& p, const ExpertSlots<M>& slots, u32 layer, u32 phase,
                                              const ChoiceBarriers& barriers) {
  bool streamed = false;
  M::of_layer(layer, [&](auto kind) {
    using L = decltype(kind);
    if constexpr (addresses_at_once<L>()) {
      using GateUp = typename L::GateUp;
      using Down = typename L::Down;
      const u32 block = lane_block<M>();
      const u8* const experts = p.params.experts + L::experts(layer);
      const auto at = [&](u32 slot, u64 within) { return experts + within + static_cast<u64>(slots.expert[slot]) * L::kExpertBytes; };
      const auto of_lane = [](const u8* own, u32 lane) {
        return reinterpret_cast<const u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(own), lane));
      };
      if (phase == kGateUpPhase) {
        const u32 first = L::first_tile(block, L::kChosen), count = L::first_tile(block + 1, L::kChosen) - first;
        const u32 tile = min(first + p.lane, L::kChosen * GateUp::kUnits - 1);
        const u64 within = static_cast<u64>(tile % GateUp::kUnits) * L::kTileBytes;
        mbarrier_wait(barriers.chosen, barriers.parity);
        const u8* own = at(tile / GateUp::kUnits, within);
#pragma unroll 1
        for (u32 n = 0; n < count; ++n) {
          const u8* source = of_lane(own, n);
          if (p.stages()) p.template copy<false>(source, L::kTileBytes);
        }
      } else {
        const u64 within = L::kGateUpBytes + static_cast<u64>(Down::first_unit(block)) * L::kRowBytes;
        const u8* own = at(min(p.lane, L::kChosen - 1), within);
#pragma unroll 1
        for (u32 n = 0; n < L::kChosen; ++n) {
          const u8* source = of_lane(own, n);
          if (p.stages()) p.template copy<false, Down>(source, 0);
        }
      }
      __syncwarp();
      streamed = true;
    }
  });
  return streamed;
}
// Phases that stream chosen experts. The first of them waits for the choice.
template <class M>
__device__ __forceinline__ bool is_of_experts(u32 layer, u32 phase) {
  bool is = false;
  M::of_layer(layer, [&](auto kind) { is = decltype(kind)::kExperts > 0 && phase >= kGateUpPhase; });
  return is;
}
// Of them, those that begin with a matrix of the MLP that all tokens take, which hangs on no choice.
template <class M>
__device__ __forceinline__ bool has_shared_part(u32 layer) {
  bool has = false;
  M::of_layer(layer, [&](auto kind) {
    using L = decltype(kind);
    if constexpr (L::kExperts > 0) has = L::kHasSharedMlp;
  });
  return has;
}
template <class M>
__device__ __forceinline__ Part shared_part_of_phase(const u8* image, u32 layer, u32 phase) {
  Part part;
  M::of_layer(layer, [&](auto kind) {
    using L = decltype(kind);
    if constexpr (L::kExperts > 0)
      if constexpr (L::kHasSharedMlp) {
        using Mlp = typename L::SharedMlp;
        if (phase == kGateUpPhase) part = part_of<M, typename Mlp::GateUp>(image, L::weights(layer));
        else part = part_of<M, typename Mlp::Down>(image, L::weights(layer));
      }
  });
  return part;
}
template <class M>
__device__ __forceinline__ void produce(const Params& params, Control* control, volatile Where* where, const Slots& slots,
                                        u32 round_barrier, u32 chosen_barrier, u32 lane) {
  [[maybe_unused]] u32 choices = 0;
  Producer<M> p{params, slots, where, &control->waits, read_once_policy(), lane, staging_lane<M>(), 0, 0, 0, false, nullptr, 0};
#pragma unroll 1
  for (u32 round = 0; round < params.launch->rounds; ++round) {
    where->producer_round = round;
    u32 begin = 0;
    if (round > 0) {
      // Not more than the ring holds: nobody consumes them if the launch ends here.
      const u32 before = p.issued;
      p.weights(part_of_phase<M>(params.image, 0, 0), 0, M::kRingSlots);
      begin = M::kRingSlots;
      // Pairs with conclude(): the new positions are known, the last keys and values written.
      mbarrier_wait(round_barrier, (round - 1) & 1);
      if (*const_cast<volatile u32*>(&control->stop)) return p.drain(p.issued - before);
      fence_async_proxy();
    }
    // One loop over everything that streams, so that the code for it is there once.
#pragma unroll 1
    for (u32 i = 0; i <= M::kLayers * kLayerPhases; ++i) {
      const u32 layer = i / kLayerPhases, phase = i % kLayerPhases;
      where->producer_layer = layer;
      if (phase == kPagesPhase) {
        p.pages(*control, layer);
        continue;
      }
      p.of_head = layer == M::kLayers;
      if constexpr (M::kMostSlots > 0) {
        u8* const shared = reinterpret_cast<u8*>(control) - M::kShControl;
        const auto& chosen = *reinterpret_cast<const ExpertSlots<M>*>(shared + M::kShChoice);
        if (!p.of_head && is_of_experts<M>(layer, phase)) {
          if constexpr (M::kHasSharedMlp)
            if (has_shared_part<M>(layer)) p.weights(shared_part_of_phase<M>(params.image, layer, phase));
          const ChoiceBarriers barriers{chosen_barrier, choices & 1};
          if (phase == kGateUpPhase) ++choices;
          if (stream_chosen<M>(p, chosen, layer, phase, barriers)) continue;
          if (phase == kGateUpPhase) mbarrier_wait(barriers.chosen, barriers.parity);
          const u32 count = num_expert_parts<M>(chosen, layer, phase);
#pragma unroll 1
          for (u32 n = 0; n < count; ++n) stream_expert_part(p, chosen, layer, phase, n);
          continue;
        }
      }
      Part part;
      if (layer == M::kLayers) part = part_of<M, typename M::Head>(params.image, 0);
      else part = part_of_phase<M>(params.image, layer, phase);
      p.weights(part, begin);
      begin = 0;
    }
  }
}
