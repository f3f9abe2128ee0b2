// Attention of a pass over all keys of its sequence so far, its own among them, on Hopper: out [T, Q, D] = softmax(q kᵀ / √D) v with
// queries [T, Q, D], and keys and values where decoding reads them, in the pages of the pool. A query sees the keys up to its own
// position, or the latest `window` of them.
//
// As in attend_first.cu one warp loads tiles into slots, and two groups of four warps have 64 rows each, in turns on the tensor
// cores. tile/pass_items.cuh says who does what, and in which order sums are added. What differs is the layout: rows of keys come
// from a half page in an order that gives a thread neighbouring keys, and odd rows' swapped columns come back from where they are.
// Values lie in pages with a row for each column, as products want them. Results may be `arranged`: as products with packed matrices read
// them (`arranged_column` of prefill/fragments.py).
#include "ptx/cluster.cuh"
#include "ptx/dependent.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/stage.cuh"
#include "ptx/tensor.cuh"
#include "ptx/turns.cuh"
#include "ptx/wgmma_attention.cuh"
#include "sync/slots.cuh"
#include "tile/pass_items.cuh"

inline constexpr u32 kGroups = 2, kBoxColumns = 32, kRowBytes = kBoxColumns * 2, kBoxes = kHeadDim / kBoxColumns;
inline constexpr u32 kTileBytes = kKeyTile * kHeadDim * 2, kBoxBytes = kRowTile * kRowBytes;
inline constexpr u32 kSums = kWgmmaRows * kHeadDim / 128, kFours = kSums / 4, kWeights = kScores / 2;  // of a thread
inline constexpr u32 kComputingWarps = 4 * kGroups, kAllWarps = kComputingWarps + 4, kComputing = kComputingWarps * 32;
// Keys in shared memory: of each side all eights of rows, of each eight its boxes of columns. There are two sides where odd rows swap
// columns, every other box; otherwise one.
inline constexpr u32 kSides = kSwappedKeyBytes ? 2 : 1, kSideBoxes = kBoxes / kSides, kBoxEight = 8 * kRowBytes;
inline constexpr u32 kEightBytes = kSideBoxes * kBoxEight, kSideBytes = kKeyTile / 8 * kEightBytes;
inline constexpr u32 kTileHalfPages = kKeyTile / kHalfPagePositions, kEightsOfHalfPage = kHalfPagePositions / 8;
// Registers of a thread that loads: it has to find what it loads. Those that compute share the rest of what a block begins with.
inline constexpr u32 kLoading = 56;
inline constexpr u32 kSumsBytes = kRowTile * kHeadDim * 4;  // of all splits before, of a tile of rows

static_assert((3 * 168 - kLoading) / 2 % 8 == 0 && kLoading % 8 == 0, "as registers are traded");
static_assert(kHeadDim % 32 == 0 && kHeadDim <= 128, "what ptx/wgmma_attention.cuh multiplies");
static_assert(kRowTile == kGroups * kWgmmaRows && kKeyTile == kScoreColumns, "one product has the keys of a tile");
static_assert(!kSwappedKeyBytes || kSwappedKeyBytes == kRowBytes, "odd rows swap whole boxes");
static_assert(kValueRowBytes == kRowBytes, "a box has a half page's values");
static_assert(kAttendThreads == kAllWarps * 32, "one group of warps more than compute");
static_assert(kAttendShared == (1 + kAttendSlots) * kTileBytes + kSumsBytes, "queries, slots and sums");

// Keys of even rows, their first side and the other one, then of odd rows, each side from where its columns lie. Boxes: of queries
// all rows of an item, of keys half of a half page's rows, of values a half page.
struct PageMaps {
  TensorMap queries, keys[2 * kSides], values;
};
struct Places {
  u32 queries, slots, sums;
  u32 queries_full, queries_empty, full, empty;
};
using Turn = SlotState<kAttendSlots>;

