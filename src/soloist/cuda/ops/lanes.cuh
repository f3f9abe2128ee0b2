// Lanes: residual streams side by side that hear each other late (delayed tensor parallelism).
//
// A block of every lane owns the same rows. What its lane adds to them it tells to all ranks, once for all lanes there; the
// blocks of the same rows hear it kDelayLayers later, long after it has come. A word is a value and the turn that it is
// of, so nobody has to make it absent. Rules as in `Module` of lanes.py, turns as in `lane_turns` of plan.py.
#pragma once
#include "tile/reduce.cuh"

template <class Stream>
__device__ __forceinline__ bool sums(u32 layer) {
  using M = typename Stream::M;
  return M::kEarlySum && layer < M::kDelayLayers;
}
template <class Stream>
__device__ __forceinline__ bool hears(u32 layer) {
  return Stream::kTalks && layer >= Stream::M::kDelayLayers;
}
// What is not told already for the sum.
template <class Stream>
__device__ __forceinline__ bool tells_later(u32 layer) {
  using M = typename Stream::M;
  return Stream::kTalks && layer + M::kDelayLayers < M::kLayers && !sums<Stream>(layer);
}

// [turn][lane][column][row]; the words of a row of all lanes are kLaneWords apart.
template <class M>
inline constexpr u32 kLaneWords = kMaxColumns * M::kHidden;
template <class M>
__device__ __forceinline__ u64* told_at(u8* workspace, u32 offset, u32 turn, u32 column, u32 row) {
  return reinterpret_cast<u64*>(workspace + offset) + turn * (M::kLanes * kLaneWords<M>) + column * M::kHidden + row;
}
template <class Stream>
__device__ __forceinline__ u64* told(u8* workspace, u32 epoch, u32 column, u32 row) {
  using M = typename Stream::M;
  return told_at<M>(workspace, Stream::kTold, epoch % M::kLaneTurns, column, row);
}

// A row of this warp's column to all ranks.
template <class M>
__device__ __forceinline__ void tell(const Context<M>& cx, u32 offset, u32 turn, u32 epoch, u32 row, bool valid, float x) {
  const bool silent = kSilentBlock != kNoBlock && blockIdx.x == kSilentBlock;
  const u64 word = static_cast<u64>(epoch) << 32 | __float_as_uint(x);
  if (!valid || silent) return;
#pragma unroll
  for (u32 r = 0; r < kPeers; ++r)
    store_to_peer(
        told_at<M>(cx.params.peers[r], offset, turn, cx.warp, row) + told_by_lane<M>(cx.params, r) * kLaneWords<M>, word);
}
template <class Stream, class M>
__device__ __forceinline__ void tell(const Context<M>& cx, u32 epoch, u32 row, bool valid, float x) {
  tell(cx, Stream::kTold, epoch % M::kLaneTurns, epoch, row, valid, x);
}

// The sum over lanes in their order, without one of them. Executed by whole warps; waits until all have told it.
template <class M>
__device__ __forceinline__ float heard(const u64* words, u32 epoch, bool valid, u32 without) {
  u64 word[M::kLanes];
#pragma unroll 1
  for (;;) {
    bool ready = true;
#pragma unroll
    for (u32 l = 0; l < M::kLanes; ++l) word[l] = valid ? load_from_peers(words + l * kLaneWords<M>) : 0;
#pragma unroll
    for (u32 l = 0; l < M::kLanes; ++l)
      ready = ready && (!valid || kAblation == kNoWaits || static_cast<u32>(word[l] >> 32) == epoch);
    if (__all_sync(~0u, ready)) break;
  }
  float sum = 0.0f;
#pragma unroll
  for (u32 l = 0; l < M::kLanes; ++l) sum += l == without ? 0.0f : __uint_as_float(static_cast<u32>(word[l]));
  return sum;
}
constexpr u32 kNoLane = ~0u;

// What a row of this warp's column gains in a layer, beside what it heard before.
template <class Stream, class M>
__device__ __forceinline__ float joined(const Context<M>& cx, u32 layer, u32 row, bool valid, float x) {
  if (sums<Stream>(layer)) {
    tell<Stream>(cx, cx.layers_done, row, valid, x);
    return heard<M>(told<Stream>(cx.params.workspace, cx.layers_done, cx.warp, row), cx.layers_done, valid, kNoLane);
  }
  return hears<Stream>(layer) ? x : x * M::kAloneScale;
}

// Other lanes' parts of a layer's sum join the residual before the layer's own: they were told kDelayLayers ago. Called
// with the last sum just published, so that the trip to the L2 passes while other blocks' rows are waited for.
template <class Stream, class M>
__device__ __forceinline__ void listen(const Context<M>& cx, u32 layer) {
  if constexpr (M::kHasLanes && Stream::kTalks) {
    if (layer < M::kDelayLayers || layer >= M::kLayers) return;
    using Rows = typename M::Residual;
    constexpr u32 kEach = (Rows::kMaxUnits * 8 + 31) / 32;
    const u32 rows = Rows::num_units(cx.block) * 8, first = Rows::first_unit(cx.block) * 8;
    // The next layer has its number from qkv on.
    const u32 epoch = cx.layers_done + (Stream::kOperand == M::kWsHiddenMid) - M::kDelayLayers;
    if (kEach > 1) cx.sync();  // rows go to all warps, and others have just been writing the residual
#pragma unroll 1
    for (u32 job = cx.warp; job < cx.columns * kEach; job += kConsumerWarps) {
      const u32 column = kEach > 1 ? job % cx.columns : job, r = (kEach > 1 ? job / cx.columns * 32 : 0) + cx.lane;
      const u64* words = told<Stream>(cx.params.workspace, epoch, column, first + r);
      const float others = heard<M>(words, epoch, r < rows, own_lane<M>(cx.params));
      if (r < rows) cx.shared.residual()[column * (Rows::kMaxUnits * 8) + r] += others;
    }
  }
}
