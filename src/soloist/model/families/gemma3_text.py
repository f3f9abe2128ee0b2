"""`gemma3_text`: Gemma 3, text only: norms around every block, local and global layers."""

from dataclasses import replace

from soloist.errors import MissingField
from soloist.model.config import ModelConfig
from soloist.model.families.dense import Names, Special, decoder_tensors, read_dense, read_scaling
from soloist.model.reading import Fields
from soloist.model.rope import Rope
from soloist.model.tensors import TensorSpec

NAMES = Names(mlp_norm="pre_feedforward_layernorm")

# What published files leave out, 4B most of all; transformers fills it in.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
}
_PATTERN = 6
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read(fields: Fields) -> ModelConfig:
    """Five layers with a window and a rope of their own, then one that sees everything.

    Norms are stored less 1, and embeddings multiplied by the root of their size.
    """
    fields.fill(_DEFAULTS)
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", wanted=False)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor"):
        fields.only(name, None)
    fields.ignore("_sliding_window_pattern")  # what transformers made `layer_types` of
    kinds = _layer_kinds(fields)
    window = fields.integer("sliding_window", None)
    if window is None and _LOCAL in kinds:
        name = fields.path("sliding_window")
        raise MissingField(fields.file, name, "a whole number of at least 1")
    rope, local_rope = _read_ropes(fields)
    attention_bias = fields.flag("attention_bias", default=False)
    config = read_dense(
        fields,
        Special(
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            tied_head=True,
            windows=tuple(window if kind == _LOCAL else None for kind in kinds),
            rope=rope,
            own_ropes=tuple(local_rope if kind == _LOCAL else None for kind in kinds),
            own_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            activation="gelu_tanh",
            norms_outputs=True,
        ),
    )
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, NAMES)


def _layer_kinds(fields: Fields) -> list[str]:
    """Of each layer, from `layer_types` or `sliding_window_pattern`, which have to agree."""
    count = fields.num_layers()
    pattern = fields.integer("sliding_window_pattern", None)
    interval = pattern or _PATTERN
    made = [_LOCAL if (i + 1) % interval else _GLOBAL for i in range(count)]
    listed = fields.texts("layer_types", count, (_LOCAL, _GLOBAL))
    if listed is not None and pattern is not None and listed != made:
        raise fields.unsupported("sliding_window_pattern", pattern, "what layer_types says")
    return listed or made


def _read_ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Of global and of local layers, by kind in `rope_parameters`, or in older fields."""
    head_dim = fields.integer("head_dim")
    old = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    by_kind = fields.group("rope_parameters")
    if by_kind is None:
        theta = fields.number(old[0], _GLOBAL_THETA, above=1.0)
        local_theta = fields.number(old[1], _LOCAL_THETA, above=1.0)
        rules = fields.group(old[2])
        scaling = None if rules is None else read_scaling(rules, fields, head_dim)
        return Rope(theta, scaling), Rope(local_theta)
    for name in old:
        if name in fields:
            value = fields.value(name)
            raise fields.unsupported(name, value, "absent beside rope_parameters")
    found = []
    for kind, default in ((_GLOBAL, _GLOBAL_THETA), (_LOCAL, _LOCAL_THETA)):
        rules = by_kind.group(kind)
        if rules is None:
            found.append(Rope(default))
            continue
        rules.only("partial_rotary_factor", 1.0)
        theta = rules.number("rope_theta", default, above=1.0)
        found.append(Rope(theta, read_scaling(rules, fields, head_dim)))
    by_kind.refuse_rest(frozenset(), {})
    return found[0], found[1]
