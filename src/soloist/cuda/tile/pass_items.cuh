// How attention of a pass over KV pages is dealt out (kernels/attend_pages.cu), and the order of its sums: plain C++, so that tests
// run it on the host.
//
// Rows are queries: those of the heads that share keys lie beside each other, token by token. kItemTokens tokens' rows are a tile
// of rows. Keys come in tiles of kKeyTile and splits of kSplitKeys, both counted from the sequence's first position. A split begins
// with no sum; sums of splits are folded in their order. So a row's bits depend on its own position alone: neither on the tile of
// rows that it is in, nor on which block has which split.
#pragma once
#include "ptx/mma.cuh"
#include "ptx/types.cuh"
#include "spec.cuh"

inline constexpr u32 kKeyTile = 128, kRowTile = 128, kSplitTiles = kSplitKeys / kKeyTile;
inline constexpr u32 kItemTokens = kRowTile / kGroupHeads, kItemRows = kItemTokens * kGroupHeads;
static_assert(kSplitKeys % kKeyTile == 0 && kGroupHeads <= kRowTile, "whole tiles");

// What the device alone knows of a pass.
struct PassShape {
  u32 tokens, position, stop, window;  // of the first token, behind the last one; no window: 0
  u32 pairs;                           // of a tile of rows and a head
  u32 first_split, splits;             // of all rows together
  bool is_split;                       // an item has one split; otherwise it has all of them
};
// Of one pair: which keys its rows see, in tiles.
struct PassItem {
  u32 pair, token, head;
  u32 first_tile, stop_tile;
};

// Whether sums of splits go through memory, `slots` of them at most: where blocks would otherwise have nothing to do.
__device__ __forceinline__ PassShape pass_shape(u32 tokens, u32 stop, u32 window, u32 blocks, u32 slots) {
  PassShape pass{tokens, stop - tokens, stop, window, 0, 0, 0, false};
  pass.pairs = (tokens + kItemTokens - 1) / kItemTokens * kPoolKvHeads;
  pass.first_split = window && pass.position + 1 > window ? (pass.position + 1 - window) / kSplitKeys : 0;
  pass.splits = (stop + kSplitKeys - 1) / kSplitKeys - pass.first_split;
  const u32 whole = (pass.pairs + blocks - 1) / blocks * pass.splits, each = (pass.pairs * pass.splits + blocks - 1) / blocks;
  pass.is_split = pass.splits > 1 && pass.pairs <= slots / pass.splits && each + each / 8 < whole;
  return pass;
}
__device__ __forceinline__ PassItem pair_item(const PassShape& pass, u32 pair) {
  PassItem item;
  item.pair = pair;
  item.token = pair / kPoolKvHeads * kItemTokens, item.head = pair % kPoolKvHeads;
  const u32 first = pass.position + item.token;
  const u32 stop = first + kItemTokens < pass.stop ? first + kItemTokens : pass.stop;
  item.first_tile = pass.window && first + 1 > pass.window ? (first + 1 - pass.window) / kKeyTile : 0;
  item.stop_tile = (stop + kKeyTile - 1) / kKeyTile;
  return item;
}
// Of the n-th turn of all blocks; false where there is none. Whole pairs come with most keys first, splits of the same keys beside
// each other, so that blocks read the same ones at the same time. Every other round goes the other way.
__device__ __forceinline__ bool find_item(const PassShape& pass, u32 round, u32 block, u32 blocks, PassItem& item, u32& split) {
  const u32 n = round * blocks + (round % 2 ? blocks - 1 - block : block);
  if (n >= (pass.is_split ? pass.pairs * pass.splits : pass.pairs)) return false;
  split = pass.is_split ? n / pass.pairs : 0;
  item = pair_item(pass, pass.is_split ? n % pass.pairs : pass.pairs - 1 - n);
  if (pass.is_split) {
    const u32 first = (pass.first_split + split) * kSplitTiles, stop = first + kSplitTiles;
    item.first_tile = item.first_tile > first ? item.first_tile : first;
    item.stop_tile = item.stop_tile < stop ? item.stop_tile : stop;
  }
  return true;
}

// Where a thread's scores and weights belong. Score i of lane l: of row l / 4, or eight further with every other two, and of this key
// of the tile: keys lie in shared memory so that a thread has neighbours, which its weights want.
__device__ __forceinline__ u32 key_of_score(u32 i, u32 lane) {
  const u32 block = i / 4, half_page = block / 4, parity = block / 2 % 2, sixteen = block % 2;
  return half_page * kHalfPagePositions + sixteen * 16 + i % 2 * 8 + lane % 4 * 2 + parity;
}
// Weights of 16 keys, in pairs as products want them: which score is the first of pair w of step k, and the second one.
__device__ __forceinline__ u32 first_of_pair(u32 k, u32 w) { return 4 * (k / 2 * 4 + k % 2) + w % 2 * 2 + w / 2; }
__device__ __forceinline__ u32 second_of_pair(u32 k, u32 w) { return first_of_pair(k, w) + 8; }

// A row's sums over some keys: the largest score, and of weights relative to it.
struct RowSums {
  float most, total;
};
// What a split's sums and those before it are multiplied by, and both rows' largest score.
struct Folding {
  float before, split;
};
__device__ __forceinline__ Folding fold(RowSums& row, const RowSums& split, float scale) {
  const float most = fmaxf(row.most, split.most), base = most == -kInfinity ? 0.0f : most;
  const Folding factors{exp2_fast((row.most - base) * scale), exp2_fast((split.most - base) * scale)};
  row.most = most;
  row.total = fmaf(row.total, factors.before, __fmul_rn(split.total, factors.split));
  return factors;
}
__device__ __forceinline__ float fold(float sum, float split, const Folding& factors) {
  return fmaf(sum, factors.before, __fmul_rn(split, factors.split));
}
