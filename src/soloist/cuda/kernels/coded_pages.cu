// Prompts' keys and values into pages of codes, and back. Defined by `store` and `read` of prefill/elementwise.py.
//
// A warp has a head of a position. Blocks have kThreads threads and one grid dimension.
#include "tile/kv_codes.cuh"

inline constexpr u32 kWarps = kThreads / 32;
// Of a page, in 16 bits.
inline constexpr u64 kPageWords = u64{kLayers} * Pages::kPoolKvHeads * Pages::kPageHalves * Pages::kKvParts * Pages::kHalfPageBytes / 2;

struct Place {
  i32 position;  // of the chunk's first token
  i32 tokens;    // rows from here on are padding
};

// From the start of the pool to the half page of a position and head, in bytes.
__device__ __forceinline__ u64 half_page_of(const i32* page_table, u32 position, u32 layer, u32 head) {
  const i32 page = page_table[position / kPagePositions];
  return 2 * Pages::half_page_place(kPageWords, page, layer, head, position % kPagePositions / kHalfPagePositions);
}

// Keys and values [rows, K, D] in bf16 become what their codes stand for; codes of the chunk's tokens join the pool.
extern "C" __global__ void __launch_bounds__(kThreads)
    round_store(u16* __restrict__ keys, u16* __restrict__ values, u8* __restrict__ pool, const i32* __restrict__ page_table,
                const Place* __restrict__ where, u32 layer, i32 rows) {
  const u32 unit = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 t = unit / Pages::kPoolKvHeads, head = unit % Pages::kPoolKvHeads;
  if (t >= static_cast<u32>(rows)) return;
  const Place place = *where;
  const bool stores = static_cast<i32>(t) < place.tokens;
  const u32 position = place.position + t, row = position % kHalfPagePositions;
  u8* half_page = stores ? pool + half_page_of(page_table, position, layer, head) : nullptr;
  u8* scales = half_page + 2 * Pages::kCodeBytes;
  const u64 at = static_cast<u64>(unit) * Pages::kHeadDim;
  CodedHead<Pages> key, value;
  key.round(keys + at, lane);
  value.round(values + at, lane);
  key.store_numbers(keys + at, lane);
  value.store_numbers(values + at, lane);
  if (!stores) return;
  key.store_key(half_page, scales, row, lane);
  value.store_value(half_page + Pages::kCodeBytes, scales + Pages::kScales * Pages::kScaleRowBytes, row, lane);
}

// Keys and values [S, K, D] in bf16 of the positions up to the chunk's end, from the pool. With a window, from the block on that
// holds the first position which the chunk's first token sees.
extern "C" __global__ void __launch_bounds__(kThreads)
    gather_codes(const u8* __restrict__ pool, const i32* __restrict__ page_table, const Place* __restrict__ where, u32 layer,
                 i32 window, u16* __restrict__ keys, u16* __restrict__ values) {
  const Place place = *where;
  const u32 lane = threadIdx.x % 32;
  const i32 seen = window ? place.position + 1 - window : 0;
  u32 begin = seen > 0 ? seen : 0;
  begin -= begin % kBlockPositions;
  const u32 end = (place.position + place.tokens) * Pages::kPoolKvHeads;
  for (u32 unit = begin * Pages::kPoolKvHeads + blockIdx.x * kWarps + threadIdx.x / 32; unit < end; unit += gridDim.x * kWarps) {
    const u32 position = unit / Pages::kPoolKvHeads, head = unit % Pages::kPoolKvHeads, row = position % kHalfPagePositions;
    const u8* half_page = pool + half_page_of(page_table, position, layer, head);
    const u8* scales = half_page + 2 * Pages::kCodeBytes;
    const u64 at = static_cast<u64>(unit) * Pages::kHeadDim;
    CodedHead<Pages> key, value;
    key.load_key(half_page, scales, row, lane);
    value.load_value(half_page + Pages::kCodeBytes, scales + Pages::kScales * Pages::kScaleRowBytes, row, lane);
    key.store_numbers(keys + at, lane);
    value.store_numbers(values + at, lane);
  }
}
