"""The interpreter notices what a wrong plan, packing or exchange would do."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.models import Bench, configured, load, prompt, reference_logits
from plan.shapes import operation
from soloist.megakernel.interpreter.exchange import Exchange, Operand
from soloist.megakernel.interpreter.split import Splits
from soloist.megakernel.limits import EXCHANGE_COPIES, MAX_QUERIES
from soloist.megakernel.partition import Matrix
from soloist.megakernel.plan import Plan
from soloist.megakernel.tile import HALF_TILE_VALUES, STEP_COLUMNS
from soloist.megakernel.workspace import fresh_workspace
from soloist.model.config import ModelConfig
from soloist.weights.packed import pack_weights
from unit.prefill.models import random_weights

CPU = torch.device("cpu")


@pytest.fixture
def case(tmp_path: Path) -> tuple[ModelConfig, Plan]:
    return configured("llama-tied-64", tmp_path)


def bench(case: tuple[ModelConfig, Plan]) -> Bench:
    return Bench(*case, random_weights(case[0]))


def test_the_kernel_gets_the_same_image(case: tuple[ModelConfig, Plan]) -> None:
    config, plan = case
    weights = random_weights(config)
    packed = pack_weights(plan, weights, CPU, keep_rows=True)
    own_image, own_vectors, _ = load(plan, weights, torch.bfloat16)
    images = [x.view(torch.bfloat16) for x in (packed.image, own_image)]
    for seen, wanted in (images, (packed.vectors, own_vectors)):
        assert torch.equal(seen[~wanted.isnan()], wanted[~wanted.isnan()])


def test_the_decoders_buffers_start_absent_but_for_padding(case: tuple[ModelConfig, Plan]) -> None:
    plan = case[1]
    fresh = fresh_workspace(plan, MAX_QUERIES)
    for name in ("hidden_in", "gated"):
        buffer = plan.exchanges.workspace[name]
        seen = fresh[buffer.offset : buffer.offset + buffer.num_bytes].view(torch.int16)
        assert seen.unique().tolist() == [-1, 0]
        absent = Operand(plan, name).values.isnan()
        assert torch.equal(seen.view(absent.shape) == -1, absent)


def test_of_one_query_they_lie_without_room_for_more(case: tuple[ModelConfig, Plan]) -> None:
    plan = case[1]
    fresh, all_queries = fresh_workspace(plan, 1), fresh_workspace(plan, MAX_QUERIES)
    assert len(fresh) == len(all_queries)
    for name, op in (("hidden_in", operation(plan, "qkv")), ("gated", operation(plan, "down"))):
        buffer = plan.exchanges.workspace[name]
        seen = fresh[buffer.offset : buffer.offset + buffer.num_bytes].view(torch.int16)
        padded = op.matrix.steps * STEP_COLUMNS
        one = seen.view(EXCHANGE_COPIES, MAX_QUERIES, padded)[:, 0]
        assert (one[:, : op.matrix.columns] == -1).all()
        assert (one[:, op.matrix.columns :] == 0).all()


def test_a_swapped_tile_shows(case: tuple[ModelConfig, Plan]) -> None:
    config = case[0]
    made, ids = bench(case), prompt(config, 2)
    part = made.memory.image[0, : 2 * HALF_TILE_VALUES]
    part.copy_(part.view(2, HALF_TILE_VALUES).flip(0).flatten())
    wanted = reference_logits(config, random_weights(config), ids)
    assert (made.feed(ids) - wanted).abs().max() > 0.01


def test_pages_that_no_split_owns_are_missed(
    case: tuple[ModelConfig, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(case)
    monkeypatch.setattr(Splits, "pages", lambda *_: [])
    with pytest.raises(AssertionError, match="a position counts once"):
        made.feed(prompt(case[0], 3))


def test_units_owned_twice_are_refused(
    case: tuple[ModelConfig, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(case)
    monkeypatch.setattr(Matrix, "first_unit", lambda self, block: min(block * 11, self.units))
    with pytest.raises(AssertionError, match=r"units owned|lies where"):
        made.launch()


def test_an_exchange_that_is_not_cleaned_is_written_twice(
    case: tuple[ModelConfig, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(case)
    monkeypatch.setattr(Exchange, "clear", lambda *_: None)
    with pytest.raises(AssertionError, match="written twice"):
        made.feed(prompt(case[0], 5))


def test_an_exchange_that_is_cleaned_early_is_read_absent(
    case: tuple[ModelConfig, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, clear = bench(case), Exchange.clear
    monkeypatch.setattr(Exchange, "clear", lambda self, epoch: clear(self, epoch - 2))
    with pytest.raises(AssertionError, match="read before it is written"):
        made.feed(prompt(case[0], 5))


def test_rows_that_nobody_publishes_are_missed(
    case: tuple[ModelConfig, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, publish = bench(case), Operand.publish

    def short(self: Operand, epoch: int, queries: range, k: range, values: Tensor) -> None:
        publish(self, epoch, queries, k[1:], values[:, 1:])

    monkeypatch.setattr(Operand, "publish", short)
    with pytest.raises(AssertionError, match="hidden_in: epoch 1 is read before it is written"):
        made.feed(prompt(case[0], 1))
