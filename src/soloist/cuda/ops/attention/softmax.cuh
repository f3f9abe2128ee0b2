// A warp's running softmaxes over the half pages that it takes.
#pragma once
#include "tile/context.cuh"
#include "tile/kv_codes.cuh"

// Warps that share a half page: for other rows each or, where one query leaves them none, for other values. Warps of a
// quarter of the SM, which multiply in turn, do not share one.
template <class M>
inline constexpr u32 kLaneWarps = M::kRowTiles / M::kWarpTiles;
template <class M>
inline constexpr bool kSplitsValues =
    kMostQueries == 1 && M::kGroup <= 16 * M::kWarpTiles && M::kHeadDim % (32 * kLaneWarps<M>) == 0;
template <class M>
inline constexpr u32 kTileSets = kSplitsValues<M> ? 1 : kLaneWarps<M>;
template <class M>
inline constexpr u32 kValueSets = kSplitsValues<M> ? kLaneWarps<M> : 1;
template <class M>
inline constexpr u32 kSetDim = M::kHeadDim / kValueSets<M>;
// Rows 0 … 7 of a tile, and 8 … 15 where there may be so many.
template <class M>
inline constexpr u32 kRowHalves = kMostQueries * M::kGroup > 8 ? 2 : 1;
// A warp that takes several tiles knows a way for up to 8 rows, such as one query's: it multiplies a quarter as much. Where instructions
// are what is waited for a warp that takes one tile does, too: it weighs half as much.
template <class M>
inline constexpr bool kKnowsFewRows = (M::kWarpTiles > 1 || (M::kHasWayForFew && kRowHalves<M> > 1)) && !M::kWideQueries;

// A group's rows may begin in the upper half of a tile: four queries together with half a tile each.
template <class M>
inline constexpr bool kBeginsInHalf = M::kQueriesTogether < kMaxQueries && !M::kWideQueries;

// A warp's part in attention.
template <class M>
__device__ __forceinline__ u32 softmax_lane(const Context<M>& cx) {
  return kLaneWarps<M> > 1 ? cx.warp % M::kSoftmaxLanes : cx.warp;
}
template <class M>
__device__ __forceinline__ u32 row_set(const Context<M>& cx) { return kTileSets<M> > 1 ? cx.warp / M::kSoftmaxLanes : 0; }
template <class M>
__device__ __forceinline__ u32 value_set(const Context<M>& cx) { return kValueSets<M> > 1 ? cx.warp / M::kSoftmaxLanes : 0; }

// The first operand of a multiply of 8 rows: those of one half of a tile.
__device__ __forceinline__ uint4 lower_rows(const uint4& tile, bool upper) {
  return make_uint4(upper ? tile.y : tile.x, 0, upper ? tile.w : tile.z, 0);
}

// A tile of the upper half of one and the lower half of the next.
__device__ __forceinline__ uint4 middle_rows(const uint4& tile, const uint4& next) { return make_uint4(tile.y, next.x, tile.w, next.z); }

// Threads have too few registers for the running softmaxes beside what the other phases keep.
template <class M>
inline constexpr bool kParks = !kMovesRegisters || M::kWarpTiles * kSetDim<M> > 128;

// One query's rows of a KV head in registers, where there are enough: the first half tile's. Values come eight times 8 dimensions at
// once. Beside weights that are quantised Hopper alone has room for them.
inline constexpr u32 kValuesAtOnce = 8;
template <class M>
inline constexpr bool kKeepsQuery =
    kMostQueries == 1 && !M::kWideQueries && kMovesRegisters && kSetDim<M> % (8 * kValuesAtOnce) == 0 &&
    (kBatch > 1 || M::kShConvertedBytes == 0);
template <class M>
struct QueryRows {
  uint4 low[M::kHeadDim / 32], high[M::kHeadDim / 32];

  __device__ __forceinline__ void load(u32 q_rows) {
#pragma unroll
    for (u32 k = 0; k < M::kHeadDim / 32; ++k) low[k] = load_shared(q_rows + k * 1024), high[k] = load_shared(q_rows + k * 1024 + 512);
  }
};

// Keys and values have a scale for each 32 dimensions, not one for all.
template <class M>
constexpr bool scales_by_step() {
  if constexpr (kHasCodes<M>) return M::kScales > 1;
  else return false;
}
template <class M>
inline constexpr bool kScalesByStep = scales_by_step<M>();

