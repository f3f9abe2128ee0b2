// What a consumer thread of the decode kernel carries through a round.
#pragma once
#include "tile/multiply.cuh"

// Of the launch. A build for one query knows so, and has no code for others.
struct Queries {
  u32 given;

  __device__ __forceinline__ operator u32() const { return kMostQueries == 1 ? 1 : given; }
  __device__ __forceinline__ operator u32() const volatile { return kMostQueries == 1 ? 1 : given; }
};

// In shared memory: facts of the round that all warps read.
struct Control {
  Queries queries;
  u32 rounds;
  u32 stop;   // set by the consumers: the launch ends with this round
  u32 yield;  // set by the host warp of block 0
  u32 yield_agreed;  // what block 0 published to all blocks
  i32 sequence[kMaxQueries];
  i32 position[kMaxQueries];
  u32 token[kMaxQueries];
  u32 chosen[kMaxQueries];
  u32 emit[kMaxQueries];
  float factor[kMaxQueries];  // of qkv's products, then of gate_up's
  float scale;  // of a round's only query, for who weighs experts: 1 / rms of the stream before gate_up
  u32 waits;  // the consumers wait for other blocks: copies are to leave them the way
};

// Arrivals that end a round: racecheck needs one from every lane that wrote the outcome.
inline constexpr u32 kRoundArrivals = kRacecheck ? 32 : 1;

// The block's shared memory: the ring, then what the plan lays out.
extern __shared__ __align__(128) u8 dynamic[];

// Shared memory beside the ring, as the plan lays it out.
template <class M>
struct Shared {
  static_assert(sizeof(Control) <= M::kShControlBytes, "shared memory of the plan");
  u8* base;

  // Its address computed once more, where it would otherwise be spilled.
  __device__ __forceinline__ Shared<M> anew() const {
    if constexpr (kMovesRegisters) return *this;
    u32 address = shared_address(base);
    asm volatile("" : "+r"(address));
    return Shared<M>{at_shared<u8>(address)};
  }
  __device__ __forceinline__ u8* reduce() const { return base + M::kShReduce; }
  __device__ __forceinline__ u8* q_rows() const { return base + M::kShQRows; }
  __device__ __forceinline__ u8* new_kv() const { return base + M::kShNewKv; }
  __device__ __forceinline__ float* residual() const { return reinterpret_cast<float*>(base + M::kShResidual); }
  __device__ __forceinline__ float2* stats() const { return reinterpret_cast<float2*>(base + M::kShStats); }
  __device__ __forceinline__ float2* rope() const { return reinterpret_cast<float2*>(base + M::kShRope); }
  __device__ __forceinline__ u32 converted() const { return shared_address(base + M::kShConverted); }
  __device__ __forceinline__ Control& control() const { return *reinterpret_cast<Control*>(base + M::kShControl); }
};

// Every exchange has kExchangeCopies copies of its buffer, used in turn: data of epoch e goes to copy e % 4. Once the
// data is there, its block fills copy (e + 2) % 4 with sentinels again (`ops/clean.cuh`). By then every reader of
// epoch e - 2 is done, since the block needed results that the reader published afterwards; and two more epochs pass
// before anyone reads the copy.

// All consumer threads of the block.
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory"); }
// Further barriers of all consumers, at which who arrives does not wait for the others.
inline constexpr u32 kFirstBarrier = 2;
__device__ __forceinline__ void arrive_at(u32 barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(kFirstBarrier + barrier), "n"(kConsumerThreads) : "memory");
}
__device__ __forceinline__ void wait_at(u32 barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(kFirstBarrier + barrier), "n"(kConsumerThreads) : "memory");
}

// A rank's blocks serve its lanes, one lane after the other. An ordinary model has one.
template <class M>
__device__ __forceinline__ u32 lane_here() { return M::kLanesHere == 1 ? 0 : blockIdx.x / M::kLaneBlocks; }
template <class M>
__device__ __forceinline__ u32 lane_block() { return M::kLanesHere == 1 ? blockIdx.x : blockIdx.x % M::kLaneBlocks; }
template <class M>
__device__ __forceinline__ u32 own_lane(const Params& params) { return params.rank * M::kLanesHere + lane_here<M>(); }
// The rank, or lane, that data for rank `to` is said to come from: in a build that is alone all peers are itself, and it leaves
// what each of them would have left.
__device__ __forceinline__ u32 sender_rank(const Params& params, u32 to) { return kAlone ? to : params.rank; }
template <class M>
__device__ __forceinline__ u32 sender_lane(const Params& params, u32 to) {
  return sender_rank(params, to) * M::kLanesHere + lane_here<M>();
}
template <class M>
__device__ __forceinline__ u8* lane_workspace(const Params& params) {
  return M::kLanesHere == 1 ? params.workspace : params.workspace + static_cast<u64>(lane_here<M>()) * M::kLaneWorkspaceBytes;
}

