"""What the dense families share: sizes, rope rules, layer lists and tensor names.

A family file says what is special about it and leaves the rest to the functions here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from soloist.errors import MissingField, WrongType
from soloist.model.config import Attention, Layer, Mlp, ModelConfig
from soloist.model.reading import Fields
from soloist.model.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
    yarn_attention_factor,
)
from soloist.model.tensors import Source, TensorSpec


@dataclass(frozen=True, slots=True)
class Special:
    """What sets one dense family apart.

    Attributes:
        default_theta: rope base where the file names none; None makes the field mandatory.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        qk_norm: RMS norm on query and key heads.
        tied_head: whether the head is the embedding where the file does not say.
        windows: window per layer (None: full attention); empty means full everywhere.
        rope_layers: whether each layer rotates; empty means all do.
    """

    default_theta: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    windows: Sequence[int | None] = field(default_factory=tuple)
    rope_layers: Sequence[bool] = field(default_factory=tuple)


def read_dense(fields: Fields, special: Special) -> ModelConfig:
    """A decoder of identical sizes in every layer: RMS norm, GQA, gated SiLU MLP."""
    for name, wanted in (
        ("hidden_act", "silu"),
        ("partial_rotary_factor", 1.0),
        ("rope_interleaved", False),
        ("is_encoder_decoder", False),
        ("add_cross_attention", False),
        ("pruned_heads", {}),
    ):
        fields.only(name, wanted)
    hidden = fields.integer("hidden_size")
    query_heads, kv_heads, head_dim = read_heads(fields, hidden)
    num_layers = fields.num_layers()
    context = fields.integer("max_position_embeddings")
    rope = read_rope(fields, special.default_theta)
    mlp = Mlp(fields.integer("intermediate_size"), special.mlp_bias)
    windows = special.windows or (None,) * num_layers
    rope_layers = special.rope_layers or (True,) * num_layers
    return ModelConfig(
        family=fields.family,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        context_tokens=extended_context(context, rope.scaling),
        norm_epsilon=fields.number("rms_norm_eps"),
        layers=tuple(
            Layer(
                Attention(
                    query_heads,
                    kv_heads,
                    head_dim,
                    window=window,
                    rope=rotates,
                    qkv_bias=special.qkv_bias,
                    output_bias=special.output_bias,
                    qk_norm=special.qk_norm,
                ),
                mlp,
            )
            for window, rotates in zip(windows, rope_layers, strict=True)
        ),
        rope=rope,
        tied_head=fields.flag("tie_word_embeddings", special.tied_head),
    )


def read_heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """Query heads, KV heads (as many where the file does not say) and head dimension."""
    query_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", query_heads)
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and hidden % query_heads:
        raise MissingField(
            fields.file,
            "head_dim",
            f"a number, since hidden_size {hidden} is not a multiple of {query_heads} heads",
        )
    head_dim = head_dim or hidden // query_heads
    if query_heads % kv_heads:
        raise WrongType(
            fields.file, "num_key_value_heads", kv_heads, f"a divisor of {query_heads} query heads"
        )
    if head_dim % 2:
        raise WrongType(fields.file, "head_dim", head_dim, "an even number (rope rotates pairs)")
    return query_heads, kv_heads, head_dim


def read_rope(fields: Fields, default_theta: float | None) -> Rope:
    """Rope from `rope_parameters` (newer files) or `rope_theta` + `rope_scaling` (older ones).

    Raises:
        ConfigError: no base is given and the family has none, or the rule is not one of
            default, linear, dynamic, llama3 and yarn.
    """
    theta = fields.number("rope_theta", None, above=1.0)
    if "rope_parameters" in fields and "rope_scaling" in fields:
        raise fields.unsupported("rope_scaling", "given beside rope_parameters", "one of the two")
    rules = fields.group("rope_parameters") or fields.group("rope_scaling")
    if rules is None:
        if theta is None and default_theta is None:
            raise MissingField(fields.file, "rope_theta", "a number greater than 1")
        return Rope(theta or default_theta or 0.0)
    inner = rules.number("rope_theta", theta or default_theta, above=1.0)
    if inner is None:
        raise MissingField(fields.file, "rope_theta", "a number greater than 1")
    if theta is not None and inner != theta:
        raise rules.unsupported("rope_theta", inner, f"{theta:g}, the value outside this object")
    kinds = tuple(_SCALINGS)
    legacy = rules.choice("type", kinds, None)
    kind = rules.choice("rope_type", kinds, legacy or "default")
    if legacy is not None and kind != legacy:
        raise rules.unsupported("type", legacy, f"{kind}, as rope_type says")
    rules.only("partial_rotary_factor", 1.0)
    scaling = _SCALINGS[kind](rules)
    rules.refuse_rest(frozenset(), {})
    return Rope(inner, scaling)


def layer_windows(fields: Fields, default_kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Window of each layer from `layer_types`, `sliding_window` and `use_sliding_window`.

    Args:
        fields: the configuration.
        default_kinds: kind of each layer where the file has no `layer_types`.
    """
    used = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window", None)
    kinds = fields.texts(
        "layer_types", len(default_kinds), ("full_attention", "sliding_attention")
    ) or list(default_kinds)
    if not used or window is None:
        if used and "sliding_attention" in kinds:
            raise MissingField(fields.file, "sliding_window", "a whole number of at least 1")
        if "sliding_attention" in kinds:
            raise fields.unsupported(
                "layer_types", "sliding_attention", "full_attention while use_sliding_window is off"
            )
        return (None,) * len(kinds)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def extended_context(context: int, scaling: Scaling | None) -> int:
    """Positions after scaling: YaRN files state the original context and a factor."""
    if isinstance(scaling, YarnScaling):
        return max(context, int(scaling.original_context_tokens * scaling.factor))
    return context


