"""Several ranks give the reference's logits, however heads, neurons and vocabulary divide."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreter.models import CASES, Bench, configured, gpu, prompt, reference_logits
from soloist.errors import ShapeUnsupported
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.plan import make_plan
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.parallel.share import Share, share_of
from soloist.prefill.part import Part
from soloist.prefill.runner import Prefill
from soloist.weights.sharding import shard, shard_all
from unit.prefill.models import matrices, model, random_weights, vectors

ATOL = 1e-4


def cases() -> Iterator[object]:
    """(case, ranks): each case with one count in turn, some with all."""
    for place, name in enumerate(CASES):
        for i, ranks in enumerate((2, 4, 8)):
            in_turn = place % 3 == i or name in ("llama-untied-biases-32", "mistral-window-96")
            yield pytest.param(name, ranks, marks=() if in_turn else pytest.mark.slow)


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "ranks"), list(cases()))
def test_ranks_give_the_references_logits(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight queries, near and far, then one."""
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: 64))
    config, plan = configured(name, tmp_path, ranks=ranks)
    weights, ids = random_weights(config), prompt(config, 74)
    wanted = reference_logits(config, weights, ids)
    bench = Bench(config, plan, weights)
    torch.testing.assert_close(bench.feed(ids[:72], 8), wanted[:72], rtol=0, atol=ATOL)
    launch = bench.launch()
    for position in (72, 73):
        logits, chosen = launch.round([ids[position]], [0], [position])
        torch.testing.assert_close(logits[0], wanted[position], rtol=0, atol=ATOL)
        assert chosen == [int(wanted[position].argmax())]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama-untied-biases-32", 4), ("qwen3-norms-128", 8), ("qwen2-bias-tied-64", 2)],
)
def test_rounds_go_on_where_prefill_ended(name: str, ranks: int, tmp_path: Path) -> None:
    """Both have the same heads on the same ranks, and the same pages."""
    config, plan = configured(name, tmp_path, ranks=ranks)
    weights, ids = random_weights(config), prompt(config, 72)
    wanted = reference_logits(config, weights, ids)
    bench = Bench(config, plan, weights)
    parts = []
    for rank in range(ranks):
        share = Share(config, ranks, rank)
        own = shard_all(share, weights)
        held = matrices(own, torch.float32)
        parts.append(Part(share, held.__getitem__, vectors(own), bench.pools[rank]))
    read = Prefill(parts)
    for start, stop in ((0, 33), (33, 70)):
        logits = read.run(ids[start:stop], start, bench.memory.page_tables[0])
        assert logits is not None
        torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=ATOL)
    launch = bench.launch()
    for position in (70, 71):
        logits, _ = launch.round([ids[position]], [0], [position])
        torch.testing.assert_close(logits[0], wanted[position], rtol=0, atol=ATOL)


def test_all_ranks_hold_the_same_residual(tmp_path: Path) -> None:
    """Sums over ranks are in one order, so that no exchange is needed to agree on a token."""
    config, plan = configured("qwen3-norms-128", tmp_path, ranks=4)
    launch = Bench(config, plan, random_weights(config), torch.bfloat16).launch()
    launch.round(prompt(config, 8), [0] * 8, range(8))
    first, *others = (rank._residual.values for rank in launch.ranks)
    for other in others:
        assert torch.equal(first.nan_to_num(), other.nan_to_num())


def sized(queries: int, kv_heads: int, ffn: int = 200, vocab: int = 203) -> ModelConfig:
    attention = Attention(queries, kv_heads, 32, qkv_bias=True, output_bias=True)
    return model(*[attention] * 2, hidden_size=64, ffn=ffn, vocab_size=vocab, mlp_bias=True)


HEADS = [(8, 8), (16, 2), (14, 2), (6, 3), (15, 5), (7, 1), (4, 4), (24, 8), (9, 3)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("queries", "kv_heads"), HEADS)
def test_every_head_neuron_and_row_is_somebodys(queries: int, kv_heads: int, ranks: int) -> None:
    whole = sized(queries, kv_heads)
    sizes = share_of(whole, ranks)
    shares = [Share(whole, ranks, rank) for rank in range(ranks)]
    served = [h for s in shares for h in s.query_heads if h is not None]
    assert sorted(served) == list(range(queries)), "each query head once"
    assert {h for s in shares for h in s.kv_heads if h is not None} == set(range(kv_heads))
    group, own = queries // kv_heads, sizes.layers[0].attention.queries_per_kv_head
    for share in shares:
        assert len(share.kv_heads) == sizes.layers[0].attention.num_kv_heads
        assert len(share.query_heads) == sizes.layers[0].attention.num_query_heads
        for i, head in enumerate(share.query_heads):
            assert head is None or head // group == share.kv_heads[i // own]
    for name, count in (("neurons", 200), ("vocabulary", 203)):
        parts = [(s.neurons(0) if name == "neurons" else s.vocabulary) for s in shares]
        assert [i for part in parts for i in part] == list(range(count))
    assert sizes.layers[0].mlp.intermediate_size * ranks < 200 + 8 * ranks


def test_heads_that_ranks_share_are_not_padded() -> None:
    attention = share_of(sized(16, 2), 8).layers[0].attention
    assert (attention.num_query_heads, attention.num_kv_heads) == (2, 1)


@pytest.mark.parametrize("ranks", [0, 3, 5, 16])
def test_other_numbers_of_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ShapeUnsupported, match=rf"{ranks} ranks.*1, 2, 4, 8"):
        make_plan(sized(8, 8), Dtype.BF16, gpu(8), ranks)


EVERYBODYS = ("norm", "attention_output_bias", "down_bias", "embedding")


@pytest.mark.parametrize("ranks", [2, 8])
def test_shards_hold_every_weight_once(ranks: int) -> None:
    """But for keys and values that ranks share, what all ranks have is the tensor and zeros."""
    whole = sized(15, 5)
    for spec in tensors(whole):
        values = torch.randn(spec.shape).abs() + 1
        parts: list[Any] = [shard(Share(whole, ranks, r), spec.name, values) for r in range(ranks)]
        if spec.name.endswith(EVERYBODYS):
            assert all(torch.equal(part, values) for part in parts)
            continue
        total = sum(part.sum(dtype=torch.float64) for part in parts)
        torch.testing.assert_close(total, values.sum(dtype=torch.float64))
        assert len({part.shape for part in parts}) == 1
