// Logits of experts, which come from all blocks.
#pragma once
#include "tile/context.cuh"
#include "tile/expert_choice.cuh"

// Logits beside attention_output are sums over ranks, each of which has a part of what attention gives. Readers add up the parts.
template <class L>
constexpr u32 logit_parts() {
  if constexpr (L::kExperts > 0 && L::kRoutesEarly) return L::M::kRanks;
  else return 1;
}
template <class L>
inline constexpr u32 kLogitParts = logit_parts<L>();

// Of a rank's part: [query][expert].
template <class M>
__device__ __forceinline__ float* expert_logits(u8* workspace, u32 epoch, u32 rank, u32 query) {
  u8* now = workspace + M::kWsExpertLogits + epoch % kExchangeCopies * (M::kWsExpertLogitsBytes / kExchangeCopies);
  return reinterpret_cast<float*>(now) + (rank * kMaxQueries + query) * M::kMostLogits;
}

// A logit of so many parts, in the order of the ranks, which is the same in all of them; no number that is present before all have come.
template <u32 kParts, class M>
__device__ __forceinline__ float load_logit(const float* at) {
  if constexpr (kParts == 1) {
    return load_exchanged(at);
  } else {
    float part[kParts];
    bool ready = true;
#pragma unroll
    for (u32 r = 0; r < kParts; ++r) part[r] = load_from_peers(at + r * (kMaxQueries * M::kMostLogits));
#pragma unroll
    for (u32 r = 0; r < kParts; ++r) ready = ready && is_present(part[r]);
    float sum = part[0];
#pragma unroll
    for (u32 r = 1; r < kParts; ++r) sum += part[r];
    return ready ? __uint_as_float(present(sum)) : __uint_as_float(kSentinel);
  }
}

// Logits of the lane's experts as they lie there; whether those of all lanes have come.
template <class L, u32 kParts>
__device__ __forceinline__ bool load_logits(const float* logits, u32 lane, float (&logit)[ExpertChoice<L>::kEach]) {
  constexpr u32 kEach = ExpertChoice<L>::kEach;
  bool ready = true;
#pragma unroll
  for (u32 i = 0; i < kEach; ++i)
    logit[i] = 32 * i + lane < L::kExperts ? load_logit<kParts, typename L::M>(logits + 32 * i + lane) : 0.0f;
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) ready = ready && is_present(logit[i]);
  return __all_sync(~0u, ready);
}
