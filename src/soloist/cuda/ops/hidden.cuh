// The residual stream. Its rows live with the blocks that own them (fp32, shared memory); what travels
// is x · norm weight in 16 bits, scaled by the last known 1 / rms so that fp16 keeps its range, and each
// block's sum of squares. Readers multiply their results by the true 1 / rms over the assumed one.
#pragma once
#include "sync/context.cuh"

struct InStream {  // what qkv and the head read
  static constexpr u32 kCounter = kHiddenIn, kOperand = kWsHiddenIn, kBytes = kWsHiddenInBytes, kSquares = kWsSquaresIn;
};
struct MidStream {  // what gate_up reads
  static constexpr u32 kCounter = kHiddenMid, kOperand = kWsHiddenMid, kBytes = kWsHiddenMidBytes,
                       kSquares = kWsSquaresMid;
};

template <class Stream>
__device__ __forceinline__ u8* stream_operand(const Context& cx, u32 epoch) {
  return cx.params.workspace + Stream::kOperand + (epoch & 1) * (Stream::kBytes / 2);
}
template <class Stream>
__device__ __forceinline__ float* stream_squares(const Context& cx, u32 epoch, u32 column) {
  return reinterpret_cast<float*>(cx.params.workspace + Stream::kSquares) +
         ((epoch & 1) * kMaxColumns + column) * kNumBlocks;
}

// One value of this warp's column becomes visible to all blocks after publish_end().
__device__ __forceinline__ void publish_row(const Context& cx, u8* operand, u32 row, float x, float norm_weight) {
  *operand_value(operand, cx.warp, row) = to_half(x * norm_weight * cx.scale);
}
template <class Stream>
__device__ __forceinline__ void publish_end(const Context& cx, u32 epoch, float squares) {
  squares = warp_sum(squares);
  if (cx.lane == 0) stream_squares<Stream>(cx, epoch, cx.warp)[cx.block] = squares;
  cx.arrive_warp(Stream::kCounter);
}

// How many arrivals an exchange of the stream has: blocks with rows, times columns.
__device__ __forceinline__ u32 stream_arrivals(const Context& cx) {
  return min(kNumBlocks, Down::kUnits) * cx.columns;
}

// The factor that turns a product with published activations into one with normalised ones.
// For warps below the number of columns; also remembers the new scale.
template <class Stream>
__device__ __forceinline__ float take_scale(Context& cx, u32 epoch) {
  const float* squares = stream_squares<Stream>(cx, epoch, cx.warp);
  float sum = 0.0f;
  for (u32 b = cx.lane; b < kNumBlocks; b += 32)
    sum += num_units<Down>(b) ? load_exchanged(squares + b) : 0.0f;
  sum = warp_sum(sum);
  const float scale = __frsqrt_rn(sum * (1.0f / kHidden) + kEpsilon);
  const float factor = scale / cx.scale;
  cx.scale = scale;
  return factor;
}

// Where the embedding of a token has row k: in the table, or in the packed tied head.
__device__ __forceinline__ float embedding_value(const Params& p, u32 token, u32 k) {
  if constexpr (!kTiedHead) {
    return from_half(__ldg(p.embedding + static_cast<u64>(token) * kHidden + k));
  } else {
    const u32 unit = token / 8, owner = ((unit + 1) * kNumBlocks - 1) / Head::kUnits;
    const u32 begin = first_unit<Head>(owner), units = num_units<Head>(owner), local = unit - begin;
    // The head is packed in groups of tiles, each group by steps.
    const u32 group = local / (2 * Head::kTiles), in_group = local % (2 * Head::kTiles);
    const u32 group_units = min(2 * Head::kTiles, units - group * 2 * Head::kTiles);
    const u32 step = k / 512, warp = k % 512 / 64, half = k % 64 / 32, quad = k % 32 / 8, in = k % 8;
    const u32 g = token % 8, tile = in_group / 2;
    const u64 base = (static_cast<u64>(begin + group * 2 * Head::kTiles) * Head::kSteps + step * group_units) * 4096;
    u32 value;  // within the step of the group
    if ((tile + 1) * 2 <= group_units)
      value = (tile * 2 + half) * 4096 + warp * 512 + (in / 4) * 256 + (g * 4 + quad) * 8 +
              ((in % 4 / 2) * 2 + in_group % 2) * 2 + in % 2;
    else
      value = tile * 2 * 4096 + warp * 512 + half * 256 + (g * 4 + quad) * 8 + in;
    return from_half(__ldg(reinterpret_cast<const u16*>(p.image + Head::kOffset) + base + value));
  }
}

// Rows of the embedding enter the residual. Warp c serves column c.
__device__ __forceinline__ void embed(Context& cx) {
  ++cx.hidden_in;
  if (cx.warp >= cx.columns) return;
  cx.scale = cx.params.embedding_scale;
  const u32 first = first_unit<Down>(cx.block) * 8, rows = num_units<Down>(cx.block) * 8;
  if (rows == 0) return;
  const float* norm = cx.layer_vectors(0) + kVecAttentionNorm;
  u8* operand = stream_operand<InStream>(cx, cx.hidden_in);
  float* residual = cx.shared.residual + cx.warp * (Down::kMaxUnits * 8);
  const u32 token = cx.shared.control->token[cx.warp];
  float squares = 0.0f;
  for (u32 r = cx.lane; r < rows; r += 32) {
    const float x = embedding_value(cx.params, token, first + r);
    residual[r] = x;
    publish_row(cx, operand, first + r, x, __ldg(norm + first + r));
    squares += x * x;
  }
  publish_end<InStream>(cx, cx.hidden_in, squares);
}

// The product of attention_output or down joins the residual, and the sum is published.
template <class Stream, class Op>
__device__ __forceinline__ void add_to_stream(Context& cx, const Sums<Op>& sums, u32 epoch, const float* norm,
                                              const float* bias) {
  const u32 units = num_units<Op>(cx.block), rows = units * 8, first = first_unit<Op>(cx.block) * 8;
  Reduction reduction(reinterpret_cast<float*>(cx.shared.reduce), cx.columns, Op::kTiles * 16);
  u8* operand = stream_operand<Stream>(cx, epoch);
  float* residual = cx.shared.residual + cx.warp * (Op::kMaxUnits * 8);
  float squares = 0.0f;
  for (u32 start = 0; start < rows; start += reduction.rows) {
    if (start) cx.sync();
    reduction.put(sums, start, units, cx.columns, cx.warp, cx.lane);
    cx.sync();
    if (cx.warp < cx.columns) {
      const u32 end = min(rows, start + reduction.rows);
      for (u32 r = start + cx.lane; r < end; r += 32) {
        float y = reduction.get(cx.warp, r - start);
        if (bias) y += __ldg(bias + first + r);
        const float x = residual[r] + y;
        residual[r] = x;
        publish_row(cx, operand, first + r, x, __ldg(norm + first + r));
        squares += x * x;
      }
    }
  }
  if (rows && cx.warp < cx.columns) publish_end<Stream>(cx, epoch, squares);
}
