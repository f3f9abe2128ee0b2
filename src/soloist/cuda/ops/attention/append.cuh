// New keys and values join the cache: in a slot of the ring, and in the pool.
#pragma once
#include "tile/kv_codes.cuh"
#include "tile/kv_page.cuh"

// Those of queries `begin` … `end - 1` as they are, if they lie in the half page.
template <class M>
__device__ __forceinline__ void append_plain(const Context<M>& cx, u32 begin, u32 end, i32 start, u8* keys, u8* values) {
  constexpr u32 kAtOnce = 2, kValues = M::kHeadDim / 32;
#pragma unroll 1
  for (u32 c = begin; c < end; c += kAtOnce) {
    uint4 key[kAtOnce];
    u16 value[kAtOnce][kValues];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u16* fresh = reinterpret_cast<const u16*>(cx.shared.new_kv()) + min(c + i, end - 1) * 2 * M::kHeadDim;
      key[i] = reinterpret_cast<const uint4*>(fresh)[min(cx.lane, M::kHeadDim / 8 - 1)];
#pragma unroll
      for (u32 d = 0; d < kValues; ++d) value[i][d] = fresh[M::kHeadDim + d * 32 + cx.lane];
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const i32 row = cx.shared.control().position[min(c + i, end - 1)] - start;
      if (c + i >= end || row < 0 || row >= static_cast<i32>(kHalfPagePositions)) continue;
      if (cx.lane < M::kHeadDim / 8)
        reinterpret_cast<uint4*>(keys + row * M::kKeyRowBytes)[M::key_chunk(row, cx.lane)] = key[i];
#pragma unroll
      for (u32 d = 0; d < kValues; ++d)
        reinterpret_cast<u16*>(values)[M::value_place(row, d * 32 + cx.lane)] = value[i][d];
    }
  }
}

// Keys and values of queries `begin` … `end - 1` join a half page that starts at position `start`: in the
// ring's slot, or in the pool. Executed by a warp.
template <class M>
__device__ __forceinline__ void append(const Context<M>& cx, u32 begin, u32 end, i32 start, u8* half_page) {
  if constexpr (kHasCodes<M>) {
#pragma unroll 1
    for (u32 c = begin; c < end; ++c) {
      const i32 row = cx.shared.control().position[c] - start;
      if (row < 0 || row >= static_cast<i32>(kHalfPagePositions)) continue;
      store_rounded<M>(cx.shared.new_kv() + c * (4 * M::kHeadDim), half_page, row, cx.lane);
    }
  } else {
    append_plain(cx, begin, end, start, half_page, half_page + M::kHalfPageBytes);
  }
}

// New keys and values of the queries in `stored` go to the pool, where later rounds find them. A query to each warp.
template <class M>
__device__ __forceinline__ void store_fresh(const Context<M>& cx, u32 layer, u32 head, u32 stored) {
  if (!(stored >> cx.warp & 1)) return;
  const Control& control = cx.shared.control();
  const i32 sequence = control.sequence[cx.warp], position = control.position[cx.warp];
  const u32 page = position / kPagePositions, half_page = position % kPagePositions / kHalfPagePositions;
  const i32 id = cx.params.page_tables[sequence * cx.params.page_table_stride + page];
  u8* pool = reinterpret_cast<u8*>(cx.params.pool + half_page_offset<M>(cx.params.page_values, id, layer, head, half_page));
  append(cx, cx.warp, cx.warp + 1, position & ~static_cast<i32>(kHalfPagePositions - 1), pool);
}
