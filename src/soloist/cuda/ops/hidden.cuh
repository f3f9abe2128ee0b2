// The residual stream. Its rows live with the blocks that own them (fp32, shared memory); what travels
// is x · norm weight in 16 bits, scaled by the last known 1 / rms so that fp16 keeps its range, and each
// block's sum of squares beside that scale. Readers multiply their results by the true 1 / rms over the assumed one.
#pragma once
#include "ops/lanes.cuh"

template <class Of>
struct InStream {  // what qkv reads, and the head of one stream
  using M = Of;
  static constexpr u32 kOperand = M::kWsHiddenIn, kBytes = M::kWsHiddenInBytes;
  static constexpr u32 kSquares = M::kWsSquaresIn, kSquaresBytes = M::kWsSquaresInBytes;
  static constexpr u32 kSums = M::kWsSumsIn, kSumsBytes = M::kWsSumsInBytes;
  static constexpr u32 kPublished = M::kWsPublishedIn;
  static constexpr bool kCommunicates = M::kMlpCommunicates;  // MLPs add to it
  static constexpr bool kFeedsRouters = M::kFeedsRouters;
};
// The same rows times the weights of the norm before the MLP: what routers read while attention is on its way.
template <class Of>
struct RouterStream {
  using M = Of;
  static constexpr u32 kOperand = M::kWsHiddenRouter, kBytes = M::kWsHiddenRouterBytes;
};
template <class Of>
struct MidStream {  // what gate_up reads
  using M = Of;
  static constexpr u32 kOperand = M::kWsHiddenMid, kBytes = M::kWsHiddenMidBytes;
  static constexpr u32 kSquares = M::kWsSquaresMid, kSquaresBytes = M::kWsSquaresMidBytes;
  static constexpr u32 kSums = M::kWsSumsMid, kSumsBytes = M::kWsSumsMidBytes;
  static constexpr u32 kPublished = M::kWsPublishedMid;
  static constexpr bool kCommunicates = M::kAttentionCommunicates;
  static constexpr bool kFeedsRouters = false;
};
template <class Of>
struct OutStream {  // what the head reads where lanes become one
  using M = Of;
  static constexpr u32 kOperand = M::kWsHiddenOut, kBytes = M::kWsHiddenOutBytes;
  static constexpr u32 kSquares = M::kWsSquaresOut, kSquaresBytes = M::kWsSquaresOutBytes;
};

template <class Stream, class M>
__device__ __forceinline__ u8* stream_operand(const Context<M>& cx, u32 epoch) {
  return exchange_copy<M>(cx.params, Stream::kOperand, Stream::kBytes, epoch);
}
// [query][block]: the block's sum of squares, and the scale its rows were published with.
template <class Stream>
__device__ __forceinline__ float2* stream_squares(const Params& params, u32 epoch, u32 query) {
  using M = typename Stream::M;
  return reinterpret_cast<float2*>(exchange_copy<M>(params, Stream::kSquares, Stream::kSquaresBytes, epoch)) + query * M::kLaneBlocks;
}

template <class Stream, class M>
__device__ __forceinline__ void publish_squares(const Context<M>& cx, u32 epoch, float squares) {
  squares = warp_sum(squares);
  // Attention blocks read no other buffer that says so: who has read these of all blocks may look for the next layer's.
  if constexpr (kAttentionBlocks > 0 && Stream::kOperand == M::kWsHiddenIn) cx.wait_for_cleaner(cx.layers_done + cx.round);
  if (cx.lane == 0)
    store_exchanged(stream_squares<Stream>(cx.params, epoch, cx.warp) + cx.block, present(squares), present(cx.scale));
}

// Sums of squares of a query's rows, of all blocks, and what follows from them.
template <class Stream>
struct Squares {
  using M = typename Stream::M;
  static constexpr u32 kEach = (M::kLaneBlocks + 31) / 32;
  float2 part[kEach] = {};  // or it would stay alive over the whole round where a warp loads nothing

  __device__ __forceinline__ void load(const float2* squares, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 b = lane + 32 * i;
      part[i] = make_float2(0.0f, 0.0f);
      if (b < M::kLaneBlocks) part[i] = load_exchanged2(&squares[b].x);
    }
  }
  __device__ __forceinline__ bool have_come() const {
    bool ready = true;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) ready = ready && is_present(part[i]);
    return __all_sync(~0u, ready);
  }
  // That the rows were published with: the same in all blocks.
  __device__ __forceinline__ float assumed_scale() const { return __shfl_sync(~0u, part[0].y, 0); }
  __device__ __forceinline__ float scale() const {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) sum += part[i].x;
    return rsqrtf(warp_sum(sum) * (1.0f / M::kHidden) + M::kEpsilon);
  }
};

