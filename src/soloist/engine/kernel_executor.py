"""Requests on the decode kernel: each has a query of every round.

The decode kernel reads a short prompt itself; a longer one goes through library products in chunks.
The host chooses the first token from the prompt's logits, the kernel all others, many rounds
a launch.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from soloist.engine.decode_path import DecodePath, choice_of
from soloist.engine.executor import (
    CHOOSING,
    SCORED_TOKENS,
    Executor,
    Outcome,
    Picked,
    own_failure,
    pick,
    picked,
    take_forced,
)
from soloist.engine.host_drafts import HostDrafts
from soloist.engine.kernel_drafts import KernelDrafts, told, watch
from soloist.engine.launch_ahead import LaunchAhead
from soloist.engine.pass_pace import PassPace
from soloist.engine.request import Request
from soloist.engine.tail_path import TailRule
from soloist.errors import BadLogits
from soloist.kv.allocator import KvAllocator, SequenceAllocation
from soloist.kv.chunks import LEAST_CHUNK_TOKENS, PrefixChunks, growing_chunks
from soloist.kv.folder import ChunkFolder
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.page_copies import PageCopies
from soloist.kv.saving import SavedChunks, SavedTokens, Source, Trail
from soloist.kv.tiers import CachedTokens, Host
from soloist.megakernel.abi import MAX_STOPS, MOST_DRAFTING_SEQUENCES, MOST_DRAFTS
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import KEPT_ROUNDS, MAX_QUERIES
from soloist.megakernel.ranks import Launcher
from soloist.megakernel.sampling_header import bad_score
from soloist.prefill.runner import Prefill
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.speculation import Drafter

# Fewer forced tokens are chosen one a round, each the only one allowed. For more of them the launch
# ends, and the decode path reads them: that costs the round that is running, and two starts of the
# kernel.
SPAN_TOKENS = 4
# A request joins if there are pages for what it has come to and so many tokens more.
_MARGIN_TOKENS = 256
# Cached prompts have to make place for so many rounds; longer launches take what is free.
_ASSURED_ROUNDS = 64
# Known tokens that rounds read at a time, such as of an answer that is read again: eight rounds, as
# others then have.
_ROUNDS_TOKENS = 64


class KernelExecutor(Executor):
    """Requests over what launches rounds and what reads prompts.

    A request takes pages of the pool as it comes to their positions. One that is preempted frees
    them all, and reads again what it had come to: the prompt as before, its answer in rounds of
    eight queries, which give the bits of one.

    Requests are checked against their predictions, or against what is looked up, in rounds with a
    query for each drafted token; requests side by side share the queries (`deal`). The kernel
    drafts, many rounds a launch. Masks of a form are the host's, so while one is open nobody
    drafts, but for a prediction of a request that decodes alone: the host drafts, for a launch of
    one round. Where drafts do not pay (`Drafter.is_resting`), and before anything was looked up
    with success, launches are those of other requests, and the host watches whether drafts would be
    right.

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

    Attributes:
        drafts_in_kernel: requests without a form draft within launches, as `drafting` says.
        most_beside: by their number, queries of a round in which one of the requests has no draft.
        tails: which way the tokens behind a prompt's last chunk are read: by passes, at first.
    """

    drafts_in_kernel = False
    most_beside: Sequence[int] = (MAX_QUERIES,) * MAX_QUERIES

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
        self._ahead = LaunchAhead(decoder)
        self.tails = TailRule()
        self._decode_path = DecodePath(decoder, vocab_size)
        self._host_drafts = HostDrafts(decoder, self._decode_path, self, self.pick)
        self._kernel_drafts = KernelDrafts(decoder, self._ahead, self)
        self._vocab_size = vocab_size
        most = min(chunk_tokens, prefill.most_tokens)
        self.chunks = growing_chunks(most) if keeps_prefixes else PrefixChunks(most, most)
        # Most tokens of a pass beside others and alone, where a pass need not be a chunk.
        self._widest: tuple[int, int] | None = None
        whole = [w for w in prefill.widths if w % LEAST_CHUNK_TOKENS == 0]
        if keeps_prefixes and (narrow := [w for w in whole if w <= most]):
            self._widest = narrow[-1], whole[-1]
            self._pace = PassPace(narrow)
            self.chunks = PrefixChunks(LEAST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS)
        self.max_running = min(MAX_QUERIES, decoder.page_tables.shape[0])
        self.allocator = KvAllocator(
            self.max_running, num_pages, self.chunks, keeps_prefixes=keeps_prefixes, host=host
        )
        self.tiers = self.allocator.tiers
        # Width, position and beginning of passes since the last round, the latest two of them.
        self._passes: list[tuple[int, int, float]] = []
        # Of open requests; None where one is preempted.
        self._allocations: dict[Request, SequenceAllocation | None] = {}
        # Of open requests: the position from which on rounds read the prompt.
        self._rounds_from: dict[Request, int] = {}
        self._copies: PageCopies | None = None
        self._saved: SavedChunks | None = None
        # Of open requests whose prompts are cached and saved.
        self._trails: dict[Request, Trail] = {}

    # --- pages ------------------------------------------------------------------------------------

    def open(self, request: Request) -> bool:
        """See Executor."""
        prompt, made = len(request.prompt_ids), len(request.sampler.output_ids)
        most = prompt + request.sampler.stop_test.max_tokens
        allocation = self.allocator.allocate(
            request.sampler.counts.prompt_ids if request.prompt_scores is None else (),
            min(prompt + made + _MARGIN_TOKENS, most),
            most,
        )
        if allocation is None:
            return False
        if request not in self._allocations:
            request.num_cached = allocation.num_cached
            request.num_offloaded = allocation.num_offloaded
            request.divergence = allocation.divergence
            boundary = self.chunks.last_boundary(prompt)
            self._rounds_from[request] = self.tails.rounds_from(prompt, boundary)
        self._allocations[request] = allocation
        request.num_to_read = max(prompt, request.position)
        request.num_read, request.num_behind = allocation.num_joined, 0
        if self._saved is not None and request.prompt_scores is None:
            if request not in self._trails:
                self._trails[request] = self._saved.trail(request.prompt_ids, allocation.num_cached)
            # What is still to come from the host is saved by a later request.
            self._saved.catch_up(
                self._trails[request], allocation.num_joined,
                lambda start: self._download(request, start),
            )  # fmt: skip
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
            return min(start + _ROUNDS_TOKENS, request.num_to_read)
        if request.prompt_scores is not None:
            return min(start + SCORED_TOKENS, prompt)
        if start >= (rounds_from := self._rounds_from[request]):
            return min(start + _ROUNDS_TOKENS, prompt)
        return min(start + self._pass_tokens(start), rounds_from)

    def _pass_tokens(self, start: int) -> int:
        """Most prompt tokens of the pass that begins at `start`."""
        if self._widest is None:
            return self.chunks.width(start)
        beside_others, alone = self._widest
        if self.allocator.num_open == 1:
            return alone
        has_streams = any(r.is_read and a is not None for r, a in self._allocations.items())
        return self._pace.widest(start) if has_streams else beside_others

    def preempt(self, request: Request) -> None:
        """See Executor."""
        self._ahead.end()
        self.allocator.free(self.allocation_of(request))
        self._allocations[request], request.num_read = None, 0

    def free(self, request: Request) -> None:
        """See Executor."""
        self._ahead.end()
        if (allocation := self._allocations[request]) is not None:
            self.allocator.free(allocation)
        del self._allocations[request], self._rounds_from[request]
        if self._saved is not None and (trail := self._trails.pop(request, None)) is not None:
            self._saved.forget(trail)

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
        self._ahead.end()
        assert self.reserve([request]), "the caller did so before"
        if num_joined := self._join_chunks(allocation, start):
            request.num_read += num_joined
            return None
        self.tiers.join()
        is_resumed = bool(request.sampler.output_ids)
        if start >= len(ids):
            stop = min(start + _ROUNDS_TOKENS, request.num_to_read)
            self._decode_path.feed(request, allocation, start, stop)
            request.num_read = stop
            return None
        if request.prompt_scores is not None:
            return self._decode_path.score(request, allocation)
        if start >= (rounds_from := self._rounds_from[request]):
            stop = min(start + _ROUNDS_TOKENS, len(ids))
            return self._decode_path.read(request, allocation, stop)
        chunk = ids[start : min(start + self._pass_tokens(start), rounds_from)]
        # Wanted or not, logits come with the last chunk, which then has the same size as ever.
        is_last = start + len(chunk) == len(ids)
        if num_adopted := self.allocator.adopt(allocation, start, chunk[:-1] if is_last else chunk):
            request.num_read += num_adopted
            request.num_cached += 0 if is_resumed else num_adopted
            return None
        if num_loaded := self._load(request, start, chunk[:-1] if is_last else chunk):
            request.num_read += num_loaded
            request.num_cached += 0 if is_resumed else num_loaded
            return None
        prompt_ids = request.sampler.counts.prompt_ids[start : start + len(chunk)]
        width = next((w for w in self.prefill.widths if w >= len(chunk)), len(chunk))
        self._passes = [*self._passes[-1:], (width, start, time.perf_counter())]
        logits = self.prefill.run(prompt_ids, start, allocation.pages, want_logits=is_last)
        request.num_read += len(chunk)
        self.allocator.cache(allocation, start, chunk)
        self._save(request, start, chunk)
        if logits is None or is_resumed:
            return None
        # While the GPU reads: what takes the host long and does not wait for logits.
        request.sampler.prepare(len(ids), logits)
        if not _are_there(logits):
            self._prepare_launch(request)
        chosen = pick(request, logits)
        if not (request.is_cancelled or chosen.token_id in request.sampler.stop_test.ending_ids):
            self._ahead.begin(chosen.token_id)
        return chosen

    # --- saved prompts ----------------------------------------------------------------------------

    def save_in(self, folder: ChunkFolder, most_bytes: int, copies: PageCopies) -> None:
        """From now on save cached prompts to a folder, and find there what was saved before."""
        assert self.allocator.tree is not None, "it caches prompts"
        self._copies = copies
        self._saved = SavedChunks(folder, most_bytes, self.chunks, copies.bytes_of, copies.buffer)
        self.tiers.before_reuse = copies.settle

    @property
    def saved(self) -> SavedTokens | None:
        """See Executor."""
        return None if self._saved is None else self._saved.counts

    def forget(self) -> None:
        """See Executor."""
        self.tiers.forget()

    def offload(self) -> None:
        """See Executor."""
        self.tiers.offload()

    def flush(self, within_s: float) -> None:
        """See Executor."""
        if self._saved is not None:
            self._saved.flush(within_s)

    def _pages_at(self, request: Request, start: int) -> list[int]:
        """Of the whole chunk that begins at `start`."""
        stop = start + self.chunks.width(start)
        pages = self.allocation_of(request).pages
        return pages[start // PAGE_POSITIONS : stop // PAGE_POSITIONS]

    def _download(self, request: Request, start: int) -> Source | None:
        assert self._copies is not None, "it saves"
        return self._copies.download(self._pages_at(request, start))

    def _save(self, request: Request, start: int, ids: Sequence[int]) -> None:
        """Save the whole chunks of tokens that were read and cached."""
        trail = self._trails.get(request)
        if self._saved is None or trail is None:
            return
        for begin in trail.between(start, start + len(ids)):
            self._saved.save(trail, begin, partial(self._download, request, begin))

    def _load(self, request: Request, start: int, ids: Sequence[int]) -> int:
        """Take whole chunks of tokens from the folder; how many tokens need not be read."""
        trail, num_loaded = self._trails.get(request), 0
        if self._saved is None or self._copies is None or trail is None:
            return 0
        for begin in trail.between(start, start + len(ids)):
            if (data := self._saved.load(trail, begin)) is None:
                break
            self._copies.upload(data, self._pages_at(request, begin))
            num_loaded += self.chunks.width(begin)
        self.allocator.cache(self.allocation_of(request), start, ids[:num_loaded])
        return num_loaded

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

    def _prepare_launch(self, request: Request) -> None:
        """Make the launch behind a prompt ready, which the GPU still reads, as if it were read.

        Only of a request alone, and where the first token changes nothing else that is written for
        a launch: no mask, and no counts. If another request comes at that very moment, or a stop
        string ends the answer, there is a round too many.
        """
        sampler, drafter = request.sampler, request.drafter
        is_alone = len(self._allocations) == 1
        is_plain = not (sampler.is_constrained or sampler.params.has_penalties)
        host_drafts = drafter is not None and drafter.has_prediction and not self.drafts_in_kernel
        if host_drafts or not (is_alone and is_plain and request.top_logprobs is None):
            return
        guess = None if drafter is None else drafter.first_guess
        # A predicted text may have tokens that the model has not.
        sampler.observe(guess if guess is not None and guess < self._vocab_size else 0)
        try:
            if request.has_all_tokens or not self.reserve([request]):
                return
            rounds = min(self.decoder.max_rounds, request.num_wanted)
            rounds = self.take_pages([request], rounds)
            row = self._row_of(self.allocation_of(request))
            drafting = None
            if drafter is not None and self.drafts_in_kernel and not drafter.is_resting:
                drafting = self._kernel_drafts.launch([request], [drafter.anew()], [rounds], rounds)
            self._ahead.prepare(_query(request, row), rounds, drafting)
        finally:
            sampler.rollback(1)

    def rounds(
        self, requests: Sequence[Request], most: int
    ) -> Generator[list[Outcome], None, None]:
        """See Executor."""
        passes, told_at, is_first = self._passes, 0.0, True
        self._passes = []
        with closing(self._rounds(requests, most)) as rounds:
            for outcomes in rounds:
                now = time.perf_counter()
                if self._widest is not None and is_first and len(passes) == 1:
                    width, start, began = passes[0]
                    if width >= LEAST_CHUNK_TOKENS:  # others take hardly less time
                        self._pace.add_pass(width, start, now - began)
                elif self._widest is not None and not is_first:
                    self._pace.add_round(now - told_at)
                is_first = False
                yield outcomes
                told_at = time.perf_counter()

    def _rounds(
        self, requests: Sequence[Request], most: int
    ) -> Generator[list[Outcome], None, None]:
        """`rounds`, without a look at the clock."""
        in_kernel = self._may_draft_in_kernel(requests)
        drafters = [r.drafter if in_kernel else None for r in requests]
        if len(requests) == 1 and (drafter := requests[0].drafter) and drafter.has_prediction:
            # A launch for each draft costs more than what is looked up brings.
            drafters = [drafter]
        drafting = [d for d in drafters if d is not None and not d.is_resting]
        if in_kernel and len(requests) > 1:
            has_room = self._kernel_drafts.can_draft
            if not has_room(requests, len(drafting)):
                drafting = []
            if not has_room(requests, sum(d is not None for d in drafters)):
                # Not even watched: guesses that are right would end launches in vain.
                drafters = [None] * len(requests)
        if drafting:
            drafted = (
                self._kernel_drafts.rounds(requests, drafters, most)
                if in_kernel
                else self._host_drafts.rounds(requests[0], most, MOST_DRAFTS)
            )
            if (yield from drafted):
                return
            for drafter in drafting:
                drafter.rest()
        resting = [d if d is not None and d.is_resting else None for d in drafters]
        yield from self._plain_rounds(requests, resting, most)

    def _may_draft_in_kernel(self, requests: Sequence[Request]) -> bool:
        """Whether the kernel has all that columns of these requests need."""
        has_forms = any(r.sampler.is_constrained for r in requests)
        fit = len(requests) <= MOST_DRAFTING_SEQUENCES
        return self.drafts_in_kernel and fit and not has_forms

    def _plain_rounds(
        self, requests: Sequence[Request], drafters: Sequence[Drafter | None], most: int
    ) -> Generator[list[Outcome], None, None]:
        """A launch in which each request has a query; drafters watch it.

        Where log probabilities are wanted it has no more rounds than there is room for logits, and
        one beside a form: a round is told once the next one has come, while masks follow what was
        told.
        """
        shows_logits = any(r.top_logprobs is not None for r in requests)
        count = min(most, self.decoder.max_rounds, *(r.num_wanted for r in requests))
        if shows_logits:
            has_forms = any(r.sampler.is_constrained for r in requests)
            count = min(count, 1 if has_forms else KEPT_ROUNDS)
        count = self.take_pages(requests, count)
        queries = yield from self.queries(requests)
        if queries is None:
            return
        settled: dict[int, Outcome] = {}
        self._ahead.start(queries, count, keeps_logits=shows_logits)
        tokens = self.decoder.tokens()
        try:
            for number, chosen in told(tokens, is_late=shows_logits):
                yield [
                    settled[query]
                    if query in settled
                    else self._outcome(number, query, r, chosen[query], settled)
                    for query, r in enumerate(requests)
                ]
                if watch(requests, drafters):
                    self.decoder.stop()
        finally:
            self.decoder.abandon()
            for _ in tokens:
                pass
            for one in requests:
                self.allocator.came_to(self.allocation_of(one), one.position)

    def queries(
        self, requests: Sequence[Request]
    ) -> Generator[list[Outcome], None, list[Query] | None]:
        """Of a launch's requests, once keys and values of all tokens before them are there.

        None where a request has no query, after an outcome that says why.
        """
        queries = []
        for number, one in enumerate(requests):
            allocation = self.allocation_of(one)
            self._decode_path.feed(one, allocation, one.position - one.num_behind, one.position)
            one.num_behind = 0
            row = self._row_of(allocation)
            try:
                queries.append(_query(one, row))
            except Exception as error:  # noqa: BLE001 - the others go on
                failure = own_failure(CHOOSING, error)
                yield [failure if n == number else None for n in range(len(requests))]
                return None
        return queries

    def _row_of(self, allocation: SequenceAllocation) -> int:
        """The row of the page tables that has a sequence's pages now; no launch is running then.

        One that has begun goes on if nothing is to be written.
        """
        if not self._decode_path.has_row_of(allocation):
            self._ahead.end()
        return self._decode_path.row_of(allocation)

    def take_pages(self, requests: Sequence[Request], count: int) -> int:
        """As many tokens of each request, at most `count`, as there are pages for."""
        assert self.reserve(requests), "the caller did so before"
        allocations = [self.allocation_of(r) for r in requests]
        while count > _ASSURED_ROUNDS:
            positions = [r.position + min(count, r.num_wanted) for r in requests]
            if self.allocator.look_ahead(allocations, positions):
                return count
            count = max(_ASSURED_ROUNDS, count // 2)
        return count

    def _outcome(
        self,
        number: int,
        query: int,
        request: Request,
        token_id: int,
        settled: dict[int, Outcome],
    ) -> Outcome:
        """What a query's token of a round means.

        `settled` has what the launch's further rounds bring for queries whose tokens mean nothing
        any more; this one may join them.
        """
        try:
            outcome = self.pick(request, token_id, number, query)
            if request.sampler.is_constrained and request.top_logprobs is None:
                # As soon as it is known: the kernel may be waiting for it.
                ends = bool(request.num_behind) or request.has_all_tokens
                self.decoder.allow(query, None if ends else request.sampler.allowed())
                if ends:
                    settled[query] = None
        except Exception as error:  # noqa: BLE001 - the other queries go on
            failure = own_failure(CHOOSING, error)
            self.decoder.allow(query, None)
            settled[query] = failure
            return failure
        return outcome

    def pick(self, request: Request, token_id: int, number: int, query: int) -> Picked:
        """A token that the kernel chose for a query of a round, observed.

        Raises:
            BadLogits: it is none.
            GrammarFailed: it is not allowed.
        """
        if token_id >= self._vocab_size:
            raise BadLogits(request.position + 1, bad_score(token_id))
        request.sampler.observe(token_id)
        if request.top_logprobs is not None:
            logits = self.decoder.logits_of(number, query)
            return picked(request, token_id, logits[: self._vocab_size])
        return Picked(token_id, forced=take_forced(request, SPAN_TOKENS))

    def stop(self) -> None:
        """See Executor."""
        self._host_drafts.stop()
        self.decoder.stop()


def _are_there(logits: Tensor) -> bool:
    """Whether a GPU has computed logits, so that what the host does now delays their token."""
    return logits.is_cuda and torch.cuda.current_stream(logits.device).query()


def _query(request: Request, row: int) -> Query:
    # Of more stop tokens the host sees the others.
    stops = sorted(request.sampler.stop_test.ending_ids)[:MAX_STOPS]
    choice = choice_of(request.sampler)
    return Query(row, request.position, [request.last], stops, choice=choice)
