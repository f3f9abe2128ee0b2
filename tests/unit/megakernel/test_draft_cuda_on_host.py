"""Drafting and acceptance of the kernel (`ops/draft.cuh`, `ops/accept.cuh`), compiled by g++.

Thousands of random answers are drafted side by side by the CUDA text and by soloist.speculation,
and checked by the former and by the engine's `verify`: each round must have the same draft, tokens
and running acceptances. A search is dealt to a random number of threads.
"""

import ctypes
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import soloist
from soloist.engine.executor import Picked, verify
from soloist.engine.request import Request
from soloist.errors import BadLogits
from soloist.megakernel.abi import (
    DEPTH,
    DRAFT_BUFFERS,
    DRAFT_START,
    DRAFTER,
    MOST_DRAFTS,
)
from soloist.megakernel.drafting import (
    EMITTED_WORDS,
    DraftedRound,
    DraftingSequence,
    drafting_constants,
)
from soloist.speculation import Archive, Costs, Draft, Drafter, Drafting
from soloist.speculation.tokens import Ids

CUDA = Path(soloist.__file__).parent / "cuda"
VOCAB = 1000
BAD = 0xFFFFFFFF  # where no score is a number
ENDS = 5

MEMORY = """
#pragma once
#include <algorithm>
#define __device__
#define __forceinline__ inline
#include "ptx/types.cuh"
struct uint4 { u32 x, y, z, w; };
inline u32 load_exchanged_word(const u32* p) { return *p; }
#include "spec.cuh"
"""

HARNESS = """
#include "ptx/memory.cuh"
#include "ops/draft.cuh"

extern "C" u32 accept_round(Drafter* drafter, const DraftStart* start, const u32* fed,
                            const u32* chosen, u32 stop, u32 vocab) {
  const Accepted a = accept(*drafter, *start, fed, chosen, &stop, 1, vocab);
  return a.count << 1 | a.ends;
}

extern "C" u32 next_draft(Drafter* drafter, const DraftStart* start, const u32* history,
                          const u32* prediction, const u32* archive, const u32* fresh, u32 count,
                          bool has_prediction, u32 parts, u32* ids, u32 stop, u32 vocab) {
  Drafter& d = *drafter;
  const Texts texts{history, prediction, archive, d.num_history, fresh};
  const bool is_left = take(d, texts, fresh, count);
  const Wanted want = wanted(d, *start, has_prediction, is_left);
  u32 place = 0, match = 0;
  for (u32 part = parts; part--;) {  // in another order than that of the places
    if (want.place) place = std::max(place, search_place(d, texts, part, parts));
    if (want.match) match = std::max(match, search_match(d, texts, part, parts));
  }
  if (want.place) move(d, place);
  draft(d, *start, texts, match, ids);
  d.count = num_fitting(d, ids, &stop, 1, vocab);
  return want.match | want.place << 1;
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    folder = tmp_path_factory.mktemp("draft")
    (folder / "ptx").mkdir()
    structs = "\n".join(s.cuda for s in (DEPTH, DRAFTER, DRAFT_START, DRAFT_BUFFERS))
    spec = f"#pragma once\n{drafting_constants()}\n{structs}\n"
    (folder / "spec.cuh").write_text(spec)
    (folder / "ptx/memory.cuh").write_text(MEMORY)
    (folder / "harness.cpp").write_text(HARNESS)
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-Werror",
        "-fsanitize=undefined",
    ]
    flags += ["-fno-sanitize-recover=all", "-shared", "-fPIC"]
    out = folder / "draft.so"
    command = [compiler, *flags, f"-I{folder}", f"-I{CUDA}", str(folder / "harness.cpp")]
    subprocess.run([*command, "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def pieces(rng: random.Random, texts: Sequence[Sequence[int]], count: int, words: int) -> list[int]:
    """A text that repeats others here and there, itself too, with changes."""
    made: list[int] = []
    while len(made) < count:
        source = rng.choice([*texts, made])
        if source and rng.random() < 0.8:
            at = rng.randrange(len(source))
            made += source[at : at + rng.choice((2, 6, 20, 60))]
        if rng.random() < 0.5:
            made += [rng.randrange(words) + 10 for _ in range(rng.choice((1, 1, 2, 9)))]
    return made[:count]


@dataclass
class Case:
    """A request, and what the model would answer."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        words = rng.choice((2, 5, 40, 900))
        self.archive = Archive(most_tokens=rng.choice((8, 64, 512)))
        kept = [pieces(rng, [], rng.randrange(1, 80), words) for _ in range(rng.randrange(4))]
        for text in kept:
            self.archive.add(text)
        self.prompt = pieces(rng, kept, rng.randrange(1, 150), words)
        self.answer = pieces(rng, [self.prompt, *kept], rng.randrange(2, 160), words)
        self.prediction: list[int] | None = None
        if rng.random() < 0.7:
            changed = [*self.answer]
            for _ in range(rng.choice((0, 1, 3, 12))):
                at = rng.randrange(len(changed) + 1)
                changed[at : at + rng.choice((0, 1, 1, 5))] = pieces(
                    rng, [], rng.choice((0, 1, 1, 4)), words
                )
            self.prediction = changed
        if rng.random() < 0.3:
            self.answer[rng.randrange(1, len(self.answer))] = ENDS
        if rng.random() < 0.1:
            self.answer[rng.randrange(1, len(self.answer))] = BAD
        costs = [
            rng.choice((1010, 1060, 1300, 2500)) + 20 * k for k in range(rng.choice((1, 3, 7)))
        ]
        self.drafting = Drafting(Costs(tuple(costs)), looks_up=rng.random() < 0.8)
        self.drafter = Drafter(self.drafting, self.prompt, self.prediction, self.archive)