// The factor that turns a product with published activations into one with normalised ones, for warps
// below the number of queries. Asked for before the multiply, taken after it.
template <class Stream>
struct Scale {
  using M = typename Stream::M;
  Squares<Stream> squares;

  __device__ __forceinline__ void load(const Context<M>& cx, u32 epoch) {
    if (cx.warp < cx.queries) squares.load(stream_squares<Stream>(cx.params, epoch, cx.warp), cx.lane);
  }
  // Also remembers the new scale.
  __device__ __forceinline__ float take(Context<M>& cx, u32 epoch) {
    if (cx.warp >= cx.queries) return 0.0f;
    while (!squares.have_come()) load(cx, epoch);
    const float assumed = squares.assumed_scale();
    cx.scale = squares.scale();
    return __fdividef(cx.scale, assumed);
  }
  // The same for other warps, which know it after the next barrier.
  __device__ __forceinline__ void settle(Context<M>& cx, u32 epoch) {
    const float factor = take(cx, epoch);
    if (cx.warp < cx.queries && cx.lane == 0) cx.shared.control().factor[cx.warp] = factor;
  }
};

// Whether the cleaner finds a round's only query's factor before gate_up while consumers multiply, where weights are integers, on one GPU.
// The racecheck tool does not see how consumers wait for it.
template <class GateUp, class M>
inline constexpr bool kFindsFactorApart = kMostQueries == 1 && kPeers == 1 && !M::kHasLanes && M::kMostSlots == 0 && kMovesRegisters &&
                                          !kRacecheck && kArithmetic<GateUp> == Arithmetic::kIntegers;
// From the cleaner to the consumers: the new scale, and whether it and the factor are those of this layer.
struct FoundFactor {
  static __device__ __forceinline__ u32 place() {
    __shared__ uint2 found;
    return shared_address(&found);
  }
  // By one thread, before consumers meet in the phase before gate_up.
  static __device__ __forceinline__ void forget() { store_shared2(place(), 0, 0); }
  template <class M>
  static __device__ __forceinline__ void find(const Params& params, Control* control, u32 epoch, u32 lane) {
    const float2* own = stream_squares<MidStream<M>>(params, epoch, 0);
    Squares<MidStream<M>> squares;
    do squares.load(own, lane);
    while (!squares.have_come());
    const float assumed = squares.assumed_scale(), scale = squares.scale();
    if (lane > 0) return;
    control->factor[0] = __fdividef(scale, assumed);
    __threadfence_block();
    store_shared2(place(), __float_as_uint(scale), 1);
  }
  // Also remembers the new scale.
  template <class M>
  static __device__ __forceinline__ void wait(Context<M>& cx) {
    uint2 found;
    // All lanes go on together, or a multiply later on is an illegal instruction.
    do found = look_at_shared2(place());
    while (!__all_sync(~0u, found.y != 0));
    cx.scale = __uint_as_float(found.x);
  }
};

// Where the embedding of a token has row k: in the table, or in the packed tied head.
template <class M>
__device__ __forceinline__ float embedding_value(const Params& p, u32 token, u32 k) {
  if constexpr (!M::kTiedHead) {
    return from_half(__ldg(p.embedding + static_cast<u64>(token) * M::kHidden + k));
  } else {
    using Head = typename M::Head;
    const u32 unit = token / kHalfTileRows, owner = Head::owner(unit);
    const u32 begin = Head::first_unit(owner), units = Head::num_units(owner), local = unit - begin;
    // The head is packed in groups of tiles, each group by steps.
    const u32 group = local / (2 * Head::kTiles), in_group = local % (2 * Head::kTiles);
    const u32 group_units = min(2 * Head::kTiles, units - group * 2 * Head::kTiles);
    const u32 step = k / kStepColumns, tile = in_group / 2;
    const u32 base = (group * 2 * Head::kTiles * Head::kSteps + step * group_units) * kHalfTileValues;
    const u32 row = token % kHalfTileRows;
    const u32 full = tile_place(in_group % 2, row, k), odd = half_tile_place(row, k);
    const u32 value = tile * 2 * kHalfTileValues + ((tile + 1) * 2 <= group_units ? full : odd);  // within the step of the group
    return from_half(__ldg(reinterpret_cast<const u16*>(weights_of<M, Head>(p.image, owner, 0)) + base + value));
  }
}

