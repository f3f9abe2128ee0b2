// Queries, keys and values of the round come to shared memory: norm, rope, rounding.
#pragma once
#include "ops/attention/exchange.cuh"
#include "ops/attention/split.cuh"
#include "tile/kv_codes.cuh"

// Cosines and sines of the round's positions come to shared memory once a round. Warp c serves query c.
template <class M>
__device__ __forceinline__ void load_rope(const Context<M>& cx) {
  if (cx.warp >= cx.queries) return;
  const float2* from = cx.params.rope + static_cast<u64>(cx.shared.control().position[cx.warp]) * (M::kHeadDim / 2);
#pragma unroll 1
  for (u32 p = cx.lane; p < M::kHeadDim / 2; p += 32) cx.shared.rope()[cx.warp * (M::kHeadDim / 2) + p] = __ldg(from + p);
}

// Where queries lie in shared memory: as the lanes of a warp read them for the first operand of m16n8k16,
// [tile of 16 rows][32 of D][multiply][lane][16 bytes]. Of eight neighbours those are a pair that are one in the keys' operand.
template <class M>
__device__ __forceinline__ u32 q_offset(u32 row, u32 d) {
  if constexpr (M::kCodeBits == 16) {
    const u32 lane = row % 8 * 4 + d % 32 / 8, word = d % 4 / 2 * 2 + row % 16 / 8;
    return ((row / 16 * (M::kHeadDim / 32) + d / 32) * 2 + d % 8 / 4) * 512 + lane * 16 + word * 4 + d % 2 * 2;
  } else {
    constexpr bool kIsFour = M::kCodeBits == 4;
    const u32 lane = row % 8 * 4 + d % 32 / 8, word = d % 2 * 2 + row % 16 / 8;
    const u32 multiply = kIsFour ? d % 4 / 2 : d % 8 / 4, number = kIsFour ? d % 8 / 4 : d % 4 / 2;
    return ((row / 16 * (M::kHeadDim / 32) + d / 32) * 2 + multiply) * 512 + lane * 16 + word * 4 + number * 2;
  }
}

// One head vector [D] of a query, in pairs (d, d + D/2): norm, rope, rounding. Executed by a warp.
template <class L>
struct HeadVector {
  using M = typename L::M;
  static constexpr u32 kHalf = M::kHeadDim / 2, kPairs = (kHalf + 31) / 32;
  // A lane's pairs are neighbours, which come and go by one request each; but not where a norm adds up squares: a query's bits
  // depend on which ones a lane has.
  static constexpr bool kNeighbours = kMostQueries > 1 && !L::kQkNorm && kHalf % 64 == 0;
  float low_norm[2][kPairs], high_norm[2][kPairs];  // of queries and keys

