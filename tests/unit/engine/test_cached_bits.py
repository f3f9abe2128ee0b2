"""Real prefill over cached pages: a hit has the bits of a miss, however long what is shared.

On CPUs, too, a pass of another width may have other bits: those of `windows` were seen to differ.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from soloist.engine.kernel_executor import KernelExecutor
from soloist.kv.offload import HostPages
from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.parallel.share import Share
from soloist.prefill.part import Part
from soloist.prefill.runner import Prefill
from soloist.sampling import Sampler, SamplingParams
from unit.engine.fakes import Cache, IdleDecoder, opened
from unit.prefill.models import MODELS, matrices, random_weights, vectors

# Prompts cross the position, 2,048, from which chunks are twice as wide.
CONTEXT = 3072
PAGES = CONTEXT // 64


class Told:
    """A prefill, and the logits it last told."""

    def __init__(self, prefill: Prefill) -> None:
        self.prefill, self.most_tokens = prefill, prefill.most_tokens
        self.widths = prefill.widths
        self.logits = torch.empty(0)

    def run(self, token_ids, position, page_table, *, want_logits=True) -> Tensor | None:
        logits = self.prefill.run(token_ids, position, page_table, want_logits=want_logits)
        if logits is not None:
            self.logits = logits.clone()
        return logits


class Parts:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, has_host: bool = False) -> None:
        weights = random_weights(config)
        a = config.layers[0].attention
        self.pool = PagePool(
            config.num_layers, a.num_kv_heads, a.head_dim, PAGES, dtype, torch.device("cpu")
        )
        held = matrices(weights, dtype)
        part = Part(Share(config, 1, 0), held.__getitem__, vectors(weights), self.pool)
        self.told = Told(Prefill([part]))
        decoder = IdleDecoder(Cache())
        decoder.page_tables = torch.zeros(2, PAGES, dtype=torch.int32)
        self.host = HostPages(self.pool.tensor, 2**26 if has_host else 0)
        self.executor = KernelExecutor(
            decoder, self.told, PAGES, config.vocab_size, 512, keeps_prefixes=True, host=self.host
        )

    def read(self, prompt: list[int]) -> tuple[Tensor, Tensor, int]:
        """Logits, the prompt's pages, and how many tokens were cached."""
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=0)
        running = opened(self.executor, prompt, Sampler(params, 61, prompt, ()))
        assert running is not None
        while self.executor.read(running) is None:
            pass
        pages = self.pool.tensor[
            self.executor.allocation_of(running).pages[: len(prompt) // 64]
        ].clone()
        self.executor.free(running)
        return self.told.logits, pages, running.num_cached


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gqa-tied", "windows"])
def test_hits_have_the_bits_of_misses(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    config = replace(MODELS[name], context_tokens=CONTEXT)
    parts = Parts(config, dtype, has_host=True)
    stem = [rng.randrange(61) for _ in range(2900)]
    parts.read(stem)
    cached = []
    for shared, more in [(1900, 40), (300, 700), (2100, 500), (2400, 200), (255, 1800), (2870, 1)]:
        prompt = stem[:shared] + [rng.randrange(61) for _ in range(more)]
        logits, pages, num_cached = parts.read(prompt)
        fresh_logits, fresh_pages, nothing = Parts(config, dtype).read(prompt)
        assert nothing == 0
        assert torch.equal(logits, fresh_logits)
        assert torch.equal(pages, fresh_pages)
        cached.append(num_cached)
    assert cached == [1792, 256, 2048, 2048, 0, 2560]
    cached = parts.executor.cached
    assert cached.fetched > 0, "a pool of one context is too small for all of this"
    assert cached.offloaded > 0
