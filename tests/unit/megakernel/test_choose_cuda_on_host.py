"""Many rounds of `ops/choose.cuh`, compiled by g++, take the tokens of soloist.sampling.

The stand-in for CUDA and the random schedule are those of test_sample_cuda_on_host.py; here blocks
meet at the kernel's own barrier, and what one round leaves behind is what the next one starts from.
"""

import ctypes
import math
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from plan.shapes import SMALL
from soloist.errors import BadLogits
from soloist.megakernel.choice import Choice, pack_choices
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import MASK_TURN_WORDS, Build, header
from soloist.megakernel.launch import _Column, _Launch
from soloist.megakernel.plan import MAX_COLUMNS, make_plan
from soloist.megakernel.sampling_header import NO_TOKEN, bad_score, sample_workspace_bytes
from soloist.model.dtype import Dtype
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import num_words
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY, address
from unit.sampling.constraints import Drawn

BLOCKS = 3
PLAN = make_plan(SMALL, Dtype.BF16, replace(TYPICAL["sm_90a"], num_sms=BLOCKS))
VOCAB, ROWS = SMALL.vocab_size, PLAN.head.matrix.units * 8
WORDS = num_words(VOCAB)

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
u32 load_host_acquire(const u32* p);
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
struct Fault;
struct float2 { float x, y; };
template <class Op> u32 first_unit(u32 block) { return block * Op::kUnits / kNumBlocks; }
inline u32 lane_here() { return 0; }
inline u32 lane_block() { return blockIdx.x; }
"""

HARNESS = r"""
#include "ops/choose.cuh"

enum State { kReady, kAtBlock, kEnded };
constexpr u32 kAll = kNumBlocks * kConsumerThreads;
struct Thread {
  ucontext_t context;
  State state;
  char stack[32 * 1024];
};
static Thread threads[kAll];
static ucontext_t scheduler;
alignas(128) static u8 memory[kNumBlocks][kRingSlots * kSlotBytes + kShControl + kShControlBytes];
static Params params;
static u32* tokens;
static const u32 *all_masks, *ends;
static u32 *mask_words, *mask_turns;
static Where where[kNumBlocks];
static u32 num_rounds, random_state = 1;

static u8* block_memory() { return memory[blockIdx.x]; }
static void pause(State state) {
  const u32 id = blockIdx.x * kConsumerThreads + threadIdx.x;
  threads[id].state = state;
  swapcontext(&threads[id].context, &scheduler);
}
void sync_consumers() { pause(kAtBlock); }
void add_release(u32* p, u32 v) { *p += v; }
u32 load_acquire(const u32* p) {
  pause(kReady);
  return *p;
}
u32 load_host_acquire(const u32* p) {
  if (static_cast<Phase>(where[blockIdx.x].phase) != Phase::kMask) std::abort();
  pause(kReady);
  return *p;
}
// As the host does it: what the next choice may take is there some time after the token, and the
// words of earlier rounds are gone. In the round that `ends` says the launch is to end instead.
static void allow(u32 round) {
  for (u32 c = 0; c < params.launch->columns; ++c) {
    if (static_cast<i32>(round + 1) < params.launch->column[c].forced) continue;
    const u32* words = all_masks + (round * kMaxColumns + c) * kVocabWords;
    std::memcpy(mask_words + c * kVocabWords, words, kVocabWords * 4);
    mask_turns[c * kMaskTurnWords] = ends && ends[c] == round ? kMaskEnd : round + 1;
  }
}