// The block's rows once more, for a layer's router. After all that others wait for.
template <class M>
__device__ __forceinline__ void feed_router(const Context<M>& cx, u32 layer, u32 epoch) {
  if (cx.warp >= cx.queries) return;
  using Rows = typename M::Residual;
  const u32 first = Rows::first_unit(cx.block) * 8, rows = Rows::num_units(cx.block) * 8;
  const float* norm = cx.vectors(M::mlp_norm(layer));
  const float* residual = cx.shared.residual() + cx.warp * (Rows::kMaxUnits * 8);
  u8* now = stream_operand<RouterStream<M>>(cx, epoch);
#pragma unroll 1
  for (u32 r = cx.lane; r - cx.lane < rows; r += 32) {
    const bool valid = r < rows;
    const float x = valid ? residual[r] * __ldg(norm + first + r) : 0.0f;
    publish_pair(now, cx.warp, first + r, cx.lane, valid, x * cx.scale);
  }
}

// Rows of the embedding enter the residual. Warp c serves query c.
template <class M>
__device__ __forceinline__ void embed(Context<M>& cx) {
  if (cx.warp >= cx.queries) return;
  cx.scale = cx.params.embedding_scale;
  using Rows = typename M::Residual;
  const u32 first = Rows::first_unit(cx.block) * 8, rows = Rows::num_units(cx.block) * 8;
  if (rows == 0) return;
  const float* norm = cx.vectors(M::attention_norm(0));
  u8* now = stream_operand<InStream<M>>(cx, cx.next_in());
  float* residual = cx.shared.residual() + cx.warp * (Rows::kMaxUnits * 8);
  const u32 token = cx.shared.control().token[cx.warp];
  float squares = 0.0f;
  for (u32 begin = 0; begin < rows; begin += 32) {
    const u32 r = begin + cx.lane;
    const bool valid = r < rows;
    const float x = valid ? embedding_value<M>(cx.params, token, first + r) : 0.0f;
    const float weight = valid ? __ldg(norm + first + r) : 0.0f;
    if (valid) residual[r] = x;
    publish_pair(now, cx.warp, first + r, cx.lane, valid, x * weight * cx.scale);
    squares += x * x;
  }
  publish_squares<InStream<M>>(cx, cx.next_in(), squares);
  if constexpr (M::kFeedsRouters) feed_router(cx, 0, cx.next_in());
}

// Partial sums from every rank: [rank][query][row].
template <class Stream>
__device__ __forceinline__ float* rank_sums(u8* workspace, u32 epoch, u32 rank, u32 query) {
  u8* now = workspace + Stream::kSums + epoch % kExchangeCopies * (Stream::kSumsBytes / kExchangeCopies);
  return reinterpret_cast<float*>(now) + (rank * kMaxQueries + query) * (Stream::M::Residual::kUnits * 8);
}

// Rows of this warp's query, from one of them on for each lane, in all ranks' memory. Worked out while activations are
// waited for: between a product and its sum it would take time that all ranks wait.
template <class Stream>
struct RankRows {
  using M = typename Stream::M;
  float* to[M::kRanks];
  const float* from;  // of the first rank; those of others follow

  __device__ __forceinline__ RankRows(const Context<M>& cx, u32 epoch, u32 row) {
    if constexpr (M::kRanks > 1) {
#pragma unroll
      for (u32 r = 0; r < M::kRanks; ++r) {
        to[r] = rank_sums<Stream>(cx.params.peers[r], epoch, sender_rank(cx.params, r), cx.warp) + row;
        if constexpr (kMostQueries == 1) asm volatile("" : "+l"(to[r]));  // with more there are too few registers
      }
      from = rank_sums<Stream>(cx.params.workspace, epoch, 0, cx.warp) + row;
    }
  }

