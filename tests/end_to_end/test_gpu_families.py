"""The decode kernel of every family against the fp32 reference, also as it is built for older GPUs.

Their machine code runs nowhere else, but the driver translates their PTX for a newer GPU: the same
copies, barriers, ring and tiles, only another assembler.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.models import CASES, CONTEXT, configured, prompt, reference_logits
from soloist.engine.kernel import Capacity, load_kernel
from soloist.jit.compiler import Cubin, compile_source
from soloist.jit.source import Source
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel import kernel
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.gpu import TYPICAL, arch_from_capability
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.prefill import fused
from soloist.prefill.elementwise import rope_table
from soloist.weights.packed import pack_weights
from soloist.weights.sharding import shard_all
from unit.megakernel.assembly import assembly
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
# Relative error of all logits: what rounding to bf16 may do (tests/interpreter).
MOST_ERROR = 0.02


def translatable(source: Source, arch: str, _cache_root: Path | None) -> Cubin:
    """PTX in the place of machine code, with the report of the latter."""
    return replace(compile_source(source, arch), data=assembly(source, arch))


@pytest.fixture(params=["native", "sm_80", "sm_86"])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An architecture whose kernels run here from now on."""
    native = arch_from_capability(*torch.cuda.get_device_capability())
    if request.param == "native":
        if native not in TYPICAL:
            pytest.skip(f"no typical figures of {native}")
        yield native
        return
    for module in (kernel, fused):
        monkeypatch.setattr(module, "load_or_build", translatable)
    yield request.param


def kept_logits(decoder: Decoder, queries: list[Query], rounds: int) -> Tensor:
    """[rounds, queries, V]"""
    kept = torch.zeros(rounds, len(queries), decoder.logits.shape[1], device="cuda")
    decoder.run(queries, rounds, logits=kept)
    return kept


def forced_logits(decoder: Decoder, ids: list[int], queries: int, vocab_size: int) -> Tensor:
    """[T, V] of forced tokens, `queries` positions side by side."""
    side_by_side = [Query(0, c, ids[c::queries], stride=queries) for c in range(queries)]
    kept = kept_logits(decoder, side_by_side, len(ids) // queries)
    return kept.flatten(0, 1)[:, :vocab_size]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_references(name: str, arch: str, tmp_path: Path) -> None:
    config, plan = configured(name, tmp_path, like=arch)
    weights = {k: v.to(torch.bfloat16) for k, v in random_weights(config).items()}
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    on_gpu = {k: v.cuda() for k, v in weights.items()}
    device = torch.device("cuda", torch.cuda.current_device())
    own = shard_all(plan.part_of(0), on_gpu)
    kernel = load_kernel(plan, [own], [device], Capacity(CONTEXT), None, keep_rows=False)
    one_by_one = forced_logits(kernel.decoder, ids, 1, config.vocab_size)
    error = (one_by_one.cpu() - wanted).norm() / wanted.norm()
    assert error < MOST_ERROR
    for queries in (2, 5):
        assert torch.equal(
            forced_logits(kernel.decoder, ids, queries, config.vocab_size), one_by_one
        )


@pytest.mark.parametrize(
    "name",
    [
        "llama-one-kv-head-128", "glm-twelve-heads-64", "qwen3-eight-heads-128",
        "qwen3-sixteen-heads-128", "mistral-window-sixteen-heads-32",
    ],
)  # fmt: skip
def test_queries_that_share_a_split_cache(
    name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to eight positions side by side, of which four attend together if their rows are many."""
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: PAGE_POSITIONS))
    # From two pages on all blocks of a KV head share a cache.
    fewer = property(
        lambda plan: min(4, 1 << (plan.blocks // plan.shape.kv_heads).bit_length() - 1)
    )
    monkeypatch.setattr(AttentionPlan, "splits", fewer)
    config, plan = configured(name, tmp_path, like=arch)
    weights = {k: v.to(torch.bfloat16) for k, v in random_weights(config).items()}
    ids = prompt(config, 168)
    wanted = reference_logits(config, weights, ids)
    on_gpu = {k: v.cuda() for k, v in weights.items()}
    device = torch.device("cuda", torch.cuda.current_device())
    own = shard_all(plan.part_of(0), on_gpu)
    kernel = load_kernel(plan, [own], [device], Capacity(CONTEXT), None, keep_rows=False)
    one_by_one = forced_logits(kernel.decoder, ids, 1, config.vocab_size)
    assert (one_by_one.cpu() - wanted).norm() / wanted.norm() < MOST_ERROR
    for queries in (3, 7, MAX_QUERIES):
        again = forced_logits(kernel.decoder, ids, queries, config.vocab_size)
        assert torch.equal(again, one_by_one)


def decoder_of_sequences(name: str, arch: str, folder: Path) -> Decoder:
    """Eight of them, with random keys and values at all positions."""
    config, plan = configured(name, folder, like=arch)
    device = torch.device("cuda", torch.cuda.current_device())
    weights = {k: v.to(device, torch.bfloat16) for k, v in random_weights(config).items()}
    pages = torch.arange(MAX_QUERIES * (CONTEXT // PAGE_POSITIONS), dtype=torch.int32)
    layers, heads = plan.share.num_layers, plan.shape.pool_kv_heads
    pool = PagePool(layers, heads, plan.shape.head_dim, len(pages), torch.bfloat16, device)
    torch.manual_seed(0)
    pool.tensor.normal_()
    rope = rope_table(plan.share.rope, plan.shape.head_dim, CONTEXT, device)
    packed = pack_weights(plan, shard_all(plan.part_of(0), weights), device)
    decoder = Decoder(plan, packed, rope, pool.tensor)
    decoder.page_tables.copy_(pages.view(MAX_QUERIES, -1))
    return decoder


@pytest.mark.parametrize(
    "name",
    [
        "llama-tied-64", "llama-untied-biases-32", "llama-one-kv-head-128", "mistral-window-96",
        "qwen3-norms-128", "qwen3-wide-32", "glm-twelve-heads-64", "qwen3-eight-heads-128",
        "qwen3-sixteen-heads-128",
    ],
)  # fmt: skip
def test_sequences_of_any_length_do_not_touch_each_other(
    name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block attends to several of them: some whole, parts of others, nothing of an empty part."""
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: PAGE_POSITIONS))
    decoder = decoder_of_sequences(name, arch, tmp_path)
    rounds, given = 3, [5, 7, 11]
    starts = (186, 3, 140, 127, 64, 63, 100)
    apart = [[Query(i, start, given)] for i, start in enumerate(starts)]
    # Two positions of one sequence at a time, where a split begins; and its neighbours.
    apart[3] = [Query(3, 126, given, stride=2), Query(3, 127, given, stride=2)]
    together = kept_logits(decoder, [query for queries in apart for query in queries], rounds)
    assert torch.isfinite(together).all()
    first = 0
    for queries in apart:
        alone = kept_logits(decoder, queries, rounds)
        assert torch.equal(alone, together[:, first : first + len(queries)])
        first += len(queries)
