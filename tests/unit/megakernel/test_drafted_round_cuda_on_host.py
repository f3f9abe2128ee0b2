"""The end of a round of several sequences that draft (`ops/drafted_round.cuh`), compiled by g++.

Random answers are drafted side by side by the CUDA text, on the threads of some blocks, and by
soloist.speculation; what counts is said by the former and by the engine's `verify`. Each round must
have the same tokens, drafts, queries and positions in every block.
"""

import ctypes
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from soloist.engine.executor import Picked, verify
from soloist.engine.request import Request
from soloist.errors import BadLogits
from soloist.megakernel.abi import (
    DEPTH,
    DRAFT_BUFFERS,
    DRAFT_START,
    DRAFTER,
    MAX_STOPS,
    MOST_DRAFTING_SEQUENCES,
    QUERY_START,
)
from soloist.megakernel.drafting import DraftedRound, DraftingSequence, drafting_constants
from soloist.megakernel.limits import MAX_QUERIES
from soloist.speculation import NO_DRAFTS, Draft, deal
from unit.megakernel.test_draft_cuda_on_host import BAD, CUDA, ENDS, VOCAB, Case, drafted, words
from unit.megakernel.test_draft_cuda_on_host import at as address
from unit.megakernel.threads_on_host import THREADS

MEMORY = """
#pragma once
#define __device__
#define __forceinline__ inline
#include "ptx/types.cuh"
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline void (*before_load)() = nullptr;
inline u32 load_exchanged_word(const u32* p) { return *p; }
inline uint4 load_exchanged(const uint4* p) {
  before_load();
  return *p;
}
inline void store_exchanged(uint4* p, uint4 v) { *p = v; }
inline void store_exchanged(u32* p, u32 v) { *p = v; }
#include "spec.cuh"
"""

HARNESS = """
#include "ops/drafted_round.cuh"
#include <cstring>

struct Grid : HostGrid {
  void observe(u32 query, u32 token) const;
};

struct Block {
  DraftControl own;
  Found found;
  i32 sequence[kMaxQueries], position[kMaxQueries];
  u32 token[kMaxQueries], chosen[kMaxQueries], goes_on;
  u32 num_observed[kMaxQueries], observed[kMaxQueries][kMaxQueries];  // by a sequence's first query
};
static Block blocks[kNumBlocks];
static DraftBuffers buffers;
static Drafter drafters[kNumBlocks * (kMostDraftingSequences - 1)];
static const QueryStart* queries;
static u32 round_number, is_last;

void Grid::observe(u32 query, u32 token) const {
  Block& b = blocks[block()];
  b.observed[query][b.num_observed[query]++] = token;
}

static void begin_thread(unsigned id) {
  const HostGrid grid{id};
  begin_drafting(blocks[grid.block()].own, buffers, grid.block(), grid.thread());
}

static void end_thread(unsigned id) {
  Grid grid{{id}};
  Block& b = blocks[grid.block()];
  const Columns columns{b.sequence, b.position, b.token, b.chosen};
  const bool goes_on = end_drafted_round(grid, b.own, b.found, buffers, queries, columns,
                                         round_number, is_last, kVocab);
  if (grid.thread() == 0) b.goes_on = goes_on;
}

extern "C" int begin(const DraftStart* starts, uint4* records, u32 num_sequences, u32 most_beside,
                     const QueryStart* given, const u32* tokens) {
  before_load = pause_now_and_then;
  std::memset(blocks, 0xA5, sizeof blocks);
  std::memset(static_cast<void*>(drafters), 0xA5, sizeof drafters);
  buffers = {starts, records, drafters, num_sequences, most_beside};
  queries = given;
  for (Block& b : blocks)
    for (u32 c = 0; c < kMaxQueries; ++c) {
      b.token[c] = tokens[c];
      b.sequence[c] = given[c].sequence;
      b.position[c] = given[c].position;
    }
  return run_threads(begin_thread);
}

template <class T>
static bool alike(const T* a, const T* b, u32 count) {
  return !std::memcmp(a, b, count * sizeof(T));
}

static bool are_alike(const Block& a, const Block& b) {
  const u32 queries = a.own.queries, sequences = buffers.num_sequences;
  if (a.goes_on != b.goes_on || !alike(a.own.told, b.own.told, sequences)) return false;
  if (!a.goes_on) return true;
  return b.own.queries == queries && alike(a.token, b.token, queries) &&
         alike(a.sequence, b.sequence, queries) && alike(a.position, b.position, kMaxQueries) &&
         alike(a.own.owner, b.own.owner, queries) &&
         alike(a.own.column, b.own.column, sequences) && alike(&a.own.first, &b.own.first, 1) &&
         alike(kept_drafters(buffers, &a - blocks), kept_drafters(buffers, &b - blocks),
               sequences - 1);
}

// 0 where the launch ends, 1 where it goes on, -1 where threads hang, -2 where blocks differ.
extern "C" int end_round(const u32* chosen, u32 round, u32 last, u32* told, u32* owner,
                         i32* sequence, i32* position, u32* token, u32* num_queries,
                         u32* observed) {
  round_number = round;
  is_last = last;
  for (Block& b : blocks) {
    std::memcpy(b.chosen, chosen, sizeof b.chosen);
    std::memset(static_cast<void*>(&b.found), 0x5A, sizeof b.found);
    std::memset(b.num_observed, 0, sizeof b.num_observed);
  }
  if (run_threads(end_thread) < 0) return -1;
  const Block& first = blocks[0];
  for (const Block& b : blocks)
    if (!are_alike(first, b)) return -2;
  std::copy_n(first.own.told, kMostDraftingSequences, told);
  std::copy_n(first.own.owner, kMaxQueries, owner);
  std::memcpy(sequence, first.sequence, sizeof first.sequence);
  std::memcpy(position, first.position, sizeof first.position);
  std::memcpy(token, first.token, sizeof first.token);
  *num_queries = first.own.queries;
  for (u32 c = 0; c < kMaxQueries; ++c)
    for (u32 i = 0; i < first.num_observed[c]; ++i) *observed++ = first.observed[c][i];
  return first.goes_on;
}
"""
BLOCKS, THREADS_EACH = 3, 64


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    folder = tmp_path_factory.mktemp("drafted")
    (folder / "ptx").mkdir()
    sizes = {
        "kMaxQueries": MAX_QUERIES, "kMaxStops": MAX_STOPS, "kNumBlocks": BLOCKS,
        "kConsumerThreads": THREADS_EACH, "kConsumerWarps": THREADS_EACH // 32, "kVocab": VOCAB,
    }  # fmt: skip
    numbers = "\n".join(f"constexpr u32 {name} = {value};" for name, value in sizes.items())
    records = (QUERY_START, DEPTH, DRAFTER, DRAFT_START, DRAFT_BUFFERS)
    spec = ("#pragma once", numbers, drafting_constants(), *(s.cuda for s in records), "")
    (folder / "spec.cuh").write_text("\n".join(spec))
    (folder / "ptx/memory.cuh").write_text(MEMORY)
    source = folder / "harness.cpp"
    source.write_text(f'#include "ptx/memory.cuh"\n{THREADS}{HARNESS}')
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused"]
    out = folder / "drafted.so"
    command += ["-Werror", "-shared", "-fPIC", f"-I{folder}", f"-I{CUDA}"]
    command += [str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(out))


