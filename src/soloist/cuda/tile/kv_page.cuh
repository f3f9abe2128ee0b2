// Where a head's keys and values lie in the pool's pages.
#pragma once
#include "tile/context.cuh"

template <class M>
__device__ __forceinline__ u64 half_page_offset(u64 page_values, i32 page_id, u32 layer, u32 head, u32 half_page) {
  return M::half_page_place(page_values, page_id, layer, lane_here<M>() * M::kKvHeads + head, half_page);
}
