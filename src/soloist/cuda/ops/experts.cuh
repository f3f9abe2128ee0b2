// A layer of experts: the router and the choice, then gate_up and down of those that were chosen. An MLP beside them, which all
// tokens take, is multiplied before the choice is known, and its sums are the first that join a row's total.
//
// Every block computes the choice for itself from the logits of all blocks, so that it is the same in all. Experts are
// addressed by the choice: `first_tile` of the generated header says which tiles of gate_up a block has, counted over all
// slots; of `down` it has its rows of the residual stream of every slot.
#pragma once
#include "ops/mlp.cuh"
#include "ops/route.cuh"
#include "tile/logits.cuh"
#include "tile/slot_of_warp.cuh"
#include "tile/slots.cuh"

// What corrects the scores of the lane's experts.
template <class L, class M>
__device__ __forceinline__ void load_corrections(const Context<M>& cx, u32 layer, float (&correction)[ExpertChoice<L>::kEach]) {
  const float* corrections = cx.vectors(L::vectors(layer)) + L::kVecRouterCorrection;
#pragma unroll
  for (u32 i = 0; i < ExpertChoice<L>::kEach; ++i)
    correction[i] = L::kCorrected && 32 * i + cx.lane < L::kExperts ? __ldg(corrections + 32 * i + cx.lane) : 0.0f;
}
// Until all logits of this warp's query have come.
template <class L, class M>
__device__ __forceinline__ void wait_for_logits(const Context<M>& cx, float (&logit)[ExpertChoice<L>::kEach]) {
  const float* logits = expert_logits<M>(cx.params.workspace, cx.layers_done, 0, cx.warp);
#pragma unroll 1
  while (!load_logits<L, kLogitParts<L>>(logits, cx.lane, logit)) {}
}
// What the MLP that all tokens take counts for, by a logit that is still to be multiplied by `factor`.
template <class L, class M>
__device__ __forceinline__ void note_gate(const Context<M>& cx, float factor) {
  const float* logits = expert_logits<M>(cx.params.workspace, cx.layers_done, 0, cx.warp);
  float gate;
  do gate = load_logit<kLogitParts<L>, M>(logits + L::kExperts);
  while (!is_present(gate));
  if (cx.lane == 0) expert_slots<M>(cx.shared.base).shared_share[cx.warp] = sigmoid(gate * factor);
}

// The choice of this warp's query, once all logits have come.
template <class L, class M>
__device__ __forceinline__ ExpertChoice<L> choose_experts(Context<M>& cx, u32 layer) {
  float logit[ExpertChoice<L>::kEach], correction[ExpertChoice<L>::kEach];
  load_corrections<L>(cx, layer, correction);
  wait_for_logits<L>(cx, logit);
  if constexpr (L::kGatesShared) note_gate<L>(cx, 1.0f);
  cx.mark();
  return ExpertChoice<L>(logit, correction, cx.lane);
}

// gate_up of the MLP that all tokens take, for which the router found the factors of the queries.
// As `gate_up` in ops/mlp.cuh, without what that waits for and marks: one function for both would change the code of other models.
template <class L, class M>
__device__ __forceinline__ void gate_up_of_shared(Context<M>& cx, u32 layer) {
  using Mlp = typename L::SharedMlp;
  using GateUp = typename Mlp::GateUp;
  constexpr bool kOneGroup = GateUp::kMaxUnits * GateUp::kUnitHalves <= 2 * GateUp::kTiles;
  static_assert(kOneGroup || GateUp::kUnitHalves == 2, "a unit is a tile where there are several groups");
  const u32 units = GateUp::num_units(cx.block), first = GateUp::first_unit(cx.block) * kUnitNeurons<GateUp>;
  const GlobalOperand<GateUp> operand(stream_operand<MidStream<M>>(cx, cx.layers_done), cx, L::vectors(layer));
  if constexpr (kOneGroup) {
    Sums<GateUp> sums;
    multiply_owned<GateUp>(cx.ring, cx.warp, cx.lane, units, operand, sums, [] {});
    publish_gated<Mlp>(cx, sums, units, first, nullptr);
  } else {
    Ahead<GateUp> ahead;
    ahead.fill(operand);
#pragma unroll 1
    for (u32 group = 0; group < units; group += GateUp::kTiles) {
      const u32 tiles = min(GateUp::kTiles, units - group);
      if (GateUp::kSteps % GateUp::kDepth != 0 && group) ahead.fill(operand);
      Sums<GateUp> sums;
      multiply_group<GateUp>(cx.ring, cx.warp, cx.lane, tiles, operand, ahead, sums);
      publish_gated<Mlp>(cx, sums, tiles, first + group * kUnitNeurons<GateUp>, nullptr);
    }
  }
}

