// Experts that stream before they are chosen: the producer guesses them, and brings what it guessed wrong once more.
//
// What the router gives of the stream before attention is there while blocks wait for attention, and guesses most of what it will
// choose after it. So a block's tiles of gate_up come to the ring, of guessed experts, as far as that has room. Once the choice is
// known, experts that the guess missed take the places of those that were not chosen: their tiles follow those of the guess, of which
// the consumers give back the wrong ones unread. Neurons are summed alone, so no bit depends on the guess.
#pragma once
#include "ops/producer.cuh"
#include "tile/guess.cuh"
#include "tile/logits.cuh"

// By a warp, once the logits of all blocks have come. Returns the lane's expert, of those that have a place.
template <class L, class M>
__device__ __forceinline__ u32 guess_experts(const Params& params, ExpertGuess<M>& guess, u32 epoch, u32 lane) {
  constexpr u32 kEach = ExpertChoice<L>::kEach;
  const float* logits = guessed_logits<M>(params, epoch);
  float logit[kEach];
#pragma unroll 1
  while (!load_logits<L, 1>(logits, lane, logit)) {}
  const ExpertChoice<L> choice(logit, lane, [&](u32 place, u32 expert) { guess.expert[place] = expert; });
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) {
    const u32 word = __ballot_sync(~0u, choice.chosen >> i & 1);
    if (lane == 0) guess.guessed[i] = word;
  }
  __syncwarp();
  return lane < L::kChosen ? guess.expert[lane] : 0;
}

// By one lane, once the choice is known.
template <class M>
__device__ __forceinline__ void correct_guess(const ExpertSlots<M>& slots, ExpertGuess<M>& guess, u32 wrong, u32 issued) {
  u32 word = 0, missed = slots.chosen[0][0] & ~guess.guessed[0];
#pragma unroll 1
  for (u32 left = wrong; left; left &= left - 1) {
    while (!missed) ++word, missed = slots.chosen[0][word] & ~guess.guessed[word];
    guess.expert[__ffs(left) - 1] = 32 * word + __ffs(missed) - 1;
    missed &= missed - 1;
  }
  guess.issued = issued;
  guess.wrong = wrong;
}

// A block's tiles of gate_up in a layer of kind `L`.
template <class L, class M>
__device__ __forceinline__ void stream_guessed_tiles(Producer<M>& p, const ExpertSlots<M>& slots, ExpertGuess<M>& guess,
                                                     const ChoiceBarriers& barriers, u32 layer, u32 epoch) {
  using Tiles = GuessedTiles<L>;
  const Tiles tiles(lane_block<M>());
  const u8* experts = p.params.experts + L::experts(layer);
  const auto copy = [&](u32 i, u32 part) {
    const u8* tile = experts + static_cast<u64>(guess.expert[tiles.place(i)]) * L::kExpertBytes + tiles.unit(i) * L::kTileBytes;
    const u32 at = part * Tiles::kSlotBytes;
    p.template copy<false>(tile + at, min(Tiles::kSlotBytes, static_cast<u32>(L::kTileBytes) - at));
  };
  const u32 expert = guess_experts<L>(p.params, guess, epoch, p.lane);
  const u32 most = min(tiles.count * Tiles::kTileSlots, M::kGuessSlots);
  u32 issued = 0;
  if (p.lane == 0 && kAblation < kNoStream)
    for (; issued < most && p.has_room_before(barriers.chosen, barriers.parity); ++issued)
      copy(issued / Tiles::kTileSlots, issued % Tiles::kTileSlots);
  __syncwarp();
  mbarrier_wait(barriers.chosen, barriers.parity);
  const u32 wrong = __ballot_sync(~0u, p.lane < L::kChosen && !(slots.chosen[0][expert / 32] >> expert % 32 & 1));
  if (p.lane == 0) {
    correct_guess(slots, guess, wrong, issued);
    mbarrier_arrive(barriers.corrected());
    const auto is_wrong = [&](u32 i) { return wrong >> tiles.place(i) & 1; };
    const u32 begun = (issued + Tiles::kTileSlots - 1) / Tiles::kTileSlots;
    if (const u32 parts = issued % Tiles::kTileSlots; parts && !is_wrong(begun - 1))
      for (u32 part = parts; part < Tiles::kTileSlots; ++part) copy(begun - 1, part);
    for (u32 i = 0; i < tiles.count; ++i)
      if (i >= begun || is_wrong(i))
        for (u32 part = 0; part < Tiles::kTileSlots; ++part) copy(i, part);
  }
  __syncwarp();
}

// The same of any layer; whether its experts are guessed. `shared`: what lies behind the ring. `guesses`: layers with one so far.
template <class M>
__device__ __forceinline__ bool stream_guessed(Producer<M>& p, u8* shared, const ExpertSlots<M>& slots, const ChoiceBarriers& barriers,
                                               u32 layer, u32 epoch, u32& guesses) {
  bool is_guessed = false;
  M::of_layer(layer, [&](auto kind) {
    using L = decltype(kind);
    if constexpr (L::kGuesses) {
      // The ring may be ahead of the consumers, even of a layer without experts, so that what it finds could be left from layers before:
      // and the guess has to be the same in all blocks.
      mbarrier_wait(barriers.begun(), guesses++ & 1);
      stream_guessed_tiles<L>(p, slots, expert_guess<M>(shared), barriers, layer, epoch);
      is_guessed = true;
    }
  });
  return is_guessed;
}
