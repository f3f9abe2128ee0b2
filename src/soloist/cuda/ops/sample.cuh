// Which token follows from the logits of every query: docs/sampling.md, bit for bit, by all blocks.
//
// Each block owns the logits of consecutive token ids, ascending with the block. The blocks exchange
// 16-byte records of their best and, for filters, histograms of integers, so that no result depends
// on an order of arrival. What the file must not know: the model, and how a grid barrier is built.
//
// `Grid` is given by the kernel; its methods are called by all kConsumerThreads threads of a block:
//   void sync()        barrier over all blocks and threads; writes before it are seen after it (gpu scope)
//   void block_sync()  barrier over the consumer threads of this block
//   u32 block(), u32 num_blocks(), u32 thread()   num_blocks() <= kNumBlocks
//
// spec.cuh gives kNumBlocks, kConsumerThreads (a divisor of 1024, multiple of 16), kMaxQueries, the
// constants in namespace sampling, SampleParams, SampleStep and their flags (sampling_header.py).
//
// Barriers over the grid, shared by all queries: 1 without filters, 2 with min_p alone; otherwise 3,
// one for each further digit of the slowest query (mostly 0 or 1; at most 4, or 8 with both top_k
// and top_p) and one where equal scores straddle a border.
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
  u32 note;                    // of block 0: reaches all blocks as SampleShared::note
  const u32* masks;            // host memory, [queries][mask_stride]: bits of the ids that may be chosen
  u32 mask_stride;
  u32 masked;                  // queries to which they apply: a bit each
};

enum SampleStatus : u32 { kSampled = 0, kBadLogits = 1 };

struct SampleResult {
  u32 token;   // 0 where status is kBadLogits
  u32 status;  // SampleStatus
  float best;  // the largest score; NaN or infinite where status is kBadLogits
};

constexpr u32 kSampleDigitBits = 10;
constexpr u32 kSampleBins = 1u << kSampleDigitBits;
constexpr u32 kSampleDigits = 5;

struct __align__(16) SampleBin {
  u64 weight;
  u32 count;
  u32 unused;
};

// Global memory, zeroed by the host at launch.
//
// `first` changes its copy between calls and `more` between passes, so that a histogram is zeroed while
// nobody reads or adds: a copy is zeroed one barrier after its last reader and one before its next
// use. `records` alternates for the same reason; `ties` is used once a call.
struct __align__(128) SampleScratch {
  SampleBin first[2][kMaxQueries][kSampleBins];
  SampleBin more[3][kMaxQueries][kSampleBins];
  uint4 records[2][kMaxQueries][kNumBlocks];
  u32 ties[kMaxQueries][(kNumBlocks + 3) / 4 * 4];
};

// Which copy of the scratch is next. Zero at launch, equal in all threads, kept from call to call.
struct SampleEpochs {
  u32 exchanges = 0;
  u32 searches = 0;
  u32 passes = 0;
};

// The border of a query's kept tokens, found digit by digit from the leading one of the rank key.
enum SampleStage : u32 {
  kSeekCount,   // top_k
  kSeekShare,   // top_p: the total is not known yet
  kSeekWeight,  // top_p
  kSought,
};
struct SampleSearch {
  u64 prefix;        // digits found so far; a lower prefix is kept
  u64 needed;        // count or weight that the kept tokens must reach
  u64 above_weight;  // of tokens with a lower prefix
  u32 above_count;
  u32 digits;        // in prefix
  u32 stage;
  u32 num_ties;      // tokens kept of those with this very prefix, the lowest ids
};
constexpr u32 kAllTies = 0xFFFFFFFFu;

