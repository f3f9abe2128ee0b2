"""Launches whose rounds check what the kernel drafts, many rounds each.

The host follows with the same drafters, so it knows each round's drafts, and tells them.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol, TypeVar

from soloist.engine.executor import CHOOSING, Outcome, Picked, Verified, own_failure, verify
from soloist.engine.launch_ahead import LaunchAhead
from soloist.engine.request import Request
from soloist.kv.allocator import KvAllocator, SequenceAllocation
from soloist.megakernel.abi import MOST_DRAFTS
from soloist.megakernel.drafting import DraftedRound, DraftingLaunch, DraftingSequence
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import KEPT_ROUNDS, MAX_QUERIES
from soloist.megakernel.ranks import Launcher
from soloist.megakernel.sampling_header import NO_TOKEN
from soloist.speculation import NO_DRAFTS, Draft, Drafter, deal

_Round = TypeVar("_Round")
# Instead of a token, where no score was a number.
_NO_SCORE = NO_TOKEN["NAN"][0]


class Launching(Protocol):
    """Who makes launches of requests, such as an executor."""

    allocator: KvAllocator
    # By their number, queries of a round in which one of the requests has no draft.
    most_beside: Sequence[int]

    def allocation_of(self, request: Request) -> SequenceAllocation:
        """The pages of a request that is open, and not preempted."""

    def take_pages(self, requests: Sequence[Request], count: int) -> int:
        """As many tokens of each request, at most `count`, as there are pages for."""

    def queries(
        self, requests: Sequence[Request]
    ) -> Generator[list[Outcome], None, list[Query] | None]:
        """Of a launch's requests; None where one has none, after an outcome that says why."""

    def pick(self, request: Request, token_id: int, number: int, query: int) -> Picked:
        """A token that the kernel chose for a query of a round, observed."""


