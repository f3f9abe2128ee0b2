// gate_up and down: silu(gate) · up travels between them in 16 bits.
#pragma once
#include "ops/hidden.cuh"
#include "tile/silu.cuh"

// Gate rows of a unit, and then as many up rows.
template <class GateUp>
inline constexpr u32 kUnitNeurons = GateUp::kUnitHalves * 4;

template <class L, class M>
__device__ __forceinline__ u8* gated_operand(const Context<M>& cx, u32 epoch) {
  return exchange_copy<M>(cx.params, L::kWsGated, L::kWsGatedBytes, epoch);
}

// One of several groups: kTiles tiles, or what the last group of a block has.
template <class Op, class M>
__device__ __forceinline__ void multiply_group(Ring<M>& ring, u32 warp, u32 lane, u32 tiles, const GlobalOperand<Op>& operand,
                                               Ahead<Op>& ahead, Sums<Op>& sums) {
  constexpr u32 kLast = (Op::kMaxUnits - 1) % Op::kTiles + 1, kFewer = kLast - 1;
  constexpr bool kSomeFewer = !Op::kEven && kFewer > 0;
  const auto arrived = [] {};
  if (tiles == Op::kTiles || (kLast == Op::kTiles && !kSomeFewer)) {
    multiply<2 * Op::kTiles, true>(ring, warp, lane, operand, ahead, sums, arrived);
  } else if (kLast < Op::kTiles && (tiles == kLast || !kSomeFewer)) {
    multiply<2 * kLast, false>(ring, warp, lane, operand, ahead, sums, arrived);
  } else if constexpr (kSomeFewer) {
    multiply<2 * kFewer, false>(ring, warp, lane, operand, ahead, sums, arrived);
  }
}

// A neuron's value from its sums; `bias`: of its gate row, null where there is none.
template <class GateUp>
__device__ __forceinline__ float gated(float gate, float up, float factor, const float* bias) {
  gate *= factor;
  up *= factor;
  if (bias) {
    gate += __ldg(bias);
    up += __ldg(bias + kUnitNeurons<GateUp>);
  }
  return silu(gate) * up;
}

// The same of several queries where a unit is a tile: a lane has sums of a gate row and of its up row. Tiles from kFirst to kEnd.
template <class L, u32 kFirst, u32 kEnd, class GateUp, class M>
__device__ __forceinline__ void publish_gated_tiles(Context<M>& cx, const Sums<GateUp>& sums, u32 units, u32 first_neuron,
                                                    const float* bias) {
  static_assert(kUnitNeurons<GateUp> == 8, "a unit is a tile");
  u8* now = gated_operand<L>(cx, cx.layers_done);
  const u32 g = cx.lane / 4, query = cx.lane % 4 * 2;
  const bool is_odd = g % 2;
  // Of two neighbours the even one stores the pair of the first query, the odd one that of the second.
  const u32 own = query + is_odd;
  TileReduction::for_each_tile<kFirst, kEnd>(cx, sums, units, [&](u32 t, const float (&all)[4]) {
    const u32 neuron = first_neuron + t * 8 + g;
    const float* own_bias = bias ? bias + neuron / 8 * 16 + neuron % 8 : nullptr;
    const Control& control = cx.shared.control();
    const float first = gated<GateUp>(all[0], all[2], control.factor[query], own_bias);
    const float second = gated<GateUp>(all[1], all[3], control.factor[query + 1], own_bias);
    const float other = __shfl_xor_sync(~0u, is_odd ? first : second, 4);
    const u32 pair = is_odd ? pack_pair(other, second) : pack_pair(first, other);
    if (kSilentBlock != kNoBlock && blockIdx.x == kSilentBlock) return;
    if (own < cx.queries) store_exchanged(operand_value(now, own, neuron - is_odd), present(pair));
  });
}

