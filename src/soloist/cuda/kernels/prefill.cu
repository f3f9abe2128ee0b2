// What prefill does between matrix products: embedding, norms, rope, the KV pool, SwiGLU.
//
// Products come as fp32 or in the 16-bit type (kWideProducts), gate and up always in the latter; every result is
// rounded once. Defined by TorchElementwise (prefill/elementwise.py). Blocks have kThreads threads and one grid dimension.
#include "ptx/dependent.cuh"
#include "sync/meeting.cuh"
#include "tile/arranged.cuh"
#include "tile/silu.cuh"
#include "tile/totals.cuh"

inline constexpr u32 kHalfDim = kHeadDim / 2;
inline constexpr u32 kHeads = kQueryHeads + 2 * kKvHeads;  // of a lane, where there are any
inline constexpr u64 kPageValues = static_cast<u64>(kLayers) * kPoolKvHeads * kPageHalves * kKvParts * kHalfPageValues;

static_assert(kHidden % 8 == 0 && kIntermediate % 8 == 0 && kHeadDim % 8 == 0, "16-byte accesses");

// Four neighbours of a product.
template <bool kWide>
struct Product {
  using Four = float4;
};
template <>
struct Product<false> {
  using Four = uint2;
};
using Four = Product<kWideProducts>::Four;

// residual [T, H] = rows of table [V, H]. One block a token.
extern "C" __global__ void __launch_bounds__(kThreads)
    embed(const uint4* __restrict__ table, const i32* __restrict__ ids, float4* __restrict__ residual) {
  const u64 source = static_cast<u64>(ids[blockIdx.x]) * (kHidden / 8);
  float4* row = residual + static_cast<u64>(blockIdx.x) * (kHidden / 4);
  for (u32 i = threadIdx.x; i < kHidden / 8; i += kThreads) {
    const uint4 x = table[source + i];
    row[2 * i] = make_float4(low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y));
    row[2 * i + 1] = make_float4(low_half(x.z), high_half(x.z), low_half(x.w), high_half(x.w));
  }
}

__device__ __forceinline__ float4 delta_at(const Four* delta, const float4* bias, u64 row, u32 i) {
  const float4 d = widened(__ldcs(delta + row + i));
  return bias ? sum(d, __ldg(bias + i)) : d;
}

// The sum of parts [parts, T, H] in their order.
__device__ __forceinline__ float4 sum_of_parts(const float4* parts, u32 count, const float4* bias, u64 row, u32 i) {
  const u64 apart = static_cast<u64>(gridDim.x) * (kHidden / 4);
  parts += row + i;
  float4 d = __ldcs(parts);
#pragma unroll 2
  for (u32 k = 1; k < count; ++k) d = sum(d, __ldcs(parts += apart));
  return bias ? sum(d, __ldg(bias + i)) : d;
}

