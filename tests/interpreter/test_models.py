"""The plan, its packing and its layouts give the reference's logits, for every dense family."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.models import (
    CASES,
    Bench,
    configured,
    gpu,
    prompt,
    reference_logits,
)
from plan.shapes import operation
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.checkpoint import open_checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import find_model
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.reading import load_weights
from unit.prefill.models import random_weights

TOKENS = 136  # two pages, and a round of eight in a third one
ATOL = 1e-4

Model = tuple[ModelConfig, Plan, Weights, list[int], Tensor]


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config, plan = configured(request.param, tmp_path_factory.mktemp("model"))
    weights, ids = random_weights(config), prompt(config, TOKENS)
    return config, plan, weights, ids, reference_logits(config, weights, ids)


@pytest.fixture(params=[64, None], ids=["near and far", "near"])
def near(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to which position one block of a KV head serves a query: a page, or everywhere."""
    if request.param is not None:
        monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: request.param))


def require_close(seen: Tensor, wanted: Tensor, atol: float = ATOL) -> None:
    torch.testing.assert_close(seen, wanted, rtol=0, atol=atol)


@pytest.mark.few(8)
def test_one_query_gives_the_references_logits(model: Model) -> None:
    config, plan, weights, ids, wanted = model
    """Positions one after the other, across a page's end, in one launch."""
    require_close(Bench(config, plan, weights).feed(ids[:67]), wanted[:67])


@pytest.mark.few(10)
@pytest.mark.usefixtures("near")
def test_eight_queries_of_a_sequence_give_the_same(model: Model) -> None:
    config, plan, weights, ids, wanted = model
    require_close(Bench(config, plan, weights).feed(ids, queries=8), wanted)


@pytest.mark.few(10)
@pytest.mark.usefixtures("near")
def test_queries_of_several_sequences(model: Model) -> None:
    """Three prompts of other tokens and lengths, two and more queries each, in one launch."""
    config, plan, weights, _, _ = model
    bench = Bench(config, plan, weights)
    prompts = [prompt(config, 69, seed) for seed in (1, 2, 3)]
    wanted = [reference_logits(config, weights, ids) for ids in prompts]
    starts = [0, 64, 31]  # of the rounds in which all take part
    for sequence, (ids, start) in enumerate(zip(prompts, starts, strict=True)):
        if start:
            require_close(bench.feed(ids[:start], 8, sequence), wanted[sequence][:start])
    launch, widths = bench.launch(), [3, 1, 4]
    for step in range(3):
        spans = [range(s + w * step, s + w * step + w) for s, w in zip(starts, widths, strict=True)]
        where = [(q, p) for q, span in enumerate(spans) for p in span]
        logits, _ = launch.round(
            [prompts[q][p] for q, p in where], [q for q, _ in where], [p for _, p in where]
        )
        require_close(logits, torch.stack([wanted[q][p] for q, p in where]))


@pytest.mark.few(5)
def test_pages_of_other_sequences_stay_as_they_are(model: Model) -> None:
    config, plan, weights, ids, _ = model
    bench = Bench(config, plan, weights)
    bench.feed(ids[:66], 8, sequence=1)
    used = bench.memory.page_tables[1, :2].tolist()
    written = bench.pool.tensor.abs().amax((1, 2, 3, 4, 5)) > 0
    assert written.nonzero().flatten().tolist() == sorted(used)


def test_choices_are_the_lowest_of_the_best(model: Model) -> None:
    config, plan, weights, ids, wanted = model
    launch = Bench(config, plan, weights).launch()
    chosen = launch.round(ids[:8], [0] * 8, range(8))[1]
    assert chosen == wanted[:8].argmax(1).tolist()


@pytest.mark.parametrize("name", ["qwen3-norms-128", "mistral-window-96", "smollm3-nope-64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rounding_stays_near(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, plan = configured(name, tmp_path)
    weights = {k: v.to(dtype) for k, v in random_weights(config).items()}
    ids = prompt(config, 96)
    wanted = reference_logits(config, weights, ids)
    seen = Bench(config, plan, weights, dtype).feed(ids, 8)
    error = (seen - wanted).norm() / wanted.norm()
    assert 1e-5 < error < (0.02 if dtype is torch.bfloat16 else 0.003)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
def test_few_registers_and_little_shared_memory(name: str, tmp_path: Path) -> None:
    config, plan = configured(name, tmp_path, like="sm_86")
    weights, ids = random_weights(config), prompt(config, 70)
    wanted = reference_logits(config, weights, ids)
    require_close(Bench(config, plan, weights).feed(ids, 8), wanted)
    assert plan.shared.ring_slots <= 4


def test_groups_of_tiles_that_blocks_do_not_fill(tmp_path: Path) -> None:
    plan = configured("llama-one-kv-head-128", tmp_path, like="sm_86")[1]
    matrix, group = operation(plan, "gate_up").matrix, operation(plan, "gate_up").group_tiles
    counts = {matrix.num_units(b) for b in range(plan.blocks)}
    assert len({count % group for count in counts} - {0}) == 2, "as tested above"


def test_etude() -> None:
    folder = find_model("etude")
    config = read_config(folder / "config.json")
    specs = tensors(config)
    checkpoint = open_checkpoint(folder)
    weights = load_weights(checkpoint, specs, Dtype.FP32, torch.device("cpu"))
    plan = make_plan(config, Dtype.BF16, gpu(10))
    ids = prompt(config, 11)
    wanted = reference_logits(config, weights, ids)
    require_close(Bench(config, plan, weights).feed(ids[:2]), wanted[:2], 1e-3)
    require_close(Bench(config, plan, weights).feed(ids, 8), wanted, 1e-3)
    rounded = {k: v.to(TORCH_DTYPES[Dtype.BF16]) for k, v in weights.items()}
    seen = Bench(config, plan, rounded, torch.bfloat16).feed(ids, 8)
    p, q = wanted.double().log_softmax(1), seen.double().log_softmax(1)
    assert float((p.exp() * (p - q)).sum(1).mean()) < 1e-3
