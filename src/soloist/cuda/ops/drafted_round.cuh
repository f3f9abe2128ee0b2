// The end of a round of a launch that drafts, for a grid of threads: what is accepted of each sequence, where its text has
// been before, what the next round checks. Lane s of a block's first warp serves sequence s; a search is dealt to all threads.
// Every block comes to the same. No model; the grid says how threads meet.
#pragma once
#include "ops/draft.cuh"
#include "ops/draft_control.cuh"

// A round's queries, in shared memory.
struct Columns {
  i32 *sequence, *position;
  u32* token;
  const u32* chosen;
};

// What the warps of a block find, in shared memory: by sequence.
struct Found {
  Texts texts[kMostDraftingSequences];
  u32 first[kMostDraftingSequences];       // its first query in this round
  u32 count[kMostDraftingSequences];       // tokens that the round makes
  u32 ends[kMostDraftingSequences];        // the launch
  Wanted wanted[kMostDraftingSequences];
  u32 place[kMostDraftingSequences][kConsumerWarps], match[kMostDraftingSequences][kConsumerWarps];
  u32 key[kMostDraftingSequences];         // of the best match
  u32 drafts[kMostDraftingSequences][kMostDrafts];
  u32 offered[kMostDraftingSequences];     // how many of them
  // But for sequence 0's. Between two rounds they lie in memory: rings have no room to spare.
  Drafter drafters[kMostDraftingSequences];
};
constexpr u32 kDrafterWords = sizeof(Drafter) / 4;

__device__ __forceinline__ Drafter& drafter_of(DraftControl& own, Found& found, u32 s) { return s ? found.drafters[s] : own.first; }
// Where a block keeps those of other sequences than the first.
__device__ __forceinline__ Drafter* kept_drafters(const DraftBuffers& buffers, u32 block) {
  return buffers.drafters + block * (kMostDraftingSequences - 1);
}
__device__ __forceinline__ void copy_drafters(Drafter* to, const Drafter* from, u32 count, u32 thread, u32 threads) {
#pragma unroll 1
  for (u32 i = thread; i < count * kDrafterWords; i += threads)
    reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const u32*>(from)[i];
}

// By all threads of a block, before the first round.
__device__ __forceinline__ void begin_drafting(DraftControl& own, const DraftBuffers& buffers, u32 block, u32 thread) {
  if (thread >= buffers.num_sequences) return;
  const DraftStart& start = buffers.starts[thread];
  if (thread) kept_drafters(buffers, block)[thread - 1] = start.drafter;
  else own.first = start.drafter;
  own.column[thread] = start.column;
#pragma unroll 1
  for (u32 c = 0; c <= start.drafter.count; ++c) own.owner[start.column + c] = thread;
}

// By one thread: which of a sequence's tokens count, and what follows from them.
template <class Grid>
__device__ __forceinline__ void settle(Grid& grid, DraftControl& own, Found& found, const DraftBuffers& buffers,
                                       const Columns& columns, u32 s, u32 vocab) {
  Drafter& drafter = drafter_of(own, found, s);
  const DraftStart& start = buffers.starts[s];
  const u32 first = own.column[s], num_drafted = drafter.count, kind = drafter.kind;
  const u32* chosen = columns.chosen + first;
  found.texts[s] = {start.history, start.prediction, start.archive, drafter.num_history, chosen};
  found.first[s] = first;
  const Accepted accepted = accept(drafter, start, columns.token + first, chosen, start.stops, start.num_stops, vocab);
  own.told[s] = accepted.count | num_drafted << kEmittedCountBits | kind << 2 * kEmittedCountBits;
  const bool is_left = take(drafter, found.texts[s], chosen, accepted.count);
#pragma unroll 1
  for (u32 i = 0; i < accepted.count; ++i) grid.observe(first, chosen[i]);
  found.count[s] = accepted.count;
  found.ends[s] = accepted.ends;
  found.wanted[s] = wanted(drafter, start, drafter.num_prediction > 0, is_left);
  found.key[s] = 0;
}

// Largest keys of all blocks, by all lanes of a warp. A block overwrites its record in the next round, behind a choice that
// every block took part in after it read this one.
template <class Grid>
__device__ __forceinline__ uint2 largest_keys(const Grid& grid, const uint4* records, u32 round) {
  u32 place = 0, match = 0;
#pragma unroll 1
  for (u32 b = grid.thread() % 32; b < grid.num_blocks(); b += 32) {
    uint4 record;
    do record = load_exchanged(records + b);
    while (record.w != round + 1);
    place = place > record.x ? place : record.x;
    match = match > record.y ? match : record.y;
  }
  return make_uint2(grid.warp_max(place), grid.warp_max(match));
}

