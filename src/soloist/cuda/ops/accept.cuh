// Which tokens of a round with drafts count, and what follows for later drafts: `verify` of
// soloist/engine/executor.py and soloist/speculation/depth.py. Integers that every block works out for itself from
// the same ones, so no exchange; no barrier, no exchange buffer, no model.
#pragma once
#include "ptx/types.cuh"

// The number of drafts with the most tokens for its cost; of equal ones the least.
__device__ __forceinline__ u32 best_depth(u32 acceptance, const DraftStart& start) {
  u32 best = 0;
  u64 best_tokens = kAcceptanceOne, best_cost = kPlainCost, tokens = kAcceptanceOne, share = kAcceptanceOne;
#pragma unroll 1
  for (u32 drafts = 1; drafts <= start.num_costs; ++drafts) {
    share = share * acceptance >> 16;
    tokens += share;
    const u64 cost = start.costs[drafts - 1];
    if (tokens * best_cost <= best_tokens * cost) continue;
    best = drafts;
    best_tokens = tokens;
    best_cost = cost;
  }
  return best;
}

__device__ __forceinline__ u32 most_of(const Depth& depth, const DraftStart& start) {
  if (depth.best) return depth.best;
  return depth.left ? 0 : start.num_costs ? 1 : 0;
}

// So many were checked, and so many accepted before the first wrong one.
__device__ __forceinline__ void judge(Depth& depth, u32 num_checked, u32 num_accepted, const DraftStart& start) {
#pragma unroll 1
  for (u32 i = 0; i < num_accepted; ++i) depth.acceptance += (kAcceptanceOne - depth.acceptance) >> kAcceptanceShift;
  if (num_accepted < num_checked) depth.acceptance -= depth.acceptance >> kAcceptanceShift;
  depth.best = best_depth(depth.acceptance, start);
  if (depth.best || num_accepted) {
    depth.pause = kFirstPause;
    depth.left = 0;
  } else {
    depth.left = depth.pause;
    depth.pause = 2 * depth.pause < kLongestPause ? 2 * depth.pause : kLongestPause;
  }
}

__device__ __forceinline__ bool is_stop(u32 token, const u32* stops, u32 num_stops) {
  bool is = false;
#pragma unroll 1
  for (u32 i = 0; i < num_stops; ++i) is |= stops[i] == token;
  return is;
}

struct Accepted {
  u32 count;  // tokens that the round makes
  bool ends;  // the launch
};

// Tokens of the round, from `chosen` of the sequence's columns. `fed`: what the columns were fed, the latest token and the draft.
__device__ __forceinline__ Accepted accept(Drafter& drafter, const DraftStart& start, const u32* fed, const u32* chosen,
                                           const u32* stops, u32 num_stops, u32 vocab) {
  Accepted accepted{1, chosen[0] >= vocab};
  u32 num_right = 0, num_checked = 0;
#pragma unroll 1
  for (u32 column = 1; column <= drafter.count; ++column) {
    const u32 token = chosen[column - 1];
    ++num_checked;
    if (fed[column] != token) break;
    ++num_right;
    // Where no score is a number the next round meets the same.
    if (is_stop(token, stops, num_stops) || chosen[column] >= vocab) break;
    ++accepted.count;
  }
  if (num_checked) judge(drafter.depths[drafter.kind], num_checked, num_right, start);
#pragma unroll 1
  for (u32 i = 0; i < accepted.count; ++i) accepted.ends |= is_stop(chosen[i], stops, num_stops);
  drafter.made += accepted.count;
  drafter.left -= accepted.count < drafter.left ? accepted.count : drafter.left;
  accepted.ends |= drafter.left == 0;
  return accepted;
}
