"""A decoder with delayed tensor parallelism: L residual streams that hear each other late.

Every lane owns its share of heads and neurons and its own residual stream. In layer i ≥ d a lane
adds its own partial result at once and the other lanes' partials of layer i - d; below d it either
adds the sum over all lanes (`early_sum`) or its own partial times √L. At the end the lanes meet.
Source: Kog's description of Laneformer and delayed tensor parallelism (May 2026).
"""

import math
from collections import deque
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from soloist.model.config import Lanes, Mlp, ModelConfig
from soloist.model.kv_format import KvFormat
from soloist.model.torch_types import Weights
from soloist.reference.blocks import AttentionBlock, MlpBlock, Step, linear, rms_norm
from soloist.reference.device import Reference, layer_weights

_LANE_TENSORS = ("qkv", "attention_output", "gate_up", "down")


class DelayLine:
    """The partial results of one kind of module, on their way to the other lanes.

    Args:
        lanes: the rules.
        communicates: whether this kind of module is heard by other lanes at all.
    """

    def __init__(self, lanes: Lanes, *, communicates: bool) -> None:
        self._lanes = lanes
        self._communicates = communicates
        # What is under way: the last `delay_layers` layers, the oldest first.
        self._sent: deque[Tensor] = deque(maxlen=lanes.delay_layers)

    def reduce(self, partials: Tensor, layer: int) -> Tensor:
        """What each lane adds to its stream in `layer`, given all own partials [L, T, H] fp32."""
        past = self._sent[0] if layer >= self._lanes.delay_layers else None
        self._sent.append(partials)
        if past is None and self._lanes.early_sum:
            return partials.sum(0, keepdim=True).expand_as(partials)
        if past is None or not self._communicates:
            return partials * math.sqrt(self._lanes.num_lanes)
        return partials + (past.sum(0, keepdim=True) - past)


class LaneTransformer(Reference):
    """Laneformer on one device, lane by lane."""

    def __init__(self, config: ModelConfig, weights: Weights, kv: KvFormat | None = None) -> None:
        super().__init__(config, weights, kv)
        assert config.lanes is not None, "build_reference chose this class for its lanes"
        self._lanes = config.lanes
        self._norms: list[tuple[Tensor, Tensor]] = []
        self._blocks: list[list[tuple[AttentionBlock, MlpBlock]]] = []
        for i in range(config.num_layers):
            own = layer_weights(weights, i)
            self._norms.append((self._scales(own["attention_norm"]), self._scales(own["mlp_norm"])))
            self._blocks.append(
                [self._lane_blocks(own, i, j) for j in range(self._lanes.num_lanes)]
            )
        self._final_norm = self._scales(weights.pop("final_norm"))

    def _lane_blocks(self, own: Weights, layer: int, lane: int) -> tuple[AttentionBlock, MlpBlock]:
        num = self._lanes.num_lanes
        whole = self.config.layers[layer]
        attention = replace(
            whole.attention,
            num_query_heads=whole.attention.num_query_heads // num,
            num_kv_heads=whole.attention.num_kv_heads // num,
        )
        share = {name: own[name][lane] for name in _LANE_TENSORS}
        return (
            AttentionBlock(attention, share, self._epsilon, cache_index=layer * num + lane),
            MlpBlock(Mlp(whole.dense_mlp.intermediate_size // num), share),
        )

    def _scales(self, weight: Tensor) -> Tensor:
        """Norm scales broadcastable over [L, T, H]."""
        return weight.float() if self._lanes.shared_norm_scales else weight.float()[:, None]

    def _cache_shapes(self) -> list[tuple[int, int]]:
        return [
            (lane[0].attention.num_kv_heads, lane[0].attention.head_dim)
            for layer in self._blocks
            for lane in layer
        ]

    def _streams(self, token_ids: Tensor, step: Step) -> Generator[None, None, Tensor]:
        lanes = self._lanes
        x = self._embed(token_ids).float().repeat(lanes.num_lanes, 1, 1)
        attention_line = DelayLine(lanes, communicates=lanes.attention_comm)
        mlp_line = DelayLine(lanes, communicates=lanes.mlp_comm)
        for i, (attention_norm, mlp_norm) in enumerate(self._norms):
            h = self._normed(x, attention_norm, step)
            partials = [b[0](h[j], step).float().clone() for j, b in enumerate(self._blocks[i])]
            x += attention_line.reduce(torch.stack(partials), i)
            yield
            h = self._normed(x, mlp_norm, step)
            partials = [b[1](h[j], step).float().clone() for j, b in enumerate(self._blocks[i])]
            x += mlp_line.reduce(torch.stack(partials), i)
            yield
        return x

    def _logits(self, streams: Tensor, step: Step) -> Tensor:
        """Where the lanes meet: see `Lanes.head` and `Lanes.sum_before_norm`."""
        lanes, scratch = self._lanes, step.scratch
        if lanes.sum_before_norm:
            streams = streams.sum(0, keepdim=True)
        h = torch.empty_like(streams)
        rms_norm(streams, self._final_norm, self._epsilon, h, scratch)
        out = scratch.take("logits", self.dtype, h.shape[1], self.config.vocab_size)
        match lanes.head:
            case "replicate":
                return linear(h.mean(0).to(self.dtype), self._head, None, out).float()
            case "vocab_parallel":
                share = self.config.vocab_size // lanes.num_lanes
                for j, own in enumerate(h.to(self.dtype)):
                    linear(own, self._head[j], None, out[:, j * share : (j + 1) * share])
                return out.float()
            case "lane":
                joined = h.transpose(0, 1).flatten(1).to(self.dtype)  # [T, L · H]
                return linear(joined, self._head, None, out).float()
