// Boxes of matrices in global memory, copied to and from shared memory by the copy engine (sm_90 on).
//
// Rows of a box are 128 bytes; 16-byte chunk c of its row r lies at c ^ r % 8. Of rows of 64 bytes it lies at c ^ r / 2 % 4.
// What lies outside of the matrix is read as zeros and not written.
#pragma once
#include "ptx/types.cuh"

// As the driver encodes it (jit/tensor_map.py); a kernel's parameter.
struct alignas(64) TensorMap {
  u64 words[16];
};

template <u32 kRowBytes = 128>
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "as wide as the swizzle");
  return row * kRowBytes + ((chunk ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4)) << 4);
}

// Completes `barrier` by the box's bytes.
__device__ __forceinline__ void load_box(u32 shared, const TensorMap& map, u32 column, u32 row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(shared), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
// The same in every block of the cluster that `blocks` has a bit for, at the same addresses.
__device__ __forceinline__ void load_box_for(u16 blocks, u32 shared, const TensorMap& map, u32 column, u32 row,
                                             u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(shared), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks) : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, u32 column, u32 row, u32 shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(column), "r"(row), "r"(shared) : "memory");
}

// The same for boxes beside each other, of a map that has them as its third dimension: all rows of the first one come first.
__device__ __forceinline__ void load_boxes(u32 shared, const TensorMap& map, u32 row, u32 box, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(shared), "l"(&map), "r"(0), "r"(row), "r"(box), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_boxes(const TensorMap& map, u32 row, u32 box, u32 shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
               ::"l"(&map), "r"(0), "r"(row), "r"(box), "r"(shared) : "memory");
}

// A box of five dimensions, its values one after the other; the first one has as many as the swizzle is wide.
struct BoxPlace {
  u32 at[5];
};
__device__ __forceinline__ void load_box(u32 shared, const TensorMap& map, const BoxPlace& place, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
      ::"r"(shared), "l"(&map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]),
      "r"(barrier) : "memory");
}

// Those of this thread since the last call are a group; all groups have read shared memory; all have been written.
__device__ __forceinline__ void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_boxes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8 × 8 matrices of 16-bit values into shared memory. Of lane l, word i is row l / 4 of matrix i, columns 2 (l % 4) and one
// more; `row` is where row l % 8 of matrix l / 8 goes.
__device__ __forceinline__ void store_matrices(u32 row, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(row), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
