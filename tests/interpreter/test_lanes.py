"""Laneformer on 1, 2, 4 and 8 ranks gives the reference's logits, in whatever order lanes run."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter.lane_models import CASES, EIGHT, configured
from interpreter.models import Bench, gpu, prompt, reference_logits
from soloist.errors import ShapeUnsupported
from soloist.megakernel import lanes
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.parallel.lanes import LaneShare
from soloist.weights.sharding import shard
from unit.model.configurations import written

ATOL = 1e-4


def require_logits(
    launch: Any, ids: Sequence[int], start: int, queries: int, wanted: Tensor
) -> None:
    """Of `queries` positions side by side."""
    for first in range(start, len(ids), queries):
        part = ids[first : first + queries]
        positions = range(first, first + len(part))
        logits, chosen = launch.round(part, [0] * len(part), positions)
        torch.testing.assert_close(logits, wanted[positions], rtol=0, atol=ATOL)
        assert chosen == wanted[positions].argmax(1).tolist()


@pytest.mark.parametrize(
    "ranks", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))]
)
def test_lanes_give_the_references_logits(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight queries over two pages, near and far, then one; lanes go on in a random order."""
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: 64))
    config, plan, weights = configured("mean of lanes", tmp_path, ranks)
    ids = prompt(config, 74)
    wanted = reference_logits(config, weights, ids)
    bench = Bench(config, plan, weights)
    require_logits(bench.launch(random.Random(ranks)), ids[:72], 0, 8, wanted)
    require_logits(bench.launch(), ids, 72, 1, wanted)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CASES)
def test_every_rule_gives_the_references_logits(name: str, tmp_path: Path) -> None:
    place = list(CASES).index(name)
    config, plan, weights = configured(name, tmp_path, (1, 2, 4, 8)[place % 4], blocks=2)
    ids = prompt(config, 8)
    wanted = reference_logits(config, weights, ids)
    require_logits(Bench(config, plan, weights).launch(random.Random(place)), ids, 0, 5, wanted)


def test_sequences_side_by_side(tmp_path: Path) -> None:
    config, plan, weights = configured("mean of lanes", tmp_path, 2)
    prompts = [prompt(config, 9, seed) for seed in range(3)]
    wanted = [reference_logits(config, weights, ids) for ids in prompts]
    launch = Bench(config, plan, weights).launch(random.Random(0))
    for position in range(0, 9, 2):
        queries = [(s, p) for s in range(3) for p in range(position, min(9, position + 2))]
        words = [prompts[s][p] for s, p in queries]
        logits, _ = launch.round(words, *zip(*queries, strict=True))
        expected = torch.stack([wanted[s][p] for s, p in queries])
        torch.testing.assert_close(logits, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["tied", "sum before norm"])
def test_bits_depend_neither_on_ranks_nor_on_who_is_ahead(name: str, tmp_path: Path) -> None:
    seen = []
    for ranks, order in ((1, None), (8, random.Random(2))):
        config, plan, weights = configured(name, tmp_path, ranks)
        launch = Bench(config, plan, weights, torch.bfloat16).launch(order)
        ids = prompt(config, 4)
        rounds = [launch.round(ids[p : p + 2], [0, 0], [p, p + 1])[0] for p in (0, 2)]
        seen.append(torch.cat(rounds))
    assert torch.equal(*seen)


class Hasty(random.Random):
    """One lane first, as far as it gets, then the next."""

    def choice(self, seq: Any) -> Any:
        self.tries = getattr(self, "tries", 0) + 1
        return seq[self.tries // 40 % len(seq)]


@pytest.mark.parametrize("name", ["seven layers", "seven layers, no early sum", "delay 1"])
def test_fewer_copies_would_be_too_few(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane gets ahead of the others by as much as the copies allow for, and no further."""
    config, plan, weights = configured(name, tmp_path, 4)
    ids = prompt(config, 3)
    wanted = reference_logits(config, weights, ids)
    require_logits(Bench(config, plan, weights).launch(Hasty(0)), ids, 0, 1, wanted)
    monkeypatch.setattr(lanes, "copies_of", lambda model: 2 * model.lanes.delay_layers - 1)
    fewer = Plan(plan.model, plan.dtype, plan.gpu, plan.blocks, plan.ranks)
    with pytest.raises(AssertionError, match=r"published_.*: overwritten"):
        require_logits(Bench(config, fewer, weights).launch(Hasty(0)), ids, 0, 1, wanted)


@pytest.mark.parametrize("name", ["mean of lanes", "vocabulary slices", "scales per lane"])
def test_shards_hold_every_weight_once(name: str, tmp_path: Path) -> None:
    config, _, weights = configured(name, tmp_path, 8)
    everybodys = ("norm", "embedding") if name != "scales per lane" else ("embedding",)
    for spec in tensors(config):
        values = weights[spec.name]
        parts = [shard(LaneShare(config, 4, rank), spec.name, values) for rank in range(4)]
        if spec.name.endswith(everybodys):
            assert all(torch.equal(part, values) for part in parts)
            continue
        assert len({part.shape for part in parts}) == 1
        kept = torch.cat([part.flatten() for part in parts])
        assert torch.equal(kept[kept != 0].sort().values, values.flatten().sort().values)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 3, "8 lanes on 3 ranks.*1, 2, 4, 8"),
    ({"num_lanes": 2}, 4, "2 lanes on 4 ranks.*1, 2"),
    ({"intermediate_size": 96}, 1, "intermediate_size 96.*a multiple of 8 for each of 8 lanes"),
    ({"lm_head_type": "lane"}, 1, "side by side.*'replicate' or 'vocab_parallel'"),
    ({"head_dim": 40}, 1, "head_dim 40"),
]


@pytest.mark.parametrize(("changes", "ranks", "message"), REFUSED)
def test_what_the_kernel_cannot_run_is_refused(
    changes: dict[str, Any], ranks: int, message: str, tmp_path: Path
) -> None:
    config = read_config(written(tmp_path, {**EIGHT, **changes}))
    with pytest.raises(ShapeUnsupported, match=message):
        make_plan(config, Dtype.BF16, gpu(24), ranks)


def test_the_plan_says_what_lanes_tell(tmp_path: Path) -> None:
    plan = configured("mean of lanes", tmp_path, 2)[1]
    assert (
        "4 of 8 lanes a rank, 3 blocks each; of 10 partial results a round a lane publishes 6, "
        "576 bytes to each rank, received 2 layers later; 4 are waited for"
    ) in plan.describe()
