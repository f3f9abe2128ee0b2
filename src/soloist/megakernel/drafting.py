"""What the kernel that drafts and the host share: constants of soloist.speculation, and its start.

CUDA text is generated from the definition, so that nothing is typed twice; abi.py has the
structures, cuda/ops/draft.cuh follows the definition. Pure: no torch, no device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from soloist.megakernel.abi import (
    DRAFT_KINDS,
    DRAFT_START,
    DRAFTER,
    MOST_DRAFTING_SEQUENCES,
    MOST_DRAFTS,
)
from soloist.megakernel.limits import MAX_QUERIES
from soloist.speculation import depth, lookup, matching, prediction
from soloist.speculation.drafter import FIRST_LOOKUP, Draft, DraftState

# Words that a round of a launch that drafts tells the host: what all queries chose, then of each
# sequence how many of its tokens count, how many were drafted, and of what kind.
EMITTED_WORDS = MAX_QUERIES + MOST_DRAFTING_SEQUENCES
_COUNT_BITS = 4

# Bits of keys, of which the largest is the best: a match has its length, whether it is of the
# answer's own text, and the place; a place in a prediction its score, nearness, and its side.
_PLACE_BITS, _NEARNESS_BITS = 25, 19
# Tokens of a text that keys have room for.
MOST_TEXT_TOKENS = 1 << _NEARNESS_BITS


def drafting_constants() -> str:
    """CUDA text of what draft.cuh takes from the definition."""
    lengths = [least for least, _ in FIRST_LOOKUP]
    assert len(lengths) + 1 == DRAFT_KINDS, "kinds of drafts"
    numbers = {
        "kDraftKinds": DRAFT_KINDS,
        "kMostDrafts": MOST_DRAFTS,
        "kMostDraftingSequences": MOST_DRAFTING_SEQUENCES,
        "kEmittedWords": EMITTED_WORDS,
        "kEmittedCountBits": _COUNT_BITS,
        "kDraftGap": lookup.NO_TOKEN & 0xFFFFFFFF,
        "kAcceptanceOne": depth.ONE,
        "kAcceptanceShift": depth.SHIFT,
        "kPlainCost": depth.PLAIN_COST,
        "kFirstPause": depth.FIRST_PAUSE,
        "kLongestPause": depth.LONGEST_PAUSE,
        "kLeastMatch": lookup.LEAST_MATCH,
        "kMostMatch": matching.MOST_MATCH,
        "kPlaceBits": _PLACE_BITS,
        "kNearnessBits": _NEARNESS_BITS,
        "kGoodHere": prediction.GOOD_HERE,
        "kGoodElsewhere": prediction.GOOD_ELSEWHERE,
        "kAgreements": len(prediction.WEIGHTS),
        **{f"kLookupLength{i}": least for i, least in enumerate(lengths)},
    }
    lines = [f"constexpr u32 {name} = {value}u;" for name, value in numbers.items()]
    # What agreement counts: without an array, which would lie in memory.
    weights = "".join(
        f"i == {i} ? {weight}u : " for i, weight in enumerate(prediction.WEIGHTS[:-1])
    )
    lines.append(
        "__device__ __forceinline__ constexpr u32 agreement_weight(u32 i) "
        f"{{ return {weights}{prediction.WEIGHTS[-1]}u; }}"
    )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class DraftingSequence:
    """What a launch that drafts is given of a sequence beside its query.

    Attributes:
        state: of the drafter, after `draft`; `NO_DRAFTS` where the sequence drafts nothing.
        draft: what the first round checks; None where it has the latest token alone.
        prompt_ids: of the request.
        output_ids: of the request, the launch's first input token included.
        most_tokens: that the launch may make of it.
        stops: tokens that end the answer, in place of its query's, of which there may be fewer.
    """

    state: DraftState
    draft: Draft | None
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    most_tokens: int
    stops: Sequence[int] = ()

    def is_like(self, other: "DraftingSequence") -> bool:
        """Whether both are given the same."""
        ours, theirs = (
            (one.draft, list(one.output_ids), one.most_tokens, list(one.stops))
            for one in (self, other)
        )
        # Mostly one object, of which nothing is to be compared: prompts may be long.
        are_of_one_prompt = self.prompt_ids is other.prompt_ids or (
            list(self.prompt_ids) == list(other.prompt_ids)
        )
        return are_of_one_prompt and ours == theirs and self.state.is_like(other.state)

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """Of the first round's draft."""
        return () if self.draft is None else self.draft.ids

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt in `history`."""
        return len(self.prompt_ids) if self.state.looks_up else 0

    @property
    def history(self) -> Sequence[int] | NDArray[np.int32]:
        """The text so far, as far as drafts depend on it: a prediction needs the latest tokens."""
        if self.state.looks_up:
            return self.state.history
        return self.output_ids[-len(prediction.WEIGHTS) :]

    @property
    def texts(self) -> dict[str, Sequence[int] | NDArray[np.int32]]:
        """By their names in `DRAFT_START`; the history grows by up to `most_tokens`."""
        state = self.state
        return {
            "prediction": () if state.prediction is None else state.prediction,
            "archive": state.archive if state.looks_up else (),
            "stops": self.stops,
            "history": self.history,
        }

    def start(self, column: int, places: Mapping[str, int]) -> NDArray[np.void]:
        """A `DRAFT_START`.

        Args:
            column: query of the first round that has the latest token.
            places: addresses of `texts`.
        """
        state, texts = self.state, self.texts
        depths = np.zeros(DRAFT_KINDS, DRAFTER.dtype["depths"].base)
        for record, values in zip(depths, state.depths, strict=True):
            record["acceptance"], record["pause"], record["left"], record["best"] = values
        counts = {name: len(ids) for name, ids in texts.items()}
        assert max(counts.values()) < MOST_TEXT_TOKENS, "keys"
        drafter = DRAFTER.record(
            depths=depths,
            num_history=counts["history"],
            num_prompt=self.num_prompt,
            num_prediction=counts["prediction"],
            num_archive=counts["archive"],
            at=state.at,
            is_good=state.is_good,
            left=self.most_tokens,
            made=0,
            count=len(self.draft_ids),
            kind=0 if self.draft is None else self.draft.kind,
        )
        costs = [*state.costs, *[0] * (MOST_DRAFTS - len(state.costs))]
        return DRAFT_START.record(
            drafter=drafter,
            costs=costs,
            num_costs=len(state.costs),
            looks_up=state.looks_up,
            num_stops=counts["stops"],
            column=column,
            **places,
        )


@dataclass(frozen=True, slots=True)
class DraftingLaunch:
    """What a launch that drafts is given beside its queries.

    Attributes:
        sequences: one at least, in the order of their queries; with all of their drafts as many
            tokens as there may be queries.
        most_rounds: of the launch.
        most_beside: queries of a round in which a sequence has no draft; its number of sequences at
            least.
    """

    sequences: tuple[DraftingSequence, ...]
    most_rounds: int
    most_beside: int = MAX_QUERIES

    def is_like(self, other: "DraftingLaunch") -> bool:
        """Whether both are given the same."""
        pairs = zip(self.sequences, other.sequences, strict=False)
        return (
            self.most_rounds == other.most_rounds
            and self.most_beside == other.most_beside
            and len(self.sequences) == len(other.sequences)
            and all(ours.is_like(theirs) for ours, theirs in pairs)
        )

    @property
    def columns(self) -> list[int]:
        """By sequence, the first round's query that has its latest token; then their number."""
        return [0, *accumulate(1 + len(one.draft_ids) for one in self.sequences)]


@dataclass(frozen=True, slots=True)
class DraftedRound:
    """What a round of a launch that drafts tells of a sequence.

    Attributes:
        tokens: that it made, one at least.
        num_drafted: tokens that it checked.
        kind: of them.
    """

    tokens: tuple[int, ...]
    num_drafted: int
    kind: int

    @classmethod
    def of_words(cls, words: Sequence[int], num_sequences: int) -> "list[DraftedRound]":
        """Of each sequence, from `EMITTED_WORDS` words."""
        assert len(words) == EMITTED_WORDS, "a round's words"
        made, column, mask = [], 0, (1 << _COUNT_BITS) - 1
        for facts in words[MAX_QUERIES : MAX_QUERIES + num_sequences]:
            count, num_drafted = facts & mask, facts >> _COUNT_BITS & mask
            tokens = tuple(words[column : column + count])
            made.append(cls(tokens, num_drafted, facts >> 2 * _COUNT_BITS))
            column += 1 + num_drafted
        return made
