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
  u64* trace;             // [block][mark] of the traced round, or null
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
  float2* rope;
  Control* control;
};

// Every exchange has kTurns copies of its buffer that take turns: data of turn e goes to copy e % 4. Once
// it is there, its block makes copy (e + 2) % 4 absent again (`ops/clean.cuh`). By then every reader of
// turn e - 2 is done, since what it published afterwards was needed to come this far; and two more turns
// pass before anyone reads the copy.

// x, but what follows from it is computed after this point and not kept in registers from before a loop.
__device__ __forceinline__ u32 recomputed(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct Context {
  const Params& params;
  Shared shared;
  Ring ring;
  u32 round;
  u32 block, warp, lane, thread, columns;
  u64* marks;  // where the next time stamp goes, in thread 0 of a traced round
  u32 hidden_in, hidden_mid, layers_done;  // exchanges so far; the first two follow from the third and the round
  volatile Where* where;
  u32 cleanable, cleaned;  // barriers: to the cleaner, and back
  u32 reductions;  // so far: they alternate between halves of the shared buffer
  float scale;  // of this warp's column: 1 / rms that published activations were multiplied by

  // Addresses and sizes that follow from these are computed in each phase, not kept over all of them in registers.
  __device__ __forceinline__ void forget_addresses() {
    asm volatile("" : "+r"(block), "+r"(warp), "+r"(lane), "+r"(thread), "+r"(columns));
  }
  // The cleaner may go on to the next copies. Pairs with its wait in `clean`.
  __device__ __forceinline__ void let_clean() const {
    if (thread != 0) return;
    const u32 cleanings = hidden_in - 1;  // one for each hidden state that came before
    // It has long been done with the last ones.
    if (cleanings) mbarrier_wait(cleaned, (cleanings - 1) & 1);
    mbarrier_arrive(cleanable);
  }
  __device__ __forceinline__ void begin(Phase phase) {
    if (thread == 0) where->phase = static_cast<u32>(phase);
    forget_addresses();
  }
  // A time stamp of the traced round; trace.py knows what the marks of a round are, in order.
  __device__ __forceinline__ void mark() {
    if (kTrace && thread == 0 && marks) *marks++ = clock_cycles();
  }
  // All consumer threads of the block.
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory"); }
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
// This block's part of a matrix.
template <class Op>
__device__ __forceinline__ const u8* weights_of(const u8* image, u32 block, u32 layer) {
  return image + static_cast<u64>(block) * kBlockStride + static_cast<u64>(layer) * kLayerBytes + Op::kOffset;
}
// One turn's copy of an exchange buffer.
__device__ __forceinline__ u8* turn(const Params& params, u32 offset, u32 bytes, u32 epoch) {
  return params.workspace + offset + epoch % kTurns * (bytes / kTurns);
}
// The same of a buffer that all blocks read, stored kCopies times, since few lines that everybody polls are
// slow: bytes from one copy to the next, and this block's own.
constexpr __device__ u32 copy_stride(u32 bytes) { return bytes / kTurns / kCopies; }
__device__ __forceinline__ u8* own_copy(const Params& params, u32 offset, u32 bytes, u32 epoch, u32 block) {
  return turn(params, offset, bytes, epoch) + block % kCopies * copy_stride(bytes);
}
// Where a value of the exchanged activations lies: [k / 32][column][k % 32].
__device__ __forceinline__ u16* operand_value(u8* buffer, u32 column, u32 k) {
  return reinterpret_cast<u16*>(buffer) + ((k / 32) * kMaxColumns + column) * 32 + k % 32;
}
// Lanes of a whole warp hold consecutive rows of a column, an even number of them `valid`; every even
// lane stores two.
template <u32 kBytes>
__device__ __forceinline__ void publish_pair(u8* now, u32 column, u32 row, u32 lane, bool valid, float x) {
  const u32 pair = pack_pair(x, __shfl_down_sync(~0u, x, 1));
  if (lane % 2 || !valid) return;
#pragma unroll
  for (u32 i = 0; i < kCopies; ++i)
    store_exchanged(operand_value(now + i * copy_stride(kBytes), column, row), present(pair));
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (u32 o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