// residual [T, H] + (first + bias) + (second + bias), each of which may be absent; out [T, H] = its RMS norm, whose columns may
// be arranged. The sum is the new residual if it `keeps` it. With `parts` the second one is so many parts in fp32. One block a token.
template <bool kArranged>
__device__ __forceinline__ void add_and_norm(float4* __restrict__ residual, const Four* __restrict__ first,
                                             const float4* __restrict__ first_bias, const void* __restrict__ second,
                                             const float4* __restrict__ second_bias, const float4* __restrict__ weight,
                                             uint2* __restrict__ out, u32 keeps, u32 parts) {
  constexpr u32 kRow = kHidden / 4, kOwn = (kRow + kThreads - 1) / kThreads;
  const u64 start = static_cast<u64>(blockIdx.x) * kRow;
  let_next_begin();
  float4 x[kOwn];
  float squares = 0.0f;
#pragma unroll
  for (u32 j = 0; j < kOwn; ++j) {
    const u32 i = threadIdx.x + j * kThreads;
    if (i >= kRow) continue;
    x[j] = __ldcs(residual + start + i);
    if (first) x[j] = sum(x[j], delta_at(first, first_bias, start, i));
    if (parts) x[j] = sum(x[j], sum_of_parts(static_cast<const float4*>(second), parts, second_bias, start, i));
    else if (second) x[j] = sum(x[j], delta_at(static_cast<const Four*>(second), second_bias, start, i));
    if (keeps) __stcs(residual + start + i, x[j]);
    squares += squares_of(x[j]);
  }
  const float scale = __frsqrt_rn(block_total(squares) * (1.0f / kHidden) + kEpsilon);
#pragma unroll
  for (u32 j = 0; j < kOwn; ++j) {
    const u32 i = threadIdx.x + j * kThreads;
    if (i >= kRow) continue;
    const float4 w = __ldg(weight + i);
    const uint2 norm = packed(times(x[j], scale, w));
    if constexpr (kArranged) {
      u32* const words = reinterpret_cast<u32*>(out + start) + arranged_word(2 * i);
      words[0] = norm.x;
      words[4] = norm.y;
    } else {
      out[start + i] = norm;
    }
  }
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm(float4* __restrict__ residual, const Four* __restrict__ first, const float4* __restrict__ first_bias,
             const void* __restrict__ second, const float4* __restrict__ second_bias,
             const float4* __restrict__ weight, uint2* __restrict__ out, u32 keeps, u32 parts) {
  add_and_norm<false>(residual, first, first_bias, second, second_bias, weight, out, keeps, parts);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_arranged(float4* __restrict__ residual, const Four* __restrict__ first, const float4* __restrict__ first_bias,
                      const void* __restrict__ second, const float4* __restrict__ second_bias,
                      const float4* __restrict__ weight, uint2* __restrict__ out, u32 keeps, u32 parts) {
  add_and_norm<true>(residual, first, first_bias, second, second_bias, weight, out, keeps, parts);
}

// Ranks. Products of attention_output and down are parts of sums over all of them. A rank owns some of the chunk's
// rows: it adds everybody's parts of them in the order of the ranks, keeps the residual, and gives all ranks the norm.

struct Peers {
  Ranks ranks;
  const Four* parts[kRanks];  // [T, H]
  uint2* normed[kRanks];      // [T, H]
};

// One block, one thread.
extern "C" __global__ void tell(const __grid_constant__ Peers peers) { tell_all(peers.ranks); }
extern "C" __global__ void await(const __grid_constant__ Peers peers) { await_all(peers.ranks); }

// Waits for all ranks, does as add_norm for the rows from `first` on that this rank owns, whose residual it has, and
// tells all ranks. `has_parts` is 0 at the start of a pass. With `last`, the one row of parts and norms is row *last
// of the chunk. One block a row, at least one.
extern "C" __global__ void __launch_bounds__(kThreads)
    sum_norm(const __grid_constant__ Peers peers, float4* __restrict__ residual, const float4* __restrict__ bias,
             const float4* __restrict__ weight, const i32* __restrict__ last, u32 has_parts, u32 first, u32 rows) {
  constexpr u32 kRow = kHidden / 4, kOwn = (kRow + kThreads - 1) / kThreads;
  if (threadIdx.x == 0) await_all(peers.ranks);
  __syncthreads();
  const u32 row = last ? static_cast<u32>(*last) : first + blockIdx.x;
  if (row - first < rows) {
    const u64 own = static_cast<u64>(row - first) * kRow, start = last ? 0 : static_cast<u64>(row) * kRow;
    float4 x[kOwn];
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < kOwn; ++j) {
      const u32 i = threadIdx.x + j * kThreads;
      if (i >= kRow) continue;
      x[j] = residual[own + i];
      if (has_parts) {
        float4 part[kRanks];
#pragma unroll
        for (u32 r = 0; r < kRanks; ++r) part[r] = widened(load_from_peers(peers.parts[r] + start + i));
#pragma unroll
        for (u32 r = 1; r < kRanks; ++r) part[0] = sum(part[0], part[r]);
        if (bias) part[0] = sum(part[0], __ldg(bias + i));
        x[j] = sum(x[j], part[0]);
        residual[own + i] = x[j];
      }
      squares += squares_of(x[j]);
    }
    const float scale = __frsqrt_rn(block_total(squares) * (1.0f / kHidden) + kEpsilon);
#pragma unroll
    for (u32 j = 0; j < kOwn; ++j) {
      const u32 i = threadIdx.x + j * kThreads;
      if (i >= kRow) continue;
      const float4 w = __ldg(weight + i);
      const uint2 norm = packed(times(x[j], scale, w));
#pragma unroll
      for (u32 r = 0; r < kRanks; ++r) store_to_peer(peers.normed[r] + start + i, norm);
    }
  }
  tell_when_all_are_done(peers.ranks, gridDim.x);
}

// Lanes that share a row, four neighbours of each half of the head each; rows of a warp at once, and passes.
constexpr u32 row_lanes() {
  u32 lanes = 1;
  while (lanes < 32 && lanes < kHalfDim / 4) lanes *= 2;
  return lanes;
}
inline constexpr u32 kRowLanes = row_lanes();
inline constexpr u32 kFours = (kHalfDim / 4 + kRowLanes - 1) / kRowLanes;  // of one lane in one row
inline constexpr u32 kWarpRows = 32 / kRowLanes;
inline constexpr u32 kPasses = (kHalfPagePositions + kWarps * kWarpRows - 1) / (kWarps * kWarpRows);
__device__ __forceinline__ u32 row_of(u32 pass, u32 warp, u32 lane) {
  return (pass * kWarps + warp) * kWarpRows + lane / kRowLanes;
}

__device__ __forceinline__ float4 four_of(const float* p) { return __ldg(reinterpret_cast<const float4*>(p)); }
__device__ __forceinline__ void store_four(u16* p, uint2 four) { *reinterpret_cast<uint2*>(p) = four; }

struct Place {
  i32 position;  // of the chunk's first token
  i32 tokens;    // rows from here on are padding: computed, but not stored in the pool
};

// Product [T, (Q + 2K) D] to queries [T, Q, D], keys and values [T, K, D] and the pool's pages.
// A block takes one head of the rows that lie in one half page, so that transposed values are written in
// whole lines: blocks = ceil((T + 31) / 32) (Q + 2K). Of a model with lanes Q and K are a lane's, the product has
// lanes first, and blocks, queries, keys and values are those of kLanes times as many heads. Norms and bias may be absent, and so may rope, a
// table [positions, D / 2] of (cos, sin).
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    qkv_rope_store(const Four* __restrict__ product, const float* __restrict__ bias,
                   const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                   const float2* __restrict__ rope, u16* __restrict__ queries, u16* __restrict__ keys,
                   u16* __restrict__ values, u16* __restrict__ pool, const i32* __restrict__ page_table,
                   const Place* __restrict__ where, u32 layer, i32 rows, i32 positions) {
  constexpr u32 kStride = kHeadDim + 2;  // rows of `turned` start in different banks
  __shared__ __align__(4) u16 turned[kHalfPagePositions * kStride];
  const Place place = *where;
  const u32 head = blockIdx.x % kHeads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 stream = blockIdx.x / kHeads % kLanes;  // the model's lane
  const i32 half_page = place.position / kHalfPagePositions + blockIdx.x / (kHeads * kLanes);
  const i32 first = half_page * static_cast<i32>(kHalfPagePositions) - place.position;  // row of its start
  if (first >= rows) return;
  const bool is_query = head < kQueryHeads, is_key = !is_query && head < kQueryHeads + kKvHeads;
  const bool is_value = !is_query && !is_key;
  const u32 kv_head = stream * kKvHeads + (head - kQueryHeads) % kKvHeads, query_head = stream * kQueryHeads + head;
  const float* norm = is_query ? q_norm : is_key ? k_norm : nullptr;
  u16* pool_part = nullptr;
  if (!is_query && first < place.tokens) {
    const i32 page = page_table[half_page / kPageHalves];
    pool_part = pool + half_page_place(kPageValues, page, layer, kv_head, half_page % kPageHalves) + is_value * kHalfPageValues;
  }

  // All loads of a thread are on their way at once: four neighbours d and their partners d + D/2 of each of its rows.
  const bool turns = rope && !is_value;
  const u32 part = lane % kRowLanes;
  float4 low[kPasses][kFours], high[kPasses][kFours], turn[kPasses][kFours][2];
#pragma unroll
  for (u32 k = 0; k < kPasses; ++k) {
    const i32 t = min(max(first + static_cast<i32>(row_of(k, warp, lane)), 0), rows - 1);
    const Four* source = product + ((static_cast<u64>(stream) * rows + t) * kHeads + head) * (kHeadDim / 4);
    const u64 angle = static_cast<u64>(min(place.position + t, positions - 1)) * kHalfDim;
#pragma unroll
    for (u32 j = 0; j < kFours; ++j) {
      const u32 i = part + j * kRowLanes;
      const bool is_there = i < kHalfDim / 4;
      const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      low[k][j] = is_there ? widened(__ldcs(source + i)) : none;
      high[k][j] = is_there ? widened(__ldcs(source + i + kHalfDim / 4)) : none;
      if (turns && is_there) {
        turn[k][j][0] = four_of(reinterpret_cast<const float*>(rope + angle) + 8 * i);
        turn[k][j][1] = four_of(reinterpret_cast<const float*>(rope + angle) + 8 * i + 4);
      }
    }
  }
#pragma unroll
  for (u32 k = 0; k < kPasses; ++k) {
    const u32 r = row_of(k, warp, lane);
    const i32 t = first + static_cast<i32>(r);
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < kFours; ++j) {
      const u32 p = 4 * (part + j * kRowLanes);
      if (bias && p < kHalfDim) {
        low[k][j] = sum(low[k][j], four_of(bias + head * kHeadDim + p));
        high[k][j] = sum(high[k][j], four_of(bias + head * kHeadDim + p + kHalfDim));
      }
      squares += squares_of(low[k][j]) + squares_of(high[k][j]);
    }
    float scale = 1.0f;
    if (norm) {
#pragma unroll
      for (u32 step = kRowLanes / 2; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
      scale = __frsqrt_rn(squares * (1.0f / kHeadDim) + kEpsilon);
    }
    if (r >= kHalfPagePositions || t < 0 || t >= rows) continue;
    u16* out = is_query ? queries + (static_cast<u64>(t) * (kLanes * kQueryHeads) + query_head) * kHeadDim
                        : (is_key ? keys : values) + (static_cast<u64>(t) * kPoolKvHeads + kv_head) * kHeadDim;
    u16* pool_row = is_key && pool_part && t < place.tokens ? pool_part + r * kHeadDim : nullptr;
#pragma unroll
    for (u32 j = 0; j < kFours; ++j) {
      const u32 p = 4 * (part + j * kRowLanes);
      if (p >= kHalfDim) continue;
      float4 x = low[k][j], y = high[k][j];
      if (norm) {
        x = times(x, scale, four_of(norm + p));
        y = times(y, scale, four_of(norm + p + kHalfDim));
      }
      if (turns) {
        const float4 a = x, b = y, w = turn[k][j][0], v = turn[k][j][1];  // (cos, sin) of two pairs each
        x = make_float4(a.x * w.x - b.x * w.y, a.y * w.z - b.y * w.w, a.z * v.x - b.z * v.y, a.w * v.z - b.w * v.w);
        y = make_float4(b.x * w.x + a.x * w.y, b.y * w.z + a.y * w.w, b.z * v.x + a.z * v.y, b.w * v.z + a.w * v.w);
      }
      const uint2 x_rounded = packed(x), y_rounded = packed(y);
      store_four(out + p, x_rounded);
      store_four(out + p + kHalfDim, y_rounded);
      if (pool_row) {
        store_four(pool_row + key_column(r, p), x_rounded);
        store_four(pool_row + key_column(r, p + kHalfDim), y_rounded);
      }
      if (is_value) {
        u32* row = reinterpret_cast<u32*>(turned + r * kStride + p);
        row[0] = x_rounded.x;
        row[1] = x_rounded.y;
        row[kHalfDim / 2] = y_rounded.x;
        row[kHalfDim / 2 + 1] = y_rounded.y;
      }
    }
  }
  if (!is_value || !pool_part) return;
  __syncthreads();
  const i32 t = first + static_cast<i32>(lane);
  if (t < 0 || t >= place.tokens) return;
  for (u32 d = warp; d < kHeadDim; d += kWarps) pool_part[value_place(lane, d)] = turned[lane * kStride + d];
}

// The opposite for one layer: keys and values [S, K, D] of the positions up to the chunk's end, from the pool. With a
// window, from the block on that holds the first position which the chunk's first token sees. A block takes one head's
// half page after the other.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    gather(const u16* __restrict__ pool, const i32* __restrict__ page_table, const Place* __restrict__ where, u32 layer,
           i32 window, uint4* __restrict__ keys, uint4* __restrict__ values) {
  constexpr u32 kChunks = kHeadDim / 8;  // 16-byte accesses of a row
  constexpr u32 kStride = kHeadDim + 8;  // rows of `turned` start in different banks
  constexpr u32 kPasses = kHalfPagePositions / 8;
  __shared__ __align__(16) u16 turned[kHalfPagePositions * kStride];
  const Place place = *where;
  const i32 stop = place.position + place.tokens;
  i32 begin = window ? max(0, place.position + 1 - window) : 0;
  begin -= begin % static_cast<i32>(kBlockPositions);
  const u32 first = static_cast<u32>(begin) / kHalfPagePositions;
  const u32 end = (static_cast<u32>(stop) + kHalfPagePositions - 1) / kHalfPagePositions;
  for (u32 unit = first * kPoolKvHeads + blockIdx.x; unit < end * kPoolKvHeads; unit += gridDim.x) {
    const u32 half_page = unit / kPoolKvHeads, head = unit % kPoolKvHeads;
    const i32 page = page_table[half_page / kPageHalves];
    const u64 place_in_pool = half_page_place(kPageValues, page, layer, head, half_page % kPageHalves);
    const uint4* source = reinterpret_cast<const uint4*>(pool + place_in_pool);
    const u32 rows = min(kHalfPagePositions, static_cast<u32>(stop) - half_page * kHalfPagePositions);
    const u64 target = (static_cast<u64>(half_page) * kHalfPagePositions * kPoolKvHeads + head) * kChunks;
    // Values lie [D][32]: chunk c of dimension d has its positions 8 c to 8 c + 7.
    for (u32 i = threadIdx.x; i < kHeadDim * kPasses; i += kThreads) {
      const u32 d = i % kHeadDim, c = i / kHeadDim;
      const uint4 x = source[kHalfPageValues / 8 + d * kPasses + c];
      const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        turned[(8 * c + 2 * j) * kStride + d] = static_cast<u16>(pairs[j]);
        turned[(8 * c + 2 * j + 1) * kStride + d] = static_cast<u16>(pairs[j] >> 16);
      }
    }
    __syncthreads();  // `turned` is whole
    for (u32 i = threadIdx.x; i < rows * kChunks; i += kThreads) {
      const u32 r = i / kChunks, c = i % kChunks;
      const u64 to = target + static_cast<u64>(r) * kPoolKvHeads * kChunks + c;
      keys[to] = source[r * kChunks + key_chunk(r, c)];
      values[to] = *reinterpret_cast<const uint4*>(turned + r * kStride + 8 * c);
    }
    __syncthreads();  // `turned` was read
  }
}

