// What blocks of a KV head exchange: q, k and v, partial results of splits, and finished attention.
#pragma once
#include "tile/context.cuh"

inline constexpr u32 kHeadRows = (kGroup + 2) * kHeadDim;  // rows of q, k, v of one KV head

__device__ __forceinline__ float* projected(const Context& cx, u32 epoch, u32 column) {
  return reinterpret_cast<float*>(turn(cx.params, kWsProjected, kWsProjectedBytes, epoch)) + column * (Qkv::kUnits * 8);
}

__device__ __forceinline__ float* partial_values(const Context& cx, u32 epoch, u32 column, u32 query_head) {
  return reinterpret_cast<float*>(turn(cx.params, kWsPartial, kWsPartialBytes, epoch)) +
         (column * kQueryHeads + query_head) * (kSplits * kHeadDim);
}
__device__ __forceinline__ float2* partial_stats(const Context& cx, u32 epoch, u32 column, u32 query_head) {
  return reinterpret_cast<float2*>(turn(cx.params, kWsPartialStats, kWsPartialStatsBytes, epoch)) +
         (column * kQueryHeads + query_head) * kSplits;
}

__device__ __forceinline__ u8* attended_operand(const Context& cx, u32 epoch) {
  return turn(cx.params, kWsAttended, kWsAttendedBytes, epoch);
}
