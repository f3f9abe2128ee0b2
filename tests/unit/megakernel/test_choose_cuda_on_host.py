"""Many rounds of `ops/choose.cuh`, compiled by g++, take the tokens of soloist.sampling.

The stand-in for CUDA and the random schedule are those of test_sample_cuda_on_host.py; here blocks
meet at the kernel's own barrier, and what one round leaves behind is what the next one starts from.
Several ranks run side by side, each with its part of the logits at first.
"""

import ctypes
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from plan.shapes import SMALL
from soloist.errors import BadLogits
from soloist.megakernel.abi import LAUNCH
from soloist.megakernel.choice import Choice, pack_choices
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import MASK_READY_WORDS, Build, header
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.sampling_header import NO_TOKEN, bad_score, sample_workspace_bytes
from soloist.model.dtype import Dtype
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import num_words
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY, STORES, address
from unit.sampling.constraints import Drawn

# By ranks: blocks of each.
BLOCKS = {1: 3, 2: 2}
VOCAB = SMALL.vocab_size
WORDS = num_words(VOCAB)
ON_RANKS = pytest.mark.parametrize("library", BLOCKS, indirect=True, ids="ranks={}".format)
ON_ONE = pytest.mark.parametrize("library", [1], indirect=True, ids="ranks={}".format)
# A build for one query has short code for one that nothing filters.
FOR_ONE_QUERY = pytest.mark.parametrize(
    "library", [(1, 1), (2, 1)], indirect=True, ids="ranks, queries={}".format
)

# In place of the LM head: what choose.cuh needs of the kernel around it.
HEAD = r"""
#pragma once
#include "ptx/memory.cuh"
#define __noinline__ __attribute__((noinline))
struct Index { u32 x; };
static Index threadIdx, blockIdx;
static u8* block_memory();
#define dynamic block_memory()
void sync_consumers();
void add_release(u32* p, u32 v);
u32 load_acquire(const u32* p);
inline void store_to_peer(u32* p, u32 v) { *p = v; }
inline void store_to_peer(uint4* p, uint4 v) { *p = v; }
inline uint4 load_from_peers(const uint4* p) { return load_exchanged(p); }
u32 acquire_from_peers(const u32* p);
inline void __threadfence_system() {}
inline void __threadfence() {}
u64 __shfl_sync(u32 mask, u64 value, u32 lane);
u32 __reduce_max_sync(u32 mask, u32 value);
u32 __reduce_add_sync(u32 mask, u32 value);
u32 load_host_acquire(const u32* p);
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
template <class M> inline float* all_logits(u8* workspace, u32 query);
template <class M> inline uint4* best_records(u8* workspace, u32 copy, u32 query, u32 set) {
  const u32 at = ((copy & 1) * kMaxQueries + query) * M::kRanks + set;
  return reinterpret_cast<uint4*>(workspace + M::kWsBest) + at * kNumBlocks;
}
"""
# Behind what it needs of the kernel's structs.
HEAD_OF_RANKS = r"""
inline u32 sender_rank(const Params& params, u32) { return params.rank; }
template <class M> inline u32 first_id(const Params& params) {
  return M::kRanks > 1 ? params.rank * M::kShareVocab : 0;
}
"""

