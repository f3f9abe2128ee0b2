"""Distances between logits, and a fake decoder that has a text forced on it."""

import math
from collections.abc import Sequence

import pytest
import torch

from soloist.bench.agreement import (
    agreement,
    forced_logits,
    prompt_logits,
    require_same_bits,
)
from soloist.errors import BitsDiffer
from unit.engine.fakes import VOCAB


def random_logits(positions: int, seed: int) -> torch.Tensor:
    return torch.randn(positions, 50, generator=torch.Generator().manual_seed(seed))


def test_equal_logits_agree() -> None:
    logits, targets = random_logits(100, 0), torch.arange(100) % 50
    found = agreement(logits, logits + 3.0, targets)  # a constant changes no distribution
    assert found.mean_kl == pytest.approx(0.0, abs=1e-12)
    assert found.nll_difference == pytest.approx(0.0, abs=1e-6)
    assert found.top_1 == 1.0
    wanted = torch.nn.functional.cross_entropy(logits, targets)
    assert found.nll == pytest.approx(float(wanted), rel=1e-5)


def test_a_case_by_hand() -> None:
    right = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    logits = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    found = agreement(right, logits, torch.tensor([0, 1]))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.max_kl == pytest.approx(kl, rel=1e-5)
    assert found.mean_kl == pytest.approx(kl / 2, rel=1e-5)
    assert found.nll == pytest.approx((math.log(4) + math.log(2)) / 2, rel=1e-5)
    assert found.nll_difference == pytest.approx(math.log(2) / 2, rel=1e-5)
    # Differences ln 2 and 0: their deviation over the square root of two positions.
    assert found.nll_standard_error == pytest.approx(math.log(2) / 2, rel=1e-5)
    assert found.top_1 == 0.5


def test_more_positions_than_are_compared_at_once() -> None:
    right, logits, targets = random_logits(150, 0), random_logits(150, 1), torch.arange(150) % 50
    whole = agreement(right, logits, targets)
    parts = [agreement(right[i : i + 50], logits[i : i + 50], targets[:50]) for i in (0, 50, 100)]
    assert whole.mean_kl == pytest.approx(sum(p.mean_kl for p in parts) / 3)
    assert whole.top_1 == pytest.approx(sum(p.top_1 for p in parts) / 3)


def test_the_first_difference_is_named() -> None:
    first = random_logits(5, 0)
    require_same_bits("this and that", first, first.clone())
    other = first.clone()
    other[3, 7] += 1e-6
    with pytest.raises(BitsDiffer, match=r"this and that differ at position 3, token 7"):
        require_same_bits("this and that", first, other)


class Recorder:
    """A decoder whose logits tell token and position."""

    def __init__(self, max_rounds: int) -> None:
        self.max_rounds, self.logits = max_rounds, torch.zeros(8, VOCAB + 8)
        self.launches: list[tuple[int, int]] = []

    def run(self, columns, rounds, *, logits):
        self.launches.append((len(columns), rounds))
        for i in range(rounds):
            for c, column in enumerate(columns):
                assert len(column.tokens) == rounds
                logits[i, c, 0] = column.tokens[i]
                logits[i, c, 1] = column.position + i * column.stride


@pytest.mark.parametrize("columns", [1, 3, 8])
@pytest.mark.parametrize("rounds", [1, 5, 1000])
@pytest.mark.parametrize("length", [1, 7, 20, 41])
def test_every_position_is_run_once_and_in_order(columns: int, rounds: int, length: int) -> None:
    decoder, ids = Recorder(max_rounds=12), [(7 * i) % 50 for i in range(length)]
    logits = forced_logits(decoder, VOCAB, ids, columns, rounds)  # type: ignore[arg-type]
    assert logits.shape == (length, VOCAB)
    assert logits[:, 0].tolist() == ids
    assert logits[:, 1].tolist() == list(range(length))
    assert all(c <= columns and r <= min(rounds, 12) for c, r in decoder.launches)


class Passes:
    """Passes whose logits, always in the same memory, tell length, last token and sum."""

    def __init__(self, page_table: list[int]) -> None:
        self.page_table, self.logits = page_table, torch.zeros(VOCAB)

    def run(
        self, ids: Sequence[int], position: int, pages: Sequence[int], *, want_logits: bool
    ) -> torch.Tensor:
        assert want_logits
        assert (position, pages) == (0, self.page_table)
        self.logits[:3] = torch.tensor([len(ids), ids[-1], sum(ids)])
        return self.logits


@pytest.mark.parametrize("length", [1, 2, 41])
def test_every_beginning_of_a_text_is_a_prompt(length: int) -> None:
    passes, ids = Passes([3, 1, 2]), [(7 * i) % 50 for i in range(length)]
    logits = prompt_logits(passes, ids, passes.page_table)  # type: ignore[arg-type]
    assert logits.shape == (length, VOCAB)
    wanted = [[t + 1, ids[t], sum(ids[: t + 1])] for t in range(length)]
    assert logits[:, :3].tolist() == wanted