  // Where the lane's j-th pair is.
  static __device__ __forceinline__ u32 place(u32 lane, u32 j) {
    return kNeighbours ? 2 * lane + j % 2 + j / 2 * 64 : lane + 32 * j;
  }
  // The low or the high numbers of the lane's pairs of a vector; what there is none of is zero.
  static __device__ __forceinline__ void load(float (&x)[kPairs], const float* half, u32 lane) {
    if constexpr (kNeighbours) {
#pragma unroll
      for (u32 j = 0; j < kPairs; j += 2) {
        const float2 two = load_exchanged2(half + place(lane, j));
        x[j] = two.x, x[j + 1] = two.y;
      }
    } else {
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) x[j] = place(lane, j) < kHalf ? load_exchanged(half + place(lane, j)) : 0.0f;
    }
  }
  // Of a vector [D] that nobody changes.
  static __device__ __forceinline__ void load_two(float (&low)[kPairs], float (&high)[kPairs], const float* of, u32 lane) {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const u32 p = min(place(lane, j), kHalf - 1);
      low[j] = __ldg(of + p);
      high[j] = __ldg(of + p + kHalf);
    }
  }

  // Asked for before q, k, v are there.
  __device__ __forceinline__ void load_norms(const float* vectors, u32 lane) {
    if constexpr (L::kQkNorm) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) load_two(low_norm[i], high_norm[i], vectors + (i ? L::kVecKNorm : L::kVecQNorm), lane);
    }
  }
  // Norm and rope; of the lane's j-th pair `norm(j)` has the low and the high weight, `turn(j)` cosine and sine. No branches, so that several
  // vectors overlap. Each operation is spelled out: of a sum of two products the compiler rounds the one or the other, as it likes, and
  // builds would differ in their bits.
  template <class Norm, class Turn>
  static __device__ __forceinline__ void turned(float (&low)[kPairs], float (&high)[kPairs], const Norm& norm, const Turn& turn,
                                                float (&x)[kPairs], float (&y)[kPairs]) {
    if constexpr (L::kQkNorm) {
      float squares = 0.0f;
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) squares = __fadd_rn(squares, __fmaf_rn(low[j], low[j], __fmul_rn(high[j], high[j])));
      const float scale = rsqrtf(warp_sum(squares) * (1.0f / M::kHeadDim) + M::kEpsilon);
#pragma unroll
      for (u32 j = 0; j < kPairs; ++j) {
        const float2 weights = norm(j);
        low[j] *= scale * weights.x;
        high[j] *= scale * weights.y;
      }
    }
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      const float2 cs = turn(j);
      x[j] = __fmaf_rn(low[j], cs.x, -__fmul_rn(high[j], cs.y)), y[j] = __fmaf_rn(high[j], cs.x, __fmul_rn(low[j], cs.y));
    }
  }
};

// Where the numbers of a vector [D] go in shared memory: addresses of a lane's pairs.
template <class L>
struct PairPlaces {
  using V = HeadVector<L>;
  // Neighbours of 16 bits go together.
  static constexpr u32 kTogether = V::kNeighbours && V::M::kCodeBits == 16 ? 2 : 1, kPlaces = V::kPairs / kTogether;
  u32 low[kPlaces], high[kPlaces];

  // `of(d)`: where the vector's number d goes.
  template <class Of>
  __device__ __forceinline__ void find(u32 lane, const Of& of) {
#pragma unroll
    for (u32 j = 0; j < kPlaces; ++j) {
      const u32 p = min(V::place(lane, j * kTogether), V::kHalf - 1);
      low[j] = of(p), high[j] = of(p + V::kHalf);
      at_hand(low[j]), at_hand(high[j]);
    }
  }
  __device__ __forceinline__ void store(const float (&x)[V::kPairs], const float (&y)[V::kPairs], u32 lane) const {
#pragma unroll
    for (u32 j = 0; j < kPlaces; ++j) {
      if constexpr (kTogether == 2) {
        store_shared1(low[j], pack_pair(x[2 * j], x[2 * j + 1]));
        store_shared1(high[j], pack_pair(y[2 * j], y[2 * j + 1]));
      } else if (V::place(lane, j) < V::kHalf) {
        store_shared_half(low[j], to_half(x[j])), store_shared_half(high[j], to_half(y[j]));
      }
    }
  }
};

// Until raw vectors [D] have come: of a lane's pairs the low and the high numbers. `from(v)`: where the v-th lies, null if it is not asked
// for. The trip to the L2 is long, so that all are asked for together.
template <class L, u32 kVectors, class From>
__device__ __forceinline__ void await_vectors(float (&low)[kVectors][HeadVector<L>::kPairs], float (&high)[kVectors][HeadVector<L>::kPairs],
                                              const From& from, u32 lane) {
  using V = HeadVector<L>;
#pragma unroll 1
  for (;;) {
    bool ready = true;
#pragma unroll
    for (u32 v = 0; v < kVectors; ++v) {
#pragma unroll
      for (u32 j = 0; j < V::kPairs; ++j) low[v][j] = high[v][j] = 0.0f;
      const float* raw = from(v);
      if (!raw) continue;
      V::load(low[v], raw, lane);
      V::load(high[v], raw + V::kHalf, lane);
    }
#pragma unroll
    for (u32 v = 0; v < kVectors; ++v)
#pragma unroll
      for (u32 j = 0; j < V::kPairs; ++j) ready = ready && is_present(low[v][j]) && is_present(high[v][j]);
    if (__all_sync(~0u, ready)) return;
  }
}