HARNESS = r"""
#include <ucontext.h>
#include "ops/choose.cuh"

using M = Model;
enum State { kReady, kAtWarp, kAtBlock, kEnded };
constexpr u32 kAll = M::kRanks * kNumBlocks * kConsumerThreads;
struct Thread {
  ucontext_t context;
  State state;
  char stack[32 * 1024];
};
static Thread threads[kAll];
static ucontext_t scheduler;
constexpr u32 kBlockBytes = M::kRingSlots * M::kSlotBytes + M::kShControl + M::kShControlBytes;
alignas(128) static u8 memory[M::kRanks * kNumBlocks][kBlockBytes];
alignas(128) static u8 exchanges[M::kRanks][M::kWsLogits + M::kWsLogitsBytes + 128];
static Params all_params[M::kRanks];
static u32* tokens;
static const u32 *all_masks, *ends;
static u32 *mask_words, *mask_ready;
static Where where[M::kRanks * kNumBlocks];
static u32 begun[M::kRanks * kNumBlocks];
static u32 rank, num_rounds, random_state = 1;

template <class M>
inline float* all_logits(u8* workspace, u32 query) {
  return reinterpret_cast<float*>(workspace + M::kWsLogits) + query * M::kSampledRows;
}
static u8* block_memory() { return memory[rank * kNumBlocks + blockIdx.x]; }
static void pause(State state) {
  const u32 id = (rank * kNumBlocks + blockIdx.x) * kConsumerThreads + threadIdx.x;
  threads[id].state = state;
  swapcontext(&threads[id].context, &scheduler);
}
void sync_consumers() { pause(kAtBlock); }
static u32 own_id() { return (rank * kNumBlocks + blockIdx.x) * kConsumerThreads + threadIdx.x; }
static u64 lane_values[2][kAll];
static u32 lane_turns[kAll];
static const u64* lanes(u64 value) {
  const u32 id = own_id();
  u64* values = lane_values[lane_turns[id]++ & 1];
  values[id] = value;
  pause(kAtWarp);
  return values + id / 32 * 32;
}
u64 __shfl_sync(u32, u64 value, u32 lane) { return lanes(value)[lane]; }
u32 __reduce_max_sync(u32, u32 value) {
  const u64* values = lanes(value);
  return *std::max_element(values, values + 32);
}
u32 __reduce_add_sync(u32, u32 value) {
  const u64* values = lanes(value);
  return std::accumulate(values, values + 32, 0u);
}
static void pause_now_and_then() {
  random_state = random_state * 1664525u + 1013904223u;
  if ((random_state >> 29) == 0) pause(kReady);
}
void add_release(u32* p, u32 v) { *p += v; }
u32 load_acquire(const u32* p) {
  pause(kReady);
  return *p;
}
u32 acquire_from_peers(const u32* p) {
  pause(kReady);
  return *p;
}

// As the head does: the ids of a rank's block, to all ranks.
static void share_logits(const Params& params, u32 round) {
  const float* made = params.logits + round * params.launch->logits_round_stride;
  for (u32 c = 0; c < params.launch->queries; ++c) {
    const u32 end = M::Head::first_unit(blockIdx.x + 1) * 8;
    for (u32 row = M::Head::first_unit(blockIdx.x) * 8 + threadIdx.x; row < end;
         row += kConsumerThreads) {
      const u32 id = params.rank * M::kShareVocab + row;
      if (row >= M::kShareVocab || id >= M::kVocab) continue;
      for (u32 peer = 0; peer < M::kRanks; ++peer)
        if (peer == rank || !sample_state<M>().apart)
          all_logits<M>(exchanges[peer], c)[id] = made[c * M::kSampledRows + id];
    }
  }
}

static Where& own_where() { return where[rank * kNumBlocks + blockIdx.x]; }
u32 load_host_acquire(const u32* p) {
  if (static_cast<Phase>(own_where().phase) != Phase::kMask) std::abort();
  pause(kReady);
  return *p;
}
// As the host does it: what the next choice may take is there some time after the first rank's
// token, and the words of earlier rounds are gone. In the round that `ends` says the launch is to
// end instead.
static void allow(u32 round) {
  const Launch& launch = *all_params[0].launch;
  constexpr u32 kCopyWords = kMaxQueries * M::kVocabWords;
  u32* turn_words = mask_words + (M::kRanks > 1 ? (round + 1) % 2 * kCopyWords : 0);
  for (u32 c = 0; c < launch.queries; ++c) {
    if (static_cast<i32>(round + 1) < launch.query[c].forced) continue;
    const u32* words = all_masks + (round * kMaxQueries + c) * M::kVocabWords;
    std::memcpy(turn_words + c * M::kVocabWords, words, M::kVocabWords * 4);
    mask_ready[c * kMaskReadyWords] = ends && ends[c] == round ? kMaskEnd : round + 1;
  }
}

// Rounds as in decode.cu, with logits that are given.
static void body() {
  const Params& params = all_params[rank];
  Control& control = *reinterpret_cast<Control*>(shared_part<M>(M::kShControl));
  prepare_sampling<M>(*params.launch);
  if (threadIdx.x == 0) {
    control.queries = Queries{params.launch->queries};
    control.rounds = params.launch->rounds;
    control.yield = 0;
  }
  sync_consumers();
  for (u32 round = 0;; ++round) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      const u32* wish = params.yield_requested;
      control.yield = wish && *wish == round;
    }
    if (M::kRanks > 1) {
      // The sums over ranks on the way to the head: all blocks have come to this round.
      begun[rank * kNumBlocks + blockIdx.x] = round + 1;
      for (const u32& other : begun) while (other < round + 1) pause(kReady);
      share_logits(params, round);
    }
    choose_sampled<M>(params, round, &own_where());
    sync_consumers();
    const u32 c = threadIdx.x;
    if (c < control.queries) {
      const u32 at = rank * control.rounds + round;
      if (blockIdx.x == 0) tokens[at * kMaxQueries + c] = control.chosen[c];
      const bool is_given = static_cast<i32>(round + 1) < params.launch->query[c].forced;
      observe<M>(params, blockIdx.x, c, is_given ? params.forced[c * control.rounds + round + 1]
                                                 : min(control.chosen[c], M::kVocab - 1));
    }
    if (blockIdx.x == 0) num_rounds = round + 1;
    sync_consumers();
    const bool is_first = rank == 0 && blockIdx.x == 0 && threadIdx.x == 0;
    if (is_first && all_masks && round + 1 < control.rounds) {
      for (u32 i = 0; i < round % 3; ++i) pause(kReady);
      allow(round + 1);
    }
    if (control.yield_agreed || round + 1 == control.rounds) break;
  }
  pause(kEnded);
}

// Rounds done; -1 where threads wait for each other forever.
extern "C" int run(const Launch* launch, const float* logits, const u32* forced, u32* seen,
                   float* adjusted, u8* workspace, const u32* ids, const float* values,
                   const u32* yield, u32* chosen, const u32* masks, u32* words, u32* ready,
                   const u32* end_rounds) {
  constexpr u32 kValues = kMaxQueries * M::kSampledRows;
  std::memset(exchanges, 0xFF, sizeof exchanges);
  if constexpr (M::kRanks > 1)
    for (u8* own : exchanges) std::memset(own + M::kWsBest, 0, M::kWsBestBytes);
  std::memset(begun, 0, sizeof begun);
  before_load = pause_now_and_then;
  std::memset(lane_turns, 0, sizeof lane_turns);
  for (u32 r = 0; r < M::kRanks; ++r) {
    Params& params = all_params[r];
    params = Params{};
    params.launch = launch;
    params.logits = const_cast<float*>(logits);
    params.forced = forced;
    if (r == 0) params.yield_requested = yield;  // the others are told
    u8* own = workspace + r * kSampleWorkspaceBytes;
    params.sample = {seen + r * kValues, adjusted + r * kValues, own, ids, values};
    params.masks = {words, ready};
    params.rank = r;
    params.workspace = exchanges[r];
    for (u32 p = 0; p < M::kRanks; ++p) params.peers[p] = exchanges[p];
  }
  all_masks = masks;
  ends = end_rounds;
  mask_words = words;
  mask_ready = ready;
  if (masks) allow(0);
  tokens = chosen;
  std::memset(memory, 0xA5, sizeof memory);
  for (u32 i = 0; i < kAll; ++i) {
    Thread& thread = threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack;
    thread.context.uc_stack.ss_size = sizeof thread.stack;
    thread.context.uc_link = &scheduler;
    thread.state = kReady;
    makecontext(&thread.context, body, 0);
  }
  for (u32 sweep = 0; sweep < 100000; ++sweep) {
    random_state = random_state * 1664525u + 1013904223u;
    const u32 start = random_state >> 8, step = (random_state >> 4 & 1) ? 1 : kAll - 1;
    bool ended = true;
    for (u32 n = 0, i = start % kAll; n < kAll; ++n, i = (i + step) % kAll) {
      ended = ended && threads[i].state == kEnded;
      if (threads[i].state != kReady) continue;
      random_state = random_state * 1664525u + 1013904223u;
      if ((random_state >> 28) == 0) continue;
      rank = i / kConsumerThreads / kNumBlocks;
      blockIdx.x = i / kConsumerThreads % kNumBlocks;
      threadIdx.x = i % kConsumerThreads;
      swapcontext(&scheduler, &threads[i].context);
    }
    if (ended) return num_rounds;
    for (u32 begin = 0; begin < kAll; begin += 32) {
      bool all = true;
      for (u32 i = 0; i < 32; ++i) all = all && threads[begin + i].state == kAtWarp;
      for (u32 i = 0; all && i < 32; ++i) threads[begin + i].state = kReady;
    }
    for (u32 b = 0; b < M::kRanks * kNumBlocks; ++b) {
      const u32 begin = b * kConsumerThreads;
      bool all = true;
      for (u32 i = 0; i < kConsumerThreads; ++i) all = all && threads[begin + i].state == kAtBlock;
      for (u32 i = 0; all && i < kConsumerThreads; ++i) threads[begin + i].state = kReady;
    }
  }
  return -1;
}
"""


