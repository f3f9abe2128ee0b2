// Which token follows from the logits of every query: docs/sampling.md, bit for bit, by all blocks.
//
// Each block owns the logits of consecutive token ids, ascending with the block. The blocks exchange
// 16-byte records of their best and, for filters, histograms of integers, so that no result depends
// on an order of arrival. Warps of a block share the queries among them. What the file must not know:
// the model, and how a grid barrier is built.
//
// `Grid` is given by the kernel. All kConsumerThreads threads of a block call its methods, or all of a warp:
//   void sync()        barrier over all blocks and threads; writes before it are seen after it (gpu scope)
//   void block_sync()  barrier over the consumer threads of this block
//   void acquire()     after a record was read: what its block had written before it is seen
//   u64 from_lane(u64 value, u32 lane)            the value of that lane of the warp
//   u32 warp_max(u32 value), warp_add(u32 value)  over the warp
//   u32 block(), num_blocks(), thread()           num_blocks() <= kNumBlocks
//   u32 num_unseen(u32 query, u32 id)             times that drafts up to the query's own are this id, which `seen` lacks
//   u32 num_records()                             of a query's exchange: of all blocks, the first of which speaks for the host
//   void publish(SampleScratch&, u32 copy, u32 query, uint4)       the block's record
//   uint4 record(const SampleScratch&, u32 copy, u32 query, u32 n)  the n-th, if it has come
//
// spec.cuh gives kNumBlocks, kConsumerThreads (32 times a power of two), kMaxQueries, the
// constants in namespace sampling, SampleParams, SampleStep and their flags (sampling_header.py).
//
// Barriers over the grid, shared by all queries: none without top_k and top_p; otherwise one for each
// digit of the slowest query (mostly 1 to 3; at most 9, or 17 with both top_k and top_p). Exchanges of records:
// one, and one more for filters; seldom another, where a bound leaves open which noise decides.
//
// Loops stay rolled, or the code would be several times as large and need more registers.
#pragma once
#include "ptx/memory.cuh"
#include "tile/elementary.cuh"

struct SampleArgs {
  const SampleParams* params;  // [queries]
  const SampleStep* steps;     // [queries]
  const float* logits;         // [queries][stride]; this block's ids [row_begin, row_end) are read
  float* adjusted;             // [queries][stride]; for queries with a mask, penalties, bias or ban; may be logits
  const u32* seen;             // [rows][stride]: times in the output, kSeenInPrompt
  const u32* list_ids;         // token ids of all ban and bias lists
  const float* list_values;    // biases, at the same places
  u32 stride;
  u32 row_begin, row_end;      // without rows of padding
  u32 queries;                 // 1 ... kMaxQueries
  u32 note;                    // 0 or 1; of block 0: reaches all blocks as SampleShared::note
  const u32* masks;            // host memory, [queries][mask_stride]: bits of the ids that may be chosen
  u32 mask_stride;
  u32 masked;                  // queries to which they apply: a bit each
};

enum SampleStatus : u32 { kSampled = 0, kBadLogits = 1 };

struct SampleResult {
  u32 token;   // 0 where status is kBadLogits
  u32 status;  // SampleStatus
  float best;  // the largest score, with noise where nothing is filtered; NaN or infinite where status is kBadLogits
};

constexpr u32 kSampleDigitBits = 10;
constexpr u32 kSampleBins = 1u << kSampleDigitBits;
constexpr u32 kSampleGapDigits = 6, kSampleIdDigits = 3;

struct __align__(16) SampleBin {
  u64 weight;
  u32 count;
  u32 unused;
};

// Tokens by a digit; the sums of 32 neighbouring bins tell a warp where to look.
struct SampleHistogram {
  static constexpr u32 kParts = kSampleBins / 32;
  SampleBin bins[kSampleBins];
  SampleBin parts[kParts];
};

// Global memory, zeroed by the host at launch.
//
// `first` changes its copy between calls and `more` between passes, so that a histogram is zeroed while
// nobody reads or adds: a copy is zeroed after all blocks have published a record or met at a barrier
// since it was read, and one barrier before its next use. `records` alternates for the same reason.
struct __align__(128) SampleScratch {
  SampleHistogram first[2][kMaxQueries];
  SampleHistogram more[3][kMaxQueries];
  uint4 records[2][kMaxQueries][kNumBlocks];
};

// Which copy of the scratch is next. Zero at launch, equal in all threads, kept from call to call.
struct SampleEpochs {
  u32 exchanges = 0;
  u32 searches = 0;
  u32 passes = 0;
};

// What tokens are ranked by, best first: the gap to the best score, then the id. No two are equal.
struct RankKey {
  u64 gap;
  u32 id;
};

// The border of a query's kept tokens, found digit by digit from the leading one of the rank key.
enum SampleStage : u32 {
  kSeekCount,   // top_k
  kSeekShare,   // top_p: the total is not known yet
  kSeekWeight,  // top_p
  kSought,
};
struct SampleSearch {
  RankKey prefix;    // digits found so far; what begins with it or with a lower one is kept
  u64 needed;        // count or weight that the kept tokens must reach
  u64 above_weight;  // of tokens with a lower prefix
  u32 above_count;
  u32 digits;        // in prefix
  u32 stage;
};