// The choice of a round's only query, of which the first warp tells the producer. It is made once before all logits have come: so its
// code is at hand when they have.
template <class L, class M>
__device__ __forceinline__ void choose_alone(Context<M>& cx, ExpertSlots<M>& slots) {
  const float* logits = expert_logits<M>(cx.params.workspace, cx.layers_done, 0, 0);
  float logit[ExpertChoice<L>::kEach];
#pragma unroll 1
  for (bool rehearses = true, ready = false; !ready; rehearses = false) {
    ready = load_logits<L, kLogitParts<L>>(logits, cx.lane, logit);
    if (!ready && !rehearses) continue;
    if (ready) cx.mark();
    slots.template fill<L>(ExpertChoice<L>(logit, cx.lane), cx.lane);
  }
  __syncwarp();
  if (cx.lane == 0) mbarrier_arrive(cx.chosen);  // pairs with the producer's wait
}

// The choice where logits came with attention (`route_early`): experts stream from it on, and what needs the residual follows. Marked as a router whose first two parts take no time.
template <class L, class M>
__device__ __forceinline__ void choose_early(Context<M>& cx, u32 layer) {
  using Choice = ExpertChoice<L>;
  ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
  Scale<MidStream<M>> scale;
  cx.mark();
  cx.mark();
  const auto settle = [&] {
    scale.load(cx, cx.layers_done);
    scale.settle(cx, cx.layers_done);
  };
  const auto note = [&](const Choice& choice) {
    if (cx.warp < cx.queries) slots.template note<L>(choice, cx.warp, cx.lane);
    // All queries' choices are there.
    if (kMostQueries > 1) cx.sync();
    else __syncwarp();
    if (cx.warp < cx.queries) slots.template number<L>(choice, cx.warp, cx.queries, cx.lane);
    // The first warp tells the producer. Of one query it numbered all slots itself; other warps meet it below.
    if (kMostQueries > 1) cx.sync();
    else __syncwarp();
    if (cx.thread == 0) mbarrier_arrive(cx.chosen);  // pairs with the producer's wait
  };
  // Once the residual's norm is known. Only `down` asks for shares: they may come while others multiply by gate_up.
  const auto meet = [&] {
    if constexpr (L::kGatesShared && !kWeighsApart<L>)
      if (cx.warp < cx.queries) note_gate<L>(cx, cx.scale);
    if (cx.thread == 0) {
      if constexpr (kWeighsApart<L>) cx.shared.control().scale = cx.scale;
      cx.set_waits(0);
    }
    cx.sync();
  };
  if constexpr (kWeighsApart<L>) {
    if (cx.warp == 0) choose_alone<L>(cx, slots);
    settle();
    meet();
  } else if constexpr (Choice::kByLogits) {
    float logit[Choice::kEach] = {};
    if (cx.warp < cx.queries) wait_for_logits<L>(cx, logit);
    cx.mark();
    Choice choice(logit, cx.lane);
    note(choice);
    settle();
    meet();
    if (cx.warp < cx.queries) {
#pragma unroll
      for (u32 i = 0; i < Choice::kEach; ++i) logit[i] *= cx.scale;
      choice.weigh(logit, cx.lane);
      slots.template number<L, true>(choice, cx.warp, cx.queries, cx.lane);
    }
  } else {
    settle();
    float logit[Choice::kEach] = {}, correction[Choice::kEach];
    load_corrections<L>(cx, layer, correction);
    if (cx.warp < cx.queries) wait_for_logits<L>(cx, logit);
    cx.mark();
#pragma unroll
    for (u32 i = 0; i < Choice::kEach; ++i) logit[i] *= cx.scale;
    note(Choice(logit, correction, cx.lane));
    meet();
  }
  if constexpr (L::kHasSharedMlp) gate_up_of_shared<L>(cx, layer);
  cx.mark();
}

