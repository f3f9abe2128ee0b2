"""Sequences on the reference: prompts in chunks, then one token of each in turn."""

from collections.abc import Generator, Sequence

import torch

from soloist.engine.executor import Executor, Outcome, Picked, Running, pick
from soloist.errors import BadLogits
from soloist.model.config import ModelConfig
from soloist.model.memory import CHUNK_TOKENS
from soloist.model.weights import Weights
from soloist.reference import KVCache, build_reference
from soloist.sampling import Sampler


class _Running(Running):
    """A sequence with a KV cache of its own."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        top_logprobs: int | None,
        cache: KVCache,
    ) -> None:
        super().__init__(prompt_ids, sampler, top_logprobs)
        self.cache = cache


class ReferenceModel(Executor):
    """A model on any torch device.

    Args:
        config: what it computes.
        weights: on the device; taken over.
        kv_tokens: positions that all open sequences together may take; at least one context.
        num_columns: sequences that may be open at once.
        chunk_tokens: prompt tokens a pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv_tokens: int,
        num_columns: int = 1,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.reference = build_reference(config, weights)
        self.num_columns = num_columns
        self._room, self._chunk_tokens = kv_tokens, chunk_tokens
        self._is_asked_to_stop = False
        self._token = torch.empty(1, dtype=torch.int64, device=self.reference.device)

    def bind(self) -> None:
        """See Executor; the number of threads is partly a thread's own."""
        torch.set_num_threads(torch.get_num_threads())

    def open(
        self, prompt_ids: Sequence[int], sampler: Sampler, top_logprobs: int | None = None
    ) -> Running | None:
        """See Executor."""
        asked = len(prompt_ids) + sampler.stop_test.max_tokens
        if asked > self._room:
            return None
        self._room -= asked
        cache = self.reference.new_cache(asked)
        return _Running(prompt_ids, sampler, top_logprobs, cache)

    def read(self, running: Running) -> Picked | None:
        """See Executor."""
        assert isinstance(running, _Running), "opened here"
        start = running.num_read
        chunk = running.prompt_ids[start : start + self._chunk_tokens]
        ids = torch.tensor(chunk, dtype=torch.int64, device=self.reference.device)
        is_last = start + len(chunk) == len(running.prompt_ids)
        logits = self.reference.forward(ids, start, running.cache, "last" if is_last else "none")
        running.num_read += len(chunk)
        return None if logits is None else pick(running, logits[0])

    def rounds(self, running: Sequence[Running], most: int) -> Generator[list[Outcome], None, None]:
        """See Executor."""
        self._is_asked_to_stop = False
        for _ in range(min(most, *(r.num_wanted for r in running))):
            yield [self._outcome(r) for r in running]
            if self._is_asked_to_stop:
                return

    def _outcome(self, running: Running) -> Outcome:
        assert isinstance(running, _Running), "opened here"
        self._token.fill_(running.last)
        logits = self.reference.forward(self._token, running.position, running.cache)
        assert logits is not None, "the last row was asked for"
        try:
            return pick(running, logits[0])
        except BadLogits as error:
            return error

    def stop(self) -> None:
        """See Executor."""
        self._is_asked_to_stop = True

    def close(self, running: Running) -> None:
        """See Executor."""
        assert isinstance(running, _Running), "opened here"
        self._room += running.cache.capacity
