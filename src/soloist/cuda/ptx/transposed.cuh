// Matrices of 16-bit values that change rows and columns on their way to shared memory (sm_90 on).
#pragma once
#include "ptx/types.cuh"

// Four 8 × 8 matrices. Of lane l, word i is row l / 4 of matrix i, columns 2 (l % 4) and one more; `column` is where column l % 8 of
// matrix l / 8 goes, 16 bytes.
__device__ __forceinline__ void store_matrices_transposed(u32 column, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(column), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
// Threads of the block that name the same barrier meet, so many of them, and see what all have stored before. Number 0 is
// __syncthreads'.
__device__ __forceinline__ void meet_at(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
