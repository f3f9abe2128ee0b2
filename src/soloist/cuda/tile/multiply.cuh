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
  __device__ __forceinline__ const u8* at(u32 step, u32 half) const {
    return lane_base + (step * 16 + half) * (kMaxColumns * 64);
  }
  __device__ __forceinline__ uint4 load(u32 step, u32 half) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (active) v = load_exchanged(at(step, half));
    return v;
  }
  // What `load` returned has arrived, or is loaded again until it has.
  __device__ __forceinline__ void ensure(uint4& v, u32 step, u32 half) const {
    ensure_present<Wait::kOperand>(v, at(step, half));
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
  __device__ __forceinline__ void ensure(uint4&, u32, u32) const {}
};

// Activations of the next steps, in registers.
template <class Op>
struct Ahead {
  uint4 b[Op::kDepth][2];

  // Load the first steps, all at once until all are there. `multiply` sees to the others one by one.
  template <class Operand>
  __device__ __forceinline__ void fill(const Operand& operand) {
#pragma unroll 1
    for (Tries<Wait::kOperand> tries;; tries.again()) {
      bool ready = true;
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) {
        b[d][0] = operand.load(d, 0);
        b[d][1] = operand.load(d, 1);
      }
#pragma unroll
      for (u32 d = 0; d < Op::kDepth; ++d) ready = ready && is_present(b[d][0]) && is_present(b[d][1]);
      if (__all_sync(~0u, ready)) return;
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

// `kHalves`: how many times 8 rows this block has in this group of tiles. The code of a kernel has to fit
// the instruction cache, so loops are unrolled only as far as registers need constant indices.
// kAgain: another group with the same activations follows.
template <u32 kHalves, bool kAgain, class Op, class Operand>
__device__ __forceinline__ void multiply(Ring& ring, u32 warp, u32 lane, const Operand& operand, Ahead<Op>& ahead,
                                         Sums<Op>& sums) {
  constexpr bool kWhole = Op::kSteps % Op::kDepth == 0;
  sums.clear();
  const u32 offset = warp * 1024 + lane * 16;
#pragma unroll 1
  for (u32 first = 0; first < Op::kSteps; first += Op::kDepth) {
#pragma unroll
    for (u32 d = 0; d < Op::kDepth; ++d) {
      const u32 step = first + d;
      if (!kWhole && step >= Op::kSteps) break;
      if (first > 0 || kAgain) {  // else `fill` has
        operand.ensure(ahead.b[d][0], step, 0);
        operand.ensure(ahead.b[d][1], step, 1);
      }
      const uint4 b0 = ahead.b[d][0], b1 = ahead.b[d][1];
      const u32 next = step + Op::kDepth;
      if (next < Op::kSteps || (kAgain && kWhole)) {
        const u32 wrapped = next < Op::kSteps ? next : next - Op::kSteps;
        ahead.b[d][0] = operand.load(wrapped, 0);
        ahead.b[d][1] = operand.load(wrapped, 1);
      }
#pragma unroll
      for (int t = 0; t < static_cast<int>(kHalves / 2); ++t) {
        const u32 slot = ring.slot, x = ring.take() + offset;
        const uint4 x0 = load_shared(x), x1 = load_shared(x + 512);
        const uint4 y0 = load_shared(x + kSlotBytes / 2), y1 = load_shared(x + kSlotBytes / 2 + 512);
        float(&c0)[4] = sums.c[t][0];
        float(&c1)[4] = sums.c[t][kChains<Op> - 1];
        mma(c0, x0.x, x0.y, x0.z, x0.w, b0.x, b0.y);
        mma(c1, y0.x, y0.y, y0.z, y0.w, b1.x, b1.y);
        mma(c0, x1.x, x1.y, x1.z, x1.w, b0.z, b0.w);
        mma(c1, y1.x, y1.y, y1.z, y1.w, b1.z, b1.w);
        ring.release(lane, slot);
      }
      if constexpr (kHalves % 2) {  // 8 rows, both halves of the step in half a slot
        const u32 slot = ring.slot, x = ring.take() + offset;
        const uint4 x0 = load_shared(x), x1 = load_shared(x + 512);
        float(&c0)[4] = sums.c[kHalves / 2][0];
        float(&c1)[4] = sums.c[kHalves / 2][kChains<Op> - 1];
        mma(c0, x0.x, 0, x0.y, 0, b0.x, b0.y);
        mma(c1, x1.x, 0, x1.y, 0, b1.x, b1.y);
        mma(c0, x0.z, 0, x0.w, 0, b0.z, b0.w);
        mma(c1, x1.z, 0, x1.w, 0, b1.z, b1.w);
        ring.release(lane, slot);
      }
    }
  }
}

// The multiply of a block that owns `units` units: all blocks own as many, or some own one less.
template <class Op, class Operand>
__device__ __forceinline__ void multiply_owned(Ring& ring, u32 warp, u32 lane, u32 units, const Operand& operand,
                                               Ahead<Op>& ahead, Sums<Op>& sums) {
  constexpr u32 kMost = Op::kMaxUnits * Op::kUnitHalves, kFewer = kMost - Op::kUnitHalves;
  if (Op::kEven || units == Op::kMaxUnits) {
    multiply<kMost, false>(ring, warp, lane, operand, ahead, sums);
  } else if constexpr (kFewer > 0) {
    multiply<kFewer, false>(ring, warp, lane, operand, ahead, sums);
  }
}
