// What a consumer thread of the decode kernel carries through a round.
#pragma once
#include "tile/multiply.cuh"

// Written by the host for each launch; fields as in `LAUNCH_FIELDS` of launch.py.
struct ColumnStart {
  i32 sequence;  // row of the page tables
  i32 position;  // of the first round
  i32 stride;    // positions from one round to the next
  i32 forced;    // rounds whose input token the host gives
  i32 num_stops;
  i32 keep;      // rounds before a stop token counts
  u32 stops[kMaxStops];
};

struct Launch {
  u32 columns;
  u32 rounds;
  u64 logits_round_stride;  // values; 0 overwrites the logits in every round
  ColumnStart column[kMaxColumns];
};

struct Params {
  const u8* image;        // packed weights
  const float* vectors;   // norm weights and biases, fp32
  const u16* embedding;   // [V][H] row-major, or null where the head is tied
  u16* pool;              // KV pages
  const i32* page_tables; // [sequence][page]
  const float2* rope;     // [position][D / 2] cosine, sine
  u8* workspace;
  float* logits;          // [column][kVocabRows]
  const u32* forced;      // [column][rounds] input tokens
  const Launch* launch;
  u32* emitted;           // host: [round][column]
  u32* progress;          // host: rounds emitted
  const u32* yield;       // host: wish to stop at the next round
  Fault* fault;           // host
  u64 page_values;        // of one page over all layers
  u32 page_table_stride;
  float embedding_scale;  // 1 / root mean square of the embedding
};

// In shared memory: facts of the round that all warps read.
struct Control {
  u32 columns, rounds;
  u32 stop;   // set by the consumers: the launch ends with this round
  u32 yield;  // set by the host warp of block 0
  u32 yield_agreed;  // what block 0 told all blocks
  i32 sequence[kMaxColumns];
  i32 position[kMaxColumns];
  u32 token[kMaxColumns];
  u32 chosen[kMaxColumns];
  u32 emit[kMaxColumns];
};

struct Shared {
  u8* reduce;
  u8* attended;
  u8* new_kv;
  float* residual;
  float* stats;
  Control* control;
};

// Exchanges between blocks; a counter grows by a fixed amount each time.
enum Counter : u32 {
  kHiddenIn = 0,   // input of qkv and of the head
  kHiddenMid = 1,  // input of gate_up
  kAttended = 2,   // attention of every head
  kGated = 3,      // input of down
  kBest = 4,
  kProjected = 5,  // + KV head
  kPartial = 5 + kKvHeads,
};

struct Context {
  const Params& params;
  Shared shared;
  Ring ring;
  u32 round;
  u32 block, warp, lane, thread, columns;
  u32 hidden_in, hidden_mid, layers_done, partials_done;  // exchanges so far
  float scale;  // of this warp's column: 1 / rms that published activations were multiplied by

  // Addresses that follow from these are computed in each phase, not kept over all of them in registers.
  __device__ __forceinline__ void forget_addresses() {
    asm volatile("" : "+r"(block), "+r"(warp), "+r"(lane), "+r"(thread));
  }
  __device__ __forceinline__ u32* counter(u32 id) const {
    return reinterpret_cast<u32*>(params.workspace + kWsCounters + id * 128);
  }
  // All consumer threads of the block.
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory"); }
  // Every thread of the warp has written its part. Pairs with wait() in the reading blocks.
  __device__ __forceinline__ void arrive_warp(u32 id) const {
    __syncwarp();
    if (lane == 0) add_release(counter(id), 1);
  }
  // Block-wide: returns when `wanted` arrivals were seen, with their data visible to all threads.
  __device__ __forceinline__ void wait(u32 id, u32 wanted) const {
    if (thread == 0) wait_counter(counter(id), id, wanted);
    sync();
  }
  __device__ __forceinline__ const float* layer_vectors(u32 layer) const {
    return params.vectors + static_cast<u64>(layer) * kLayerVectors;
  }
};

template <class Op>
__device__ __forceinline__ u32 first_unit(u32 block) {
  return block * Op::kUnits / kNumBlocks;
}
template <class Op>
__device__ __forceinline__ u32 num_units(u32 block) {
  return first_unit<Op>(block + 1) - first_unit<Op>(block);
}
// Where a value of the exchanged activations lies: [k / 32][column][k % 32].
__device__ __forceinline__ u16* operand_value(u8* buffer, u32 column, u32 k) {
  return reinterpret_cast<u16*>(buffer) + ((k / 32) * kMaxColumns + column) * 32 + k % 32;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (u32 o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