@dataclass
class Sequence:
    """A case in a launch."""

    number: int
    case: Case
    drafts: bool
    position: int
    output: list[int] = field(init=False)
    draft: Draft | None = None

    def __post_init__(self) -> None:
        self.output = self.case.answer[:1]
        self.began = self.position

    @property
    def left(self) -> int:
        return len(self.case.answer) - len(self.output)

    def offer(self) -> None:
        self.draft = drafted(self.case, self.output, self.left) if self.drafts else None

    def take(self, count: int) -> None:
        """Of what it offered so many tokens are checked."""
        if self.draft is not None:
            self.draft = replace(self.draft, ids=self.draft.ids[:count]) if count else None

    @property
    def fed(self) -> list[int]:
        return [self.output[-1], *(self.draft.ids if self.draft else ())]

    def choices(self, rng: random.Random) -> list[int]:
        fed, answer, chosen = self.fed, self.case.answer, list[int]()
        for column in range(len(fed)):
            is_right = fed[1 : column + 1] == answer[len(self.output) : len(self.output) + column]
            at = len(self.output) + column
            chosen.append(answer[at] if is_right else rng.randrange(VOCAB + 5))
        return chosen

    def made(self, chosen: list[int]) -> tuple[list[int], bool]:
        """The tokens that count, and whether they end the launch."""
        if chosen[0] >= VOCAB:
            return chosen[:1], True
        if self.draft is None:
            tokens = chosen[:1]
        else:

            def pick_at(column: int) -> Picked:
                if chosen[column] >= VOCAB:
                    raise BadLogits(column, float("nan"))
                return Picked(chosen[column])

            request = SimpleNamespace(
                sampler=SimpleNamespace(stop_test=SimpleNamespace(ending_ids={ENDS})),
                drafter=self.case.drafter, has_all_tokens=False,
            )  # fmt: skip
            verified = verify(cast("Request", request), self.draft, pick_at)
            tokens = [picked.token_id for picked in verified.picks]
        return tokens, ENDS in tokens or len(tokens) == self.left


