"""What single families say of themselves beyond sizes, and what their readers refuse."""

from pathlib import Path
from typing import Any

import pytest

from soloist.errors import ConfigError, MissingField, UnknownField, UnsupportedField, WrongType
from soloist.model.config import ModelConfig
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.quantization.scheme import is_head
from soloist.model.rope import LinearScaling, LongScaling, Rope
from soloist.model.tensors import head_name
from soloist.weights.choice import untied
from unit.model.configurations import (
    ABSENT,
    GEMMA3_1B,
    GEMMA3_4B,
    GLM4_9B_0414,
    GLM4_9B_CHAT,
    GRANITE_31_8B,
    MISTRAL_SMALL_31_24B,
    OLMO2_7B,
    PHI3_MINI_4K,
    PHI4,
    PHI4_MINI,
    changed,
    changed_text,
    written,
)

LONG = PHI4_MINI["rope_scaling"]


def read(folder: Path, base: dict[str, Any], **changes: object) -> ModelConfig:
    return read_config(written(folder, changed(base, **changes)))


def sources(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    (spec,) = (spec for spec in tensors(config) if spec.name == name)
    return {source.name: source.shape for source in spec.sources}


# --- Phi ------------------------------------------------------------------------------------------


def test_phi_has_fused_matrices(tmp_path: Path) -> None:
    config = read(tmp_path, PHI4_MINI)
    layer = "model.layers.3"
    assert sources(config, "layers.3.qkv") == {f"{layer}.self_attn.qkv_proj.weight": (5120, 3072)}
    assert sources(config, "layers.3.gate_up") == {
        f"{layer}.mlp.gate_up_proj.weight": (16384, 3072)
    }


def test_phi_windows(tmp_path: Path) -> None:
    for base, wanted in ((PHI3_MINI_4K, 2047), (PHI4, None), (PHI4_MINI, None)):
        config = read(tmp_path, base)
        assert {layer.attention.window for layer in config.layers} == {wanted}


def test_phi_4_mini_reads_longrope(tmp_path: Path) -> None:
    rope = read(tmp_path, PHI4_MINI).rope
    factor = 1.190238  # sqrt(1 + ln 32 / ln 4096)
    assert isinstance(rope.scaling, LongScaling)
    assert rope.share == 0.75
    assert rope.rotated_dims(128) == 96
    assert rope.scaling.factors == tuple(LONG["long_factor"])
    assert rope.attention_factor == pytest.approx(factor)
    assert rope.for_context(4096).inverse_frequencies(128) == Rope(
        1e4, share=0.75
    ).inverse_frequencies(128)
    assert rope.for_context(4096).attention_factor == pytest.approx(factor)
    assert rope.for_context(4097) != rope
    assert rope.for_context(4097).inverse_frequencies(128) == rope.inverse_frequencies(128)


def test_longrope_is_read_wherever_its_fields_are(tmp_path: Path) -> None:
    wanted = read(tmp_path, PHI4_MINI)
    old = {**LONG, "type": "su"}
    newer = {"rope_theta": 1e4, "rope_type": "longrope", "partial_rotary_factor": 0.75}
    newer |= {name: LONG[name] for name in ("long_factor", "short_factor")}
    outside = {"partial_rotary_factor": ABSENT, "original_max_position_embeddings": ABSENT}
    inside = {**newer, "original_max_position_embeddings": 4096}
    bare = {"rope_scaling": ABSENT, "rope_theta": ABSENT}
    assert read(tmp_path, PHI4_MINI, rope_scaling=old) == wanted
    assert read(tmp_path, PHI4_MINI, **bare, rope_parameters=newer) == wanted
    assert read(tmp_path, PHI4_MINI, **bare, **outside, rope_parameters=inside) == wanted


@pytest.mark.parametrize(
    ("rules", "field", "error"),
    [
        ({"long_factor": ABSENT}, "long_factor", MissingField),
        ({"long_factor": LONG["long_factor"][1:]}, "long_factor' is 'a list of 47'", WrongType),
        ({"short_factor": [1.0] * 64}, "short_factor' is 'a list of 64'", WrongType),
        ({"short_factor": 1.0}, "short_factor", WrongType),
        ({"short_factor": [1.0] * 47 + [0]}, r"short_factor\[47\]", WrongType),
        ({"short_factor": [1.0] * 47 + [-1.0]}, r"short_factor\[47\]", WrongType),
        ({"short_factor": [1.0] * 47 + [True]}, r"short_factor\[47\]", WrongType),
        ({"long_factor": ["1"] * 48}, r"long_factor\[0\]", WrongType),
        ({"long_factor": [float("nan")] * 48}, r"long_factor\[0\]", WrongType),
        ({"factor": 0}, "factor", WrongType),
        ({"attention_factor": 0.0}, "attention_factor", WrongType),
        ({"short_mscale": 1.2}, "short_mscale", UnknownField),
        ({"original_max_position_embeddings": 8192}, "original_max", UnsupportedField),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", UnsupportedField),
    ],
)
def test_longrope_is_typed(
    rules: dict[str, Any], field: str, error: type[ConfigError], tmp_path: Path
) -> None:
    with pytest.raises(error, match=rf"rope_scaling\.{field}") as caught:
        read(tmp_path, PHI4_MINI, rope_scaling=changed(LONG, **rules))
    assert len(str(caught.value)) < 900


def test_longrope_needs_the_original_context(tmp_path: Path) -> None:
    with pytest.raises(MissingField, match="original_max_position_embeddings"):
        read(tmp_path, PHI4_MINI, original_max_position_embeddings=ABSENT)
    with pytest.raises(WrongType, match="original_max_position_embeddings"):
        read(tmp_path, PHI4_MINI, original_max_position_embeddings=1)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, 0.01, 0.4, 1e300, "half", True])
