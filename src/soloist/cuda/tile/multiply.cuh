// Weights from the ring times activations: up to 8 columns in the n dimension of m16n8k16.
//
// The eight warps split K: of every step of 512 columns a warp takes 64. Inside a block of 32 columns
// a lane's 16 bytes of activations are 8 consecutive values, which serve two multiplies; packing.py
// puts the weights in the matching order. Every warp ends with partial sums of all rows.
#pragma once
#include "ptx/mma.cuh"
#include "tile/ring.cuh"

// Activations of the round in global memory: [columns / 32][8 columns of the round][32].
struct GlobalOperand {
  const u8* lane_base;
  bool active;

  __device__ __forceinline__ GlobalOperand(const u8* buffer, u32 warp, u32 lane, u32 columns)
      : lane_base(buffer + (warp * 2 * kMaxColumns + lane / 4) * 64 + lane % 4 * 16),
        active(lane / 4 < columns) {}
  __device__ __forceinline__ uint4 load(u32 step, u32 half) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (active) v = load_exchanged(lane_base + (step * 16 + half) * (kMaxColumns * 64));
    return v;
  }
};

// The same for one column, in shared memory.
struct SharedOperand {
  u32 lane_base;
  bool active;

  __device__ __forceinline__ SharedOperand(u32 buffer, u32 warp, u32 lane)
      : lane_base(buffer + warp * 2 * 64 + lane % 4 * 16), active(lane < 4) {}
  __device__ __forceinline__ uint4 load(u32 step, u32 half) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (active) v = load_shared(lane_base + (step * 16 + half) * 64);
    return v;
  }
};

template <class Op>
struct Ahead {
  uint4 b[Op::kDepth][2];

  template <class Operand>
  __device__ __forceinline__ void fill(const Operand& operand) {
#pragma unroll
    for (u32 d = 0; d < Op::kDepth; ++d)
      if (d < Op::kSteps) {
        b[d][0] = operand.load(d, 0);
        b[d][1] = operand.load(d, 1);
      }
  }
};

// Few tiles leave the tensor core waiting for its own sums: give them two chains.
template <class Op>
inline constexpr u32 kChains = Op::kTiles <= 4 ? 2 : 1;

template <class Op>
struct Sums {
  float c[Op::kTiles][kChains<Op>][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 t = 0; t < Op::kTiles; ++t)
#pragma unroll
      for (u32 k = 0; k < kChains<Op>; ++k)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) c[t][k][i] = 0.0f;
  }
  __device__ __forceinline__ float total(u32 t, u32 i) const {
    return kChains<Op> == 2 ? c[t][0][i] + c[t][kChains<Op> - 1][i] : c[t][0][i];
  }
};

// `half_tiles`: how many times 8 rows this block has in this group of tiles.
template <class Op, class Operand>
__device__ __forceinline__ void multiply(Ring& ring, u32 warp, u32 lane, u32 half_tiles,
                                         const Operand& operand, Ahead<Op>& ahead, Sums<Op>& sums) {
  constexpr bool kAll = Op::kDepth >= Op::kSteps;
  sums.clear();
  const u32 offset = warp * 1024 + lane * 16;
#pragma unroll 1
  for (u32 first = 0; first < Op::kSteps; first += Op::kDepth) {
#pragma unroll
    for (u32 d = 0; d < Op::kDepth; ++d) {
      if (Op::kSteps % Op::kDepth != 0 && first + d >= Op::kSteps) break;
      const uint4 b0 = ahead.b[d][0], b1 = ahead.b[d][1];
      if (!kAll && first + d + Op::kDepth < Op::kSteps) {
        ahead.b[d][0] = operand.load(first + d + Op::kDepth, 0);
        ahead.b[d][1] = operand.load(first + d + Op::kDepth, 1);
      }
#pragma unroll
      for (u32 t = 0; t < Op::kTiles; ++t) {
        float(&c0)[4] = sums.c[t][0];
        float(&c1)[4] = sums.c[t][kChains<Op> - 1];
        if (2 * t + 1 < half_tiles) {
          const u32 x = ring.wait() + offset;
          const uint4 x0 = load_shared(x), x1 = load_shared(x + 512);
          ring.release(lane);
          const u32 y = ring.wait() + offset;
          const uint4 y0 = load_shared(y), y1 = load_shared(y + 512);
          ring.release(lane);
          mma(c0, x0.x, x0.y, x0.z, x0.w, b0.x, b0.y);
          mma(c1, y0.x, y0.y, y0.z, y0.w, b1.x, b1.y);
          mma(c0, x1.x, x1.y, x1.z, x1.w, b0.z, b0.w);
          mma(c1, y1.x, y1.y, y1.z, y1.w, b1.z, b1.w);
        } else if (2 * t < half_tiles) {
          const u32 x = ring.wait() + offset;
          const uint4 x0 = load_shared(x), x1 = load_shared(x + 512);
          ring.release(lane);
          mma(c0, x0.x, 0, x0.y, 0, b0.x, b0.y);
          mma(c1, x1.x, 0, x1.y, 0, b1.x, b1.y);
          mma(c0, x0.z, 0, x0.w, 0, b0.z, b0.w);
          mma(c1, x1.z, 0, x1.w, 0, b1.z, b1.w);
        }
      }
    }
  }
}

// Where the warps' partial sums meet: [warp][column][row], rows padded against bank conflicts.
struct Reduction {
  float* buffer;
  u32 columns;  // allocated: 1, 2, 4 or 8
  u32 rows;     // in one round of the exchange, a multiple of 16
  u32 stride;

  __device__ __forceinline__ Reduction(float* memory, u32 active_columns, u32 all_rows) : buffer(memory) {
    columns = active_columns <= 2 ? active_columns : active_columns <= 4 ? 4 : 8;
    const u32 most = (kReduceBytes / 4 / kConsumerWarps / columns - 4) & ~15u;
    rows = min(most, all_rows);
    stride = rows + 4;
  }

  template <class Op>
  __device__ __forceinline__ void put(const Sums<Op>& sums, u32 first_row, u32 half_tiles, u32 active_columns,
                                      u32 warp, u32 lane) {
    const u32 row = lane / 4, column = lane % 4 * 2;
    if (column >= active_columns) return;
    float* at = buffer + (warp * columns + column) * stride + row;
#pragma unroll
    for (u32 t = 0; t < Op::kTiles; ++t) {
      const u32 start = t * 16;
      if (start < first_row || start >= first_row + rows || 2 * t >= half_tiles) continue;
      float* p = at + (start - first_row);
      p[0] = sums.total(t, 0);
      p[8] = sums.total(t, 2);
      if (column + 1 < active_columns) {
        p[stride] = sums.total(t, 1);
        p[stride + 8] = sums.total(t, 3);
      }
    }
  }
  // The sum over warps, always in the same order.
  __device__ __forceinline__ float get(u32 column, u32 row_in_round) const {
    const float* p = buffer + column * stride + row_in_round;
    float sum = p[0];
#pragma unroll
    for (u32 w = 1; w < kConsumerWarps; ++w) sum += p[w * columns * stride];
    return sum;
  }
};
