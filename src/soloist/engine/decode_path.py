"""Tokens that are known already, read by the decode kernel: decode-path prefill.

Rounds of up to eight queries of one sequence give the bits that rounds of one would. Short prompts
are read so, ends of prompts where `tail_path` says so, prompts whose every token is scored, forced
tokens, and answers that are read again.
"""

from soloist.engine.executor import SCORED_TOKENS, Picked, pick
from soloist.engine.request import Request
from soloist.errors import BadLogits
from soloist.kv.allocator import SequenceAllocation
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.choice import Choice
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.ranks import Launcher
from soloist.megakernel.sampling_header import bad_score
from soloist.sampling import Sampler

# In a row of the page tables whose write has not succeeded; no page has this number.
_UNKNOWN_PAGE = -1


class DecodePath:
    """Reads tokens of requests in launches of their own.

    Args:
        decoder: launches rounds.
        vocab_size: V.
    """

    def __init__(self, decoder: Launcher, vocab_size: int) -> None:
        self._decoder, self._vocab_size = decoder, vocab_size
        self._page_tables: list[list[int]] = decoder.page_tables.tolist()

    def row_of(self, allocation: SequenceAllocation) -> int:
        """The row of the kernel's page tables that has a sequence's pages now."""
        if not self.has_row_of(allocation):
            count, table = len(allocation.pages), self._page_tables[allocation.row]
            table[:count] = [_UNKNOWN_PAGE] * count  # until the write has succeeded
            self._decoder.write_pages(allocation.row, allocation.pages)
            table[:count] = allocation.pages
        return allocation.row

    def has_row_of(self, allocation: SequenceAllocation) -> bool:
        """Whether the kernel's page tables have a sequence's pages, so that nothing is to write."""
        return self._page_tables[allocation.row][: len(allocation.pages)] == allocation.pages

    def read(self, request: Request, allocation: SequenceAllocation, stop: int) -> Picked | None:
        """Read a prompt's next tokens up to position `stop`.

        Returns:
            At the prompt's end its first token, unless the answer has some already.

        Raises:
            BadLogits, GrammarFailed: no first token can be chosen.
        """
        ids, row, start = request.prompt_ids, self.row_of(allocation), request.num_read
        # Queries side by side. Those that run out of tokens before others go on with what they
        # chose: at positions behind the prompt, which the answer writes again.
        last, whole = 0, start + (stop - start) // MAX_QUERIES * MAX_QUERIES
        rounds = -(-(stop - start) // MAX_QUERIES)
        has_room = start + rounds * MAX_QUERIES <= len(allocation.pages) * PAGE_POSITIONS
        for begin, end in [(start, stop)] if has_room else [(start, whole), (whole, stop)]:
            if begin == end:
                continue
            width, last = min(end - begin, MAX_QUERIES), (end - begin - 1) % MAX_QUERIES
            queries = [
                Query(row, begin + q, ids[begin + q : end : width], stride=width)
                for q in range(width)
            ]
            token_id = self._decoder.run(queries, -(-(end - begin) // width))[-1][last]
        request.num_read = stop
        if request.sampler.output_ids or stop < len(ids):
            return None
        if request.top_logprobs is not None or choice_of(request.sampler) is not None:
            return pick(request, self._decoder.logits[last, : self._vocab_size])
        # The best one, as the kernel has found.
        if token_id >= self._vocab_size:
            raise BadLogits(len(request.prompt_ids), bad_score(token_id))
        request.sampler.observe(token_id)
        return Picked(token_id)

    def score(self, request: Request, allocation: SequenceAllocation) -> Picked | None:
        """Read the next tokens of a prompt for their logits; the first token, if it is wanted.

        Raises:
            BadLogits, GrammarFailed: as `read`.
        """
        # A launch a round: the kernel leaves the logits of its last round only. One that was
        # preempted is read again in the same way, since prefill's keys and values have other bits.
        ids, row, start = request.prompt_ids, self.row_of(allocation), request.num_read
        stop = min(start + SCORED_TOKENS, len(ids))
        for first in range(start, stop, MAX_QUERIES):
            part = ids[first : min(first + MAX_QUERIES, stop)]
            self._decoder.run([Query(row, first + q, [x]) for q, x in enumerate(part)], 1)
            rows = self._decoder.logits[: len(part), : self._vocab_size]
            request.score(first, rows)
        request.num_read = stop
        is_resumed = bool(request.sampler.output_ids)
        is_wanted = request.is_read and not (is_resumed or request.has_all_tokens)
        return pick(request, rows[-1]) if is_wanted else None

    def feed(self, request: Request, allocation: SequenceAllocation, start: int, stop: int) -> None:
        """Make keys and values of an answer's tokens at positions from `start` to `stop`."""
        if start == stop:
            return
        row, first = self.row_of(allocation), start - len(request.prompt_ids)
        ids = request.sampler.output_ids[first : first + stop - start]
        # Whole rounds only: what follows the last token may be another request's page.
        full = len(ids) // MAX_QUERIES * MAX_QUERIES
        for begin, part in ((0, ids[:full]), (full, ids[full:])):
            width = min(len(part), MAX_QUERIES)
            queries = [
                Query(row, start + begin + q, part[q::width], stride=width) for q in range(width)
            ]
            if queries:
                self._decoder.run(queries, len(part) // width)


def choice_of(sampler: Sampler, *, stays: bool = False) -> Choice | None:
    """How tokens are chosen from here on; None if every one is that with the largest logit.

    Args:
        sampler: of the request.
        stays: whatever the sampler observes later.
    """
    if sampler.takes_the_largest:
        return None
    params, counts = sampler.params, sampler.counts
    if stays:
        counts = counts.as_they_are(each_token=params.has_penalties)
    return Choice(params, counts, sampler.stop_test.ending_ids, sampler.allowed())
