"""Tiny random dense models, by configuration alone."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from soloist.model.config import Attention, Layer, Mlp, ModelConfig
from soloist.model.families.dense import decoder_tensors
from soloist.model.rope import Rope

GQA = Attention(6, 2, 8)
SWIZZLED = Attention(4, 2, 64)


def model(*layers: Attention, mlp_bias: bool = False, ffn: int = 40, **changes: Any) -> ModelConfig:
    """A model of these attention layers."""
    values: dict[str, Any] = {
        "family": "llama",
        "hidden_size": 32,
        "vocab_size": 61,
        "context_tokens": 512,
        "norm_epsilon": 1e-5,
        "layers": tuple(Layer(a, Mlp(ffn, mlp_bias)) for a in layers),
        "rope": Rope(1000.0),
        "tied_head": False,
    }
    return ModelConfig(**{**values, **changes})


MODELS = {
    "mha": model(*[Attention(3, 3, 8)] * 3),
    "gqa-tied": model(*[GQA] * 2, tied_head=True),
    "biases": model(*[replace(GQA, qkv_bias=True, output_bias=True)] * 2, mlp_bias=True),
    "qwen2": model(*[replace(GQA, head_dim=16, qkv_bias=True)] * 2, tied_head=True),
    "qwen3": model(*[replace(SWIZZLED, qk_norm=True)] * 2),
    "windows": model(GQA, replace(GQA, window=16), replace(GQA, window=1)),
    "wide-window": model(replace(GQA, window=100), replace(GQA, window=65)),
    "nope": model(GQA, replace(GQA, rope=False), replace(GQA, window=70, rope=False)),
    "mixed": replace(
        model(*[GQA] * 3),
        layers=(
            Layer(GQA, Mlp(40)),
            Layer(replace(GQA, qkv_bias=True, window=16), Mlp(72, bias=True)),
            Layer(replace(GQA, output_bias=True, rope=False), Mlp(40)),
        ),
    ),
    "head-128": model(*[Attention(2, 1, 128, qk_norm=True, qkv_bias=True)] * 2),
}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor random: biases away from 0, norm scales away from 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in decoder_tensors(config):
        values = torch.randn(spec.shape, generator=generator)
        if spec.name.endswith("norm"):
            values = 1 + 0.3 * values
        elif spec.name.endswith("bias"):
            values *= 0.5
        elif spec.name != "embedding" or config.tied_head:
            values *= spec.shape[-1] ** -0.5
        weights[spec.name] = values
    return weights


def vectors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norm scales, biases and routers in fp32."""
    return {
        name: values.float()
        for name, values in weights.items()
        if values.ndim == 1 or name.endswith(("router", "shared_gate"))
    }


def matrices(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Everything else."""
    return {name: values.to(dtype) for name, values in weights.items() if values.ndim == 2}
