// What builds that sample keep in shared memory from round to round, and the part of a choice that the head may begin.
#pragma once
#include "ops/sample.cuh"

// A proposal in as many words as there are left.
struct StoredProposal {
  u32 choice_low, choice_high, other;

  __device__ __forceinline__ SampleProposal get() const { return {static_cast<u64>(choice_high) << 32 | choice_low, other}; }
};

struct SampleState {
  SampleParams params[kMaxQueries];
  SampleStep steps[kMaxQueries];
  SampleArgs args;
  SampleEpochs epochs;
  u32 arrivals;  // that the last barrier waited for
  u32 masked;    // queries whose tokens the host may forbid, a bit each
  StoredProposal begun;  // see `BegunChoice`
};

template <class M>
__device__ __forceinline__ u8* shared_part(u32 offset) {
  return dynamic + M::kRingBytes + offset;
}
template <class M>
__device__ __forceinline__ SampleState& sample_state() { return *reinterpret_cast<SampleState*>(shared_part<M>(M::kShSampling)); }

// The first pass of the choice for a round's only query about which noise alone decides, by the warp that serves it and while the
// head streams: what is left then is one proposal of the block. Outside of `choose_sampled`, whose code is not at hand in time.
template <class M>
class BegunChoice {
 public:
  // By a warp, after the last round's choice was settled.
  __device__ __forceinline__ BegunChoice()
      : begins(!sample_state<M>().masked && is_plain(sample_state<M>().params[0], sample_state<M>().steps[0])),
        noise(sample_state<M>().params[0], sample_state<M>().steps[0]), temperature(sample_state<M>().params[0].temperature) {}

  // Logits of four neighbours from `id` on, a multiple of 4, of which the first `count` are tokens.
  __device__ __forceinline__ void add(u32 id, u32 count, const float (&logits)[4]) {
    if (!begins) return;
    const exact::Words words = noise.words(id / 4);
#pragma unroll
    for (u32 k = 0; k < 4; ++k)
      best.add(id + k, k < count ? scaled(logits[k], temperature) : __uint_as_float(0xFF800000u), Noise::word(words, k));
  }
  // By all lanes of the warp; other warps see it after the next barrier.
  __device__ __forceinline__ void finish(u32 lane) const {
    SampleState& state = sample_state<M>();
    const SampleProposal own = begins ? best.proposal() : SampleProposal{};
    const u32 high = static_cast<u32>(own.choice >> 32), most = __reduce_max_sync(~0u, high);
    const u32 low = __reduce_max_sync(~0u, high == most ? static_cast<u32>(own.choice) : 0), other = __reduce_max_sync(~0u, own.other);
    if (lane > 0) return;
    state.begun = {low, most, other};
  }

 private:
  const bool begins;
  const Noise noise;
  const float temperature;
  HighestBound best;
};
