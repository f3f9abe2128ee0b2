"""Sequences as columns of the decode kernel: what a GPU does where the reference did it before.

A short prompt rides the decode kernel, a longer one goes through library products in chunks. The
host chooses the first token from the prompt's logits, the kernel all others, many rounds a launch,
in which every sequence has a column.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from soloist.engine.executor import (
    SCORED_TOKENS,
    CachedTokens,
    Executor,
    Outcome,
    Picked,
    Running,
    own_failure,
    pick,
    picked,
    take_forced,
)
from soloist.errors import BadLogits
from soloist.kv.allocator import KvAllocator, SequenceAllocation
from soloist.kv.chunks import LEAST_CHUNK_TOKENS, PrefixChunks, growing_chunks
from soloist.kv.tiers import Host
from soloist.megakernel.abi import MAX_STOPS
from soloist.megakernel.choice import Choice
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.sampling_header import bad_score
from soloist.prefill.upload import TokenIds
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.sampling import Sampler
from soloist.sampling.constraint import Words

# Prompts of up to so many tokens ride the decode kernel: three rounds of eight columns take less
# time than the launches of one pass of prefill.
RIDING_TOKENS = 24

# Fewer forced tokens are chosen one a round, each the only one allowed. For more of them the launch
# ends, and they ride: that costs the round that is running, and two starts of the kernel.
SPAN_TOKENS = 4
# A sequence joins if there are pages for what it has come to and so many tokens more.
_MARGIN_TOKENS = 256
# Cached prompts have to make place for so many rounds; longer launches take what is free.
_ASSURED_ROUNDS = 64
# Tokens of an answer that are read again at a time: eight rounds, as others then have.
_REPLAYED_TOKENS = 64

# In a row of the page tables whose write has not succeeded; no page has this number.
_UNKNOWN_PAGE = -1

# What a column's own part of a round is, for people.
_CHOOSING = "choosing a token"


class Launches(Protocol):
    """What generating needs of a `Decoder`."""

    max_rounds: int

    @property
    def logits(self) -> Tensor:
        """[8, at least V] fp32, of the last round."""
        ...

    @property
    def page_tables(self) -> Tensor:
        """[sequences, pages] int32, to be read; `write_pages` changes them."""
        ...

    def write_pages(self, sequence: int, pages: Sequence[int]) -> None:
        """The first pages of a sequence."""
        ...

    def start(self, columns: Sequence[Query], rounds: int) -> None:
        """Start a launch."""
        ...

    def tokens(self) -> Iterator[list[int]]:
        """The launch's tokens as they come, to its end."""
        ...

    def stop(self) -> None:
        """Ask the launch to end soon."""
        ...

    def allow(self, column: int, words: Words | None) -> None:
        """Say what a column may choose next; None: the launch ends, whatever it chooses."""
        ...

    def abandon(self) -> None:
        """Have the launch end soon; nobody asks what its tokens are."""
        ...

    def run(self, columns: Sequence[Query], rounds: int) -> list[list[int]]:
        """A launch from start to end."""
        ...


class PromptPass(Protocol):
    """What reading prompts needs of a `Prefill`."""

    most_tokens: int
    widths: tuple[int, ...]

    def run(
        self,
        token_ids: TokenIds,
        position: int,
        page_table: Sequence[int],
        *,
        want_logits: bool = True,
    ) -> Tensor | None:
        """Logits [V] of the last token, where they are wanted."""
        ...


