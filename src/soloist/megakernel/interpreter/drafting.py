"""A launch that drafts: rounds whose queries are the latest token and a draft of what follows.

What counts of a round, and the queries of the next one, follow `cuda/ops/speculate.cuh`. Drafts are
made by the definition itself: tests hold the kernel's search against it apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.megakernel.interpreter.phases import Interpreter, round_of_ranks
from soloist.megakernel.limits import MAX_QUERIES
from soloist.speculation import Draft, Drafter


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """What a round made.

    Attributes:
        tokens: one at least.
        logits: [tokens, V], of which each was chosen.
        num_drafted: tokens that were checked.
    """

    tokens: tuple[int, ...]
    logits: Tensor
    num_drafted: int


class DraftingLaunch:
    """Rounds of one sequence that draft; greedy, as the records of the head choose.

    Args:
        ranks: of one launch.
        drafter: of the request, which changes.
        sequence: row of the page tables.
        position: of the latest token.
        output_ids: the answer so far, its latest token included.
        most_tokens: that the launch may make.
        stops: token ids that end it.
    """

    def __init__(
        self,
        ranks: Sequence[Interpreter],
        drafter: Drafter,
        sequence: int,
        position: int,
        output_ids: Sequence[int],
        most_tokens: int,
        stops: Sequence[int] = (),
    ) -> None:
        self._ranks, self._drafter, self._sequence = ranks, drafter, sequence
        self._position, self._output = position, list(output_ids)
        self._left, self._stops = most_tokens, frozenset(stops)

    def rounds(self) -> Iterator[DraftedTokens]:
        """Until a token ends the launch, or it made as many as it may."""
        while self._left:
            draft = self._drafter.draft(self._output, min(MAX_QUERIES, self._left) - 1)
            made = self._round(draft)
            yield made
            if not self._stops.isdisjoint(made.tokens):
                return

    def _round(self, draft: Draft | None) -> DraftedTokens:
        fed = [self._output[-1], *(draft.ids if draft else ())]
        columns = range(len(fed))
        assert len(fed) <= MAX_QUERIES, "queries"
        logits, chosen = round_of_ranks(
            self._ranks,
            fed,
            [self._sequence for _ in columns],
            [self._position + column for column in columns],
        )
        count, num_right, num_checked = 1, 0, 0
        for column in columns[1:]:
            num_checked += 1
            if fed[column] != chosen[column - 1]:
                break
            num_right += 1
            if fed[column] in self._stops:
                break
            count += 1
        if draft is not None:
            self._drafter.judge(draft, num_checked, num_right)
        tokens = tuple(chosen[:count])
        self._output += tokens
        # Wrong drafts left keys and values where later rounds write before they read.
        self._position += count
        self._left -= count
        return DraftedTokens(tokens, torch.clone(logits[:count]), len(fed) - 1)