  // The row that is `ahead` of the first, summed over ranks. Every rank stores its part to all of them, and each adds them
  // in the order of the ranks: so all come to the same bits, and to the same token without asking.
  __device__ __forceinline__ float sum(const Context<M>& cx, u32 ahead, bool valid, float x) const {
    constexpr u32 kRankValues = kMaxQueries * (M::Residual::kUnits * 8);
    const bool silent = kSilentBlock != kNoBlock && cx.block == kSilentBlock;
#pragma unroll
    for (u32 r = 0; r < M::kRanks; ++r)
      if (valid && !silent) store_to_peer(to[r] + ahead, present(x));
    float part[M::kRanks];
#pragma unroll 1
    for (;;) {
      bool ready = true;
#pragma unroll
      for (u32 r = 0; r < M::kRanks; ++r) part[r] = valid ? load_from_peers(from + r * kRankValues + ahead) : 0.0f;
#pragma unroll
      for (u32 r = 0; r < M::kRanks; ++r) ready = ready && is_present(part[r]);
      if (__all_sync(~0u, ready)) break;
    }
    float total = part[0];
#pragma unroll
    for (u32 r = 1; r < M::kRanks; ++r) total += part[r];
    return total;
  }
};

// What add_to_stream needs of a row, asked for before the multiply: it comes from memory.
template <class Op>
struct RowVectors {
  static constexpr u32 kEach = (Op::kMaxUnits * 8 + 31) / 32;
  float norm[kEach], bias[kEach];

  template <class M>
  __device__ __forceinline__ void load(const Context<M>& cx, const float* norms, const float* biases) {
    const u32 rows = Op::num_units(cx.block) * 8, first = Op::first_unit(cx.block) * 8;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 r = cx.lane + 32 * i;
      norm[i] = cx.warp < cx.queries && r < rows ? __ldg(norms + first + r) : 0.0f;
      bias[i] = biases && cx.warp < cx.queries && r < rows ? __ldg(biases + first + r) : 0.0f;
    }
  }
};

// The product of attention_output or down joins the residual, and the sum is published: rows `start` … `end - 1` of this warp's query, of
// which the product has `row(r)`; then all that follows from them.
template <class Stream, class Op, class M>
struct StreamRows {
  Context<M>& cx;
  const RowVectors<Op>& vectors;
  const RankRows<Stream>& ranks;
  u32 epoch, layer, units, first;
  u8* now;
  float* residual;
  float squares = 0.0f;

  __device__ __forceinline__ StreamRows(Context<M>& cx, u32 epoch, const RowVectors<Op>& vectors, const RankRows<Stream>& ranks, u32 layer)
      : cx(cx), vectors(vectors), ranks(ranks), epoch(epoch), layer(layer), units(Op::num_units(cx.block)),
        first(Op::first_unit(cx.block) * 8), now(stream_operand<Stream>(cx, epoch)),
        residual(cx.shared.residual() + cx.warp * (Op::kMaxUnits * 8)) {}

  template <class Row>
  __device__ __forceinline__ void add(u32 start, u32 end, const Row& row) {
#pragma unroll
    for (u32 i = 0; i < RowVectors<Op>::kEach; ++i) {
      const u32 r = cx.lane + 32 * i;
      if (32 * i + 32 <= start || 32 * i >= end) continue;
      const bool valid = r >= start && r < end;
      float x = row(r, valid);
      if constexpr (M::kRanks > 1) x = ranks.sum(cx, 32 * i, valid, x);
      const float partial = x;
      if constexpr (M::kHasLanes) x = joined<Stream>(cx, layer, first + r, valid, x);
      if (valid) residual[r] = x = residual[r] + x + vectors.bias[i];
      publish_pair(now, cx.warp, first + r, cx.lane, valid, x * vectors.norm[i] * cx.scale);
      if constexpr (M::kHasLanes)
        if (publishes_later<Stream>(layer)) publish<Stream>(cx, cx.layers_done, first + r, valid, partial);
      squares += x * x;
    }
  }
  __device__ __forceinline__ void finish() {
    if (units && cx.warp < cx.queries) publish_squares<Stream>(cx, epoch, squares);
    if constexpr (Stream::kFeedsRouters) feed_router(cx, layer + 1, epoch);
  }
};
template <class Stream, class Op, class M>
__device__ __forceinline__ void add_to_stream(Context<M>& cx, const Sums<Op>& sums, u32 epoch, const RowVectors<Op>& vectors,
                                              const RankRows<Stream>& ranks, u32 layer) {
  Reduction reduction(cx, Op::kTiles * 16);
  StreamRows<Stream, Op, M> rows(cx, epoch, vectors, ranks, layer);
  reduction.for_each_part(cx, sums, rows.units, rows.units * 8, [&](u32 start, u32 end) {
    if (cx.warp >= cx.queries) return;
    rows.add(start, end, [&](u32 r, bool valid) { return valid ? reduction.get(cx.warp, r - start) : 0.0f; });
  });
  rows.finish();
}