class Run:
    """A launch on the host's threads, next to the definition."""

    def __init__(self, kernel: ctypes.CDLL, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.kernel = kernel
        count = rng.randint(1, MOST_DRAFTING_SEQUENCES)
        self.sequences = list[Sequence]()
        while len(self.sequences) < count:
            case = Case(rng.randrange(10**6))
            if case.answer[0] not in (ENDS, BAD):
                one = Sequence(len(self.sequences), case, rng.random() < 0.85, rng.randrange(500))
                self.sequences.append(one)
        self.rounds = self.most_drafts = self.num_limited = 0
        self.most_beside = rng.choice((MAX_QUERIES, rng.randint(count, MAX_QUERIES)))

    def offer(self) -> None:
        for one in self.sequences:
            one.offer()
        offered = [len(one.fed) - 1 for one in self.sequences]
        dealt = deal(offered, MAX_QUERIES, self.most_beside)
        self.num_limited += dealt != deal(offered, MAX_QUERIES, MAX_QUERIES)
        for one, number in zip(self.sequences, dealt, strict=True):
            one.take(number)
        self.most_drafts = max(self.most_drafts, sum(number > 0 for number in dealt))

    def begin(self) -> None:
        self.offer()
        starts, column = [], 0
        self.kept: list[np.ndarray[Any, Any]] = []
        self.histories = list[np.ndarray[Any, Any]]()
        queries = np.zeros(MAX_QUERIES, QUERY_START.dtype)
        tokens = np.zeros(MAX_QUERIES, np.uint32)
        for one in self.sequences:
            state = one.case.drafter.state if one.drafts else NO_DRAFTS
            given = DraftingSequence(
                state, one.draft, one.case.prompt, one.output, one.left, [ENDS]
            )
            places = {}
            for name, ids in given.texts.items():
                array = words(ids, len(one.case.answer) + 8 if name == "history" else 0)
                self.kept.append(array)
                places[name] = array.ctypes.data
                if name == "history":
                    self.histories.append(array)
            starts.append(given.start(column, places))
            for place, token_id in enumerate(one.fed):
                queries[column]["sequence"] = 7 * one.number
                queries[column]["position"] = one.position + place
                tokens[column] = token_id
                column += 1
        self.column_count = column
        self.starts = np.array(starts, DRAFT_START.dtype)
        self.queries, self.tokens = queries, tokens
        self.records = np.zeros((len(starts), BLOCKS, 4), np.uint32)
        syncs = self.kernel.begin(
            address(self.starts), address(self.records), len(starts), self.most_beside,
            address(queries), address(tokens),
        )  # fmt: skip
        assert syncs == 0

    def round(self, *, is_last: bool) -> bool:
        """One round, compared; whether another follows."""
        chosen = np.zeros(MAX_QUERIES, np.uint32)
        made, column, ends = list[list[int]](), 0, is_last
        counts = [len(one.fed) - 1 for one in self.sequences]
        kinds = [one.draft.kind if one.draft else None for one in self.sequences]
        for one in self.sequences:
            choices = one.choices(self.rng)
            chosen[column : column + len(choices)] = choices
            column += len(choices)
            tokens, ends_here = one.made(choices)
            made.append(tokens)
            ends |= ends_here
        told, owner, sequence, position, token = (np.zeros(MAX_QUERIES, np.int32) for _ in range(5))
        num_queries, observed = np.zeros(1, np.uint32), np.zeros(MAX_QUERIES, np.uint32)
        goes_on = self.kernel.end_round(
            address(chosen), self.rounds, is_last, *map(address, (told, owner, sequence, position)),
            address(token), address(num_queries), address(observed),
        )  # fmt: skip
        assert goes_on >= 0, "threads hang" if goes_on == -1 else "blocks differ"
        self.rounds += 1
        seen = DraftedRound.of_words([*chosen.tolist(), *told.tolist()[:-1]], len(made))
        assert [list(one.tokens) for one in seen] == made
        assert [one.num_drafted for one in seen] == counts
        flat = [token_id for tokens in made for token_id in tokens]
        assert observed[: len(flat)].tolist() == flat
        for one, kind in zip(seen, kinds, strict=True):
            assert kind in (None, one.kind)
        assert bool(goes_on) == (not ends)
        if ends:
            return False
        for one, tokens in zip(self.sequences, made, strict=True):
            one.output = [*one.output, *tokens]
            one.position += len(tokens)
        self.offer()
        fed = [x for one in self.sequences for x in one.fed]
        assert token[: len(fed)].tolist() == fed
        assert int(num_queries[0]) == len(fed)
        owners = [one.number for one in self.sequences for _ in one.fed]
        assert owner[: len(fed)].tolist() == owners
        assert sequence[: len(fed)].tolist() == [7 * number for number in owners]
        places = [one.position + i for one in self.sequences for i in range(len(one.fed))]
        assert position.tolist() == [*places, *[0] * (MAX_QUERIES - len(fed))]
        return True


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_rounds_of_several_sequences_are_the_definitions(kernel: ctypes.CDLL, first: int) -> None:
    rounds = together = limited = 0
    for seed in range(first, first + 100):
        run = Run(kernel, seed)
        run.begin()
        most = run.rng.choice((3, 200))
        while run.round(is_last=run.rounds + 1 == most):
            pass
        rounds += run.rounds
        together += run.most_drafts > 1
        limited += run.num_limited > 0
    assert rounds > 500
    assert together > 20, "several sequences had drafts in one round"
    assert limited > 5, "drafts were left out beside a sequence without any"