class _Running(Running):
    """A sequence with pages, unless it is preempted."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        top_logprobs: int | None,
        allocation: SequenceAllocation,
        *,
        scores_prompt: bool,
    ) -> None:
        super().__init__(prompt_ids, sampler, top_logprobs, scores_prompt=scores_prompt)
        self.allocation: SequenceAllocation | None = allocation


class KernelExecutor(Executor):
    """Sequences over anything that launches rounds and reads prompts.

    Every sequence is a column of each launch. It takes pages of the pool as it comes to their
    positions. One that is preempted frees them all, and reads again what it had come to: the prompt
    as before, its answer in rounds of eight columns, which give the bits of one.

    Args:
        decoder: runs rounds; its page tables have a row for each sequence.
        prefill: reads prompts that are too long to ride.
        num_pages: pages in the pool; at least one context's.
        vocab_size: V.
        chunk_tokens: most prompt tokens a pass where several sequences are open; and where one is,
            unless prompts are cached and `prefill` has settled widths: then a prompt that is read
            alone has passes of as many tokens as there may be.
        keeps_prefixes: cache prompts in their pages, as far as nobody else needs these, for later
            ones that begin alike.
        host: offloads cached pages that are needed for something else; None where nobody does.
    """

    def __init__(
        self,
        decoder: Launches,
        prefill: PromptPass,
        num_pages: int,
        vocab_size: int,
        chunk_tokens: int = MOST_PASS_TOKENS,
        *,
        keeps_prefixes: bool = False,
        host: Host | None = None,
    ) -> None:
        self._launches, self._prompt_pass = decoder, prefill
        self._vocab_size = vocab_size
        most = min(chunk_tokens, prefill.most_tokens)
        self.chunks = growing_chunks(most) if keeps_prefixes else PrefixChunks(most, most)
        # Most tokens of a pass beside others and alone, where a pass need not be a chunk.
        self._widest: tuple[int, int] | None = None
        whole = [w for w in prefill.widths if w % LEAST_CHUNK_TOKENS == 0]
        if keeps_prefixes and (narrow := [w for w in whole if w <= most]):
            self._widest = narrow[-1], whole[-1]
            self.chunks = PrefixChunks(LEAST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS)
        self.num_columns = min(MAX_QUERIES, decoder.page_tables.shape[0])
        self.allocator = KvAllocator(
            self.num_columns, num_pages, self.chunks, keeps_prefixes=keeps_prefixes, host=host
        )
        self.tiers = self.allocator.tiers
        self._page_tables = decoder.page_tables.tolist()

    # --- pages ------------------------------------------------------------------------------------

    def open(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        top_logprobs: int | None = None,
        *,
        scores_prompt: bool = False,
    ) -> Running | None:
        """See Executor."""
        allocation = self._allocate(prompt_ids, sampler, keeps=not scores_prompt)
        if allocation is None:
            return None
        running = _Running(
            prompt_ids, sampler, top_logprobs, allocation, scores_prompt=scores_prompt
        )
        running.num_cached, running.num_offloaded = allocation.num_cached, allocation.num_offloaded
        running.divergence = allocation.divergence
        self._begin(running, allocation)
        return running

    def _allocate(
        self, prompt_ids: Sequence[int], sampler: Sampler, *, keeps: bool
    ) -> SequenceAllocation | None:
        most = len(prompt_ids) + sampler.stop_test.max_tokens
        first = len(prompt_ids) + len(sampler.output_ids) + _MARGIN_TOKENS
        return self.allocator.allocate(prompt_ids if keeps else (), min(first, most), most)

    def reserve(self, running: Sequence[Running]) -> bool:
        """See Executor."""
        return all(
            self.allocator.reserve(_allocation_of(r), self._next_position(r)) for r in running
        )

    def _next_position(self, running: Running) -> int:
        """Positions after the next chunk, or after some rounds."""
        prompt, start = len(running.prompt_ids), running.num_read
        if running.is_read:
            return running.position + min(_ASSURED_ROUNDS, running.num_wanted)
        if start >= prompt:
            return min(start + _REPLAYED_TOKENS, running.num_to_read)
        if running.prompt_scores is not None:
            return min(start + SCORED_TOKENS, prompt)
        return prompt if prompt <= RIDING_TOKENS else min(start + self._pass_tokens(start), prompt)

    def _pass_tokens(self, start: int) -> int:
        """Most prompt tokens of the pass that begins at `start`."""
        if self._widest is None:
            return self.chunks.width(start)
        beside_others, alone = self._widest
        return alone if self.allocator.num_open == 1 else beside_others

    def preempt(self, running: Running) -> None:
        """See Executor."""
        assert isinstance(running, _Running), "opened here"
        self.allocator.free(_allocation_of(running))
        running.allocation, running.num_read = None, 0

    def resume(self, running: Running) -> bool:
        """See Executor."""
        assert isinstance(running, _Running), "opened here"
        assert running.allocation is None, "it is preempted"
        keeps = running.prompt_scores is None
        running.allocation = self._allocate(running.prompt_ids, running.sampler, keeps=keeps)
        if running.allocation is None:
            return False
        self._begin(running, running.allocation)
        return True

    def _begin(self, running: Running, allocation: SequenceAllocation) -> None:
        running.num_to_read = max(len(running.prompt_ids), running.position)
        running.num_read, running.num_behind = allocation.num_joined, 0

    def close(self, running: Running) -> None:
        """See Executor."""
        assert isinstance(running, _Running), "opened here"
        if running.allocation is not None:
            self.allocator.free(running.allocation)
            running.allocation = None

    @property
    def cached(self) -> CachedTokens:
        """See Executor."""
        # The engine's thread may be between two of these counts.
        tiers, moved, on_host = self.tiers, self.tiers.moved, self.tiers.offloaded_tokens
        return CachedTokens(
            on_device=max(0, tiers.cached_tokens - on_host),
            on_host=on_host,
            offloaded=moved.offloaded_tokens,
            fetched=moved.fetched_tokens,
            evicted=moved.evicted_tokens,
        )

    @property
    def num_pages(self) -> int:
        """See Executor."""
        return self.tiers.pages.num_pages

    @property
    def num_pages_free(self) -> int:
        """See Executor."""
        return min(self.tiers.num_available, self.num_pages)

    def check(self) -> None:
        """See Executor."""
        self.allocator.check()

    def _show(self, running: Running) -> int:
        """Make the kernel's page table that of a sequence; its row."""
        allocation = _allocation_of(running)
        count, table = len(allocation.pages), self._page_tables[allocation.row]
        if table[:count] != allocation.pages:
            table[:count] = [_UNKNOWN_PAGE] * count  # until the write has succeeded
            self._launches.write_pages(allocation.row, allocation.pages)
            table[:count] = allocation.pages
        return allocation.row

    # --- prompts ----------------------------------------------------------------------------------

    def read(self, running: Running) -> Picked | None:
        """See Executor."""
        allocation, start, ids = _allocation_of(running), running.num_read, running.prompt_ids
        assert self.reserve([running]), "the caller did so before"
        if num_joined := self._join_chunks(allocation, start):
            running.num_read += num_joined
            return None
        self.tiers.join()
        is_resumed = bool(running.sampler.output_ids)
        if start >= len(ids):
            self._replay(running)
            return None
        if running.prompt_scores is not None:
            return self._read_scored(running)
        if len(ids) <= RIDING_TOKENS:
            token_id, last = self._ride(running)
            return None if is_resumed else self._pick_ridden(running, token_id, last)
        chunk = ids[start : start + self._pass_tokens(start)]
        # Wanted or not, logits come with the last chunk, which then has the same size as ever.
        is_last = start + len(chunk) == len(ids)
        if num_adopted := self.allocator.adopt(allocation, start, chunk[:-1] if is_last else chunk):
            running.num_read += num_adopted
            running.num_cached += 0 if is_resumed else num_adopted
            return None
        prompt_ids = running.sampler.counts.prompt_ids[start : start + len(chunk)]
        logits = self._prompt_pass.run(prompt_ids, start, allocation.pages, want_logits=is_last)
        running.num_read += len(chunk)
        self.allocator.cache(allocation, start, chunk)
        return None if logits is None or is_resumed else pick(running, logits)

    def _join_chunks(self, allocation: SequenceAllocation, start: int) -> int:
        """Let next cached chunks join, as many as a pass would read; how many positions."""
        num_joined = self.allocator.next_chunk(allocation)
        while (
            allocation.behind
            and num_joined < self._pass_tokens(start)
            and self.allocator.reserve(allocation, 0)
        ):
            num_joined += self.allocator.next_chunk(allocation)
        return num_joined

    def _ride(self, running: Running) -> tuple[int, int]:
        """Read a short prompt in rounds of its own; what the last column chose, and which it is."""
        # Columns side by side. Those that run out of tokens before others go on with what they
        # chose: at positions behind the prompt, which the answer writes again.
        ids, row = running.prompt_ids, self._show(running)
        width, last = min(len(ids), MAX_QUERIES), (len(ids) - 1) % MAX_QUERIES
        columns = [Query(row, c, ids[c::width], stride=width) for c in range(width)]
        token_id = self._launches.run(columns, -(-len(ids) // width))[-1][last]
        running.num_read = len(ids)
        return token_id, last

    def _pick_ridden(self, running: Running, token_id: int, last: int) -> Picked:
        if running.top_logprobs is not None or _choice(running.sampler) is not None:
            return pick(running, self._launches.logits[last, : self._vocab_size])
        # The best one, as the kernel has found.
        if token_id >= self._vocab_size:
            raise BadLogits(len(running.prompt_ids), bad_score(token_id))
        running.sampler.observe(token_id)
        return Picked(token_id)

    def _read_scored(self, running: Running) -> Picked | None:
        """Read the next tokens in rounds of their own, for their logits."""
        # A launch a round: the kernel leaves the logits of its last round only. One that was
        # preempted is read again in the same way, since prefill's keys and values have other bits.
        ids, row, start = running.prompt_ids, self._show(running), running.num_read
        stop = min(start + SCORED_TOKENS, len(ids))
        for first in range(start, stop, MAX_QUERIES):
            part = ids[first : min(first + MAX_QUERIES, stop)]
            self._launches.run([Query(row, first + c, [x]) for c, x in enumerate(part)], 1)
            rows = self._launches.logits[: len(part), : self._vocab_size]
            running.score(first, rows)
        running.num_read = stop
        is_resumed = bool(running.sampler.output_ids)
        is_wanted = running.is_read and not (is_resumed or running.is_over)
        return pick(running, rows[-1]) if is_wanted else None

    def _replay(self, running: Running) -> None:
        """Let the kernel make keys and values of an answer's next tokens anew."""
        stop = min(running.num_read + _REPLAYED_TOKENS, running.num_to_read)
        self._feed(running, running.num_read, stop)
        running.num_read = stop

    def _feed(self, running: Running, start: int, stop: int) -> None:
        """Let the kernel make keys and values of an answer's tokens at these positions."""
        if start == stop:
            return
        row, first = self._show(running), start - len(running.prompt_ids)
        ids = running.sampler.output_ids[first : first + stop - start]
        # Whole rounds only: what follows the last token may be somebody else's page.
        full = len(ids) // MAX_QUERIES * MAX_QUERIES
        for begin, part in ((0, ids[:full]), (full, ids[full:])):
            width = min(len(part), MAX_QUERIES)
            columns = [
                Query(row, start + begin + c, part[c::width], stride=width) for c in range(width)
            ]
            if columns:
                self._launches.run(columns, len(part) // width)

    # --- rounds -----------------------------------------------------------------------------------

    def rounds(self, running: Sequence[Running], most: int) -> Generator[list[Outcome], None, None]:
        """See Executor.

        Where log probabilities are wanted a launch has one round: the kernel leaves the logits of
        its last round only.
        """
        shows_logits = any(r.top_logprobs is not None for r in running)
        count = 1 if shows_logits else min(most, self._launches.max_rounds)
        count = self._take_pages(running, min(count, *(r.num_wanted for r in running)))
        columns = []
        for number, one in enumerate(running):
            self._feed(one, one.position - one.num_behind, one.position)
            one.num_behind = 0
            row = self._show(one)
            try:
                columns.append(_column(one, row))
            except Exception as error:  # noqa: BLE001 - the others go on
                failure = own_failure(_CHOOSING, error)
                yield [failure if n == number else None for n in range(len(running))]
                return
        settled: dict[int, Outcome] = {}
        self._launches.start(columns, count)
        tokens = self._launches.tokens()
        try:
            for chosen in list(tokens) if shows_logits else tokens:
                yield [
                    settled[column]
                    if column in settled
                    else self._outcome(column, r, chosen[column], settled)
                    for column, r in enumerate(running)
                ]
        finally:
            self._launches.abandon()
            for _ in tokens:
                pass
            for one in running:
                self.allocator.came_to(_allocation_of(one), one.position)

    def _take_pages(self, running: Sequence[Running], count: int) -> int:
        """As many rounds, at most `count`, as there are pages for."""
        assert self.reserve(running), "the caller did so before"
        allocations = [_allocation_of(r) for r in running]
        while count > _ASSURED_ROUNDS:
            if self.allocator.look_ahead(allocations, [r.position + count for r in running]):
                return count
            count = max(_ASSURED_ROUNDS, count // 2)
        return count

    def _outcome(
        self, column: int, running: Running, token_id: int, settled: dict[int, Outcome]
    ) -> Outcome:
        """What a column's token means.

        `settled` has what the launch's further rounds bring for columns whose tokens mean nothing
        any more; this one may join them.
        """
        try:
            return self._chosen(column, running, token_id, settled)
        except Exception as error:  # noqa: BLE001 - the other columns go on
            failure = own_failure(_CHOOSING, error)
            self._launches.allow(column, None)
            settled[column] = failure
            return failure

    def _chosen(
        self, column: int, running: Running, token_id: int, settled: dict[int, Outcome]
    ) -> Outcome:
        if token_id >= self._vocab_size:
            raise BadLogits(running.position + 1, bad_score(token_id))
        running.sampler.observe(token_id)
        if running.top_logprobs is not None:
            return picked(running, token_id, self._launches.logits[column, : self._vocab_size])
        outcome = Picked(token_id, forced=take_forced(running, SPAN_TOKENS))
        if running.sampler.is_constrained:
            # As soon as it is known: the kernel may be waiting for it.
            ends = bool(running.num_behind) or running.is_over
            self._launches.allow(column, None if ends else running.sampler.allowed())
            if ends:
                settled[column] = None
        return outcome

    def stop(self) -> None:
        """See Executor."""
        self._launches.stop()


def _allocation_of(running: Running) -> SequenceAllocation:
    assert isinstance(running, _Running), "opened here"
    assert running.allocation is not None, "it is not preempted"
    return running.allocation


def _column(running: Running, row: int) -> Query:
    # Of more stop tokens the caller sees the others.
    stops = sorted(running.sampler.stop_test.ending_ids)[:MAX_STOPS]
    choice = _choice(running.sampler)
    return Query(row, running.position, [running.last], stops, choice=choice)


def _choice(sampler: Sampler) -> Choice | None:
    """How tokens are chosen from here on; None if every one is that with the largest logit."""
    if sampler.takes_the_largest:
        return None
    ending_ids = sampler.stop_test.ending_ids
    return Choice(sampler.params, sampler.counts, ending_ids, sampler.allowed())