// What a query's next exchange is about, the same in all blocks.
enum SamplePass : u32 {
  kFindLargest,    // score
  kFindNoisy,      // score with noise, of all tokens
  kFindNoisyKept,  // of those that filters keep
  kFindCertain,    // of those whose noise bounds left open
  kFound,
};

// Shared memory, 16-byte aligned, no initial value. `results` and `note` are the outcome.
struct SampleShared {
  // Weights in two halves, since 32 bits are added at once: sums of kMostIds of them fit.
  struct Bins {
    u32 count[kSampleBins], low[kSampleBins], high[kSampleBins];
  };
  static constexpr u32 kMostIds = 1u << 15;
  struct Proposal {
    u64 choice;
    u32 other;  // a key: of the largest score, or of the largest sum of a score and a bound that `choice` may hide
  };
  static constexpr u32 kMaskWords = sizeof(Bins) / 4;
  union {
    u32 mask[kMaskWords];  // of one query: words of this block's ids
    Bins bins;
  };
  Proposal proposals[kMaxQueries][kConsumerThreads / 32];  // of the warps that serve a query
  SampleSearch search[kMaxQueries];
  u32 pass[kMaxQueries];   // SamplePass
  float sum[kMaxQueries];  // score and noise of the choice so far
  u32 note;
  SampleResult results[kMaxQueries];
};
static_assert(sizeof(SampleShared) <= kSampleSharedBytes, "what the plan sets aside");

// Which tokens are kept follows from the scores of all.
__device__ __forceinline__ bool filters(const SampleParams& p) {
  return !(p.flags & kSampleGreedy) && (p.top_k | p.top_p_steps | p.min_p_steps);
}
// A token joined the output of a history; by one thread of every block, or of its owner alone.
__device__ __forceinline__ void record_token(u32* seen_row, u32 id, u32 row_begin, u32 row_end) {
  if (id >= row_begin && id < row_end) seen_row[id] += 1;
}

template <class Grid>
class TokenChoice {
 public:
  __device__ __forceinline__ TokenChoice(Grid& grid, const SampleArgs& args, SampleScratch& scratch,
                                         SampleShared& shared, SampleEpochs& epochs)
      : grid(grid), args(args), scratch(scratch), shared(shared), epochs(epochs), t(grid.thread()),
        lane(t % 32), warp(t / 32), team_bits(bits_of_team(args.queries)), row_begin(args.row_begin),
        row_end(args.row_end), filtered(queries_that([&](u32 c) { return has_filter(c); })),
        adjusted(queries_that([&](u32 c) { return needs_adjusting(c); })) {}

  // Of a single query whose tokens nothing changes or filters.
  struct Plain {};
  __device__ __forceinline__ TokenChoice(Plain, Grid& grid, const SampleArgs& args, SampleScratch& scratch, SampleShared& shared,
                                         SampleEpochs& epochs)
      : grid(grid), args(args), scratch(scratch), shared(shared), epochs(epochs), t(grid.thread()), lane(t % 32), warp(t / 32),
        team_bits(kBitsOfAll), row_begin(args.row_begin), row_end(args.row_end), filtered(0), adjusted(0) {}

  // `kAtOnce`: of each lane's fours of tokens.
  template <u32 kAtOnce>
  __device__ __forceinline__ void run_plain() {
    propose(0, noisy<false, kAtOnce>(0));
    exchange([](u32) { return kFindNoisy; });
#pragma unroll 1
    while (shared.pass[0] != kFound) {
      propose(0, certain(0));
      exchange([](u32) { return kFindCertain; });
    }
  }

  __device__ __forceinline__ void run() {
    adjust();
    bool is_first = true, is_bordered = false;
    u32 open;
    // A loop, for one copy of the code.
#pragma unroll 1
    do {
      const auto pass_of = [&](u32 c) {
        return !is_first ? shared.pass[c] : is_greedy(c) || is_filtered(c) ? kFindLargest : kFindNoisy;
      };
      if (!is_first && filtered && !is_bordered) {
        find_borders();
        is_bordered = true;
      }
      for_own_queries([&](u32 c) {
        const u32 pass = pass_of(c);
        if (pass == kFindLargest) propose(c, largest(c));
        else if (pass == kFindNoisy) propose(c, noisy<false>(c));
        else if (pass == kFindNoisyKept) propose(c, noisy<true>(c));
        else if (pass == kFindCertain) propose(c, certain(c));
      });
      exchange(pass_of);
      is_first = false;
      open = queries_that([&](u32 c) { return shared.pass[c] != kFound; });
    } while (open);
  }

 private:
  static constexpr u32 kThreads = kConsumerThreads, kWarps = kThreads / 32;
  static constexpr u32 kBitsOfAll = [] {
    u32 bits = 0;
    while (2u << bits <= kWarps) ++bits;
    return bits;
  }();
  static_assert((kWarps & (kWarps - 1)) == 0 && kThreads % 32 == 0 && kSampleBins % kThreads == 0 && kThreads >= kMaxQueries, "threads of a block");
  using Proposal = SampleShared::Proposal;