@dataclass(frozen=True)
class Built:
    plan: Plan
    code: ctypes.CDLL


@pytest.fixture(scope="module")
def library(request, tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the CUDA sampler for the host")
    folder = tmp_path_factory.mktemp("choose")
    for name in ("ptx", "ops"):
        (folder / name).mkdir()
    context = (CUDA / "tile" / "context.cuh").read_text()
    structs = context[context.index("// Of the launch.") : context.index("extern __shared__")]
    macros = "#define __constant__\n#define __device__\n#define __forceinline__ inline\n"
    macros += "struct float2 { float x, y; };\n"
    asked = request.param
    ranks, queries = asked if isinstance(asked, tuple) else (asked, MAX_QUERIES)
    gpu = replace(TYPICAL["sm_90a"], num_sms=BLOCKS[ranks])
    plan = make_plan(SMALL, Dtype.BF16, gpu, ranks)
    assert plan.blocks == BLOCKS[ranks]
    spec = header(plan, Build(samples=True, queries=queries)).replace(
        "#pragma once", "#pragma once\n" + macros
    )
    (folder / "ptx" / "memory.cuh").write_text(MEMORY + STORES + '#include "spec.cuh"\n')
    (folder / "ops" / "head.cuh").write_text(HEAD + structs + HEAD_OF_RANKS)
    (folder / "spec.cuh").write_text(spec)
    (folder / "harness.cc").write_text(HARNESS)
    built = folder / "choose.so"
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-Wno-unused", "-fPIC", "-shared"]
    subprocess.run(
        [*command, f"-I{folder}", f"-I{CUDA}", "-o", built, folder / "harness.cc"], check=True
    )
    return Built(plan, ctypes.CDLL(str(built)))


def launched(
    library,
    samplers,
    logits,
    *,
    given=None,
    strides=None,
    plain=(),
    yield_in=None,
    masks=None,
    ends=None,
):
    """Tokens [rounds, queries]; sampler c has observed query c's first input token already.

    masks: [rounds, MAX_QUERIES, words] for queries whose sampler is constrained.
    ends: by query, the round in which it ends the launch instead of getting a mask.
    """
    rounds, queries = logits.shape[:2]
    ranks, size = library.plan.ranks, library.plan.exchanges.sampled_rows
    given = given or [[0]] * queries
    strides = strides or [1] * queries
    launch = np.zeros((), LAUNCH.dtype)
    launch["queries"], launch["rounds"] = queries, rounds
    launch["logits_round_stride"] = queries * size
    forced = np.zeros((queries, rounds), np.uint32)
    for c in range(queries):
        start = launch["query"][c]
        start["position"], start["stride"], start["forced"] = 70 + c, strides[c], len(given[c])
        forced[c, : len(given[c])] = given[c]
    choices = [
        None
        if c in plain
        else Choice(
            s.params,
            s.counts,
            s.stop_test.ending_ids,
            masks[0, c] if s.is_constrained else None,
        )
        for c, s in enumerate(samplers)
    ]
    packed = pack_choices(choices, [70 + c for c in range(queries)], VOCAB)
    launch["sampling"], launch["step"] = packed.params, packed.steps
    seen = np.full((ranks, MAX_QUERIES, size), 77, np.uint32)
    for c, words in packed.seen.items():
        seen[:, c, :VOCAB] = words
    adjusted = np.full((ranks, MAX_QUERIES, size), np.nan, np.float32)
    workspace = np.zeros(ranks * sample_workspace_bytes(library.plan.blocks) + 128, np.uint8)
    aligned = workspace[-workspace.ctypes.data % 128 :]
    tokens = np.zeros((ranks, rounds, MAX_QUERIES), np.uint32)
    yield_word = None if yield_in is None else np.array([yield_in], np.uint32)
    padded = np.full((rounds, queries, size), np.inf, np.float32)
    padded[:, :, :VOCAB] = logits
    # The kernel's side of the masks: words of one round, of ranks of two, and ready.
    words = np.zeros((2, MAX_QUERIES, WORDS), np.uint32)
    ready = np.zeros((MAX_QUERIES, MASK_READY_WORDS), np.uint32)
    end_rounds = None if ends is None else np.array(ends, np.uint32)
    done = library.code.run(
        address(launch),
        *map(address, (padded, forced, seen, adjusted, aligned)),
        *map(address, (packed.list_ids, packed.list_values)),
        None if yield_word is None else address(yield_word), address(tokens),
        None if masks is None else address(masks), address(words), address(ready),
        None if end_rounds is None else address(end_rounds),
    )  # fmt: skip
    assert done > 0, "threads wait for each other forever"
    assert (tokens[:, :done] == tokens[0, :done]).all(), "ranks choose alike"
    return tokens[0, :done, :queries]


def sampler_of(params, prompt=(1, 5, 5, 7), observed=4, constraint=None):
    sampler = Sampler(params, VOCAB, prompt, eos_ids=(3,), constraint=constraint)
    sampler.observe(observed)
    return sampler


def random_logits(rounds, queries, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rounds, queries, VOCAB)).astype(np.float32) * 3