// A half page of the pool, counted from its start.
__device__ __forceinline__ u32 half_page_index(i32 page, u32 layer, u32 head, u32 half) {
  constexpr u64 kPageValues = u64{kLayers} * kPoolKvHeads * kPageHalves * kKvParts * kHalfPageValues;
  return static_cast<u32>(half_page_place(kPageValues, page, layer, head, half) / (kKvParts * kHalfPageValues));
}

// One thread: everything that the block reads. It watches over all others' waits as well, as in attend_first.cu.
__device__ __forceinline__ void load(const Places& at, const PassShape& pass, const PageMaps& maps, const i32* page_table,
                                     u32 layer) {
  constexpr u32 kTilePages = kKeyTile / kPagePositions;
  struct Pages {
    i32 ids[kTilePages];
  };
  Turn turn;
  PassItem item;
  const u32 last_half_page = (pass.stop - 1) / kHalfPagePositions;
  const auto pages_of = [&](u32 tile) {
    Pages pages;
#pragma unroll
    for (u32 i = 0; i < kTilePages; ++i)
      pages.ids[i] = __ldg(page_table + min(tile * kTilePages + i, last_half_page / kPageHalves));
    return pages;
  };
  const auto begin_slot = [&] {
    wait_or_trap(at.empty + turn.slot * 8, turn.round ^ 1);
    mbarrier_expect(at.full + turn.slot * 8, kTileBytes);
    return at.slots + turn.slot * kTileBytes;
  };
  // Behind the last half page it comes again: nobody sees it.
  const auto for_half_pages = [&](u32 tile, const Pages& pages, const auto& copy) {
#pragma unroll
    for (u32 i = 0; i < kTileHalfPages; ++i) {
      const u32 half_page = min(tile * kTileHalfPages + i, last_half_page);
      copy(i, half_page_index(pages.ids[i / kPageHalves], layer, item.head, half_page % kPageHalves));
    }
  };
  const auto load_keys = [&](u32 tile, const Pages& pages) {
    const u32 slot = begin_slot(), full = at.full + turn.slot * 8;
    for_half_pages(tile, pages, [&](u32 i, u32 index) {
#pragma unroll
      for (u32 m = 0; m < 2 * kSides; ++m) {
        const u32 eight = i * kEightsOfHalfPage + m / kSides * (kEightsOfHalfPage / 2);
        const u32 to = slot + m % kSides * kSideBytes + eight * kEightBytes;
        load_box(to, maps.keys[m], BoxPlace{{0, 0, 0, 0, index * kKvParts * (kEightsOfHalfPage / 2)}}, full);
      }
    });
    turn.next();
  };
  const auto load_values = [&](u32 tile, const Pages& pages) {
    const u32 slot = begin_slot(), full = at.full + turn.slot * 8;
    for_half_pages(tile, pages, [&](u32 i, u32 index) {
      load_box(slot + i * kHeadDim * kRowBytes, maps.values, BoxPlace{{0, 0, index, 0, 0}}, full);
    });
    turn.next();
  };
  u32 parity = 1, split;
#pragma unroll 1
  for (u32 round = 0; find_item(pass, round, blockIdx.x, gridDim.x, item, split); ++round) {
    if (item.first_tile >= item.stop_tile) continue;
    wait_or_trap(at.queries_empty, parity);
    parity ^= 1;
    mbarrier_expect(at.queries_full, kBoxes * kItemRows * kRowBytes);
#pragma unroll
    for (u32 i = 0; i < kBoxes; ++i)
      load_box(at.queries + i * kBoxBytes, maps.queries, BoxPlace{{0, 0, item.token, item.head, i}}, at.queries_full);
    Pages before, pages = pages_of(item.first_tile);
#pragma unroll 1
    for (u32 tile = item.first_tile; tile < item.stop_tile; ++tile) {
      const Pages next = pages_of(tile + 1);  // on its way while the copies below wait
      load_keys(tile, pages);
      if (tile > item.first_tile && tile % kSplitTiles) load_values(tile - 1, before);
      if (tile + 1 == item.stop_tile || (tile + 1) % kSplitTiles == 0) load_values(tile, pages);
      before = pages, pages = next;
    }
  }
#pragma unroll 1
  for (u32 i = 0; i < kAttendSlots; ++i, turn.next()) wait_or_trap(at.empty + turn.slot * 8, turn.round ^ 1);
}

