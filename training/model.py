"""Qwen3 for training, in PyTorch: the names and the arithmetic of transformers' Qwen3ForCausalLM.

Shapes: B windows, T tokens, H hidden, Q query heads, K KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The fields of config.json that this module reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float

    @classmethod
    def read(cls, path: Path) -> Shape:
        """Take the fields from a config.json."""
        config = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{field.name: config[field.name] for field in fields(cls)})


def rotary_table(shape: Shape, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [T, D] f32."""
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(
        torch.arange(num_tokens, device=device, dtype=torch.float32), shape.rope_theta**-steps
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [B, heads, T, D]."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Norm(nn.Module):
    """RMS norm, computed in f32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale the last dimension to unit mean square, times the weight."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, H] to [B, T, H]."""
        num_windows, num_tokens, _ = x.shape
        heads = (num_windows, num_tokens, -1, self.head_dim)
        q = rotate(
            self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin
        )  # [B, Q, T, D]
        k = rotate(
            self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin
        )  # [B, K, T, D]
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(num_windows, num_tokens, -1))


class FeedForward(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, H] to [B, T, H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each added to the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, H] to [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """What transformers nests under "model"."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """Causal language model with tied embeddings; its state dict is the checkpoint layout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=shape.initializer_range)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    # A layer adds twice to the residual; this keeps its variance flat at first.
                    weight.data.mul_((2 * shape.num_hidden_layers) ** -0.5)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Logits [B, T, V] of ids [B, T]; the tables are rotary_table's for at least T tokens."""
        num_tokens = ids.shape[1]
        x = functional.embedding(ids, self.model.embed_tokens.weight)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        for layer in self.model.layers:
            x = layer(x, cos[:num_tokens], sin[:num_tokens])
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, windows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mean cross-entropy in nats of the last T tokens of windows [B, T + 1]."""
        logits = self(windows[:, :-1], cos, sin)
        return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
