// gate_up and down: silu(gate) · up travels between them in 16 bits.
#pragma once
#include "ops/hidden.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp2_fast(-1.4426950408889634f * x)); }

__device__ __forceinline__ u8* gated_operand(const Context& cx, u32 epoch) {
  return turn(cx.params, kWsGated, kWsGatedBytes, epoch);
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
  Sums<GateUp> sums;
  multiply_owned<GateUp>(cx.ring, cx.warp, cx.lane, units, operand, ahead, sums);
  const float factor = scale.take(cx, cx.hidden_mid);
  cx.mark();
  Reduction reduction(cx, GateUp::kTiles * 16);
  u8* now = gated_operand(cx, cx.layers_done);
  const float* bias = kMlpBias ? cx.layer_vectors(layer) + kVecGateUpBias : nullptr;
  reduction.for_each_part(cx, sums, units * 2, units * 16, [&](u32 start, u32 end) {
    for (u32 begin = start / 2; begin < end / 2; begin += 32) {
      const u32 n = begin + cx.lane;
      const bool valid = n < end / 2;
      float gate = 0.0f, up = 0.0f;
      if (valid) {
        const u32 row = n / 8 * 16 + n % 8 - start;
        gate = reduction.get(cx.warp, row) * factor;
        up = reduction.get(cx.warp, row + 8) * factor;
        if (bias) {
          gate += __ldg(bias + (first + n) / 8 * 16 + n % 8);
          up += __ldg(bias + (first + n) / 8 * 16 + n % 8 + 8);
        }
      }
      publish_pair<kWsGatedBytes>(now, cx.warp, first + n, cx.lane, valid, silu(gate) * up);
    }
  });
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
