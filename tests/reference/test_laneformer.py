"""Laneformer against a second, literal implementation of the published equations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reference.compare import assert_close
from reference.lanes import FIELDS, LiteralLanes, random_tensors, write
from reference.oracle import load, prompt, run

SPLIT = {"use_comm": None}
EIGHT = {"num_lanes": 8, "hidden_size": 96, "num_attention_heads": 16, "num_key_value_heads": 8}

CASES: dict[str, dict[str, Any]] = {
    "published form": {"swa_layers": [0, 1, 2], "sliding_window": 5},
    "2 lanes": {"num_lanes": 2},
    "8 lanes": EIGHT,
    "8 lanes, delay 3, no early sum": {**EIGHT, "broadcast_delay": 3, "use_early_comm": False},
    "delay 1": {"broadcast_delay": 1},
    "delay 1, no early sum": {"broadcast_delay": 1, "use_early_comm": False},
    "delay 3": {"broadcast_delay": 3},
    "delay beyond the last layer": {"broadcast_delay": 7, "use_early_comm": False},
    "no early sum": {"use_early_comm": False},
    "silent but for the early sum": {"use_comm": False},
    "silent": {"use_comm": False, "use_early_comm": False},
    "only attention talks": {**SPLIT, "use_attention_comm": True, "use_mlp_comm": False},
    "only MLPs talk": {
        **SPLIT, "use_attention_comm": False, "use_mlp_comm": True, "use_early_comm": False,
    },
    "both talk": {**SPLIT, "use_attention_comm": True, "use_mlp_comm": True},
    "vocabulary slices": {"lm_head_type": "vocab_parallel"},
    "lanes side by side": {"lm_head_type": "lane"},
    "sum before norm": {"pre_norm_lane_agg": True},
    "tied": {"tie_word_embeddings": True},
    "tied, sum before norm": {"tie_word_embeddings": True, "pre_norm_lane_agg": True},
    "scales per lane": {"replicated_rmsn_scale": False},
    "scales per lane, vocabulary slices": {
        "replicated_rmsn_scale": False, "lm_head_type": "vocab_parallel", "num_lanes": 2,
    },
    "scales per lane, side by side": {
        "replicated_rmsn_scale": False, "lm_head_type": "lane", "use_early_comm": False,
    },
    "first layers slide": {"sliding_window_n_layers": 2, "sliding_window": 3},
    "last layers slide": {"sliding_window_n_layers": -3, "sliding_window": 4},
    "last layers slide but one": {
        "sliding_window_n_layers": -4, "sliding_window": 4, "unclamped_layers": [2],
    },
    "a window of one": {"swa_layers": [1, 4], "sliding_window": 1},
    "wide heads": {"head_dim": 10},
    "many queries for a key": {"num_lanes": 2, "num_attention_heads": 12, "num_key_value_heads": 2},
    "early name": {"model_type": "laneformer_tp", "multiple_of": 256, "use_flex_attn": True},
}  # fmt: skip


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in {**FIELDS, **changes}.items() if v is not None}


@pytest.mark.few(14)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_equals_the_equations(changes: dict[str, Any], tmp_path: Path) -> None:
    fields = merged(changes)
    stored = random_tensors(fields)
    ids = prompt(23, fields["vocab_size"])
    wanted = LiteralLanes(fields, stored).logits(ids)
    model = load(write(fields, stored, tmp_path))
    for what, chunks in (
        ("one prefill", [23]),
        ("uneven chunks", [2, 10, 1, 10]),
        ("step by step", [1] * 23),
    ):
        assert_close(run(model, ids, chunks, capacity=40), wanted, "literal lanes", what)


@pytest.mark.parametrize("name", ["use_early_comm", "use_comm", "pre_norm_lane_agg"])
def test_each_switch_changes_the_function(name: str, tmp_path: Path) -> None:
    """The comparison above would be worth little if the switches did nothing to these models."""
    stored = random_tensors(FIELDS)
    ids = prompt(5, FIELDS["vocab_size"])
    here = load(write(FIELDS, stored, tmp_path / "a"))
    there = load(write({**FIELDS, name: not FIELDS[name]}, stored, tmp_path / "b"))
    difference = (run(here, ids, [5]) - run(there, ids, [5])).abs().max()
    assert difference > 1e-2


def test_one_lane_is_an_ordinary_decoder_up_to_the_rope_order(tmp_path: Path) -> None:
    """With L = 1 nothing is exchanged, √L is 1, and every head type is the same linear map."""
    fields = merged({"num_lanes": 1, "use_early_comm": False})
    stored = random_tensors(fields)
    ids = prompt(9, fields["vocab_size"])
    seen = run(load(write(fields, stored, tmp_path / "a")), ids, [9])
    for i, kind in enumerate(("vocab_parallel", "lane")):
        head = {
            "vocab_parallel": {"lm_head.weight": stored["lm_head.weight"][None].clone()},
            "lane": {"lm_head.linear.weight": stored["lm_head.weight"]},
        }[kind]
        rest = {k: v for k, v in stored.items() if k != "lm_head.weight"}
        folder = write({**fields, "lm_head_type": kind}, {**rest, **head}, tmp_path / str(i))
        assert_close(run(load(folder), ids, [9]), seen, "chunks", kind)


def test_early_layers_keep_the_lanes_identical(tmp_path: Path) -> None:
    """Where every layer sums at once, all lanes hold one stream: the mean is any of them."""
    fields = merged({"broadcast_delay": 9, "use_early_comm": True, "num_hidden_layers": 2})
    stored = random_tensors(fields)
    model = load(write(fields, stored, tmp_path))
    ids = prompt(4, fields["vocab_size"])
    seen = run(model, ids, [4])
    other = {**fields, "lm_head_type": "vocab_parallel"}
    lanes, vocab = fields["num_lanes"], fields["vocab_size"]
    stored["lm_head.weight"] = stored["lm_head.weight"].reshape(lanes, vocab // lanes, -1)
    sliced = load(write(other, stored, tmp_path / "sliced"))
    assert_close(run(sliced, ids, [4]), seen, "chunks", "vocabulary slices")
    assert torch.isfinite(seen).all()
