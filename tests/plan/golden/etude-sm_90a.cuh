// Generated from the plan; see header.py.
#pragma once
constexpr bool kBf16 = true;
constexpr unsigned kNumBlocks = 40u;
constexpr unsigned kPeers = 1u;
constexpr unsigned kConsumerWarps = 8u;
constexpr unsigned kConsumerThreads = 256u;
constexpr unsigned kThreads = 384u;
constexpr bool kMovesRegisters = true;
constexpr unsigned kConsumerRegisters = 216u;
constexpr unsigned kHelperRegisters = 72u;
constexpr unsigned kMaxColumns = 8u;
constexpr unsigned kMostColumns = 8u;
constexpr bool kSamples = false;
constexpr unsigned kMaxStops = 16u;
constexpr unsigned kStuckNs = 2000000000u;
constexpr unsigned long long kMaskNs = 60000000000ull;
constexpr unsigned kMaskTurnWords = 16u;
constexpr bool kRacecheck = false;
constexpr bool kAlone = false;
constexpr unsigned long long kSilentBlock = 4294967295ull;
constexpr unsigned kCleanerCycles = 0u;
constexpr unsigned kAblation = 0u;
constexpr bool kTrace = false;
constexpr unsigned kTraceRound = 0u;
constexpr unsigned kTurns = 4u;
constexpr unsigned kSlotBytes = 16384u;
constexpr unsigned kGranulePositions = 32u;
constexpr unsigned kPagePositions = 64u;
constexpr unsigned kChunkPages = 2u;
constexpr unsigned kPageCopies = 3u;
constexpr unsigned kFetchCycles = 800u;
constexpr unsigned kMostChains = 4u;
constexpr unsigned kBatch = 2u;
constexpr unsigned kSampleWorkspaceBytes = 667008u;
constexpr unsigned kTraceWords = 140u;
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
struct SampleParams {
  float temperature;
  unsigned int flags;
  unsigned int top_k;
  unsigned int top_p_steps;
  unsigned int min_p_steps;
  float repetition_penalty;
  float frequency_penalty;
  float presence_penalty;
  unsigned int seed_low;
  unsigned int seed_high;
  unsigned int min_tokens;
  unsigned int ban_begin;
  unsigned int ban_count;
  unsigned int bias_begin;
  unsigned int bias_count;
  unsigned int history;
};
struct SampleStep {
  unsigned int position_low;
  unsigned int position_high;
  unsigned int num_output;
  unsigned int unused;
};

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
  static constexpr unsigned kPoolKvHeads = 2u;
  static constexpr unsigned kGroup = 4u;
  static constexpr unsigned kHeadDim = 64u;
  static constexpr bool kTiedHead = true;
  static constexpr float kEpsilon = 0x1.0c6f7a0000000p-20f;
  static constexpr float kScoreScale = 0x1.7154760000000p-3f;
  static constexpr unsigned kRingSlots = 12u;
  static constexpr unsigned kCopies = 2u;
  static constexpr unsigned kHalfCopies = 2u;
  static constexpr unsigned kEmptyCopies = 2u;
  static constexpr unsigned kHeadCopies = 3u;
  static constexpr unsigned kFetchSlots = 0u;
  static constexpr unsigned kReduceBytes = 16384u;
  static constexpr unsigned kWideReduceBytes = 22528u;
  static constexpr unsigned kSplits = 16u;
  static constexpr unsigned kSplitBits = 4u;
  static constexpr unsigned kNearPositions = 768u;
  static constexpr unsigned kSplitPositions = 768u;
  static constexpr unsigned kTurnLayers = 1u;
  static constexpr unsigned kEarlySlots = 4u;
  static constexpr unsigned kRowTiles = 2u;
  static constexpr unsigned kWarpTiles = 2u;
  static constexpr unsigned kSoftmaxLanes = 8u;
  static constexpr unsigned kGranuleBytes = 4096u;
  static constexpr bool kPageSlot = true;
  static constexpr unsigned kBlockStride = 999424u;
  static constexpr unsigned kFinalNorm = 6144u;
  static constexpr bool kHasLanes = false;
  static constexpr unsigned kLanes = 1u;
  static constexpr unsigned kLanesHere = 1u;
  static constexpr unsigned kLaneWorkspaceBytes = 1374208u;
  static constexpr unsigned kLaneVectors = 0u;
  static constexpr bool kMeets = false;
  static constexpr unsigned kWsToldMid = 0u;
  static constexpr unsigned kWsToldIn = 0u;
  static constexpr unsigned kWsToldOut = 0u;
  static constexpr unsigned kDelayLayers = 1u;
  static constexpr unsigned kLaneTurns = 1u;
  static constexpr bool kEarlySum = false;
  static constexpr bool kAttentionTalks = false;
  static constexpr bool kMlpTalks = false;
  static constexpr bool kSumBeforeNorm = false;
  static constexpr float kAloneScale = 0x1.0000000000000p+0f;
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
  static constexpr unsigned kWsHiddenIn = 0u;
  static constexpr unsigned kWsHiddenInBytes = 32768u;
  static constexpr unsigned kWsHiddenMid = 32768u;
  static constexpr unsigned kWsHiddenMidBytes = 32768u;
  static constexpr unsigned kWsAttended = 65536u;
  static constexpr unsigned kWsAttendedBytes = 32768u;
  static constexpr unsigned kWsGated = 98304u;
  static constexpr unsigned kWsGatedBytes = 65536u;
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
  static constexpr unsigned kShQueries = 16384u;
  static constexpr unsigned kShQueriesBytes = 4096u;
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
  struct Head { static constexpr unsigned kUnits = 1040u; static constexpr unsigned kMaxUnits = 26u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kTiles = 1u; static constexpr bool kEven = true; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kOffset = 786432u; };
  // Rows of the residual: attention_output and down of every layer have the same.
  struct Residual { static constexpr unsigned kUnits = 40u; static constexpr unsigned kMaxUnits = 1u; static constexpr unsigned kBlocks = 40u; };
  static __device__ __forceinline__ int window(unsigned layer) { return kModelWindow[layer]; }
  static __device__ __forceinline__ bool rotated(unsigned layer) { return kModelRotated[layer]; }
  struct Layer0 {
    using M = Model;
    static constexpr bool kQkNorm = true;
    static constexpr bool kQkvBias = false;
    static constexpr bool kOutputBias = false;
    static constexpr bool kMlpBias = false;
    static constexpr unsigned kLayerBytes = 98304u;
    static constexpr unsigned kLayerVectors = 768u;
    static constexpr unsigned kVecAttentionNorm = 0u;
    static constexpr unsigned kVecMlpNorm = 320u;
    static constexpr unsigned kVecQNorm = 640u;
    static constexpr unsigned kVecKNorm = 704u;
    static constexpr unsigned kVecQkvBias = 0u;
    static constexpr unsigned kVecAttentionOutputBias = 0u;
    static constexpr unsigned kVecGateUpBias = 0u;
    static constexpr unsigned kVecDownBias = 0u;
    struct Qkv { static constexpr unsigned kUnits = 96u; static constexpr unsigned kMaxUnits = 3u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kTiles = 2u; static constexpr bool kEven = false; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kOffset = 0u; };
    struct AttentionOutput { static constexpr unsigned kUnits = 40u; static constexpr unsigned kMaxUnits = 1u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kTiles = 1u; static constexpr bool kEven = true; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kOffset = 24576u; };
    struct GateUp { static constexpr unsigned kUnits = 112u; static constexpr unsigned kMaxUnits = 3u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 1u; static constexpr unsigned kTiles = 3u; static constexpr bool kEven = false; static constexpr unsigned kUnitHalves = 2u; static constexpr unsigned kDepth = 1u; static constexpr unsigned kOffset = 32768u; };
    struct Down { static constexpr unsigned kUnits = 40u; static constexpr unsigned kMaxUnits = 1u; static constexpr unsigned kBlocks = 40u; static constexpr unsigned kSteps = 2u; static constexpr unsigned kTiles = 1u; static constexpr bool kEven = true; static constexpr unsigned kUnitHalves = 1u; static constexpr unsigned kDepth = 2u; static constexpr unsigned kOffset = 81920u; };
    // Where a layer begins: its weights in a block's, in bytes; its vectors, in values.
    static __device__ __forceinline__ unsigned long long weights(unsigned layer) { return static_cast<unsigned long long>(layer) * kLayerBytes; }
    static __device__ __forceinline__ unsigned long long vectors(unsigned layer) { return static_cast<unsigned long long>(layer) * kLayerVectors; }
    template <class C>
    static __device__ __forceinline__ void run(C& cx, unsigned& layer) {
      qkv(Layer0{}, cx);
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