template <class L, class M>
__device__ __forceinline__ void router(L, Context<M>& cx, u32 layer) {
  cx.begin(Phase::kRouter);
  if constexpr (L::kRoutesEarly) return choose_early<L>(cx, layer);
  const u32 first = L::first_router_row(cx.block), end = L::first_router_row(cx.block + 1);
  // Behind the rows of experts there may be one of the MLP that all tokens take.
  const float* weights = cx.vectors(L::vectors(layer)) + L::kVecRouter;
  u8* operand = stream_operand<MidStream<M>>(cx, cx.layers_done);
  float* parts = reinterpret_cast<float*>(cx.shared.base + M::kShExpertLogits);  // [row % 2][warp][query]
  RouterRow<M::kHidden> row;
  Scale<MidStream<M>> scale;
  if (first < end) row.load(weights + first * M::kHidden, cx.thread);
  scale.load(cx, cx.layers_done);
  // This warp's query; gate_up finds all queries' behind the barriers below.
  const float factor = scale.take(cx, cx.layers_done);
  cx.arrived();
  if (cx.warp < cx.queries && cx.lane == 0) cx.shared.control().factor[cx.warp] = factor;
#pragma unroll 1
  for (u32 r = first; r < end; ++r) {
    if (r > first) row.load(weights + r * M::kHidden, cx.thread);
    float* now = parts + r % 2 * (kConsumerWarps * kMostQueries);
    row.add_up(cx, operand, now);
    cx.sync();
    if (cx.warp < cx.queries && cx.lane == 0) {
      float sum = now[cx.warp];
#pragma unroll
      for (u32 w = 1; w < kConsumerWarps; ++w) sum += now[w * kMostQueries + cx.warp];
      store_exchanged(expert_logits<M>(cx.params.workspace, cx.layers_done, 0, cx.warp) + r, present(sum * factor));
    }
  }
  if constexpr (L::kHasSharedMlp) gate_up_of_shared<L>(cx, layer);
  cx.mark();
  ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
  if (cx.warp < cx.queries) {
    const ExpertChoice<L> choice = choose_experts<L>(cx, layer);
    slots.template note<L>(choice, cx.warp, cx.lane);
    // All queries' choices are there.
    if (kMostQueries > 1) cx.sync();
    else __syncwarp();
    slots.template number<L>(choice, cx.warp, cx.queries, cx.lane);
  } else if (kMostQueries > 1) {
    cx.sync();
  }
  cx.sync();
  if (cx.thread == 0) mbarrier_arrive(cx.chosen);  // pairs with the producer's wait
  cx.mark();
}

// silu(gate) · up of the 8 neurons of a tile, to the queries that chose the expert.
template <class L, class M>
__device__ __forceinline__ void publish_tile(Context<M>& cx, const Sums<typename L::GateUp>& sums, u8* now, u32 queries, u32 neuron) {
  Reduction reduction(cx, 16);
  reduction.for_each_part(cx, sums, 2, 16, [&](u32, u32) {
    if (!(queries >> cx.warp & 1)) return;
    const u32 n = cx.lane % 8;
    const float factor = cx.shared.control().factor[cx.warp];
    const float gate = reduction.get(cx.warp, n) * factor, up = reduction.get(cx.warp, n + 8) * factor;
    publish_pair(now, cx.warp, neuron + n, cx.lane, cx.lane < 8, silu(gate) * up);
  });
}

