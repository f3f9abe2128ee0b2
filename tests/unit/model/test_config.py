"""Reading config.json: published shapes pass, everything that is not understood is named."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soloist.errors import (
    ConfigError,
    MissingField,
    NotAcceptable,
    NotAModel,
    UnknownFamily,
    UnknownField,
    UnsupportedField,
    WrongType,
)
from soloist.model.config import Lanes, Mlp, ModelConfig, Router
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from soloist.model.tensors import of_a_token, parameters, streamed
from unit.model.configurations import (
    ABSENT,
    LANEFORMER_2B,
    LLAMA3_RULES,
    LLAMA_32_1B,
    MISTRAL_7B,
    PUBLISHED,
    QWEN3_17B,
    QWEN25_05B,
    SMOLLM3_3B,
    changed,
    changed_text,
    written,
)

PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "mistral-7b-v0.1": 7_241_732_096,
    "smollm3-3b": 3_075_098_624,
    "smollm2-135m": 134_515_008,
    "laneformer-2b": 2_320_069_632,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "mistral-small-3.1-24b": 23_572_403_200,
    "granite-3.1-8b": 8_170_848_256,
    "olmo-2-7b": 7_298_617_344,
    "glm-4-9b-chat": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
    "mixtral-8x7b": 46_702_792_704,
    "glm-4.5-air": 106_852_245_504 + 45 * 128,  # with the corrections, which are buffers
}


# Published files leave out what is the same as the defaults of their family: 4B most of all.
OF_GEMMA = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}


def read(folder: Path, base: dict[str, Any], **changes: object) -> ModelConfig:
    return read_config(written(folder, changed_text(base, **changes)))


# --- published shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_their_published_size(name: str, tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED[name])
    assert parameters(tensors(config)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_keep_their_sizes(name: str, tmp_path: Path) -> None:
    values = PUBLISHED[name]
    config = read(tmp_path, values)
    first = config.layers[0]
    assert config.family == values["model_type"]
    values = {**OF_GEMMA, **values.get("text_config", values)}
    assert config.hidden_size == values["hidden_size"]
    assert config.vocab_size == values["vocab_size"]
    assert config.num_layers == values["num_hidden_layers"]
    assert config.context_tokens == values["max_position_embeddings"]
    assert config.rope.theta == values["rope_theta"]
    assert first.attention.num_query_heads == values["num_attention_heads"]
    assert first.attention.num_kv_heads == values["num_key_value_heads"]
    if isinstance(first.mlp, Mlp):
        assert first.mlp.intermediate_size == values["intermediate_size"]
    for mixture in config.mixtures:
        size = values.get("moe_intermediate_size", values["intermediate_size"])
        assert mixture.expert.intermediate_size == size
        assert mixture.router.num_chosen == values["num_experts_per_tok"]
    tied = config.family not in {"mistral", "mistral3"}
    assert config.tied_head is values.get("tie_word_embeddings", tied)


def test_llama_reads_its_rope_rule(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_32_1B)
    assert config.rope == Rope(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert config.kv_values_per_token == 2 * 8 * 64 * 16
    assert config.layers[0].attention.queries_per_kv_head == 4


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    def kinds(values: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        layer = read(tmp_path, values).layers[0]
        a = layer.attention
        return a.qkv_bias, a.output_bias, a.qk_norm, layer.mlp.bias

    both = {"attention_bias": True, "mlp_bias": True}
    assert kinds(LLAMA_32_1B) == (False, False, False, False)
    assert kinds(changed(LLAMA_32_1B, **both)) == (True, True, False, True)
    assert kinds(QWEN25_05B) == (True, False, False, False)
    assert kinds(QWEN3_17B) == (False, False, True, False)
    assert kinds(changed(QWEN3_17B, attention_bias=True)) == (True, True, True, False)
    assert kinds(MISTRAL_7B) == (False, False, False, False)
    assert kinds(changed(SMOLLM3_3B, **both)) == (True, True, False, True)


def test_qwen2_has_the_same_biases_whatever_a_file_says(tmp_path: Path) -> None:
    for value in (True, False):
        assert read(tmp_path, QWEN25_05B, attention_bias=value) == read(tmp_path, QWEN25_05B)


def test_a_null_field_is_an_absent_one(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_32_1B)
    for name in ("sliding_window", "quantization_config", "attn_logit_softcapping", "pruned_heads"):
        assert read(tmp_path, LLAMA_32_1B, **{name: None}) == config
    heads = read(tmp_path, LLAMA_32_1B, num_key_value_heads=None).layers[0].attention
    assert heads.num_kv_heads == heads.num_query_heads
    assert read(tmp_path, LLAMA_32_1B, head_dim=None) == config


def test_what_a_token_reads_leaves_out_an_untied_embedding(tmp_path: Path) -> None:
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        config = read(tmp_path, PUBLISHED[name])
        specs = tensors(config)
        embedding = 0 if config.tied_head else config.vocab_size * config.hidden_size
        seen = parameters(streamed(specs, config.num_chosen, tied_head=config.tied_head))
        assert seen == parameters(specs) - embedding


@pytest.mark.parametrize("count", [10_001, 200_000, 2**31 - 1])
@pytest.mark.parametrize("name", PUBLISHED)
def test_more_layers_than_any_model_has_are_refused_at_once(
    name: str, count: int, tmp_path: Path
) -> None:
    with pytest.raises(WrongType, match=r"num_hidden_layers.*at most 10000"):
        read(tmp_path, PUBLISHED[name], num_hidden_layers=count)


# --- windows and rope layers ---------------------------------------------------------------------


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def test_mistral_slides_everywhere_or_nowhere(tmp_path: Path) -> None:
    assert windows(read(tmp_path, MISTRAL_7B)) == [4096] * 32
    assert windows(read(tmp_path, MISTRAL_7B, sliding_window=None)) == [None] * 32
    assert windows(read(tmp_path, MISTRAL_7B, sliding_window=ABSENT)) == [4096] * 32
    assert (
        windows(read(tmp_path, MISTRAL_7B, sliding_window=None, use_sliding_window=False))
        == [None] * 32
    )
    for contradiction in ({"use_sliding_window": False}, {"sliding_window": None}):
        with pytest.raises(UnsupportedField, match="use_sliding_window"):
            read(tmp_path, MISTRAL_7B, **{"use_sliding_window": True, **contradiction})


@pytest.mark.parametrize("base", [QWEN25_05B, QWEN3_17B], ids=["qwen2", "qwen3"])
def test_qwen_slides_from_max_window_layers_on(base: dict[str, Any], tmp_path: Path) -> None:
    layers = base["num_hidden_layers"]
    on = {"use_sliding_window": True, "sliding_window": 512}
    assert windows(read(tmp_path, base)) == [None] * layers
    for full in (0, 5, layers, layers + 9):
        seen = windows(read(tmp_path, base, **on, max_window_layers=full))
        assert seen == [None if i < full else 512 for i in range(layers)]
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    assert windows(read(tmp_path, base, **on, layer_types=kinds)) == [512, None] * (layers // 2)
    with pytest.raises(MissingField, match="max_window_layers"):
        read(tmp_path, base, **on, max_window_layers=ABSENT)
    with pytest.raises(MissingField, match="sliding_window"):
        read(tmp_path, base, use_sliding_window=True, sliding_window=None, max_window_layers=0)


def test_sliding_layers_without_the_switch_are_refused(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 28
    with pytest.raises(UnsupportedField, match="layer_types"):
        read(tmp_path, QWEN3_17B, layer_types=kinds, sliding_window=9)


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        (["full_attention"] * 27, WrongType),
        (["full_attention"] * 27 + ["chunked_attention"], UnsupportedField),
        (["full_attention"] * 27 + [3], UnsupportedField),
        ("full_attention", WrongType),
    ],
)
def test_layer_types_must_fit(kinds: object, error: type[ConfigError], tmp_path: Path) -> None:
    with pytest.raises(error, match="layer_types"):
        read(tmp_path, QWEN3_17B, layer_types=kinds)


def rotates(config: ModelConfig) -> list[bool]:
    return [layer.attention.rope for layer in config.layers]


def test_smollm3_rotates_three_layers_of_four(tmp_path: Path) -> None:
    pattern = [True, True, True, False] * 9
    assert rotates(read(tmp_path, SMOLLM3_3B)) == pattern
    bare = changed(SMOLLM3_3B, no_rope_layers=ABSENT, no_rope_layer_interval=ABSENT)
    assert rotates(read(tmp_path, bare)) == pattern
    assert rotates(read(tmp_path, bare, no_rope_layer_interval=2)) == [True, False] * 18
    slides = changed(
        bare, use_sliding_window=True, sliding_window=64, layer_types=ABSENT, rope_scaling=ABSENT
    )
    assert windows(read(tmp_path, slides)) == [None, None, None, 64] * 9
    with pytest.raises(WrongType, match="no_rope_layers"):
        read(tmp_path, SMOLLM3_3B, no_rope_layers=[1, 0])
    with pytest.raises(WrongType, match="no_rope_layers"):
        read(tmp_path, SMOLLM3_3B, no_rope_layers=[2] * 36)
    assert read(tmp_path, bare, tie_word_embeddings=False).tied_head is False


# --- rope ----------------------------------------------------------------------------------------

BARE = changed(LLAMA_32_1B, rope_scaling=ABSENT, rope_theta=ABSENT)
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({"rope_type": "default"}, None),
        ({}, None),
        ({"rope_type": "default", "factor": 1.0}, None),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(2.0)),
        (LLAMA3_RULES, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        (
            {"rope_type": "yarn", **YARN},
            YarnScaling(4.0, 32768, 32.0, 1.0, 0.1 * math.log(4) + 1, True),
        ),
        (
            {"rope_type": "yarn", **YARN, "attention_factor": 1.5, "truncate": False},
            YarnScaling(4.0, 32768, 32.0, 1.0, 1.5, False),
        ),
    ],
)
def test_both_spellings_of_rope_mean_the_same(
    rules: dict[str, Any], wanted: object, tmp_path: Path
) -> None:
    new = read(tmp_path, BARE, rope_parameters={"rope_theta": 7e5, **rules})
    middle = read(tmp_path, BARE, rope_theta=7e5, rope_parameters=rules)
    old_rules = {("type" if k == "rope_type" else k): v for k, v in rules.items()}
    old = read(tmp_path, BARE, rope_theta=7e5, rope_scaling=old_rules)
    both = read(tmp_path, BARE, rope_theta=7e5, rope_scaling={**rules, **old_rules})
    assert new.rope == Rope(7e5, wanted)
    assert new == middle == old == both


def test_rope_without_a_rule_takes_the_base(tmp_path: Path) -> None:
    assert read(tmp_path, BARE, rope_theta=5e5).rope == Rope(5e5)
    assert read(tmp_path, BARE, rope_theta=5e5, rope_scaling=None).rope == Rope(5e5)
    assert read(tmp_path, BARE).rope == Rope(10_000.0)
    assert read(tmp_path, changed(SMOLLM3_3B, rope_theta=ABSENT)).rope == Rope(2_000_000.0)


def test_a_dynamic_rule_is_plain_up_to_the_models_context(tmp_path: Path) -> None:
    rules = {"type": "dynamic", "factor": 4.0}
    assert read(tmp_path, BARE, rope_scaling=rules) == read(tmp_path, BARE)
    with pytest.raises(MissingField, match=r"rope_scaling\.factor"):
        read(tmp_path, BARE, rope_scaling={"type": "dynamic"})


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    rules = {"type": "yarn", **YARN}
    assert read(tmp_path, QWEN3_17B, rope_scaling=rules).context_tokens == 131072


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type"),
        (
            {"rope_scaling": {**YARN, "type": "dynamic"}},
            "rope_scaling.original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_scaling.type"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}}, "rope_scaling.type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, "rope_scaling.x"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
        ({"rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "default"}},
            "rope_scaling",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention",
        ),
    ],
)
def test_other_rope_rules_are_refused(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedField) as caught:
        read(tmp_path, BARE, **changes)
    assert f"'{field}'" in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "field", "error"),
    [
        ({"rope_type": "linear"}, "factor", MissingField),
        ({"rope_type": "linear", "factor": "2"}, "factor", WrongType),
        ({"rope_type": "linear", "factor": 0}, "factor", WrongType),
        ({"rope_type": "linear", "factor": True}, "factor", WrongType),
        ({"rope_type": 3}, "rope_type", WrongType),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings", MissingField),
        ({"rope_type": "yarn", **YARN, "truncate": 1}, "truncate", WrongType),
        ({"rope_type": "yarn", **YARN, "beta_fast": -1.0}, "beta_fast", WrongType),
        ({**LLAMA3_RULES, "high_freq_factor": 1.0}, "high_freq_factor", WrongType),
        ({**LLAMA3_RULES, "original_max_position_embeddings": 8.5}, "original", WrongType),
        ({"rope_theta": 1.0}, "rope_theta", WrongType),
        ({"rope_type": "yarn", **YARN, "factor": 1e308}, "factor", WrongType),
        ({"rope_type": "yarn", **YARN, "beta_slow": 1e-308}, "beta_slow", WrongType),
    ],
)
def test_rope_rules_are_typed(
    rules: object, field: str, error: type[ConfigError], tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"rope_parameters.{field}"):
        read(tmp_path, BARE, rope_parameters=rules)


def test_rope_rules_are_an_object(tmp_path: Path) -> None:
    with pytest.raises(WrongType, match="rope_scaling"):
        read(tmp_path, BARE, rope_scaling="linear")


# --- refusals ------------------------------------------------------------------------------------

REQUIRED = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
]
DENSE = [n for n in PUBLISHED if n != "laneformer-2b"]
# Families that take such a field, whose value is tested with them.
TAKEN = {
    "partial_rotary_factor": ("phi", "glm"),
    "residual_multiplier": ("granite",),
    "num_experts": ("qwen3-30b", "qwen1.5", "olmoe", "mixtral"),
    "num_nextn_predict_layers": ("glm-4.5",),
}


def path(name: str, field: str) -> str:
    """A field as messages name it."""
    return f"text_config.{field}" if "text_config" in PUBLISHED[name] else field


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("name", DENSE)
def test_missing_fields_are_named(name: str, field: str, tmp_path: Path) -> None:
    # Of mixtures it is the size of layers without experts, where there are any.
    is_idle = field == "intermediate_size" and name.startswith(("qwen3-30b", "qwen1.5"))
    if is_idle or ("gemma" in name and field in {*OF_GEMMA, "rms_norm_eps"}):
        read(tmp_path, PUBLISHED[name], **{field: ABSENT})
        return
    with pytest.raises(MissingField, match=f"'{path(name, field)}'") as caught:
        read(tmp_path, PUBLISHED[name], **{field: ABSENT})
    assert caught.value.field == path(name, field)
    assert "hint:" in str(caught.value)


def test_qwen3_needs_its_head_dim(tmp_path: Path) -> None:
    with pytest.raises(MissingField, match="head_dim"):
        read(tmp_path, QWEN3_17B, head_dim=ABSENT)


@pytest.mark.parametrize("value", ["2048", True, -8, 0, 1.5, 2**31, [2048], {}])
@pytest.mark.parametrize("field", [*REQUIRED[:6], "num_key_value_heads", "head_dim"])
def test_whole_numbers_are_whole(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(WrongType, match=f"'{field}'") as caught:
        read(tmp_path, LLAMA_32_1B, **{field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["1e-5", True, -1e-5, 0, math.nan, math.inf, 1e16, 10**400, []])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_numbers_are_finite(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(WrongType, match=f"'{field}'"):
        read(tmp_path, LLAMA_32_1B, **{field: value})


@pytest.mark.parametrize("value", ["true", 1, 0, []])
@pytest.mark.parametrize("field", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_flags_are_true_or_false(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(WrongType, match=f"'{field}'"):
        read(tmp_path, LLAMA_32_1B, **{field: value})


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.75),
        ("attn_logit_softcapping", 50),
        ("final_logit_softcapping", 30.0),
        ("residual_multiplier", 0.22),
        ("rope_interleaved", True),
        ("num_experts", 8),
        ("pruned_heads", {"0": [1]}),
    ],
)
def test_what_would_change_the_output_is_refused(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    if name.startswith(TAKEN.get(field, ())):
        read(tmp_path, PUBLISHED[name], **{field: value})
        return
    with pytest.raises(UnsupportedField, match=f"'{path(name, field)}'") as caught:
        read(tmp_path, PUBLISHED[name], **{field: value})
    assert caught.value.field == path(name, field)
    assert PUBLISHED[name]["model_type"] in str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_changes_nothing_is_accepted(name: str, tmp_path: Path) -> None:
    wanted = read(tmp_path, PUBLISHED[name])
    for field, value in (
        ("max_sequence_length", 2048), ("trl_version", "0.19"), ("model_max_length", 8192),
        ("use_flash_attn", True), ("is_causal", True), ("embd_pdrop", 0.0), ("resid_pdrop", 0),
        ("hidden_dropout", 0.0), ("logit_scale", 1), ("num_nextn_predict_layers", 0),
        ("lm_head_bias", False),
    ):  # fmt: skip
        assert read(tmp_path, PUBLISHED[name], **{field: value}) == wanted


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_causal", False),
        ("is_causal", 1),
        ("embd_pdrop", 0.1),
        ("embd_pdrop", False),
        ("hidden_dropout", "0.0"),
        ("logit_scale", 0.0625),
        ("num_nextn_predict_layers", 1),
        ("lm_head_bias", True),
    ],
)
def test_other_values_of_the_same_fields_are_refused(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    if name.startswith(TAKEN.get(field, ())):
        read(tmp_path, PUBLISHED[name], **{field: value})
        return
    with pytest.raises(UnsupportedField, match=f"'{path(name, field)}'.*allowed: absent or"):
        read(tmp_path, PUBLISHED[name], **{field: value})


def test_llama_has_no_sliding_window_to_switch_on(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA_32_1B, use_sliding_window=False) == read(tmp_path, LLAMA_32_1B)
    with pytest.raises(UnsupportedField, match="use_sliding_window"):
        read(tmp_path, LLAMA_32_1B, use_sliding_window=True)


@pytest.mark.parametrize("zero", [0, 0.0])
@pytest.mark.parametrize("field", ["mscale", "mscale_all_dim"])
def test_yarn_without_an_mscale_has_the_usual_temperature(
    field: str, zero: float, tmp_path: Path
) -> None:
    rules = {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.5}
    bare = read(tmp_path, BARE, rope_scaling={"rope_type": "yarn", **YARN})
    assert read(tmp_path, BARE, rope_scaling=rules) != bare
    assert read(tmp_path, BARE, rope_scaling={**rules, field: zero}) == bare


def test_weights_for_mlx_are_named(tmp_path: Path) -> None:
    how = {"group_size": 64, "bits": 4}
    with pytest.raises(NotAModel, match="format of MLX"):
        read(tmp_path, LLAMA_32_1B, quantization=how, quantization_config=how)


def test_an_unknown_field_is_accepted_by_name(tmp_path: Path) -> None:
    file = written(
        tmp_path, changed(LLAMA_32_1B, made_by="me", rope_scaling={**LLAMA3_RULES, "x": 1})
    )
    with pytest.raises(UnknownField, match=r"'rope_scaling\.x' is 1") as caught:
        read_config(file, ["made_by"])
    assert caught.value.field == "rope_scaling.x"
    assert caught.value.hint.endswith("--accept-field rope_scaling.x")
    with pytest.raises(UnknownField, match="made_by"):
        read_config(file, ["rope_scaling.x"])
    accepted = read_config(file, ["made_by", "rope_scaling.x"])
    assert accepted == read(tmp_path, LLAMA_32_1B)


@pytest.mark.parametrize("value", ["gelu", "silu", None])
def test_a_known_field_is_never_accepted(value: object, tmp_path: Path) -> None:
    file = written(tmp_path, changed(LLAMA_32_1B, hidden_act=value))
    with pytest.raises(ConfigError, match="hidden_act") as caught:
        read_config(file, ["hidden_act"])
    assert "--accept-field" in str(caught.value)
    assert isinstance(caught.value, UnsupportedField if value == "gelu" else NotAcceptable)


@pytest.mark.parametrize("field", ["is_causal", "nothing", "torch_dtype"])
def test_a_field_that_is_not_refused_as_unknown_is_not_acceptable(
    field: str, tmp_path: Path
) -> None:
    with pytest.raises(NotAcceptable, match=f"'{field}'.* has no such field, or Soloist knows it"):
        read_config(written(tmp_path, changed(LLAMA_32_1B, is_causal=True)), [field])


def test_another_value_of_a_neutral_field_is_never_accepted(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedField, match="is_causal"):
        read_config(written(tmp_path, changed(LLAMA_32_1B, is_causal=False)), ["is_causal"])


def test_fields_of_other_families_are_refused(tmp_path: Path) -> None:
    for base, changes in (
        (LLAMA_32_1B, {"sliding_window": 4096}),
        (MISTRAL_7B, {"attention_bias": True}),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}),
        (QWEN25_05B, {"use_mrope": True}),
        (QWEN25_05B, {"mlp_bias": True}),
        (QWEN3_17B, {"no_rope_layers": [1] * 28}),
    ):
        with pytest.raises(UnsupportedField, match=next(iter(changes))):
            read(tmp_path, base, **changes)


def test_heads_must_divide(tmp_path: Path) -> None:
    with pytest.raises(WrongType, match="a divisor of 32 query heads"):
        read(tmp_path, LLAMA_32_1B, num_key_value_heads=5)
    with pytest.raises(WrongType, match="num_key_value_heads"):
        read(tmp_path, LLAMA_32_1B, num_key_value_heads=64)
    with pytest.raises(WrongType, match="even number"):
        read(tmp_path, LLAMA_32_1B, head_dim=63)
    with pytest.raises(MissingField, match="head_dim"):
        read(tmp_path, LLAMA_32_1B, head_dim=ABSENT, hidden_size=2049)


def test_unknown_families_are_named_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownFamily, match="gpt_oss") as caught:
        read(tmp_path, LLAMA_32_1B, model_type="gpt_oss")
    with pytest.raises(UnknownFamily) as caught:
        read(tmp_path, LLAMA_32_1B, model_type="q" * 3_000_000)
    assert len(caught.value.message) < 1000, "a long name is not told whole"
    assert all(family in str(caught.value) for family in FAMILIES)
    with pytest.raises(MissingField, match="model_type"):
        read(tmp_path, LLAMA_32_1B, model_type=ABSENT)
    with pytest.raises(WrongType, match="model_type"):
        read(tmp_path, LLAMA_32_1B, model_type=["llama"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[]",
        b"3",
    ],
    ids=["empty", "cut", "text", "bytes", "deep", "digits", "list", "number"],
)
def test_damaged_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "config.json")


SOME_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["type", "rope_type", "factor", "rope_theta"]), st.integers()),
)


@given(data=st.data())
@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_any_change_is_read_or_refused_as_a_configuration_error(
    data: st.DataObject, tmp_path: Path
) -> None:
    base = data.draw(st.sampled_from(list(PUBLISHED.values())))
    names = st.sampled_from([*base, "rope_parameters", "layer_types", "use_comm", "other"])
    changes = data.draw(st.dictionaries(names, SOME_VALUE, max_size=3))
    with suppress(ConfigError):
        config = read(tmp_path, base, **changes)
        assert config.num_layers > 0
        assert all(spec.num_values > 0 for spec in tensors(config))
        head_dim = config.layers[0].attention.head_dim
        if head_dim < 2**16:
            assert all(f > 0 for f in config.rope.inverse_frequencies(head_dim))


# --- laneformer ----------------------------------------------------------------------------------


def test_laneformer_reads_its_lanes(tmp_path: Path) -> None:
    config = read(tmp_path, LANEFORMER_2B)
    assert config.lanes == Lanes(
        num_lanes=8,
        delay_layers=2,
        early_sum=True,
        attention_comm=True,
        mlp_comm=True,
        shared_norm_scales=True,
        head="replicate",
        sum_before_norm=False,
    )
    assert config.rope == Rope(10_000.0, interleaved=True)
    assert config.layers[0].attention.head_dim == 96
    assert windows(config) == [2048] * 10 + [None] * 5


def test_both_spellings_of_communication(tmp_path: Path) -> None:
    for value in (True, False):
        split = {"use_attention_comm": value, "use_mlp_comm": value}
        joint = {"use_comm": value, "use_attention_comm": ABSENT, "use_mlp_comm": ABSENT}
        assert read(tmp_path, LANEFORMER_2B, **split) == read(tmp_path, LANEFORMER_2B, **joint)
    with pytest.raises(UnsupportedField, match="use_attention_comm"):
        read(tmp_path, LANEFORMER_2B, use_comm=True)
    with pytest.raises(MissingField, match="use_mlp_comm"):
        read(tmp_path, LANEFORMER_2B, use_mlp_comm=ABSENT)


@pytest.mark.parametrize(
    ("count", "exempt", "wanted"),
    [
        (10, ABSENT, list(range(10))),
        (0, ABSENT, []),
        (-4, ABSENT, [11, 12, 13, 14]),
        (15, [3, 4], [i for i in range(15) if i not in {3, 4}]),
        (-15, [], list(range(15))),
    ],
)
def test_both_spellings_of_sliding_layers(
    count: int, exempt: object, wanted: list[int], tmp_path: Path
) -> None:
    early = read(
        tmp_path,
        LANEFORMER_2B,
        swa_layers=ABSENT,
        sliding_window_n_layers=count,
        unclamped_layers=exempt,
    )
    assert early == read(tmp_path, LANEFORMER_2B, swa_layers=wanted)


@pytest.mark.parametrize(
    ("changes", "field", "error"),
    [
        ({"swa_layers": [15]}, "swa_layers", WrongType),
        ({"swa_layers": [-1]}, "swa_layers", WrongType),
        ({"swa_layers": ABSENT}, "swa_layers", MissingField),
        ({"sliding_window": ABSENT}, "sliding_window", MissingField),
        (
            {"swa_layers": ABSENT, "sliding_window_n_layers": 16},
            "sliding_window_n_layers",
            WrongType,
        ),
        ({"swa_layers": ABSENT, "sliding_window_n_layers": -16}, "sliding_window_n", WrongType),
        ({"sliding_window_n_layers": 10}, "sliding_window_n_layers", UnsupportedField),
        ({"num_attention_heads": 12, "num_key_value_heads": 12}, "num_attention_heads", WrongType),
        ({"num_key_value_heads": 4}, "num_key_value_heads", WrongType),
        ({"intermediate_size": 12284}, "intermediate_size", WrongType),
        ({"hidden_size": 3073}, "head_dim", MissingField),
        ({"hidden_size": 32 * 95}, "head_dim", WrongType),
        ({"lm_head_type": "sum"}, "lm_head_type", UnsupportedField),
        ({"lm_head_type": "vocab_parallel", "vocab_size": 32001}, "vocab_size", WrongType),
        (
            {"lm_head_type": "lane", "pre_norm_lane_agg": True},
            "pre_norm_lane_agg",
            UnsupportedField,
        ),
        (
            {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False},
            "replicated_rmsn_scale",
            UnsupportedField,
        ),
        ({"lm_head_type": "lane", "tie_word_embeddings": True}, "tie_word_emb", UnsupportedField),
        ({"broadcast_delay": 0}, "broadcast_delay", WrongType),
        ({"hidden_act": "gelu"}, "hidden_act", UnsupportedField),
        ({"attention_bias": True}, "attention_bias", UnsupportedField),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps", UnsupportedField),
    ],
)
def test_laneformer_refuses(
    changes: dict[str, Any], field: str, error: type[ConfigError], tmp_path: Path
) -> None:
    with pytest.raises(error, match=field):
        read(tmp_path, LANEFORMER_2B, **changes)


@pytest.mark.parametrize(
    "field",
    [
        "num_lanes",
        "broadcast_delay",
        "use_early_comm",
        "lm_head_type",
        "pre_norm_lane_agg",
        "replicated_rmsn_scale",
        "norm_eps",
        "rope_theta",
        "num_key_value_heads",
        "tie_word_embeddings",
    ],
)
def test_laneformer_takes_no_generic_default(field: str, tmp_path: Path) -> None:
    with pytest.raises(MissingField, match=f"'{field}'"):
        read(tmp_path, LANEFORMER_2B, **{field: ABSENT})


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "at most the 128 experts that there are"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": ABSENT}, "num_experts_per_tok"),
        ("qwen3-30b-a3b", {"num_experts": ABSENT}, "num_experts"),
        ("qwen3-30b-a3b", {"num_local_experts": 64}, "num_local_experts"),
        ("qwen3-30b-a3b", {"num_experts": 10_000}, "131,072 in all layers"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [48]}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": ABSENT}, "moe_intermediate_size"),
        ("qwen3-30b-a3b", {"n_group": 4}, "n_group"),
        ("qwen3-30b-a3b", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ("qwen3-30b-a3b", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 768}, "shared_expert_intermediate"),
        ("qwen3-30b-a3b", {"num_zero_experts": 2}, "num_zero_experts"),
        ("qwen1.5-moe-a2.7b", {"shared_expert_intermediate_size": ABSENT}, "shared_expert_inter"),
        ("qwen1.5-moe-a2.7b", {"use_sliding_window": True}, "layer_types"),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe-1b-7b", {"head_dim": 64}, "head_dim"),
        ("mixtral-8x7b", {"num_local_experts": 1}, "num_experts_per_tok"),
        ("mixtral-8x7b", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm-4.5-air", {"n_group": 3}, "n_group"),
        ("glm-4.5-air", {"n_group": 128, "topk_group": 128}, "n_group"),
        ("glm-4.5-air", {"topk_group": 2}, "topk_group"),
        ("glm-4.5-air", {"n_group": 32, "num_experts_per_tok": 5}, "at most the 4 experts"),
        ("glm-4.5-air", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm-4.5-air", {"topk_method": "greedy"}, "topk_method"),
        ("glm-4.5-air", {"first_k_dense_replace": 47}, "first_k_dense_replace"),
        ("glm-4.5-air", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
    ],
)
def test_what_a_router_cannot_be_is_named(
    name: str, fields: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, PUBLISHED[name], **fields)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    def sparse(name: str, **fields: object) -> list[int]:
        layers = read(tmp_path, PUBLISHED[name], num_hidden_layers=6, **fields).layers
        return [i for i, layer in enumerate(layers) if not isinstance(layer.mlp, Mlp)]

    assert sparse("qwen3-30b-a3b") == [0, 1, 2, 3, 4, 5]
    assert sparse("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]
    assert sparse("glm-4.5-air") == [1, 2, 3, 4, 5]
    assert sparse("glm-4.5-air", first_k_dense_replace=3) == [3, 4, 5]


def test_routers_are_what_files_say(tmp_path: Path) -> None:
    def router(name: str, **fields: object) -> Router:
        return read(tmp_path, PUBLISHED[name], **fields).mixtures[0].router

    assert router("qwen3-30b-a3b") == Router(128, 8, normalises=True)
    assert router("qwen1.5-moe-a2.7b") == Router(60, 4)
    assert router("mixtral-8x7b") == Router(8, 2, normalises=True)
    assert router("glm-4.5-air", n_group=4, topk_group=2, routed_scaling_factor=2.5) == Router(
        128, 8, "sigmoid", is_corrected=True, num_groups=4, num_groups_kept=2, normalises=True,
        least_sum=1e-20, scale=2.5,
    )  # fmt: skip
    shared = read(tmp_path, PUBLISHED["qwen1.5-moe-a2.7b"]).mixtures[0]
    assert (shared.shared, shared.gates_shared) == (Mlp(5632), True)
    shared = read(tmp_path, PUBLISHED["glm-4.5-air"], n_shared_experts=2).mixtures[0]
    assert (shared.shared, shared.gates_shared) == (Mlp(2 * 1408), False)


def test_a_token_needs_its_own_experts(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED["qwen3-30b-a3b"])
    active = parameters(of_a_token(tensors(config), config.num_chosen))
    idle = 48 * (128 - 8) * 3 * 2048 * 768
    assert active == PARAMETERS["qwen3-30b-a3b"] - idle