def requests():
    every = {
        "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.2,
        "logit_bias": {2: 4.0, 3: 9.0}, "min_tokens": 6, "stop_token_ids": frozenset({9}),
    }  # fmt: skip
    return [
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(),
        SamplingParams(temperature=1.2, seed=2**63, top_k=7, top_p=0.9),
        SamplingParams(**every),
        SamplingParams(temperature=1.5, seed=3, min_p=0.05, **every),
        SamplingParams(logit_bias={5: 3.0}, min_tokens=3),
        SamplingParams(temperature=0.3, seed=4, top_p=0.7, frequency_penalty=2.0),
        SamplingParams(temperature=2.0, seed=5, top_k=300),
    ]


@ON_RANKS
@pytest.mark.parametrize("queries", [1, 3, 5, 8])
def test_rounds_of_a_launch_are_the_definitions(library, queries):
    samplers = [sampler_of(p) for p in requests()[-queries:]]
    given = [[4], [4, 11, 4], [4, 8]] * 3
    logits = random_logits(12, queries, seed=queries)
    plain = [c for c, s in enumerate(samplers) if s.params == SamplingParams()]
    tokens = launched(library, samplers, logits, given=given[:queries], plain=plain)
    assert len(tokens) == 12
    for c, sampler in enumerate(samplers):
        for r in range(12):
            expected = sampler.pick(torch.from_numpy(logits[r, c]), 71 + c + r)
            assert tokens[r, c] == expected, f"query {c}, round {r}: {sampler.params}"
            sampler.observe(given[c][r + 1] if r + 1 < len(given[c]) else expected)