// The place of the n-th bit.
__device__ __forceinline__ u32 nth_bit(u32 bits, u32 n, u32 lane) {
  return __ffs(__ballot_sync(~0u, (bits >> lane & 1) && __popc(bits & ((1u << lane) - 1)) == n)) - 1;
}

// Queries and keys that the block needs come to shared memory: `vectors` in all, of every warp's the next kAtOnce
// from `first` on; and with them values, one to each of the last warps. The trip to the L2 is long, so that all
// are asked for together. `factors_known` returns once every query's is.
template <u32 kAtOnce, class L, class FactorsKnown, class M>
__device__ __forceinline__ void prepare_vectors(const Context<M>& cx, const HeadVector<L>& vector, u32 layer, u32 head,
                                                u32 attending, u32 needed, u32 first, u32 vectors, bool has_value,
                                                const FactorsKnown& factors_known) {
  using V = HeadVector<L>;
  constexpr u32 kPairs = V::kPairs, kHalf = V::kHalf;
  const Shared<M> shared = cx.shared.anew();
  const u32 q_vectors = vectors - __popc(needed);
  const float* source = projected<L>(cx, cx.layers_done, 0) + head * kHeadRows<M>;
  // The last ones are those of values.
  float low[kAtOnce + 1][kPairs], high[kAtOnce + 1][kPairs];
  u32 query[kAtOnce + 1], member[kAtOnce + 1];
#pragma unroll
  for (u32 v = 0; v < kAtOnce; ++v) {
    const u32 i = min(first + v * kConsumerWarps, vectors - 1);  // what there is none of is not stored
    const bool is_q = i < q_vectors;
    query[v] = cx.queries == 1 ? 0 : nth_bit(is_q ? attending : needed, is_q ? i / M::kGroup : i - q_vectors, cx.lane);
    member[v] = is_q ? i % M::kGroup : M::kGroup;
  }
  query[kAtOnce] = cx.queries == 1 || !has_value ? 0 : nth_bit(needed, kConsumerWarps - 1 - cx.warp, cx.lane);
  member[kAtOnce] = M::kGroup + 1;
  float low_bias[kAtOnce + 1][kPairs], high_bias[kAtOnce + 1][kPairs];
  if constexpr (L::kQkvBias) {
#pragma unroll
    for (u32 v = 0; v <= kAtOnce; ++v)
      V::load_two(low_bias[v], high_bias[v], cx.vectors(L::vectors(layer)) + L::kVecQkvBias + head * kHeadRows<M> + member[v] * M::kHeadDim, cx.lane);
  }
  // Whatever does not depend on q, k and v is at hand before they come.
  factors_known();
  float factor[kAtOnce + 1];
  float2 turns[kAtOnce][kPairs];
  PairPlaces<L> places[kAtOnce + 1];
  const u32 q_rows = shared_address(shared.q_rows()), fresh = shared_address(shared.new_kv());
#pragma unroll
  for (u32 v = 0; v <= kAtOnce; ++v) {
    factor[v] = shared.control().factor[query[v]];
    at_hand(factor[v]);
    const bool is_q = v < kAtOnce && member[v] < M::kGroup;
    const u32 row = query[v] * M::kQueryRows + member[v], kv = fresh + (query[v] * 2 + v / kAtOnce) * (2 * M::kHeadDim);
    places[v].find(cx.lane, [&](u32 d) { return is_q ? q_rows + q_offset<M>(row, d) : kv + 2 * d; });
    if (v == kAtOnce) continue;
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      turns[v][j] = M::kRotated[layer] ? shared.rope()[query[v] * kHalf + min(V::place(cx.lane, j), kHalf - 1)] : make_float2(1.0f, 0.0f);
      at_hand(turns[v][j].x), at_hand(turns[v][j].y);
    }
  }
  await_vectors<L>(low, high, [&](u32 v) {
    return v == kAtOnce && !has_value ? nullptr : source + query[v] * (L::Qkv::kUnits * 8) + member[v] * M::kHeadDim;
  }, cx.lane);