class KernelDrafts:
    """Makes launches that draft.

    Args:
        decoder: runs them.
        ahead: starts them.
        launching: who has the requests' pages and queries.
    """

    def __init__(self, decoder: Launcher, ahead: LaunchAhead, launching: Launching) -> None:
        self._decoder, self._ahead, self._launching = decoder, ahead, launching

    def rounds(
        self, requests: Sequence[Request], drafters: Sequence[Drafter | None], most: int
    ) -> Generator[list[Outcome], None, bool]:
        """The rounds of a launch; whether there was one.

        Where no draft has come for some rounds the launch ends: rounds of one query are quicker.

        Args:
            requests: `reserve` returned True for them.
            drafters: of each; None where it drafts nothing. Of those that rest the launch drafts
                nothing either, and they watch it.
            most: tokens of each.
        """
        decoder, launching = self._decoder, self._launching
        count = min(most, decoder.max_rounds, max(r.num_wanted for r in requests))
        count = launching.take_pages(requests, count)
        left = [min(count, r.num_wanted) for r in requests]
        shows_logits = any(r.top_logprobs is not None for r in requests)
        most_rounds = min(*left, KEPT_ROUNDS if shows_logits else count)
        drafting = [None if d is None or d.is_resting else d for d in drafters]
        watching = [d if d is not None and d.is_resting else None for d in drafters]
        launch = self.launch(requests, drafting, left, most_rounds)
        if launch is None:
            return False
        drafts = [one.draft for one in launch.sequences]
        queries = yield from launching.queries(requests)
        if queries is None:
            return True
        self._ahead.start_drafting(queries, launch, keeps_logits=shows_logits)
        rounds = decoder.drafted_rounds()
        try:
            for number, made in told(rounds, is_late=shows_logits):
                outcomes = self._outcomes(number, requests, drafts, made)
                yield outcomes
                # An answer that ended joined the texts that the host looks up in.
                are_told = all(isinstance(x, Picked | Verified) for x in outcomes)
                if not are_told or any(r.is_finished for r in requests):
                    break
                left = [tokens - len(x.tokens) for tokens, x in zip(left, made, strict=True)]
                drafts = self._drafts(requests, drafting, left)
                for drafter in filter(None, drafting):
                    if drafter.is_idle and not drafter.is_resting:
                        drafter.rest()
                rests = all(d.is_resting for d in filter(None, drafting))
                if watch(requests, watching) or rests:
                    decoder.stop()
        finally:
            decoder.abandon()
            for _ in rounds:
                pass
            for one in requests:
                launching.allocator.came_to(launching.allocation_of(one), one.position)
        return True

    def launch(
        self,
        requests: Sequence[Request],
        drafters: Sequence[Drafter | None],
        left: Sequence[int],
        most_rounds: int,
    ) -> DraftingLaunch | None:
        """What a launch is given; None where nothing is drafted behind the latest tokens.

        Args:
            requests: which ones.
            drafters: of each; None where it drafts nothing.
            left: tokens that each may have more.
            most_rounds: of the launch.
        """
        drafts = self._drafts(requests, drafters, left)
        if not any(drafts):
            return None
        sequences = tuple(
            DraftingSequence(
                NO_DRAFTS if drafter is None else drafter.state,
                draft,
                request.prompt_ids,
                list(request.sampler.output_ids),
                tokens,
                sorted(request.sampler.stop_test.ending_ids),
            )
            for request, drafter, draft, tokens in zip(
                requests, drafters, drafts, left, strict=True
            )
        )
        return DraftingLaunch(sequences, most_rounds, self._most_beside(requests))

    def can_draft(self, requests: Sequence[Request], num_drafting: int) -> bool:
        """Whether a round has queries for drafts of so many of the requests."""
        have_all = num_drafting == len(requests) and 2 * num_drafting <= MAX_QUERIES
        return num_drafting > 0 and (have_all or self._most_beside(requests) > len(requests))

    def _most_beside(self, requests: Sequence[Request]) -> int:
        return self._launching.most_beside[len(requests) - 1]

    def _drafts(
        self,
        requests: Sequence[Request],
        drafters: Sequence[Drafter | None],
        left: Sequence[int],
    ) -> list[Draft | None]:
        """What a round checks of each, as the kernel does; arguments as of `launch`."""
        drafts = [
            None if drafter is None else request.draft(min(MOST_DRAFTS, tokens - 1), drafter)
            for request, drafter, tokens in zip(requests, drafters, left, strict=True)
        ]
        offered = [0 if draft is None else len(draft.ids) for draft in drafts]
        dealt = deal(offered, MAX_QUERIES, self._most_beside(requests))
        return [
            replace(draft, ids=draft.ids[:count]) if draft is not None and count else None
            for draft, count in zip(drafts, dealt, strict=True)
        ]

    def _outcomes(
        self,
        number: int,
        requests: Sequence[Request],
        drafts: Sequence[Draft | None],
        made: Sequence[DraftedRound],
    ) -> list[Outcome]:
        """What a round's tokens mean for each request, whose queries lie side by side."""
        firsts = accumulate((1 + one.num_drafted for one in made), initial=0)
        told_of = zip(firsts, requests, drafts, made, strict=False)
        return [self._outcome(number, *of_one) for of_one in told_of]

    def _outcome(
        self, number: int, first: int, request: Request, draft: Draft | None, made: DraftedRound
    ) -> Outcome:
        assert made.num_drafted == (0 if draft is None else len(draft.ids)), "drafts differ"

        def pick_at(column: int) -> Picked:
            # What the kernel does not tell had no finite score.
            token_id = made.tokens[column] if column < len(made.tokens) else _NO_SCORE
            return self._launching.pick(request, token_id, number, first + column)

        try:
            return pick_at(0) if draft is None else verify(request, draft, pick_at)
        except Exception as error:  # noqa: BLE001 - it concerns this request alone
            return own_failure(CHOOSING, error)


def told(rounds: Iterable[_Round], *, is_late: bool) -> Iterator[tuple[int, _Round]]:
    """Rounds of a launch with their numbers.

    Args:
        rounds: as they come.
        is_late: each once the next one has come, or none follows, since its logits are in memory
            then.
    """
    if not is_late:
        yield from enumerate(rounds)
        return
    before: tuple[int, _Round] | None = None
    for numbered in enumerate(rounds):
        if before is not None:
            yield before
        before = numbered
    if before is not None:
        yield before


def watch(requests: Sequence[Request], drafters: Sequence[Drafter | None]) -> bool:
    """Tell drafters that rest what came; whether the rest of any is over."""
    ends = [
        drafter.watch(request.sampler.output_ids)
        for request, drafter in zip(requests, drafters, strict=True)
        if drafter is not None
    ]
    return any(ends)