// Rounds as in decode.cu, with logits that are given.
static void body() {
  Control& control = *reinterpret_cast<Control*>(shared_part(kShControl));
  prepare_sampling(*params.launch);
  if (threadIdx.x == 0) {
    control.columns = params.launch->columns;
    control.rounds = params.launch->rounds;
    control.yield = 0;
  }
  sync_consumers();
  for (u32 round = 0;; ++round) {
    if (blockIdx.x == 0 && threadIdx.x == 0) control.yield = params.yield && *params.yield == round;
    choose_sampled(params, round, &where[blockIdx.x]);
    sync_consumers();
    const u32 c = threadIdx.x;
    if (c < control.columns) {
      if (blockIdx.x == 0) tokens[round * kMaxColumns + c] = control.chosen[c];
      const bool is_given = static_cast<i32>(round + 1) < params.launch->column[c].forced;
      observe(params, blockIdx.x, c, is_given ? params.forced[c * control.rounds + round + 1]
                                              : min(control.chosen[c], kVocab - 1));
    }
    if (blockIdx.x == 0) num_rounds = round + 1;
    sync_consumers();
    if (blockIdx.x == 0 && threadIdx.x == 0 && all_masks && round + 1 < control.rounds) {
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
                   const u32* yield, u32* chosen, const u32* masks, u32* words, u32* turns,
                   const u32* end_rounds) {
  params = Params{};
  params.launch = launch;
  params.logits = const_cast<float*>(logits);
  params.forced = forced;
  params.yield = yield;
  params.sample = {seen, adjusted, workspace, ids, values};
  params.masks = {words, turns};
  all_masks = masks;
  ends = end_rounds;
  mask_words = words;
  mask_turns = turns;
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
      blockIdx.x = i / kConsumerThreads;
      threadIdx.x = i % kConsumerThreads;
      swapcontext(&scheduler, &threads[i].context);
    }
    if (ended) return num_rounds;
    for (u32 b = 0; b < kNumBlocks; ++b) {
      const u32 begin = b * kConsumerThreads;
      bool all = true;
      for (u32 i = 0; i < kConsumerThreads; ++i) all = all && threads[begin + i].state == kAtBlock;
      for (u32 i = 0; all && i < kConsumerThreads; ++i) threads[begin + i].state = kReady;
    }
  }
  return -1;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the CUDA sampler for the host")
    folder = tmp_path_factory.mktemp("choose")
    for name in ("ptx", "ops"):
        (folder / name).mkdir()
    context = (CUDA / "sync" / "context.cuh").read_text()
    structs = context[context.index("struct ColumnStart") : context.index("extern __shared__")]
    wait = (CUDA / "sync" / "wait.cuh").read_text()
    structs += wait[wait.index("enum class Phase") : wait.index("// Host memory: 1")]
    macros = "#define __constant__\n"
    spec = header(PLAN, Build(samples=True)).replace("#pragma once", "#pragma once\n" + macros)
    (folder / "ptx" / "memory.cuh").write_text(MEMORY + '#include "spec.cuh"\n')
    (folder / "ops" / "head.cuh").write_text(HEAD + structs)
    (folder / "spec.cuh").write_text(spec)
    (folder / "harness.cc").write_text(HARNESS)
    built = folder / "choose.so"
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-Wno-unused", "-fPIC", "-shared"]
    subprocess.run(
        [*command, f"-I{folder}", f"-I{CUDA}", "-o", built, folder / "harness.cc"], check=True
    )
    return ctypes.CDLL(str(built))


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
    """Tokens [rounds, columns]; sampler c has observed column c's first input token already.

    masks: [rounds, MAX_COLUMNS, words] for columns whose sampler is constrained.
    ends: by column, the round in which it ends the launch instead of getting a mask.
    """
    rounds, columns = logits.shape[:2]
    given = given or [[0]] * columns
    strides = strides or [1] * columns
    launch = _Launch(columns=columns, rounds=rounds, logits_round_stride=columns * ROWS)
    forced = np.zeros((columns, rounds), np.uint32)
    for c in range(columns):
        launch.column[c] = _Column(0, 70 + c, strides[c], len(given[c]), 0, 0)
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
    packed = pack_choices(choices, [70 + c for c in range(columns)], VOCAB)
    launch.sampling[:] = packed.params.tobytes()
    launch.step[:] = packed.steps.tobytes()
    seen = np.full((MAX_COLUMNS, ROWS), 77, np.uint32)
    for c, words in packed.seen.items():
        seen[c, :VOCAB] = words
    adjusted = np.full((MAX_COLUMNS, ROWS), np.nan, np.float32)
    workspace = np.zeros(sample_workspace_bytes(BLOCKS) + 128, np.uint8)
    aligned = workspace[-workspace.ctypes.data % 128 :]
    tokens = np.zeros((rounds, MAX_COLUMNS), np.uint32)
    yield_word = None if yield_in is None else np.array([yield_in], np.uint32)
    padded = np.full((rounds, columns, ROWS), np.inf, np.float32)
    padded[:, :, :VOCAB] = logits
    # The kernel's side of the masks: words of one round, and turns.
    words = np.zeros((MAX_COLUMNS, WORDS), np.uint32)
    turns = np.zeros((MAX_COLUMNS, MASK_TURN_WORDS), np.uint32)
    end_rounds = None if ends is None else np.array(ends, np.uint32)
    done = library.run(
        ctypes.byref(launch),
        *map(address, (padded, forced, seen, adjusted, aligned)),
        *map(address, (packed.list_ids, packed.list_values)),
        None if yield_word is None else address(yield_word), address(tokens),
        None if masks is None else address(masks), address(words), address(turns),
        None if end_rounds is None else address(end_rounds),
    )  # fmt: skip
    assert done > 0, "threads wait for each other forever"
    return tokens[:done, :columns]


def sampler_of(params, prompt=(1, 5, 5, 7), observed=4, constraint=None):
    sampler = Sampler(params, VOCAB, prompt, eos_ids=(3,), constraint=constraint)
    sampler.observe(observed)
    return sampler


def random_logits(rounds, columns, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rounds, columns, VOCAB)).astype(np.float32) * 3


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