// Two neurons and their biases, if there are any.
__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up, const float* gate_bias, const float* up_bias) {
  if (!gate_bias) return gated_pair(gate, up);
  return pack_pair(silu(low_half(gate) + __ldg(gate_bias)) * (low_half(up) + __ldg(up_bias)),
                   silu(high_half(gate) + __ldg(gate_bias + 1)) * (high_half(up) + __ldg(up_bias + 1)));
}

// Product [T, 2F] (gate, then up) to silu(gate) up [T, F]; `count` = T F / 8 chunks, one a thread.
extern "C" __global__ void __launch_bounds__(kThreads)
    silu_mul(const uint4* __restrict__ product, const float* __restrict__ bias, uint4* __restrict__ out, u32 count) {
  constexpr u32 kRow = kIntermediate / 8;
  const u32 i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const u32 t = i / kRow, c = i % kRow;
  const uint4* row = product + static_cast<u64>(t) * (2 * kRow);
  const uint4 g = __ldcs(row + c), u = __ldcs(row + c + kRow);
  const float* gb = bias ? bias + 8 * c : nullptr;
  const float* ub = bias ? gb + kIntermediate : nullptr;
  uint4 y;
  y.x = gated_pair(g.x, u.x, gb, ub);
  y.y = gated_pair(g.y, u.y, bias ? gb + 2 : nullptr, ub + 2);
  y.z = gated_pair(g.z, u.z, bias ? gb + 4 : nullptr, ub + 4);
  y.w = gated_pair(g.w, u.w, bias ? gb + 6 : nullptr, ub + 6);
  out[i] = y;
}
