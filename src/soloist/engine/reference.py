"""Requests on the reference: prompts in passes, then one token of each in turn.

Passes are left after a bounded time and gone on with later, so that no request waits for another's
prompt. Where a pass begins follows from the position alone: time changes no bit.
"""

import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from soloist.engine.executor import (
    SCORED_TOKENS,
    Executor,
    Outcome,
    Picked,
    Verified,
    own_failure,
    pick,
    verify,
)
from soloist.engine.identity import identity_of
from soloist.engine.request import Request
from soloist.engine.turns import Turns
from soloist.kv.chunks import PrefixChunks
from soloist.kv.folder import ChunkFolder
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.prefix import Match, Node, PrefixTree
from soloist.kv.saving import SavedChunks, SavedTokens, Source, Trail
from soloist.kv.tiers import CachedTokens
from soloist.model.config import ModelConfig
from soloist.model.kv_format import KvFormat
from soloist.model.torch_types import Weights
from soloist.reference.build import build_reference
from soloist.reference.cache import KVCache
from soloist.reference.columns import columns_pay
from soloist.reference.memory import REFERENCE_PASS_TOKENS
from soloist.reference.passes import Pass
from soloist.reference.reading import Readers, Reading
from soloist.reference.threads import Threads
from soloist.speculation import Costs, Draft, Drafting
from soloist.speculation.depth import PLAIN_COST

# Seconds of a prompt, or of forced tokens, between two rounds of other requests; and without any,
# between two looks whether the request was cancelled.
_BESIDE_S, _ALONE_S = 0.02, 0.25
# A part of a prompt and a round of the other requests together, as long as rounds let it be: where
# their cores are busy, parts become shorter, down to the least.
_WAIT_S, _LEAST_S = 0.06, 0.005

# A step with one draft, two, …, seven, in thousandths of a step with none: étude, two cores
# (docs/speculation.md).
COLUMN_COSTS = Costs((1600, 1900, 2200, 2550, 2900, 3200, 3500))

# Of every attention block what a cache stores of a chunk: [K, chunk, …], keys before values.
_Cached = list[tuple[Tensor, ...]]


