// Attention of a prompt's first tokens over themselves, on Hopper: out [T, Q, D] = softmax(q kᵀ / √D) v with queries [T, Q, D] and
// keys and values [T, K, D], where a query sees the keys up to its own, or the latest `window` of them.
//
// An item is kTile queries of one head; a block takes items in turn, those with most keys first. In a block one warp loads tiles
// of keys and of values into slots, as many ahead as there are slots, and two groups of four warps have 64 queries each. While a
// group's scores of one tile become weights, the tensor cores add values by the weights of the tile before, and then it is the
// other group's turn on them. Keys come in one order, from the first one on, in tiles that begin at multiples of kTile: a row's
// bits depend neither on T nor on what lies beside it.
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/stage.cuh"
#include "ptx/tensor.cuh"
#include "ptx/wgmma_attention.cuh"
#include "sync/slots.cuh"

inline constexpr u32 kGroups = 2, kTile = kGroups * kWgmmaRows;  // queries of a block, and keys at once
inline constexpr u32 kBoxColumns = kHeadDim % 64 ? 32 : 64, kBoxes = kHeadDim / kBoxColumns, kRowBytes = kBoxColumns * 2;
inline constexpr u32 kTileBytes = kTile * kHeadDim * 2, kBoxBytes = kTile * kRowBytes;
inline constexpr u32 kSums = kWgmmaRows * kHeadDim / 128, kWeights = kScores / 2;  // of a thread; weights in pairs
inline constexpr u32 kComputingWarps = 4 * kGroups, kAllWarps = kComputingWarps + 4;
inline constexpr u32 kOutRows = 16, kOutBytes = kOutRows * kHeadDim * 2;  // of a warp

static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128, "what ptx/wgmma_attention.cuh multiplies");
static_assert(kTile == kScoreColumns && kTile == kAttendTile, "one product has the keys of a tile");
static_assert(kAttendThreads == kAllWarps * 32, "one group of warps more than compute");
static_assert(kAttendShared == (2 + kAttendSlots) * kTileBytes, "queries, slots and results");

// Addresses in shared memory; barriers have 8 bytes each.
struct Places {
  u32 queries, slots, results;
  u32 queries_full, queries_empty, full, empty;
};
// The slots in turn: keys 0, keys 1, values 0, keys 2, values 1 and so on.
using Turn = SlotState<kAttendSlots>;
struct Shape {
  u32 tokens, window, query_heads, group;  // no window: 0; of query heads that share keys
};
struct Item {
  u32 row, head, first_tile, stop_tile;  // of keys, in tiles
};

