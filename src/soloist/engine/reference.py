"""Tokens of one request from the reference: the same door as `KernelModel`'s."""

from collections.abc import Callable, Generator, Sequence

from soloist.model.config import ModelConfig
from soloist.model.memory import CHUNK_TOKENS
from soloist.model.weights import Weights
from soloist.reference import build_reference
from soloist.reference.generate import generate
from soloist.sampling import Sampler


class ReferenceModel:
    """A model on any torch device.

    Args:
        config: what it computes.
        weights: on the device; taken over.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.reference = build_reference(config, weights)

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        cancelled: Callable[[], bool],
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Generator[int, None, None]:
        """Yield tokens until the caller stops asking or cancels."""
        cache = self.reference.new_cache(len(prompt_ids) + sampler.stop_test.max_tokens)
        yield from generate(self.reference, cache, prompt_ids, sampler, cancelled, chunk_tokens)
