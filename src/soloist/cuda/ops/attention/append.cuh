// New keys and values join the cache: in a slot of the ring, and in the pool.
#pragma once
#include "tile/kv_codes.cuh"
#include "tile/kv_page.cuh"

// A query's as they are, as row `row` of a half page.
template <class M>
__device__ __forceinline__ void append_plain(const Context<M>& cx, u32 query, u32 row, u8* keys, u8* values) {
  constexpr u32 kValues = M::kHeadDim / 32;
  const u16* fresh = reinterpret_cast<const u16*>(cx.shared.new_kv()) + query * (2 * M::kHeadDim);
  if (cx.lane < M::kHeadDim / 8)
    reinterpret_cast<uint4*>(keys + row * M::kKeyRowBytes)[M::key_chunk(row, cx.lane)] = reinterpret_cast<const uint4*>(fresh)[cx.lane];
  u16 value[kValues];
#pragma unroll
  for (u32 d = 0; d < kValues; ++d) value[d] = fresh[M::kHeadDim + d * 32 + cx.lane];
#pragma unroll
  for (u32 d = 0; d < kValues; ++d) reinterpret_cast<u16*>(values)[M::value_place(row, d * 32 + cx.lane)] = value[d];
}

// A query's key and value join a half page that begins at position `start`, if they lie in it: in the ring's slot, or in the pool.
// Executed by a warp.
template <class M>
__device__ __forceinline__ void append(const Context<M>& cx, u32 query, i32 start, u8* half_page) {
  at_hand(query);  // addresses are found here, not kept from where the warp's query was known
  const u32 row = static_cast<u32>(cx.shared.control().position[query] - start);
  if (row >= kHalfPagePositions) return;
  if constexpr (kHasCodes<M>) store_rounded<M>(cx.shared.new_kv() + query * (4 * M::kHeadDim), half_page, row, cx.lane);
  else append_plain(cx, query, row, half_page, half_page + M::kHalfPageBytes);
}

// Where a query's new key and value go in the pool, for later rounds to find. Asked for before they come: it depends on a page table.
template <class M>
__device__ __forceinline__ u8* place_in_pool(const Context<M>& cx, u32 layer, u32 head, u32 query) {
  const Control& control = cx.shared.control();
  const i32 position = control.position[query];
  const u32 page = position / kPagePositions, half_page = position % kPagePositions / kHalfPagePositions;
  const i32 id = cx.params.page_tables[control.sequence[query] * cx.params.page_table_stride + page];
  return reinterpret_cast<u8*>(cx.params.pool + half_page_offset<M>(cx.params.page_values, id, layer, head, half_page));
}
template <class M>
__device__ __forceinline__ void store_fresh(const Context<M>& cx, u32 query, u8* pool) {
  append(cx, query, cx.shared.control().position[query] & ~static_cast<i32>(kHalfPagePositions - 1), pool);
}