@pytest.mark.parametrize("base", [PHI4, GLM4_9B_CHAT, GLM4_9B_0414], ids=["phi3", "glm", "glm4"])
def test_a_share_of_a_head_has_an_even_size(
    base: dict[str, Any], share: object, tmp_path: Path
) -> None:
    with pytest.raises(WrongType, match="partial_rotary_factor"):
        read(tmp_path, base, partial_rotary_factor=share)


@pytest.mark.parametrize("field", ["full_attn_mod", "interpolate_factor"])
def test_phi_refuses_other_attention(field: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedField, match=field):
        read(tmp_path, PHI4_MINI, **{field: 2})
    with pytest.raises(UnsupportedField, match="attention_bias"):
        read(tmp_path, PHI4_MINI, attention_bias=True)


# --- text beside images ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "own"),
    [(MISTRAL_SMALL_31_24B, "mistral"), (GEMMA3_4B, "gemma3_text")],
    ids=["mistral3", "gemma3"],
)
def test_nested_text_is_what_its_own_family_reads(
    base: dict[str, Any], own: str, tmp_path: Path
) -> None:
    config, alone = read(tmp_path, base), read(tmp_path, {"model_type": own, **base["text_config"]})
    assert (config.layers, config.rope, config.context_tokens, config.tied_head) == (
        alone.layers, alone.rope, alone.context_tokens, alone.tied_head,
    )  # fmt: skip
    names = {source.name for spec in tensors(config) for source in spec.sources}
    plain = {source.name for spec in tensors(alone) for source in spec.sources}
    assert names == {f"language_model.{name}" for name in plain}
    assert FAMILIES[config.family].ignored(config)


def test_the_outer_object_says_whether_the_head_is_tied(tmp_path: Path) -> None:
    """As transformers writes both, also where they differ."""
    for outer, inner, wanted in ((True, False, True), (False, True, False), (ABSENT, True, True)):
        base = changed_text(MISTRAL_SMALL_31_24B, tie_word_embeddings=inner)
        assert read(tmp_path, base, tie_word_embeddings=outer).tied_head is wanted