// One query, or units of half a tile, or very many tiles. Neurons go to all warps, 32 of a query at a time.
template <class L, class GateUp, class M>
__device__ __forceinline__ void publish_gated_rows(Context<M>& cx, const Sums<GateUp>& sums, u32 units, u32 first_neuron,
                                                   const float* bias) {
  constexpr u32 kNeurons = kUnitNeurons<GateUp>;
  const Control& control = cx.shared.control();
  u8* now = gated_operand<L>(cx, cx.layers_done);
  Reduction reduction(cx, GateUp::kTiles * 16, true);
  reduction.for_each_part(cx, sums, units * GateUp::kUnitHalves, units * 2 * kNeurons, [&](u32 start, u32 end) {
    const u32 jobs = ((end - start) / 2 + 31) / 32 * cx.queries;
#pragma unroll 1
    for (u32 job = cx.warp; job < jobs; job += kConsumerWarps) {
      const u32 query = job % cx.queries, n = start / 2 + job / cx.queries * 32 + cx.lane, neuron = first_neuron + n;
      const bool valid = n < end / 2;
      float value = 0.0f;
      if (valid) {
        const u32 row = n / kNeurons * (2 * kNeurons) + n % kNeurons - start;
        const float* own_bias = bias ? bias + neuron / kNeurons * (2 * kNeurons) + neuron % kNeurons : nullptr;
        value = gated<GateUp>(reduction.get(query, row), reduction.get(query, row + kNeurons), control.factor[query], own_bias);
      }
      publish_pair(now, query, neuron, cx.lane, valid, value);
    }
  });
}

// Where the sums of all tiles do not fit one reduction, neurons of so many are published while the last tiles are still multiplied.
// One reduction is left then, which gives a warp at most one tile.
template <class GateUp, class M>
inline constexpr bool kHasFirstTiles = kMostQueries > 1 && kMovesRegisters && kArithmetic<GateUp> == Arithmetic::kIntegers &&
                                        GateUp::kPairsSteps && GateUp::kDepth == 2 && kUnitNeurons<GateUp> == 8 &&
                                        GateUp::kTiles <= 16 && GateUp::kMaxUnits == GateUp::kTiles &&
                                        GateUp::kTiles > TileReduction::kMostAtOnce<M>;
template <class M>
inline constexpr u32 kLastTiles = TileReduction::kMostAtOnce<M> < kConsumerWarps ? TileReduction::kMostAtOnce<M> : kConsumerWarps;
template <class GateUp, class M>
inline constexpr u32 kFirstTiles = kHasFirstTiles<GateUp, M> ? (GateUp::kTiles - kLastTiles<M> + 1) / 2 * 2 : 0;

// `units` from `first_neuron` on, which this block owns, from the kFirst-th on.
template <class L, u32 kFirst = 0, class GateUp, class M>
__device__ __forceinline__ void publish_gated(Context<M>& cx, const Sums<GateUp>& sums, u32 units, u32 first_neuron,
                                              const float* bias) {
  // Beside the sums of very many tiles there are no registers for it.
  if constexpr (kMostQueries > 1 && kUnitNeurons<GateUp> == 8 && GateUp::kTiles <= 16) {
    publish_gated_tiles<L, kFirst, GateUp::kTiles>(cx, sums, units, first_neuron, bias);
  } else {
    publish_gated_rows<L>(cx, sums, units, first_neuron, bias);
  }
}
// The norm's factors before gate_up.
template <class GateUp, class M>
struct MidFactors {
  static constexpr bool kApart = kFindsFactorApart<GateUp, M>;
  Scale<MidStream<M>> scale;

  __device__ __forceinline__ void load(const Context<M>& cx) {
    if constexpr (!kApart) scale.load(cx, cx.layers_done);
  }
  // After the multiply, for who publishes.
  __device__ __forceinline__ void settle(Context<M>& cx) {
    if constexpr (kApart) FoundFactor::wait(cx);
    else scale.settle(cx, cx.layers_done);
  }
};
// Settles the norm's factors, and publishes neurons of the first tiles.
template <class L, u32 kCount, class GateUp, class M>
struct FirstTiles {
  static constexpr u32 kTiles = kCount;
  Context<M>& cx;
  const Sums<GateUp>& sums;
  MidFactors<GateUp, M>& factors;
  u32 units, first_neuron;
  const float* bias;