#pragma unroll
  for (u32 v = 0; v <= kAtOnce; ++v) {
#pragma unroll
    for (u32 j = 0; j < kPairs; ++j) {
      low[v][j] *= factor[v];
      high[v][j] *= factor[v];
      if constexpr (L::kQkvBias) {
        low[v][j] += low_bias[v][j];
        high[v][j] += high_bias[v][j];
      }
    }
  }
#pragma unroll
  for (u32 v = 0; v < kAtOnce; ++v) {
    float x[kPairs], y[kPairs];
    const bool is_key = member[v] == M::kGroup;
    const auto norm = [&](u32 j) {
      return make_float2(is_key ? vector.low_norm[1][j] : vector.low_norm[0][j], is_key ? vector.high_norm[1][j] : vector.high_norm[0][j]);
    };
    V::turned(low[v], high[v], norm, [&](u32 j) { return turns[v][j]; }, x, y);
    if (first + v * kConsumerWarps < vectors) places[v].store(x, y, cx.lane);
  }
  if (has_value) places[kAtOnce].store(low[kAtOnce], high[kAtOnce], cx.lane);
}
// Keys and values of queries `fresh` are rounded once, for all who append them: a head to each warp.
template <class M>
__device__ __forceinline__ void round_fresh(const Context<M>& cx, u32 fresh) {
  u16* numbers = reinterpret_cast<u16*>(cx.shared.new_kv());
#pragma unroll 1
  for (u32 head = cx.warp; head < 2 * kMostQueries; head += kConsumerWarps)
    if (fresh >> head / 2 & 1) round_in_place<M>(numbers + head * M::kHeadDim, cx.lane);
}
template <class L, class M>
__device__ __forceinline__ void prepare_heads(const Context<M>& cx, u32 layer, u32 head, const OwnQueries& queries) {
  static_assert(kMaxQueries <= kConsumerWarps, "a value to each warp");
  constexpr u32 kAtOnce = M::kWideQueries ? 4 : 2;
  // All of one query are asked for together.
  constexpr u32 kOfOneQuery = (M::kGroup + kConsumerWarps) / kConsumerWarps;
  HeadVector<L> vector;
  vector.load_norms(cx.vectors(L::vectors(layer)), cx.lane);
  bool known = false;
  const auto factors_known = [&] {  // each warp meets the others once, the first time
    if (!known) cx.sync();
    known = true;
  };
  if (cx.queries == 1) {
#pragma unroll 1
    for (u32 first = cx.warp; first < M::kGroup + 1 || first == kConsumerWarps - 1; first += kOfOneQuery * kConsumerWarps) {
      const bool has_value = first == kConsumerWarps - 1;
      prepare_vectors<kOfOneQuery>(cx, vector, layer, head, 1, 1, first, M::kGroup + 1, has_value, factors_known);
    }
  } else {
    const u32 vectors = __popc(queries.attending) * M::kGroup + __popc(queries.needed);
#pragma unroll 1
    for (u32 first = cx.warp; first < vectors || first == cx.warp; first += kAtOnce * kConsumerWarps)
      prepare_vectors<kAtOnce>(cx, vector, layer, head, queries.attending, queries.needed, first, vectors,
                               first == cx.warp && kConsumerWarps - 1 - cx.warp < __popc(queries.needed), factors_known);
  }
  factors_known();
  cx.sync();
  if constexpr (kHasCodes<M>) {
    round_fresh(cx, cx.queries == 1 ? 1 : queries.needed);
    cx.sync();
  }
}
