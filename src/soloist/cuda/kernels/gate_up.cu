// gate_up with SwiGLU on its way out, for many tokens on Hopper: out [T, F] = silu(x · gateᵀ) · (x · upᵀ), of x [T, H] and a
// matrix [2F, H] with gate's rows first. Products are rounded to 16 bits before SwiGLU, as where a library multiplies.
//
// A block takes kTileRows tokens and kTileNeurons neurons, of each its gate row and its up row, so that both sums of a neuron
// end in one thread. Two blocks are a cluster: they have the same neurons, and one loads gate's rows for both of them, the other
// up's. In a block one warp loads steps of kStepColumns columns, as many ahead as there are slots, and two groups of four warps
// multiply 64 tokens each. Each token's sums are made in one order, whichever tokens are beside it. Clusters take tiles in
// turn, first down the tokens: so those that run at once share what is in the L2.
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/stage.cuh"
#include "ptx/tensor.cuh"
#include "ptx/wgmma.cuh"
#include "sync/slots.cuh"
#include "tile/silu.cuh"

inline constexpr u32 kCluster = 2, kGroups = 2;
inline constexpr u32 kTileRows = kGroups * kWgmmaRows, kTileNeurons = kWgmmaColumns / 2;
inline constexpr u32 kStepColumns = 64, kSteps = kHidden / kStepColumns;
inline constexpr u32 kRowBytes = kStepColumns * 2;
inline constexpr u32 kTokenBytes = kTileRows * kRowBytes, kNeuronBytes = kTileNeurons * kRowBytes;
inline constexpr u32 kSlotBytes = kTokenBytes + 2 * kNeuronBytes;
inline constexpr u32 kColumnTiles = kIntermediate / kTileNeurons;
// A warp's part of the result: kBoxes boxes of 16 tokens and 64 neurons.
inline constexpr u32 kBoxRows = 16, kBoxNeurons = 64, kBoxes = kTileNeurons / kBoxNeurons;
inline constexpr u32 kBoxBytes = kBoxRows * kBoxNeurons * 2;
inline constexpr u32 kMultiplyingWarps = 4 * kGroups, kAllWarps = kMultiplyingWarps + 4;

static_assert(kHidden % kStepColumns == 0 && kIntermediate % kTileNeurons == 0, "whole steps and tiles");
static_assert(kGateUpThreads == kAllWarps * 32, "one group of warps more than multiply");
static_assert(kGateUpRows == kCluster * kTileRows, "of a cluster");
static_assert(kGateUpShared == kGateUpSlots * kSlotBytes + kMultiplyingWarps * kBoxes * kBoxBytes, "slots and results");

struct Slots {
  u32 data, full, empty;  // barriers have 8 bytes each
};
using Turn = SlotState<kGateUpSlots>;

// One thread: everything that the block's products read. A slot's neurons come from both blocks of the cluster into both, so
// it is free once both have read it.
__device__ __forceinline__ void load(const Slots& slots, const TensorMap& x, const TensorMap& matrix, u32 rank, u32 first,
                                     u32 stride, u32 row_tiles) {
  Turn turn;
#pragma unroll 1
  for (u32 tile = first; tile < row_tiles * kColumnTiles; tile += stride) {
    const u32 row = (tile % row_tiles * kCluster + rank) * kTileRows;
    const u32 neuron = tile / row_tiles * kTileNeurons + rank * kIntermediate;
#pragma unroll 1
    for (u32 column = 0; column < kHidden; column += kStepColumns, turn.next()) {
      const u32 to = slots.data + turn.slot * kSlotBytes, full = slots.full + turn.slot * 8;
      wait_or_trap(slots.empty + turn.slot * 8, turn.round ^ 1);
      mbarrier_expect(full, kSlotBytes);
      load_box(to, x, column, row, full);
      load_box_for((1 << kCluster) - 1, to + kTokenBytes + rank * kNeuronBytes, matrix, column, neuron, full);
    }
  }
}

