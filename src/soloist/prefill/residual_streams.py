"""Residual streams of a rank, and what they ask of products, buffers and kernels. Pure.

With the kind of `Communicator` this is all in which kinds of models differ for prefill.
"""

from dataclasses import dataclass

from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype


@dataclass(frozen=True, slots=True)
class ResidualStreams:
    """Defaults are those of a model with one stream, which every module's result joins at once.

    Attributes:
        count: streams side by side, each with as many of the rank's heads and neurons.
        ring_modules: attentions and MLPs whose results a pass needs at once, in a ring; 0 where
            results lie in buffers.
        widens_fp16: products of FP16 matrices that join a stream or become heads are fp32: FP16
            ends at 65,504, which single products of real models exceed. BF16 does not, and half
            the bytes are what matters between products.
        fuses_gate_up: gate_up and SwiGLU may be one kernel.
        padded: products that can have more rows than a pass: their factors lie in buffers, with
            more rows behind those of a pass.
        leaves_queries: the last layer's keys and values may be multiplied without the queries.
    """

    count: int = 1
    ring_modules: int = 0
    widens_fp16: bool = True
    fuses_gate_up: bool = True
    padded: tuple[str, ...] = ("qkv", "attention_output", "gate_up", "down")
    leaves_queries: bool = True

    def wide_products(self, dtype: Dtype) -> bool:
        """Whether products that join a stream or become heads are fp32."""
        return self.widens_fp16 and dtype is Dtype.FP16


def residual_streams_of(config: ModelConfig) -> ResidualStreams:
    """The streams of a rank that has these sizes (`share_of`, `lanes_of_ranks`)."""
    lanes = config.lanes
    if lanes is None:
        return ResidualStreams()
    talks = lanes.attention_comm or lanes.mlp_comm
    modules = min(2 * lanes.delay_layers + 1, 2 * config.num_layers) if talks else 1
    return ResidualStreams(
        lanes.num_lanes, modules, widens_fp16=False, fuses_gate_up=False,
        padded=(),  # a lane's rows are followed by the next lane's
        leaves_queries=False,
    )  # fmt: skip
