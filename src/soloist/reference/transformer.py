"""A decoder: embedding, layers of attention and MLP or experts, norm, LM head."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.model.config import Layer, Mixture, ModelConfig
from soloist.model.kv_format import KvFormat
from soloist.model.torch_types import Weights
from soloist.reference.blocks import (
    AttentionBlock,
    MlpBlock,
    Step,
    linear,
    norm_scales,
    rms_norm,
)
from soloist.reference.device import Reference, layer_weights
from soloist.reference.experts import MixtureBlock


@dataclass(frozen=True, slots=True)
class _Part:
    """Attention or MLP of a layer, between its norms; None where there is none."""

    norm: Tensor | None
    block: AttentionBlock | MlpBlock | MixtureBlock
    output_norm: Tensor | None


def _mlp_block(layer: Layer, own: Weights) -> MlpBlock | MixtureBlock:
    if isinstance(layer.mlp, Mixture):
        return MixtureBlock(layer.mlp, own)
    return MlpBlock(layer.mlp, own)


class Transformer(Reference):
    """Decoder of all families without lanes."""

    def __init__(self, config: ModelConfig, weights: Weights, kv: KvFormat | None = None) -> None:
        super().__init__(config, weights, kv)
        self._parts_in_order: list[_Part] = []
        for i, layer in enumerate(config.layers):
            own, rope = layer_weights(weights, i), layer.attention.own_rope or config.rope
            attention = AttentionBlock(
                layer.attention,
                own,
                self._epsilon,
                cache_index=i,
                rope=config.ropes.index(rope),
                norm_offset=config.norm_offset,
            )
            for name, block in (("attention", attention), ("mlp", _mlp_block(layer, own))):
                norms = (own.get(f"{name}_norm"), own.get(f"{name}_output_norm"))
                before, after = (
                    None if norm is None else norm_scales(norm, config.norm_offset)
                    for norm in norms
                )
                self._parts_in_order.append(_Part(before, block, after))
        final = norm_scales(weights.pop("final_norm"), config.norm_offset)
        # What the head multiplies is as many times larger or smaller as logits are to be.
        self._final_norm = final * config.logit_scale

    def _cache_shapes(self) -> list[tuple[int, int]]:
        return [(x.attention.num_kv_heads, x.attention.head_dim) for x in self.config.layers]

    def _streams(self, token_ids: Tensor, step: Step) -> Generator[None, None, Tensor]:
        x = torch.empty(
            step.num_tokens, self.config.hidden_size, dtype=torch.float32, device=self.device
        )
        x.copy_(self._embed(token_ids))
        if self.config.embedding_scale != 1:
            x.mul_(self.config.embedding_scale)
        for part in self._parts_in_order:
            given = part.block(self._taken(x, part.norm, step), step)
            x.add_(self._added(given, part.output_norm, step))
            yield
        return x

    def _taken(self, x: Tensor, norm: Tensor | None, step: Step) -> Tensor:
        """What a block takes of the residual stream [T, H], in the model's dtype."""
        if norm is not None:
            return self._normed(x, norm, step)
        return step.scratch.take("block_input", self.dtype, *x.shape).copy_(x)

    def _added(self, given: Tensor, norm: Tensor | None, step: Step) -> Tensor:
        """What joins the stream of that which a block gives [T, H]."""
        if norm is None:
            return given
        out = step.scratch.take("block_output", torch.float32, *given.shape).copy_(given)
        return rms_norm(out, norm, self._epsilon, out, step.scratch)

    def _logits(self, streams: Tensor, step: Step) -> Tensor:
        h = step.scratch.take("head_normed", self.dtype, *streams.shape)
        rms_norm(streams, self._final_norm, self._epsilon, h, step.scratch)
        out = step.scratch.take("logits", self.dtype, h.shape[0], self.config.vocab_size)
        return linear(h, self._head, None, out, by_rows=step.by_rows).float()
