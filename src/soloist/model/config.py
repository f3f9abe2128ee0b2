"""What a model is: frozen facts that decide its function and its size.

Knows neither files nor torch. Letters used for sizes everywhere: T tokens, H hidden, Q query heads,
K KV heads, D head dimension, F FFN neurons, V vocabulary, L lanes.
"""

from dataclasses import dataclass, replace
from typing import Literal

from soloist.model.rope import Rope

HeadKind = Literal["replicate", "vocab_parallel", "lane"]
Activation = Literal["silu", "gelu_tanh"]
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's grouped-query attention.

    Attributes:
        num_query_heads: Q.
        num_kv_heads: K; query head q reads KV head q // (Q / K).
        head_dim: D.
        window: how many of the latest keys a token sees, itself included; None means all.
        rope: whether queries and keys are rotated by position.
        qkv_bias: biases on the q, k and v projections.
        output_bias: bias on the output projection.
        qk_norm: RMS norm over D of every query and key head, before rope.
        qk_norm_joins_heads: that norm is one over all query heads and one over all key heads, with
            scales [Q · D] and [K · D].
        own_scale: what scores are multiplied by; None: D ** -0.5.
        own_rope: rotates in place of the model's rope; None: the model's does.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    rope: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_joins_heads: bool = False
    own_scale: float | None = None
    own_rope: Rope | None = None

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.own_scale is None else self.own_scale

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
    """One layer's gated MLP: down(activation(gate(x)) * up(x)).

    Attributes:
        intermediate_size: F.
        bias: biases on gate, up and down.
        activation: of the gate: SiLU, or GELU in its approximation by tanh.
    """

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class Router:
    """How a token chooses experts, and what their results are multiplied by.

    Logits are a product with a matrix [E, H], in fp32 as all that follows. Scores are made of them
    and rank the experts; of equal ones the lower index comes first. The results of the chosen
    experts are multiplied by their scores and added in the order of experts.

    Attributes:
        num_experts: E.
        num_chosen: experts of each token.
        scores: a softmax over all logits, or the sigmoid of each.
        is_corrected: for the choice alone, each expert has a number that is added to its score.
        num_groups: experts lie in so many groups of consecutive ones.
        num_groups_kept: only the experts of so many groups can be chosen. A group ranks by the sum
            of its two highest (corrected) scores.
        normalises: the scores of the chosen are divided by their sum.
        least_sum: is added to that sum.
        scale: what scores are multiplied by at last.
    """

    num_experts: int
    num_chosen: int
    scores: Scores = "softmax"
    is_corrected: bool = False
    num_groups: int = 1
    num_groups_kept: int = 1
    normalises: bool = False
    least_sum: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """One layer's mixture of experts, in the place of an MLP.

    Attributes:
        router: chooses.
        expert: each of the experts.
        shared: an MLP that every token takes beside them; None: there is none.
        gates_shared: its result is multiplied by the sigmoid of a product with one row more.
    """

    router: Router
    expert: Mlp
    shared: Mlp | None = None
    gates_shared: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer; the kinds may differ from layer to layer.

    Attributes:
        attention: its attention.
        mlp: its MLP, or a mixture of experts.
        norms_inputs: RMS norms on what attention and MLP take.
        norms_outputs: RMS norms on what they give, before it joins the residual stream.
    """

    attention: Attention
    mlp: Mlp | Mixture
    norms_inputs: bool = True
    norms_outputs: bool = False

    @property
    def dense_mlp(self) -> Mlp:
        """The MLP of a layer of which the caller knows that it has no experts."""
        assert isinstance(self.mlp, Mlp), "models with experts were refused"
        return self.mlp

    @property
    def router(self) -> Router | None:
        """Of a layer that has experts."""
        return self.mlp.router if isinstance(self.mlp, Mixture) else None

    @property
    def common_mlp(self) -> Mlp | None:
        """The MLP that every token takes: the layer's, or one beside its experts, if there is."""
        return self.mlp if isinstance(self.mlp, Mlp) else self.mlp.shared

    @property
    def gates_shared(self) -> bool:
        """An MLP beside experts has a gate."""
        return isinstance(self.mlp, Mixture) and self.mlp.gates_shared

    @property
    def each_mlp(self) -> Mlp:
        """The MLP, or what each of the experts is."""
        return self.mlp if isinstance(self.mlp, Mlp) else self.mlp.expert


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
        rope: rotary embedding, shared by the layers that use it and have none of their own.
        tied_head: the LM head is the embedding matrix.
        lanes: delayed tensor parallelism, or None for an ordinary transformer.
        norm_offset: added to the scales of every RMS norm, which are stored without it.
        embedding_scale: what embeddings are multiplied by.
        logit_scale: what logits are multiplied by.
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
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0

    def for_context(self, context_tokens: int) -> "ModelConfig":
        """The model in contexts of so many tokens: rope rules may depend on their length."""

        def adapted(layer: Layer) -> Layer:
            own = layer.attention.own_rope
            if own is None:
                return layer
            own = own.for_context(context_tokens)
            return replace(layer, attention=replace(layer.attention, own_rope=own))

        rope, layers = self.rope.for_context(context_tokens), tuple(map(adapted, self.layers))
        return replace(self, rope=rope, layers=layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Each kind of rope once: the model's, and those that layers have of their own."""
        own = (layer.attention.own_rope for layer in self.layers)
        return tuple(dict.fromkeys((self.rope, *(rope for rope in own if rope is not None))))

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return len(self.layers)

    @property
    def mixtures(self) -> tuple[Mixture, ...]:
        """Of all layers that have experts."""
        return tuple(x.mlp for x in self.layers if isinstance(x.mlp, Mixture))

    @property
    def num_chosen(self) -> int:
        """Experts that a token takes in a layer; 0 where no layer has any."""
        return max((mixture.router.num_chosen for mixture in self.mixtures), default=0)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache gains with every token, over all layers."""
        return sum(2 * a.num_kv_heads * a.head_dim for a in (x.attention for x in self.layers))
