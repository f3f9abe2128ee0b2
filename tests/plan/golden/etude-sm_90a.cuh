// Generated from the plan; see header.py.
#pragma once
#include "ptx/types.cuh"
constexpr bool kBf16 = true;
constexpr unsigned kNumBlocks = 40u;
constexpr unsigned kPeers = 1u;
constexpr unsigned kConsumerWarps = 8u;
constexpr unsigned kConsumerThreads = 256u;
constexpr unsigned kThreads = 384u;
constexpr bool kMovesRegisters = true;
constexpr unsigned kConsumerRegisters = 216u;
constexpr unsigned kHelperRegisters = 72u;
constexpr unsigned kMaxQueries = 8u;
constexpr unsigned kMostQueries = 8u;
constexpr bool kSamples = false;
constexpr bool kDrafts = false;
constexpr unsigned kMaxStops = 16u;
constexpr unsigned kStuckNs = 2000000000u;
constexpr unsigned long long kMaskNs = 60000000000ull;
constexpr unsigned kMaskReadyWords = 16u;
constexpr bool kRacecheck = false;
constexpr bool kAlone = false;
constexpr unsigned long long kSilentBlock = 4294967295ull;
constexpr unsigned kCleanerCycles = 0u;
constexpr unsigned kAblation = 0u;
constexpr bool kTrace = false;
constexpr unsigned kTraceRound = 0u;
constexpr unsigned kExchangeCopies = 4u;
constexpr unsigned kLayerPhases = 5u;
constexpr unsigned kMarksOfRoundsEnd = 5u;
constexpr unsigned kPagesPhase = 1u;
constexpr unsigned kGateUpPhase = 3u;
constexpr unsigned kStepColumns = 512u;
constexpr unsigned kHalfTileRows = 8u;
constexpr unsigned kHalfTileValues = 4096u;
constexpr unsigned kChunkPages = 2u;
constexpr unsigned kPageCopies = 3u;
constexpr unsigned kFetchCycles = 800u;
constexpr unsigned kMostChains = 4u;
constexpr unsigned kBatch = 2u;
constexpr unsigned kSampleWorkspaceBytes = 686208u;
constexpr unsigned kLoadedSteps = 4u;
constexpr unsigned kConvertedSteps = 4u;
constexpr unsigned kTraceWords = 140u;
constexpr unsigned kAttentionBlocks = 0u;
constexpr unsigned kPagePositions = 64u;
constexpr unsigned kHalfPagePositions = 32u;
__device__ __forceinline__ constexpr u32 tile_place(u32 half, u32 row, u32 column) { return column % 64 / 32 * 4096 + column % 512 / 64 * 512 + column % 8 / 4 * 256 + row * 32 + column % 32 / 8 * 8 + column % 4 / 2 * 4 + half * 2 + column % 2; }
__device__ __forceinline__ constexpr u32 half_tile_place(u32 row, u32 column) { return column % 512 / 64 * 512 + column % 64 / 32 * 256 + row * 32 + column % 32 / 8 * 8 + column % 8 / 4 * 4 + column % 4 / 2 * 2 + column % 2; }
namespace sampling {
__device__ constexpr unsigned int kPhiloxMultipliers[2] = {0xd2511f53u, 0xcd9e8d57u};
__device__ constexpr unsigned int kPhiloxKeySteps[2] = {0x9e3779b9u, 0xbb67ae85u};
constexpr unsigned int kPhiloxRounds = 0xau;
constexpr unsigned int kWordMask = 0xffffffffu;
constexpr unsigned int kDomainTokenChoice = 0x0u;
constexpr unsigned int kNearOneWords = 0x40000000u;
constexpr float kHalf = 0x1.0000000000000p-1f;
constexpr float kWordScale = 0x1.0000000000000p-32f;
constexpr float kLn2High = 0x1.6300000000000p-1f;
constexpr float kLn2Low = -0x1.bd01060000000p-13f;
constexpr unsigned int kSqrtHalfBits = 0x3f3504f3u;
__device__ constexpr float kLnPolynomial[9] = {0x1.2043760000000p-4f, -0x1.d7a3700000000p-4f, 0x1.de4a340000000p-4f, -0x1.fcba9e0000000p-4f, 0x1.23d37e0000000p-3f, -0x1.555ca00000000p-3f, 0x1.999d580000000p-3f, -0x1.fffff80000000p-3f, 0x1.5555540000000p-2f};
constexpr float kLog2E = 0x1.7154760000000p+0f;
__device__ constexpr float kExpPolynomial[6] = {0x1.a0d2ce0000000p-13f, 0x1.6e879c0000000p-10f, 0x1.1112100000000p-7f, 0x1.5553820000000p-5f, 0x1.5555540000000p-3f, 0x1.0000000000000p-1f};
constexpr unsigned int kWeightBits = 0x20u;
constexpr float kExpFloor = -0x1.8000000000000p+4f;
constexpr unsigned int kFractionBits = 0x18u;
}  // namespace sampling

