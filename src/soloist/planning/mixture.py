"""Mixtures of experts, as far as sizes go: models that Soloist plans for and does not run. Pure.

Read are the fields of config.json that decide how many numbers there are and how many a token
needs. What the router sees is not modelled: a step of several columns is taken to choose experts at
random for each column, which is the most that it can read on average.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from soloist.errors import UnknownFamily
from soloist.model.config import Attention, Layer, Mlp, ModelConfig
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.reading import Fields, read_json
from soloist.model.rope import Rope
from soloist.model.tensors import Source, TensorSpec, parameters

_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of each layer that has them.

    Attributes:
        experts: there are.
        chosen: by each token.
    """

    experts: int
    chosen: int

    def share_read(self, spec: TensorSpec, columns: int) -> float:
        """Share of a tensor that a step of m columns reads: of experts 1 - (1 - k / E)^m."""
        if _EXPERTS not in spec.name:
            return 1.0
        return 1 - (1 - self.chosen / self.experts) ** columns


@dataclass(frozen=True, slots=True)
class Model:
    """What is planned for: sizes of a model.

    Attributes:
        config: attention, context, vocabulary; its MLPs are those of one expert.
        specs: all tensors; those of experts hold all experts of a layer.
        mixture: None for a dense model.
    """

    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    mixture: Mixture | None = None


def active_parameters(model: Model) -> int:
    """Parameters that one token needs: all but the experts that it does not choose."""
    if model.mixture is None:
        return parameters(model.specs)
    mixture = model.mixture
    return round(sum(spec.num_values * mixture.share_read(spec, 1) for spec in model.specs))


def read_model(file: Path) -> Model:
    """A configuration of any family that is served, or of a mixture in `_READERS`.

    Raises:
        ConfigError: a field is missing or has a value that is not understood.
        UnknownFamily: it is of no known family.
    """
    values = read_json(file)
    family = values.get("model_type")
    if isinstance(family, str) and family in _READERS:
        return _READERS[family](Fields(values, str(file), family))
    if isinstance(family, str) and family not in FAMILIES:
        raise UnknownFamily(str(file), family, [*FAMILIES, *_READERS])
    config = read_config(file)
    return Model(config, tensors(config))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a mixture's layers.

    Attributes:
        mixture: its experts.
        expert: F of an expert.
        shared: F of the experts that every token takes, together; 0 without.
        dense: F of layers without experts.
        dense_layers: which those are.
    """

    mixture: Mixture
    expert: int
    shared: int = 0
    dense: int = 0
    dense_layers: frozenset[int] = frozenset()


def _mixtral(fields: Fields) -> Model:
    mixture = Mixture(fields.integer("num_local_experts"), fields.integer("num_experts_per_tok"))
    return _model(fields, _Sizes(mixture, fields.integer("intermediate_size")))


def _gpt_oss(fields: Fields) -> Model:
    mixture = Mixture(fields.integer("num_local_experts"), fields.integer("num_experts_per_tok"))
    return _model(fields, _Sizes(mixture, fields.integer("intermediate_size")))


def _qwen3_moe(fields: Fields) -> Model:
    mixture = Mixture(fields.integer("num_experts"), fields.integer("num_experts_per_tok"))
    step = fields.integer("decoder_sparse_step", 1)
    layers = range(fields.integer("num_hidden_layers"))
    named = fields.integers("mlp_only_layers", [])
    dense = frozenset(i for i in layers if i in named or (i + 1) % step)
    sizes = _Sizes(
        mixture,
        fields.integer("moe_intermediate_size"),
        dense=fields.integer("intermediate_size"),
        dense_layers=dense,
    )
    return _model(fields, sizes)


def _glm4_moe(fields: Fields) -> Model:
    expert = fields.integer("moe_intermediate_size")
    sizes = _Sizes(
        Mixture(fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")),
        expert,
        shared=expert * fields.integer("n_shared_experts", 0, minimum=0),
        dense=fields.integer("intermediate_size"),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", 0, minimum=0))),
    )
    return _model(fields, sizes)


_READERS: Mapping[str, Callable[[Fields], Model]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
}


def _model(fields: Fields, sizes: _Sizes) -> Model:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    attention = Attention(
        heads,
        fields.integer("num_key_value_heads", heads),
        fields.integer("head_dim", hidden // heads),
    )
    config = ModelConfig(
        family=fields.family,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        context_tokens=fields.integer("max_position_embeddings"),
        norm_epsilon=fields.number("rms_norm_eps"),
        layers=tuple(
            Layer(
                Attention(
                    attention.num_query_heads, attention.num_kv_heads, attention.head_dim, window
                ),
                Mlp(sizes.dense if i in sizes.dense_layers else sizes.expert),
            )
            for i, window in enumerate(_windows(fields))
        ),
        rope=Rope(10_000.0),  # changes no size
        tied_head=fields.flag("tie_word_embeddings", False),
    )
    return Model(config, tuple(_specs(config, sizes)), sizes.mixture)


def _windows(fields: Fields) -> list[int | None]:
    """Of each layer; the window counts where a layer is said to slide."""
    count = fields.integer("num_hidden_layers")
    kinds = fields.texts("layer_types", count, ("full_attention", "sliding_attention"))
    window = fields.integer("sliding_window", None)
    slides = [kind == "sliding_attention" for kind in kinds or ["full_attention"] * count]
    return [window if is_sliding else None for is_sliding in slides]


def _specs(config: ModelConfig, sizes: _Sizes) -> list[TensorSpec]:
    """Matrices and norms; biases are too small to matter."""
    hidden = config.hidden_size

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, (Source(name, shape),))

    specs = [spec("embedding", config.vocab_size, hidden), spec("final_norm", hidden)]
    if not config.tied_head:
        specs.append(spec("head", config.vocab_size, hidden))
    for i, layer in enumerate(config.layers):
        a, at = layer.attention, f"layers.{i}"
        specs += [
            spec(f"{at}.norms", 2 * hidden),
            spec(f"{at}.qkv", a.qkv_rows, hidden),
            spec(f"{at}.attention_output", hidden, a.num_query_heads * a.head_dim),
        ]
        if i in sizes.dense_layers:
            specs += [
                spec(f"{at}.gate_up", 2 * sizes.dense, hidden),
                spec(f"{at}.down", hidden, sizes.dense),
            ]
            continue
        experts = sizes.mixture.experts
        specs += [
            spec(f"{at}.router", experts, hidden),
            spec(f"{at}{_EXPERTS}gate_up", experts, 2 * sizes.expert, hidden),
            spec(f"{at}{_EXPERTS}down", experts, hidden, sizes.expert),
        ]
        if sizes.shared:
            specs += [
                spec(f"{at}.shared.gate_up", 2 * sizes.shared, hidden),
                spec(f"{at}.shared.down", hidden, sizes.shared),
            ]
    return specs