class _Sequence:
    """What a request has: a KV cache of its own, and the last cached chunk of its prompt."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.reading: Reading | None = None
        self.node: Node[_Cached] | None = None
        self.trail: Trail | None = None


class ReferenceModel(Executor):
    """A model on any torch device.

    Args:
        config: what it computes.
        weights: on the device; taken over.
        kv_tokens: positions that all open requests together may take; at least one context.
        max_running: requests that may be open at once.
        chunk_tokens: prompt tokens a pass, and of what is cached of prompts at least.
        keeps_prefixes: cache keys and values of prompts, as far as the memory goes, for later
            ones that begin alike.
        drafts: check what requests draft, where that pays and changes no bit.
        kv: what keys and values are stored as; None stores them as they are.
    """

    shares_steps = False

    def __init__(  # noqa: PLR0913 - what executors may differ in
        self,
        config: ModelConfig,
        weights: Weights,
        kv_tokens: int,
        max_running: int = 1,
        chunk_tokens: int = REFERENCE_PASS_TOKENS,
        *,
        keeps_prefixes: bool = False,
        drafts: bool = False,
        kv: KvFormat | None = None,
    ) -> None:
        self.reference = build_reference(config, weights, kv)
        # Each column would turn the codes of the whole context into numbers again.
        drafts = drafts and (kv is None or kv.is_plain)
        if drafts and columns_pay(config, self.reference.dtype, self.reference.device):
            self.drafting = Drafting(COLUMN_COSTS, looks_up=True)
        if max_running > 1:  # now, and not when a long sequence is opened beside others
            self.reference.reach(min(kv_tokens, config.context_tokens))
        self.max_running = max_running
        self._num_free, self._chunk_tokens = kv_tokens, chunk_tokens
        self._kv_tokens = kv_tokens
        self._open: dict[Request, _Sequence] = {}
        is_on_cpu = self.reference.device.type == "cpu"
        self._threads = Threads(torch.get_num_threads() if is_on_cpu else 1)
        self._readers = Readers(self.reference, self._threads)
        chunks = PrefixChunks(chunk_tokens, chunk_tokens)
        self._chunks = chunks
        self._tree: PrefixTree[_Cached] | None = PrefixTree(chunks) if keeps_prefixes else None
        self._saved: SavedChunks | None = None
        self._num_evicted = 0
        self._is_asked_to_stop = False
        self._round_s = 0.0  # of the latest one
        self._turns = Turns()
        self._token = torch.empty(1, dtype=torch.int64, device=self.reference.device)

    def bind(self) -> None:
        """See Executor; the number of threads is partly a thread's own."""
        torch.set_num_threads(torch.get_num_threads())

    def open(self, request: Request) -> bool:
        """See Executor."""
        asked = len(request.prompt_ids) + request.sampler.stop_test.max_tokens
        # Of a prompt that is cached whole the last chunk is read again: it gives the logits.
        tree = None if request.prompt_scores is not None else self._tree
        match = None if tree is None else tree.match(request.prompt_ids[:-1])
        if not self._reserve(asked):
            return False
        sequence = _Sequence(self.reference.new_cache(asked))
        if match is not None:
            self._take_cached(request, sequence, match)
        self._num_free -= asked
        self._open[request] = sequence
        return True

    def _reserve(self, asked: int) -> bool:
        """Whether so many positions are free, if need be by evicting cached prefixes."""
        if self._tree is not None and asked > self._num_free:
            while asked > self._num_free and self._evict():
                pass
        return asked <= self._num_free

    def _evict(self) -> bool:
        """Drop the least recently used chunk that nobody uses; False where there is none."""
        if self._tree is None or (node := self._tree.oldest(is_offloaded=False)) is None:
            return False
        self._tree.remove(node)
        self._num_free += self._chunk_tokens
        self._num_evicted += self._chunk_tokens
        return True

    def forget(self) -> None:
        """See Executor."""
        while self._evict():
            pass

    def _take_cached(self, request: Request, sequence: _Sequence, match: Match[_Cached]) -> None:
        """Copy what is cached of the prompt; the match holds it, even if it was just evicted."""
        for number, node in enumerate(match.nodes):
            position = number * self._chunk_tokens
            for block, stored in enumerate(node.held):
                sequence.cache.restore(block, position, stored)
        request.num_cached = request.num_read = match.num_tokens
        request.divergence = match.divergence
        assert self._tree is not None, "there is a match"
        if self._tree.is_cached(match.node):
            sequence.node = match.node
            self._tree.use(match.node)
        if self._saved is not None:
            sequence.trail = self._saved.trail(request.prompt_ids, match.num_tokens)

            def source_at(start: int) -> Source:
                return partial(_bytes_of, match.nodes[start // self._chunk_tokens].held)

            self._saved.catch_up(sequence.trail, match.num_tokens, source_at)

    def _cache(self, sequence: _Sequence, start: int, chunk: Sequence[int]) -> None:
        """Cache a chunk that was just read, if it is whole and there is memory for it."""
        tree, size = self._tree, self._chunk_tokens
        if tree is None or sequence.node is None or len(chunk) < size:
            return
        if not self._reserve(size):
            # Without this chunk none behind it may be cached: it would stand in this one's place.
            tree.release(sequence.node)
            sequence.node = None
            return
        cache = sequence.cache
        views = [cache.stored(block, start, start + size) for block in range(cache.num_blocks)]
        cached = [tuple(part.clone() for part in stored) for stored in views]
        node, is_new = tree.insert(sequence.node, chunk, cached)
        self._num_free -= size if is_new else 0
        tree.advance(node)
        sequence.node = node
        if self._saved is not None and sequence.trail is not None:
            self._saved.save(sequence.trail, start, lambda: partial(_bytes_of, node.held))

    # --- saved prompts ----------------------------------------------------------------------------

    def save_to(self, root: Path, most_bytes: int, facts: tuple[object, ...]) -> None:
        """See Executor."""
        assert self._tree is not None, "it caches prompts"
        identity = identity_of([*facts, "reference", self._chunk_tokens])
        folder = ChunkFolder(root, identity)
        chunk_bytes = self.reference.new_cache(self._chunk_tokens).num_bytes
        self._saved = SavedChunks(folder, most_bytes, self._chunks, lambda _: chunk_bytes)

    @property
    def saved(self) -> SavedTokens | None:
        """See Executor."""
        return None if self._saved is None else self._saved.counts

    def flush(self, within_s: float) -> None:
        """See Executor."""
        if self._saved is not None:
            self._saved.flush(within_s)

    def _load(self, request: Request, until: float) -> bool:
        """Take what comes next of the prompt from the folder; False where it has nothing more."""
        sequence, size = self._open[request], self._chunk_tokens
        if self._saved is None or sequence.trail is None or request.is_read:
            return False
        while (data := self._saved.load(sequence.trail, request.num_read)) is not None:
            start, cache, place = request.num_read, sequence.cache, 0
            for block in range(cache.num_blocks):
                parts = []
                for like in cache.stored(block, start, start + size):
                    stop = place + like.numel() * like.element_size()
                    part = torch.frombuffer(data[place:stop], dtype=like.dtype)
                    parts.append(part.view(like.shape))
                    place = stop
                cache.restore(block, start, parts)
            request.num_read += size
            request.num_cached += size
            self._cache(sequence, start, request.prompt_ids[start : start + size])
            if time.perf_counter() >= until:
                return True
        return False

    @property
    def cached(self) -> CachedTokens:
        """See Executor."""
        on_device = 0 if self._tree is None else self._tree.num_tokens
        return CachedTokens(on_device=on_device, evicted=self._num_evicted)

    @property
    def num_pages(self) -> int:
        """See Executor."""
        return self._kv_tokens // PAGE_POSITIONS

    @property
    def num_pages_free(self) -> int:
        """See Executor."""
        idle = 0 if self._tree is None else self._tree.idle_tokens
        return min(self._kv_tokens, self._num_free + idle) // PAGE_POSITIONS

    def check(self) -> None:
        """See Executor."""
        num_cached = 0
        if self._tree is not None:
            self._tree.check([s.node for s in self._open.values() if s.node is not None])
            num_cached = self._tree.num_tokens
        taken = sum(s.cache.capacity for s in self._open.values())
        assert self._num_free + taken + num_cached == self._kv_tokens, (
            "all positions are accounted for"
        )

    def read(self, request: Request) -> Picked | None:
        """See Executor."""
        sequence, is_scored = self._open[request], request.prompt_scores is not None
        until = time.perf_counter() + self._part_s
        if sequence.reading is None and self._load(request, until):
            return None
        if sequence.reading is None:
            start = request.num_read
            sequence.reading = Reading(
                self.reference,
                sequence.cache,
                request.prompt_ids[start:],
                start,
                SCORED_TOKENS if is_scored else self._chunk_tokens,
                "all" if is_scored else "last",
            )
        logits = self._advance(request, sequence.reading, until)
        if logits is None:
            return None
        return None if is_scored and request.has_all_tokens else pick(request, logits)

    @property
    def _part_s(self) -> float:
        """For a part of a prompt."""
        if len(self._open) == 1:
            return _ALONE_S
        return max(_LEAST_S, min(_BESIDE_S, _WAIT_S - self._round_s))

    def _advance(self, request: Request, reading: Reading, until: float) -> Tensor | None:
        """Read until it is time; the logits [V] behind the last token, once it is read."""
        logits = None
        while True:
            for work in self._readers.advance(reading, until):
                logits = work.logits
                if not request.is_read:
                    self._was_read(request, work)
            if reading.is_over:
                self._open[request].reading = None
                assert logits is not None, "the last row was asked for"
                return logits[-1]
            if time.perf_counter() >= until:
                return None

    def _was_read(self, request: Request, work: Pass) -> None:
        """Take what a pass over a part of the prompt brought."""
        if request.prompt_scores is not None:
            assert work.logits is not None, "all rows were asked for"
            request.score(work.position, work.logits)
        request.num_read += work.num_tokens
        start, stop = work.position, request.num_read
        self._cache(self._open[request], start, request.prompt_ids[start:stop])

    def rounds(
        self, requests: Sequence[Request], most: int
    ) -> Generator[list[Outcome], None, None]:
        """See Executor."""
        self._is_asked_to_stop = False
        self._turns.begin(requests)
        for _ in range(min(most, *(r.num_wanted for r in requests))):
            num_fed = sum(r.num_behind > 0 for r in requests)
            begun, bound_s = time.perf_counter(), self._part_s / max(1, num_fed)
            due = self._turns.due()
            outcomes = [self._outcome(r, bound_s) if r in due else None for r in requests]
            self._round_s = time.perf_counter() - begun
            yield outcomes
            if self._is_asked_to_stop or any(r.has_all_tokens for r in requests):
                return

    def _outcome(self, request: Request, bound_s: float) -> Outcome:
        outcome: Outcome
        try:
            outcome = self._step(request, time.perf_counter() + bound_s)
        except Exception as error:  # noqa: BLE001 - every sequence has a pass of its own
            outcome = own_failure("decoding", error)
        drafted = len(outcome.draft.ids) if isinstance(outcome, Verified) else 0
        self._turns.spend(request, COLUMN_COSTS.of_drafts[drafted - 1] if drafted else PLAIN_COST)
        return outcome

    def _step(self, request: Request, until: float) -> Picked | Verified | None:
        sequence = self._open[request]
        if request.num_behind:
            if sequence.reading is None:
                start = request.position - request.num_behind
                ids = [*request.ids_behind, request.last]
                sequence.reading = Reading(
                    self.reference, sequence.cache, ids, start, self._chunk_tokens
                )
            last = self._advance(request, sequence.reading, until)
            if last is None:
                return None
            request.num_behind = 0
            return pick(request, last)
        self._threads.use(1, self._threads.num_free)
        if self.drafting is not None:
            draft = request.draft(self.drafting.costs.most)
            if draft is not None:
                return self._verify(request, sequence.cache, draft)
        self._token.fill_(request.last)
        logits = self.reference.forward(self._token, request.position, sequence.cache, "last")
        assert logits is not None, "the last row was asked for"
        return pick(request, logits[0])

    def _verify(self, request: Request, cache: KVCache, draft: Draft) -> Verified:
        """A step with the draft behind the latest token.

        Keys and values of drafts that are wrong stay in the cache, behind all that anyone sees,
        until the answer comes there and writes its own.
        """
        ids = torch.tensor([request.last, *draft.ids], dtype=torch.int64)
        logits = self.reference.forward(ids, request.position, cache, "all", by_rows=True)
        assert logits is not None, "all rows were asked for"
        return verify(request, draft, lambda column: pick(request, logits[column]))

    def stop(self) -> None:
        """See Executor."""
        self._is_asked_to_stop = True

    def free(self, request: Request) -> None:
        """See Executor."""
        sequence = self._open.pop(request)
        self._turns.leave(request)
        self._num_free += sequence.cache.capacity
        if self._saved is not None and sequence.trail is not None:
            self._saved.forget(sequence.trail)
        if self._tree is not None and sequence.node is not None:
            self._tree.release(sequence.node)
            sequence.node = None


def _bytes_of(cached: _Cached) -> list[memoryview]:
    """Of a chunk, block by block, keys before values."""
    return [
        part.cpu().contiguous().view(torch.uint8).numpy().data
        for stored in cached
        for part in stored
    ]
