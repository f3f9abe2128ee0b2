"""Mixtures of experts in the decode kernel, on one GPU and its ranks. They are off elsewhere."""

import pytest
import torch
from torch import Tensor

from end_to_end.test_gpu_kinds_and_formats import here
from end_to_end.test_gpu_lanes import Spread, rounded
from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import prompt, reference_logits
from soloist.megakernel import maths
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
# Of a token, half of all: what rounding to 16 bits may do where it changes no choice.
MOST_ERROR = 0.02


@pytest.fixture(autouse=True)
def experts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "RUNS_EXPERTS", True)


def spread(config: ModelConfig, ranks: int = 1) -> tuple[Spread, dict[str, Tensor]]:
    """The model, and its weights as the GPU has them."""
    weights = random_weights(config)
    return Spread(config, make_plan(config, Dtype.BF16, here(SMS), ranks), weights), rounded(
        weights
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_the_references(name: str, ranks: int) -> None:
    """And a query has the bits that it has alone, whoever chooses what beside it."""
    config = MIXTURES[name]
    model, weights = spread(config, ranks)
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    one_by_one = model.logits(ids, 1)
    errors = (one_by_one.cpu() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < MOST_ERROR
    for queries in (2, 5):
        assert torch.equal(model.logits(ids, queries), one_by_one)
    assert torch.equal(model.logits(ids, 3, sequence=1), one_by_one)
    eight = model.logits(ids[:144], MAX_QUERIES)
    assert torch.equal(eight, one_by_one[:144])


@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("name", ["softmax", "some layers dense"])
def test_no_bit_depends_on_when_buffers_are_cleaned(name: str, queries: int) -> None:
    config = MIXTURES[name]
    model, _ = spread(config)
    ids = prompt(config, 96)
    wanted = model.logits(ids, queries)
    for decoder in model.decoders:
        decoder.load(Build(cleaner_cycles=50_000))  # longer than a layer takes
    assert torch.equal(model.logits(ids, queries), wanted)


@pytest.mark.parametrize("name", MIXTURES)
def test_launches_that_follow_each_other_have_the_same_tokens(name: str) -> None:
    """Of one query, and of two sequences side by side."""
    config = MIXTURES[name]
    model, _ = spread(config)
    ids = prompt(config, 24)
    tokens = [model.ranks.run([Query(0, 0, ids)], 100) for _ in range(3)]
    assert tokens[1:] == tokens[:2]
    both = model.ranks.run([Query(0, 0, ids), Query(1, 0, ids)], 100)
    assert [round_[0] for round_ in both] == [round_[0] for round_ in tokens[0]]
    assert [round_[1] for round_ in both] == [round_[0] for round_ in tokens[0]]


@pytest.mark.parametrize("queries", [1, 3, MAX_QUERIES])
def test_activations_that_are_no_numbers_end_a_launch_in_order(queries: int) -> None:
    """A choice of NaN is of experts that there are: the kernel reads no other address."""
    config = MIXTURES["softmax"]
    weights = random_weights(config)
    weights["layers.0.attention_norm"][0] = torch.nan
    model = Spread(config, make_plan(config, Dtype.BF16, here(SMS)), weights)
    logits = model.logits(prompt(config, 24), queries)
    assert logits.isnan().all()
