// The slots of a layer with experts: the distinct experts that a round's queries chose, in ascending order. In shared memory.
#pragma once
#include "tile/expert_choice.cuh"

// What the result of an MLP beside experts is multiplied by, where it has a gate.
template <class M, bool kGatesShared>
struct SharedShares {};
template <class M>
struct SharedShares<M, true> {
  float shared_share[kMostQueries];
};

template <class M>
struct ExpertSlots : SharedShares<M, M::kGatesShared> {
  static constexpr u32 kMost = M::kMostSlots, kWords = (M::kMostExperts + 31) / 32;
  u32 count;
  u32 chosen[kMostQueries][kWords];  // bit b of word w: expert 32 w + b
  u32 expert[kMost];
  u32 queries[kMost];  // bits of those that chose it
  float share[kMost][kMostQueries];

  // A query's choice, by a warp. All warps meet between this and `number`.
  template <class L>
  __device__ __forceinline__ void note(const ExpertChoice<L>& choice, u32 query, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < ExpertChoice<L>::kEach; ++i) {
      const u32 word = __ballot_sync(~0u, choice.chosen >> i & 1);
      if (lane == 0) chosen[query][i] = word;
    }
  }
  // Slots are numbered, and shares go to those of the query. By the same warp; the first says what all need. Where shares were
  // not known yet they may follow alone.
  template <class L, bool kSharesAlone = false>
  __device__ __forceinline__ void number(const ExpertChoice<L>& choice, u32 query, u32 num_queries, u32 lane) {
    u32 slot = 0;
#pragma unroll
    for (u32 i = 0; i < ExpertChoice<L>::kEach; ++i) {
      u32 any = 0, who = 0;
#pragma unroll 1
      for (u32 q = 0; q < num_queries; ++q) {
        any |= chosen[q][i];
        who |= (chosen[q][i] >> lane & 1) << q;
      }
      const u32 own = slot + __popc(any & ((1u << lane) - 1));
      if (choice.chosen >> i & 1) share[own][query] = choice.share[i];
      if (!kSharesAlone && query == 0 && who) {
        expert[own] = 32 * i + lane;
        queries[own] = who;
      }
      slot += __popc(any);
    }
    if (!kSharesAlone && query == 0 && lane == 0) count = slot;
  }
  // The choice of a round's only query; its shares follow.
  template <class L>
  __device__ __forceinline__ void fill(const ExpertChoice<L>& choice, u32 lane) {
    u32 slot = 0;
#pragma unroll
    for (u32 i = 0; i < ExpertChoice<L>::kEach; ++i) {
      const bool is_chosen = choice.chosen >> i & 1;
      const u32 word = __ballot_sync(~0u, is_chosen);
      if (lane == 0) chosen[0][i] = word;
      if (is_chosen) {
        const u32 own = slot + __popc(word & ((1u << lane) - 1));
        expert[own] = 32 * i + lane;
        queries[own] = 1;
      }
      slot += __popc(word);
    }
    if (lane == 0) count = slot;
  }
  template <class L>
  __device__ __forceinline__ void fill_shares(const ExpertChoice<L>& choice, u32 lane) {
    u32 slot = 0;
#pragma unroll
    for (u32 i = 0; i < ExpertChoice<L>::kEach; ++i) {
      const bool is_chosen = choice.chosen >> i & 1;
      const u32 word = __ballot_sync(~0u, is_chosen);
      if (is_chosen) share[slot + __popc(word & ((1u << lane) - 1))][0] = choice.share[i];
      slot += __popc(word);
    }
  }
};

template <class M>
__device__ __forceinline__ ExpertSlots<M>& expert_slots(u8* shared) {
  static_assert(sizeof(ExpertSlots<M>) <= M::kShChoiceBytes, "shared memory of the plan");
  return *reinterpret_cast<ExpertSlots<M>*>(shared + M::kShChoice);
}

// Barriers of a layer's choice.
struct ChoiceBarriers {
  u32 chosen;  // consumers -> producer: which experts
  u32 parity;  // of that

  // Who weighs experts -> consumers: shares are there. In layers where that is apart. No phase passes a consumer by: all meet in each
  // of these layers, before the next phase may begin.
  __device__ __forceinline__ u32 weighed() const { return chosen + 8; }
};

// Where a round's only query chooses by logits whose norm follows, shares are found by the warp that cleans, while others multiply by
// gate_up.
template <class M>
inline constexpr bool kHasWeigher = kMostQueries == 1 && M::kMostSlots > 0 && M::kFeedsRouters;
template <class L>
constexpr bool weighs_apart() {
  if constexpr (kHasWeigher<typename L::M> && L::kExperts > 0) return L::kRoutesEarly && ExpertChoice<L>::kByLogits;
  else return false;
}
template <class L>
inline constexpr bool kWeighsApart = weighs_apart<L>();
