"""A GGUF file's metadata as the fields of an equivalent config.json, which its family then reads.

Every key under the architecture's prefix is read, known to be harmless, or refused by name. Keys
elsewhere (`general.`, `tokenizer.`, …) describe the file or the tokenizer.

Source: the keys that llama.cpp's converter writes and its loader reads.
"""

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from soloist.errors import MissingField, UnsupportedGguf, WrongType, quoted
from soloist.gguf.splits import Gguf
from soloist.model.reading import Fields

ARCHITECTURE: Final = "general.architecture"
TOKENS: Final = "tokenizer.ggml.tokens"
_TYPE = "general.type"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets one architecture's files apart.

    Attributes:
        family: ours; of files with experts another one, where it has a name of its own.
        pairs: rows of each query and key head come in pairs of neighbours, as llama.cpp rotates
            them there; families have the halves of a head one after the other.
        divides: `rope_freqs.weight` may divide rope's frequencies.
    """

    family: str
    pairs: bool
    divides: bool


# By the names that llama.cpp gives them.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", pairs=True, divides=True),
    "qwen2": Architecture("qwen2", pairs=False, divides=False),
    "qwen3": Architecture("qwen3", pairs=False, divides=False),
    "smollm3": Architecture("smollm3", pairs=True, divides=True),
    "qwen3moe": Architecture("qwen3_moe", pairs=False, divides=False),
    "qwen2moe": Architecture("qwen2_moe", pairs=False, divides=False),
    "olmoe": Architecture("olmoe", pairs=False, divides=False),
    "glm4moe": Architecture("glm4_moe", pairs=False, divides=False),
}
_SIGMOID = 2  # of `expert_gating_func`

_OF_EXPERTS = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe")

# Keys that only say how a file was made.
_HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
# Keys that change nothing with this value.
_NEUTRAL: Mapping[str, bool | float] = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "use_parallel_residual": False,
}


def architecture_of(gguf: Gguf) -> str:
    """The name of a file's architecture.

    Raises:
        MissingField, WrongType, UnsupportedGguf: it has none, or none that is read; or the file
            holds no whole model.
    """
    file, known = str(gguf.file), ", ".join(ARCHITECTURES)
    name = gguf.metadata.get(ARCHITECTURE)
    if name is None:
        raise MissingField(file, ARCHITECTURE, f"one of {known}")
    if not isinstance(name, str):
        raise WrongType(file, ARCHITECTURE, name, f"one of {known}")
    kind = gguf.metadata.get(_TYPE, "model")
    if kind != "model":
        raise UnsupportedGguf(
            file, f"'{_TYPE}'", repr(kind), "'model'", "give the file of the model itself"
        )
    if name not in ARCHITECTURES:
        raise UnsupportedGguf(
            file, f"'{ARCHITECTURE}'", quoted(name), known,
            "use a model of a family that docs/models.md lists",
        )  # fmt: skip
    return name


def family_of(gguf: Gguf) -> str:
    """The family that reads a file; experts make a Mixtral of a Llama.

    Raises:
        MissingField, WrongType, UnsupportedGguf: as from `architecture_of`.
    """
    architecture = architecture_of(gguf)
    family = ARCHITECTURES[architecture].family
    return "mixtral" if family == "llama" and gguf.metadata.get("llama.expert_count") else family


def as_config(gguf: Gguf, accepted: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a config.json that describes the same model.

    Args:
        gguf: the headers of its files.
        accepted: keys that may be there although nobody knows them, such as 'llama.some.key'.

    Raises:
        ConfigError: a key is missing, mistyped, unknown or asks for what is not implemented; or an
            accepted one is none that is unknown.
        UnsupportedGguf: as from `architecture_of`.
    """
    fields, family = _own_fields(gguf, accepted), family_of(gguf)
    # Qwen2's mixtures have a name of their own for it.
    attention_bias = "qkv_bias" if family == "qwen2_moe" else "attention_bias"
    values = {
        "model_type": family,
        **_sizes(fields, gguf),
        **_rope(fields),
        # A matrix that is not there is no matrix of its own.
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        attention_bias: "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
    }
    values |= _experts(fields, gguf, family, values)
    fields.refuse_rest(_HARMLESS, _NEUTRAL)
    fields.require_passed()
    return values


def head_counts(gguf: Gguf) -> tuple[int, int]:
    """Query heads and KV heads of each layer.

    Raises:
        ConfigError, UnsupportedGguf: as from `as_config`.
    """
    return _head_counts(_own_fields(gguf))


def _own_fields(gguf: Gguf, accepted: Collection[str] = ()) -> Fields:
    """The keys under the architecture's prefix."""
    name = architecture_of(gguf)
    prefix = f"{name}."
    own = {k[len(prefix) :]: v for k, v in gguf.metadata.items() if k.startswith(prefix)}
    return Fields(own, str(gguf.file), name, prefix, accepted)


def _head_counts(fields: Fields) -> tuple[int, int]:
    heads = _same_everywhere(fields, "attention.head_count", None)
    return heads, _same_everywhere(fields, "attention.head_count_kv", heads)