// Where scales of a half page's keys lie, and of those values that a warp takes. There are none of numbers as they are.
template <class M>
struct Scales {
  u32 keys = 0, values = 0;

  __device__ __forceinline__ Scales(u32 half_page, u32 value_set) {
    if constexpr (kHasCodes<M>) {
      keys = half_page + 2 * M::kCodeBytes;
      values = keys + M::kScales * M::kScaleRowBytes;
      if constexpr (kScalesByStep<M>) values += value_set * (kSetDim<M> / 32) * M::kScaleRowBytes;
    }
  }
};

// A lane's part of a half page's keys. Lane (g, q) reads keys 8 (g / 2) + g % 2, and each second one after it; of a block of 32
// numbers the q-th eight. See key_chunk for the swap, and key_turn.
template <class M>
struct LaneKeys {
  u32 even, odd, turn;

  __device__ __forceinline__ LaneKeys(u32 keys, u32 g, u32 q) {
    const u32 row = keys + (8 * (g >> 1) + (g & 1)) * M::kKeyRowBytes + q * M::kCodeBits;
    const u32 swapped = (g & 1) * M::kSwappedKeyBytes;
    even = row + swapped, odd = row - swapped, turn = 0;
    if constexpr (kHasCodes<M>) turn = M::key_turn(8 * (g >> 1) + (g & 1));
  }
  // Of block `k` of its t-th key.
  __device__ __forceinline__ EightOfKey<M> load(u32 k, u32 t) const {
    EightOfKey<M> x;
    if constexpr (kHasCodes<M>) x.load(even + (k ^ turn) * M::kKeyBlockBytes + 2 * t * M::kKeyRowBytes);
    else x.load((k % 2 ? odd : even) + k * 64 + 2 * t * M::kKeyRowBytes);
    return x;
  }
};

// Scores of a step of 32 dimensions join those of the steps before: at once or, where each step has scales of its own, after that.
template <class M, bool = kScalesByStep<M>>
struct StepScores {
  float (&sums)[4][4];

  __device__ __forceinline__ explicit StepScores(float (&score)[4][4]) : sums(score) {}
  template <u32 kHalves>
  __device__ __forceinline__ void add_to(float (&)[4][4], u32, u32) const {}
  template <u32 kHalves>
  __device__ __forceinline__ void add_to(float (&)[4][4], const EightScales&) const {}
};
template <class M>
struct StepScores<M, true> {
  float sums[4][4];

  __device__ __forceinline__ explicit StepScores(const float (&)[4][4]) {}
  // `of_lane`: the scales of step 0 that the lane needs.
  template <u32 kHalves>
  __device__ __forceinline__ void add_to(float (&score)[4][4], u32 of_lane, u32 step) const {
    add_to<kHalves>(score, EightScales(of_lane + step * M::kScaleRowBytes));
  }
  template <u32 kHalves>
  __device__ __forceinline__ void add_to(float (&score)[4][4], const EightScales& scale) const {
#pragma unroll
    for (u32 t = 0; t < 4; ++t)
#pragma unroll
      for (u32 i = 0; i < 2 * kHalves; ++i) score[t][i] += sums[t][i] * scale.at(t, i % 2);
  }
};

