"""A dense decoder: embedding, layers of attention and MLP, norm, LM head."""

from collections.abc import Generator

import torch
from torch import Tensor

from soloist.model.config import ModelConfig
from soloist.model.torch_types import Weights
from soloist.reference.blocks import AttentionBlock, MlpBlock, Step, linear, rms_norm
from soloist.reference.device import Reference, layer_weights


class Transformer(Reference):
    """Pre-norm decoder of the dense families (Llama, Mistral, Qwen, SmolLM)."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self._layers: list[tuple[Tensor, AttentionBlock, Tensor, MlpBlock]] = []
        for i, layer in enumerate(config.layers):
            own = layer_weights(weights, i)
            self._layers.append(
                (
                    own["attention_norm"].float(),
                    AttentionBlock(layer.attention, own, self._epsilon, cache_index=i),
                    own["mlp_norm"].float(),
                    MlpBlock(layer.mlp, own),
                )
            )
        self._final_norm = weights.pop("final_norm").float()

    def _cache_shapes(self) -> list[tuple[int, int]]:
        return [(x.attention.num_kv_heads, x.attention.head_dim) for x in self.config.layers]

    def _streams(self, token_ids: Tensor, step: Step) -> Generator[None, None, Tensor]:
        x = torch.empty(
            step.num_tokens, self.config.hidden_size, dtype=torch.float32, device=self.device
        )
        x.copy_(self._embed(token_ids))
        for attention_norm, attention, mlp_norm, mlp in self._layers:
            x.add_(attention(self._normed(x, attention_norm, step), step))
            yield
            x.add_(mlp(self._normed(x, mlp_norm, step), step))
            yield
        return x

    def _logits(self, streams: Tensor, step: Step) -> Tensor:
        h = step.scratch.take("head_normed", self.dtype, *streams.shape)
        rms_norm(streams, self._final_norm, self._epsilon, h, step.scratch)
        out = step.scratch.take("logits", self.dtype, h.shape[0], self.config.vocab_size)
        return linear(h, self._head, None, out).float()
