// gate_up and down: silu(gate) · up travels between them in 16 bits.
#pragma once
#include "ops/hidden.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp2_fast(-1.4426950408889634f * x)); }

__device__ __forceinline__ u8* gated_operand(const Context& cx, u32 epoch) {
  return turn(cx.params, kWsGated, kWsGatedBytes, epoch);
}

// One of several groups: kTiles tiles, or what the last group of a block has.
template <class Op, class Operand>
__device__ __forceinline__ void multiply_group(Ring& ring, u32 warp, u32 lane, u32 tiles, const Operand& operand,
                                               Ahead<Op>& ahead, Sums<Op>& sums) {
  constexpr u32 kLast = (Op::kMaxUnits - 1) % Op::kTiles + 1, kFewer = kLast - 1;
  constexpr bool kSomeFewer = !Op::kEven && kFewer > 0;
  if (tiles == Op::kTiles || (kLast == Op::kTiles && !kSomeFewer)) {
    multiply<2 * Op::kTiles, true>(ring, warp, lane, operand, ahead, sums);
  } else if (kLast < Op::kTiles && (tiles == kLast || !kSomeFewer)) {
    multiply<2 * kLast, false>(ring, warp, lane, operand, ahead, sums);
  } else if constexpr (kSomeFewer) {
    multiply<2 * kFewer, false>(ring, warp, lane, operand, ahead, sums);
  }
}

__device__ __forceinline__ void gate_up(Context& cx, u32 layer) {
  cx.let_clean();
  const u32 units = num_units<GateUp>(cx.block), first = first_unit<GateUp>(cx.block) * 8;
  Ahead<GateUp> ahead;
  GlobalOperand operand(own_copy(cx.params, MidStream::kOperand, MidStream::kBytes, cx.hidden_mid, cx.block), cx.warp, cx.lane, cx.columns);
  ahead.fill(operand);
  Scale<MidStream> scale;
  scale.load(cx, cx.hidden_mid);
  cx.mark();
  u8* now = gated_operand(cx, cx.layers_done);
  const float* bias = kMlpBias ? cx.layer_vectors(layer) + kVecGateUpBias : nullptr;
  float factor = 0.0f;
  // Groups of tiles where the sums of all do not fit the registers: a unit is a tile.
  constexpr bool kOneGroup = GateUp::kMaxUnits <= GateUp::kTiles;
  u32 group = 0;
#pragma unroll 1
  do {
    const u32 tiles = kOneGroup ? units : min(GateUp::kTiles, units - group), begin_row = first + group * 8;
    Sums<GateUp> sums;
    if (kOneGroup) {
      multiply_owned<GateUp>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
    } else {
      if (GateUp::kSteps % GateUp::kDepth != 0 && group) ahead.fill(operand);
      multiply_group<GateUp>(cx.ring, cx.warp, cx.lane, tiles, operand, ahead, sums);
    }
    if (group == 0) factor = scale.take(cx, cx.hidden_mid);
    group += GateUp::kTiles;
    if (kOneGroup || group >= units) cx.mark();
    Reduction reduction(cx, GateUp::kTiles * 16);
    reduction.for_each_part(cx, sums, tiles * 2, tiles * 16, [&](u32 start, u32 end) {
      for (u32 begin = start / 2; begin < end / 2; begin += 32) {
        const u32 n = begin + cx.lane;
        const bool valid = n < end / 2;
        float gate = 0.0f, up = 0.0f;
        if (valid) {
          const u32 row = n / 8 * 16 + n % 8 - start;
          gate = reduction.get(cx.warp, row) * factor;
          up = reduction.get(cx.warp, row + 8) * factor;
          if (bias) {
            gate += __ldg(bias + (begin_row + n) / 8 * 16 + n % 8);
            up += __ldg(bias + (begin_row + n) / 8 * 16 + n % 8 + 8);
          }
        }
        publish_pair<kWsGatedBytes>(now, cx.warp, begin_row + n, cx.lane, valid, silu(gate) * up);
      }
    });
  } while (!kOneGroup && group < units);
  cx.mark();
}

__device__ __forceinline__ void down(Context& cx, u32 layer) {
  const u32 units = num_units<Down>(cx.block);
  RowVectors<Down> vectors;
  vectors.load(cx, layer + 1 < kLayers ? cx.layer_vectors(layer + 1) + kVecAttentionNorm : cx.layer_vectors(kLayers),
               kMlpBias ? cx.layer_vectors(layer) + kVecDownBias : nullptr);
  Ahead<Down> ahead;
  GlobalOperand operand(own_copy(cx.params, kWsGated, kWsGatedBytes, cx.layers_done, cx.block), cx.warp, cx.lane, cx.columns);
  ahead.fill(operand);
  cx.mark();
  Sums<Down> sums;
  multiply_owned<Down>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
  cx.mark();
  cx.hidden_in = cx.layers_done + cx.round + 1;
  add_to_stream<InStream>(cx, sums, cx.hidden_in, vectors);
  cx.mark();
}