@ON_RANKS
@pytest.mark.parametrize("queries", [1, 3])
def test_ranks_look_at_their_own_logits_where_no_query_needs_all(library, queries):
    """Neither filters nor penalties nor masks: logits stay where they are made."""
    every = [
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(logit_bias={5: 3.0}, min_tokens=3),
        SamplingParams(temperature=2.0, seed=5, logit_bias={9: 1.0}),
    ]
    samplers = [sampler_of(p) for p in every[:queries]]
    logits = random_logits(12, queries, seed=30 + queries)
    tokens = launched(library, samplers, logits, yield_in=9)
    assert len(tokens) == 10, "all blocks hear that the host wants to stop"
    for c, sampler in enumerate(samplers):
        for r in range(10):
            expected = sampler.pick(torch.from_numpy(logits[r, c]), 71 + c + r)
            assert tokens[r, c] == expected
            sampler.observe(expected)


@FOR_ONE_QUERY
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=t, seed=s) for t, s in ((1.0, 5), (0.7, 2**63))]
    + [SamplingParams(temperature=1.0, seed=1, top_k=7), SamplingParams(logit_bias={5: 3.0})],
    ids=["plain", "plain, colder", "filtered", "greedy, biased"],
)
@pytest.mark.parametrize("is_close", [False, True], ids=["apart", "close"])
def test_a_query_alone_is_the_definitions(library, params, is_close):
    """Of two tokens left, noise of one may come near the other's, which is then looked at again."""
    sampler, logits = sampler_of(params), random_logits(24, 1, seed=77)
    if is_close:
        logits[:] = -100.0
        logits[:, 0, [5, VOCAB - 2]] = 1.0
    tokens = launched(library, [sampler], logits, given=[[4, 8]], yield_in=20)
    assert len(tokens) == 21, "all blocks hear that the host wants to stop"
    for r in range(21):
        expected = sampler.pick(torch.from_numpy(logits[r, 0]), 71 + r)
        assert tokens[r, 0] == expected
        sampler.observe(8 if r == 0 else expected)


