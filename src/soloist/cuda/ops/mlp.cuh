// gate_up and down: silu(gate) · up travels between them in 16 bits.
#pragma once
#include "ops/hidden.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp2_fast(-1.4426950408889634f * x)); }

__device__ __forceinline__ u8* gated_operand(const Context& cx, u32 epoch) {
  return turn(cx.params, kWsGated, kWsGatedBytes, epoch);
}

__device__ __forceinline__ void gate_up(Context& cx, u32 layer) {
  cx.let_clean(cx.layers_done + cx.round - 1);
  const u32 units = num_units<GateUp>(cx.block), first = first_unit<GateUp>(cx.block) * 8;
  GlobalOperand operand(stream_operand<MidStream>(cx, cx.layers_done), cx.warp, cx.lane, cx.columns);
  Scale<MidStream> scale;
  Sums<GateUp> sums;
  multiply_owned<GateUp>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] {
    scale.load(cx, cx.layers_done);
    cx.mark();
  });
  const float own_factor = scale.take(cx, cx.layers_done);
  Control& control = cx.shared.control();
  if (cx.warp < cx.columns && cx.lane == 0) control.factor[cx.warp] = own_factor;
  cx.mark();
  Reduction reduction(cx, GateUp::kTiles * 16);
  u8* now = gated_operand(cx, cx.layers_done);
  const float* bias = kMlpBias ? cx.layer_vectors(layer) + kVecGateUpBias : nullptr;
  // Neurons go to all warps, 32 of a column at a time.
  reduction.for_each_part(cx, sums, units * 2, units * 16, [&](u32 start, u32 end) {
    const u32 jobs = ((end - start) / 2 + 31) / 32 * cx.columns;
#pragma unroll 1
    for (u32 job = cx.warp; job < jobs; job += kConsumerWarps) {
      const u32 column = job % cx.columns, n = start / 2 + job / cx.columns * 32 + cx.lane;
      const bool valid = n < end / 2;
      float gate = 0.0f, up = 0.0f;
      if (valid) {
        const u32 row = n / 8 * 16 + n % 8 - start;
        const float factor = control.factor[column];
        gate = reduction.get(column, row) * factor;
        up = reduction.get(column, row + 8) * factor;
        if (bias) {
          gate += __ldg(bias + (first + n) / 8 * 16 + n % 8);
          up += __ldg(bias + (first + n) / 8 * 16 + n % 8 + 8);
        }
      }
      publish_pair(now, column, first + n, cx.lane, valid, silu(gate) * up);
    }
  });
  cx.mark();
}

__device__ __forceinline__ void down(Context& cx, u32 layer) {
  const u32 units = num_units<Down>(cx.block);
  RowVectors<Down> vectors;
  vectors.load(cx, layer + 1 < kLayers ? cx.layer_vectors(layer + 1) + kVecAttentionNorm : cx.layer_vectors(kLayers),
               kMlpBias ? cx.layer_vectors(layer) + kVecDownBias : nullptr);
  GlobalOperand operand(gated_operand(cx, cx.layers_done), cx.warp, cx.lane, cx.columns);
  Sums<Down> sums;
  multiply_owned<Down>(cx.ring, cx.warp, cx.lane, units, operand, sums, [&] { cx.mark(); });
  cx.mark();
  add_to_stream<InStream>(cx, sums, cx.next_in(), vectors);
  cx.mark();
}