// Of the block's n-th round. Every other round goes the other way: so all blocks have about as many keys.
__device__ __forceinline__ bool find_item(const Shape& shape, u32 round, Item& item) {
  const u32 tiles = (shape.tokens + kTile - 1) / kTile, blocks = gridDim.x;
  const u32 n = round * blocks + (round % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
  if (n >= tiles * shape.query_heads) return false;
  const u32 tile = tiles - 1 - n / shape.query_heads;
  item.row = tile * kTile;
  item.head = n % shape.query_heads;
  item.first_tile = shape.window && item.row + 1 > shape.window ? (item.row + 1 - shape.window) / kTile : 0;
  item.stop_tile = tile + 1;
  return true;
}

// One thread: everything that the block reads. It watches over all others' waits as well: if they could trap, too, the compiler
// would give them no more registers than every warp has at first.
__device__ __forceinline__ void load(const Places& at, const Shape& shape, const TensorMap& queries, const TensorMap& keys,
                                     const TensorMap& values) {
  Turn turn;
  Item item;
  const auto load_tile = [&](const TensorMap& from, u32 tile, u32 box) {
    wait_or_trap(at.empty + turn.slot * 8, turn.round ^ 1);
    const u32 full = at.full + turn.slot * 8;
    mbarrier_expect(full, kTileBytes);
    load_boxes(at.slots + turn.slot * kTileBytes, from, tile * kTile, box, full);
    turn.next();
  };
#pragma unroll 1
  for (u32 round = 0; find_item(shape, round, item); ++round) {
    const u32 box = item.head / shape.group * kBoxes;
    wait_or_trap(at.queries_empty, round % 2 ^ 1);
    mbarrier_expect(at.queries_full, kTileBytes);
    load_boxes(at.queries, queries, item.row, item.head * kBoxes, at.queries_full);
    load_tile(keys, item.first_tile, box);
#pragma unroll 1
    for (u32 tile = item.first_tile + 1; tile < item.stop_tile; ++tile) {
      load_tile(keys, tile, box);
      load_tile(values, tile - 1, box);
    }
    load_tile(values, item.stop_tile - 1, box);
  }
#pragma unroll 1
  for (u32 i = 0; i < kAttendSlots; ++i, turn.next()) wait_or_trap(at.empty + turn.slot * 8, turn.round ^ 1);
}

// What a thread knows of its two rows, eight apart.
struct Rows {
  float most[2], total[2], factor[2];  // largest score, sum of weights, what the last tile makes of sums before it
};

__device__ __forceinline__ void score(float (&s)[kScores], u32 queries, u32 keys) {
  const u64 a = wgmma_operand<kRowBytes>(queries), b = wgmma_operand<kRowBytes>(keys);
#pragma unroll
  for (u32 column = 0; column < kHeadDim; column += kWgmmaDepth) {
    const u32 at = (column / kBoxColumns * kBoxBytes + column % kBoxColumns * 2) >> 4;
    multiply_scores(s, a + at, b + at, column);
  }
}
__device__ __forceinline__ void add_tile(float (&sums)[kSums], const u32 (&weights)[kWeights / 4][4], u32 values) {
  const u64 b = wgmma_operand<kRowBytes>(values, kBoxBytes);
#pragma unroll
  for (u32 i = 0; i < kWeights / 4; ++i) add_values(sums, weights[i], b + (i * kWgmmaDepth * kRowBytes >> 4));
}

// What queries do not see. `row` is the thread's first one, `key` the tile's.
__device__ __forceinline__ void mask(float (&s)[kScores], u32 window, u32 row, u32 key, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < kScores; ++i) {
    const u32 k = key + i / 4 * 8 + lane % 4 * 2 + i % 2, r = row + i / 2 % 2 * 8;
    if (k > r || (window && k + window <= r)) s[i] = -kInfinity;
  }
}
// Scores to weights 2^(scale (score - most)).
__device__ __forceinline__ void weigh(float (&s)[kScores], Rows& rows, float scale) {
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    float most = rows.most[h];
#pragma unroll
    for (u32 i = 2 * h; i < kScores; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float base = most == -kInfinity ? 0.0f : most;  // a windowed row may see nothing of its first tile
    rows.factor[h] = exp2_fast((rows.most[h] - base) * scale);  // 1 to the bit if nothing changes
    rows.most[h] = most;
    const float offset = -base * scale;
    float total = 0.0f;
#pragma unroll
    for (u32 i = 2 * h; i < kScores; i += 4) {
      s[i] = exp2_fast(fmaf(s[i], scale, offset));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], scale, offset));
      total += s[i];
      total += s[i + 1];
    }
    rows.total[h] = fmaf(rows.total[h], rows.factor[h], total);
  }
}
__device__ __forceinline__ void pack_weights(u32 (&weights)[kWeights / 4][4], const float (&s)[kScores]) {
#pragma unroll
  for (u32 i = 0; i < kWeights; ++i) weights[i / 4][i % 4] = pack_pair(s[2 * i], s[2 * i + 1]);
}
// They are read by products in flight up to here.
__device__ __forceinline__ void keep_weights(u32 (&weights)[kWeights / 4][4]) {
#pragma unroll
  for (u32 i = 0; i < kWeights; ++i) asm volatile("" : "+r"(weights[i / 4][i % 4])::"memory");
}

// A warp's sums over their totals through its part of shared memory, whence the copy engine takes them.
__device__ __forceinline__ void write(const float (&sums)[kSums], Rows& rows, u32 shared, const TensorMap& out, u32 row,
                                      u32 head, u32 lane) {
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    rows.total[h] += __shfl_xor_sync(~0u, rows.total[h], 1);
    rows.total[h] += __shfl_xor_sync(~0u, rows.total[h], 2);
    rows.total[h] = 1.0f / rows.total[h];
  }
  if (lane == 0) wait_for_boxes_read();  // of the item before
  __syncwarp();
#pragma unroll
  for (u32 j = 0; j < kHeadDim / 8; j += 2) {
    u32 words[4];  // upper and lower eight rows of eight columns, and of the next eight
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      words[i] = pack_pair(sums[4 * j + 2 * i] * rows.total[i % 2], sums[4 * j + 2 * i + 1] * rows.total[i % 2]);
    const u32 chunk = j + lane / 16, in_box = chunk % (kBoxColumns / 8), box = chunk / (kBoxColumns / 8);
    store_matrices(shared + box * kOutRows * kRowBytes + swizzled<kRowBytes>(lane % 16, in_box), words);
  }
  fence_async_proxy_shared();
  __syncwarp();
  if (lane == 0) {
    store_boxes(out, row, head * kBoxes, shared);
    commit_boxes();
  }
}

