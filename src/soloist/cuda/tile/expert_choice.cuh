// Which experts a query takes, from their logits: scores, the highest of them, shares. By one warp; lane l has experts l, l + 32, …
//
// `L` is a kind of layer of the generated header. Knows nothing of blocks and memory.
#pragma once
#include "ptx/mma.cuh"

// The order of numbers as that of integers above 1. Below all of them comes what is no number, and then 0: nothing.
__device__ __forceinline__ u32 rank_of(float x) {
  if (x != x) return 1;
  const u32 bits = __float_as_uint(x + 0.0f);  // of zeros there is one
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (u32 o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp2_fast(-1.4426950408889634f * x)); }

template <class L>
struct ExpertChoice {
  static constexpr u32 kEach = (L::kExperts + 31) / 32;
  u32 chosen;          // bit i: expert 32 i + lane
  float share[kEach];  // of those that are chosen

  // Scores are in the order of logits, so that a positive factor of these changes no choice.
  static constexpr bool kByLogits = !L::kSigmoid && !L::kCorrected;

  __device__ __forceinline__ ExpertChoice() : chosen(0) {}
  // `logit` and, if there is one, the correction of each of the lane's experts.
  __device__ __forceinline__ ExpertChoice(const float (&logit)[kEach], const float (&correction)[kEach], u32 lane) : chosen(0) {
    u32 rank[kEach];
    score(logit, lane);
#pragma unroll
    for (u32 i = 0; i < kEach; ++i)
      rank[i] = 32 * i + lane < L::kExperts ? rank_of(L::kCorrected ? share[i] + correction[i] : share[i]) : 0;
    choose(rank, lane);
    normalise();
  }
  // By logits that are known up to a positive factor; `weigh` says the shares when that is known. Calls `note` with the place
  // and the number of each expert, the best first, by the lane that has it.
  template <class Note>
  __device__ __forceinline__ ExpertChoice(const float (&logit)[kEach], u32 lane, const Note& note) : chosen(0) {
    u32 rank[kEach];
    rank_logits(logit, lane, rank);
    choose(rank, lane, note);
  }
  __device__ __forceinline__ ExpertChoice(const float (&logit)[kEach], u32 lane) : chosen(0) {
    u32 rank[kEach];
    rank_logits(logit, lane, rank);
    choose(rank, lane);
  }
  __device__ __forceinline__ void weigh(const float (&logit)[kEach], u32 lane) {
    score(logit, lane);
    normalise();
  }

 private:
  static __device__ __forceinline__ void rank_logits(const float (&logit)[kEach], u32 lane, u32 (&rank)[kEach]) {
    static_assert(kByLogits, "scores in the order of logits");
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) rank[i] = 32 * i + lane < L::kExperts ? rank_of(logit[i]) : 0;
  }
  // The rank of the last one that is chosen, found by a reduction a turn; enough as long as no other expert has it.
  __device__ __forceinline__ void choose(u32 (&rank)[kEach], u32 lane) {
    u32 left[kEach];  // of the lane's experts, the highest first
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      left[i] = rank[i];
#pragma unroll
      for (u32 j = i; j > 0; --j) {
        const u32 higher = max(left[j - 1], left[j]);
        left[j] = min(left[j - 1], left[j]);
        left[j - 1] = higher;
      }
    }
    u32 last = 0;
#pragma unroll(L::kChosen <= 8 && kEach <= 4 ? L::kChosen : 1)
    for (u32 n = 0; n < L::kChosen; ++n) {
      last = __reduce_max_sync(~0u, left[0]);
      if (left[0] != last) continue;
#pragma unroll
      for (u32 i = 0; i + 1 < kEach; ++i) left[i] = left[i + 1];
      left[kEach - 1] = 0;
    }
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) chosen |= (rank[i] >= last ? 1u : 0u) << i;
    if (__reduce_add_sync(~0u, __popc(chosen)) == L::kChosen) return;
    chosen = 0;
    choose(rank, lane, [](u32, u32) {});
  }
  // In any case, with the place of each.
  template <class Note>
  __device__ __forceinline__ void choose(u32 (&rank)[kEach], u32 lane, const Note& note) {
#pragma unroll 1
    for (u32 n = 0; n < L::kChosen; ++n) {
      u32 best = 0, at = 0;
#pragma unroll
      for (u32 i = 0; i < kEach; ++i)
        if (rank[i] > best) best = rank[i], at = i;
      bool wins = best == __reduce_max_sync(~0u, best);
      const u32 alike = __ballot_sync(~0u, wins);
      // Mostly one lane has it, which is known sooner than which expert.
      if (alike & alike - 1) wins &= __reduce_min_sync(~0u, wins ? 32 * at + lane : ~0u) == 32 * at + lane;
#pragma unroll
      for (u32 i = 0; i < kEach; ++i)
        if (wins && i == at) rank[i] = 0, chosen |= 1u << i;
      if (wins) note(n, 32 * at + lane);
    }
  }
  __device__ __forceinline__ void normalise() {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) sum += chosen >> i & 1 ? share[i] : 0.0f;
    const float factor = L::kNormalises ? L::kRouterScale / (sum_of_lanes(sum) + L::kLeastSum) : L::kRouterScale;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) share[i] *= factor;
  }
  __device__ __forceinline__ void score(const float (&logit)[kEach], u32 lane) {
    constexpr float kLog2E = 1.4426950408889634f;
    if constexpr (L::kSigmoid) {
#pragma unroll
      for (u32 i = 0; i < kEach; ++i) share[i] = sigmoid(logit[i]);
      return;
    }
    float top = -kInfinity;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i)
      if (32 * i + lane < L::kExperts) top = fmaxf(top, logit[i]);
#pragma unroll
    for (u32 o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      share[i] = 32 * i + lane < L::kExperts ? exp2_fast(kLog2E * (logit[i] - top)) : 0.0f;
      sum += share[i];
    }
    const float part = 1.0f / sum_of_lanes(sum);
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) share[i] *= part;
  }
};