constexpr unsigned int kSampleGreedy = 0x1u;
constexpr unsigned int kSamplePenalties = 0x2u;
constexpr unsigned int kSampleMasked = 0x4u;
constexpr unsigned int kNoTokenNan = 0xffffffffu;
constexpr unsigned int kNoTokenInfinite = 0xfffffffeu;
constexpr unsigned int kNoTokenNegativeInfinite = 0xfffffffdu;
constexpr unsigned int kSeenInPrompt = 0x80000000u;
constexpr unsigned int kMaskEnd = 0xffffffffu;
constexpr unsigned int kSampleSharedBytes = 0x3800u;

enum class Phase : u32 { kEmbed, kQkv, kAttention, kAttentionOutput, kGateUp, kDown, kHead, kChoose, kConclude, kMask, kRouter };
constexpr u32 kDraftKinds = 5u;
constexpr u32 kMostDrafts = 7u;
constexpr u32 kMostDraftingSequences = 7u;
constexpr u32 kEmittedWords = 15u;
constexpr u32 kEmittedCountBits = 4u;
constexpr u32 kDraftGap = 4294967295u;
constexpr u32 kAcceptanceOne = 65536u;
constexpr u32 kAcceptanceShift = 3u;
constexpr u32 kPlainCost = 1000u;
constexpr u32 kFirstPause = 8u;
constexpr u32 kLongestPause = 256u;
constexpr u32 kLeastMatch = 2u;
constexpr u32 kMostMatch = 32u;
constexpr u32 kPlaceBits = 25u;
constexpr u32 kNearnessBits = 19u;
constexpr u32 kGoodHere = 1024u;
constexpr u32 kGoodElsewhere = 1792u;
constexpr u32 kAgreements = 16u;
constexpr u32 kLookupLength0 = 16u;
constexpr u32 kLookupLength1 = 8u;
constexpr u32 kLookupLength2 = 4u;
constexpr u32 kLookupLength3 = 0u;
__device__ __forceinline__ constexpr u32 agreement_weight(u32 i) { return i == 0 ? 1024u : i == 1 ? 768u : i == 2 ? 576u : i == 3 ? 432u : i == 4 ? 324u : i == 5 ? 243u : i == 6 ? 182u : i == 7 ? 136u : i == 8 ? 102u : i == 9 ? 76u : i == 10 ? 57u : i == 11 ? 43u : i == 12 ? 32u : i == 13 ? 24u : i == 14 ? 18u : 13u; }
// How one query samples. A limit of 0 is off.
struct SampleParams {
  float temperature;
  u32 flags;  // bits kSample…
  u32 top_k;
  u32 top_p_steps;  // of 2^-24
  u32 min_p_steps;  // of 2^-24
  float repetition_penalty;
  float frequency_penalty;
  float presence_penalty;
  u32 seed_low;
  u32 seed_high;
  u32 min_tokens;
  u32 ban_begin;  // ids that end generation: part of list_ids
  u32 ban_count;
  u32 bias_begin;  // part of list_ids and list_values
  u32 bias_count;
  u32 history;  // row of seen
};
static_assert(sizeof(SampleParams) == 64, "SampleParams");
static_assert(OFFSET_OF(SampleParams, temperature) == 0, "temperature");
static_assert(OFFSET_OF(SampleParams, flags) == 4, "flags");
static_assert(OFFSET_OF(SampleParams, top_k) == 8, "top_k");
static_assert(OFFSET_OF(SampleParams, top_p_steps) == 12, "top_p_steps");
static_assert(OFFSET_OF(SampleParams, min_p_steps) == 16, "min_p_steps");
static_assert(OFFSET_OF(SampleParams, repetition_penalty) == 20, "repetition_penalty");
static_assert(OFFSET_OF(SampleParams, frequency_penalty) == 24, "frequency_penalty");
static_assert(OFFSET_OF(SampleParams, presence_penalty) == 28, "presence_penalty");
static_assert(OFFSET_OF(SampleParams, seed_low) == 32, "seed_low");
static_assert(OFFSET_OF(SampleParams, seed_high) == 36, "seed_high");
static_assert(OFFSET_OF(SampleParams, min_tokens) == 40, "min_tokens");
static_assert(OFFSET_OF(SampleParams, ban_begin) == 44, "ban_begin");
static_assert(OFFSET_OF(SampleParams, ban_count) == 48, "ban_count");
static_assert(OFFSET_OF(SampleParams, bias_begin) == 52, "bias_begin");
static_assert(OFFSET_OF(SampleParams, bias_count) == 56, "bias_count");
static_assert(OFFSET_OF(SampleParams, history) == 60, "history");
// What changes with every token that a query samples.
struct SampleStep {
  u32 position_low;
  u32 position_high;
  u32 num_output;  // tokens so far
  u32 unused;
};
static_assert(sizeof(SampleStep) == 16, "SampleStep");
static_assert(OFFSET_OF(SampleStep, position_low) == 0, "position_low");
static_assert(OFFSET_OF(SampleStep, position_high) == 4, "position_high");
static_assert(OFFSET_OF(SampleStep, num_output) == 8, "num_output");
static_assert(OFFSET_OF(SampleStep, unused) == 12, "unused");
// One query of a launch.
struct QueryStart {
  i32 sequence;  // row of the page tables
  i32 position;  // of the first round
  i32 stride;  // positions from one round to the next
  i32 forced;  // rounds whose input token the host gives
  i32 num_stops;
  i32 keep;  // rounds before a stop token counts
  u32 stops[kMaxStops];  // token ids
};
static_assert(sizeof(QueryStart) == 88, "QueryStart");
static_assert(OFFSET_OF(QueryStart, sequence) == 0, "sequence");
static_assert(OFFSET_OF(QueryStart, position) == 4, "position");
static_assert(OFFSET_OF(QueryStart, stride) == 8, "stride");
static_assert(OFFSET_OF(QueryStart, forced) == 12, "forced");
static_assert(OFFSET_OF(QueryStart, num_stops) == 16, "num_stops");
static_assert(OFFSET_OF(QueryStart, keep) == 20, "keep");
static_assert(OFFSET_OF(QueryStart, stops) == 24, "stops");
// Written by the host for each launch.
struct Launch {
  u32 queries;
  u32 rounds;
  u64 logits_round_stride;  // values; 0 overwrites the logits in every round
  QueryStart query[kMaxQueries];
  SampleParams sampling[kMaxQueries];  // this and step: for kernels that sample
  SampleStep step[kMaxQueries];  // of the first round
};
static_assert(sizeof(Launch) == 1360, "Launch");
static_assert(OFFSET_OF(Launch, queries) == 0, "queries");
static_assert(OFFSET_OF(Launch, rounds) == 4, "rounds");
static_assert(OFFSET_OF(Launch, logits_round_stride) == 8, "logits_round_stride");
static_assert(OFFSET_OF(Launch, query) == 16, "query");
static_assert(OFFSET_OF(Launch, sampling) == 720, "sampling");
static_assert(OFFSET_OF(Launch, step) == 1232, "step");
// What kernels that sample need beside the workspace.
struct SampleBuffers {
  u32* seen;  // [query][kSampledRows]
  float* adjusted;  // [query][kSampledRows]
  u8* workspace;  // zeroed for each launch
  const u32* list_ids;  // of all bans and biases
  const float* list_values;  // biases, at the same places
};
static_assert(sizeof(SampleBuffers) == 40, "SampleBuffers");
static_assert(OFFSET_OF(SampleBuffers, seen) == 0, "seen");
static_assert(OFFSET_OF(SampleBuffers, adjusted) == 8, "adjusted");
static_assert(OFFSET_OF(SampleBuffers, workspace) == 16, "workspace");
static_assert(OFFSET_OF(SampleBuffers, list_ids) == 24, "list_ids");
static_assert(OFFSET_OF(SampleBuffers, list_values) == 32, "list_values");
// Host memory: what masked queries may choose. See `wait_for_masks` in ops/choose.cuh.
struct Masks {
  const u32* words;  // [query][kVocabWords], a bit a token
  const u32* ready;  // [query][kMaskReadyWords]: rounds whose masks are there, or kMaskEnd
};
static_assert(sizeof(Masks) == 16, "Masks");
static_assert(OFFSET_OF(Masks, words) == 0, "words");
static_assert(OFFSET_OF(Masks, ready) == 8, "ready");
// Where a block is: consumers and producer write it, the watchdog reads it.
struct Where {
  u32 round;  // of the consumers
  u32 layer;  // of the consumers
  u32 phase;  // of the consumers, a Phase
  u32 producer_round;
  u32 producer_layer;
  u32 copies;  // slots that the producer asked memory for
};
static_assert(sizeof(Where) == 24, "Where");
static_assert(OFFSET_OF(Where, round) == 0, "round");
static_assert(OFFSET_OF(Where, layer) == 4, "layer");
static_assert(OFFSET_OF(Where, phase) == 8, "phase");
static_assert(OFFSET_OF(Where, producer_round) == 12, "producer_round");
static_assert(OFFSET_OF(Where, producer_layer) == 16, "producer_layer");
static_assert(OFFSET_OF(Where, copies) == 20, "copies");
// Host memory: what a stuck block was doing.
struct Fault {
  u32 code;  // 1 once the rest is there
  u32 block;
  u32 sm;
  Where where;
  u32 landed;  // copies of the producer that memory has delivered
  u32 released;  // of them, those that all consumers have read
  u32 missing;  // of several ranks, bits of those whose data is missing
};
static_assert(sizeof(Fault) == 48, "Fault");
static_assert(OFFSET_OF(Fault, code) == 0, "code");
static_assert(OFFSET_OF(Fault, block) == 4, "block");
static_assert(OFFSET_OF(Fault, sm) == 8, "sm");
static_assert(OFFSET_OF(Fault, where) == 12, "where");
static_assert(OFFSET_OF(Fault, landed) == 36, "landed");
static_assert(OFFSET_OF(Fault, released) == 40, "released");
static_assert(OFFSET_OF(Fault, missing) == 44, "missing");
// How often drafts of one kind are accepted, see soloist.speculation.depth.
struct Depth {
  u32 acceptance;
  u32 pause;  // rounds of the next pause
  u32 left;  // rounds of this one
  u32 best;  // number of drafts
};
static_assert(sizeof(Depth) == 16, "Depth");
static_assert(OFFSET_OF(Depth, acceptance) == 0, "acceptance");
static_assert(OFFSET_OF(Depth, pause) == 4, "pause");
static_assert(OFFSET_OF(Depth, left) == 8, "left");
static_assert(OFFSET_OF(Depth, best) == 12, "best");
// What a sequence's drafts depend on; every block has it, and changes it alike.
struct Drafter {
  Depth depths[kDraftKinds];  // by kind
  u32 num_history;  // tokens of prompt and answer
  u32 num_prompt;  // of them, those of the prompt
  u32 num_prediction;
  u32 num_archive;
  u32 at;  // token of the prediction that is expected next
  u32 is_good;  // the answer follows the prediction there
  u32 left;  // tokens that the answer may still have
  u32 made;  // tokens of this launch
  u32 count;  // drafted tokens that this round checks
  u32 kind;  // of the draft
};
static_assert(sizeof(Drafter) == 120, "Drafter");
static_assert(OFFSET_OF(Drafter, depths) == 0, "depths");
static_assert(OFFSET_OF(Drafter, num_history) == 80, "num_history");
static_assert(OFFSET_OF(Drafter, num_prompt) == 84, "num_prompt");
static_assert(OFFSET_OF(Drafter, num_prediction) == 88, "num_prediction");
static_assert(OFFSET_OF(Drafter, num_archive) == 92, "num_archive");
static_assert(OFFSET_OF(Drafter, at) == 96, "at");
static_assert(OFFSET_OF(Drafter, is_good) == 100, "is_good");
static_assert(OFFSET_OF(Drafter, left) == 104, "left");
static_assert(OFFSET_OF(Drafter, made) == 108, "made");
static_assert(OFFSET_OF(Drafter, count) == 112, "count");
static_assert(OFFSET_OF(Drafter, kind) == 116, "kind");
// Written by the host for each sequence of a launch that drafts.
struct DraftStart {
  Drafter drafter;  // its draft stands in the launch's input tokens
  u32 costs[kMostDrafts];  // of rounds, by drafts from 1 on
  u32 num_costs;  // 0 where it drafts nothing
  u32 looks_up;  // drafts come from other texts than the prediction, too
  u32 num_stops;
  u32 column;  // query of the first round that has its latest token
  u32* history;  // with room for what the launch may make; block 0 appends
  const u32* prediction;
  const u32* archive;  // kDraftGap between two answers
  const u32* stops;  // tokens that end the answer, all of them
};
static_assert(sizeof(DraftStart) == 200, "DraftStart");
static_assert(OFFSET_OF(DraftStart, drafter) == 0, "drafter");
static_assert(OFFSET_OF(DraftStart, costs) == 120, "costs");
static_assert(OFFSET_OF(DraftStart, num_costs) == 148, "num_costs");
static_assert(OFFSET_OF(DraftStart, looks_up) == 152, "looks_up");
static_assert(OFFSET_OF(DraftStart, num_stops) == 156, "num_stops");
static_assert(OFFSET_OF(DraftStart, column) == 160, "column");
static_assert(OFFSET_OF(DraftStart, history) == 168, "history");
static_assert(OFFSET_OF(DraftStart, prediction) == 176, "prediction");
static_assert(OFFSET_OF(DraftStart, archive) == 184, "archive");
static_assert(OFFSET_OF(DraftStart, stops) == 192, "stops");
// What kernels that draft need beside the workspace.
struct DraftBuffers {
  const DraftStart* starts;  // [sequence]
  uint4* records;  // [sequence][block], zeroed for each launch
  Drafter* drafters;  // [block][sequence], but for the first sequence
  u32 num_sequences;
  u32 most_beside;  // queries of a round in which a sequence has no draft
};
static_assert(sizeof(DraftBuffers) == 32, "DraftBuffers");
static_assert(OFFSET_OF(DraftBuffers, starts) == 0, "starts");
static_assert(OFFSET_OF(DraftBuffers, records) == 8, "records");
static_assert(OFFSET_OF(DraftBuffers, drafters) == 16, "drafters");
static_assert(OFFSET_OF(DraftBuffers, num_sequences) == 24, "num_sequences");
static_assert(OFFSET_OF(DraftBuffers, most_beside) == 28, "most_beside");
// The kernel's parameter. Pointers are to the GPU's memory, or as they say to the host's.
struct Params {
  const u8* image;  // packed weights
  const float* vectors;  // norm weights and biases
  const u16* embedding;  // [V][H] row-major, or null where the head is tied
  u16* pool;  // KV pages
  const i32* page_tables;  // [sequence][page]
  const float2* rope;  // [position][D / 2] cosine, sine
  u8* workspace;  // exchange buffers
  float* logits;  // [query][kVocabRows], of all lanes here
  const u32* forced;  // [query][rounds] input tokens
  const Launch* launch;
  u32* emitted;  // host: [round][query]
  u32* progress;  // host: rounds emitted
  const u32* yield_requested;  // host: wish to stop at the next round
  Fault* fault;  // host
  u64* trace;  // [block][kTraceWords] of the traced round; trace.py knows their order
  u64 page_values;  // of one page over all layers
  u32 page_table_stride;  // pages
  float embedding_scale;  // 1 / root mean square of the embedding
  SampleBuffers sample;
  u32 rank;
  u8* peers[kPeers];  // every rank's workspace, this one's included
  Masks masks;  // for kernels that sample
};
static_assert(sizeof(Params) == 208, "Params");
static_assert(OFFSET_OF(Params, image) == 0, "image");
static_assert(OFFSET_OF(Params, vectors) == 8, "vectors");
static_assert(OFFSET_OF(Params, embedding) == 16, "embedding");
static_assert(OFFSET_OF(Params, pool) == 24, "pool");
static_assert(OFFSET_OF(Params, page_tables) == 32, "page_tables");
static_assert(OFFSET_OF(Params, rope) == 40, "rope");
static_assert(OFFSET_OF(Params, workspace) == 48, "workspace");
static_assert(OFFSET_OF(Params, logits) == 56, "logits");
static_assert(OFFSET_OF(Params, forced) == 64, "forced");
static_assert(OFFSET_OF(Params, launch) == 72, "launch");
static_assert(OFFSET_OF(Params, emitted) == 80, "emitted");
static_assert(OFFSET_OF(Params, progress) == 88, "progress");
static_assert(OFFSET_OF(Params, yield_requested) == 96, "yield_requested");
static_assert(OFFSET_OF(Params, fault) == 104, "fault");
static_assert(OFFSET_OF(Params, trace) == 112, "trace");
static_assert(OFFSET_OF(Params, page_values) == 120, "page_values");
static_assert(OFFSET_OF(Params, page_table_stride) == 128, "page_table_stride");
static_assert(OFFSET_OF(Params, embedding_scale) == 132, "embedding_scale");
static_assert(OFFSET_OF(Params, sample) == 136, "sample");
static_assert(OFFSET_OF(Params, rank) == 176, "rank");
static_assert(OFFSET_OF(Params, peers) == 184, "peers");
static_assert(OFFSET_OF(Params, masks) == 192, "masks");
enum class ScaleType : u32 { kBf16, kFp16, kFp32 };
struct Plain16;
template <u32 kGroup, u32 kScaleRows> struct Fp8;
template <ScaleType kScale, u32 kGroup, bool kZeros> struct Int4;
template <ScaleType kScale, u32 kGroup> struct Int4Offsets;
template <ScaleType kScale, u32 kGroup, bool kZeros> struct Int8;
template <u32 kBits, u32 kGroup, bool kOffsets> struct SuperBlocks;
__constant__ const int kModelWindow[] = {0, 0, 0, 0, 0, 0, 0, 0};
__constant__ const bool kModelRotated[] = {1, 1, 1, 1, 1, 1, 1, 1};
struct Model {
  static constexpr unsigned kLaneBlocks = 40u;
  static constexpr unsigned kLayers = 8u;
  static constexpr unsigned kHidden = 320u;
  static constexpr unsigned kVocab = 8192u;
  static constexpr unsigned kVocabRows = 8320u;
  static constexpr unsigned kSampledRows = 8320u;
  static constexpr unsigned kVocabWords = 256u;
  static constexpr unsigned kRanks = 1u;
  static constexpr unsigned kShareVocab = 8192u;
  static constexpr unsigned kQueryHeads = 8u;
  static constexpr unsigned kKvHeads = 2u;
  static constexpr unsigned kGroup = 4u;
  static constexpr bool kWideQueries = false;
  static constexpr unsigned kQueryRows = 4u;
  static constexpr unsigned kQueriesTogether = 8u;
  static constexpr unsigned kHeadDim = 64u;
  static constexpr bool kTiedHead = true;
  static constexpr float kEpsilon = 0x1.0c6f7a0000000p-20f;
  static constexpr float kScoreScale = 0x1.7154760000000p-3f;
  static constexpr unsigned kRingSlots = 12u;
  static constexpr unsigned kRingBytes = 196608u;
  static constexpr unsigned kCopies = 2u;
  static constexpr unsigned kHalfCopies = 2u;
  static constexpr unsigned kEmptyCopies = 2u;
  static constexpr unsigned kWaitingCopies = 0u;
  static constexpr unsigned kHeadCopies = 3u;
  static constexpr bool kExpectsEarly = false;
  static constexpr bool kElectsLane = false;
  static constexpr unsigned kPageBatchSlots = 6u;
  static constexpr unsigned kRestCycles = 0u;
  static constexpr bool kHasWayForFew = false;
  static constexpr unsigned kFetchSlots = 0u;
  static constexpr unsigned kReduceBytes = 16384u;
  static constexpr unsigned kWideReduceBytes = 22528u;
  static constexpr unsigned kSplits = 16u;
  static constexpr unsigned kSplitBits = 4u;
  static constexpr unsigned kUnsplitPositions = 768u;
  static constexpr unsigned kSplitPositions = 768u;
  static constexpr unsigned kRotationLayers = 1u;
  static constexpr unsigned kEarlySlots = 4u;
  static constexpr unsigned kQuantizedBatch = 2u;
  static constexpr bool kReleasesLate = false;
  static constexpr unsigned kRowTiles = 2u;
  static constexpr unsigned kWarpTiles = 2u;
  static constexpr unsigned kSoftmaxLanes = 8u;
  static constexpr bool kPageSlot = true;
  static constexpr unsigned kBlockStride = 999424u;
  static constexpr unsigned kFinalNorm = 6144u;
  static constexpr unsigned kSlotBytes = 16384u;
  static constexpr unsigned kWeightSlotBytes = 16384u;
  static constexpr unsigned kHalfTileBytes = 8192u;
  static constexpr bool kHasLanes = false;
  static constexpr unsigned kLanes = 1u;
  static constexpr unsigned kLanesHere = 1u;
  static constexpr unsigned kLaneWorkspaceBytes = 1374208u;
  static constexpr unsigned kLaneVectors = 0u;
  static constexpr bool kMeets = false;
  static constexpr unsigned kWsPublishedMid = 0u;
  static constexpr unsigned kWsPublishedIn = 0u;
  static constexpr unsigned kWsPublishedOut = 0u;
  static constexpr unsigned kDelayLayers = 1u;
  static constexpr unsigned kLaneCopies = 1u;
  static constexpr bool kEarlySum = false;
  static constexpr bool kSumBeforeNorm = false;
  static constexpr bool kAttentionCommunicates = false;
  static constexpr bool kMlpCommunicates = false;
  static constexpr float kAloneScale = 0x1.0000000000000p+0f;
  static constexpr unsigned kMostSlots = 0u;
  static constexpr bool kFeedsRouters = false;
  static constexpr unsigned kShConverted = 0u;
  static constexpr unsigned kShConvertedBytes = 0u;
  static constexpr unsigned kWsSumsMid = 0u;
  static constexpr unsigned kWsSumsMidBytes = 0u;
  static constexpr unsigned kWsSumsIn = 0u;
  static constexpr unsigned kWsSumsInBytes = 0u;
  static constexpr unsigned kWsArrivals = 0u;
  static constexpr unsigned kWsArrivalsBytes = 0u;
  static constexpr unsigned kWsLogits = 0u;
  static constexpr unsigned kWsLogitsBytes = 0u;
  static constexpr unsigned kWsHiddenOut = 0u;
  static constexpr unsigned kWsHiddenOutBytes = 0u;
  static constexpr unsigned kWsSquaresOut = 0u;
  static constexpr unsigned kWsSquaresOutBytes = 0u;
  static constexpr unsigned kWsHiddenRouter = 0u;
  static constexpr unsigned kWsHiddenRouterBytes = 0u;
  static constexpr unsigned kWsOutcome = 0u;
  static constexpr unsigned kWsOutcomeBytes = 0u;
  static constexpr unsigned kWsLeft = 0u;
  static constexpr unsigned kWsLeftBytes = 0u;
  static constexpr unsigned kWsHiddenIn = 0u;
  static constexpr unsigned kWsHiddenInBytes = 32768u;
  static constexpr unsigned kWsAttended = 32768u;
  static constexpr unsigned kWsAttendedBytes = 32768u;
  static constexpr unsigned kWsHiddenMid = 65536u;
  static constexpr unsigned kWsHiddenMidBytes = 32768u;
  static constexpr unsigned kWsSquaresIn = 163840u;
  static constexpr unsigned kWsSquaresInBytes = 10240u;
  static constexpr unsigned kWsSquaresMid = 174080u;
  static constexpr unsigned kWsSquaresMidBytes = 10240u;
  static constexpr unsigned kWsProjected = 184320u;
  static constexpr unsigned kWsProjectedBytes = 98304u;
  static constexpr unsigned kWsPartial = 282624u;
  static constexpr unsigned kWsPartialBytes = 1048576u;
  static constexpr unsigned kWsPartialStats = 1331200u;
  static constexpr unsigned kWsPartialStatsBytes = 32768u;
  static constexpr unsigned kWsBest = 1363968u;
  static constexpr unsigned kWsBestBytes = 10240u;
  static constexpr unsigned kShReduce = 0u;
  static constexpr unsigned kShReduceBytes = 16384u;
  static constexpr unsigned kShQRows = 16384u;
  static constexpr unsigned kShQRowsBytes = 4096u;
  static constexpr unsigned kShNewKv = 20480u;
  static constexpr unsigned kShNewKvBytes = 2048u;
  static constexpr unsigned kShResidual = 22528u;
  static constexpr unsigned kShResidualBytes = 256u;
  static constexpr unsigned kShStats = 22784u;
  static constexpr unsigned kShStatsBytes = 2048u;
  static constexpr unsigned kShRope = 24832u;
  static constexpr unsigned kShRopeBytes = 2048u;
  static constexpr unsigned kShSampling = 26880u;
  static constexpr unsigned kShSamplingBytes = 768u;
  static constexpr unsigned kShControl = 27648u;
  static constexpr unsigned kShControlBytes = 384u;
  // The layout of KV pages; see kv/layout.py.
  static constexpr unsigned kPoolKvHeads = 2u;
  static constexpr unsigned kHalfPageBytes = 4096u;
  enum : unsigned {
    kPageHalves = 2u,
    kKvParts = 2u,
    kHalfPageValues = 2048u,
    kKeyRowBytes = 128u,
    kValueRowBytes = 64u,
    kSwappedKeyBytes = 64u,
    kCodeBits = 16u,
    kCodeBytes = 4096u,
  };
  // From the start of the pool to a half page's keys; its values follow them.
  static __device__ __forceinline__ u64 half_page_place(u64 page_values, i32 page, u32 layer, u32 head, u32 half) { return page * page_values + ((static_cast<u64>(layer) * kPoolKvHeads + head) * kPageHalves + half) * (kKvParts * kHalfPageValues); }
  // Which chunk of its row a chunk of a key takes.
  static __device__ __forceinline__ u32 key_chunk(u32 row, u32 chunk) { return chunk ^ (row & 1) << 2; }
  // Which number of its row a number of a key takes.
  static __device__ __forceinline__ u32 key_column(u32 row, u32 d) { return d ^ (row & 1) << 5; }
  // From a half_page's values to one number.
  static __device__ __forceinline__ u32 value_place(u32 row, u32 d) { return d * kHalfPagePositions + row; }
  struct Head { using Format = Plain16; static constexpr unsigned kUnits = 1040u; static constexpr unsigned kMaxUnits = 26u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kColumns = 320u; static constexpr unsigned kTiles = 1u; static constexpr bool kEven = true; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kStepsAtOnce = 16u; static constexpr unsigned kHalfTileBytes = 8192u; static constexpr unsigned kHalfTileValueBytes = 8192u; static constexpr unsigned kSlotTiles = 1u; static constexpr unsigned kOffset = 786432u; static constexpr bool kPermuted = false; static constexpr bool kPairsSteps = false; static constexpr bool kEndsInHalf = false; static constexpr bool kSkipsPadding = false; static __device__ __forceinline__ u32 first_unit(u32 block) { return block * 1040u / 40u; } static __device__ __forceinline__ u32 num_units(u32 block) { return first_unit(block + 1) - first_unit(block); } static __device__ __forceinline__ u32 owner(u32 unit) { return ((unit + 1) * 40u - 1) / 1040u; } };
  // Rows of the residual: attention_output and down of every layer have the same.
  struct Residual { static constexpr unsigned kUnits = 40u; static constexpr unsigned kMaxUnits = 1u; static constexpr unsigned kBlocks = 40u; static __device__ __forceinline__ u32 first_unit(u32 block) { return block * 40u / 40u; } static __device__ __forceinline__ u32 num_units(u32 block) { return first_unit(block + 1) - first_unit(block); } static __device__ __forceinline__ u32 owner(u32 unit) { return ((unit + 1) * 40u - 1) / 40u; } };
  static constexpr const int (&kWindow)[8] = kModelWindow;
  static constexpr const bool (&kRotated)[8] = kModelRotated;
  struct Layer0 {
    using M = Model;
    static constexpr bool kQkNorm = true;
    static constexpr bool kQkvBias = false;
    static constexpr bool kOutputBias = false;
    static constexpr bool kMlpBias = false;
    static constexpr unsigned kWsGated = 98304u;
    static constexpr unsigned kWsGatedBytes = 65536u;
    static constexpr unsigned kExperts = 0u;
    static constexpr bool kRoutesEarly = false;
    static constexpr unsigned kMarksBefore = 3u;
    static constexpr unsigned kMarksBehind = 9u;
    static constexpr unsigned kVecAttentionNorm = 0u;
    static constexpr unsigned kVecMlpNorm = 320u;
    static constexpr unsigned kVecQNorm = 640u;
    static constexpr unsigned kVecKNorm = 704u;
    static constexpr unsigned kVecQkvBias = 0u;
    static constexpr unsigned kVecAttentionOutputBias = 0u;
    static constexpr unsigned kVecGateUpBias = 0u;
    static constexpr unsigned kVecDownBias = 0u;
    struct Qkv { using Format = Plain16; static constexpr unsigned kUnits = 96u; static constexpr unsigned kMaxUnits = 3u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kColumns = 320u; static constexpr unsigned kTiles = 2u; static constexpr bool kEven = false; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kStepsAtOnce = 16u; static constexpr unsigned kHalfTileBytes = 8192u; static constexpr unsigned kHalfTileValueBytes = 8192u; static constexpr unsigned kSlotTiles = 1u; static constexpr unsigned kOffset = 0u; static constexpr bool kPermuted = false; static constexpr bool kPairsSteps = false; static constexpr bool kEndsInHalf = false; static constexpr bool kSkipsPadding = false; static __device__ __forceinline__ u32 first_unit(u32 block) { return block * 96u / 40u; } static __device__ __forceinline__ u32 num_units(u32 block) { return first_unit(block + 1) - first_unit(block); } static __device__ __forceinline__ u32 owner(u32 unit) { return ((unit + 1) * 40u - 1) / 96u; } };
    struct AttentionOutput { using Format = Plain16; static constexpr unsigned kUnits = 40u; static constexpr unsigned kMaxUnits = 1u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kColumns = 512u; static constexpr unsigned kTiles = 1u; static constexpr bool kEven = true; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kStepsAtOnce = 16u; static constexpr unsigned kHalfTileBytes = 8192u; static constexpr unsigned kHalfTileValueBytes = 8192u; static constexpr unsigned kSlotTiles = 1u; static constexpr unsigned kOffset = 24576u; static constexpr bool kPermuted = false; static constexpr bool kPairsSteps = false; static constexpr bool kEndsInHalf = false; static constexpr bool kSkipsPadding = false; static __device__ __forceinline__ u32 first_unit(u32 block) { return block * 40u / 40u; } static __device__ __forceinline__ u32 num_units(u32 block) { return first_unit(block + 1) - first_unit(block); } static __device__ __forceinline__ u32 owner(u32 unit) { return ((unit + 1) * 40u - 1) / 40u; } };
    struct GateUp { using Format = Plain16; static constexpr unsigned kUnits = 112u; static constexpr unsigned kMaxUnits = 3u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kColumns = 320u; static constexpr unsigned kTiles = 3u; static constexpr bool kEven = false; static constexpr unsigned kUnitHalves = 2u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kStepsAtOnce = 16u; static constexpr unsigned kHalfTileBytes = 8192u; static constexpr unsigned kHalfTileValueBytes = 8192u; static constexpr unsigned kSlotTiles = 1u; static constexpr unsigned kOffset = 32768u; static constexpr bool kPermuted = false; static constexpr bool kPairsSteps = false; static constexpr bool kEndsInHalf = false; static constexpr bool kSkipsPadding = false; static __device__ __forceinline__ u32 first_unit(u32 block) { return block * 112u / 40u; } static __device__ __forceinline__ u32 num_units(u32 block) { return first_unit(block + 1) - first_unit(block); } static __device__ __forceinline__ u32 owner(u32 unit) { return ((unit + 1) * 40u - 1) / 112u; } };
    struct Down { using Format = Plain16; static constexpr unsigned kUnits = 40u; static constexpr unsigned kMaxUnits = 1u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 2u; static constexpr unsigned kColumns = 896u; static constexpr unsigned kTiles = 1u; static constexpr bool kEven = true; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 2u; static constexpr unsigned kStepsAtOnce = 16u; static constexpr unsigned kHalfTileBytes = 8192u; static constexpr unsigned kHalfTileValueBytes = 8192u; static constexpr unsigned kSlotTiles = 1u; static constexpr unsigned kOffset = 81920u; static constexpr bool kPermuted = false; static constexpr bool kPairsSteps = false; static constexpr bool kEndsInHalf = false; static constexpr bool kSkipsPadding = false; static __device__ __forceinline__ u32 first_unit(u32 block) { return block * 40u / 40u; } static __device__ __forceinline__ u32 num_units(u32 block) { return first_unit(block + 1) - first_unit(block); } static __device__ __forceinline__ u32 owner(u32 unit) { return ((unit + 1) * 40u - 1) / 40u; } };
    // Where a layer begins: its weights in a block's, in bytes; its vectors, in values.
    static __device__ __forceinline__ unsigned long long weights(unsigned layer) { return static_cast<unsigned long long>(layer) * 98304u; }
    static __device__ __forceinline__ unsigned long long vectors(unsigned layer) { return static_cast<unsigned long long>(layer) * 768u; }
    // Calls `use` with the matrix of a phase.
    template <class Use>
    static __device__ __forceinline__ void of_phase(unsigned phase, const Use& use) {
      if (phase == 0u) return use(Qkv{});
      if (phase == 2u) return use(AttentionOutput{});
      if (phase == 3u) return use(GateUp{});
      use(Down{});
    }
    template <class C>
    static __device__ __forceinline__ void run(C& cx, unsigned& layer) {
      qkv(Layer0{}, cx, layer);
      attention(Layer0{}, cx, layer);
      attention_output(Layer0{}, cx, layer);
      gate_up(Layer0{}, cx, layer);
      down(Layer0{}, cx, layer);
    }
  };
  // Calls `use` with the kind of a layer.
  template <class Use>
  static __device__ __forceinline__ void of_layer(unsigned layer, const Use& use) {
    use(Layer0{});
  }
  // Where the norm before a layer lies; after the last layer, the final one.
  static __device__ __forceinline__ unsigned long long attention_norm(unsigned layer) {
    unsigned long long at = kFinalNorm;
    if (layer < kLayers) of_layer(layer, [&](auto kind) {
      using L = decltype(kind);
      at = L::vectors(layer) + L::kVecAttentionNorm;
    });
    return at;
  }
  // All layers in order.
  template <class C>
  static __device__ __forceinline__ void run_layers(C& cx) {
    unsigned layer = 0;
#pragma unroll 1
    while (layer < 8u) {
      run_layer(Layer0{}, cx, layer);
      ++layer;
    }
  }
};