// A warp of those that compute. Giving a slot back needs no release: the tensor cores have read it by the time that the products
// are waited for, and this warp has written nothing to it.
__device__ __forceinline__ void compute(const Places& at, const Shape& shape, const TensorMap& out, float scale, u32 warp,
                                        u32 lane) {
  const u32 group = warp / 4, queries = at.queries + group * kWgmmaRows * kRowBytes;
  // The groups' turns on the tensor cores, named barriers 1 and 2: one gives, the other waits.
  const auto await_turn = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); };
  const auto give_turn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); };
  const auto release = [&](u32 barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  Turn turn;
  const auto await_slot = [&] {
    while (!mbarrier_try_wait(at.full + turn.slot * 8, turn.round)) {
    }
    return at.slots + turn.slot * kTileBytes;
  };
  Item item;
  if (group == 1) give_turn();
#pragma unroll 1
  for (u32 round = 0; find_item(shape, round, item); ++round) {
    const u32 group_row = item.row + group * kWgmmaRows, row = group_row + warp % 4 * kOutRows;
    float s[kScores], sums[kSums];
    u32 weights[kWeights / 4][4];
    Rows rows{{-kInfinity, -kInfinity}, {0.0f, 0.0f}, {1.0f, 1.0f}};
#pragma unroll
    for (u32 i = 0; i < kSums; ++i) sums[i] = 0.0f;
    const auto weigh_tile = [&](u32 tile) {
      const u32 key = tile * kTile;
      if (key + kTile > group_row + 1 || (shape.window && key + shape.window < group_row + kWgmmaRows))
        mask(s, shape.window, row + lane / 4, key, lane);
      weigh(s, rows, scale);
    };
    while (!mbarrier_try_wait(at.queries_full, round % 2)) {
    }
    u32 slot = await_slot();
    await_turn();
    begin_products();
    score(s, queries, slot);
    commit_products();
    give_turn();
    wait_for_products<0>();
    take_sums(s);
    release(at.empty + turn.slot * 8);
    turn.next();
    weigh_tile(item.first_tile);
    pack_weights(weights, s);
#pragma unroll 1
    for (u32 tile = item.first_tile + 1; tile < item.stop_tile; ++tile) {
      const u32 keys_empty = at.empty + turn.slot * 8;
      slot = await_slot();
      await_turn();
      take_sums(s);
      take_sums(sums);
      keep_weights(weights);
      begin_products();
      score(s, queries, slot);
      commit_products();
      turn.next();
      slot = await_slot();
      begin_products();
      add_tile(sums, weights, slot);
      commit_products();
      give_turn();
      wait_for_products<1>();
      take_sums(s);
      release(keys_empty);
      weigh_tile(tile);
      // Never so: or the compiler would wait first, and compute weights after that.
      if (rows.total[0] + rows.total[1] < 0.0f) asm volatile("nanosleep.u32 0;" ::: "memory");
      wait_for_products<0>();
      take_sums(sums);
      keep_weights(weights);
      release(at.empty + turn.slot * 8);
      turn.next();
#pragma unroll
      for (u32 i = 0; i < kSums; ++i) sums[i] *= rows.factor[i / 2 % 2];
      pack_weights(weights, s);
    }
    release(at.queries_empty);
    slot = await_slot();
    take_sums(sums);
    keep_weights(weights);
    begin_products();
    add_tile(sums, weights, slot);
    commit_products();
    wait_for_products<0>();
    take_sums(sums);
    keep_weights(weights);
    release(at.empty + turn.slot * 8);
    turn.next();
    write(sums, rows, at.results + warp * kOutBytes, out, row, item.head, lane);
  }
  if (group == 0) await_turn();  // the last one, which nobody takes
  if (lane == 0) wait_for_boxes();
}

// Boxes of the maps are beside each other: kTile rows of queries, keys and values, kOutRows of out; columns of all of a head.
extern "C" __global__ void __launch_bounds__(kAttendThreads, 1)
    attend_first(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                 const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap out, u32 tokens, u32 window,
                 u32 query_heads, u32 group, float scale) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 barriers[2 + 2 * kAttendSlots];
  const u32 data = shared_address(shared), first = shared_address(barriers);
  const Places at{data, data + kTileBytes, data + (1 + kAttendSlots) * kTileBytes,
                  first, first + 8, first + 16, first + 16 + kAttendSlots * 8};
  const Shape shape{tokens, window, query_heads, group};
  // All lanes know that it is one warp's number.
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(at.queries_full, 1);
    mbarrier_init(at.queries_empty, kComputingWarps);
#pragma unroll
    for (u32 i = 0; i < kAttendSlots; ++i) {
      mbarrier_init(at.full + i * 8, 1);
      mbarrier_init(at.empty + i * 8, kComputingWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  if (warp >= kComputingWarps) {
    keep_registers_to_load();
    if (warp == kComputingWarps && lane == 0) load(at, shape, queries, keys, values);
  } else {
    take_registers_to_compute();
    compute(at, shape, out, scale, warp, lane);
  }
}
