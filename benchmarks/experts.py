"""Time a mixture of experts in the decode kernel: `python benchmarks/experts.py SHAPE`.

Weights and routers are random, tokens are the kernel's own, prompts are fed token by token. They
are off outside of tests (`RUNS_EXPERTS` in `soloist/megakernel/maths.py`), so this is no speed of a
request yet. Where the model does not fit, `--layers` leaves some out: the time of a layer is the
difference of two such runs over the difference of their layers.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from soloist.engine.support import find_support
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel import maths
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.elementwise import rope_table
from soloist.settings import read_settings
from soloist.weights.packed import pack_weights
from soloist.weights.random import random_weights
from soloist.weights.sharding import shard_all

_LAUNCHES = 3  # after one that is not timed
_FIRST_TOKEN = 1000


def main() -> None:
    """One query, then eight of as many sequences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", type=Path, help="a config.json file")
    parser.add_argument("--layers", type=int, help="so many of them; by default all")
    parser.add_argument("--context", type=int, default=128, help="first position that is timed")
    parser.add_argument("--new-tokens", type=int, default=256)
    asked = parser.parse_args()
    config = read_config(asked.shape)
    config = replace(config, layers=config.layers[: asked.layers])
    maths.RUNS_EXPERTS = True
    decoder = _decoder(config, asked.context + asked.new_tokens)
    print(decoder.plan.describe())
    for queries in (1, MAX_QUERIES):
        seconds = _seconds(decoder, queries, asked.context, asked.new_tokens)
        each = seconds / asked.new_tokens
        print(f"{queries} queries: {each * 1e6:.1f} µs a round, {1 / each:,.1f} rounds/s")


def _decoder(config: ModelConfig, context_tokens: int) -> Decoder:
    device, dtype = torch.device("cuda"), Dtype.BF16
    found = find_support(config, dtype, device)
    if found.plan is None:
        raise SystemExit(found.refusal)
    weights = random_weights(tensors(config), dtype, device)
    packed = pack_weights(found.plan, shard_all(found.plan.part_of(0), weights), device)
    pages = -(-context_tokens // PAGE_POSITIONS)
    pool = PagePool(
        config.num_layers, found.plan.shape.pool_kv_heads, found.plan.shape.head_dim,
        MAX_QUERIES * pages, TORCH_DTYPES[dtype], device,
    )  # fmt: skip
    rope = rope_table(config.rope, found.plan.shape.head_dim, pages * PAGE_POSITIONS, device)
    decoder = Decoder(found.plan, packed, rope, pool.tensor, cache=read_settings().cache)
    decoder.page_tables.copy_(torch.arange(MAX_QUERIES * pages).view(MAX_QUERIES, -1))
    return decoder


def _seconds(decoder: Decoder, queries: int, context: int, new_tokens: int) -> float:
    """Of a launch of so many rounds, behind a context of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        decoder.plan.model.vocab_size, (queries, context), generator=generator
    ).tolist()
    decoder.run([Query(i, 0, own) for i, own in enumerate(ids)], context)
    times = []
    for _ in range(1 + _LAUNCHES):
        start = time.perf_counter()
        decoder.run([Query(i, context, [_FIRST_TOKEN + i]) for i in range(queries)], new_tokens)
        times.append(time.perf_counter() - start)
    return median(times[1:])


if __name__ == "__main__":
    main()