// Calls `use` with the slot and the tile of the expert of all tiles of gate_up that the block has, in the order in which they stream.
template <class L, class M, class Use>
__device__ __forceinline__ void for_each_tile(Context<M>& cx, const ExpertSlots<M>& slots, const Use& use) {
  using GateUp = typename L::GateUp;
  const u32 first = L::first_tile(cx.block, slots.count), end = L::first_tile(cx.block + 1, slots.count);
#pragma unroll 1
  for (u32 tile = first; tile < end; ++tile) use(tile / GateUp::kUnits, tile % GateUp::kUnits);
}

// Tiles of gate_up of a round's only query. Each warp adds up the sums of another one, while the others go on.
template <class L, class M>
struct GatedTiles {
  using GateUp = typename L::GateUp;
  static constexpr u32 kMost = (L::kChosen * GateUp::kUnits + M::kLaneBlocks - 1) / M::kLaneBlocks;
  static constexpr u32 kTogether = L::kTilesTogether;
  Reduction reduction;
  u32 place;

  __device__ __forceinline__ explicit GatedTiles(Context<M>& cx) : reduction(cx, 16 * kTogether, true), place(0) {}
  __device__ __forceinline__ void publish(Context<M>& cx, const Sums<GateUp>& sums, u8* now, u32 neuron) {
    reduction.put_tile(sums, 16 * place, cx.warp, cx.lane);
    if (cx.warp == place) {
      wait_at(place);
      const float sum = reduction.get(0, 16 * place + cx.lane % 16) * cx.shared.control().factor[0];
      const float up = __shfl_down_sync(~0u, sum, 8);
      publish_pair(now, 0, neuron + cx.lane, cx.lane, cx.lane < 8, silu(sum) * up);
    } else {
      arrive_at(place);
    }
    if (++place < kTogether) return;
    place = 0;
    if constexpr (kMost > kTogether) cx.sync();  // all have been added up
  }
};

template <class L, class M>
__device__ __forceinline__ void gate_up_of_experts(L, Context<M>& cx, u32 layer) {
  using GateUp = typename L::GateUp;
  // Activations stay in registers from tile to tile where there is room for all of them and no other form is made of them.
  constexpr bool kStay = kArithmetic<GateUp> == Arithmetic::kPlain && GateUp::kSteps == GateUp::kDepth;
  cx.begin(Phase::kGateUp);
  cx.let_clean(cx.layers_done + cx.round - 1);
  const ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
  cx.tell_chosen(layer, slots.count);
  u8* now = gated_operand<L>(cx, cx.layers_done);
  const GlobalOperand<GateUp> operand(stream_operand<MidStream<M>>(cx, cx.layers_done), cx, L::vectors(layer));
  Ahead<GateUp> ahead;
  ahead.fill(operand);
  cx.arrived();
  const u32 count = L::first_tile(cx.block + 1, slots.count) - L::first_tile(cx.block, slots.count);
  u32 left = count;
  const auto tiles = [&] {
    if constexpr (kMostQueries == 1) return GatedTiles<L, M>(cx);
    else return 0;
  };
  [[maybe_unused]] auto gated = tiles();
  for_each_tile<L>(cx, slots, [&](u32 slot, u32 tile) {
    if (!kStay && GateUp::kSteps % GateUp::kDepth != 0 && left < count) ahead.fill(operand);
    Sums<GateUp> sums;
    multiply<2, !kStay>(cx.ring, cx.warp, cx.lane, operand, ahead, sums, [] {});
    if (--left == 0) cx.mark();
    const u32 neuron = slot * L::kSlotColumns + tile * 8;
    if constexpr (kMostQueries == 1) gated.publish(cx, sums, now, neuron);
    else publish_tile<L>(cx, sums, now, slots.queries[slot], neuron);
  });
  if (count == 0) {
    cx.mark();
    if constexpr (L::kRoutesEarly && kMostQueries > 1) cx.sync();  // `down` finds the shares; who has a tile met the others for it
  }
  // `down` finds the shares.
  if constexpr (kWeighsApart<L>) mbarrier_wait(ChoiceBarriers{cx.chosen, 0}.weighed(), cx.weighings++ & 1);
  cx.mark();
}

