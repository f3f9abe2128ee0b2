"""Decoding behind a million positions, against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from end_to_end.test_gpu_kinds_and_formats import here
from interpreter.models import prompt
from soloist.bench.agreement import forced_logits
from soloist.engine.kernel import Capacity, load_kernel
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import make_plan
from soloist.model.config import Attention, Layer, Mlp, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from soloist.model.rope import Rope
from soloist.model.torch_types import Weights
from soloist.reference.build import build_reference
from soloist.reference.cache import KVCache
from soloist.weights.sharding import shard_all
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

POSITIONS = 1_000_000
TOKENS = 24
# Positions that are written at a time.
_PART = 50_000
NEAR = Attention(8, 2, 128, qk_norm=True, window=5000)
# Relative error of logits, by rounding to bf16 and to codes that are next to each other; it is 0.7
# where keys lie one position off.
MOST_ERROR = {None: 0.03, "int8": 0.035, "fp8": 0.05, "int4": 0.1}


def long_model(positions: int) -> ModelConfig:
    """A layer that sees all positions, between two that see the latest."""
    layers = [Layer(attention, Mlp(160)) for attention in (NEAR, replace(NEAR, window=None), NEAR)]
    return ModelConfig(
        family="llama", hidden_size=128, vocab_size=203, context_tokens=positions,
        norm_epsilon=1e-5, layers=tuple(layers), rope=Rope(5e5), tied_head=False,
    )  # fmt: skip


def sharp_weights(config: ModelConfig) -> Weights:
    """Scores of attention scatter by 8: a few of a million positions have nearly all the weight.

    So one that is read in the wrong place, or rotated by the wrong angle, changes the logits.
    """
    weights = {name: x.bfloat16() for name, x in random_weights(config).items()}
    for layer in range(config.num_layers):
        weights[f"layers.{layer}.q_norm"] = torch.full((NEAR.head_dim,), 8.0).bfloat16()
    return weights


def fill(pool: PagePool, table: Tensor, cache: KVCache, count: int) -> None:
    """The same random keys and values at the first positions of pages and of the reference."""
    generator = torch.Generator(pool.device).manual_seed(1)
    heads, dim = pool.num_kv_heads, pool.head_dim
    for layer in range(cache.num_blocks):
        for start in range(0, count, _PART):
            shape = (2, min(_PART, count - start), heads, dim)
            both = torch.randn(shape, generator=generator, device=pool.device).bfloat16()
            pool.write(layer, table, start, *both)
            keys, values = both.float().transpose(1, 2)
            cache.append(layer, start, keys, values)


@pytest.mark.parametrize("name", [None, *KV_FORMATS])
@pytest.mark.parametrize("positions", [3000, POSITIONS])
def test_decoding_is_the_references(name: KvName | None, positions: int) -> None:
    config = long_model(positions)
    kv = None if name is None else kv_format(name, config, Dtype.BF16)
    plan = make_plan(config, Dtype.BF16, here(20), kv=kv)
    weights = {k: v.cuda() for k, v in sharp_weights(config).items()}
    devices = [torch.device("cuda", torch.cuda.current_device())]
    parts = [shard_all(plan.part_of(0), weights)]
    model = load_kernel(plan, parts, devices, Capacity(positions), None, keep_rows=True)
    reference = build_reference(config, {k: v.float() for k, v in weights.items()}, kv)
    cache, ids = reference.new_cache(positions), prompt(config, TOKENS)
    # Neighbours in the text lie far apart.
    pages = -(-positions // PAGE_POSITIONS)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(2)).to("cuda")
    model.decoder.write_pages(0, table.tolist())
    start = positions - TOKENS
    fill(model.pools[0], table, cache, start)
    seen = []
    for queries in (1, MAX_QUERIES):
        args = (model.decoder, config.vocab_size, ids, queries, TOKENS)
        seen.append(forced_logits(*args, position=start))
    assert torch.equal(*seen)
    wanted = reference.forward(torch.tensor(ids, device="cuda"), start, cache, "all")
    assert wanted is not None
    errors = (seen[0] - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < MOST_ERROR[name]
