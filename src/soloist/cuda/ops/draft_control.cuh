// What a block knows of the drafts of a launch's sequences.
#pragma once
#include "ptx/memory.cuh"

// In shared memory, from round to round.
struct DraftControl {
  Drafter first;                       // of sequence 0; memory has those of others, see `Found`
  u16 told[kMostDraftingSequences];    // of a round, for the host: tokens, drafted tokens and their kind
  u8 column[kMostDraftingSequences];   // by sequence, the query that takes its latest token
  u8 owner[kMaxQueries];               // by query, its sequence
  u8 queries;
};
