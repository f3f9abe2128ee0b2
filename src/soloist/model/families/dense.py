"""What the dense families share: sizes, rope rules, layer lists and tensor names.

A family file says what is special about it and leaves the rest to the functions here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from soloist.errors import MissingField, WrongType
from soloist.model.config import Activation, Attention, Layer, Mixture, Mlp, ModelConfig
from soloist.model.expert_files import USUAL, ExpertNames
from soloist.model.families.mixture import mixture_tensors
from soloist.model.reading import Fields
from soloist.model.rope import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    Scaling,
    YarnScaling,
    long_attention_factor,
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
        rotary_share: of a head that rotates, where the file does not say; None: always all of it.
        rope_interleaved: rope turns neighbours.
        rope: already read; None: from the fields that most families have.
        own_ropes: rope per layer, as of `Attention`; empty means the model's everywhere.
        qk_norm_joins_heads, own_scale: as of `Attention`.
        activation: as of `Mlp`.
        norms_inputs, norms_outputs: as of `Layer`.
        mlps: of each layer; empty means a dense MLP of `intermediate_size` everywhere.
    """

    default_theta: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    windows: Sequence[int | None] = field(default_factory=tuple)
    rope_layers: Sequence[bool] = field(default_factory=tuple)
    rotary_share: float | None = None
    rope_interleaved: bool = False
    rope: Rope | None = None
    own_ropes: Sequence[Rope | None] = field(default_factory=tuple)
    qk_norm_joins_heads: bool = False
    own_scale: float | None = None
    activation: Activation = "silu"
    norms_inputs: bool = True
    norms_outputs: bool = False
    mlps: Sequence[Mlp | Mixture] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls its tensors.

    Attributes:
        root: before the names of all but the LM head.
        head: the LM head.
        fused_qkv: q, k and v are one tensor.
        fused_gate_up: gate and up are one.
        attention_norm, attention_output_norm, mlp_norm, mlp_output_norm: norms of a layer; which of
            them there are, the configuration says.
        experts: of layers with experts.
    """

    root: str = "model."
    head: str = "lm_head.weight"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    attention_norm: str = "input_layernorm"
    attention_output_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    experts: ExpertNames = USUAL


LLAMA_NAMES = Names()


def read_dense(fields: Fields, special: Special) -> ModelConfig:
    """A decoder of identical sizes in every layer: RMS norms, GQA, gated MLP."""
    for name, wanted in (
        ("hidden_act", "silu"),
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
    rope = special.rope or read_rope(
        fields,
        special.default_theta,
        head_dim,
        share=special.rotary_share,
        interleaved=special.rope_interleaved,
    )
    mlps = special.mlps or [read_mlp(fields, special)] * num_layers
    windows = special.windows or (None,) * num_layers
    rope_layers = special.rope_layers or (True,) * num_layers
    own_ropes = special.own_ropes or (None,) * num_layers
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
                    qk_norm_joins_heads=special.qk_norm_joins_heads,
                    own_scale=special.own_scale,
                    own_rope=own_rope,
                ),
                mlp,
                special.norms_inputs,
                special.norms_outputs,
            )
            for window, rotates, own_rope, mlp in zip(
                windows, rope_layers, own_ropes, mlps, strict=True
            )
        ),
        rope=rope,
        tied_head=fields.flag("tie_word_embeddings", special.tied_head),
    )


def read_mlp(fields: Fields, special: Special) -> Mlp:
    """The MLP of layers without experts."""
    return Mlp(fields.integer("intermediate_size"), special.mlp_bias, special.activation)


def read_heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """Query heads, KV heads (as many where the file does not say) and head dimension."""
    query_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", query_heads)
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and hidden % query_heads:
        raise MissingField(
            fields.file,
            fields.path("head_dim"),
            f"a number, since hidden_size {hidden} is not a multiple of {query_heads} heads",
        )
    head_dim = head_dim or hidden // query_heads
    if query_heads % kv_heads:
        raise WrongType(
            fields.file,
            fields.path("num_key_value_heads"),
            kv_heads,
            f"a divisor of {query_heads} query heads",
        )
    if head_dim % 2:
        raise WrongType(
            fields.file, fields.path("head_dim"), head_dim, "an even number (rope rotates pairs)"
        )
    return query_heads, kv_heads, head_dim


def read_rope(
    fields: Fields,
    default_theta: float | None,
    head_dim: int,
    *,
    share: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """Rope from `rope_parameters` (newer files) or `rope_theta` + `rope_scaling` (older ones).

    Args:
        fields: the configuration.
        default_theta: base where the file names none; None makes it mandatory.
        head_dim: D.
        share: of a head that rotates where the file does not say; None: the family rotates all.
        interleaved: the family turns neighbours.

    Raises:
        ConfigError: no base is given and the family has none, the rule is not one of default,
            linear, dynamic, llama3, yarn and longrope, or it does not fit the heads.
    """
    theta = fields.number("rope_theta", None, above=1.0)
    if "rope_parameters" in fields and "rope_scaling" in fields:
        raise fields.unsupported("rope_scaling", "given beside rope_parameters", "one of the two")
    rules = fields.group("rope_parameters") or fields.group("rope_scaling")
    share = _rotary_share(fields, rules, head_dim, share)
    if rules is None:
        if theta is None and default_theta is None:
            raise MissingField(fields.file, fields.path("rope_theta"), "a number greater than 1")
        return Rope(theta or default_theta or 0.0, None, interleaved, share)
    inner = rules.number("rope_theta", theta or default_theta, above=1.0)
    if inner is None:
        raise MissingField(fields.file, fields.path("rope_theta"), "a number greater than 1")
    if theta is not None and inner != theta:
        raise rules.unsupported("rope_theta", inner, f"{theta:g}, the value outside this object")
    scaling = read_scaling(rules, fields, Rope(inner, share=share).rotated_dims(head_dim))
    return Rope(inner, scaling, interleaved, share)


def _rotary_share(
    fields: Fields, rules: Fields | None, head_dim: int, default: float | None
) -> float:
    """The share of a head that rotates, in `rope_parameters` or beside it."""
    name, place = "partial_rotary_factor", fields
    if default is None:
        fields.only(name, 1.0)
        if rules is not None:
            rules.only(name, 1.0)
        return 1.0
    share = fields.number(name, None)
    inner = None if rules is None else rules.number(name, None)
    if rules is not None and inner is not None:
        if share not in (None, inner):
            raise rules.unsupported(name, inner, f"{share:g}, the value outside this object")
        share, place = inner, rules
    share = default if share is None else share
    dims = Rope(2.0, share=share).rotated_dims(head_dim)
    if share > 1 or dims < 2 or dims % 2:
        expected = f"a number up to 1 that makes an even number of the {head_dim} values of a head"
        raise WrongType(place.file, place.path(name), share, expected)
    return float(share)


def read_scaling(rules: Fields, fields: Fields, rotated_dims: int) -> Scaling | None:
    """The scaling rule of an object like `rope_scaling`, of which all else was read.

    Args:
        rules: the object.
        fields: the configuration around it.
        rotated_dims: R.
    """
    kinds = (*_SCALINGS, _LONG)
    legacy = rules.choice("type", (*kinds, _OLD_LONG), None)
    legacy = _LONG if legacy == _OLD_LONG else legacy
    kind = rules.choice("rope_type", kinds, legacy or "default")
    if legacy is not None and kind != legacy:
        raise rules.unsupported("type", legacy, f"{kind}, as rope_type says")
    if kind == _LONG:
        scaling: Scaling | None = _long(rules, fields, rotated_dims // 2)
    else:
        scaling = _SCALINGS[kind](rules)
    rules.refuse_rest(frozenset(), {})
    return scaling


def layer_windows(fields: Fields, default_kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Window of each layer from `layer_types`, `sliding_window` and `use_sliding_window`.

    Args:
        fields: the configuration.
        default_kinds: kind of each layer where the file has no `layer_types`.
    """
    used = fields.flag("use_sliding_window", default=False)
    # transformers writes 0 for Qwen2's mixtures without one.
    window = fields.integer("sliding_window", None, minimum=1 if used else 0)
    kinds = fields.texts(
        "layer_types", len(default_kinds), ("full_attention", "sliding_attention")
    ) or list(default_kinds)
    if not used or window is None:
        if used and "sliding_attention" in kinds:
            raise MissingField(
                fields.file, fields.path("sliding_window"), "a whole number of at least 1"
            )
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