// What a thread knows of its two rows, eight apart.
struct Rows {
  float most[2], total[2], factor[2];  // largest score, sum of weights, what the last tile makes of sums before it
  u32 position[2];
};

__device__ __forceinline__ u64 keys_operand(u32 shared) {
  return static_cast<u64>(shared >> 4) | u64{1} << 16 | static_cast<u64>(kEightBytes >> 4) << 32 | u64{2} << 62;
}
__device__ __forceinline__ void score(float (&s)[kScores], u32 queries, u32 keys) {
  const u64 a = wgmma_operand<kRowBytes>(queries), b = keys_operand(keys);
#pragma unroll
  for (u32 column = 0; column < kHeadDim; column += kWgmmaDepth) {
    const u32 box = column / kBoxColumns, along = column % kBoxColumns * 2;
    const u32 in_keys = box % kSides * kSideBytes + box / kSides * kBoxEight + along;
    multiply_scores(s, a + ((box * kBoxBytes + along) >> 4), b + (in_keys >> 4), column);
  }
}
__device__ __forceinline__ void add_tile(float (&sums)[kSums], const u32 (&weights)[kWeights / 4][4], u32 values) {
  const u64 b = wgmma_operand<kRowBytes>(values);
#pragma unroll
  for (u32 i = 0; i < kWeights / 4; ++i)
    add_values_along(sums, weights[i], b + ((i / 2 * kHeadDim * kRowBytes + i % 2 * kWgmmaDepth * 2) >> 4));
}

// What queries do not see; `key` is the tile's first one.
__device__ __forceinline__ void mask(float (&s)[kScores], const Rows& rows, u32 window, u32 key, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < kScores; ++i) {
    const u32 k = key + key_of_score(i, lane), position = rows.position[i / 2 % 2];
    if (k > position || (window && k + window <= position)) s[i] = -kInfinity;
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
    const float base = most == -kInfinity ? 0.0f : most;  // a row may see nothing of a tile
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
  for (u32 i = 0; i < kWeights; ++i)
    weights[i / 4][i % 4] = pack_pair(s[first_of_pair(i / 4, i % 4)], s[second_of_pair(i / 4, i % 4)]);
}
// They are read by products in flight up to here.
__device__ __forceinline__ void keep_weights(u32 (&weights)[kWeights / 4][4]) {
#pragma unroll
  for (u32 i = 0; i < kWeights; ++i) keep_factor(weights[i / 4][i % 4]);
}

// Values behind the sequence's end may be anything, and no weight makes a number of what is none. Every group clears what it reads:
// both write the same.
__device__ __forceinline__ void clear_behind(u32 values, u32 positions, u32 group, u32 thread) {
  constexpr u32 kChunks = kHalfPagePositions / 8;
#pragma unroll 1
  for (u32 i = thread; i < kTileHalfPages * kHeadDim * kChunks; i += 128) {
    const u32 chunk = i % kChunks, d = i / kChunks % kHeadDim, half_page = i / (kChunks * kHeadDim);
    const u32 first = half_page * kHalfPagePositions + chunk * 8;
    if (first + 8 <= positions) continue;
    const u32 kept = positions > first ? positions - first : 0, at = values + half_page * kHeadDim * kRowBytes;
#pragma unroll 1
    for (u32 j = kept; j < 8; ++j)
      store_shared_half(at + swizzled<kRowBytes>(d, chunk) + 2 * j, 0);
  }
  fence_async_proxy_shared();
  await_turn(3 + group, 128);
}

