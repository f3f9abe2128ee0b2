"""What a model is: frozen facts that decide its function and its size.

Knows neither files nor torch. Letters used for sizes everywhere: T tokens, H hidden, Q query heads,
K KV heads, D head dimension, F FFN neurons, V vocabulary, L lanes.
"""

from dataclasses import dataclass
from typing import Literal

from soloist.model.rope import Rope

HeadKind = Literal["replicate", "vocab_parallel", "lane"]


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's grouped-query attention.

    Attributes:
        num_query_heads: Q.
        num_kv_heads: K; query head q reads KV head q // (Q / K).
        head_dim: D; scores are scaled by D ** -0.5.
        window: how many of the latest keys a token sees, itself included; None means all.
        rope: whether queries and keys are rotated by position.
        qkv_bias: biases on the q, k and v projections.
        output_bias: bias on the output projection.
        qk_norm: RMS norm over D of every query and key head, before rope.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    rope: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head (Q / K)."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q, k, v projection: (Q + 2 K) · D."""
        return (self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Mlp:
    """One layer's gated MLP: down(silu(gate(x)) * up(x)).

    Attributes:
        intermediate_size: F.
        bias: biases on gate, up and down.
    """

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer; the kinds may differ from layer to layer."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Lanes:
    """Delayed tensor parallelism: L residual streams that hear each other late.

    See `reference/laneformer.py` for what the fields mean to the forward pass.

    Attributes:
        num_lanes: L.
        delay_layers: after how many layers a lane's partial result reaches the other lanes.
        early_sum: the first `delay_layers` layers sum over all lanes at once.
        attention_comm: attention partials reach the other lanes at all.
        mlp_comm: MLP partials reach the other lanes at all.
        shared_norm_scales: one norm scale for all lanes instead of one per lane.
        head: how the lanes meet at the end.
        sum_before_norm: sum the lanes before the final norm (only with head 'replicate').
    """

    num_lanes: int
    delay_layers: int
    early_sum: bool
    attention_comm: bool
    mlp_comm: bool
    shared_norm_scales: bool
    head: HeadKind
    sum_before_norm: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only language model.

    Attributes:
        family: the `model_type` it was read from.
        hidden_size: H.
        vocab_size: V.
        context_tokens: positions the model was made for.
        norm_epsilon: added to the mean square in every RMS norm.
        layers: one entry per layer.
        rope: rotary embedding, shared by the layers that use it.
        tied_head: the LM head is the embedding matrix.
        lanes: delayed tensor parallelism, or None for an ordinary transformer.
    """

    family: str
    hidden_size: int
    vocab_size: int
    context_tokens: int
    norm_epsilon: float
    layers: tuple[Layer, ...]
    rope: Rope
    tied_head: bool
    lanes: Lanes | None = None

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return len(self.layers)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache gains with every token, over all layers."""
        return sum(2 * a.num_kv_heads * a.head_dim for a in (x.attention for x in self.layers))
