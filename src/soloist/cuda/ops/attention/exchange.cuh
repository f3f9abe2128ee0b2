// What blocks of a KV head exchange: q, k and v, partial results of splits, and finished attention.
#pragma once
#include "tile/context.cuh"

template <class M>
inline constexpr u32 kHeadRows = (M::kGroup + 2) * M::kHeadDim;  // rows of q, k, v of one KV head

template <class L, class M>
__device__ __forceinline__ float* projected(const Context<M>& cx, u32 epoch, u32 query) {
  u8* now = exchange_copy<M>(cx.params, M::kWsProjected, M::kWsProjectedBytes, epoch);
  return reinterpret_cast<float*>(now) + query * (L::Qkv::kUnits * 8);
}

template <class M>
__device__ __forceinline__ float* partial_values(const Context<M>& cx, u32 epoch, u32 query, u32 query_head) {
  return reinterpret_cast<float*>(exchange_copy<M>(cx.params, M::kWsPartial, M::kWsPartialBytes, epoch)) +
         (query * M::kQueryHeads + query_head) * (M::kSplits * M::kHeadDim);
}
template <class M>
__device__ __forceinline__ float2* partial_stats(const Context<M>& cx, u32 epoch, u32 query, u32 query_head) {
  return reinterpret_cast<float2*>(exchange_copy<M>(cx.params, M::kWsPartialStats, M::kWsPartialStatsBytes, epoch)) +
         (query * M::kQueryHeads + query_head) * M::kSplits;
}

template <class M>
__device__ __forceinline__ u8* attended_operand(const Context<M>& cx, u32 epoch) {
  return exchange_copy<M>(cx.params, M::kWsAttended, M::kWsAttendedBytes, epoch);
}
