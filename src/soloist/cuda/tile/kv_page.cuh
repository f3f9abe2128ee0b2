// Where keys and values lie in the pool's pages.
#pragma once
#include "tile/context.cuh"

template <class M>
__device__ __forceinline__ u64 granule_offset(u64 page_values, i32 page_id, u32 layer, u32 head, u32 granule) {
  const u32 in_pool = lane_here<M>() * M::kKvHeads + head;
  return page_id * page_values + ((static_cast<u64>(layer) * M::kPoolKvHeads + in_pool) * 2 + granule) * (M::kGranuleBytes);
}
// 16-byte chunk of a key row; odd rows swap halves of 128 bytes so that two rows never share banks.
template <class M>
__device__ __forceinline__ u32 key_chunk(u32 row, u32 chunk) {
  return M::kHeadDim % 64 == 0 ? chunk ^ ((row & 1) << 2) : chunk;
}