  __device__ __forceinline__ void operator()() const {
    factors.settle(cx);
    publish_gated_tiles<L, 0, kCount>(cx, sums, units, first_neuron, bias);
  }
};

template <class L, class M>
__device__ __forceinline__ void gate_up(L, Context<M>& cx, u32 layer) {
  using GateUp = typename L::GateUp;
  constexpr bool kOneGroup = GateUp::kMaxUnits * GateUp::kUnitHalves <= 2 * GateUp::kTiles;
  static_assert(kOneGroup || GateUp::kUnitHalves == 2, "a unit is a tile where there are several groups");
  static_assert(!kFindsFactorApart<GateUp, M> || (L::AttentionOutput::kUnits >= GateUp::kBlocks && GateUp::kUnits >= GateUp::kBlocks),
                "all consumers of a block meet before they wait for the factor, and after it");
  cx.begin(Phase::kGateUp);
  cx.let_clean(cx.layers_done + cx.round - 1);
  const u32 units = GateUp::num_units(cx.block), first = GateUp::first_unit(cx.block) * kUnitNeurons<GateUp>;
  const float* bias = L::kMlpBias ? cx.vectors(L::vectors(layer)) + L::kVecGateUpBias : nullptr;
  GlobalOperand<GateUp> operand(stream_operand<MidStream<M>>(cx, cx.layers_done), cx, L::vectors(layer));
  MidFactors<GateUp, M> factors;
  const auto arrived = [&] {
    factors.load(cx);
    cx.arrived();
  };
  if constexpr (kOneGroup) {
    constexpr u32 kFirst = kFirstTiles<GateUp, M>;
    Sums<GateUp> sums;
    if constexpr (kFirst > 0) {
      const FirstTiles<L, kFirst, GateUp, M> publish_first{cx, sums, factors, units, first, bias};
      multiply_owned<GateUp>(cx.ring, cx.warp, cx.lane, units, operand, sums, arrived, publish_first);
    } else {
      multiply_owned<GateUp>(cx.ring, cx.warp, cx.lane, units, operand, sums, arrived);
      factors.settle(cx);
    }
    cx.mark();
    publish_gated<L, kFirst>(cx, sums, units, first, bias);
  } else {
    // Groups of tiles, since the sums of all do not fit the registers: a unit is a tile.
    Ahead<GateUp> ahead;
    ahead.fill(operand);
    arrived();
#pragma unroll 1
    for (u32 group = 0; group < units; group += GateUp::kTiles) {
      const u32 tiles = min(GateUp::kTiles, units - group);
      if (GateUp::kSteps % GateUp::kDepth != 0 && group) ahead.fill(operand);
      Sums<GateUp> sums;
      multiply_group<GateUp>(cx.ring, cx.warp, cx.lane, tiles, operand, ahead, sums);
      if (group == 0) factors.settle(cx);
      if (group + GateUp::kTiles >= units) cx.mark();
      publish_gated<L>(cx, sums, tiles, first + group * kUnitNeurons<GateUp>, bias);
    }
  }
  cx.mark();
}

template <class L, class M>
__device__ __forceinline__ void down(L, Context<M>& cx, u32 layer) {
  using Down = typename L::Down;
  cx.begin(Phase::kDown);
  const u32 units = Down::num_units(cx.block);
  RowVectors<Down> vectors;
  vectors.load(cx, cx.vectors(M::attention_norm(layer + 1)),
               L::kMlpBias ? cx.vectors(L::vectors(layer)) + L::kVecDownBias : nullptr);
  const RankRows<InStream<M>> ranks(cx, cx.next_in(), M::Residual::first_unit(cx.block) * 8 + cx.lane);
  GlobalOperand<Down> operand(gated_operand<L>(cx, cx.layers_done), cx, L::vectors(layer));
  Sums<Down> sums;
  multiply_owned<Down>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] { cx.arrived(); });
  cx.mark();
  add_to_stream<InStream<M>>(cx, sums, cx.next_in(), vectors, ranks, layer);
  listen<MidStream<M>>(cx, layer + 1);
  cx.mark();
}