@pytest.mark.parametrize("base", [MISTRAL_SMALL_31_24B, GEMMA3_4B], ids=["mistral3", "gemma3"])
def test_nested_text_is_held_to_the_same(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(MissingField, match="text_config"):
        read(tmp_path, base, text_config=ABSENT)
    with pytest.raises(WrongType, match="text_config"):
        read(tmp_path, base, text_config=[])
    with pytest.raises(UnsupportedField, match=r"text_config\.model_type.*ministral3"):
        read(tmp_path, changed_text(base, model_type="ministral3"))
    with pytest.raises(UnknownField, match=r"text_config\.window_kind"):
        read(tmp_path, changed_text(base, window_kind=3))
    with pytest.raises(UnknownField, match="image_mixer"):
        read(tmp_path, base, image_mixer=3)
    file = written(tmp_path, changed_text(base, window_kind=3))
    assert read_config(file, ["text_config.window_kind"]) == read(tmp_path, base)


# --- Granite --------------------------------------------------------------------------------------


def test_granite_reads_its_multipliers(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE_31_8B)
    assert config.embedding_scale == pytest.approx(12 / 0.22)
    assert config.norm_epsilon == pytest.approx(1e-5 / 0.22**2)
    assert config.logit_scale == 1 / 16
    assert {layer.attention.scale for layer in config.layers} == {1 / 128}
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    plain = read(tmp_path, GRANITE_31_8B, **dict.fromkeys(names, ABSENT))
    assert (plain.embedding_scale, plain.norm_epsilon, plain.logit_scale) == (1, 1e-5, 1)
    assert read(tmp_path, GRANITE_31_8B, attention_multiplier=ABSENT).layers[0].attention.scale == 1


@pytest.mark.parametrize(
    "field",
    ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"],
)
@pytest.mark.parametrize("value", [0, -1.0, "2", True, float("inf")])
def test_granites_multipliers_are_positive(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(WrongType, match=field):
        read(tmp_path, GRANITE_31_8B, **{field: value})


# --- norms ----------------------------------------------------------------------------------------


def test_families_differ_in_where_norms_are(tmp_path: Path) -> None:
    def names(base: dict[str, Any]) -> list[str]:
        specs = tensors(read(tmp_path, base))
        own = (spec.sources[0].name for spec in specs if spec.name.startswith("layers.0."))
        return [name.split(".")[-2] for name in own if name.endswith("norm.weight")]

    assert names(OLMO2_7B) == [
        *("post_attention_layernorm", "q_norm", "k_norm", "post_feedforward_layernorm"),
    ]
    assert names(GLM4_9B_CHAT) == ["input_layernorm", "post_attention_layernorm"]
    assert names(GLM4_9B_0414) == [
        *("input_layernorm", "post_self_attn_layernorm"),
        *("post_attention_layernorm", "post_mlp_layernorm"),
    ]
    assert names(GEMMA3_1B) == [
        *("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ]


def test_olmo_norms_all_queries_together(tmp_path: Path) -> None:
    config = read(tmp_path, OLMO2_7B, num_key_value_heads=8)
    assert sources(config, "layers.0.q_norm") == {"model.layers.0.self_attn.q_norm.weight": (4096,)}
    assert sources(config, "layers.0.k_norm") == {"model.layers.0.self_attn.k_norm.weight": (1024,)}


def test_glm_turns_neighbours_in_half_of_a_head(tmp_path: Path) -> None:
    for base in (GLM4_9B_CHAT, GLM4_9B_0414):
        config = read(tmp_path, base)
        assert config.rope == Rope(1e4, interleaved=True, share=0.5)
        assert config.layers[0].attention.qkv_bias
        assert not config.layers[0].attention.output_bias
        assert not read(tmp_path, base, attention_bias=False).layers[0].attention.qkv_bias


# --- Gemma 3 --------------------------------------------------------------------------------------


def test_gemma_has_local_and_global_layers(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_4B)
    windows = [layer.attention.window for layer in config.layers]
    ropes = [layer.attention.own_rope for layer in config.layers]
    assert windows == [None if i % 6 == 5 else 1024 for i in range(34)]
    assert ropes == [None if i % 6 == 5 else Rope(1e4) for i in range(34)]
    assert config.rope == Rope(1e6, LinearScaling(8.0))
    assert config.ropes == (config.rope, Rope(1e4))
    assert (config.norm_offset, config.embedding_scale) == (1.0, 2560**0.5)


def test_gemmas_scale_need_not_be_that_of_its_heads(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_1B, head_dim=128, query_pre_attn_scalar=168)  # 27B
    assert config.layers[0].attention.scale == 168**-0.5


def test_both_spellings_of_gemmas_ropes_mean_the_same(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    bare = {"rope_theta": ABSENT, "rope_local_base_freq": ABSENT, "rope_scaling": ABSENT}
    by_kind = {
        "full_attention": {"rope_theta": 1e6, **linear},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    old = read(tmp_path, GEMMA3_1B, rope_scaling=linear)
    assert read(tmp_path, GEMMA3_1B, **bare, rope_parameters=by_kind) == old
    by_kind["sliding_attention"] = None
    assert read(tmp_path, GEMMA3_1B, **bare, rope_parameters=by_kind) == old
    assert read(tmp_path, GEMMA3_1B, **bare) == read(tmp_path, GEMMA3_1B)
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)]
    for pattern in (ABSENT, 6):
        listed = {"layer_types": kinds, "sliding_window_pattern": pattern}
        assert read(tmp_path, GEMMA3_1B, **listed, _sliding_window_pattern=4) == read(
            tmp_path, GEMMA3_1B
        )


@pytest.mark.parametrize(
    ("changes", "field", "error"),
    [
        ({"layer_types": ["full_attention"] * 26}, "sliding_window_pattern", UnsupportedField),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern", WrongType),
        ({"sliding_window": ABSENT}, "sliding_window", MissingField),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", WrongType),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping", UnsupportedField),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", UnsupportedField),
        ({"use_bidirectional_attention": True}, "use_bidirectional", UnsupportedField),
        ({"hidden_activation": "gelu"}, "hidden_activation", UnsupportedField),
        ({"rope_local_base_freq": 1}, "rope_local_base_freq", WrongType),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor", MissingField),
        ({"rope_parameters": {}}, "rope_theta", UnsupportedField),
        (
            {"rope_theta": ABSENT, "rope_local_base_freq": ABSENT,
             "rope_parameters": {"chunked_attention": {}}},
            r"rope_parameters\.chunked_attention", UnknownField,
        ),
    ],
)  # fmt: skip
def test_gemma_refuses(
    changes: dict[str, Any], field: str, error: type[ConfigError], tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"'{field}"):
        read(tmp_path, GEMMA3_1B, **changes)


# --- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "wanted"),
    [
        (PHI4, "lm_head.weight"),
        (PHI4_MINI, "lm_head.weight"),
        (MISTRAL_SMALL_31_24B, "language_model.lm_head.weight"),
        (GEMMA3_4B, "language_model.lm_head.weight"),
    ],
    ids=["phi3", "phi3-tied", "mistral3", "gemma3-tied"],
)
def test_the_head_has_a_name_also_where_it_is_tied(
    base: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    config = read(tmp_path, base)
    specs = tensors(config)
    assert head_name(specs) == wanted
    assert head_name(untied(config, specs)[1]) == wanted
    assert is_head(wanted.removesuffix(".weight"))
