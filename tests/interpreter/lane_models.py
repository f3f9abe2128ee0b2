"""Tiny Laneformers of eight lanes, one for each rule, and their plans."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpreter.models import CONTEXT, gpu
from reference.lanes import FIELDS
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from unit.model.configurations import written

EIGHT: dict[str, Any] = {
    **FIELDS, "num_lanes": 8, "hidden_size": 72, "num_attention_heads": 16, "head_dim": 32,
    "num_key_value_heads": 8, "intermediate_size": 192, "vocab_size": 203,
    "max_position_embeddings": CONTEXT, "num_hidden_layers": 5, "broadcast_delay": 2,
}  # fmt: skip
SPLIT = {"use_comm": None}

CASES: dict[str, dict[str, Any]] = {
    "mean of lanes": {"swa_layers": [0, 1, 3], "sliding_window": 20},
    "delay 1": {"broadcast_delay": 1, "use_early_comm": False},
    "delay 3, two queries a key": {"broadcast_delay": 3, "num_attention_heads": 32},
    "delay beyond the last layer": {"broadcast_delay": 7, "num_hidden_layers": 3},
    "seven layers": {"num_hidden_layers": 7},
    "no early sum": {"use_early_comm": False},
    "seven layers, no early sum": {"num_hidden_layers": 7, "use_early_comm": False},
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
    "wide": {"hidden_size": 520, "intermediate_size": 8 * 72, "num_hidden_layers": 3},
}  # fmt: skip


def fields_of(name: str) -> dict[str, Any]:
    return {k: v for k, v in {**EIGHT, **CASES[name]}.items() if v is not None}


def configured(
    name: str, folder: Path, ranks: int, blocks: int = 3
) -> tuple[ModelConfig, Plan, dict[str, Tensor]]:
    """The model as its family reads it, its plan, and random weights."""
    config = read_config(written(folder, fields_of(name)))
    plan = make_plan(config, Dtype.BF16, gpu(blocks * 8 // ranks), ranks)
    assert (plan.blocks, plan.shape.lanes_here * ranks) == (blocks, 8)
    return config, plan, random_weights(config)


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
