"""Drafts of the host, checked in launches of one round: what the kernel cannot do alone.

For predictions of requests with a form, whose masks are written between rounds, and of contexts
that are too long for the kernel's searches.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from soloist.engine.decode_path import DecodePath, choice_of
from soloist.engine.executor import CHOOSING, Outcome, Picked, Verified, own_failure, verify
from soloist.engine.request import Request
from soloist.errors import GrammarFailed
from soloist.kv.allocator import KvAllocator, SequenceAllocation
from soloist.megakernel.launch import Query
from soloist.megakernel.ranks import Launcher
from soloist.speculation import Draft


class PageOwner(Protocol):
    """Who has the pages of requests, such as an executor."""

    allocator: KvAllocator

    def reserve(self, requests: Sequence[Request]) -> bool:
        """See Executor."""

    def allocation_of(self, request: Request) -> SequenceAllocation:
        """The pages of a request that is open, and not preempted."""


class HostDrafts:
    """Makes rounds that check what a request drafts.

    Args:
        decoder: launches rounds.
        decode_path: writes its page tables.
        pages: who has those of requests.
        pick: observes a token that the kernel chose in a round, here the first, for a query.
    """

    def __init__(
        self,
        decoder: Launcher,
        decode_path: DecodePath,
        pages: PageOwner,
        pick: Callable[[Request, int, int, int], Picked],
    ) -> None:
        self._decoder, self._decode_path = decoder, decode_path
        self._pages, self._pick = pages, pick
        self._is_asked_to_stop = False

    def stop(self) -> None:
        """Begin no further round."""
        self._is_asked_to_stop = True

    def rounds(
        self, request: Request, most: int, most_drafts: int
    ) -> Generator[list[Outcome], None, bool]:
        """Launches of one round that check what the request drafts; whether there was one.

        The GPU stands still between two of them, so little is left to do then. While a round runs,
        the next one is prepared for the case that all of the draft is right, and starts at once if
        it is. In any case it starts before the tokens of this one are told. So where they end the
        answer in a way that is seen only then, by a stop string or a client that leaves, there is a
        round too many.

        Args:
            request: the only one; `reserve` returned True for it.
            most: rounds.
            most_drafts: tokens that a round checks beside the latest one.
        """
        self._is_asked_to_stop, count = False, 0
        draft = request.draft(most_drafts) if most > 0 and not request.has_all_tokens else None
        check = None if draft is None else self._begin_check(request, draft)
        try:
            while check is not None:
                count += 1
                most_behind = most_drafts if count < most else 0
                expected = self._prepare_check(request, check, most_behind)
                chosen = self._chosen_by(check)
                following = None
                if expected is not None and chosen == expected.tokens:
                    following = self._start_prepared(expected)
                ended, check = check, following
                outcome = self._judge(request, ended, chosen)
                if following is not None:
                    draft = request.draft(most_drafts)
                    assert draft == following.draft, "it was known"
                elif count < most and self._may_follow(request, outcome):
                    draft = request.draft(most_drafts)
                    if draft is not None and self._pages.reserve([request]):
                        check = self._begin_check(request, draft)
                yield [outcome]
        finally:
            if check is not None and check.tokens is not None:
                self._decoder.abandon()
                for _ in check.tokens:
                    pass
        return count > 0

    def _may_follow(self, request: Request, outcome: Outcome) -> bool:
        """Whether a round may be made behind that of an outcome which nobody was told yet."""
        if not isinstance(outcome, Verified) or self._is_asked_to_stop:
            return False
        ending_ids = request.sampler.stop_test.ending_ids
        ends = any(picked.token_id in ending_ids for picked in outcome.picks)
        return not (ends or request.has_all_tokens)

    def _begin_check(self, request: Request, draft: Draft) -> "_Check":
        """Start a round with a query for the latest token and for each of the draft.

        Keys and values of drafts that are wrong stay in the request's own pages, behind all that
        anyone sees, until the answer comes there and writes its own.
        """
        try:
            queries = _columns(
                request, self._decode_path.row_of(self._pages.allocation_of(request)), draft
            )
            self._decoder.start(queries, 1)
        except Exception as error:  # noqa: BLE001 - it concerns this request alone
            return _Check(draft, failure=own_failure(CHOOSING, error))
        draft = replace(draft, ids=draft.ids[: len(queries) - 1])
        return _Check(draft, self._decoder.tokens())

    def _prepare_check(self, request: Request, check: "_Check", most: int) -> "_Expected | None":
        """Make ready the round that comes if all of a draft is right; None where it is not known.

        Masks, counts for penalties and page tables are written between rounds only.
        """
        sampler = request.sampler
        is_plain = not (sampler.is_constrained or sampler.params.has_penalties)
        can_prepare = self._decoder.prepares_while_running and check.tokens is not None
        if not can_prepare or request.top_logprobs is not None:
            return None
        found = request.draft_behind(check.draft, most) if is_plain else None
        if found is None:
            return None
        token_id, draft = found
        tokens, allocation = [*check.draft.ids, token_id], self._pages.allocation_of(request)
        for expected in tokens:
            sampler.observe(expected)
        try:
            if not (self._pages.reserve([request]) and self._decode_path.has_row_of(allocation)):
                return None
            self._decoder.prepare_next(_columns(request, allocation.row, draft), 1)
        finally:
            sampler.rollback(len(tokens))
        return _Expected(tokens, draft)

    def _start_prepared(self, expected: "_Expected") -> "_Check | None":
        """Start the round that was prepared, unless rounds shall end."""
        if self._is_asked_to_stop:
            return None
        self._decoder.start_next()
        return _Check(expected.draft, self._decoder.tokens())

    def _chosen_by(self, check: "_Check") -> list[int]:
        """Tokens of the round that checks a draft, which ends; none where it could not start."""
        return [] if check.tokens is None else list(check.tokens)[-1]

    def _judge(self, request: Request, check: "_Check", chosen: Sequence[int]) -> Outcome:
        """What the tokens of the round that checks a draft mean."""
        if check.tokens is None:
            return check.failure
        try:
            return verify(
                request,
                check.draft,
                lambda column: self._pick(request, chosen[column], 0, column),
            )
        except Exception as error:  # noqa: BLE001 - it concerns this request alone
            return own_failure(CHOOSING, error)
        finally:
            self._pages.allocator.came_to(self._pages.allocation_of(request), request.position)


@dataclass(frozen=True, slots=True)
class _Check:
    """A launch of one round that checks a draft.

    Attributes:
        draft: as much of it as has queries.
        tokens: the launch's, as they come; None where it could not start.
        failure: why not.
    """

    draft: Draft
    tokens: Iterator[list[int]] | None = None
    failure: Outcome = None


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a round brings if all of its draft is right.

    Attributes:
        tokens: that it chooses then.
        draft: what the next round, which is prepared, checks then.
    """

    tokens: list[int]
    draft: Draft


def _columns(request: Request, row: int, draft: Draft) -> list[Query]:
    """Queries for the latest token and the draft; each chooses as if those before it stood.

    Behind a token that leads to a dead end of the form there are none: whoever comes there fails
    then, and not before.

    Raises:
        GrammarFailed: nothing can follow the latest token.
    """
    sampler, position, queries = request.sampler, request.position, list[Query]()
    try:
        for column, token_id in enumerate((request.last, *draft.ids)):
            if column:
                sampler.observe(token_id)
            try:
                choice = choice_of(sampler, stays=True)
            except GrammarFailed:
                if not column:
                    raise
                break
            queries.append(Query(row, position + column, [token_id], choice=choice))
    finally:
        sampler.rollback(max(0, request.position - position))
    return queries
