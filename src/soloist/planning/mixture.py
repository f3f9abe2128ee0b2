"""Mixtures of experts, as far as sizes go: those that Soloist plans for and does not run. Pure.

Read are the fields of config.json that decide how many numbers there are and how many a token
needs. Layers that only draft (`num_nextn_predict_layers`) are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from soloist.model.families.mixture import read_counts
from soloist.model.reading import Fields
from soloist.model.tensors import Source, TensorSpec
from soloist.planning.attention import (
    Attention,
    read_grouped,
    read_indexed,
    read_latent,
    read_linear,
    read_nullable,
)
from soloist.planning.model import EXPERTS, Mixture, Model


@dataclass(frozen=True, slots=True)
class _Mlps:
    """Of all layers.

    Attributes:
        mixture: experts.
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


def _phimoe(fields: Fields) -> Model:
    return _model(fields, _sliding(fields, everywhere=True), _alike(fields))


def _gpt_oss(fields: Fields) -> Model:
    fields.only("experts_per_token", fields.integer("num_experts_per_tok"))  # says it twice
    return _model(fields, _sliding(fields), _alike(fields))


def _minimax_m2(fields: Fields) -> Model:
    fields.only("shared_intermediate_size", 0)
    fields.only("attn_type_list", [1] * _num_layers(fields))  # 1: full attention
    return _model(fields, _sliding(fields), _alike(fields))


def _qwen3_moe(fields: Fields) -> Model:
    return _model(fields, _sliding(fields), _qwen_mlps(fields, shared=0))


def _qwen_hybrid(fields: Fields) -> Model:
    """Most layers keep a state, every fourth or so keys and values."""
    count, every = _num_layers(fields), fields.integer("full_attention_interval", 4)
    kinds = fields.texts("layer_types", count, ("full_attention", "linear_attention"))
    if kinds is None:
        linear = [bool((i + 1) % every) for i in range(count)]
    else:
        linear = [kind == "linear_attention" for kind in kinds]
    fields.only("attn_output_gate", True)
    full, state = read_grouped(fields, gated=True), read_linear(fields)
    return _model(
        fields,
        [state if is_linear else full for is_linear in linear],
        _qwen_mlps(fields, _shared_size(fields)),
    )


def _deepseek(fields: Fields) -> Model:
    return _model(fields, [read_latent(fields)] * _num_layers(fields), _deepseek_mlps(fields))


def _deepseek_indexed(fields: Fields) -> Model:
    """Layers may attend to what an earlier layer's index chose, and have none of their own."""
    count, every = _num_layers(fields), fields.integer("index_topk_freq", 1)
    skipped = fields.integer("index_skip_topk_offset", 2, minimum=0)
    fields.texts("layer_types", count, ("indexed_attention",))
    kinds = fields.texts("indexer_types", count, ("full", "shared"))
    if kinds is None:
        own = [i < skipped or (i - skipped + 1) % every == 0 for i in range(count)]
    else:
        own = [kind == "full" for kind in kinds]
    full, shared = read_indexed(fields), read_latent(fields, fields.integer("index_topk"))
    attentions = [full if has_index else shared for has_index in own]
    return _model(fields, attentions, _deepseek_mlps(fields))


def _llama4(fields: Fields) -> Model:
    """Most layers rotate and see a chunk, at its end all of it; the others see everything."""
    count, step = _num_layers(fields), fields.integer("interleave_moe_layer_step", 1)
    kinds = fields.texts("layer_types", count, ("full_attention", "chunked_attention"))
    every = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.integers("no_rope_layers", None) or [(i + 1) % every for i in range(count)]
    if len(rotates) != count:
        raise fields.unsupported("no_rope_layers", rotates, f"a list of {count} entries")
    if kinds is not None:
        rotates = [kind == "chunked_attention" for kind in kinds]
    chunk = fields.integer("attention_chunk_size", None)
    expert = fields.integer("intermediate_size")
    named = fields.integers("moe_layers", None)
    sparse = range(step - 1, count, step) if named is None else named
    mlps = _Mlps(
        _mixture(fields, "num_local_experts"),
        expert,
        shared=expert,
        dense=fields.integer("intermediate_size_mlp"),
        dense_layers=frozenset(range(count)) - frozenset(sparse),
    )
    attentions = [read_grouped(fields, chunk if rotated else None) for rotated in rotates]
    return _model(fields, attentions, mlps)


READERS: Mapping[str, Callable[[Fields], Model]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek_indexed,
    "glm4_moe_lite": _deepseek,
    "glm_moe_dsa": _deepseek_indexed,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "phimoe": _phimoe,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3_next": _qwen_hybrid,
    "qwen3_vl_moe_text": _qwen3_moe,
}


