"""The CUDA sampler, compiled by g++, takes the tokens of soloist.sampling.

A small header stands in for CUDA, and coroutines for the threads of all blocks
(`threads_on_host.py`).
"""

import ctypes
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import soloist
from soloist.errors import BadLogits
from soloist.megakernel.abi import SAMPLE_PARAMS, SAMPLE_STEP
from soloist.megakernel.sampling_header import (
    SEEN_IN_PROMPT,
    ListSpan,
    packed_params,
    packed_steps,
    sampling_constants,
    sampling_words,
)
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import num_words
from soloist.sampling.elementary import integer_weights
from soloist.sampling.noise import gumbel_of_words
from unit.megakernel.threads_on_host import THREADS
from unit.sampling.constraints import Drawn

CUDA = Path(soloist.__file__).parent / "cuda"
COLUMNS = 8
BAD_LOGITS = 1

MEMORY = r"""
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#define __device__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#include "ptx/types.cuh"
struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline u32 load_host(const u32* p) { return *p; }
inline void (*before_load)() = nullptr;  // a harness may let other threads run
inline uint4 load_exchanged(const void* p) {
  if (before_load) before_load();
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}
template <class To, class From> To bits_to(From x) { To y; std::memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { return bits_to<u32>(x); }
inline i32 __float_as_int(float x) { return bits_to<i32>(x); }
inline float __uint_as_float(u32 x) { return bits_to<float>(x); }
inline float __int_as_float(i32 x) { return bits_to<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __int2float_rn(i32 x) { return static_cast<float>(x); }
inline float __uint2float_rn(u32 x) { return static_cast<float>(x); }
inline i32 __float2int_rn(float x) { return static_cast<i32>(std::nearbyintf(x)); }
inline u64 __float2ull_rn(float x) { return static_cast<u64>(std::nearbyintf(x)); }
inline u32 __float2uint_rz(float x) { return x >= 4294967296.0f ? ~0u : static_cast<u32>(x); }
inline float __log2f(float x) { return std::log2(x); }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u64>(a) * b >> 32; }
template <class T> T atomicAdd(T* p, T x) { T old = *p; *p += x; return old; }
"""

STORES = "inline void store_exchanged(void* p, uint4 v) { std::memcpy(p, &v, 16); }\n"

HARNESS = r"""
static SampleArgs args;
static u32* history;
static u32 drafts[kMaxQueries], num_drafts;  // by query, what it takes; query 0 takes none
static u32 bounds[kNumBlocks + 1];
static SampleScratch scratch;
static SampleShared shared_memory[kNumBlocks];
static SampleEpochs epochs[kAll];

struct Grid : HostGrid {
  void acquire() const {}
  u32 num_records() const { return kNumBlocks; }
  void publish(SampleScratch& scratch, u32 copy, u32 query, uint4 record) const {
    store_exchanged(&scratch.records[copy][query][block()], record);
  }
  uint4 record(const SampleScratch& scratch, u32 copy, u32 query, u32 n) const {
    return load_exchanged(&scratch.records[copy][query][n]);
  }
  u32 num_unseen(u32 query, u32 token) const {
    return num_drafts ? std::count(drafts + 1, drafts + query + 1, token) : 0;
  }
};

static void body(unsigned id) {
  Grid grid{{id}};
  SampleArgs own = args;
  own.row_begin = bounds[grid.block()];
  own.row_end = bounds[grid.block() + 1];
  own.note = (grid.block() == 0) == (args.queries % 2 == 1);
  SampleShared& shared = shared_memory[grid.block()];
  sample_tokens(grid, own, scratch, shared, epochs[id]);
  for (u32 c = 0; c < args.queries; ++c) {
    const bool is_mine = grid.thread() == 0 && shared.results[c].status == kSampled;
    if (is_mine) record_token(history + static_cast<u64>(args.params[c].history) * args.stride,
                              shared.results[c].token, own.row_begin, own.row_end);
  }
}

// Barriers over the grid; -1 where threads wait for each other forever, -2 where blocks disagree.
extern "C" int choose(const SampleParams* params, const SampleStep* steps, const float* logits,
                      float* adjusted, u32* seen, const u32* ids, const float* values, u32 stride,
                      u32 queries, const u32* row_bounds, const u32* masks, u32 mask_stride,
                      u32 masked, SampleResult* results) {
  args = {params, steps, logits, adjusted, seen, ids, values, stride, 0, 0, queries, 0,
          masks, mask_stride, masked};
  history = seen;
  std::memcpy(bounds, row_bounds, sizeof bounds);
  std::memset(shared_memory, 0xA5, sizeof shared_memory);
  before_load = pause_now_and_then;
  const int grid_syncs = run_threads(body);
  if (grid_syncs < 0) return grid_syncs;
  std::memcpy(results, shared_memory[0].results, queries * sizeof *results);
  for (u32 b = 0; b < kNumBlocks; ++b)
    if (std::memcmp(results, shared_memory[b].results, queries * sizeof *results) ||
        shared_memory[b].note != queries % 2)
      return -2;
  return grid_syncs;
}

extern "C" void set_drafts(const u32* ids, u32 count) {
  std::memcpy(drafts, ids, count * sizeof *ids);
  num_drafts = count;
}

extern "C" void elementary(const u32* words, const float* gaps, float* noise, u64* weights, u32 n) {
  for (u32 i = 0; i < n; ++i) {
    noise[i] = exact::gumbel_of_word(words[i]);
    weights[i] = exact::integer_weight(gaps[i]);
  }
}
"""

