// What a Laneformer's prefill does between matrix products beside kernels/prefill.cu: residual streams that hear of
// each other late, sums over lanes of all ranks, and where the lanes meet.
//
// Streams are fp32 [lanes of the rank, T, H], a lane's partial results 16-bit of the same shape. Sums over lanes go in
// the order of all lanes in fp32, so that they do not depend on the ranks. Defined by TorchLanes
// (prefill/lane_elementwise.py). Blocks have kThreads threads and one grid dimension.
#include "sync/meeting.cuh"
#include "tile/totals.cuh"

inline constexpr u32 kRow = kHidden / 4, kOwn = (kRow + kThreads - 1) / kThreads;  // fours; of them a thread's

static_assert(kHidden % 8 == 0, "16-byte accesses");

template <class Part>
struct Peers {
  Ranks ranks;
  const Part* parts[kRanks];  // lanes first
  float4* sums[kRanks];       // [T, H]
};

__device__ __forceinline__ float4 less(float4 a, float4 b) {
  return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ __forceinline__ float4 times(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
__device__ __forceinline__ uint4 words(float4 x) {
  return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
}
__device__ __forceinline__ float norm_scale(float squares, u32 turn) {
  return __frsqrt_rn(block_total(squares, turn) * (1.0f / kHidden) + kEpsilon);
}

// Streams of all lanes = rows of table [V, H]. One block a token.
extern "C" __global__ void __launch_bounds__(kThreads)
    embed_lanes(const uint4* __restrict__ table, const i32* __restrict__ ids, float4* __restrict__ streams) {
  const u64 source = static_cast<u64>(ids[blockIdx.x]) * (kHidden / 8);
  for (u32 i = threadIdx.x; i < kHidden / 8; i += kThreads) {
    const uint4 x = table[source + i];
    const float4 first = widened(make_uint2(x.x, x.y)), second = widened(make_uint2(x.z, x.w));
#pragma unroll
    for (u32 l = 0; l < kLanes; ++l) {
      float4* row = streams + (static_cast<u64>(l) * gridDim.x + blockIdx.x) * kRow;
      row[2 * i] = first;
      row[2 * i + 1] = second;
    }
  }
}

// What joins the streams; each pointer may be null.
struct News {
  const uint2* own;      // partial results of the lanes here
  const float4* sums;    // [T, H], over all lanes
  const uint2* summed;   // partial results that are summed instead, where all lanes are here
  const uint2* past;     // own part of the sum, which is not added again
  float own_scale;       // of `own` where there is no sum
  u32 weight_stride;     // fours from one lane's weights to the next's
};

// Streams += own + (sum - past); out = their RMS norms, and `exact` too where it is not null, unrounded. A block takes
// `together` lanes of a token, one after the other; blocks of a token follow each other.
struct Hearing {
  float4* streams;
  News news;
  const float4* weight;
  uint2* out;
  float4* exact;
  u32 tokens, together;
};

__device__ __forceinline__ void hear_token(const Hearing& hearing, u32 block) {
  float4 *const __restrict__ streams = hearing.streams, *const __restrict__ exact = hearing.exact;
  const News& news = hearing.news;
  const float4* const __restrict__ weight = hearing.weight;
  uint2* const __restrict__ out = hearing.out;
  const u32 tokens = hearing.tokens, together = hearing.together;
  const u32 parts = kLanes / together, first = block % parts * together;
  const u64 stride = static_cast<u64>(tokens) * kRow, row = static_cast<u64>(block / parts) * kRow;
  const bool has_sum = news.sums || news.summed, has_news = has_sum || news.own;
  float4 total[kOwn];
#pragma unroll
  for (u32 j = 0; j < kOwn; ++j) {
    const u32 i = threadIdx.x + j * kThreads;
    total[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i >= kRow) continue;
    if (news.summed) {
      uint2 part[kLanes];
#pragma unroll
      for (u32 l = 0; l < kLanes; ++l) part[l] = news.summed[l * stride + row + i];
      total[j] = widened(part[0]);
#pragma unroll
      for (u32 l = 1; l < kLanes; ++l) total[j] = sum(total[j], widened(part[l]));
    } else if (news.sums) {
      total[j] = news.sums[row + i];
    }
  }
#pragma unroll 1
  for (u32 l = first; l < first + together; ++l) {
    const u64 start = l * stride + row;
    float4 x[kOwn];
    uint2 own[kOwn], past[kOwn];
#pragma unroll
    for (u32 j = 0; j < kOwn; ++j) {  // all loads are under way before the first one is needed
      const u32 i = threadIdx.x + j * kThreads;
      x[j] = i < kRow ? streams[start + i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      own[j] = news.own && i < kRow ? news.own[start + i] : make_uint2(0, 0);
      past[j] = news.past && i < kRow ? news.past[start + i] : make_uint2(0, 0);
    }
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < kOwn; ++j) {
      const u32 i = threadIdx.x + j * kThreads;
      if (has_news && i < kRow) {
        const float4 others = less(total[j], widened(past[j]));
        x[j] = sum(x[j], has_sum ? sum(widened(own[j]), others) : times(widened(own[j]), news.own_scale));
        streams[start + i] = x[j];
      }
      squares += squares_of(x[j]);
    }
    const float scale = norm_scale(squares, l % 2);
#pragma unroll
    for (u32 j = 0; j < kOwn; ++j) {
      const u32 i = threadIdx.x + j * kThreads;
      if (i >= kRow) continue;
      const float4 norm = times(x[j], scale, __ldg(weight + l * news.weight_stride + i));
      out[start + i] = packed(norm);
      if (exact) exact[start + i] = norm;
    }
  }
}

// What a rank sums for all: `rows` rows from `first` on, of `tokens`; without `has_parts` nothing.
struct Due {
  u32 has_parts, first, rows, tokens;
};

// Waits for all ranks, gives all of them the sums over all lanes, and tells them. By `blocks` blocks, at least one.
__device__ __forceinline__ void give_sums(const Peers<uint4>& peers, const Due& due, u32 block, u32 blocks) {
  constexpr u32 kEights = kHidden / 8;
  if (threadIdx.x == 0) await_all(peers.ranks);
  __syncthreads();
  const u32 rows = due.has_parts ? due.rows : 0;
#pragma unroll 1
  for (u32 own = block; own < rows; own += blocks) {
    const u32 row = due.first + own;
    for (u32 i = threadIdx.x; i < kEights; i += kThreads) {
      uint4 part[kRanks * kLanes];
#pragma unroll
      for (u32 l = 0; l < kRanks * kLanes; ++l) {
        const u64 at = (static_cast<u64>(l % kLanes) * due.tokens + row) * kEights + i;
        part[l] = load_from_peers(peers.parts[l / kLanes] + at);
      }
      float4 low = widened(make_uint2(part[0].x, part[0].y)), high = widened(make_uint2(part[0].z, part[0].w));
#pragma unroll
      for (u32 l = 1; l < kRanks * kLanes; ++l) {
        low = sum(low, widened(make_uint2(part[l].x, part[l].y)));
        high = sum(high, widened(make_uint2(part[l].z, part[l].w)));
      }
#pragma unroll
      for (u32 r = 0; r < kRanks; ++r) {
        float4* sums = peers.sums[r] + static_cast<u64>(row) * kRow + 2 * i;
        store_to_peer(sums, words(low));
        store_to_peer(sums + 1, words(high));
      }
    }
  }
  tell_when_all_are_done(peers.ranks, blocks);
}

// One block for `together` lanes of a token.
extern "C" __global__ void __launch_bounds__(kThreads) hear(const __grid_constant__ Hearing hearing) {
  hear_token(hearing, blockIdx.x);
}
// One block a row, at least one.
extern "C" __global__ void __launch_bounds__(kThreads)
    sum_lanes(const __grid_constant__ Peers<uint4> peers, const Due due) {
  give_sums(peers, due, blockIdx.x, gridDim.x);
}
// Both side by side, the sums by the first `sum_blocks` blocks: one waits for links, the other for memory. The streams
// must not need these sums. Four blocks an SM: left to itself, the compiler aims at more and spills.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    hear_and_sum(const __grid_constant__ Hearing hearing, const __grid_constant__ Peers<uint4> peers, const Due due,
                 u32 sum_blocks) {
  if (blockIdx.x < sum_blocks) {
    give_sums(peers, due, blockIdx.x, sum_blocks);
  } else {
    hear_token(hearing, blockIdx.x - sum_blocks);
  }
}

// What the LM head reads of the last token, out [1, H]: the mean of all lanes' parts [lanes of a rank, 1, H], or with
// `weight` the RMS norm of their sum. One block, after all ranks have told.
extern "C" __global__ void __launch_bounds__(kThreads)
    meet_at_head(const __grid_constant__ Peers<float4> peers, const float4* __restrict__ weight,
                 uint2* __restrict__ out) {
  float4 x[kOwn];
  float squares = 0.0f;
#pragma unroll
  for (u32 j = 0; j < kOwn; ++j) {
    const u32 i = threadIdx.x + j * kThreads;
    if (i >= kRow) continue;
    float4 part[kRanks * kLanes];
#pragma unroll
    for (u32 l = 0; l < kRanks * kLanes; ++l) part[l] = load_from_peers(peers.parts[l / kLanes] + l % kLanes * kRow + i);
    x[j] = part[0];
#pragma unroll
    for (u32 l = 1; l < kRanks * kLanes; ++l) x[j] = sum(x[j], part[l]);
    squares += squares_of(x[j]);
  }
  const float scale = norm_scale(squares, 0);
#pragma unroll
  for (u32 j = 0; j < kOwn; ++j) {
    const u32 i = threadIdx.x + j * kThreads;
    if (i >= kRow) continue;
    out[i] = packed(weight ? times(x[j], scale, __ldg(weight + i)) : times(x[j], 1.0f / (kRanks * kLanes)));
  }
}