// A row's place in `out`, if it is one of the pass: `row` of the item.
__device__ __forceinline__ u16* out_row(u16* out, const PassShape& pass, const PassItem& item, u32 row) {
  const u32 token = item.token + row / kGroupHeads;
  if (row >= kItemRows || token >= pass.tokens) return nullptr;
  return out + ((static_cast<u64>(token) * kPoolKvHeads + item.head) * kGroupHeads + row % kGroupHeads) * kHeadDim;
}
// Sums of rows over their totals, of which every lane of four has a part; of columns from `column` on, a multiple of 32. A lane has two of
// each 8 columns: of 32, as products with packed matrices read them, 16 neighbouring bytes.
template <u32 kCount>
__device__ __forceinline__ void write(const float (&sums)[kCount], const float (&totals)[2], u16* const (&rows)[2], u32 column,
                                      bool arranged, u32 lane) {
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    float total = totals[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float scale = __frcp_rn(total);
    if (!rows[h]) continue;
    const auto pair = [&](u32 j) { return pack_pair(sums[4 * j + 2 * h] * scale, sums[4 * j + 2 * h + 1] * scale); };
#pragma unroll
    for (u32 j = 0; j < kCount / 4; j += 4) {
      u16* const to = rows[h] + column + 8 * j;
      if (arranged) {
        *reinterpret_cast<uint4*>(to + lane % 4 * 8) = make_uint4(pair(j), pair(j + 1), pair(j + 2), pair(j + 3));
        continue;
      }
#pragma unroll
      for (u32 k = 0; k < 4; ++k) *reinterpret_cast<u32*>(to + 8 * k + lane % 4 * 2) = pair(j + k);
    }
  }
}

// Sums of a split in memory: float4 i of thread t of those that compute, then its rows' (most, most, total, total).
__device__ __forceinline__ float4* partial(float4* partials, const PassShape& pass, u32 pair, u32 split) {
  return partials + (static_cast<u64>(pair) * pass.splits + split) * ((kFours + 1) * kComputing);
}