RESULT = np.dtype([("token", np.uint32), ("status", np.uint32), ("best", np.float32)])


def build(folder: Path, blocks: int, threads: int) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the CUDA sampler for the host")
    (folder / "ptx").mkdir(exist_ok=True)
    (folder / "ptx" / "memory.cuh").write_text(MEMORY + STORES)
    sizes = {"kNumBlocks": blocks, "kConsumerThreads": threads, "kMaxQueries": COLUMNS}
    lines = [f"constexpr unsigned {name} = {size};" for name, size in sizes.items()]
    (folder / "spec.cuh").write_text(
        "\n".join(["#pragma once", '#include "ptx/memory.cuh"', *lines, ""])
        + sampling_constants()
        + sampling_words()
        + f"{SAMPLE_PARAMS.cuda}\n{SAMPLE_STEP.cuda}\n"
    )
    (folder / "harness.cc").write_text(f'#include "ops/sample.cuh"\n{THREADS}{HARNESS}')
    library = folder / "sampler.so"
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-fPIC", "-shared", f"-I{folder}", f"-I{CUDA}"]
    subprocess.run([*command, "-o", library, folder / "harness.cc"], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module", params=[(5, 32), (3, 64)], ids=["5x32", "3x64"])
def machine(request, tmp_path_factory):
    blocks, threads = request.param
    return build(tmp_path_factory.mktemp("sampler"), blocks, threads), blocks


def address(array):
    return ctypes.c_void_p(array.ctypes.data)


def bounds_of(vocab, blocks):
    """Units of 8 ids spread as the plan does."""
    units = -(-vocab // 8)
    return np.array([min(vocab, b * units // blocks * 8) for b in range(blocks + 1)], np.uint32)


class Round:
    """Queries with their own requests, chosen by the sampler under test and by the definition."""

    def __init__(self, machine, vocab, requests, prompts, eos_ids, constraints=None):
        self.library, blocks = machine
        self.vocab = vocab
        self.stride = vocab + 5
        constraints = constraints or [None] * len(requests)
        self.samplers = [
            Sampler(p, vocab, prompt, eos_ids, constraint)
            for p, prompt, constraint in zip(requests, prompts, constraints, strict=True)
        ]
        self.bounds = bounds_of(vocab, blocks)
        self.seen = np.zeros((COLUMNS, self.stride), np.uint32)
        ids, values, packed = [], [], []
        for c, sampler in enumerate(self.samplers):
            self.seen[COLUMNS - 1 - c, prompts[c]] = SEEN_IN_PROMPT
            ban = ListSpan(len(ids), len(sampler.stop_test.ending_ids))
            ids += sampler.stop_test.ending_ids
            bias = ListSpan(len(ids), len(sampler.params.logit_bias))
            ids += sampler.params.logit_bias
            values += [0.0] * (len(ids) - len(values) - bias.count)
            values += sampler.params.logit_bias.values()
            packed.append(packed_params(sampler.params, vocab, ban, bias, COLUMNS - 1 - c))
        self.ids = np.array([*ids, 0], np.uint32)
        self.values = np.array([*values, 0], np.float32)
        self.params = np.array(packed, SAMPLE_PARAMS.dtype)

    def choose(self, logits, position):
        """One token of every query, checked; returns the barriers over the grid."""
        queries = len(self.samplers)
        padded = np.full((queries, self.stride), np.nan, np.float32)
        padded[:, : self.vocab] = logits
        adjusted = np.full_like(padded, np.nan)
        num_outputs = [len(s.output_ids) for s in self.samplers]
        steps = packed_steps([position] * queries, num_outputs)
        results = np.zeros(queries, RESULT)
        masks, masked = np.zeros((COLUMNS, num_words(self.vocab) + 2), np.uint32), 0
        for c, sampler in enumerate(self.samplers):
            if sampler.is_constrained:
                masks[c, : num_words(self.vocab)] = sampler.allowed()
                masked |= 1 << c
        arrays = (self.params, steps, padded, adjusted, self.seen, self.ids, self.values)
        syncs = self.library.choose(
            *map(address, arrays), self.stride, queries, address(self.bounds), address(masks),
            masks.shape[1], masked, address(results),
        )  # fmt: skip
        assert syncs >= 0, (
            "barriers that only some threads reach" if syncs == -1 else "blocks differ"
        )
        for c, sampler in enumerate(self.samplers):
            try:
                with np.errstate(invalid="ignore"):
                    expected = sampler.pick(torch.from_numpy(logits[c]), position)
            except BadLogits:
                assert results[c]["status"] == BAD_LOGITS
                assert not math.isfinite(results[c]["best"])
                continue
            got = (int(results[c]["status"]), int(results[c]["token"]))
            assert got == (0, expected), f"query {c}: {sampler.params}"
            sampler.observe(expected)
        return syncs


def random_params(rng, vocab):
    kind = rng.integers(8)
    chance = lambda p: rng.random() < p  # noqa: E731
    values = {"max_tokens": 100, "min_tokens": int(rng.integers(4)) if chance(0.3) else 0}
    if chance(0.4):
        values |= {
            "repetition_penalty": float(rng.choice([1.0, 1.3, 0.7])),
            "frequency_penalty": float(rng.choice([0.0, 0.37, -1.5])),
            "presence_penalty": float(rng.choice([0.0, 0.61, 2.0])),
        }
    if chance(0.3):
        biased = rng.choice(vocab, size=min(vocab, int(rng.integers(1, 50))), replace=False)
        values["logit_bias"] = {int(i): float(rng.normal() * 5) for i in biased}
    if chance(0.2):
        values["stop_token_ids"] = frozenset(map(int, rng.choice(vocab, size=2)))
    if kind == 0:
        return SamplingParams(**values)
    values["temperature"] = float(rng.choice([0.01, 0.1, 0.6, 1.0, 1.7, 40.0]))
    values["seed"] = int(rng.integers(2**63)) * 2 + int(rng.integers(2))
    if kind >= 2 and chance(0.6):
        values["top_k"] = int(rng.choice([1, 2, 20, 50, vocab // 2, vocab - 1, vocab, vocab + 3]))
        values["top_k"] = max(1, values["top_k"])
    if kind >= 2 and chance(0.6):
        values["top_p"] = float(rng.choice([1e-9, 0.1, 0.8, 0.95, 0.999, 1 - 1e-9, 1.0]))
    if kind >= 2 and chance(0.4):
        values["min_p"] = float(rng.choice([1e-9, 0.001, 0.05, 0.5, 1.0]))
    return SamplingParams(**values)


def random_logits(rng, vocab):
    kind = rng.integers(9)
    x = rng.normal(size=vocab).astype(np.float32)
    if kind == 0:
        return x * np.float32(rng.choice([1, 3, 10, 1000]))
    if kind == 1:  # one token far ahead
        x[rng.integers(vocab)] += 60
    elif kind == 2:  # few values, many equal
        x = np.round(x * np.float32(rng.choice([0.5, 2])))
    elif kind == 3:
        x[:] = rng.choice([0.0, -0.0, -7.25, 3.0])
    elif kind == 4:  # both zeros on top
        x = -np.abs(np.round(x))
        x[rng.random(vocab) < 0.5] *= -1
        x = -np.abs(x) * rng.choice([1, 0], size=vocab) * rng.choice([1, -1], size=vocab)
    elif kind == 5:  # gaps far below one unit of the first digits
        x = np.float32(1e-6) * np.abs(x) + np.float32(rng.choice([0, 20]))
    elif kind == 6:
        x[rng.random(vocab) < 0.7] = -np.inf
    elif kind == 7:  # as a language model's: a long tail
        x = x * np.float32(2.5) + np.float32(8) * (rng.random(vocab) < 0.004).astype(np.float32)
    else:
        x[rng.integers(vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    return x.astype(np.float32)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(4))
def test_drafts_count_before_they_are_accepted(machine, seed):
    """Queries of one sequence: each counts the output and the drafts up to its own."""
    rng, vocab = np.random.default_rng(seed), 203
    drafts = rng.integers(20, size=COLUMNS).astype(np.uint32)
    params = SamplingParams(
        max_tokens=100, temperature=1.0, seed=9, repetition_penalty=1.3, frequency_penalty=0.9,
        presence_penalty=0.6,
    )  # fmt: skip
    made = Round(machine, vocab, [params] * COLUMNS, [[3, 4, 5]] * COLUMNS, ())
    made.params["history"] = made.params["history"][0]
    for c, sampler in enumerate(made.samplers):
        for draft in drafts[1 : c + 1]:
            sampler.observe(int(draft))
    logits = rng.normal(size=(COLUMNS, vocab)).astype(np.float32)
    logits[:, :20] += 3  # drafts are likely, so penalties decide
    made.library.set_drafts(address(drafts), COLUMNS)
    try:
        made.choose(logits, 17)
    finally:
        made.library.set_drafts(address(drafts), 0)


@pytest.mark.parametrize("seed", range(4))
def test_every_query_takes_the_token_of_the_definition(machine, seed):
    rng = np.random.default_rng([seed, machine[1]])
    for _ in range(30):
        vocab = int(rng.choice([17, 61, 333, 1000, 2003]))
        queries = int(rng.integers(1, COLUMNS + 1))
        requests = [random_params(rng, vocab) for _ in range(queries)]
        prompts = [[int(i) for i in rng.choice(vocab, size=9)] for _ in range(queries)]
        constraints = [
            Drawn(vocab, int(s)) if s % 3 == 0 else None for s in rng.integers(99, size=queries)
        ]
        batch = Round(machine, vocab, requests, prompts, (3, vocab - 1), constraints)
        position = int(rng.choice([0, 77, 2**32 + 5]))
        for step in range(4):
            logits = np.stack([random_logits(rng, vocab) for _ in range(queries)])
            batch.choose(logits, position + step)


@pytest.mark.parametrize(
    ("requests", "syncs"),
    [
        ([{}], 0),
        ([{"temperature": 0.7, "seed": 1}], 0),
        ([{"repetition_penalty": 1.2, "logit_bias": {4: 1.0}}, {"temperature": 1, "seed": 1}], 0),
        ([{"temperature": 0.7, "seed": 1, "min_p": 0.1}, {}], 0),
        ([{"temperature": 0.7, "seed": 1, "top_k": 1}], 1),
        ([{"temperature": 0.7, "seed": 1, "top_p": 0.01}] * 8, 1),
        ([{"temperature": 0.7, "seed": 1, "top_k": 2000}], 0),
    ],
)
def test_barriers_are_as_few_as_promised(machine, requests, syncs):
    vocab = 999
    logits = np.linspace(0, 400, vocab, dtype=np.float32)[None].repeat(len(requests), 0)
    params = [SamplingParams(**values) for values in requests]
    batch = Round(machine, vocab, params, [[1, 2]] * len(requests), eos_ids=())
    assert batch.choose(logits, 5) == syncs


def test_equal_scores_at_a_border_stay_by_id_across_blocks(machine):
    vocab = 203
    logits = np.zeros((COLUMNS, vocab), np.float32)
    logits[:, 7::11] = 1
    logits[1::2, ::2] = -0.0
    for top_k in (1, 5, 19, 20, 100, 202):
        params = [
            SamplingParams(temperature=50, seed=c, top_k=top_k, top_p=(0.5, 1.0)[c % 2])
            for c in range(COLUMNS)
        ]
        batch = Round(machine, vocab, params, [[]] * COLUMNS, eos_ids=())
        for position in range(4):
            batch.choose(logits, position)


def test_noise_and_weights_have_the_bits_of_the_definition(machine):
    library, _ = machine
    rng = np.random.default_rng(5)
    count = 300_000
    ends = np.concatenate([np.arange(1000), 2**32 - 1 - np.arange(1000), 2**30 + np.arange(-9, 9)])
    words = np.concatenate([ends, rng.integers(2**32, size=count - len(ends))]).astype(np.uint32)
    gaps = -np.exp(rng.uniform(-20, 3.5, size=count)).astype(np.float32)
    gaps[:4] = (0.0, -0.0, -np.inf, -24.0)
    noise, weights = np.empty(count, np.float32), np.empty(count, np.uint64)
    library.elementary(*map(address, (words, gaps, noise, weights)), count)
    assert np.array_equal(noise, gumbel_of_words(words.astype(np.uint64)))
    assert np.array_equal(weights.astype(np.int64), integer_weights(gaps))