def _sizes(fields: Fields, gguf: Gguf) -> dict[str, Any]:
    hidden = fields.integer("embedding_length")
    heads, kv_heads = _head_counts(fields)
    head_dim = fields.integer("attention.key_length", None)
    if head_dim is None and hidden % heads:
        expected = f"a number, since {hidden} dimensions are no multiple of {heads} heads"
        raise MissingField(fields.file, fields.path("attention.key_length"), expected)
    head_dim = head_dim or hidden // heads
    fields.only("attention.value_length", head_dim)
    if fields.family != "glm4moe":  # of which a share of a head rotates
        fields.only("rope.dimension_count", head_dim)
    return {
        "num_hidden_layers": fields.integer("block_count"),
        "hidden_size": hidden,
        "intermediate_size": _same_everywhere(fields, "feed_forward_length", None),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(fields.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": fields.integer("vocab_size", _num_tokens(gguf)),
    }


def _experts(fields: Fields, gguf: Gguf, family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, sizes and the router; what files do not say is what llama.cpp computes."""
    if family not in _OF_EXPERTS:
        return {}
    count = "num_local_experts" if family == "mixtral" else "num_experts"
    count = "n_routed_experts" if family == "glm4_moe" else count
    found = {
        count: fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
    }
    if family == "glm4_moe":
        return found | _glm_experts(fields, gguf, values)
    fields.only("expert_gating_func", 1)  # softmax
    if family == "qwen3_moe":
        found["norm_topk_prob"] = True
    if family in ("qwen3_moe", "qwen2_moe"):
        found["moe_intermediate_size"] = fields.integer("expert_feed_forward_length")
    if family == "qwen2_moe":
        size = fields.integer("expert_shared_feed_forward_length", values["intermediate_size"])
        found["shared_expert_intermediate_size"] = size
    return found


def _glm_experts(fields: Fields, gguf: Gguf, values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that draft are counted among all; they are left out."""
    fields.only("expert_gating_func", _SIGMOID)
    drafting, layers = fields.integer("nextn_predict_layers", 0, minimum=0), "num_hidden_layers"
    if drafting >= values[layers]:
        allowed = f"fewer than the {values[layers]} layers"
        raise fields.unsupported("nextn_predict_layers", drafting, allowed)
    rotated = fields.integer("rope.dimension_count", values["head_dim"])
    return {
        layers: values[layers] - drafting,
        "num_nextn_predict_layers": drafting,
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "n_shared_experts": fields.integer("expert_shared_count", minimum=0),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, minimum=0),
        "norm_topk_prob": fields.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": _decimal(fields.number("expert_weights_scale", 1.0)),
        "n_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors,
        "partial_rotary_factor": rotated / values["head_dim"],
    }


def _same_everywhere(fields: Fields, name: str, default: int | None) -> int:
    """A size that files may give for each layer; here all layers have the same."""
    given = fields.value(name)
    if isinstance(given, list) and given and given.count(given[0]) == len(given):
        alone = Fields({name: given[0]}, fields.file, fields.family, fields.path(""))
        return int(alone.integer(name))
    if isinstance(given, list):
        raise fields.unsupported(name, given, "the same in all layers")
    return int(fields.integer(name) if default is None else fields.integer(name, default))


def _num_tokens(gguf: Gguf) -> int | None:
    tokens = gguf.metadata.get(TOKENS)
    if not isinstance(tokens, list) or not tokens:
        raise MissingField(str(gguf.file), TOKENS, "a list of the vocabulary's tokens")
    return len(tokens)


def _rope(fields: Fields) -> dict[str, Any]:
    """Theta and the scaling rule; a factor without a rule is linear, as in llama.cpp."""
    values: dict[str, Any] = {"rope_theta": _decimal(fields.number("rope.freq_base", 10_000.0))}
    old_factor = fields.number("rope.scale_linear", None)
    factor = fields.number("rope.scaling.factor", old_factor)
    rule = fields.choice(
        "rope.scaling.type", ("none", "linear", "yarn"), "none" if factor is None else "linear"
    )
    original = fields.integer("rope.scaling.original_context_length", None)
    betas = {
        name: fields.number(f"rope.scaling.yarn_{name}", None)
        for name in ("beta_fast", "beta_slow")
    }
    if rule == "none":
        return values
    if factor is None:
        raise MissingField(fields.file, fields.path("rope.scaling.factor"), "a number")
    scaling: dict[str, Any] = {"rope_type": rule, "factor": _decimal(factor)}
    if rule == "yarn":
        if original is None:
            name = fields.path("rope.scaling.original_context_length")
            raise MissingField(fields.file, name, "a whole number")
        scaling["original_max_position_embeddings"] = original
        scaling |= {name: _decimal(beta) for name, beta in betas.items() if beta is not None}
    return {**values, "rope_scaling": scaling}


def _decimal(value: float) -> float:
    """The shortest decimal with the fp32 that a file has: 1e-06 is stored as 9.99999997…e-07."""
    stored = struct.pack("<f", value)
    if struct.unpack("<f", stored)[0] != value:  # it was stored in fp64
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(short for short in shorter if struct.pack("<f", short) == stored)