  Grid& grid;
  const SampleArgs& args;
  SampleScratch& scratch;
  SampleShared& shared;
  SampleEpochs& epochs;
  const u32 t, lane, warp;
  const u32 team_bits;  // log2 of the warps that serve a query together, a team
  const u32 row_begin, row_end;
  const u32 filtered, adjusted;  // queries, a bit each

  static __device__ __forceinline__ u32 bits_of_team(u32 queries) {
    u32 bits = 0;
#pragma unroll 1
    while ((queries << (bits + 1)) <= kWarps) ++bits;
    return bits;
  }

  // Queries -------------------------------------------------------------------------------------

  // Of which something holds, a bit each. By a warp, whose lanes look at one each.
  template <class Holds>
  __device__ __forceinline__ u32 queries_that(const Holds& holds) const {
    static_assert(kMaxQueries <= 32, "a lane for each query");
    return grid.warp_add(lane < args.queries && holds(lane) ? 1u << lane : 0);
  }
  __device__ __forceinline__ bool is_filtered(u32 c) const { return filtered >> c & 1; }
  __device__ __forceinline__ bool is_adjusted(u32 c) const { return adjusted >> c & 1; }
  __device__ __forceinline__ bool is_greedy(u32 c) const { return args.params[c].flags & kSampleGreedy; }
  __device__ __forceinline__ bool has_filter(u32 c) const { return filters(args.params[c]); }
  __device__ __forceinline__ bool is_banned(u32 c) const {
    return args.steps[c].num_output < args.params[c].min_tokens && args.params[c].ban_count;
  }
  __device__ __forceinline__ bool needs_adjusting(u32 c) const {
    const SampleParams& p = args.params[c];
    return (p.flags & kSamplePenalties) || p.bias_count || is_banned(c) || is_masked(c);
  }
  __device__ __forceinline__ bool is_masked(u32 c) const { return args.masked >> c & 1; }
  __device__ __forceinline__ const float* scores(u32 c) const {
    return (is_adjusted(c) ? args.adjusted : args.logits) + static_cast<u64>(c) * args.stride;
  }
  __device__ __forceinline__ bool is_own(u32 id) const { return id >= row_begin && id < row_end; }
  // By a team of warps: each query that it serves.
  template <class Use>
  __device__ __forceinline__ void for_own_queries(const Use& use) const {
#pragma unroll 1
    for (u32 c = warp >> team_bits; c < args.queries; c += kWarps >> team_bits) use(c);
  }
  // By a query's team: this block's tokens, four neighbours to a lane, with their scores before temperature. `kAtOnce`
  // fours side by side hide what each waits for; the last ones may be no tokens of this block.
  template <u32 kAtOnce = 1, class Use>
  __device__ __forceinline__ void for_own_quads(u32 c, const Use& use) const {
    const float* x = scores(c);
    const u32 end = (row_end + 3) / 4, stride = 32u << team_bits;
    u32 quad = row_begin / 4 + (t & (stride - 1));
    Quad next[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) next[i] = load_quad(x, quad + i * stride);
#pragma unroll 1
    for (; quad < end; quad += kAtOnce * stride) {
      Quad scores[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        scores[i] = next[i];
        next[i] = load_quad(x, quad + (kAtOnce + i) * stride);  // it comes while these are used
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) use(quad + i * stride, scores[i]);
    }
  }
  // x / temperature of each; most often by 1, which takes no time.
  static __device__ __forceinline__ float scaled(float x, float temperature) {
    return temperature == 1.0f ? x : exact::div(x, temperature);
  }
  struct Quad {
    float x[4];

