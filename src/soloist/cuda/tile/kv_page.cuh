// Where a head's keys and values lie in the pool's pages.
#pragma once
#include "tile/context.cuh"

template <class M>
__device__ __forceinline__ u64 granule_offset(u64 page_values, i32 page_id, u32 layer, u32 head, u32 granule) {
  return M::granule_place(page_values, page_id, layer, lane_here<M>() * M::kKvHeads + head, granule);
}
