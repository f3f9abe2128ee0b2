"""Several ranks on one GPU, each with SMs of its own, against the fp32 reference and each other."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.models import (
    CASES,
    CONTEXT,
    configured,
    prompt,
    reference_logits,
    rope_table,
)
from soloist.errors import LaunchError
from soloist.megakernel.launch import Column, Decoder
from soloist.megakernel.plan import PAGE_POSITIONS, Plan
from soloist.megakernel.ranks import Ranks
from soloist.megakernel.share import Share
from soloist.model.config import ModelConfig
from soloist.prefill.pages import PagePool
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
# Relative error of all logits: what rounding to bf16 may do (tests/interpreter).
MOST_ERROR = 0.02


class Spread:
    """A model of random weights over the ranks of a plan, all on the current GPU."""

    def __init__(self, config: ModelConfig, plan: Plan) -> None:
        self.plan = plan
        device = torch.device("cuda", torch.cuda.current_device())
        weights = {k: v.to(device, torch.bfloat16) for k, v in random_weights(config).items()}
        pages = -(-CONTEXT // PAGE_POSITIONS)
        self.decoders = []
        for rank in range(plan.ranks):
            pool = PagePool(
                config.num_layers, plan.kv_heads, plan.head_dim, pages, torch.bfloat16, device
            )
            decoder = Decoder(
                plan, weights, rope_table(config, CONTEXT).to(device), pool.tensor, rank=rank,
                max_rounds=256, max_sequences=1, keep_rows=True,
            )  # fmt: skip
            decoder.page_tables.copy_(torch.arange(pages)[None])
            self.decoders.append(decoder)
        self.ranks = Ranks(self.decoders)

    def logits(self, ids: list[int], columns: int) -> Tensor:
        """[T, V] of forced tokens, `columns` positions side by side."""
        rounds = len(ids) // columns
        rows = self.decoders[0].logits.shape[1]
        kept = [torch.zeros(rounds, columns, rows, device="cuda") for _ in self.decoders]
        side_by_side = [Column(0, c, ids[c::columns], stride=columns) for c in range(columns)]
        self.ranks.run(side_by_side, rounds, logits=kept)
        parts = [
            part.flatten(0, 1)[:, : len(Share(self.plan.model, self.plan.ranks, rank).vocabulary)]
            for rank, part in enumerate(kept)
        ]
        return torch.cat(parts, dim=1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_references(name: str, ranks: int, tmp_path: Path) -> None:
    config, plan = configured(name, tmp_path, ranks=ranks)
    weights = {k: v.to(torch.bfloat16) for k, v in random_weights(config).items()}
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    spread = Spread(config, plan)
    one_by_one = spread.logits(ids, 1)
    error = (one_by_one.cpu() - wanted).norm() / wanted.norm()
    assert error < MOST_ERROR
    for columns in (2, 5):
        assert torch.equal(spread.logits(ids, columns), one_by_one)


def test_all_ranks_choose_alike_again_and_again(tmp_path: Path) -> None:
    config, plan = configured("qwen3-norms-128", tmp_path, ranks=4)
    spread = Spread(config, plan)
    column = Column(0, 0, prompt(config, 20))
    made = spread.ranks.run([column], 150)
    chosen = [d._shown[:150, 0].tolist() for d in spread.decoders]
    assert chosen == [[token for (token,) in made]] * 4
    for _ in range(20):
        assert spread.ranks.run([column], 150) == made


def test_a_launch_of_ranks_stops_on_request(tmp_path: Path) -> None:
    config, plan = configured("llama-tied-64", tmp_path, ranks=2)
    spread = Spread(config, plan)
    spread.ranks.start([Column(0, 0, [1])], 150)
    spread.ranks.stop()
    made = list(spread.ranks.tokens())
    assert 1 <= len(made) <= 150
    again = spread.ranks.run([Column(0, 0, [1])], len(made))
    assert again == made


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config, plan = configured("llama-tied-64", tmp_path, ranks=2)
    spread = Spread(config, plan)
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for decoder in spread.decoders:
        object.__setattr__(decoder.plan, "blocks", num_sms)
    with pytest.raises(LaunchError, match=f"{2 * num_sms} blocks.*{num_sms} SMs"):
        Ranks(spread.decoders)