def decoder_tensors(config: ModelConfig, names: Names = LLAMA_NAMES) -> tuple[TensorSpec, ...]:
    """Tensors under the names that the Hugging Face decoders share, but for those of a family."""
    hidden, vocab = config.hidden_size, config.vocab_size
    # Some conversions of tied models store the matrix under both names.
    copies = (names.head,) if config.tied_head else ()
    embedding = Source(f"{names.root}embed_tokens.weight", (vocab, hidden))
    specs = [TensorSpec("embedding", (embedding,), copies=copies)]
    for i, layer in enumerate(config.layers):
        theirs, ours = f"{names.root}layers.{i}.", f"layers.{i}."
        specs += _norm_tensors(theirs, ours, layer, "attention", names, hidden)
        specs += _attention_tensors(theirs, ours, layer.attention, names, hidden)
        specs += _norm_tensors(theirs, ours, layer, "mlp", names, hidden)
        if isinstance(layer.mlp, Mixture):
            specs += mixture_tensors(theirs, ours, layer.mlp, names.experts, hidden)
        else:
            specs += _mlp_tensors(theirs, ours, layer.mlp, names, hidden)
    specs.append(_one("final_norm", f"{names.root}norm.weight", hidden))
    if not config.tied_head:
        specs.append(_one("head", names.head, vocab, hidden))
    return tuple(specs)


