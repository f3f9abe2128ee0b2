// Which tokens may come next, guessed from texts: soloist/speculation/ in integers, for one sequence of a launch.
// A search is dealt to all threads of the grid, each of which returns the largest key of its places; the largest of all
// keys is the same whatever the order. What follows is worked out by every block for itself. No barrier, no exchange, no model.
#pragma once
#include "ops/accept.cuh"
#include "ptx/memory.cuh"

// Texts of a round. Tokens of the history from `num_stored` on are the round's own, which block 0 stores meanwhile.
struct Texts {
  const u32 *history, *prediction, *archive;
  u32 num_stored;
  const u32* fresh;

  __device__ __forceinline__ u32 history_at(u32 i) const {
    return i < num_stored ? load_exchanged_word(history + i) : fresh[i - num_stored];
  }
};

// What the round has to look for.
struct Wanted {
  bool place;  // in the prediction
  bool match;
};

// The answer has gone on by `count` tokens; whether the place in the prediction has to be found.
__device__ __forceinline__ bool take(Drafter& drafter, const Texts& texts, const u32* tokens, u32 count) {
  drafter.num_history += count;
  bool is_left = false;
#pragma unroll 1
  for (u32 i = 0; i < count; ++i) {
    const bool has = drafter.at < drafter.num_prediction;
    if (!is_left && drafter.is_good && has && texts.prediction[drafter.at] == tokens[i]) {
      ++drafter.at;
      continue;
    }
    is_left = true;
    if (has) ++drafter.at;
  }
  return is_left;
}

// Most tokens that the next round may check: one token more is made in any case.
__device__ __forceinline__ u32 most_drafts(const Drafter& drafter, const DraftStart& start) {
  const u32 left = drafter.left ? drafter.left - 1 : 0;
  return left < start.num_costs ? left : start.num_costs;
}

__device__ __forceinline__ Wanted wanted(const Drafter& drafter, const DraftStart& start, bool has_prediction, bool is_left) {
  const bool follows = !is_left && drafter.is_good && drafter.at < drafter.num_prediction;
  const u32 most = most_drafts(drafter, start);
  const bool is_drafted = has_prediction && follows && most && most_of(drafter.depths[0], start);
  return {has_prediction && is_left, start.looks_up && most && !is_drafted};
}

// The best key of places `part + 1`, `part + 1 + parts` … of one text; 0 for none.
template <class TokenAt>
__device__ __forceinline__ u32 match_key(const Texts& texts, u32 num_history, const TokenAt& token_at, u32 count, u32 is_own,
                                         u32 part, u32 parts) {
  if (!count || !num_history) return 0;
  u32 most = num_history < count - 1 ? num_history : count - 1, best = 0;
  most = most < kMostMatch ? most : kMostMatch;
  const u32 last = texts.history_at(num_history - 1);
#pragma unroll 1
  for (u32 place = part + 1; place < count; place += parts) {
    if (token_at(place - 1) != last || token_at(place) == kDraftGap) continue;
    const u32 reach = place < most ? place : most;
    u32 length = 1;
#pragma unroll 1
    while (length < reach && token_at(place - length - 1) == texts.history_at(num_history - length - 1)) ++length;
    const u32 key = (length << 1 | is_own) << kPlaceBits | place;
    if (length >= kLeastMatch && key > best) best = key;
  }
  return best;
}

__device__ __forceinline__ u32 search_match(const Drafter& drafter, const Texts& texts, u32 part, u32 parts) {
  const u32 count = drafter.num_history;
  const u32 own = match_key(texts, count, [&](u32 i) { return texts.history_at(i); }, count, 1, part, parts);
  const u32 other = match_key(texts, count, [&](u32 i) { return texts.archive[i]; }, drafter.num_archive, 0, part, parts);
  return own > other ? own : other;
}

