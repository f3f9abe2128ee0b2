"""Laneformer on 1, 2, 4 and 8 ranks gives the reference's logits, in whatever order lanes run."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter.models import CONTEXT, Bench, LaneLaunch, gpu, prompt, reference_logits
from reference.lanes import FIELDS, LiteralLanes, random_tensors, write
from soloist.errors import ShapeUnsupported
from soloist.megakernel.lane_interpreter import Told
from soloist.megakernel.lanes import LaneShare, modules_of
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.sharding import shard
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from unit.model.configurations import written

ATOL = 1e-4
EIGHT: dict[str, Any] = {
    **FIELDS, "num_lanes": 8, "hidden_size": 72, "num_attention_heads": 16, "head_dim": 32,
    "num_key_value_heads": 8, "intermediate_size": 192, "vocab_size": 203,
    "max_position_embeddings": CONTEXT, "num_hidden_layers": 5, "broadcast_delay": 2,
}  # fmt: skip
SPLIT = {"use_comm": None}

CASES: dict[str, dict[str, Any]] = {
    "mean of lanes": {"swa_layers": [0, 1, 3], "sliding_window": 20},
    "no early sum": {"use_early_comm": False},
    "delay 1": {"broadcast_delay": 1, "use_early_comm": False},
    "delay 3, two queries a key": {"broadcast_delay": 3, "num_attention_heads": 32},
    "delay beyond the last layer": {"broadcast_delay": 7, "num_hidden_layers": 3},
    "silent but for the early sum": {"use_comm": False},
    "silent": {"use_comm": False, "use_early_comm": False},
    "only attention talks": {**SPLIT, "use_attention_comm": True, "use_mlp_comm": False},
    "only MLPs talk": {
        **SPLIT, "use_attention_comm": False, "use_mlp_comm": True, "use_early_comm": False,
    },
    "vocabulary slices": {"lm_head_type": "vocab_parallel", "vocab_size": 8 * 27},
    "sum before norm": {"pre_norm_lane_agg": True, "num_attention_heads": 32},
    "tied": {"tie_word_embeddings": True},
    "scales per lane": {"replicated_rmsn_scale": False},
    "scales per lane, vocabulary slices": {
        "replicated_rmsn_scale": False, "lm_head_type": "vocab_parallel", "vocab_size": 8 * 25,
    },
    "wide": {"hidden_size": 600, "intermediate_size": 8 * 72, "head_dim": 96},
}  # fmt: skip


def fields_of(name: str) -> dict[str, Any]:
    return {k: v for k, v in {**EIGHT, **CASES[name]}.items() if v is not None}


def configured(
    name: str, folder: Path, ranks: int, num_sms: int = 24
) -> tuple[ModelConfig, Plan, dict[str, Tensor]]:
    """The model as its family reads it, its plan, and random weights."""
    config = read_config(written(folder, fields_of(name)))
    return config, make_plan(config, Dtype.BF16, gpu(num_sms), ranks), random_weights(config)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in tensors(config):
        values = torch.randn(spec.shape, generator=generator)
        if spec.name.endswith("norm"):
            values = 1 + 0.3 * values
        elif spec.name != "embedding" or config.tied_head:
            values *= spec.shape[-1] ** -0.5
        weights[spec.name] = values
    return weights


def require_logits(
    launch: Any, ids: Sequence[int], start: int, columns: int, wanted: Tensor
) -> None:
    for first in range(start, len(ids), columns):
        part = ids[first : first + columns]
        positions = range(first, first + len(part))
        logits, chosen = launch.round(part, [0] * len(part), positions)
        torch.testing.assert_close(logits, wanted[positions], rtol=0, atol=ATOL)
        assert chosen == wanted[positions].argmax(1).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_lanes_give_the_references_logits(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight columns over two pages, near and far, then one; lanes run in a random order."""
    monkeypatch.setattr(Plan, "near_positions", property(lambda _: 64))
    config, plan, weights = configured(name, tmp_path, ranks)
    assert plan.lanes_here * ranks == 8
    ids = prompt(config, 74)
    wanted = reference_logits(config, weights, ids)
    bench = Bench(config, plan, weights)
    launch = bench.launch(random.Random(ranks))
    require_logits(launch, ids[:72], 0, 8, wanted)
    require_logits(bench.launch(), ids, 72, 1, wanted)