// Shared memory, 16-byte aligned, no initial value. `results` and `note` are the outcome.
struct SampleShared {
  static constexpr u32 kGroup = 16;
  static constexpr u32 kGroups = kConsumerThreads / kGroup;
  struct Bins {
    u64 weight[kSampleBins];
    u32 count[kSampleBins];
  };
  struct Reduce {
    u64 choice[2][kConsumerThreads];
    u64 group_choice[kMaxQueries][kGroups];
    u32 best[2][kConsumerThreads];
    u32 group_best[kMaxQueries][kGroups];
  };
  struct Scan {
    u64 weight[kConsumerThreads];
    u64 group_weight[kGroups];
    u32 count[kConsumerThreads];
    u32 group_count[kGroups];
  };
  static constexpr u32 kMaskWords = sizeof(Bins) / 4;
  union {
    u32 mask[kMaskWords];  // of one query: words of this block's ids
    Bins bins;
    struct {
      Reduce reduce;
      Scan scan;  // used between two reduced queries
    };
  };
  SampleSearch search[kMaxQueries];
  SampleBin found;
  u64 found_above_weight, found_needed;
  u32 found_above_count, found_bin;
  u32 again;
  u32 note;
  SampleResult results[kMaxQueries];
};
static_assert(sizeof(SampleShared) <= 16 * 1024, "the scratch that the kernel sets aside");

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
        per_thread((args.row_end - args.row_begin + kThreads - 1) / kThreads) {}

  __device__ __forceinline__ void run() {
    adjust();
    bool is_filtered = false;
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) {
      is_filtered |= has_filter(c);
      propose_best(c);
    }
    exchange();
    settle_best();
    if (is_filtered) run_filters();
  }

 private:
  static constexpr u32 kThreads = kConsumerThreads;
  static constexpr u32 kLanes = kThreads / kMaxQueries;  // that read records of one query
  static constexpr u32 kBinsPerThread = kSampleBins / kThreads;
  static_assert(kThreads % SampleShared::kGroup == 0 && kSampleBins % kThreads == 0 && kLanes > 0 &&
                kThreads >= kMaxQueries, "threads of a block");

  Grid& grid;
  const SampleArgs& args;
  SampleScratch& scratch;
  SampleShared& shared;
  SampleEpochs& epochs;
  const u32 t;
  const u32 per_thread;  // consecutive ids where their order matters

  // Queries -------------------------------------------------------------------------------------

  __device__ __forceinline__ bool is_greedy(u32 c) const { return args.params[c].flags & kSampleGreedy; }
  __device__ __forceinline__ bool has_filter(u32 c) const {
    const SampleParams& p = args.params[c];
    return !is_greedy(c) && (p.top_k | p.top_p_steps | p.min_p_steps);
  }
  __device__ __forceinline__ bool is_banned(u32 c) const {
    return args.steps[c].num_output < args.params[c].min_tokens && args.params[c].ban_count;
  }
  __device__ __forceinline__ bool is_adjusted(u32 c) const {
    const SampleParams& p = args.params[c];
    return (p.flags & kSamplePenalties) || p.bias_count || is_banned(c) || is_masked(c);
  }
  __device__ __forceinline__ bool is_masked(u32 c) const { return args.masked >> c & 1; }
  __device__ __forceinline__ const float* scores(u32 c) const {
    return (is_adjusted(c) ? args.adjusted : args.logits) + static_cast<u64>(c) * args.stride;
  }
  __device__ __forceinline__ bool is_own(u32 id) const { return id >= args.row_begin && id < args.row_end; }
  __device__ __forceinline__ u32 own_begin() const {
    return min_u32(args.row_end, args.row_begin + t * per_thread);
  }
  __device__ __forceinline__ u32 own_end() const {
    return min_u32(args.row_end, args.row_begin + (t + 1) * per_thread);
  }
  static __device__ __forceinline__ u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }

  // Masks, penalties, bias, ban --------------------------------------------------------------------------

  __device__ __forceinline__ void adjust() {
    bool any = false;
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) any |= is_adjusted(c);
    if (!any) return;
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
    const u32 first = args.row_begin / 32, end = (args.row_end + 31) / 32;
    const u32* words = args.masks + static_cast<u64>(c) * args.mask_stride;
    grid.block_sync();  // the last query's is read