// The activations of a slot, zeros for queries that did not choose it.
template <class L, class M>
__device__ __forceinline__ GlobalOperand<typename L::Down> slot_operand(const Context<M>& cx, u8* gated, u32 slot, u32 queries, u32 layer) {
  using Down = typename L::Down;
  GlobalOperand<Down> operand(gated + slot * (L::kSlotColumns * 2 * kRoomQueries), cx, L::vectors(layer));
  if constexpr (kRoomQueries > 1) operand.active = queries >> cx.lane / 4 & 1;
  return operand;
}

// A block's rows of one expert; activations that come next take the place of those that were used.
template <bool kAgain, class Op, class M>
__device__ __forceinline__ void multiply_rows(Ring<M>& ring, u32 warp, u32 lane, u32 units, const GlobalOperand<Op>& operand,
                                              Ahead<Op>& ahead, Sums<Op>& sums) {
  constexpr u32 kMost = Op::kMaxUnits * Op::kUnitHalves, kFewer = kMost - Op::kUnitHalves;
  if (Op::kEven || units == Op::kMaxUnits) {
    multiply<kMost, kAgain>(ring, warp, lane, operand, ahead, sums, [] {});
  } else if constexpr (!Op::kEven && kFewer > 0) {
    multiply<kFewer, kAgain>(ring, warp, lane, operand, ahead, sums, [] {});
  }
}

// What a warp has of a slot's rows, times the shares of the queries that chose it, joins its sums: of all chains the first.
template <class Op, class M>
__device__ __forceinline__ void add_slot(Sums<Op>& totals, const Sums<Op>& sums, const ExpertSlots<M>& slots, u32 slot, u32 lane) {
  const u32 query = kRoomQueries > 1 ? lane % 4 * 2 : 0;
  const u32 chose = slots.queries[slot] >> query;
  float share[2] = {slots.share[slot][query], 0.0f};
  if constexpr (kRoomQueries > 1) share[1] = slots.share[slot][query + 1];
#pragma unroll
  for (u32 t = 0; t < Op::kTiles; ++t)
    for (u32 i = 0; i < 4; i += kRoomQueries > 1 ? 1 : 2)
      if (chose >> i % 2 & 1) totals.c[t][0][i] = __fmaf_rn(sums.total(t, i), share[i % 2], totals.c[t][0][i]);
}

// A warp's sums begin with those of the MLP that all tokens take, times what it counts for.
template <class L, class M>
__device__ __forceinline__ void add_shared(Context<M>& cx, u32 layer, u32 units, Sums<typename L::Down>& totals) {
  using Down = typename L::SharedMlp::Down;
  static_assert(Down::kTiles == L::Down::kTiles && !kDealsTiles<Down>, "the plan refuses such formats");
  const GlobalOperand<Down> operand(gated_operand<typename L::SharedMlp>(cx, cx.layers_done), cx, L::vectors(layer));
  Sums<Down> sums;
  multiply_owned<Down>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] { cx.arrived(); });
  const u32 query = kRoomQueries > 1 ? cx.lane % 4 * 2 : 0;
  float share[2];
  if constexpr (L::kGatesShared) {
    const ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
    share[0] = slots.shared_share[query];
    if constexpr (kRoomQueries > 1) share[1] = slots.shared_share[query + 1];
  }
#pragma unroll
  for (u32 t = 0; t < Down::kTiles; ++t)
    for (u32 i = 0; i < 4; i += kRoomQueries > 1 ? 1 : 2) {
      totals.c[t][0][i] = sums.total(t, i);
      if constexpr (L::kGatesShared) totals.c[t][0][i] = __fmul_rn(totals.c[t][0][i], share[i % 2]);
    }
}