// A warp of those that compute.
__device__ __forceinline__ void compute(const Places& at, const PassShape& pass, u16* out, float4* partials, float scale, bool arranged,
                                        u32 warp, u32 lane) {
  const u32 group = warp / 4, queries = at.queries + group * kWgmmaRows * kRowBytes, thread = warp * 32 + lane;
  const u32 own_sums = at.sums + thread * 16;
  // The groups' turns on the tensor cores, named barriers 1 and 2: one gives, the other waits.
  const auto await_own = [&] { await_turn(1 + group, kComputing); };
  const auto give_other = [&] { give_turn(2 - group, kComputing); };
  const auto release = [&](u32 barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  Turn turn;
  const auto await_slot = [&] {
    while (!mbarrier_try_wait(at.full + turn.slot * 8, turn.round)) {
    }
    return at.slots + turn.slot * kTileBytes;
  };
  PassItem item;
  u32 parity = 0, split;
  if (group == 1) give_other();
#pragma unroll 1
  for (u32 round = 0; find_item(pass, round, blockIdx.x, gridDim.x, item, split); ++round) {
    if (item.first_tile >= item.stop_tile) continue;
    const u32 row = warp * 16 + lane / 4, first = pass.position + item.token;
    RowSums before[2] = {{-kInfinity, 0.0f}, {-kInfinity, 0.0f}};
    while (!mbarrier_try_wait(at.queries_full, parity)) {
    }
    parity ^= 1;
#pragma unroll 1
    for (u32 tile = item.first_tile; tile < item.stop_tile;) {
      const u32 stop_tile = min((tile / kSplitTiles + 1) * kSplitTiles, item.stop_tile);
      const bool is_first = tile == item.first_tile, is_last = stop_tile == item.stop_tile;
      float s[kScores], sums[kSums];
      u32 weights[kWeights / 4][4];
      Rows rows{{-kInfinity, -kInfinity}, {0.0f, 0.0f}, {1.0f, 1.0f}, {first + row / kGroupHeads, first + (row + 8) / kGroupHeads}};
#pragma unroll
      for (u32 i = 0; i < kSums; ++i) sums[i] = 0.0f;
      const auto weigh_tile = [&] {
        const u32 key = tile * kKeyTile;
        if (key + kKeyTile > first + 1 || (pass.window && key + pass.window < first + kItemTokens))
          mask(s, rows, pass.window, key, lane);
        weigh(s, rows, scale);
      };
      u32 slot = await_slot();
      await_own();
      begin_products();
      score(s, queries, slot);
      commit_products();
      give_other();
      wait_for_products<0>();
      take_sums(s);
      release(at.empty + turn.slot * 8);
      turn.next();
      weigh_tile();
      pack_weights(weights, s);
#pragma unroll 1
      for (++tile; tile < stop_tile; ++tile) {
        const u32 keys_empty = at.empty + turn.slot * 8;
        slot = await_slot();
        await_own();
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
        give_other();
        wait_for_products<1>();
        take_sums(s);
        release(keys_empty);
        weigh_tile();
        compute_first(rows.total[0] + rows.total[1] < 0.0f);
        wait_for_products<0>();
        take_sums(sums);
        keep_weights(weights);
        release(at.empty + turn.slot * 8);
        turn.next();
#pragma unroll
        for (u32 i = 0; i < kSums; ++i) sums[i] *= rows.factor[i / 2 % 2];
        pack_weights(weights, s);
      }
      if (is_last) release(at.queries_empty);
      slot = await_slot();
      if (stop_tile * kKeyTile > pass.stop)
        clear_behind(slot, pass.stop - (stop_tile - 1) * kKeyTile, group, thread % 128);
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
      if (pass.is_split) {
        float4* to = partial(partials, pass, item.pair, split) + thread;
#pragma unroll
        for (u32 i = 0; i < kFours; ++i)
          to[i * kComputing] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        to[kFours * kComputing] = make_float4(rows.most[0], rows.most[1], rows.total[0], rows.total[1]);
        continue;
      }
      Folding factors[2];
#pragma unroll
      for (u32 h = 0; h < 2; ++h) factors[h] = fold(before[h], RowSums{rows.most[h], rows.total[h]}, scale);
#pragma unroll
      for (u32 i = 0; i < kFours; ++i) {
        const u32 here = own_sums + i * kComputing * 16;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!is_first) x = *at_shared<float4>(here);
        sums[4 * i] = x.x = fold(x.x, sums[4 * i], factors[0]);
        sums[4 * i + 1] = x.y = fold(x.y, sums[4 * i + 1], factors[0]);
        sums[4 * i + 2] = x.z = fold(x.z, sums[4 * i + 2], factors[1]);
        sums[4 * i + 3] = x.w = fold(x.w, sums[4 * i + 3], factors[1]);
        if (!is_last) *at_shared<float4>(here) = x;
      }
      if (is_last) {
        u16* const to[2] = {out_row(out, pass, item, row), out_row(out, pass, item, row + 8)};
        const float totals[2] = {before[0].total, before[1].total};
        write(sums, totals, to, 0, arranged, lane);
      }
    }
  }
  if (group == 0) await_own();  // the last one, which nobody takes
}

