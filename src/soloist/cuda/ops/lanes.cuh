// Lanes: residual streams side by side that receive each other's results late (delayed tensor parallelism).
//
// A block of every lane owns the same rows. What its lane adds to them, its partial results, it publishes to all
// ranks, once for all lanes there. The blocks of the same rows read them kDelayLayers later, long after they have come. A
// word is a value and its epoch, so that no copy needs sentinels. Rules as in `Module` of lanes.py, copies as in
// `lane_copies` of shape.py.
#pragma once
#include "tile/reduce.cuh"

template <class Stream>
__device__ __forceinline__ bool sums(u32 layer) {
  using M = typename Stream::M;
  return M::kEarlySum && layer < M::kDelayLayers;
}
template <class Stream>
__device__ __forceinline__ bool receives(u32 layer) {
  return Stream::kCommunicates && layer >= Stream::M::kDelayLayers;
}
// Partial results that were not published already for the sum.
template <class Stream>
__device__ __forceinline__ bool publishes_later(u32 layer) {
  using M = typename Stream::M;
  return Stream::kCommunicates && layer + M::kDelayLayers < M::kLayers && !sums<Stream>(layer);
}

// [copy][lane][query][row]; the words of a row of all lanes are kLaneWords apart.
template <class M>
inline constexpr u32 kLaneWords = kMaxQueries * M::kHidden;
template <class M>
__device__ __forceinline__ u64* published_at(u8* workspace, u32 offset, u32 copy, u32 query, u32 row) {
  return reinterpret_cast<u64*>(workspace + offset) + copy * (M::kLanes * kLaneWords<M>) + query * M::kHidden + row;
}
template <class Stream>
__device__ __forceinline__ u64* published(u8* workspace, u32 epoch, u32 query, u32 row) {
  using M = typename Stream::M;
  return published_at<M>(workspace, Stream::kPublished, epoch % M::kLaneCopies, query, row);
}

// A row of this warp's query to all ranks.
template <class M>
__device__ __forceinline__ void publish(const Context<M>& cx, u32 offset, u32 copy, u32 epoch, u32 row, bool valid, float x) {
  const bool silent = kSilentBlock != kNoBlock && blockIdx.x == kSilentBlock;
  const u64 word = static_cast<u64>(epoch) << 32 | __float_as_uint(x);
  if (!valid || silent) return;
#pragma unroll
  for (u32 r = 0; r < kPeers; ++r)
    store_to_peer(
        published_at<M>(cx.params.peers[r], offset, copy, cx.warp, row) + sender_lane<M>(cx.params, r) * kLaneWords<M>, word);
}
template <class Stream, class M>
__device__ __forceinline__ void publish(const Context<M>& cx, u32 epoch, u32 row, bool valid, float x) {
  publish(cx, Stream::kPublished, epoch % M::kLaneCopies, epoch, row, valid, x);
}

// The sum over lanes in their order, without one of them. Executed by whole warps; waits until all lanes have published.
template <class M>
__device__ __forceinline__ float received(const u64* words, u32 epoch, bool valid, u32 without) {
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

// What a row of this warp's query gains in a layer, beside what it received before.
template <class Stream, class M>
__device__ __forceinline__ float joined(const Context<M>& cx, u32 layer, u32 row, bool valid, float x) {
  if (sums<Stream>(layer)) {
    publish<Stream>(cx, cx.layers_done, row, valid, x);
    return received<M>(published<Stream>(cx.params.workspace, cx.layers_done, cx.warp, row), cx.layers_done, valid, kNoLane);
  }
  return receives<Stream>(layer) ? x : x * M::kAloneScale;
}

// Other lanes' parts of a layer's sum join the residual before the layer's own: they were published kDelayLayers ago. Called
// with the last sum just published, so that the trip to the L2 passes while other blocks' rows are waited for.
template <class Stream, class M>
__device__ __forceinline__ void listen(const Context<M>& cx, u32 layer) {
  if constexpr (M::kHasLanes && Stream::kCommunicates) {
    if (layer < M::kDelayLayers || layer >= M::kLayers) return;
    using Rows = typename M::Residual;
    constexpr u32 kEach = (Rows::kMaxUnits * 8 + 31) / 32;
    const u32 rows = Rows::num_units(cx.block) * 8, first = Rows::first_unit(cx.block) * 8;
    // The next layer has its number from qkv on.
    const u32 epoch = cx.layers_done + (Stream::kOperand == M::kWsHiddenMid) - M::kDelayLayers;
    if (kEach > 1) cx.sync();  // rows go to all warps, and others have just been writing the residual
#pragma unroll 1
    for (u32 job = cx.warp; job < cx.queries * kEach; job += kConsumerWarps) {
      const u32 query = kEach > 1 ? job % cx.queries : job, r = (kEach > 1 ? job / cx.queries * 32 : 0) + cx.lane;
      const u64* words = published<Stream>(cx.params.workspace, epoch, query, first + r);
      const float others = received<M>(words, epoch, r < rows, own_lane<M>(cx.params));
      if (r < rows) cx.shared.residual()[query * (Rows::kMaxUnits * 8) + r] += others;
    }
  }
}
