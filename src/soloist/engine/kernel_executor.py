"""Requests on the decode kernel: each has a query of every round.

The decode kernel reads a short prompt itself; a longer one goes through library products in chunks.
The host chooses the first token from the prompt's logits, the kernel all others, many rounds
a launch.
"""

from collections.abc import Generator, Sequence

from soloist.engine.decode_path import DecodePath, choice_of
from soloist.engine.executor import (
    SCORED_TOKENS,
    Executor,
    Outcome,
    Picked,
    own_failure,
    pick,
    picked,
    take_forced,
)
from soloist.engine.request import Request
from soloist.errors import BadLogits
from soloist.kv.allocator import KvAllocator, SequenceAllocation
from soloist.kv.chunks import LEAST_CHUNK_TOKENS, PrefixChunks, growing_chunks
from soloist.kv.tiers import CachedTokens, Host
from soloist.megakernel.abi import MAX_STOPS
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.ranks import Launcher
from soloist.megakernel.sampling_header import bad_score
from soloist.prefill.runner import Prefill
from soloist.prefill.widths import MOST_PASS_TOKENS

# Prompts of up to so many tokens are read by the decode kernel: three rounds of eight queries take
# less time than the launches of one pass of prefill.
DECODE_PATH_TOKENS = 24

# Fewer forced tokens are chosen one a round, each the only one allowed. For more of them the launch
# ends, and the decode path reads them: that costs the round that is running, and two starts of the
# kernel.
SPAN_TOKENS = 4
# A request joins if there are pages for what it has come to and so many tokens more.
_MARGIN_TOKENS = 256
# Cached prompts have to make place for so many rounds; longer launches take what is free.
_ASSURED_ROUNDS = 64
# Tokens of an answer that are read again at a time: eight rounds, as others then have.
_REPLAYED_TOKENS = 64

# What a request's own part of a round is, for people.
_CHOOSING = "choosing a token"