@FOR_ONE_QUERY
def test_bad_logits_of_a_query_alone_end_the_launch(library):
    logits = random_logits(9, 1, seed=3)
    logits[4, 0, 17] = math.nan
    tokens = launched(library, [sampler_of(SamplingParams(temperature=1.0, seed=5))], logits)
    assert len(tokens) == 5
    assert bad_score(tokens[4, 0]) is not None
    assert (tokens[:4] < VOCAB).all()


@ON_ONE
def test_positions_side_by_side_choose_by_their_position(library):
    params = SamplingParams(temperature=1.1, seed=9, top_p=0.95)
    samplers = [sampler_of(params) for _ in range(4)]
    logits = random_logits(5, 4, seed=0)
    tokens = launched(library, samplers, logits, strides=[4] * 4)
    for c, sampler in enumerate(samplers):
        for r in range(5):
            assert tokens[r, c] == sampler.pick(torch.from_numpy(logits[r, c]), 71 + c + 4 * r)


@ON_ONE
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("params", [requests()[i] for i in (0, 2, 4)], ids=["plain", "top", "all"])
def test_bad_logits_end_the_launch(library, params, bad):
    samplers = [sampler_of(requests()[0]), sampler_of(params)]
    logits = random_logits(9, 2, seed=3)
    if math.isinf(bad) and bad < 0:
        logits[4, 1] = bad
    else:
        logits[4, 1, 17] = bad
    tokens = launched(library, samplers, logits)
    assert len(tokens) == 5
    score = bad_score(tokens[4, 1])
    with pytest.raises(BadLogits) as refused, np.errstate(invalid="ignore"):
        samplers[1].pick(torch.from_numpy(logits[4, 1]), 76)
    assert f"position 76 is {score} " in refused.value.message
    assert (tokens[:, 0] < VOCAB).all()