def words(ids: Sequence[int] | Ids, room: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """As the kernel has them."""
    made = np.full(len(ids) + room + 1, 0xDEADBEEF, np.uint32)
    made[: len(ids)] = np.asarray(ids, np.int64) & 0xFFFFFFFF
    return made


def at(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@dataclass
class Seen:
    """What the cases came to, all of which has to happen."""

    rounds: int = 0
    accepted: int = 0
    kinds: set[int] = field(default_factory=set)
    searches: set[int] = field(default_factory=set)
    ended: int = 0


def drafted(case: Case, output: list[int], left: int) -> Draft | None:
    """As a request drafts: no token that would be the end, or that is none."""
    draft = case.drafter.draft(output, min(case.drafting.costs.most, left - 1))
    if draft is None:
        return None
    bad = [n for n, token in enumerate(draft.ids) if token == ENDS or not 0 <= token < VOCAB]
    ids = draft.ids[: bad[0]] if bad else draft.ids
    return replace(draft, ids=ids) if ids else None


class Side:
    """The kernel's side of a case, from a launch on."""

    def __init__(self, kernel: ctypes.CDLL, case: Case, output: list[int], left: int) -> None:
        self.kernel, self.case = kernel, case
        self.draft = drafted(case, output, left)
        self.prediction, self.archive = words(case.prediction or []), words(case.archive.ids)
        self.begin(self.draft, output, left)

    def begin(self, draft: Draft | None, output: list[int], left: int) -> None:
        """A launch, which has texts and a state of its own."""
        case = self.case
        launch = DraftingSequence(case.drafter.state, draft, case.prompt, output, left)
        self.start = launch.start(0, dict.fromkeys(launch.texts, 0))
        self.drafter = self.start["drafter"].copy()
        self.history = words(launch.history, len(case.answer) + 8)

    def accept(self, fed: list[int], chosen: list[int]) -> tuple[int, bool]:
        fed_words, chosen_words = words(fed), words(chosen)  # alive until the call is over
        found = self.kernel.accept_round(
            at(self.drafter), at(self.start), at(fed_words), at(chosen_words), ENDS, VOCAB
        )
        return found >> 1, bool(found & 1)

    def next(self, tokens: list[int], parts: int) -> tuple[list[int], int]:
        ids = np.zeros(MOST_DRAFTS, np.uint32)
        fresh = words(tokens)
        known = int(self.drafter["num_history"])
        searched = self.kernel.next_draft(
            at(self.drafter), at(self.start), at(self.history), at(self.prediction),
            at(self.archive), at(fresh), len(tokens), self.case.prediction is not None,
            parts, at(ids), ENDS, VOCAB,
        )  # fmt: skip
        self.history[known : known + len(tokens)] = tokens
        return ids[: int(self.drafter["count"])].tolist(), searched


def compare_drafts(side: Side, draft: Draft | None, ids: list[int]) -> None:
    drafter, state = side.drafter, side.case.drafter.state
    assert tuple(ids) == (() if draft is None else draft.ids)
    if draft is not None:
        assert int(drafter["kind"]) == draft.kind
    assert [tuple(int(x) for x in depth) for depth in drafter["depths"]] == list(state.depths)
    assert (int(drafter["at"]), bool(drafter["is_good"])) == (state.at, state.is_good)


def run(kernel: ctypes.CDLL, seed: int, seen: Seen) -> None:  # noqa: C901, PLR0915 - one loop
    case = Case(seed)
    rng, answer, drafter = case.rng, case.answer, case.drafter
    output = answer[:1]
    if answer[0] == ENDS:
        return
    side: Side | None = None
    draft: Draft | None = None
    while True:
        left = len(answer) - len(output)
        if left == 0:
            return
        if side is None or rng.random() < 0.05:  # another launch begins
            if side is None:
                side = Side(kernel, case, output, left)
                draft = side.draft
            else:
                side.begin(draft, output, left)
        fed = [output[-1], *(draft.ids if draft else ())]
        chosen: list[int] = []
        for column in range(len(fed)):
            is_right = fed[1 : column + 1] == answer[len(output) : len(output) + column]
            chosen.append(answer[len(output) + column] if is_right else rng.randrange(VOCAB + 5))
        request = cast(
            "Request",
            SimpleNamespace(
                sampler=SimpleNamespace(stop_test=SimpleNamespace(ending_ids={ENDS})),
                drafter=drafter,
                has_all_tokens=False,
            ),
        )

        def pick_at(column: int, chosen: list[int] = chosen) -> Picked:
            if chosen[column] >= VOCAB:
                raise BadLogits(column, float("nan"))
            return Picked(chosen[column])

        count, ends = side.accept(fed, chosen)
        seen.rounds += 1
        if chosen[0] >= VOCAB:
            assert (count, ends) == (1, True)
            seen.ended += 1
            return
        if draft is None:
            tokens = chosen[:1]
        else:
            verified = verify(request, draft, pick_at)
            tokens = [picked.token_id for picked in verified.picks]
            seen.accepted += verified.num_accepted
            seen.kinds.add(draft.kind)
        assert chosen[:count] == tokens
        output = [*output, *tokens]
        assert ends == (ENDS in tokens or len(output) == len(answer))
        if ends:
            seen.ended += 1
            return
        ids, searched = side.next(tokens, rng.choice((1, 3, 64, 500)))
        seen.searches.add(searched)
        left = len(answer) - len(output)
        draft = drafted(case, output, left)
        compare_drafts(side, draft, ids)


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_drafts_and_acceptance_are_those_of_the_definition(kernel: ctypes.CDLL, first: int) -> None:
    seen = Seen()
    for seed in range(first, first + 300):
        run(kernel, seed, seen)
    assert seen.rounds > 3_000
    assert seen.accepted > 2_000
    assert seen.kinds == set(range(5))
    assert seen.searches == {0, 1, 2, 3}
    assert seen.ended > 60


def test_a_rounds_words_are_told_apart() -> None:
    facts = [2 | 4 << 4 | 3 << 8, 1, 1 | 1 << 4]
    numbers = [7, 8, 1, 1, 1, 9, 10, 1, *facts, *[0] * 4]
    assert len(numbers) == EMITTED_WORDS
    first, *others = DraftedRound.of_words(numbers, 3)
    assert first == DraftedRound((7, 8), 4, 3)
    assert others == [DraftedRound((9,), 0, 0), DraftedRound((10,), 1, 0)]