// Slots of a round's only query whose activations are converted together, as those of one matrix are: then all lanes have some, and what
// one waits for overlaps. So many that they divide those of a layer, and fit.
template <class L>
struct SlotsTogether : L::Down {
  using Down = typename L::Down;
  static constexpr u32 most() {
    u32 most = 1;
    // Digits of odd steps change places, see Conversion.
    if (Down::kSteps % 2 == 0 || !kMakesDigits<Down>)
      for (u32 n = 2; n <= L::kChosen; ++n)
        if (L::kChosen % n == 0 && n * Down::kSteps <= kConvertedSteps) most = n;
    return most;
  }
  static constexpr u32 kSlots = most(), kSteps = kSlots * Down::kSteps, kStepsAtOnce = kSteps;
};

// Whether each warp has a slot of `down`. Of 16 bits there has to be room for the sums.
template <class L>
constexpr bool has_slots_of_warps() {
  using Op = SlotOfWarp<typename L::Down>;
  return L::kChosen == kConsumerWarps && Op::kFits && (!Op::kIsPlain || L::kChosen * Op::kParts * 2 <= L::M::kHeadDim);
}
// Sums of a slot lie where its activations were converted, or where queries lie while the block attends.
template <class L>
struct SumsOfSlots {
  using M = typename L::M;
  using Op = SlotOfWarp<typename L::Down>;
  static constexpr u32 kParts = Op::kParts, kSlotBytes = Op::kIsPlain ? kParts * 64 : kConvertedSteps * 128;
  static_assert(!Op::kIsPlain || L::kChosen * kSlotBytes <= 16 * M::kHeadDim * 2, "room for all slots");
  u32 base;

  __device__ __forceinline__ explicit SumsOfSlots(const Context<M>& cx)
      : base(Op::kIsPlain ? shared_address(cx.shared.q_rows()) : cx.shared.converted()) {}
  __device__ __forceinline__ float get(u32 slot, u32 part, u32 row) const {
    return __uint_as_float(load_shared1(base + slot * kSlotBytes + part * 64 + row * 4));
  }
};
// Multiplies all slots of a round's only query, each by one warp. Afterwards their sums are there for all warps.
template <class L, class M>
__device__ __forceinline__ void multiply_slots_of_warps(Context<M>& cx, const GlobalOperand<SlotOfWarp<typename L::Down>>& operand,
                                                        Ahead<SlotOfWarp<typename L::Down>>& ahead, const SumsOfSlots<L>& sums) {
  if (!has_come(ahead)) ahead.fill(operand);
  if constexpr (!L::kHasSharedMlp) cx.arrived();
  if (kAblation != kNoMultiply) {
    multiply_slot(cx.ring, cx.warp, cx.lane, operand, ahead, sums.base + cx.warp * SumsOfSlots<L>::kSlotBytes);
    cx.ring.advance(L::kChosen);
  }
  // All sums are there. All slots have come, too, for which no warp but one has waited: who was ahead of a copy by the whole ring would
  // take its old phase for the next one's end.
  cx.sync();
}
// A warp's part of all slots, times their shares, joins its totals: in the order of slots that all warps share.
template <class L, class M>
__device__ __forceinline__ void add_slots_of_warps(const Context<M>& cx, const SumsOfSlots<L>& sums, Sums<typename L::Down>& totals) {
  if (cx.warp >= SumsOfSlots<L>::kParts) return;
  const ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
#pragma unroll
  for (u32 slot = 0; slot < L::kChosen; ++slot)
#pragma unroll
    for (u32 i = 0; i < 4; i += 2)
      totals.c[0][0][i] = __fmaf_rn(sums.get(slot, cx.warp, cx.lane / 4 + 4 * i), slots.share[slot][0], totals.c[0][0][i]);
}
// The same for all parts, which are then added up in the order of warps, as by `Reduction`: the sum of row `lane % 16`. By one warp, without
// a further trip through shared memory; its halves have every second part.
template <class L, class M>
__device__ __forceinline__ float total_of_slots(const Context<M>& cx, const SumsOfSlots<L>& sums) {
  constexpr u32 kParts = SumsOfSlots<L>::kParts, kEach = (kParts + 1) / 2;
  const ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
  const u32 row = cx.lane % 16;
  float own[kEach] = {};
#pragma unroll
  for (u32 slot = 0; slot < L::kChosen; ++slot)
#pragma unroll
    for (u32 i = 0; i < kEach; ++i)
      own[i] = __fmaf_rn(sums.get(slot, min(2 * i + cx.lane / 16, kParts - 1), row), slots.share[slot][0], own[i]);
  float total = 0.0f;
#pragma unroll
  for (u32 part = 0; part < kConsumerWarps; ++part) {
    const float x = part < kParts ? __shfl_sync(~0u, own[part / 2], row + part % 2 * 16) : 0.0f;
    total = part == 0 ? x : total + x;
  }
  return total;
}