#pragma unroll 1
    for (u32 i = first + t; i < end; i += kThreads) shared.mask[i - first] = load_host(words + i);
    grid.block_sync();
  }
  __device__ __forceinline__ bool is_allowed(u32 c, u32 id) const {
    return !is_masked(c) || (shared.mask[id / 32 - args.row_begin / 32] >> id % 32 & 1);
  }

  __device__ __forceinline__ void penalize(u32 c) {
    const SampleParams& p = args.params[c];
    const bool has_penalties = p.flags & kSamplePenalties;
    const float* from = args.logits + static_cast<u64>(c) * args.stride;
    float* to = args.adjusted + static_cast<u64>(c) * args.stride;
    const u32* history = args.seen + static_cast<u64>(p.history) * args.stride;
#pragma unroll 1
    for (u32 id = args.row_begin + t; id < args.row_end; id += kThreads) {
      float x = is_allowed(c, id) ? from[id] : __uint_as_float(0xFF800000u);
      const u32 seen = has_penalties ? history[id] : 0;
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
  static __device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

  __device__ __forceinline__ float noise(u32 c, u32 id) const {
    const exact::Words words = noise_words(c, id / 4);
    const u32 k = id % 4;
    return exact::gumbel_of_word(k == 0 ? words.x : k == 1 ? words.y : k == 2 ? words.z : words.w);
  }
  __device__ __forceinline__ exact::Words noise_words(u32 c, u32 quad) const {
    const SampleParams& p = args.params[c];
    const SampleStep& step = args.steps[c];
    return exact::philox({quad, step.position_low, step.position_high, sampling::kDomainTokenChoice},
                         p.seed_low, p.seed_high);
  }

  __device__ __forceinline__ void propose_best(u32 c) {
    u32 best = 0;
    u64 choice = 0;
    const float* x = scores(c);
    if (is_greedy(c)) {
#pragma unroll 1
      for (u32 id = args.row_begin + t; id < args.row_end; id += kThreads)
        choice = larger(choice, candidate(x[id], id));
      best = static_cast<u32>(choice >> 32);
    } else if (has_filter(c)) {
      const float temperature = args.params[c].temperature;
#pragma unroll 1
      for (u32 id = args.row_begin + t; id < args.row_end; id += kThreads)
        choice = larger(choice, candidate(exact::div(x[id], temperature), id));
      best = static_cast<u32>(choice >> 32);
    } else {
      // One Philox block serves four ids.
      const float temperature = args.params[c].temperature;
      const u32 num_quads = args.row_end > args.row_begin ? (args.row_end + 3) / 4 : 0;
#pragma unroll 1
      for (u32 quad = args.row_begin / 4 + t; quad < num_quads; quad += kThreads) {
        const exact::Words words = noise_words(c, quad);
        const auto propose = [&](u32 id, u32 word) {
          if (!is_own(id)) return;
          const float score = exact::div(x[id], temperature);
          const u32 key = exact::order_key(score);
          best = key > best ? key : best;
          choice = larger(choice, candidate(exact::add(score, exact::gumbel_of_word(word)), id));
        };
        propose(4 * quad, words.x);
        propose(4 * quad + 1, words.y);
        propose(4 * quad + 2, words.z);
        propose(4 * quad + 3, words.w);
      }
    }
    reduce_groups(c, best, choice);
  }

  // All threads; two copies let the next query write while this one is read.
  __device__ __forceinline__ void reduce_groups(u32 c, u32 best, u64 choice) {
    auto& reduce = shared.reduce;
    reduce.best[c & 1][t] = best;
    reduce.choice[c & 1][t] = choice;
    grid.block_sync();
    if (t >= SampleShared::kGroups) return;
#pragma unroll 1
    for (u32 i = 0; i < SampleShared::kGroup; ++i) {
      // Neighbouring threads read neighbouring banks.
      const u32 from = t + i * SampleShared::kGroups;
      best = best > reduce.best[c & 1][from] ? best : reduce.best[c & 1][from];
      choice = larger(choice, reduce.choice[c & 1][from]);
    }
    reduce.group_best[c][t] = best;
    reduce.group_choice[c][t] = choice;
  }

  // Every block's groups to all blocks: the results are in the first entries of `reduce`, by query.
  __device__ __forceinline__ void exchange() {
    auto& reduce = shared.reduce;
    auto& records = scratch.records[epochs.exchanges++ & 1];
    grid.block_sync();
    if (t < args.queries) {
      u32 best = 0;
      u64 choice = 0;
#pragma unroll 1
      for (u32 i = 0; i < SampleShared::kGroups; ++i) {
        best = best > reduce.group_best[t][i] ? best : reduce.group_best[t][i];
        choice = larger(choice, reduce.group_choice[t][i]);
      }
      records[t][grid.block()] =
          make_uint4(best, static_cast<u32>(choice), static_cast<u32>(choice >> 32), args.note);
    }
    grid.sync();
    const u32 c = t / kLanes, lane = t % kLanes;
    u32 best = 0;
    u64 choice = 0;
    if (c < args.queries) {
#pragma unroll 1
      for (u32 b = lane; b < grid.num_blocks(); b += kLanes) {
        const uint4 record = load_exchanged(&records[c][b]);
        best = best > record.x ? best : record.x;
        choice = larger(choice, static_cast<u64>(record.z) << 32 | record.y);
        if (b == 0 && c == 0) shared.note = record.w;
      }
    }
    reduce.best[1][t] = best;
    reduce.choice[1][t] = choice;
    grid.block_sync();
    if (t < args.queries) {
      // Thread t read records of another query; now it serves query t.
      best = 0;
      choice = 0;
#pragma unroll 1
      for (u32 i = 0; i < kLanes; ++i) {
        const u32 from = t * kLanes + i;
        best = best > reduce.best[1][from] ? best : reduce.best[1][from];
        choice = larger(choice, reduce.choice[1][from]);
      }
      reduce.best[0][t] = best;
      reduce.choice[0][t] = choice;
    }
  }

  // Thread c settles query c.
  __device__ __forceinline__ void settle_best() {
    if (t < args.queries) {
      const float best = exact::value_of_key(shared.reduce.best[0][t]);
      const bool fine = exact::is_finite(best);
      const u32 id = ~static_cast<u32>(shared.reduce.choice[0][t]);
      shared.results[t] = {fine ? id : 0, fine ? kSampled : kBadLogits, best};
    }
    grid.block_sync();
  }

  // Filters ---------------------------------------------------------------------------------------

  // Ascending from the best token; equal for equal gaps only, which are what filters.py ranks by. In
  // units of 2^-15 below 32, which spreads the tokens that matter over the first digits; then the
  // gap's bits for what is equal so far. Within one unit those differ in their low 30 bits only.
  static constexpr u32 kUnitBits = 20, kBitsLeft = 30;
  static_assert(kUnitBits + kBitsLeft == kSampleDigits * kSampleDigitBits, "digits of the rank key");
  static __device__ __forceinline__ u64 rank_key(float gap) {
    const u32 bits = __float_as_uint(gap) & 0x7FFFFFFFu;
    const u32 units = __float2uint_rz(exact::mul(__uint_as_float(bits), 32768.0f));
    const u64 high = min_u32(units, (1u << kUnitBits) - 1);
    return high << kBitsLeft | (bits & ((1u << kBitsLeft) - 1));
  }
  static __device__ __forceinline__ u64 prefix_of(u64 key, u32 digits) {
    return key >> (kSampleDigits - digits) * kSampleDigitBits;
  }
  __device__ __forceinline__ float gap(u32 c, const float* x, u32 id) const {
    return exact::sub(exact::div(x[id], args.params[c].temperature), shared.results[c].best);
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

  __device__ __forceinline__ void run_filters() {
    if (t < args.queries) {
      const SampleParams& p = args.params[t];
      const bool is_sought = !has_filter(t) || shared.results[t].status != kSampled;
      SampleSearch search{};
      search.num_ties = kAllTies;
      search.needed = p.top_k;
      search.stage = is_sought ? kSought : p.top_k ? kSeekCount : p.top_p_steps ? kSeekShare : kSought;
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
      exchange_ties();
    }
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) {
      const bool is_chosen_here = has_filter(c) && shared.results[c].status == kSampled;
      reduce_groups(c, 0, is_chosen_here ? best_survivor(c) : 0);
    }
    exchange();
    if (t < args.queries && has_filter(t) && shared.results[t].status == kSampled)
      shared.results[t].token = ~static_cast<u32>(shared.reduce.choice[0][t]);
    grid.block_sync();
  }

  __device__ __forceinline__ void zero(SampleBin (&bins)[kMaxQueries][kSampleBins]) {
    uint4* all = reinterpret_cast<uint4*>(&bins[0][0]);
    const u32 stride = grid.num_blocks() * kThreads;
#pragma unroll 1
    for (u32 i = grid.block() * kThreads + t; i < kMaxQueries * kSampleBins; i += stride)
      all[i] = make_uint4(0, 0, 0, 0);
  }

  // One digit of every open query. `first` is kept for top_p, which starts over after top_k.
  __device__ __forceinline__ void pass(SampleBin (&first)[kMaxQueries][kSampleBins],
                                       SampleBin (&bins)[kMaxQueries][kSampleBins]) {
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c)
      if (is_open(c)) add_to_bins(c, bins[c]);
    grid.sync();
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) {
      bool again = is_open(c);
      while (again) {
        find_bin(c, shared.search[c].digits ? bins[c] : first[c]);
        if (t == 0) shared.again = narrow(c);
        grid.block_sync();
        again = shared.again;
      }
    }
  }

  // Counts and weights by the next digit, of tokens that share the digits found so far.
  __device__ __forceinline__ void add_to_bins(u32 c, SampleBin* bins) {
    auto& own = shared.bins;
#pragma unroll 1
    for (u32 i = t; i < kSampleBins; i += kThreads) {
      own.weight[i] = 0;
      own.count[i] = 0;
    }
    grid.block_sync();
    const float* x = scores(c);
    const u32 digits = shared.search[c].digits;
    const u64 prefix = shared.search[c].prefix;
#pragma unroll 1
    for (u32 id = args.row_begin + t; id < args.row_end; id += kThreads) {
      const float g = gap(c, x, id);
      const u64 key = rank_key(g);
      if (prefix_of(key, digits) != prefix) continue;
      const u32 bin = static_cast<u32>(prefix_of(key, digits + 1)) % kSampleBins;
      atomicAdd(&own.count[bin], 1u);
      const u64 weight = exact::integer_weight(g);
      if (weight) atomicAdd(&own.weight[bin], weight);
    }
    grid.block_sync();
#pragma unroll 1
    for (u32 i = t; i < kSampleBins; i += kThreads) {
      if (!own.count[i]) continue;
      atomicAdd(&bins[i].count, own.count[i]);
      if (own.weight[i]) atomicAdd(&bins[i].weight, own.weight[i]);
    }
    // The next query's zeros come from the thread that has just read the same bins.
  }

  struct Sums {
    u64 weight, total_weight;
    u32 count;
  };
  // Sums over the threads before this one; the total of weights. All threads; ends with a barrier.
  __device__ __forceinline__ Sums sums_before(u32 count, u64 weight) {
    auto& scan = shared.scan;
    constexpr u32 kGroup = SampleShared::kGroup;
    scan.count[t] = count;
    scan.weight[t] = weight;
    grid.block_sync();
    if (t < SampleShared::kGroups) {
      u32 group_count = 0;
      u64 group_weight = 0;
#pragma unroll 1
      for (u32 i = 0; i < kGroup; ++i) {
        group_count += scan.count[t * kGroup + i];
        group_weight += scan.weight[t * kGroup + i];
      }
      scan.group_count[t] = group_count;
      scan.group_weight[t] = group_weight;
    }
    grid.block_sync();
    Sums sums{};
#pragma unroll 1
    for (u32 i = 0; i < SampleShared::kGroups; ++i) {
      const bool is_before = i < t / kGroup;
      sums.total_weight += scan.group_weight[i];
      sums.weight += is_before ? scan.group_weight[i] : 0;
      sums.count += is_before ? scan.group_count[i] : 0;
    }
#pragma unroll 1
    for (u32 i = t / kGroup * kGroup; i < t; ++i) {
      sums.weight += scan.weight[i];
      sums.count += scan.count[i];
    }
    grid.block_sync();
    return sums;
  }

  // The bin in which the kept tokens reach what is needed, in shared.found; ends with a barrier.
  __device__ __forceinline__ void find_bin(u32 c, const SampleBin* bins) {
    const SampleSearch& search = shared.search[c];
    SampleBin own[kBinsPerThread];
    u32 count = 0;
    u64 weight = 0;
#pragma unroll
    for (u32 i = 0; i < kBinsPerThread; ++i) {
      const uint4 raw = load_exchanged(&bins[t * kBinsPerThread + i]);
      own[i] = {static_cast<u64>(raw.y) << 32 | raw.x, raw.z, 0};
      count += own[i].count;
      weight += own[i].weight;
    }
    const Sums before = sums_before(count, weight);
    const bool by_count = search.stage == kSeekCount;
    const u64 needed = search.stage == kSeekShare
                           ? share(args.params[c].top_p_steps, before.total_weight)
                           : search.needed;
    u32 above_count = search.above_count + before.count;
    u64 above_weight = search.above_weight + before.weight;
#pragma unroll
    for (u32 i = 0; i < kBinsPerThread; ++i) {
      const u64 above = by_count ? above_count : above_weight;
      const u64 here = by_count ? own[i].count : own[i].weight;
      if (above < needed && above + here >= needed) {
        shared.found = own[i];
        shared.found_bin = t * kBinsPerThread + i;
        shared.found_above_count = above_count;
        shared.found_above_weight = above_weight;
        shared.found_needed = needed;
      }
      above_count += own[i].count;
      above_weight += own[i].weight;
    }
    grid.block_sync();
  }

  // One thread: one digit more. Returns whether the search starts over, with `first`.
  __device__ __forceinline__ bool narrow(u32 c) {
    SampleSearch& search = shared.search[c];
    const SampleBin bin = shared.found;
    const u32 top_p_steps = args.params[c].top_p_steps;
    search.prefix = search.prefix << kSampleDigitBits | shared.found_bin;
    search.digits += 1;
    search.above_count = shared.found_above_count;
    search.above_weight = shared.found_above_weight;
    search.needed = shared.found_needed;
    const bool is_last = search.digits == kSampleDigits;
    if (search.stage == kSeekCount) {
      const u32 kept = static_cast<u32>(search.needed) - search.above_count;
      // Weightless tokens change no total, and top_p leaves them out anyway.
      const bool is_weightless = top_p_steps && bin.weight == 0;
      if (kept < bin.count && !is_last && !is_weightless) return false;
      if (!top_p_steps) {
        search.num_ties = kept < bin.count ? kept : kAllTies;
        search.stage = kSought;
        return false;
      }
      const u64 weight = kept < bin.count ? bin.weight / bin.count * kept : bin.weight;
      const u64 needed = share(top_p_steps, search.above_weight + weight);
      search = SampleSearch{};
      search.needed = needed;
      search.num_ties = kAllTies;
      search.stage = kSeekWeight;
      return true;
    }
    search.stage = kSeekWeight;
    if (bin.count > 1 && !is_last) return false;
    const u64 each = bin.weight / bin.count;
    const u32 kept = static_cast<u32>((search.needed - search.above_weight + each - 1) / each);
    search.num_ties = kept < bin.count ? kept : kAllTies;
    search.stage = kSought;
    return false;
  }

  __device__ __forceinline__ u32 num_own_ties(u32 c) const {
    const float* x = scores(c);
    const SampleSearch& search = shared.search[c];
    u32 ties = 0;
#pragma unroll 1
    for (u32 id = own_begin(); id < own_end(); ++id)
      ties += prefix_of(rank_key(gap(c, x, id)), search.digits) == search.prefix;
    return ties;
  }

  // Where only some of equal tokens are kept: how many of them lie in each block.
  __device__ __forceinline__ void exchange_ties() {
    bool any = false;
#pragma unroll 1
    for (u32 c = 0; c < args.queries; ++c) {
      if (shared.search[c].num_ties == kAllTies) continue;
      any = true;
      const Sums sums = sums_before(0, num_own_ties(c));
      if (t == 0) scratch.ties[c][grid.block()] = static_cast<u32>(sums.total_weight);
    }
    if (any) grid.sync();
  }

  // Equal tokens at the border with lower ids than this thread's.
  __device__ __forceinline__ u32 ties_before(u32 c) {
    u64 in_lower_blocks = 0;
#pragma unroll 1
    for (u32 b = 4 * t; b < grid.block(); b += 4 * kThreads) {
      const uint4 four = load_exchanged(&scratch.ties[c][b]);
      in_lower_blocks += four.x + (b + 1 < grid.block() ? four.y : 0) +
                         (b + 2 < grid.block() ? four.z : 0) + (b + 3 < grid.block() ? four.w : 0);
    }
    const Sums sums = sums_before(num_own_ties(c), in_lower_blocks);
    return sums.count + static_cast<u32>(sums.total_weight);
  }

  __device__ __forceinline__ u64 best_survivor(u32 c) {
    const SampleSearch search = shared.search[c];
    const u64 least_weight = static_cast<u64>(args.params[c].min_p_steps)
                             << (sampling::kWeightBits - sampling::kFractionBits);
    const float* x = scores(c);
    u32 tie = search.num_ties == kAllTies ? 0 : ties_before(c);
    u64 choice = 0;
#pragma unroll 1
    for (u32 id = own_begin(); id < own_end(); ++id) {
      const float g = gap(c, x, id);
      const u64 prefix = prefix_of(rank_key(g), search.digits);
      if (prefix > search.prefix) continue;
      if (prefix == search.prefix && tie++ >= search.num_ties) continue;
      if (exact::integer_weight(g) < least_weight) continue;
      const float score = exact::div(x[id], args.params[c].temperature);
      choice = larger(choice, candidate(exact::add(score, noise(c, id)), id));
    }
    return choice;
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