// Running softmaxes over kWarpTiles · 16 rows (query, query head): sums of values, maxima, sums of weights.
template <class M>
struct Softmax {
  float out[M::kWarpTiles][kSetDim<M> / 8][4];
  float best[M::kWarpTiles][kRowHalves<M>], total[M::kWarpTiles][kRowHalves<M>];  // best: of scores to base 2

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 m = 0; m < M::kWarpTiles; ++m) {
#pragma unroll
      for (u32 n = 0; n < kSetDim<M> / 8; ++n)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
#pragma unroll
      for (u32 r = 0; r < kRowHalves<M>; ++r) best[m][r] = -kInfinity, total[m][r] = 0.0f;
    }
  }

  // Lane (g, q) holds rows g and g + 8 of each tile and positions 8q … 8q + 7 of the half page. `q_rows`: the
  // lane's part of the first tile, in shared memory; bits of `tiles`: which of them matter; `values`: from the warp's
  // first dimension on; `last`: the position of each row; `partly`: some row does not see some position.
  // Of 8 rows, kTiles = kHalves = 1, `upper` says which half of a tile they are; they come to the same bits in the lower.
  // Of more it says whether they begin there.
  template <u32 kTiles, u32 kHalves>
  __device__ __forceinline__ void add(u32 q_rows, u32 tiles, bool upper, u32 keys, u32 values, const Scales<M>& scales, i32 start,
                                      const i32 (&last)[M::kWarpTiles][kRowHalves<M>], i32 window, bool partly, u32 lane) {
    const u32 g = lane / 4, q = lane % 4;
    float score[kTiles][4][4];
#pragma unroll
    for (u32 m = 0; m < kTiles; ++m)
#pragma unroll
      for (u32 t = 0; t < 4; ++t) score[m][t][0] = score[m][t][1] = score[m][t][2] = score[m][t][3] = 0.0f;
    const LaneKeys<M> of_lane(keys, g, q);
#pragma unroll(M::kHeadDim % 64 == 0 ? 2 : 3)
    for (u32 k = 0; k < M::kHeadDim / 32; ++k) {
      uint4 x[4];
#pragma unroll
      for (u32 t = 0; t < 4; ++t) x[t] = of_lane.load(k, t).operand();
#pragma unroll
      for (u32 m = 0; m < kTiles; ++m) {
        const u32 at = q_rows + (m * (M::kHeadDim / 32) + k) * 1024;
        uint4 low = load_shared(at), high = load_shared(at + 512);
        if (kHalves < kRowHalves<M>) low = lower_rows(low, upper), high = lower_rows(high, upper);
        else if (kBeginsInHalf<M> && upper) {
          constexpr u32 kTile = M::kHeadDim / 32 * 1024;  // behind the last one is what nobody asks for
          low = middle_rows(low, load_shared(at + kTile)), high = middle_rows(high, load_shared(at + kTile + 512));
        }
        StepScores<M> step(score[m]);
#pragma unroll
        for (u32 t = 0; t < 4; ++t)
          if constexpr (kScalesByStep<M>) mma_from_zero(step.sums[t], low.x, low.y, low.z, low.w, x[t].x, x[t].y);
          else mma(step.sums[t], low.x, low.y, low.z, low.w, x[t].x, x[t].y);
#pragma unroll
        for (u32 t = 0; t < 4; ++t) mma(step.sums[t], high.x, high.y, high.z, high.w, x[t].z, x[t].w);
        step.template add_to<kHalves>(score[m], scales.keys + q * 16, k);
      }
    }
    if constexpr (kHasCodes<M> && !kScalesByStep<M>) scale_scores<kTiles, kHalves>(score, EightScales(scales.keys + q * 16));
    u32 weight[kTiles][4][2];
    weigh<kTiles, kHalves>(score, weight, tiles, start, last, window, partly, q);
#pragma unroll
    for (u32 n = 0; n < kSetDim<M> / 8; n += 4) {
      Values<M, 4> of_step;
      of_step.load(values, n, g, q);
      uint4 v[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[i] = of_step.operand(i);
#pragma unroll
      for (u32 m = 0; m < kTiles; ++m) {
        if constexpr (kHasCodes<M>)
          if (kScalesByStep<M> || n == 0) share<kHalves>(score[m], weight[m], EightScales(scales.values + n / 4 * kHalfPagePositions * 2 + q * 16));
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
          mma(out[m][n + i], weight[m][0][0], weight[m][0][1], weight[m][1][0], weight[m][1][1], v[i].x, v[i].y);
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
          mma(out[m][n + i], weight[m][2][0], weight[m][2][1], weight[m][3][0], weight[m][3][1], v[i].z, v[i].w);
      }
    }
  }

  // The same for one query, whose rows are in registers. Keys and values are asked for before anything waits for them.
  __device__ __forceinline__ void add(const QueryRows<M>& query, u32 keys, u32 values, const Scales<M>& scales, i32 start,
                                      const i32 (&last)[1][1], i32 window, bool partly, u32 lane) {
    constexpr u32 kParts = M::kHeadDim / 32, kScaled = kScalesByStep<M> ? 4 : kValuesAtOnce;
    constexpr u32 kSteps = kScalesByStep<M> ? kParts : 1, kValueSteps = kScalesByStep<M> ? kSetDim<M> / 32 : 1;
    const u32 g = lane / 4, q = lane % 4;
    const LaneKeys<M> of_lane(keys, g, q);
    EightOfKey<M> x[kParts][4];
    Values<M, kValuesAtOnce> v;
#pragma unroll
    for (u32 k = 0; k < kParts; ++k)
#pragma unroll
      for (u32 t = 0; t < 4; ++t) x[k][t] = of_lane.load(k, t);
    EightScales scale[kSteps];  // of keys, then of values
    if constexpr (kHasCodes<M>) {
#pragma unroll
      for (u32 k = 0; k < kSteps; ++k) scale[k].load(scales.keys + q * 16 + k * M::kScaleRowBytes);
    }
    float score[1][4][4];
    if constexpr (kScalesByStep<M>) {
#pragma unroll
      for (u32 t = 0; t < 4; ++t) score[0][t][0] = score[0][t][1] = score[0][t][2] = score[0][t][3] = 0.0f;
    }
#pragma unroll
    for (u32 k = 0; k < kParts; ++k) {
      StepScores<M> step(score[0]);
      const uint4 low = query.low[k], high = query.high[k];
      uint4 b[4];
#pragma unroll
      for (u32 t = 0; t < 4; ++t) b[t] = x[k][t].operand();
#pragma unroll
      for (u32 t = 0; t < 4; ++t)
        if (kScalesByStep<M> || k == 0) mma_from_zero(step.sums[t], low.x, low.y, low.z, low.w, b[t].x, b[t].y);
        else mma(step.sums[t], low.x, low.y, low.z, low.w, b[t].x, b[t].y);
#pragma unroll
      for (u32 t = 0; t < 4; ++t) mma(step.sums[t], high.x, high.y, high.z, high.w, b[t].z, b[t].w);
      step.template add_to<1>(score[0], scale[k % kSteps]);
    }
    v.load(values, 0, g, q);
    if constexpr (kHasCodes<M>) {
      if constexpr (!kScalesByStep<M>) scale_scores<1, 1>(score, scale[0]);
#pragma unroll
      for (u32 k = 0; k < kValueSteps; ++k) scale[k].load(scales.values + q * 16 + k * kHalfPagePositions * 2);
    }
    u32 weight[1][4][2];
    weigh<1, 1>(score, weight, 1, start, last, window, partly, q);
    // Rows 8 … 15 are nobody's. Were they zeros, the compiler would make some for every multiply; of codes, whose weights
    // are made anew for each step, it would move whatever else they are.
    u32 rest[4];
#pragma unroll
    for (u32 t = 0; t < 4; ++t) rest[t] = kHasCodes<M> ? any_register() : pack_pair(score[0][t][2], score[0][t][3]);
#pragma unroll
    for (u32 first = 0; first < kSetDim<M> / 8; first += kValuesAtOnce) {
      if (first > 0) v.load(values, first, g, q);
#pragma unroll
      for (u32 part = 0; part < kValuesAtOnce; part += kScaled) {
        if constexpr (kHasCodes<M>)
          if (kScalesByStep<M> || first == 0)
            share<1>(score[0], weight[0], scale[(first + part) / 4 % kValueSteps]);
        uint4 b[kScaled];
#pragma unroll
        for (u32 n = 0; n < kScaled; ++n) b[n] = v.operand(part + n);
#pragma unroll
        for (u32 n = 0; n < kScaled; ++n)
          mma(out[0][first + part + n], weight[0][0][0], rest[0], weight[0][1][0], rest[1], b[n].x, b[n].y);
#pragma unroll
        for (u32 n = 0; n < kScaled; ++n)
          mma(out[0][first + part + n], weight[0][2][0], rest[2], weight[0][3][0], rest[3], b[n].z, b[n].w);
      }
    }
  }

 private:
  // Scores of codes become scores of keys; scales are those of the lane's positions.
  template <u32 kTiles, u32 kHalves>
  static __device__ __forceinline__ void scale_scores(float (&score)[kTiles][4][4], const EightScales& scale) {
#pragma unroll
    for (u32 m = 0; m < kTiles; ++m)
#pragma unroll
      for (u32 t = 0; t < 4; ++t)
#pragma unroll
        for (u32 i = 0; i < 2 * kHalves; ++i) score[m][t][i] *= scale.at(t, i % 2);
  }
  // Shares, which `weigh` left in place of scores, as what codes of values are multiplied by.
  template <u32 kHalves>
  static __device__ __forceinline__ void share(const float (&shares)[4][4], u32 (&weight)[4][2], const EightScales& scale) {
#pragma unroll
    for (u32 t = 0; t < 4; t += 2)
#pragma unroll
      for (u32 e = 0; e < 2; ++e)
#pragma unroll
        for (u32 r = 0; r < 2; ++r)
          weight[t + e][r] = r < kHalves ? pack_pair(shares[t][2 * r + e] * scale.at(t, e), shares[t + 1][2 * r + e] * scale.at(t + 1, e))
                                         : 0;
  }
  // What scores make of the running softmaxes, and the weights of values; of codes `share` makes these of the shares.
  template <u32 kTiles, u32 kHalves = kRowHalves<M>>
  __device__ __forceinline__ void weigh(float (&score)[kTiles][4][4], u32 (&weight)[kTiles][4][2], u32 tiles, i32 start,
                                        const i32 (&last)[M::kWarpTiles][kRowHalves<M>], i32 window, bool partly, u32 q) {
    constexpr float kScale = M::kScoreScale * kCodeUnit<M>;
#pragma unroll
    for (u32 m = 0; m < kTiles; ++m) {
      if (kTiles > 1 && !(tiles >> m & 1)) {  // nobody asks for these rows
#pragma unroll
        for (u32 t = 0; t < 4; ++t) weight[m][t][0] = weight[m][t][1] = 0;
        if constexpr (kHasCodes<M>) {
#pragma unroll
          for (u32 t = 0; t < 4; ++t) score[m][t][0] = score[m][t][1] = score[m][t][2] = score[m][t][3] = 0.0f;
        }
        continue;
      }
#pragma unroll
      for (u32 r = 0; r < kHalves; ++r) {
        if (partly) {
#pragma unroll
          for (u32 t = 0; t < 4; ++t)
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
              const i32 position = start + static_cast<i32>(8 * q + 2 * t + e);
              const bool seen = position <= last[m][r] && (window == 0 || position > last[m][r] - window);
              if (!seen) score[m][t][2 * r + e] = -kInfinity;
            }
        }
        float top = -kInfinity;
#pragma unroll
        for (u32 t = 0; t < 4; ++t) top = fmaxf(top, fmaxf(score[m][t][2 * r], score[m][t][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(best[m][r], top * kScale);
        const float base = top == -kInfinity ? 0.0f : top;
        const float shrink = exp2_fast(best[m][r] - base);
        const bool shrinks = __any_sync(~0u, shrink != 1.0f && best[m][r] != -kInfinity);
        best[m][r] = top;
        float sum = 0.0f;
#pragma unroll
        for (u32 t = 0; t < 4; ++t)
#pragma unroll
          for (u32 e = 0; e < 2; ++e) {
            float& s = score[m][t][2 * r + e];
            s = exp2_fast(s * kScale - base);
            sum += s;
          }
        total[m][r] = total[m][r] * shrink + sum;
        if (shrinks) {
#pragma unroll
          for (u32 n = 0; n < kSetDim<M> / 8; ++n) {
            out[m][n][2 * r] *= shrink;
            out[m][n][2 * r + 1] *= shrink;
          }
        }
      }
      if constexpr (!kHasCodes<M>) {
#pragma unroll
        for (u32 t = 0; t < 4; ++t) {
          weight[m][t][0] = pack_pair(score[m][t][0], score[m][t][1]);
          weight[m][t][1] = kHalves == 2 ? pack_pair(score[m][t][2], score[m][t][3]) : 0;
        }
      }
    }
  }
};

// A lane's sums of one row, of the lower or the upper half of a tile, to where the row's values lie, from dimension `dims` on.
template <class M>
__device__ __forceinline__ void store_row(float* values, u32 swap, u32 dims, const float (&out)[kSetDim<M> / 8][4], u32 half, u32 q) {
  if constexpr (M::kCodeBits == 4) {  // sums of two times eight dimensions are neighbours, see Values
#pragma unroll
    for (u32 n = 0; n < kSetDim<M> / 8; n += 2) {
      float2* to = reinterpret_cast<float2*>(values + (dims / 8 + n + q / 2 ^ swap) * 8 + q % 2 * 4);
      to[0] = make_float2(in_full<M>(out[n][2 * half]), in_full<M>(out[n + 1][2 * half]));
      to[1] = make_float2(in_full<M>(out[n][2 * half + 1]), in_full<M>(out[n + 1][2 * half + 1]));
    }
  } else {
    float2* to = reinterpret_cast<float2*>(values + 2 * q);
#pragma unroll
    for (u32 n = 0; n < kSetDim<M> / 8; ++n) to[(dims / 8 + n ^ swap) * 4] = make_float2(in_full<M>(out[n][2 * half]), in_full<M>(out[n][2 * half + 1]));
  }
}