@pytest.mark.parametrize("columns", [1, 3, 5, 8])
def test_rounds_of_a_launch_are_the_definitions(library, columns):
    samplers = [sampler_of(p) for p in requests()[-columns:]]
    given = [[4], [4, 11, 4], [4, 8]] * 3
    logits = random_logits(12, columns, seed=columns)
    plain = [c for c, s in enumerate(samplers) if s.params == SamplingParams()]
    tokens = launched(library, samplers, logits, given=given[:columns], plain=plain)
    assert len(tokens) == 12
    for c, sampler in enumerate(samplers):
        for r in range(12):
            expected = sampler.pick(torch.from_numpy(logits[r, c]), 71 + c + r)
            assert tokens[r, c] == expected, f"column {c}, round {r}: {sampler.params}"
            sampler.observe(given[c][r + 1] if r + 1 < len(given[c]) else expected)


def test_positions_side_by_side_choose_by_their_position(library):
    params = SamplingParams(temperature=1.1, seed=9, top_p=0.95)
    samplers = [sampler_of(params) for _ in range(4)]
    logits = random_logits(5, 4, seed=0)
    tokens = launched(library, samplers, logits, strides=[4] * 4)
    for c, sampler in enumerate(samplers):
        for r in range(5):
            assert tokens[r, c] == sampler.pick(torch.from_numpy(logits[r, c]), 71 + c + 4 * r)


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


def masked_samplers(columns, seed):
    """Some constrained and some not, each in its own way."""
    requests_of = requests()
    return [
        sampler_of(
            requests_of[MASKED[c]], constraint=None if c % 3 == 1 else Drawn(VOCAB, seed + c)
        )
        for c in range(columns)
    ]


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_columns_choose_what_the_host_allows(library, columns):
    rounds, seed = 9, 40 * columns
    given = [[4], [4, 11, 4], [4, 8]] * 3
    logits = random_logits(rounds, columns, seed)
    samplers, masks = (
        masked_samplers(columns, seed),
        np.zeros((rounds, MAX_COLUMNS, WORDS), np.uint32),
    )
    wanted = np.zeros((rounds, columns), np.uint32)
    for c, sampler in enumerate(masked_samplers(columns, seed)):
        for r in range(rounds):
            is_given = r + 1 < len(given[c])
            if sampler.is_constrained and not is_given:
                masks[r, c] = sampler.allowed()
                wanted[r, c] = sampler.pick(torch.from_numpy(logits[r, c]), 71 + c + r)
            else:  # what it may choose does not matter where the host gives the token
                free = sampler_like(sampler)
                wanted[r, c] = free.pick(torch.from_numpy(logits[r, c]), 71 + c + r)
            sampler.observe(given[c][r + 1] if is_given else int(wanted[r, c]))
    tokens = launched(library, samplers, logits, given=given[:columns], masks=masks)
    assert (tokens == wanted).all()
    free = launched(library, [sampler_like(s) for s in samplers], logits, given=given[:columns])
    assert (free != tokens).any(), "the masks matter"


def sampler_like(sampler):
    """The same without a constraint."""
    made = Sampler(sampler.params, VOCAB, (1, 5, 5, 7), eos_ids=(3,))
    for token_id in sampler.output_ids:
        made.observe(token_id)
    return made


@pytest.mark.parametrize("column", [0, 2])
def test_the_host_ends_a_launch_instead_of_giving_a_mask(library, column):
    samplers = masked_samplers(3, seed=2)
    masks = np.full((9, MAX_COLUMNS, WORDS), 0xFFFFFFFF, np.uint32)
    logits = random_logits(9, 3, seed=6)
    ends = [99] * MAX_COLUMNS
    whole = launched(library, samplers, logits, masks=masks, ends=ends)
    assert len(whole) == 9
    ends[column] = 4
    cut = launched(library, masked_samplers(3, seed=2), logits, masks=masks, ends=ends)
    assert len(cut) == 5, "all blocks end together"
    assert (cut == whole[:5]).all(), "and the other columns' tokens count"


def test_a_column_that_may_choose_nothing_is_told_so(library):
    samplers = masked_samplers(1, seed=3)
    masks = np.full((9, MAX_COLUMNS, WORDS), 0xFFFFFFFF, np.uint32)
    masks[3] = 0
    tokens = launched(library, samplers, random_logits(9, 1, seed=7), masks=masks)
    assert len(tokens) == 4
    assert bad_score(tokens[3, 0]) == -math.inf


def test_bad_logits_before_a_given_token_end_nothing(library):
    samplers = [sampler_of(requests()[0])]
    logits = random_logits(6, 1, seed=4)
    logits[1] = math.nan
    tokens = launched(library, samplers, logits, given=[[4, 5, 6]])
    assert len(tokens) == 6
    assert tokens[1, 0] == NO_TOKEN["NAN"][0]


def test_all_blocks_hear_that_the_host_wants_to_stop(library):
    tokens = launched(library, [sampler_of(requests()[2])], random_logits(9, 1, seed=5), yield_in=3)
    assert len(tokens) == 4