def decoder_tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Tensors under the names that the Hugging Face decoders share."""
    hidden, vocab = config.hidden_size, config.vocab_size
    # Some conversions of tied models store the matrix under both names.
    copies = ("lm_head.weight",) if config.tied_head else ()
    embedding = Source("model.embed_tokens.weight", (vocab, hidden))
    specs = [TensorSpec("embedding", (embedding,), copies=copies)]
    for i, layer in enumerate(config.layers):
        specs += _attention_tensors(f"model.layers.{i}.", f"layers.{i}.", layer.attention, hidden)
        specs += _mlp_tensors(f"model.layers.{i}.", f"layers.{i}.", layer.mlp, hidden)
    specs.append(_one("final_norm", "model.norm.weight", hidden))
    if not config.tied_head:
        specs.append(_one("head", "lm_head.weight", vocab, hidden))
    return tuple(specs)


def _attention_tensors(theirs: str, ours: str, a: Attention, hidden: int) -> list[TensorSpec]:
    rows = {"q": a.num_query_heads, "k": a.num_kv_heads, "v": a.num_kv_heads}
    rows = {name: heads * a.head_dim for name, heads in rows.items()}
    attn = f"{theirs}self_attn."
    specs = [
        _one(f"{ours}attention_norm", f"{theirs}input_layernorm.weight", hidden),
        TensorSpec(
            f"{ours}qkv",
            tuple(Source(f"{attn}{n}_proj.weight", (r, hidden)) for n, r in rows.items()),
        ),
        _one(f"{ours}attention_output", f"{attn}o_proj.weight", hidden, rows["q"]),
    ]
    if a.qkv_bias:
        sources = tuple(Source(f"{attn}{n}_proj.bias", (r,)) for n, r in rows.items())
        specs.append(TensorSpec(f"{ours}qkv_bias", sources))
    if a.output_bias:
        specs.append(_one(f"{ours}attention_output_bias", f"{attn}o_proj.bias", hidden))
    if a.qk_norm:
        specs.append(_one(f"{ours}q_norm", f"{attn}q_norm.weight", a.head_dim))
        specs.append(_one(f"{ours}k_norm", f"{attn}k_norm.weight", a.head_dim))
    return specs


def _mlp_tensors(theirs: str, ours: str, mlp: Mlp, hidden: int) -> list[TensorSpec]:
    ffn = mlp.intermediate_size
    specs = [
        _one(f"{ours}mlp_norm", f"{theirs}post_attention_layernorm.weight", hidden),
        TensorSpec(
            f"{ours}gate_up",
            tuple(Source(f"{theirs}mlp.{n}_proj.weight", (ffn, hidden)) for n in ("gate", "up")),
        ),
        _one(f"{ours}down", f"{theirs}mlp.down_proj.weight", hidden, ffn),
    ]
    if mlp.bias:
        sources = tuple(Source(f"{theirs}mlp.{n}_proj.bias", (ffn,)) for n in ("gate", "up"))
        specs.append(TensorSpec(f"{ours}gate_up_bias", sources))
        specs.append(_one(f"{ours}down_bias", f"{theirs}mlp.down_proj.bias", hidden))
    return specs


def _one(ours: str, theirs: str, *shape: int) -> TensorSpec:
    return TensorSpec(ours, (Source(theirs, shape),))


def _default(rules: Fields) -> None:
    # transformers writes a factor of 1 beside the default rule; any other would be ignored there.
    rules.only("factor", 1.0)


def _linear(rules: Fields) -> LinearScaling:
    return LinearScaling(rules.number("factor"))


def _dynamic(rules: Fields) -> None:
    # A larger base for texts beyond max_position_embeddings, and the plain one up to there, where
    # every context ends.
    rules.number("factor")


def _llama3(rules: Fields) -> Llama3Scaling:
    low = rules.number("low_freq_factor")
    return Llama3Scaling(
        factor=rules.number("factor"),
        low_freq_factor=low,
        high_freq_factor=rules.number("high_freq_factor", above=low),
        original_context_tokens=rules.integer("original_max_position_embeddings"),
    )


def _yarn(rules: Fields) -> YarnScaling:
    factor = rules.number("factor")
    mscale, mscale_all = _mscale(rules, "mscale"), _mscale(rules, "mscale_all_dim")
    if mscale and mscale_all:
        recommended = yarn_attention_factor(factor, mscale) / yarn_attention_factor(
            factor, mscale_all
        )
    else:
        recommended = yarn_attention_factor(factor)
    return YarnScaling(
        factor=factor,
        original_context_tokens=rules.integer("original_max_position_embeddings"),
        beta_fast=rules.number("beta_fast", 32.0, above=1e-3),
        beta_slow=rules.number("beta_slow", 1.0, above=1e-3),
        attention_factor=rules.number("attention_factor", recommended),
        truncate=rules.flag("truncate", default=True),
    )


def _mscale(rules: Fields, name: str) -> float | None:
    """A factor of YaRN's temperature; 0 is how files say that they have none."""
    value = rules.value(name)
    is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
    return None if is_zero else rules.number(name, None)


_SCALINGS = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip
