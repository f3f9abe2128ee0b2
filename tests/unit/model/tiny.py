"""A tiny checkpoint for tests about files, written without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from soloist.model.config import ModelConfig
from soloist.model.families import read_config, tensors
from soloist.model.tensors import TensorSpec
from unit.model.configurations import LLAMA_32_1B, changed

FIELDS = changed(
    LLAMA_32_1B,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=31,
    max_position_embeddings=256,
    rope_scaling=None,
    tie_word_embeddings=False,
)


def described(folder: Path, **changes: Any) -> tuple[ModelConfig, tuple[TensorSpec, ...]]:
    """Write config.json and read it back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(changed(FIELDS, **changes)))
    config = read_config(folder / "config.json")
    return config, tensors(config)


def random_tensors(specs: tuple[TensorSpec, ...], seed: int = 0) -> dict[str, Tensor]:
    """What a checkpoint of `specs` holds."""
    generator = torch.Generator().manual_seed(seed)
    return {
        source.name: torch.randn(source.shape, generator=generator)
        for spec in specs
        for source in spec.sources
    }


def write_single(folder: Path, stored: dict[str, Tensor]) -> Path:
    """One file."""
    save_file(stored, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_shards(folder: Path, stored: dict[str, Tensor], count: int = 3) -> list[Path]:
    """Several files and their index."""
    files = [folder / f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    names = sorted(stored)
    weight_map = {}
    for i, file in enumerate(files):
        own = names[i::count]
        save_file({name: stored[name] for name in own}, file)
        weight_map.update(dict.fromkeys(own, file.name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files