// A warp's sums through its part of shared memory, whence the copy engine takes them.
__device__ __forceinline__ void write(const float (&sums)[kWgmmaSums], u32 shared, const TensorMap& out, u32 neuron, u32 row,
                                      u32 lane) {
  if (lane == 0) wait_for_boxes_read();  // of the tile before
  __syncwarp();
#pragma unroll
  for (u32 j = 0; j < kTileNeurons / 8; j += 2) {
    u32 words[4];  // upper and lower eight rows of eight neurons, and of the next eight
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 gate = 4 * (j + i / 2) + 2 * (i % 2), up = gate + kWgmmaSums / 2;
      words[i] = gated_pair(pack_pair(sums[gate], sums[gate + 1]), pack_pair(sums[up], sums[up + 1]));
    }
    store_matrices(shared + j / 8 * kBoxBytes + swizzled(lane % 16, j % 8 + lane / 16), words);
  }
  fence_async_proxy_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (u32 i = 0; i < kBoxes; ++i) store_box(out, neuron + i * kBoxNeurons, row, shared + i * kBoxBytes);
    commit_boxes();
  }
}

// A warp of those that multiply. One step's products are in flight while the slot of the step before is given back. That needs
// no release: the tensor cores have read the slot by the time that the products are waited for, this warp has written nothing
// to it, and no other warp is spoken for.
__device__ __forceinline__ void multiply(const Slots& slots, u32 results, const TensorMap& out, u32 rank, u32 first,
                                         u32 stride, u32 row_tiles, u32 warp, u32 lane) {
  const u32 row_in_tile = warp / 4 * kWgmmaRows, shared = results + warp * kBoxes * kBoxBytes;
  const u32 empty = address_in(lane % kCluster, slots.empty);
  const auto give_back = [&](u32 slot) {
    if (lane < kCluster) arrive_relaxed(empty + slot * 8);
  };
  Turn turn;
#pragma unroll 1
  for (u32 tile = first; tile < row_tiles * kColumnTiles; tile += stride) {
    float sums[kWgmmaSums];
    u32 before = 0;
#pragma unroll 1
    for (u32 step = 0; step < kSteps; ++step, turn.next()) {
      wait_or_trap(slots.full + turn.slot * 8, turn.round);
      const u32 from = slots.data + turn.slot * kSlotBytes;
      const u64 tokens = wgmma_operand(from + row_in_tile * kRowBytes), neurons = wgmma_operand(from + kTokenBytes);
      begin_products();
#pragma unroll
      for (u32 k = 0; k < kStepColumns; k += kWgmmaDepth)
        multiply_group(sums, along(tokens, k), along(neurons, k), step | k);
      commit_products();
      wait_for_products<1>();
      if (step) give_back(before);
      before = turn.slot;
    }
    wait_for_products<0>();
    take_sums(sums);
    give_back(before);
    const u32 row = (tile % row_tiles * kCluster + rank) * kTileRows + row_in_tile + warp % 4 * kBoxRows;
    write(sums, shared, out, tile / row_tiles * kTileNeurons, row, lane);
  }
  if (lane == 0) wait_for_boxes();
}

// Clusters of two blocks; row_tiles = ceil(T / kGateUpRows). Boxes of the maps: kTileRows × kStepColumns of x, kTileNeurons ×
// kStepColumns of the matrix, kBoxRows × kBoxNeurons of out.
extern "C" __global__ void __launch_bounds__(kGateUpThreads, 1)
    gate_up(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap matrix,
            const __grid_constant__ TensorMap out, u32 row_tiles) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 barriers[2 * kGateUpSlots];
  const u32 data = shared_address(shared), full = shared_address(barriers);
  const Slots slots{data, full, full + kGateUpSlots * 8};
  // All lanes know that it is one warp's number.
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const u32 rank = cluster_rank(), first = blockIdx.x / kCluster, stride = gridDim.x / kCluster;
  if (threadIdx.x == 0) {
#pragma unroll
    for (u32 i = 0; i < kGateUpSlots; ++i) {
      mbarrier_init(slots.full + i * 8, 1);
      mbarrier_init(slots.empty + i * 8, kCluster * kMultiplyingWarps);
    }
    publish_barriers();
  }
  meet_cluster();
  if (warp >= kMultiplyingWarps) {
    keep_registers_to_load();
    if (warp == kMultiplyingWarps && lane == 0) load(slots, x, matrix, rank, first, stride, row_tiles);
  } else {
    take_registers_to_compute();
    multiply(slots, data + kGateUpSlots * kSlotBytes, out, rank, first, stride, row_tiles, warp, lane);
  }
  __syncwarp();
  meet_cluster();  // the other block may still copy and arrive here
}