// All threads of the grid look for each sequence's text; a warp of every block learns of each what all have found.
template <class Grid>
__device__ __forceinline__ void search(Grid& grid, DraftControl& own, Found& found, const DraftBuffers& buffers, u32 round) {
  const u32 t = grid.thread(), warp = t / 32, lane = t % 32;
  // Neighbouring threads of the grid have neighbouring places.
  const u32 part = grid.block() * kConsumerThreads + t, parts = grid.num_blocks() * kConsumerThreads;
#pragma unroll 1
  for (u32 s = 0; s < buffers.num_sequences; ++s) {
    const Wanted want = found.wanted[s];
    if (!want.place && !want.match) continue;
    const Texts texts = found.texts[s];
    u32 place = 0, match = 0;
    const Drafter& drafter = drafter_of(own, found, s);
    if (want.place) place = search_place(drafter, texts, part, parts);
    if (want.match) match = search_match(drafter, texts, part, parts);
    place = grid.warp_max(place);
    match = grid.warp_max(match);
    if (lane == 0) {
      found.place[s][warp] = place;
      found.match[s][warp] = match;
    }
  }
  grid.block_sync();
#pragma unroll 1
  for (u32 s = warp; s < buffers.num_sequences; s += kConsumerWarps) {
    const Wanted want = found.wanted[s];
    if (!want.place && !want.match) continue;
    const bool has = lane < kConsumerWarps;
    const u32 place = grid.warp_max(has ? found.place[s][lane] : 0);
    const u32 match = grid.warp_max(has ? found.match[s][lane] : 0);
    uint4* records = buffers.records + s * grid.num_blocks();
    if (lane == 0) store_exchanged(records + grid.block(), make_uint4(place, match, 0, round + 1));
    const uint2 best = largest_keys(grid, records, round);
    if (lane == 0) {
      if (want.place) move(drafter_of(own, found, s), best.x);
      found.key[s] = best.y;
    }
  }
  grid.block_sync();
}

// How many of its drafts sequence s gets checked, and its first query: queries that no sequence needs for its latest token are
// dealt one each in turn, the first sequences first; fewer where a sequence gets none. `deal` of soloist/speculation/dealing.py.
struct Dealt {
  u32 first, count;
};
__device__ __forceinline__ Dealt deal(const u32* offered, u32 num_sequences, u32 most_beside, u32 s) {
  Dealt dealt{s, 0};
  bool have_all = 2 * num_sequences <= kMaxQueries;
#pragma unroll 1
  for (u32 other = 0; other < num_sequences; ++other) have_all &= offered[other] != 0;
  u32 left = (have_all ? kMaxQueries : most_beside) - num_sequences;
#pragma unroll 1
  for (u32 turn = 1; turn <= kMostDrafts; ++turn)
#pragma unroll 1
    for (u32 other = 0; other < num_sequences; ++other) {
      if (!left || offered[other] < turn) continue;
      --left;
      if (other < s) ++dealt.first;
      if (other == s) ++dealt.count;
    }
  return dealt;
}

// By all lanes of a warp: the queries of the next round.
template <class Grid>
__device__ __forceinline__ void feed(Grid& grid, DraftControl& own, Found& found, const DraftBuffers& buffers,
                                     const QueryStart* first_queries, const Columns& columns, u32 vocab) {
  const u32 s = grid.thread() % 32, num_sequences = buffers.num_sequences;
  if (s < num_sequences) {
    Drafter& drafter = drafter_of(own, found, s);
    const DraftStart& start = buffers.starts[s];
    draft(drafter, start, found.texts[s], found.key[s], found.drafts[s]);
    found.offered[s] = num_fitting(drafter, found.drafts[s], start.stops, start.num_stops, vocab);
  }
  grid.warp_sync();
  if (s < num_sequences) {
    Drafter& drafter = drafter_of(own, found, s);
    const DraftStart& start = buffers.starts[s];
    const QueryStart& began = first_queries[start.column];
    const Dealt dealt = deal(found.offered, num_sequences, buffers.most_beside, s);
    drafter.count = dealt.count;
    own.column[s] = dealt.first;
    columns.token[dealt.first] = columns.chosen[found.first[s] + found.count[s] - 1];
    const i32 position = began.position + drafter.made, sequence = began.sequence;
#pragma unroll 1
    for (u32 i = 0; i <= dealt.count; ++i) {
      const u32 c = dealt.first + i;
      if (i) columns.token[c] = found.drafts[s][i - 1];
      columns.position[c] = position + i;
      columns.sequence[c] = sequence;
      own.owner[c] = s;
    }
    if (s + 1 == num_sequences) {
      own.queries = dealt.first + dealt.count + 1;
      // As where a launch has fewer queries.
#pragma unroll 1
      for (u32 c = own.queries; c < kMaxQueries; ++c) columns.position[c] = 0;
    }
  }
  if (num_sequences > 1) {
    grid.warp_sync();
    copy_drafters(kept_drafters(buffers, grid.block()), found.drafters + 1, num_sequences - 1, s, 32);
  }
}

// By all threads of the grid; `is_last`: no round may follow. Returns whether one does. What the first warp leaves in `own` and
// `columns` is for whoever meets it afterwards.
template <class Grid>
__device__ __forceinline__ bool end_drafted_round(Grid& grid, DraftControl& own, Found& found, const DraftBuffers& buffers,
                                                  const QueryStart* first_queries, const Columns& columns, u32 round, bool is_last,
                                                  u32 vocab) {
  const u32 t = grid.thread(), num_sequences = buffers.num_sequences;
  if (num_sequences > 1) {
    copy_drafters(found.drafters + 1, kept_drafters(buffers, grid.block()), num_sequences - 1, t, kConsumerThreads);
    grid.block_sync();
  }
  if (t < num_sequences) settle(grid, own, found, buffers, columns, t, vocab);
  grid.block_sync();
  bool ends = is_last, searches = false;
#pragma unroll 1
  for (u32 s = 0; s < num_sequences; ++s) {
    ends |= found.ends[s] != 0;
    searches |= found.wanted[s].place || found.wanted[s].match;
    // Others read it in later rounds: block 0's record of its best token, which they wait for, comes after it.
    if (grid.block() == 0 && t < found.count[s])
      store_exchanged(buffers.starts[s].history + found.texts[s].num_stored + t, columns.chosen[found.first[s] + t]);
  }
  if (ends) return false;
  if (searches) search(grid, own, found, buffers, round);
  if (t < 32) feed(grid, own, found, buffers, first_queries, columns, vocab);
  return true;
}
