"""Tokens of one request on the reference device: prefill in chunks, then one token a step."""

from collections.abc import Callable, Iterator, Sequence

import torch

from soloist.reference.cache import KVCache
from soloist.reference.device import Reference
from soloist.sampling import Sampler


def generate(
    model: Reference,
    cache: KVCache,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    cancelled: Callable[[], bool],
    chunk_tokens: int,
) -> Iterator[int]:
    """Yield sampled tokens until the caller stops asking or cancels.

    Args:
        model: the weights.
        cache: an empty cache with room for the prompt and every token that will be asked for.
        prompt_ids: at least one token.
        sampler: picks a token from the logits of the position before it.
        cancelled: asked before every pass over the model.
        chunk_tokens: prompt tokens a pass.
    """
    prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=model.device)
    logits = None
    for start in range(0, len(prompt_ids), chunk_tokens):
        if cancelled():
            return
        chunk = prompt[start : start + chunk_tokens]
        last = start + len(chunk) == len(prompt_ids)
        logits = model.forward(chunk, start, cache, "last" if last else "none")
    token = torch.empty(1, dtype=torch.int64, device=model.device)
    position = len(prompt_ids)
    while logits is not None:
        token_id = sampler.pick(logits[0], position)
        yield token_id
        if cancelled():
            return
        sampler.observe(token_id)
        token.fill_(token_id)
        logits = model.forward(token, position, cache)
        position += 1
