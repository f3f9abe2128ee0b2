"""Prompts into pages of codes: what attention sees was rounded, however a prompt is cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from soloist.parallel.share import Share
from soloist.prefill.buffers import prefill_bytes
from soloist.prefill.elementwise import Chunk, Heads, TorchElementwise
from soloist.prefill.part import Part
from soloist.prefill.runner import Prefill
from soloist.reference.build import build_reference
from soloist.weights.sharding import shard_all
from unit.prefill.models import matrices, model, random_weights, vectors
from unit.prefill.test_runner import CUTS, SCATTERED, prompt

CPU = torch.device("cpu")
NAMES = pytest.mark.parametrize("name", KV_FORMATS)
ATTENTION = Attention(4, 2, 32, qk_norm=True)
CONFIG = model(ATTENTION, replace(ATTENTION, window=50))
# Of a code that rounds to the next one where products are summed in another order.
ERROR = {"int8": 1e-3, "fp8": 4e-3, "int4": 8e-3}


def pool_of(config: ModelConfig, name: KvName, dtype: torch.dtype = torch.float32) -> PagePool:
    a = config.layers[0].attention
    stored = kv_format(name, config, Dtype.FP32)
    return PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 6, dtype, CPU, stored)


def prefill(name: KvName) -> Prefill:
    weights = shard_all(Share(CONFIG, 1, 0), random_weights(CONFIG))
    held = matrices(weights, torch.float32)
    part = Part(
        Share(CONFIG, 1, 0), held.__getitem__, vectors(weights), pool_of(CONFIG, name),
        most_tokens=256,
    )  # fmt: skip
    return Prefill([part])


def reference_logits(name: KvName | None, ids: Tensor) -> Tensor:
    """[T, V]."""
    kv = kv_format(name, CONFIG, Dtype.FP32)
    reference = build_reference(CONFIG, random_weights(CONFIG), kv)
    logits = reference.forward(ids, 0, reference.new_cache(len(ids)), "all")
    assert logits is not None
    return logits


@NAMES
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_logits_are_the_references_with_the_same_codes(name: KvName, cuts: list[int]) -> None:
    ids = prompt(CONFIG)
    wanted, exact = reference_logits(name, ids), reference_logits(None, ids)
    run = prefill(name)
    for start, stop in pairwise(cuts):
        logits = run.run(ids[start:stop], start, SCATTERED)
        assert logits is not None
        error = (logits - wanted[stop - 1]).norm() / wanted[stop - 1].norm()
        assert float(error) < ERROR[name]
    assert float((logits - exact[-1]).norm() / exact[-1].norm()) > 3 * float(error)


@NAMES
def test_attention_sees_what_the_pool_holds(name: KvName) -> None:
    """Of a chunk's own tokens and, gathered, of those before, bit for bit."""
    dtype = torch.bfloat16
    pool = pool_of(CONFIG, name, dtype)
    operations = TorchElementwise(CONFIG, vectors(random_weights(CONFIG)), pool)
    table, draw = torch.tensor(SCATTERED, dtype=torch.int32), torch.Generator().manual_seed(3)
    held = []
    for position, tokens in ((0, 90), (90, 41)):
        place = torch.tensor([position, tokens], dtype=torch.int32)
        rows = torch.zeros(tokens, dtype=torch.int32)
        chunk = Chunk(position, tokens, rows, place, place, table, place, place, place)
        product = torch.randn(tokens, ATTENTION.qkv_rows, generator=draw)
        heads = Heads(*(torch.zeros(tokens, n, 32, dtype=dtype) for n in (4, 2, 2)))
        operations.qkv_rope_store(product, 1, chunk, heads)
        held.append(heads)
    read = pool.read(1, table, 0, 131)
    own = [torch.cat([getattr(heads, part) for heads in held]) for part in ("keys", "values")]
    for seen, stored in zip(own, read, strict=True):
        assert torch.equal(seen, stored.transpose(0, 1))
        assert torch.equal(pool.rounded(seen).isfinite(), torch.ones_like(seen, dtype=torch.bool))
    gathered = torch.zeros(2, 140, 2, 32, dtype=dtype)
    operations.gather(1, chunk, *gathered)
    for seen, stored in zip(gathered, read, strict=True):
        assert torch.equal(seen[:131], stored.transpose(0, 1))
        assert not seen[131:].any()


def test_reading_codes_is_counted() -> None:
    """Numbers that are read take what they do of 16 bits, and making them takes some more."""
    config = model(Attention(8, 4, 64), hidden_size=512, ffn=1024, vocab_size=1000)
    on = replace(TYPICAL["sm_90a"], num_sms=16)
    plain = make_plan(config, Dtype.BF16, on)
    needed = prefill_bytes(config, plain, 100)
    for name in KV_FORMATS:
        plan = make_plan(config, Dtype.BF16, on, kv=kv_format(name, config, Dtype.BF16))
        rows = min(100 * PAGE_POSITIONS, 2048)
        more = prefill_bytes(config, plan, 100) - needed
        assert more == rows * 4 * 64 * 24