def _num_layers(fields: Fields) -> int:
    return fields.num_layers()


def _mixture(fields: Fields, usual: str) -> Mixture:
    """As of `read_counts`."""
    return Mixture(*read_counts(fields, usual))


def _alike(fields: Fields) -> _Mlps:
    """Experts of `intermediate_size` in every layer."""
    return _Mlps(_mixture(fields, "num_local_experts"), fields.integer("intermediate_size"))


def _shared_size(fields: Fields) -> int:
    return int(fields.integer("shared_expert_intermediate_size", minimum=0))


def _qwen_mlps(fields: Fields, shared: int) -> _Mlps:
    """One expert in every `decoder_sparse_step` layers, and none in those that are named."""
    step = fields.integer("decoder_sparse_step", 1)
    named = fields.integers("mlp_only_layers", [])
    dense = frozenset(i for i in range(_num_layers(fields)) if i in named or (i + 1) % step)
    fields.ignore("intermediate_size")  # says nothing where all layers have experts
    return _Mlps(
        _mixture(fields, "num_experts"),
        fields.integer("moe_intermediate_size"),
        shared=shared,
        dense=fields.integer("intermediate_size") if dense else 0,
        dense_layers=dense,
    )


def _deepseek_mlps(fields: Fields) -> _Mlps:
    """The first layers are dense, the others have experts, some of them for every token."""
    count, expert = _num_layers(fields), fields.integer("moe_intermediate_size")
    kinds = fields.texts("mlp_layer_types", count, ("dense", "sparse"))
    if kinds is None:
        first = fields.integer("first_k_dense_replace", minimum=0)
        step = fields.integer("moe_layer_freq", 1)
        kinds = ["dense" if i < first or i % step else "sparse" for i in range(count)]
    fields.ignore("first_k_dense_replace")
    return _Mlps(
        _mixture(fields, "n_routed_experts"),
        expert,
        shared=expert * read_nullable(fields, "n_shared_experts"),
        dense=fields.integer("intermediate_size"),
        dense_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "dense"),
    )


def _sliding(fields: Fields, *, everywhere: bool = False) -> list[Attention]:
    """Grouped heads; the window counts in layers that are said to slide.

    Args:
        fields: the configuration.
        everywhere: a family in which all layers slide where a window is given and nothing else.
    """
    count = _num_layers(fields)
    kinds = fields.texts("layer_types", count, ("full_attention", "sliding_attention"))
    window = fields.integer("sliding_window", None, minimum=0)
    if kinds is None:
        fields.only("use_sliding_window", False)
        kinds = ["sliding_attention" if everywhere else "full_attention"] * count
    fields.ignore("use_sliding_window")
    full, slides = read_grouped(fields), read_grouped(fields, window or None)
    return [slides if kind == "sliding_attention" else full for kind in kinds]


def _model(fields: Fields, attentions: Sequence[Attention], mlps: _Mlps) -> Model:
    fields.only("is_encoder_decoder", False)
    tied = fields.flag("tie_word_embeddings", False)
    return Model(
        family=fields.family,
        context_tokens=fields.integer("max_position_embeddings"),
        num_layers=len(attentions),
        tied_head=tied,
        specs=tuple(_specs(fields, attentions, mlps, tied=tied)),
        caches=tuple(cache for attention in attentions for cache in attention.caches),
        state_values=sum(attention.state_values for attention in attentions),
        mixture=mlps.mixture,
    )


def _specs(
    fields: Fields, attentions: Sequence[Attention], mlps: _Mlps, *, tied: bool
) -> list[TensorSpec]:
    """Matrices and norms; biases are too small to matter."""
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    specs = [_spec("embedding", vocab, hidden), _spec("final_norm", hidden)]
    if not tied:
        specs.append(_spec("head", vocab, hidden))
    for i, attention in enumerate(attentions):
        at = f"layers.{i}"
        specs.append(_spec(f"{at}.norms", 2 * hidden))
        specs += [_spec(f"{at}.{name}", *shape) for name, *shape in attention.matrices]
        if i in mlps.dense_layers:
            specs += _mlp(f"{at}.", hidden, mlps.dense)
            continue
        specs.append(_spec(f"{at}.router", mlps.mixture.experts, hidden))
        specs += _mlp(f"{at}{EXPERTS}", hidden, mlps.expert, mlps.mixture.experts)
        if mlps.shared:
            specs += _mlp(f"{at}.shared.", hidden, mlps.shared)
    return specs


def _mlp(at: str, hidden: int, ffn: int, *experts: int) -> list[TensorSpec]:
    return [
        _spec(f"{at}gate_up", *experts, 2 * ffn, hidden),
        _spec(f"{at}down", *experts, hidden, ffn),
    ]


def _spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, (Source(name, shape),))