MASKED = [2, 0, 5, 4, 7, 3, 6, 1]


def masked_samplers(queries, seed):
    """Some constrained and some not, each in its own way."""
    requests_of = requests()
    return [
        sampler_of(
            requests_of[MASKED[c]], constraint=None if c % 3 == 1 else Drawn(VOCAB, seed + c)
        )
        for c in range(queries)
    ]


@ON_RANKS
@pytest.mark.parametrize("queries", [1, 3, 8])
def test_queries_choose_what_the_host_allows(library, queries):
    rounds, seed = 9, 40 * queries
    given = [[4], [4, 11, 4], [4, 8]] * 3
    logits = random_logits(rounds, queries, seed)
    samplers, masks = (
        masked_samplers(queries, seed),
        np.zeros((rounds, MAX_QUERIES, WORDS), np.uint32),
    )
    wanted = np.zeros((rounds, queries), np.uint32)
    for c, sampler in enumerate(masked_samplers(queries, seed)):
        for r in range(rounds):
            is_given = r + 1 < len(given[c])
            if sampler.is_constrained and not is_given:
                masks[r, c] = sampler.allowed()
                wanted[r, c] = sampler.pick(torch.from_numpy(logits[r, c]), 71 + c + r)
            else:  # what it may choose does not matter where the host gives the token
                free = sampler_like(sampler)
                wanted[r, c] = free.pick(torch.from_numpy(logits[r, c]), 71 + c + r)
            sampler.observe(given[c][r + 1] if is_given else int(wanted[r, c]))
    tokens = launched(library, samplers, logits, given=given[:queries], masks=masks)
    assert (tokens == wanted).all()
    free = launched(library, [sampler_like(s) for s in samplers], logits, given=given[:queries])
    assert (free != tokens).any(), "the masks matter"


def sampler_like(sampler):
    """The same without a constraint."""
    made = Sampler(sampler.params, VOCAB, (1, 5, 5, 7), eos_ids=(3,))
    for token_id in sampler.output_ids:
        made.observe(token_id)
    return made


@ON_RANKS
@pytest.mark.parametrize("query", [0, 2])
def test_the_host_ends_a_launch_instead_of_giving_a_mask(library, query):
    samplers = masked_samplers(3, seed=2)
    masks = np.full((9, MAX_QUERIES, WORDS), 0xFFFFFFFF, np.uint32)
    logits = random_logits(9, 3, seed=6)
    ends = [99] * MAX_QUERIES
    whole = launched(library, samplers, logits, masks=masks, ends=ends)
    assert len(whole) == 9
    ends[query] = 4
    cut = launched(library, masked_samplers(3, seed=2), logits, masks=masks, ends=ends)
    assert len(cut) == 5, "all blocks end together"
    assert (cut == whole[:5]).all(), "and the other queries' tokens count"


@ON_ONE
def test_a_query_that_may_choose_nothing_is_told_so(library):
    samplers = masked_samplers(1, seed=3)
    masks = np.full((9, MAX_QUERIES, WORDS), 0xFFFFFFFF, np.uint32)
    masks[3] = 0
    tokens = launched(library, samplers, random_logits(9, 1, seed=7), masks=masks)
    assert len(tokens) == 4
    assert bad_score(tokens[3, 0]) == -math.inf


@ON_ONE
def test_bad_logits_before_a_given_token_end_nothing(library):
    samplers = [sampler_of(requests()[0])]
    logits = random_logits(6, 1, seed=4)
    logits[1] = math.nan
    tokens = launched(library, samplers, logits, given=[[4, 5, 6]])
    assert len(tokens) == 6
    assert tokens[1, 0] == NO_TOKEN["NAN"][0]


@ON_RANKS
def test_all_blocks_hear_that_the_host_wants_to_stop(library):
    tokens = launched(library, [sampler_of(requests()[2])], random_logits(9, 1, seed=5), yield_in=3)
    assert len(tokens) == 4
