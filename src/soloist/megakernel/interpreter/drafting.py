"""A launch that drafts: rounds whose queries are latest tokens and drafts of what follows.

What counts of a round, and the queries of the next one, follow `cuda/ops/drafted_round.cuh`. Drafts
are made by the definition itself: tests hold the kernel's search against it apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from soloist.megakernel.interpreter.phases import Interpreter, round_of_ranks
from soloist.megakernel.limits import MAX_QUERIES
from soloist.speculation import Draft, Drafter, deal


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """What a round made of a sequence.

    Attributes:
        tokens: one at least.
        logits: [tokens, V], of which each was chosen.
        num_drafted: tokens that were checked.
    """

    tokens: tuple[int, ...]
    logits: Tensor
    num_drafted: int


@dataclass
class DraftingSequence:
    """A sequence of a launch that drafts; all but `row` and `stops` change with its rounds.

    Attributes:
        drafter: of the request.
        row: of the page tables.
        position: of the latest token.
        output_ids: the answer so far, its latest token included.
        left: tokens that the launch may make.
        stops: token ids that end it.
    """

    drafter: Drafter
    row: int
    position: int
    output_ids: list[int]
    left: int
    stops: Sequence[int] = ()
    _draft: Draft | None = field(default=None, init=False)

    @property
    def fed(self) -> list[int]:
        """Tokens of its queries."""
        return [self.output_ids[-1], *(self._draft.ids if self._draft else ())]

    def offer(self) -> int:
        """Draft what may be checked next; how many tokens."""
        most = min(MAX_QUERIES, self.left) - 1
        self._draft = self.drafter.draft(self.output_ids, most)
        return len(self.fed) - 1

    def cut(self, count: int) -> None:
        """Of what was drafted so many tokens are checked."""
        if self._draft is not None:
            self._draft = replace(self._draft, ids=self._draft.ids[:count]) if count else None

    def take(self, chosen: Sequence[int], logits: Tensor) -> DraftedTokens:
        """The tokens that count, of what its queries chose."""
        fed, count, num_right, num_checked = self.fed, 1, 0, 0
        for column in range(1, len(fed)):
            num_checked += 1
            if fed[column] != chosen[column - 1]:
                break
            num_right += 1
            if fed[column] in self.stops:
                break
            count += 1
        if self._draft is not None:
            self.drafter.judge(self._draft, num_checked, num_right)
        tokens = tuple(chosen[:count])
        self.output_ids += tokens
        # Wrong drafts left keys and values where later rounds write before they read.
        self.position += count
        self.left -= count
        return DraftedTokens(tokens, torch.clone(logits[:count]), len(fed) - 1)


class DraftingLaunch:
    """Rounds of sequences that draft; greedy, as the records of the head choose.

    Args:
        ranks: of one launch.
        sequences: in the order of their queries.
        most_beside: queries of a round in which a sequence has no draft.
    """

    def __init__(
        self,
        ranks: Sequence[Interpreter],
        sequences: Sequence[DraftingSequence],
        most_beside: int = MAX_QUERIES,
    ) -> None:
        self._ranks, self._sequences, self._most_beside = ranks, sequences, most_beside

    def rounds(self) -> Iterator[list[DraftedTokens]]:
        """Until a token ends the launch, or a sequence made as many as it may."""
        while all(one.left for one in self._sequences):
            offered = [one.offer() for one in self._sequences]
            dealt = deal(offered, MAX_QUERIES, self._most_beside)
            for one, count in zip(self._sequences, dealt, strict=True):
                one.cut(count)
            made = self._round()
            yield made
            pairs = zip(self._sequences, made, strict=True)
            if any(not set(one.stops).isdisjoint(of_one.tokens) for one, of_one in pairs):
                return

    def _round(self) -> list[DraftedTokens]:
        fed = [one.fed for one in self._sequences]
        firsts = [0, *accumulate(map(len, fed))]
        assert firsts[-1] <= MAX_QUERIES, "queries"
        rows = [one.row for one in self._sequences for _ in one.fed]
        positions = [
            one.position + column for one in self._sequences for column in range(len(one.fed))
        ]
        logits, chosen = round_of_ranks(
            self._ranks, [x for ids in fed for x in ids], rows, positions
        )
        return [
            one.take(chosen[first:end], logits[first:end])
            for one, (first, end) in zip(self._sequences, pairwise(firsts), strict=True)
        ]
