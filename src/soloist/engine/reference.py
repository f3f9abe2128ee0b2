"""Requests on the reference: prompts in passes, then one token of each in turn.

Passes are left after a bounded time and gone on with later, so that no request waits for another's
prompt. Where a pass begins follows from the position alone: time changes no bit.
"""

import time
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from soloist.engine.executor import SCORED_TOKENS, Executor, Outcome, Picked, own_failure, pick
from soloist.engine.request import Request
from soloist.kv.chunks import PrefixChunks
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.prefix import Match, Node, PrefixTree
from soloist.kv.tiers import CachedTokens
from soloist.model.config import ModelConfig
from soloist.model.torch_types import Weights
from soloist.reference.build import build_reference
from soloist.reference.cache import KVCache
from soloist.reference.memory import REFERENCE_PASS_TOKENS
from soloist.reference.passes import Pass
from soloist.reference.reading import Readers, Reading
from soloist.reference.threads import Threads

# Seconds of a prompt, or of forced tokens, between two rounds of other requests; and without any,
# between two looks whether the request was cancelled.
_BESIDE_S, _ALONE_S = 0.02, 0.25
# A part of a prompt and a round of the other requests together, as long as rounds let it be: where
# their cores are busy, parts become shorter, down to the least.
_WAIT_S, _LEAST_S = 0.06, 0.005

# Keys and values [K, chunk, D] of every attention block.
_Cached = list[tuple[Tensor, Tensor]]


class _Sequence:
    """What a request has: a KV cache of its own, and the last cached chunk of its prompt."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.reading: Reading | None = None
        self.node: Node[_Cached] | None = None


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
    """

    shares_steps = False

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv_tokens: int,
        max_running: int = 1,
        chunk_tokens: int = REFERENCE_PASS_TOKENS,
        *,
        keeps_prefixes: bool = False,
    ) -> None:
        self.reference = build_reference(config, weights)
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
        self._tree: PrefixTree[_Cached] | None = PrefixTree(chunks) if keeps_prefixes else None
        self._num_evicted = 0
        self._is_asked_to_stop = False
        self._round_s = 0.0  # of the latest one
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
            while (
                asked > self._num_free
                and (node := self._tree.oldest(is_offloaded=False)) is not None
            ):
                self._tree.remove(node)
                self._num_free += self._chunk_tokens
                self._num_evicted += self._chunk_tokens
        return asked <= self._num_free

    def _take_cached(self, request: Request, sequence: _Sequence, match: Match[_Cached]) -> None:
        """Copy what is cached of the prompt; the match holds it, even if it was just evicted."""
        for number, node in enumerate(match.nodes):
            position = number * self._chunk_tokens
            for block, (keys, values) in enumerate(node.held):
                sequence.cache.append(block, position, keys, values)
        request.num_cached = request.num_read = match.num_tokens
        request.divergence = match.divergence
        assert self._tree is not None, "there is a match"
        if self._tree.is_cached(match.node):
            sequence.node = match.node
            self._tree.use(match.node)

    def _cache(self, sequence: _Sequence, start: int, chunk: Sequence[int]) -> None:
        """Cache a chunk that was just read, if it is whole and there is memory for it."""
        tree, size = self._tree, self._chunk_tokens
        if tree is None or sequence.node is None or len(chunk) < size or not self._reserve(size):
            return
        cache = sequence.cache
        views = [cache.view(block, start, start + size) for block in range(cache.num_blocks)]
        cached = [(keys.clone(), values.clone()) for keys, values in views]
        node, is_new = tree.insert(sequence.node, chunk, cached)
        self._num_free -= size if is_new else 0
        tree.advance(node)
        sequence.node = node

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
        until = time.perf_counter() + self._part_s
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
        for _ in range(min(most, *(r.num_wanted for r in requests))):
            num_fed = sum(r.num_behind > 0 for r in requests)
            begun, bound_s = time.perf_counter(), self._part_s / max(1, num_fed)
            outcomes = [self._outcome(r, bound_s) for r in requests]
            self._round_s = time.perf_counter() - begun
            yield outcomes
            if self._is_asked_to_stop or any(r.has_all_tokens for r in requests):
                return

    def _outcome(self, request: Request, bound_s: float) -> Outcome:
        try:
            return self._step(request, time.perf_counter() + bound_s)
        except Exception as error:  # noqa: BLE001 - every sequence has a pass of its own
            return own_failure("decoding", error)

    def _step(self, request: Request, until: float) -> Picked | None:
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
        self._token.fill_(request.last)
        self._threads.use(1, self._threads.num_free)
        logits = self.reference.forward(self._token, request.position, sequence.cache, "last")
        assert logits is not None, "the last row was asked for"
        return pick(request, logits[0])

    def stop(self) -> None:
        """See Executor."""
        self._is_asked_to_stop = True

    def free(self, request: Request) -> None:
        """See Executor."""
        sequence = self._open.pop(request)
        self._num_free += sequence.cache.capacity
        if self._tree is not None and sequence.node is not None:
            self._tree.release(sequence.node)
            sequence.node = None
