// Logits of experts, which come from all blocks.
#pragma once
#include "tile/context.cuh"
#include "tile/expert_choice.cuh"

// Logits of the lane's experts as they lie there; whether those of all lanes have come.
template <class L>
__device__ __forceinline__ bool load_logits(const float* logits, u32 lane, float (&logit)[ExpertChoice<L>::kEach]) {
  constexpr u32 kEach = ExpertChoice<L>::kEach;
  bool ready = true;
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) logit[i] = 32 * i + lane < L::kExperts ? load_exchanged(logits + 32 * i + lane) : 0.0f;
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) ready = ready && is_present(logit[i]);
  return __all_sync(~0u, ready);
}