// The pass, in words that a captured graph finds where they are: queries (0, T) and keys (0, the position behind the last one).
// `partials` has `slots` places for sums of splits.
extern "C" __global__ void __launch_bounds__(kAttendThreads, 1)
    attend_pages(const __grid_constant__ PageMaps maps, u16* __restrict__ out, float4* __restrict__ partials, u32 slots,
                 const i32* __restrict__ page_table, const u32* __restrict__ query_bounds, const u32* __restrict__ key_bounds,
                 u32 layer, u32 window, float scale, u32 arranged) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 barriers[2 + 2 * kAttendSlots];
  let_next_begin();
  const u32 data = shared_address(shared), first = shared_address(barriers);
  const Places at{data, data + kTileBytes, data + (1 + kAttendSlots) * kTileBytes,
                  first, first + 8, first + 16, first + 16 + kAttendSlots * 8};
  const PassShape pass = pass_shape(__ldg(query_bounds + 1), __ldg(key_bounds + 1), window, gridDim.x, slots);
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
    keep_registers<kLoading>();
    if (warp == kComputingWarps && lane == 0) load(at, pass, maps, page_table, layer);
  } else {
    gain_registers<(3 * 168 - kLoading) / 2>();
    compute(at, pass, out, partials, scale, arranged, warp, lane);
  }
}

// Sums of splits to results, where `attend_pages` of so many blocks left them in memory. A block has 32 columns of one pair.
extern "C" __global__ void __launch_bounds__(kComputing)
    merge_splits(u16* __restrict__ out, const float4* __restrict__ partials, u32 slots, const u32* __restrict__ query_bounds,
                 const u32* __restrict__ key_bounds, u32 window, float scale, u32 blocks, u32 arranged) {
  constexpr u32 kParts = kHeadDim / 32, kOwn = kFours / kParts, kAhead = 4;
  let_next_begin();
  const PassShape pass = pass_shape(__ldg(query_bounds + 1), __ldg(key_bounds + 1), window, blocks, slots);
  const u32 pair = blockIdx.x / kParts, part = blockIdx.x % kParts;
  if (!pass.is_split || pair >= pass.pairs) return;
  const PassItem item = pair_item(pass, pair);
  const u32 first = item.first_tile / kSplitTiles - pass.first_split;
  const u32 stop = (item.stop_tile + kSplitTiles - 1) / kSplitTiles - pass.first_split;
  const u32 thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  RowSums rows[2] = {{-kInfinity, 0.0f}, {-kInfinity, 0.0f}};
  float sums[4 * kOwn];
#pragma unroll
  for (u32 i = 0; i < 4 * kOwn; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (u32 begin = first; begin < stop; begin += kAhead) {
    float4 own[kAhead][kOwn], of_rows[kAhead];
#pragma unroll
    for (u32 j = 0; j < kAhead; ++j) {
      const float4* from =
          partials + (static_cast<u64>(pair) * pass.splits + min(begin + j, stop - 1)) * ((kFours + 1) * kComputing) + thread;
#pragma unroll
      for (u32 i = 0; i < kOwn; ++i) own[j][i] = __ldcs(from + (part * kOwn + i) * kComputing);
      of_rows[j] = __ldcs(from + kFours * kComputing);
    }
#pragma unroll
    for (u32 j = 0; j < kAhead; ++j) {
      if (begin + j >= stop) break;
      const Folding factors[2] = {fold(rows[0], RowSums{of_rows[j].x, of_rows[j].z}, scale),
                                  fold(rows[1], RowSums{of_rows[j].y, of_rows[j].w}, scale)};
#pragma unroll
      for (u32 i = 0; i < kOwn; ++i) {
        sums[4 * i] = fold(sums[4 * i], own[j][i].x, factors[0]);
        sums[4 * i + 1] = fold(sums[4 * i + 1], own[j][i].y, factors[0]);
        sums[4 * i + 2] = fold(sums[4 * i + 2], own[j][i].z, factors[1]);
        sums[4 * i + 3] = fold(sums[4 * i + 3], own[j][i].w, factors[1]);
      }
    }
  }
  u16* const to[2] = {out_row(out, pass, item, row), out_row(out, pass, item, row + 8)};
  const float totals[2] = {rows[0].total, rows[1].total};
  write(sums, totals, to, part * 32, arranged, lane);
}