template <class M>
struct Context {
  const Params& params;
  Shared<M> shared;
  Ring<M> ring;
  u32 round;
  u32 block, warp, lane, thread;  // block: of its lane
  Queries queries;
  u64* marks;  // where the next time stamp goes, in thread 0 of a traced round
  u32 layers_done;  // of all rounds, the present one included: the epoch of a layer's exchanges
  volatile Where* where;
  u32 cleanable, cleaned;  // barriers: to the cleaner, and back
  u32 reductions;  // so far: they alternate between halves of the shared buffer
  float scale;  // of this warp's query: 1 / rms that published activations were multiplied by
  u32 chosen;  // the first of ChoiceBarriers
  u32 weighings;  // layers whose experts were weighed apart, so far, of all rounds

  // Addresses and sizes that follow from these are computed in each phase, not kept over all of them in registers.
  __device__ __forceinline__ void forget_addresses() {
    asm volatile("" : "+r"(block), "+r"(warp), "+r"(lane), "+r"(thread), "+r"(queries.given));
  }
  // The epoch of the residual stream before the next layer's qkv, or before the head.
  __device__ __forceinline__ u32 next_in() const { return layers_done + round + 1; }
  // Until the cleaner is done with what it may clean, which is so `cleanings` times; it has long been, as a rule. Data that the
  // block publishes after its next barrier says so to other blocks.
  __device__ __forceinline__ void wait_for_cleaner(u32 cleanings) const {
    if (thread == 0 && cleanings) mbarrier_wait(cleaned, (cleanings - 1) & 1);
  }
  // The cleaner may go on to the next copies, `cleanings` times after the first. Pairs with its wait in `clean`.
  __device__ __forceinline__ void let_clean(u32 cleanings) const {
    wait_for_cleaner(cleanings);
    if (thread == 0) mbarrier_arrive(cleanable);
  }
  __device__ __forceinline__ void begin(Phase phase) {
    if (thread == 0) {
      where->phase = static_cast<u32>(phase);
      set_waits(1);
    }
    forget_addresses();
  }
  // The phase's activations are there.
  __device__ __forceinline__ void arrived() {
    if (thread == 0) set_waits(0);
    mark();
  }
  // By one thread, for the producer.
  __device__ __forceinline__ void set_waits(u32 waits) const {
    if constexpr (M::kWaitingCopies > 0) *const_cast<volatile u32*>(&shared.control().waits) = waits;
  }
  // A time stamp of the traced round; trace.py knows what the marks of a round are, in order.
  __device__ __forceinline__ void mark() {
    if (kTrace && thread == 0 && marks) *marks++ = clock_cycles();
  }
  // The SM's clock, which marks are taken from, at a tick of the GPU's, which is coarse: trace.py brings
  // the SMs to one time by two such pairs.
  __device__ __forceinline__ void mark_clocks() {
    if (kTrace && thread == 0 && marks) {
      const u64 before = clock_ns();
      u64 now = before;
      while (now == before) now = clock_ns();
      const u64 cycles = clock_cycles();
      *marks++ = now;
      *marks++ = cycles;
    }
  }
  __device__ __forceinline__ void mark_sm() {
    if (kTrace && thread == 0 && marks) *marks++ = sm_id();
  }
  // How many experts the queries of the traced round chose in a layer.
  __device__ __forceinline__ void tell_chosen(u32 layer, u32 count) const {
    if (kTrace && thread == 0 && marks) params.trace[blockIdx.x * kTraceWords + M::kTraceChosen + layer] = count;
  }
  __device__ __forceinline__ void sync() const { sync_consumers(); }
  // Of all lanes here.
  __device__ __forceinline__ u32 grid_block() const { return M::kLanesHere == 1 ? block : blockIdx.x; }
  // It speaks for its rank: to the host, and for it.
  __device__ __forceinline__ bool is_first() const { return grid_block() == 0; }
  // Norm weights and biases from one on, of which the model says where it lies.
  __device__ __forceinline__ const float* vectors(u64 at) const {
    const float* own = M::kLaneVectors ? params.vectors + static_cast<u64>(lane_here<M>()) * M::kLaneVectors : params.vectors;
    return own + at;
  }
};

// A block's part of a matrix of the layer that begins so many bytes after the block's weights; `block` counts those of
// all lanes here.
template <class M, class Op>
__device__ __forceinline__ const u8* weights_of(const u8* image, u32 block, u64 layer) {
  return image + static_cast<u64>(block) * M::kBlockStride + layer + Op::kOffset;
}
// The copy of an exchange buffer that an epoch uses.
template <class M>
__device__ __forceinline__ u8* exchange_copy(const Params& params, u32 offset, u32 bytes, u32 epoch) {
  return lane_workspace<M>(params) + offset + epoch % kExchangeCopies * (bytes / kExchangeCopies);
}
// Where a value of the exchanged activations lies, see kRoomQueries.
__device__ __forceinline__ u16* operand_value(u8* buffer, u32 query, u32 k) {
  return reinterpret_cast<u16*>(buffer) + ((k / 32) * kRoomQueries + query) * 32 + k % 32;
}
// Lanes of a whole warp hold consecutive rows of a query, an even number of them `valid`; every even
// lane stores two.
__device__ __forceinline__ void publish_pair(u8* now, u32 query, u32 row, u32 lane, bool valid, float x) {
  if (kSilentBlock != kNoBlock && blockIdx.x == kSilentBlock) return;
  const u32 pair = pack_pair(x, __shfl_down_sync(~0u, x, 1));
  if (lane % 2 == 0 && valid) store_exchanged(operand_value(now, query, row), present(pair));
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (u32 o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