class KernelExecutor(Executor):
    """Requests over what launches rounds and what reads prompts.

    A request takes pages of the pool as it comes to their positions. One that is preempted frees
    them all, and reads again what it had come to: the prompt as before, its answer in rounds of
    eight queries, which give the bits of one.

    Args:
        decoder: launches rounds; its page tables have a row for each request.
        prefill: reads longer prompts.
        num_pages: pages in the pool; at least one context's.
        vocab_size: V.
        chunk_tokens: most prompt tokens a pass where several requests are open; and where one is,
            unless prompts are cached and `prefill` has settled widths: then a prompt that is read
            alone has passes of as many tokens as there may be.
        keeps_prefixes: cache prompts in their pages, as far as no request needs these, for later
            ones that begin alike.
        host: offloads cached pages that are needed for something else; None where nobody does.
    """

    def __init__(
        self,
        decoder: Launcher,
        prefill: Prefill,
        num_pages: int,
        vocab_size: int,
        chunk_tokens: int = MOST_PASS_TOKENS,
        *,
        keeps_prefixes: bool = False,
        host: Host | None = None,
    ) -> None:
        self.decoder, self.prefill = decoder, prefill
        self._decode_path = DecodePath(decoder, vocab_size)
        self._vocab_size = vocab_size
        most = min(chunk_tokens, prefill.most_tokens)
        self.chunks = growing_chunks(most) if keeps_prefixes else PrefixChunks(most, most)
        # Most tokens of a pass beside others and alone, where a pass need not be a chunk.
        self._widest: tuple[int, int] | None = None
        whole = [w for w in prefill.widths if w % LEAST_CHUNK_TOKENS == 0]
        if keeps_prefixes and (narrow := [w for w in whole if w <= most]):
            self._widest = narrow[-1], whole[-1]
            self.chunks = PrefixChunks(LEAST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS)
        self.max_running = min(MAX_QUERIES, decoder.page_tables.shape[0])
        self.allocator = KvAllocator(
            self.max_running, num_pages, self.chunks, keeps_prefixes=keeps_prefixes, host=host
        )
        self.tiers = self.allocator.tiers
        # Of open requests; None where one is preempted.
        self._allocations: dict[Request, SequenceAllocation | None] = {}

    # --- pages ------------------------------------------------------------------------------------

    def open(self, request: Request) -> bool:
        """See Executor."""
        prompt, made = len(request.prompt_ids), len(request.sampler.output_ids)
        most = prompt + request.sampler.stop_test.max_tokens
        allocation = self.allocator.allocate(
            request.prompt_ids if request.prompt_scores is None else (),
            min(prompt + made + _MARGIN_TOKENS, most),
            most,
        )
        if allocation is None:
            return False
        if request not in self._allocations:
            request.num_cached = allocation.num_cached
            request.num_offloaded = allocation.num_offloaded
            request.divergence = allocation.divergence
        self._allocations[request] = allocation
        request.num_to_read = max(prompt, request.position)
        request.num_read, request.num_behind = allocation.num_joined, 0
        return True

    def allocation_of(self, request: Request) -> SequenceAllocation:
        """The pages of a request that is open, and not preempted."""
        allocation = self._allocations[request]
        assert allocation is not None, "it is not preempted"
        return allocation

    def reserve(self, requests: Sequence[Request]) -> bool:
        """See Executor."""
        return all(
            self.allocator.reserve(self.allocation_of(r), self._next_position(r)) for r in requests
        )

    def _next_position(self, request: Request) -> int:
        """Positions after the next chunk, or after some rounds."""
        prompt, start = len(request.prompt_ids), request.num_read
        if request.is_read:
            return request.position + min(_ASSURED_ROUNDS, request.num_wanted)
        if start >= prompt:
            return min(start + _REPLAYED_TOKENS, request.num_to_read)
        if request.prompt_scores is not None:
            return min(start + SCORED_TOKENS, prompt)
        if prompt <= DECODE_PATH_TOKENS:
            return prompt
        return min(start + self._pass_tokens(start), prompt)

    def _pass_tokens(self, start: int) -> int:
        """Most prompt tokens of the pass that begins at `start`."""
        if self._widest is None:
            return self.chunks.width(start)
        beside_others, alone = self._widest
        return alone if self.allocator.num_open == 1 else beside_others

    def preempt(self, request: Request) -> None:
        """See Executor."""
        self.allocator.free(self.allocation_of(request))
        self._allocations[request], request.num_read = None, 0

    def free(self, request: Request) -> None:
        """See Executor."""
        if (allocation := self._allocations[request]) is not None:
            self.allocator.free(allocation)
        del self._allocations[request]

    @property
    def cached(self) -> CachedTokens:
        """See Executor."""
        return self.tiers.cached

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

    # --- prompts ----------------------------------------------------------------------------------

    def read(self, request: Request) -> Picked | None:
        """See Executor."""
        allocation, start = self.allocation_of(request), request.num_read
        ids = request.prompt_ids
        assert self.reserve([request]), "the caller did so before"
        if num_joined := self._join_chunks(allocation, start):
            request.num_read += num_joined
            return None
        self.tiers.join()
        is_resumed = bool(request.sampler.output_ids)
        if start >= len(ids):
            stop = min(start + _REPLAYED_TOKENS, request.num_to_read)
            self._decode_path.feed(request, allocation, start, stop)
            request.num_read = stop
            return None
        if request.prompt_scores is not None:
            return self._decode_path.score(request, allocation)
        if len(ids) <= DECODE_PATH_TOKENS:
            return self._decode_path.read(request, allocation)
        chunk = ids[start : start + self._pass_tokens(start)]
        # Wanted or not, logits come with the last chunk, which then has the same size as ever.
        is_last = start + len(chunk) == len(ids)
        if num_adopted := self.allocator.adopt(allocation, start, chunk[:-1] if is_last else chunk):
            request.num_read += num_adopted
            request.num_cached += 0 if is_resumed else num_adopted
            return None
        prompt_ids = request.sampler.counts.prompt_ids[start : start + len(chunk)]
        logits = self.prefill.run(prompt_ids, start, allocation.pages, want_logits=is_last)
        request.num_read += len(chunk)
        self.allocator.cache(allocation, start, chunk)
        return None if logits is None or is_resumed else pick(request, logits)

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

    # --- rounds -----------------------------------------------------------------------------------

    def rounds(
        self, requests: Sequence[Request], most: int
    ) -> Generator[list[Outcome], None, None]:
        """See Executor.

        Where log probabilities are wanted a launch has one round: the kernel leaves the logits of
        its last round only.
        """
        shows_logits = any(r.top_logprobs is not None for r in requests)
        count = 1 if shows_logits else min(most, self.decoder.max_rounds)
        count = self._take_pages(requests, min(count, *(r.num_wanted for r in requests)))
        queries = []
        for number, one in enumerate(requests):
            allocation = self.allocation_of(one)
            self._decode_path.feed(one, allocation, one.position - one.num_behind, one.position)
            one.num_behind = 0
            row = self._decode_path.row_of(allocation)
            try:
                queries.append(_query(one, row))
            except Exception as error:  # noqa: BLE001 - the others go on
                failure = own_failure(_CHOOSING, error)
                yield [failure if n == number else None for n in range(len(requests))]
                return
        settled: dict[int, Outcome] = {}
        self.decoder.start(queries, count)
        tokens = self.decoder.tokens()
        try:
            for chosen in list(tokens) if shows_logits else tokens:
                yield [
                    settled[query]
                    if query in settled
                    else self._outcome(query, r, chosen[query], settled)
                    for query, r in enumerate(requests)
                ]
        finally:
            self.decoder.abandon()
            for _ in tokens:
                pass
            for one in requests:
                self.allocator.came_to(self.allocation_of(one), one.position)

    def _take_pages(self, requests: Sequence[Request], count: int) -> int:
        """As many rounds, at most `count`, as there are pages for."""
        assert self.reserve(requests), "the caller did so before"
        allocations = [self.allocation_of(r) for r in requests]
        while count > _ASSURED_ROUNDS:
            if self.allocator.look_ahead(allocations, [r.position + count for r in requests]):
                return count
            count = max(_ASSURED_ROUNDS, count // 2)
        return count

    def _outcome(
        self, query: int, request: Request, token_id: int, settled: dict[int, Outcome]
    ) -> Outcome:
        """What a query's token means.

        `settled` has what the launch's further rounds bring for queries whose tokens mean nothing
        any more; this one may join them.
        """
        try:
            return self._chosen(query, request, token_id, settled)
        except Exception as error:  # noqa: BLE001 - the other queries go on
            failure = own_failure(_CHOOSING, error)
            self.decoder.allow(query, None)
            settled[query] = failure
            return failure

    def _chosen(
        self, query: int, request: Request, token_id: int, settled: dict[int, Outcome]
    ) -> Outcome:
        if token_id >= self._vocab_size:
            raise BadLogits(request.position + 1, bad_score(token_id))
        request.sampler.observe(token_id)
        if request.top_logprobs is not None:
            return picked(request, token_id, self.decoder.logits[query, : self._vocab_size])
        outcome = Picked(token_id, forced=take_forced(request, SPAN_TOKENS))
        if request.sampler.is_constrained:
            # As soon as it is known: the kernel may be waiting for it.
            ends = bool(request.num_behind) or request.has_all_tokens
            self.decoder.allow(query, None if ends else request.sampler.allowed())
            if ends:
                settled[query] = None
        return outcome

    def stop(self) -> None:
        """See Executor."""
        self.decoder.stop()


def _query(request: Request, row: int) -> Query:
    # Of more stop tokens the host sees the others.
    stops = sorted(request.sampler.stop_test.ending_ids)[:MAX_STOPS]
    choice = choice_of(request.sampler)
    return Query(row, request.position, [request.last], stops, choice=choice)
