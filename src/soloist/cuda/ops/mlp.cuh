// gate_up and down: silu(gate) · up travels between them in 16 bits.
#pragma once
#include "ops/hidden.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp2_fast(-1.4426950408889634f * x)); }

__device__ __forceinline__ u8* gated_operand(const Context& cx) {
  return cx.params.workspace + kWsGated + (cx.layers_done & 1) * (kWsGatedBytes / 2);
}

__device__ __forceinline__ void gate_up(Context& cx, u32 layer) {
  cx.wait(kHiddenMid, cx.hidden_mid * stream_arrivals(cx));
  const u32 units = num_units<GateUp>(cx.block), neurons = units * 8, first = first_unit<GateUp>(cx.block) * 8;
  Ahead<GateUp> ahead;
  GlobalOperand operand(stream_operand<MidStream>(cx, cx.hidden_mid), cx.warp, cx.lane, cx.columns);
  ahead.fill(operand);
  const float factor = cx.warp < cx.columns ? take_scale<MidStream>(cx, cx.hidden_mid) : 0.0f;
  Sums<GateUp> sums;
  multiply<GateUp>(cx.ring, cx.warp, cx.lane, units * 2, operand, ahead, sums);
  Reduction reduction(reinterpret_cast<float*>(cx.shared.reduce), cx.columns, GateUp::kTiles * 16);
  u8* out = gated_operand(cx);
  const float* bias = kMlpBias ? cx.layer_vectors(layer) + kVecGateUpBias : nullptr;
  for (u32 start = 0; start < units * 16; start += reduction.rows) {
    if (start) cx.sync();
    reduction.put(sums, start, units * 2, cx.columns, cx.warp, cx.lane);
    cx.sync();
    if (cx.warp < cx.columns) {
      const u32 end = min(neurons, (start + reduction.rows) / 2);
      for (u32 n = start / 2 + cx.lane; n < end; n += 32) {
        const u32 row = n / 8 * 16 + n % 8 - start;
        float gate = reduction.get(cx.warp, row) * factor, up = reduction.get(cx.warp, row + 8) * factor;
        if (bias) {
          gate += __ldg(bias + (first + n) / 8 * 16 + n % 8);
          up += __ldg(bias + (first + n) / 8 * 16 + n % 8 + 8);
        }
        *operand_value(out, cx.warp, first + n) = to_half(silu(gate) * up);
      }
    }
  }
  if (units && cx.warp < cx.columns) cx.arrive_warp(kGated);
}

__device__ __forceinline__ void down(Context& cx, u32 layer) {
  cx.wait(kGated, cx.layers_done * min(kNumBlocks, GateUp::kUnits) * cx.columns);
  Ahead<Down> ahead;
  GlobalOperand operand(gated_operand(cx), cx.warp, cx.lane, cx.columns);
  ahead.fill(operand);
  Sums<Down> sums;
  multiply<Down>(cx.ring, cx.warp, cx.lane, num_units<Down>(cx.block), operand, ahead, sums);
  const float* norm = layer + 1 < kLayers ? cx.layer_vectors(layer + 1) + kVecAttentionNorm : cx.layer_vectors(kLayers);
  const float* bias = kMlpBias ? cx.layer_vectors(layer) + kVecDownBias : nullptr;
  ++cx.hidden_in;
  add_to_stream<InStream>(cx, sums, cx.hidden_in, norm, bias);
}