    // For loops over k that stay rolled: nothing may be addressed by k.
    __device__ __forceinline__ float get(u32 k) const { return k == 0 ? x[0] : k == 1 ? x[1] : k == 2 ? x[2] : x[3]; }
  };
  __device__ __forceinline__ Quad load_quad(const float* x, u32 quad) const {
    Quad loaded;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) loaded.x[k] = is_own(4 * quad + k) ? x[4 * quad + k] : 0.0f;
    return loaded;
  }

  // Warps ---------------------------------------------------------------------------------------

  __device__ __forceinline__ u64 warp_max(u64 value) const {
    const u32 own = static_cast<u32>(value >> 32), high = grid.warp_max(own);
    return static_cast<u64>(high) << 32 | grid.warp_max(own == high ? static_cast<u32>(value) : 0);
  }
  // Of this lane and those before it.
  __device__ __forceinline__ u64 warp_sum(u64 value) const {
#pragma unroll 1
    for (u32 o = 1; o < 32; o *= 2) {
      const u64 before = grid.from_lane(value, lane >= o ? lane - o : lane);
      value += lane >= o ? before : 0;
    }
    return value;
  }
  static __device__ __forceinline__ u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }

  // Masks, penalties, bias, ban --------------------------------------------------------------------------

  __device__ __forceinline__ void adjust() {
    if (!adjusted) return;
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) {
      if (!is_adjusted(c)) continue;
      if (is_masked(c)) load_mask(c);
      penalize(c);
    }
    grid.block_sync();
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) {
      const SampleParams& p = args.params[c];
      float* row = args.adjusted + static_cast<u64>(c) * args.stride;
#pragma unroll 1
      for (u32 i = t; i < p.bias_count; i += kThreads) {
        const u32 id = args.list_ids[p.bias_begin + i];
        if (is_own(id)) row[id] = exact::add(row[id], args.list_values[p.bias_begin + i]);
      }
    }
    grid.block_sync();
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) {
      if (!is_banned(c)) continue;
      const SampleParams& p = args.params[c];
      float* row = args.adjusted + static_cast<u64>(c) * args.stride;
#pragma unroll 1
      for (u32 i = t; i < p.ban_count; i += kThreads) {
        const u32 id = args.list_ids[p.ban_begin + i];
        if (is_own(id)) row[id] = __uint_as_float(0xFF800000u);
      }
    }
    grid.block_sync();
  }

  // This block's part of a query's mask to shared memory, each word on its way at the same time.
  __device__ __forceinline__ void load_mask(u32 c) {
    const u32 first = row_begin / 32, end = (row_end + 31) / 32;
    const u32* words = args.masks + static_cast<u64>(c) * args.mask_stride;
    grid.block_sync();  // the last query's is read
#pragma unroll 1
    for (u32 i = first + t; i < end; i += kThreads) shared.mask[i - first] = load_host(words + i);
    grid.block_sync();
  }
  __device__ __forceinline__ bool is_allowed(u32 c, u32 id) const {
    return !is_masked(c) || (shared.mask[id / 32 - row_begin / 32] >> id % 32 & 1);
  }

  __device__ __forceinline__ void penalize(u32 c) {
    const SampleParams& p = args.params[c];
    const bool has_penalties = p.flags & kSamplePenalties;
    const float* from = args.logits + static_cast<u64>(c) * args.stride;
    float* to = args.adjusted + static_cast<u64>(c) * args.stride;
    const u32* history = args.seen + static_cast<u64>(p.history) * args.stride;
#pragma unroll 1
    for (u32 id = row_begin + t; id < row_end; id += kThreads) {
      float x = is_allowed(c, id) ? from[id] : __uint_as_float(0xFF800000u);
      const u32 seen = has_penalties ? history[id] + grid.num_unseen(c, id) : 0;
      if (seen) {
        if (p.repetition_penalty != 1.0f)
          x = x < 0.0f ? exact::mul(x, p.repetition_penalty) : exact::div(x, p.repetition_penalty);
        const u32 count = seen & ~kSeenInPrompt;
        if (count) {
          x = exact::sub(x, exact::mul(p.frequency_penalty, __uint2float_rn(count)));
          x = exact::sub(x, p.presence_penalty);
        }
      }
      to[id] = x;
    }
  }

  // The best token, over the block and over the grid --------------------------------------------

  // The largest value and, where values are equal, the lowest id; 0 is no token.
  static __device__ __forceinline__ u64 candidate(float value, u32 id) {
    return static_cast<u64>(exact::order_key(value)) << 32 | ~id;
  }
  static constexpr u32 kNan = ~0u;  // the key of a NaN, which is above everything
  static __device__ __forceinline__ u32 id_of(u64 candidate) { return ~static_cast<u32>(candidate); }
  static __device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

  // Of a lane's tokens the one with the largest score.
  __device__ __forceinline__ Proposal largest(u32 c) const {
    const float temperature = is_greedy(c) ? 1.0f : args.params[c].temperature;
    u64 choice = 0;
    for_own_quads(c, [&](u32 quad, const Quad& scores) {
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const u32 id = 4 * quad + k;
        if (is_own(id)) choice = larger(choice, candidate(scaled(scores.x[k], temperature), id));
      }
    });
    return {choice, static_cast<u32>(choice >> 32)};
  }

  // Of a query and a round. One Philox block serves four ids.
  struct Noise {
    u32 seed_low, seed_high, position_low, position_high;

    __device__ __forceinline__ exact::Words words(u32 quad) const {
      return exact::philox({quad, position_low, position_high, sampling::kDomainTokenChoice}, seed_low, seed_high);
    }
    static __device__ __forceinline__ u32 word(const exact::Words& words, u32 k) {
      return k == 0 ? words.x : k == 1 ? words.y : k == 2 ? words.z : words.w;
    }
    // Never less than the word's noise by more than kSlack: -ln(-ln(1 - v)) <= -ln(v), with a quick logarithm.
    static __device__ __forceinline__ float bound(u32 word) {
      constexpr float kLn2 = 0.693147181f;
      return kLn2 * (32.0f - __log2f(__uint2float_rn(word) + 0.5f));
    }
  };
  __device__ __forceinline__ Noise noise_of(u32 c) const {
    const SampleParams& p = args.params[c];
    const SampleStep& step = args.steps[c];
    return {p.seed_low, p.seed_high, step.position_low, step.position_high};
  }
  // Whether a sum with a bound may hide one that is no less than `sum`: both may be off, by far less than is allowed here.
  static __device__ __forceinline__ bool comes_near(float bound, float sum) {
    return !(bound + (1e-3f + fabsf(bound) * 1e-6f) < sum);
  }

  // The tokens among which noise decides.
  struct Kept {
    SampleSearch search;
    u64 least_weight;
  };
  __device__ __forceinline__ Kept kept_of(u32 c) const {
    return {shared.search[c],
            static_cast<u64>(args.params[c].min_p_steps) << (sampling::kWeightBits - sampling::kFractionBits)};
  }
  __device__ __forceinline__ bool stays(bool is_filtered, u32 c, const Kept& kept, u32 id, float score) const {
    if (!is_filtered) return is_own(id);
    const float g = exact::sub(score, shared.results[c].best);
    return is_own(id) && is_kept(rank_key(g, id), kept.search) &&
           (!kept.least_weight || exact::integer_weight(g) >= kept.least_weight);
  }
  // Of a lane's tokens the one whose sum of score and bound is highest, with the score and noise that it has; and the second
  // highest sum with a bound. A bound takes a tenth of the time of noise. The choice of all blocks stands if no
  // other sum with a bound comes near it.
  template <bool kIsFiltered, u32 kAtOnce = kIsFiltered ? 1 : 2>
  __device__ __forceinline__ Proposal noisy(u32 c) const {
    const float temperature = args.params[c].temperature;
    const Noise noise = noise_of(c);
    Kept kept{};
    if constexpr (kIsFiltered) kept = kept_of(c);
    const float none = __uint_as_float(0xFF800000u);
    float highest = none, second = none, score_of_highest = 0.0f;
    u32 id_of_highest = 0, word_of_highest = 0;
    bool is_nan = false;
    for_own_quads<kAtOnce>(c, [&](u32 quad, Quad scores) {
      const exact::Words words = noise.words(quad);
#pragma unroll
      for (u32 k = 0; k < 4; ++k) scores.x[k] = scaled(scores.x[k], temperature);
      // Without a branch where nothing is filtered: then the four are computed side by side.
#pragma unroll(kIsFiltered ? 1 : 4)
      for (u32 k = 0; k < 4; ++k) {
        const u32 id = 4 * quad + k, word = Noise::word(words, k);
        const bool counts = stays(kIsFiltered, c, kept, id, scores.get(k));
        const float score = counts ? scores.get(k) : none, bound = score + Noise::bound(word);
        is_nan = is_nan || score != score;
        const bool is_highest = bound > highest;
        second = fmaxf(second, is_highest ? highest : bound);
        highest = is_highest ? bound : highest;
        score_of_highest = is_highest ? score : score_of_highest;
        id_of_highest = is_highest ? id : id_of_highest;
        word_of_highest = is_highest ? word : word_of_highest;
      }
    });
    const float sum = exact::add(score_of_highest, exact::gumbel_of_word(word_of_highest));
    return {highest > none ? candidate(sum, id_of_highest) : 0, is_nan ? kNan : exact::order_key(second)};
  }
  // Of a lane's tokens whose sum with a bound comes near the choice so far, the one with the largest sum with its noise.
  __device__ __forceinline__ Proposal certain(u32 c) const {
    const float temperature = args.params[c].temperature, least = shared.sum[c];
    const Noise noise = noise_of(c);
    const Kept kept = kept_of(c);
    u64 choice = 0;
    for_own_quads(c, [&](u32 quad, const Quad& scores) {
      const exact::Words words = noise.words(quad);
#pragma unroll 1
      for (u32 k = 0; k < 4; ++k) {
        const u32 id = 4 * quad + k, word = Noise::word(words, k);
        const float score = scaled(scores.get(k), temperature);
        if (!stays(is_filtered(c), c, kept, id, score) || !comes_near(score + Noise::bound(word), least)) continue;
        choice = larger(choice, candidate(exact::add(score, exact::gumbel_of_word(word)), id));
      }
    });
    return {choice, 0};
  }
  // A lane's proposal; the warp's is kept for `exchange`.
  __device__ __forceinline__ void propose(u32 c, Proposal own) {
    own.other = grid.warp_max(own.other);
    own.choice = warp_max(own.choice);
    if (lane == 0) shared.proposals[c][warp & ((1u << team_bits) - 1)] = own;
  }

  // Every block's proposals to all blocks, each with its own flag, of the queries that are not found; one lane settles
  // a query. Ends with a barrier.
  template <class PassOf>
  __device__ __forceinline__ void exchange(const PassOf& pass_of) {
    constexpr u32 kEach = (kNumBlocks + 31) / 32;  // of a lane, at a time
    const u32 flag = ++epochs.exchanges << 1, copy = epochs.exchanges & 1, count = grid.num_records();
    grid.block_sync();
#pragma unroll 1
    for (u32 c = warp; c < args.queries; c += kWarps) {
      if (pass_of(c) == kFound) continue;
      const Proposal own = lane < 1u << team_bits ? shared.proposals[c][lane] : Proposal{};
      const u32 other = grid.warp_max(own.other);
      const u64 choice = warp_max(own.choice);
      if (lane == 0)
        grid.publish(scratch, copy, c, make_uint4(other, static_cast<u32>(choice), static_cast<u32>(choice >> 32), flag | args.note));
    }
#pragma unroll 1
    for (u32 c = warp; c < args.queries; c += kWarps) {
      const u32 pass = pass_of(c);
      if (pass == kFound) continue;
      u32 other = 0, note = 0;
      u64 choice = 0;
#pragma unroll 1
      for (u32 begin = 0; begin < count; begin += 32 * kEach) {
        uint4 record[kEach] = {};
        bool ready;
        do {
          ready = true;
#pragma unroll
          for (u32 i = 0; i < kEach; ++i) {
            const u32 n = begin + lane + 32 * i;
            if (n >= count) continue;
            record[i] = grid.record(scratch, copy, c, n);
            ready = ready && (record[i].w | 1) == (flag | 1);
          }
        } while (!ready);
        if (begin == 0) note = record[0].w & 1;
#pragma unroll
        for (u32 i = 0; i < kEach; ++i) {
          other = other > record[i].x ? other : record[i].x;
          choice = larger(choice, static_cast<u64>(record[i].z) << 32 | record[i].y);
        }
      }
      grid.acquire();
      other = grid.warp_max(other);
      choice = warp_max(choice);
      if (lane == 0) settle(c, pass, other, choice);
      if (lane == 0 && c == 0 && pass <= kFindNoisy) shared.note = note;
    }
    grid.block_sync();
  }
  // The outcome of a pass, and which one follows.
  __device__ __forceinline__ void settle(u32 c, u32 pass, u32 other, u64 choice) {
    SampleResult& result = shared.results[c];
    const float value = choice ? exact::value_of_key(static_cast<u32>(choice >> 32)) : __uint_as_float(0xFF800000u);
    u32 next = kFound;
    if (pass <= kFindNoisy) {
      const float best = other == kNan ? exact::value_of_key(kNan) : value;
      const bool is_fine = exact::is_finite(best);
      result = {is_fine ? id_of(choice) : 0, is_fine ? kSampled : kBadLogits, best};
      if (is_fine && is_filtered(c)) next = kFindNoisyKept;
      else if (is_fine && pass == kFindNoisy && comes_near(exact::value_of_key(other), value)) next = kFindCertain;
    } else {
      result.token = id_of(choice);
      if (pass == kFindNoisyKept && comes_near(exact::value_of_key(other), value)) next = kFindCertain;
    }
    shared.sum[c] = value;
    shared.pass[c] = next;
  }

  // Filters ---------------------------------------------------------------------------------------

  // Ascending from the best token; equal for equal gaps only, which are what filters.py ranks by. In
  // units of 2^-25 below 32, which spreads the tokens that matter over the first digits; then the
  // gap's bits for what is equal so far. Within one unit those differ in their low 30 bits only.
  static constexpr u32 kUnitBits = 30, kBitsLeft = 30;
  static constexpr float kUnits = 33554432.0f;
  static_assert(kUnitBits + kBitsLeft == kSampleGapDigits * kSampleDigitBits, "digits of a gap");
  static __device__ __forceinline__ RankKey rank_key(float gap, u32 id) {
    const u32 bits = __float_as_uint(gap) & 0x7FFFFFFFu;
    const u32 units = __float2uint_rz(exact::mul(__uint_as_float(bits), kUnits));
    const u64 high = min_u32(units, (1u << kUnitBits) - 1);
    return {high << kBitsLeft | (bits & ((1u << kBitsLeft) - 1)), id};
  }
  // Its first digits: of the gap, then of the id.
  static __device__ __forceinline__ RankKey leading(const RankKey& key, u32 digits) {
    const u32 of_gap = min_u32(digits, kSampleGapDigits), of_id = digits - of_gap;
    return {key.gap >> (kSampleGapDigits - of_gap) * kSampleDigitBits,
            key.id >> (kSampleIdDigits - of_id) * kSampleDigitBits};
  }
  static __device__ __forceinline__ bool begins_with(const RankKey& key, const SampleSearch& search) {
    const RankKey own = leading(key, search.digits);
    return own.gap == search.prefix.gap && own.id == search.prefix.id;
  }
  static __device__ __forceinline__ bool is_kept(const RankKey& key, const SampleSearch& search) {
    const RankKey own = leading(key, search.digits);
    return own.gap < search.prefix.gap || (own.gap == search.prefix.gap && own.id <= search.prefix.id);
  }
  // The digit after the first ones.
  static __device__ __forceinline__ u32 digit_after(const RankKey& key, u32 digits) {
    const RankKey own = leading(key, digits + 1);
    return (digits < kSampleGapDigits ? static_cast<u32>(own.gap) : own.id) % kSampleBins;
  }
  __device__ __forceinline__ float gap(u32 c, float x) const {
    return exact::sub(scaled(x, args.params[c].temperature), shared.results[c].best);
  }
  // The least integer of at least steps / 2^24 of the total.
  static __device__ __forceinline__ u64 share(u32 steps, u64 total) {
    const u64 mask = (1u << sampling::kFractionBits) - 1;
    return steps * (total >> sampling::kFractionBits) +
           ((steps * (total & mask) + mask) >> sampling::kFractionBits);
  }

  __device__ __forceinline__ bool is_open(u32 c) const { return shared.search[c].stage != kSought; }
  __device__ __forceinline__ bool any_open() const {
    bool any = false;
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) any |= is_open(c);
    return any;
  }

  __device__ __forceinline__ bool is_chosen_filtered(u32 c) const {
    return is_filtered(c) && shared.results[c].status == kSampled;
  }
  __device__ __forceinline__ void find_borders() {
    if (t < args.queries) {
      const SampleParams& p = args.params[t];
      SampleSearch search{};
      search.needed = p.top_k;
      search.stage = !is_chosen_filtered(t) ? kSought : p.top_k ? kSeekCount : p.top_p_steps ? kSeekShare : kSought;
      shared.search[t] = search;
    }
    grid.block_sync();
    if (any_open()) {
      auto& first = scratch.first[epochs.searches & 1];
      zero(scratch.first[++epochs.searches & 1]);
      pass(first, first);
      while (any_open()) {
        auto& more = scratch.more[epochs.passes % 3];
        epochs.passes = (epochs.passes + 1) % 3;
        zero(scratch.more[epochs.passes]);
        pass(first, more);
      }
    }
  }

  __device__ __forceinline__ void zero(SampleHistogram (&histograms)[kMaxQueries]) {
    uint4* all = reinterpret_cast<uint4*>(histograms);
    const u32 stride = grid.num_blocks() * kThreads;
#pragma unroll 1
    for (u32 i = grid.block() * kThreads + t; i < sizeof histograms / 16; i += stride)
      all[i] = make_uint4(0, 0, 0, 0);
  }

  // One digit of every open query. `first` is kept for top_p, which starts over after top_k.
  __device__ __forceinline__ void pass(SampleHistogram (&first)[kMaxQueries], SampleHistogram (&next)[kMaxQueries]) {
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c)
      if (is_open(c) && !shared.search[c].digits) count_all(c, next[c]);
    for_own_queries([&](u32 c) {
      if (is_open(c) && shared.search[c].digits) count_border(c, next[c]);
    });
    grid.sync();