def _norm_tensors(
    theirs: str, ours: str, layer: Layer, block: str, names: Names, hidden: int
) -> list[TensorSpec]:
    there = {f"{block}_norm": layer.norms_inputs, f"{block}_output_norm": layer.norms_outputs}
    return [
        _one(ours + name, f"{theirs}{getattr(names, name)}.weight", hidden)
        for name, is_there in there.items()
        if is_there
    ]


def _attention_tensors(
    theirs: str, ours: str, a: Attention, names: Names, hidden: int
) -> list[TensorSpec]:
    rows = {"q": a.num_query_heads, "k": a.num_kv_heads, "v": a.num_kv_heads}
    rows = {name: heads * a.head_dim for name, heads in rows.items()}
    parts = {"qkv": a.qkv_rows} if names.fused_qkv else rows
    attn = f"{theirs}self_attn."
    specs = [
        TensorSpec(
            f"{ours}qkv",
            tuple(Source(f"{attn}{n}_proj.weight", (r, hidden)) for n, r in parts.items()),
        ),
        _one(f"{ours}attention_output", f"{attn}o_proj.weight", hidden, rows["q"]),
    ]
    if a.qkv_bias:
        sources = tuple(Source(f"{attn}{n}_proj.bias", (r,)) for n, r in parts.items())
        specs.append(TensorSpec(f"{ours}qkv_bias", sources))
    if a.output_bias:
        specs.append(_one(f"{ours}attention_output_bias", f"{attn}o_proj.bias", hidden))
    if a.qk_norm:
        for name in ("q", "k"):
            size = rows[name] if a.qk_norm_joins_heads else a.head_dim
            specs.append(_one(f"{ours}{name}_norm", f"{attn}{name}_norm.weight", size))
    return specs


def _mlp_tensors(theirs: str, ours: str, mlp: Mlp, names: Names, hidden: int) -> list[TensorSpec]:
    ffn = mlp.intermediate_size
    parts = {"gate_up": 2 * ffn} if names.fused_gate_up else {"gate": ffn, "up": ffn}
    specs = [
        TensorSpec(
            f"{ours}gate_up",
            tuple(Source(f"{theirs}mlp.{n}_proj.weight", (r, hidden)) for n, r in parts.items()),
        ),
        _one(f"{ours}down", f"{theirs}mlp.down_proj.weight", hidden, ffn),
    ]
    if mlp.bias:
        sources = tuple(Source(f"{theirs}mlp.{n}_proj.bias", (r,)) for n, r in parts.items())
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


def _long(rules: Fields, fields: Fields, pairs: int) -> LongScaling:
    context = fields.integer("max_position_embeddings")
    name = "original_max_position_embeddings"
    outer = fields.integer(name, None, minimum=2)
    original = rules.integer(name, outer, minimum=2)
    if original is None:
        raise MissingField(rules.file, rules.path(name), "a whole number of at least 2")
    if outer is not None and original != outer:
        raise rules.unsupported(name, original, f"{outer}, the value outside this object")
    factor = rules.number("factor", context / original)
    return LongScaling(
        short_factors=rules.numbers("short_factor", pairs, "one for each rotated pair"),
        long_factors=rules.numbers("long_factor", pairs, "one for each rotated pair"),
        original_context_tokens=original,
        context_tokens=context,
        attention_factor=rules.number("attention_factor", long_attention_factor(factor, original)),
    )


def _mscale(rules: Fields, name: str) -> float | None:
    """A factor of YaRN's temperature; 0 is how files say that they have none."""
    value = rules.value(name)
    is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
    return None if is_zero else rules.number(name, None)


_SCALINGS = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip
# Takes fields beside the rules as well; its name, and what Phi-3 called it first.
_LONG, _OLD_LONG = "longrope", "su"
