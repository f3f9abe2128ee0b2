// A guess of the experts that a layer's only query will choose, from the stream before attention.
#pragma once
#include "tile/slots.cuh"

// What the router gives of that stream, from all blocks.
template <class M>
__device__ __forceinline__ float* guessed_logits(const Params& params, u32 epoch) {
  return reinterpret_cast<float*>(exchange_copy<M>(params, M::kWsGuessedLogits, M::kWsGuessedLogitsBytes, epoch));
}

// The guess, which is the same in all blocks. In shared memory; the producer writes it.
template <class M>
struct ExpertGuess {
  u32 issued;  // slots of the ring that tiles of the guess came to before the choice was known
  u32 wrong;   // bits of places whose expert was not chosen
  u32 guessed[(M::kMostExperts + 31) / 32];  // bit b of word w: expert 32 w + b
  u32 expert[M::kMostSlots];  // of each place, the likeliest first; of wrong ones then an expert that the guess missed
};
// `shared`: what lies behind the ring.
template <class M>
__device__ __forceinline__ ExpertGuess<M>& expert_guess(u8* shared) {
  return *reinterpret_cast<ExpertGuess<M>*>(shared + M::kShGuess);
}

// Barriers of a layer's choice.
struct ChoiceBarriers {
  u32 chosen;  // consumers -> producer: which experts
  u32 parity;  // of the first two

  // Producer -> consumers: what there is in each place of the guess, and what came of it.
  __device__ __forceinline__ u32 corrected() const { return chosen + 8; }
  // Consumers -> who makes the guess, and the producer: the stream before attention has come, so all blocks are done with the layer
  // before. In layers with a guess; neither is a layer behind, since the consumers wait for both.
  __device__ __forceinline__ u32 begun() const { return chosen + 16; }
  // Who weighs experts -> consumers: shares are there. In layers where that is apart. No phase passes a consumer by: all meet in each
  // of these layers, before the next phase may begin.
  __device__ __forceinline__ u32 weighed() const { return chosen + 24; }
};

// Tiles of gate_up that a block multiplies in a layer of kind `L`: experts take turns, so that each block has as many wrong ones as
// any other. It begins with the likeliest.
template <class L>
struct GuessedTiles {
  using GateUp = typename L::GateUp;
  static constexpr u32 kMost = (L::kChosen * GateUp::kUnits + L::M::kLaneBlocks - 1) / L::M::kLaneBlocks;
  static constexpr u32 kSlotBytes = 2 * GateUp::kHalfTileBytes * GateUp::kSlotTiles;
  static constexpr u32 kTileSlots = (L::kTileBytes + kSlotBytes - 1) / kSlotBytes;  // of the ring
  u32 first, count, start;

  __device__ __forceinline__ explicit GuessedTiles(u32 block) : first(L::first_tile(block, L::kChosen)) {
    count = L::first_tile(block + 1, L::kChosen) - first;
    const u32 to_best = (L::kChosen - first % L::kChosen) % L::kChosen;
    start = to_best < count ? to_best : 0;
  }
  // The i-th: its place in the guess, and which tile of the expert it is.
  __device__ __forceinline__ u32 at(u32 i) const { return first + (start + i < count ? start + i : start + i - count); }
  __device__ __forceinline__ u32 place(u32 i) const { return at(i) % L::kChosen; }
  __device__ __forceinline__ u32 unit(u32 i) const { return at(i) / L::kChosen; }
};