// Adds the sums of all slots, of weights that are quantised, to a row's totals. `ahead`: activations of the first ones, which were asked for.
template <class L, class M>
__device__ __forceinline__ void add_slots(Context<M>& cx, u8* gated, u32 layer, u32 units, Ahead<SlotsTogether<L>>& ahead,
                                          Sums<typename L::Down>& totals) {
  using Down = typename L::Down;
  using Together = SlotsTogether<L>;
  const ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
  const auto operand_of = [&](u32 slot) {
    return GlobalOperand<Together>(gated + slot * (L::kSlotColumns * 2), cx, L::vectors(layer));
  };
#pragma unroll 1
  for (u32 first = 0; first < L::kChosen; first += Together::kSlots) {
    const auto operand = operand_of(first);
    if (!ahead.is_there()) ahead.fill(operand);
    if (!L::kHasSharedMlp && first == 0) cx.arrived();
    ahead.made = 0;
    Conversion<Together, true>{operand, ahead, cx.lane}.start();
    if (first + Together::kSlots < L::kChosen) ahead.load(operand_of(first + Together::kSlots), 0);
    auto of_slot = GlobalOperand<Down>(gated, cx, L::vectors(layer));
#pragma unroll 1
    for (u32 slot = first; slot < first + Together::kSlots; ++slot) {
      Ahead<Down> converted;
      converted.made = Ahead<Down>::kChunks;
      Sums<Down> sums;
      multiply_rows<true>(cx.ring, cx.warp, cx.lane, units, of_slot, converted, sums);
      add_slot<Down>(totals, sums, slots, slot, cx.lane);
      of_slot.converted += Down::kSteps * 128;
      of_slot.powers += Down::kSteps * 4;
    }
  }
}