// How well the answer agrees with what lies before a place of the prediction.
__device__ __forceinline__ u32 agreement(const Drafter& drafter, const Texts& texts, u32 place) {
  const u32 num_answer = drafter.num_history - drafter.num_prompt;
  u32 score = 0;
#pragma unroll 1
  for (u32 i = 0; i < kAgreements; ++i) {
    const bool ours = i < num_answer, theirs = i < place;
    if (!ours && !theirs) score += agreement_weight(i);
    if (ours && theirs && texts.prediction[place - i - 1] == texts.history_at(drafter.num_history - i - 1))
      score += agreement_weight(i);
  }
  return score;
}

__device__ __forceinline__ u32 place_key(const Drafter& drafter, const Texts& texts, u32 place) {
  const bool is_behind = place >= drafter.at;
  const u32 distance = is_behind ? place - drafter.at : drafter.at - place;
  constexpr u32 kNearest = (1u << kNearnessBits) - 1;
  return (agreement(drafter, texts, place) << kNearnessBits | (kNearest - distance)) << 1 | is_behind;
}

// The best key of the places in the prediction behind the latest token, and of the one that is expected.
__device__ __forceinline__ u32 search_place(const Drafter& drafter, const Texts& texts, u32 part, u32 parts) {
  const u32 last = texts.history_at(drafter.num_history - 1);
  u32 best = part == 0 ? place_key(drafter, texts, drafter.at) : 0;
#pragma unroll 1
  for (u32 place = part + 1; place <= drafter.num_prediction; place += parts) {
    if (texts.prediction[place - 1] != last) continue;
    const u32 key = place_key(drafter, texts, place);
    if (key > best) best = key;
  }
  return best;
}

// Go to the best place of all.
__device__ __forceinline__ void move(Drafter& drafter, u32 key) {
  constexpr u32 kNearest = (1u << kNearnessBits) - 1;
  const u32 score = key >> (kNearnessBits + 1), distance = kNearest - (key >> 1 & kNearest);
  drafter.is_good = score >= (distance ? kGoodElsewhere : kGoodHere);
  drafter.at = key & 1 ? drafter.at + distance : drafter.at - distance;
}

// How many of a kind to draft; a round in which there is something, and a pause, counts for the pause.
__device__ __forceinline__ u32 cut(Depth& depth, const DraftStart& start, u32 count) {
  const u32 most = most_of(depth, start);
  if (!most && depth.left) --depth.left;
  return count < most ? count : most;
}

// The next draft, by one thread of a block: its tokens to `ids`. `key`: of the best match, 0 for none.
__device__ __forceinline__ void draft(Drafter& drafter, const DraftStart& start, const Texts& texts, u32 key, u32* ids) {
  const u32 most = most_drafts(drafter, start);
  drafter.count = 0;
  if (drafter.is_good && drafter.at < drafter.num_prediction && most) {
    const u32 left = drafter.num_prediction - drafter.at;
    const u32 count = cut(drafter.depths[0], start, left < most ? left : most);
    drafter.kind = 0;
    drafter.count = count;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) ids[i] = texts.prediction[drafter.at + i];
    if (count) return;
  }
  if (!key) return;
  const u32 place = key & ((1u << kPlaceBits) - 1), length = key >> (kPlaceBits + 1);
  const bool is_own = key >> kPlaceBits & 1;
  drafter.kind = length >= kLookupLength0 ? 1 : length >= kLookupLength1 ? 2 : length >= kLookupLength2 ? 3 : 4;
  const u32 wanted = cut(drafter.depths[drafter.kind], start, length < most ? length : most);
  const u32 text_end = is_own ? drafter.num_history : drafter.num_archive;
  u32 at = place;
#pragma unroll 1
  for (; drafter.count < wanted; ++drafter.count) {
    const u32 token = is_own ? texts.history_at(at) : texts.archive[at];
    if (token == kDraftGap) break;
    ids[drafter.count] = token;
    if (++at == text_end) at = place;  // as in a loop
  }
}

// Of the draft, tokens before the first that would be the end, or that is none.
__device__ __forceinline__ u32 num_fitting(const Drafter& drafter, const u32* ids, const u32* stops, u32 num_stops, u32 vocab) {
  u32 count = 0;
#pragma unroll 1
  while (count < drafter.count && ids[count] < vocab && !is_stop(ids[count], stops, num_stops)) ++count;
  return count;
}