#pragma unroll 1
    for (u32 c = warp; c < args.queries; c += kWarps)
      if (is_open(c)) narrow(c, first[c], next[c]);
    grid.block_sync();
  }

  static __device__ __forceinline__ void add(SampleBin& bin, u32 count, u64 weight) {
    atomicAdd(&bin.count, count);
    if (weight) atomicAdd(&bin.weight, weight);
  }
  static __device__ __forceinline__ u64 weight_of(u32 low, u32 high) { return (static_cast<u64>(high) << 16) + low; }
  // Counts and weights of all tokens by their first digit, summed in the block first: many share a bin.
  __device__ __forceinline__ void count_all(u32 c, SampleHistogram& histogram) {
    auto& own = shared.bins;
#pragma unroll 1
    for (u32 i = t; i < kSampleBins; i += kThreads) {
      own.count[i] = 0;
      own.low[i] = 0;
      own.high[i] = 0;
    }
    grid.block_sync();
    const float* x = scores(c);
    u32 id = row_begin + t;
    float next = is_own(id) ? x[id] : 0.0f;
#pragma unroll 1
    for (; id < row_end; id += kThreads) {
      const float g = gap(c, next);
      next = is_own(id + kThreads) ? x[id + kThreads] : 0.0f;
      const u32 bin = digit_after(rank_key(g, id), 0);
      atomicAdd(&own.count[bin], 1u);
      const u64 weight = exact::integer_weight(g);
      if (!weight) continue;
      atomicAdd(&own.low[bin], static_cast<u32>(weight) & 0xFFFFu);
      atomicAdd(&own.high[bin], static_cast<u32>(weight >> 16));
    }
    grid.block_sync();
#pragma unroll 1
    for (u32 i = t; i < kSampleBins; i += kThreads) {
      const u32 count = own.count[i], low = own.low[i], high = own.high[i];
      if (count) add(histogram.bins[i], count, weight_of(low, high));
      const u32 counts = grid.warp_add(count), lows = grid.warp_add(low), highs = grid.warp_add(high);
      if (lane == 0 && counts) add(histogram.parts[i / 32], counts, weight_of(lows, highs));
    }
    // The next query's zeros come from the thread that has just read the same bins.
  }
  // By the next digit, of the few tokens that share the digits found so far. By a team.
  __device__ __forceinline__ void count_border(u32 c, SampleHistogram& histogram) const {
    const SampleSearch search = shared.search[c];
    for_own_quads(c, [&](u32 quad, const Quad& scores) {
#pragma unroll 1
      for (u32 k = 0; k < 4; ++k) {
        const u32 id = 4 * quad + k;
        const float g = gap(c, scores.get(k));
        const RankKey key = rank_key(g, id);
        if (!is_own(id) || !begins_with(key, search)) continue;
        const u32 bin = digit_after(key, search.digits);
        const u64 weight = exact::integer_weight(g);
        add(histogram.bins[bin], 1, weight);
        add(histogram.parts[bin / 32], 1, weight);
      }
    });
  }

  // A bin that the border may lie in, and what lies before it.
  struct Border {
    u64 weight, above_weight, needed;
    u32 count, above_count, bin;
  };
  struct Counted {
    u64 weight;
    u32 count;
  };
  static __device__ __forceinline__ Counted load_bin(const SampleBin* bin) {
    const uint4 raw = load_exchanged(bin);
    return {static_cast<u64>(raw.y) << 32 | raw.x, raw.z};
  }
  // Of 32 bins or parts, one a lane, the one in which the kept tokens reach what is needed. By a warp.
  __device__ __forceinline__ void find(const Counted& own, bool by_count, Border& border) const {
    const u64 above_weight = border.above_weight + warp_sum(own.weight) - own.weight;
    const u32 above_count = border.above_count + static_cast<u32>(warp_sum(own.count)) - own.count;
    const u64 above = by_count ? above_count : above_weight, here = by_count ? own.count : own.weight;
    const bool is_here = above < border.needed && above + here >= border.needed;
    const u32 found = grid.warp_max(is_here ? lane + 1 : 0) - 1;
    border = {grid.from_lane(own.weight, found), grid.from_lane(above_weight, found), border.needed,
              static_cast<u32>(grid.from_lane(own.count, found)),
              static_cast<u32>(grid.from_lane(above_count, found)), border.bin * 32 + found};
  }
  __device__ __forceinline__ Border find_bin(u32 c, const SampleSearch& search, const SampleHistogram& histogram) const {
    static_assert(SampleHistogram::kParts == 32, "a lane for each part");
    const Counted part = load_bin(&histogram.parts[lane]);
    Border border{0, search.above_weight, search.needed, 0, search.above_count, 0};
    if (search.stage == kSeekShare)
      border.needed = share(args.params[c].top_p_steps, grid.from_lane(warp_sum(part.weight), 31));
    const bool by_count = search.stage == kSeekCount;
    find(part, by_count, border);
    find(load_bin(&histogram.bins[border.bin * 32 + lane]), by_count, border);
    return border;
  }

  // One digit more of a query; two where top_p starts over. By a warp.
  __device__ __forceinline__ void narrow(u32 c, const SampleHistogram& first, const SampleHistogram& next) {
    SampleSearch search = shared.search[c];
    bool starts_over;
#pragma unroll 1
    do {
      const Border border = find_bin(c, search, search.digits ? next : first);
      starts_over = take_digit(search, border, args.params[c].top_p_steps);
    } while (starts_over);
    if (lane == 0) shared.search[c] = search;
  }
  // Returns whether the search starts over, with `first`.
  static __device__ __forceinline__ bool take_digit(SampleSearch& search, const Border& border, u32 top_p_steps) {
    if (search.digits < kSampleGapDigits) search.prefix.gap = search.prefix.gap << kSampleDigitBits | border.bin;
    else search.prefix.id = search.prefix.id << kSampleDigitBits | border.bin;
    search.digits += 1;
    search.above_count = border.above_count;
    search.above_weight = border.above_weight;
    search.needed = border.needed;
    if (search.stage == kSeekCount) {
      const u32 kept = static_cast<u32>(search.needed) - search.above_count;
      // Weightless tokens change no total, and top_p leaves them out anyway.
      const bool is_weightless = top_p_steps && border.weight == 0;
      if (kept < border.count && !is_weightless) return false;
      if (!top_p_steps) {
        search.stage = kSought;
        return false;
      }
      const u64 needed = share(top_p_steps, search.above_weight + border.weight);
      search = SampleSearch{};
      search.needed = needed;
      search.stage = kSeekWeight;
      return true;
    }
    search.stage = border.count > 1 ? kSeekWeight : kSought;
    return false;
  }
};

// By all consumer threads of all blocks, after a block barrier that follows the block's own writes to
// logits. Afterwards `shared.results` and `shared.note` are the same in every block and visible to
// all its threads; the next call may follow at once, with the same scratch and epochs.
template <class Grid>
__device__ __forceinline__ void sample_tokens(Grid& grid, const SampleArgs& args, SampleScratch& scratch,
                                              SampleShared& shared, SampleEpochs& epochs) {
  TokenChoice<Grid>(grid, args, scratch, shared, epochs).run();
}
// The same of a single query whose tokens nothing changes or filters, by code that is short: what runs once a round comes from the L2.
template <u32 kAtOnce, class Grid>
__device__ __forceinline__ void sample_plain(Grid& grid, const SampleArgs& args, SampleScratch& scratch, SampleShared& shared,
                                             SampleEpochs& epochs) {
  using Choice = TokenChoice<Grid>;
  Choice(typename Choice::Plain{}, grid, args, scratch, shared, epochs).template run_plain<kAtOnce>();
}