template <class L, class M>
__device__ __forceinline__ void down_of_experts(L, Context<M>& cx, u32 layer) {
  using Down = typename L::Down;
  static_assert(!Down::kPermuted && !kDealsTiles<Down>, "the plan refuses such formats of experts");
  constexpr bool kConverting = kConverts<Down>, kTogether = kConverting && Down::kSteps <= kConvertedSteps;
  // All of a slot's activations come at once, and the next slot's while they are used: in their place, or in registers of their
  // own where another form is made of those that are used.
  constexpr bool kAtOnce = !kConverting && Down::kSteps == Down::kDepth;
  constexpr bool kAhead = kAtOnce && kArithmetic<Down> == Arithmetic::kPlain, kApart = kAtOnce && !kAhead;
  cx.begin(Phase::kDown);
  const u32 units = Down::num_units(cx.block);
  RowVectors<Down> vectors;
  vectors.load(cx, cx.vectors(M::attention_norm(layer + 1)), nullptr);
  const RankRows<InStream<M>> ranks(cx, cx.next_in(), M::Residual::first_unit(cx.block) * 8 + cx.lane);
  const ExpertSlots<M>& slots = expert_slots<M>(cx.shared.base);
  u8* gated = gated_operand<L>(cx, cx.layers_done);
  const u32 count = slots.count;
  Sums<Down> totals;
  totals.clear();
  const auto finish = [&] {
    cx.mark();
    add_to_stream<InStream<M>>(cx, totals, cx.next_in(), vectors, ranks, layer);
    cx.mark();
  };
  if constexpr (has_slots_of_warps<L>()) {
    const auto operand = operand_of_slot(gated + cx.warp * (L::kSlotColumns * 2), GlobalOperand<SlotOfWarp<Down>>(gated, cx), cx.lane);
    Ahead<SlotOfWarp<Down>> ahead;
    ask_for_first(ahead, operand);
    if constexpr (L::kHasSharedMlp) add_shared<L>(cx, layer, units, totals);
    const SumsOfSlots<L> sums(cx);
    multiply_slots_of_warps<L>(cx, operand, ahead, sums);
    if constexpr (!L::kHasSharedMlp) {
      cx.mark();
      StreamRows<InStream<M>, Down, M> rows(cx, cx.next_in(), vectors, ranks, layer);
      if (cx.warp == 0) {
        const float x = total_of_slots(cx, sums);
        arrive_at(0);
        rows.add(0, units * 8, [&](u32, bool valid) { return valid ? x : 0.0f; });
      } else {
        wait_at(0);  // what comes where the sums lie is next
      }
      rows.finish();
      cx.mark();
      return;
    }
    add_slots_of_warps(cx, sums, totals);
    return finish();
  }
  if constexpr (kTogether) {
    Ahead<SlotsTogether<L>> ahead;
    ahead.load(GlobalOperand<SlotsTogether<L>>(gated, cx, L::vectors(layer)), 0);
    if constexpr (L::kHasSharedMlp) add_shared<L>(cx, layer, units, totals);
    add_slots<L>(cx, gated, layer, units, ahead, totals);
    return finish();
  }
  Ahead<Down> ahead;
  if constexpr (L::kHasSharedMlp) {
    // With several queries there are too few registers to ask for a slot's activations meanwhile.
    constexpr bool kAsks = kAtOnce && kMostQueries == 1;
    const auto operand = slot_operand<L>(cx, gated, 0, slots.queries[0], layer);
    if constexpr (kAsks) ask_for_first(ahead, operand);
    add_shared<L>(cx, layer, units, totals);
    if constexpr (kAtOnce)
      if (!kAsks || !has_come(ahead)) ahead.fill(operand);
  } else if constexpr (kAtOnce) {
    ahead.fill(slot_operand<L>(cx, gated, 0, slots.queries[0], layer));
    cx.arrived();
  }
#pragma unroll 1
  for (u32 slot = 0; slot < count; ++slot) {
    Sums<Down> sums;
    if constexpr (kAhead) {
      const u32 next = min(slot + 1, count - 1);
      const auto operand = slot_operand<L>(cx, gated, next, slots.queries[next], layer);
      multiply_rows<true>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
      if (!has_come(ahead)) ahead.fill(operand);
    } else if constexpr (kApart) {
      const u32 after = min(slot + 1, count - 1);
      const auto operand = slot_operand<L>(cx, gated, slot, slots.queries[slot], layer);
      const auto following = slot_operand<L>(cx, gated, after, slots.queries[after], layer);
      Ahead<Down> next;
      ask_for_first(next, following);
      multiply_rows<false>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
      if (!has_come(next)) next.fill(following);
      ahead = next;
    } else {
      const auto operand = slot_operand<L>(cx, gated, slot, slots.queries[slot], layer);
      if constexpr (kConverting) __syncwarp();  // all lanes are done with what the last slot's became
      multiply_owned<Down>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] {
        if (!L::kHasSharedMlp && slot == 0) cx.arrived();
      });
    }
    add_slot<Down>(totals, sums, slots, slot, cx.lane);
  }
  finish();
}
