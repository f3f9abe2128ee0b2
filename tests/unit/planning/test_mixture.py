"""Sizes of mixtures of experts against what their makers publish, and sums by hand."""

import json
from pathlib import Path

import pytest

from soloist.errors import ConfigError, MissingField, UnknownFamily, UnsupportedField, WrongType
from soloist.model.tensors import parameters
from soloist.planning.bounds import (
    Kind,
    attention_flops,
    kv_bytes_held,
    kv_bytes_read,
    prompt_cost,
    speed_limit,
    step_cost,
    weight_bytes,
)
from soloist.planning.hardware import find_hardware
from soloist.planning.model import active_parameters
from soloist.planning.precision import SIXTEEN_BIT, find_precision
from soloist.planning.reach import Subject, find_shape_obstacle, longest_context, reach, reaches
from soloist.planning.reading import read_model
from unit.model.configurations import LLAMA_31_8B
from unit.planning import mixtures


def model_of(folder: Path, values: dict):
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return read_model(file)


# Parameters as transformers' modules have them, and how many a token needs: published figures leave
# the embedding out or round it away (5.1 of gpt-oss, 37 of DeepSeek-V3, 2.4 of V2-Lite).
@pytest.mark.parametrize(
    ("values", "total", "active"),
    [
        (mixtures.QWEN3_30B_A3B, 30_532_122_624, 3.35e9),
        (mixtures.QWEN15_MOE, 14_315_784_192, 2.7e9),
        (mixtures.MIXTRAL_8X7B, 46_702_792_704, 12.9e9),
        (mixtures.GPT_OSS_120B, 116_829_156_672, 5.7e9),
        (mixtures.GLM_45_AIR, 106_851_586_048, 13.4e9),
        (mixtures.DEEPSEEK_V2_LITE, 15_706_484_224, 2.45e9 + 102400 * 2048),
        (mixtures.DEEPSEEK_V3, 671_026_404_352, 36.6e9 + 129280 * 7168),
        (mixtures.DEEPSEEK_V32, 671_877_929_216, 37.5e9 + 129280 * 7168),
        (mixtures.KIMI_K2, 1_026_408_209_408, 32.9e9),
        (mixtures.QWEN3_NEXT_80B_A3B, 79_674_391_296, 3.25e9 + 2 * 151936 * 2048),
        (mixtures.LLAMA4_SCOUT, 107_769_861_120, 17.2e9),
        (mixtures.LLAMA4_MAVERICK, 400_711_848_960, 17.2e9),
        (mixtures.PHI_35_MOE, 41_872_825_664, 6.5e9 + 32064 * 4096),
        (mixtures.OLMOE_1B_7B, 6_919_161_856, 1.28e9),
        (mixtures.GLM_47_FLASH, 29_943_390_976, 3.9e9),
        (mixtures.QWEN35_35B_A3B, 34_660_610_688, 2.95e9 + 248320 * 2048),
        (mixtures.MINIMAX_M2, 228_689_748_992, 9.8e9 + 2 * 200064 * 3072),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_sizes(tmp_path, values, total, active):
    model = model_of(tmp_path, values)
    # Biases are left out: those of gpt-oss are a three-thousandth.
    assert parameters(model.specs) == pytest.approx(total, rel=4e-4)
    assert active_parameters(model) == pytest.approx(active, rel=0.005)


def test_a_step_reads_the_experts_it_chooses(tmp_path):
    model = model_of(tmp_path, mixtures.QWEN3_30B_A3B)
    cost = step_cost(model, SIXTEEN_BIT, 1000)
    h, layers = 2048, 48
    attention = h * (32 + 2 * 4) * 128 + h * 32 * 128
    of_layer = attention + 128 * h + 2 * h + 2 * 128 + 8 * 3 * h * 768
    streamed = layers * of_layer + 151936 * h + h
    assert cost.weight_bytes == 2 * streamed
    assert cost.kv_bytes == 1000 * 2 * 4 * 128 * 2 * layers
    assert (cost.layers, cost.kind) == (48, Kind.EXPERTS)
    assert cost.certain_bytes == 2 * layers * (of_layer - 8 * 3 * h * 768)
    assert cost.flops == 2 * streamed + 4 * 32 * 128 * 1000 * layers


def test_latent_attention_by_hand(tmp_path):
    """DeepSeek-V3: matrices of a layer, latents instead of keys and values."""
    model = model_of(tmp_path, mixtures.DEEPSEEK_V3)
    h, layers, heads = 7168, 61, 128
    queries = 1536 * h + heads * (128 + 64) * 1536
    attention = queries + (512 + 64) * h + heads * (128 + 128) * 512 + h * heads * 128
    sparse = 256 * h + (8 + 1) * 3 * h * 2048
    norms = layers * 2 * h + h
    streamed = layers * attention + 3 * 3 * h * 18432 + 58 * sparse + norms + 129280 * h
    cost = step_cost(model, SIXTEEN_BIT, 1000)
    assert cost.weight_bytes == 2 * streamed
    # 512 latents and one rotated key of 64, for all heads together: 70,272 bytes a position.
    assert cost.kv_bytes == kv_bytes_held(model, 1000) == 1000 * (512 + 64) * 2 * layers
    # A step attends to latents (512 + 64 for scores, 512 for mixing), a prompt to keys and values.
    assert cost.flops == 2 * streamed + 2 * heads * (576 + 512) * 1000 * layers
    read = prompt_cost(model, SIXTEEN_BIT, 2000)
    weights = 2 * (streamed - 129280 * h)
    assert read.flops == 2000 * (weights + 2 * heads * (192 + 128) * 1000 * layers)
    # All matrices of layers but the router shrink.
    small = weight_bytes(model, find_precision("fp8"))
    kept = norms + 58 * 256 * h + 129280 * h
    assert small == pytest.approx((streamed - kept) * (1 + 4 / 128**2) + 2 * kept, rel=1e-9)


def test_queries_need_not_be_compressed(tmp_path):
    model = model_of(tmp_path, mixtures.DEEPSEEK_V2_LITE)
    shapes = {spec.name: spec.shape for spec in model.specs}
    assert shapes["layers.0.query"] == (16 * 192, 2048)
    assert shapes["layers.0.latents"] == (576, 2048)
    assert shapes["layers.0.gate_up"] == (2 * 10944, 2048)
    assert shapes["layers.1.shared.down"] == (2048, 2 * 1408)


def test_an_index_bounds_what_is_read_and_is_read_whole(tmp_path):
    model = model_of(tmp_path, mixtures.DEEPSEEK_V32)
    assert kv_bytes_held(model, 100_000) == 100_000 * (576 + 128) * 2 * 61
    assert kv_bytes_read(model, 100_000) == (2048 * 576 + 100_000 * 128) * 2 * 61
    assert kv_bytes_read(model, 1000) == kv_bytes_held(model, 1000)


def test_layers_that_share_an_index(tmp_path):
    """The first three and every fourth from then on have one, as in GLM-5.2: 17 of 61 here."""
    index = 1536 * 64 * 128 + (128 + 64) * 7168
    every = {**mixtures.DEEPSEEK_V32, "model_type": "glm_moe_dsa"}
    scheduled = {**every, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    own = [i < 3 or i % 4 == 2 for i in range(61)]
    listed = {**every, "indexer_types": ["full" if has else "shared" for has in own]}
    for values in (scheduled, listed):
        model = model_of(tmp_path, values)
        assert kv_bytes_held(model, 1000) == 1000 * (61 * 576 + sum(own) * 128) * 2
        without = parameters(model_of(tmp_path, every).specs) - parameters(model.specs)
        assert without == (61 - sum(own)) * index


def test_layers_that_keep_a_state_instead(tmp_path):
    """Qwen3-Next: 12 of 48 layers have keys and values, 36 a state that each step rewrites."""
    model = model_of(tmp_path, mixtures.QWEN3_NEXT_80B_A3B)
    state = 36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert model.state_values == state
    assert kv_bytes_held(model, 1000) == 1000 * 2 * 2 * 256 * 2 * 12 + 4 * state
    assert kv_bytes_read(model, 1000) == 1000 * 2 * 2 * 256 * 2 * 12 + 2 * 4 * state
    assert attention_flops(model, 1000) == 4 * 16 * 256 * 1000 * 12 + 7 * state
    shapes = {spec.name: spec.shape for spec in model.specs}
    assert shapes["layers.3.qkv"] == ((2 * 16 + 2 * 2) * 256, 2048), "with a gate for each query"
    assert shapes["layers.0.qkv"] == (2 * 16 * 128 + 2 * 32 * 128, 2048)
    kinds = [["linear_attention", "full_attention"][(i + 1) % 4 == 0] for i in range(48)]
    listed = {**mixtures.QWEN3_NEXT_80B_A3B, "layer_types": kinds}
    assert model_of(tmp_path, listed).specs == model.specs


def test_the_longest_context_beside_a_state_is_exact(tmp_path):
    model = model_of(tmp_path, mixtures.QWEN3_NEXT_80B_A3B)
    h100 = find_hardware("H100")
    longest = longest_context(Subject(model, h100, 1), find_precision("fp8"), 1)
    assert longest == 0, "80 GB hold no 80 GB of weights"
    tight = Subject(model, find_hardware("RTX 6000 Ada"), 1)
    longest = longest_context(tight, find_precision("int4"), 1)
    assert 0 < longest < model.context_tokens
    for tokens, fits in ((longest, True), (longest + 1, False)):
        assert reach(Subject(model, tight.hardware, tokens), find_precision("int4"), 1).fits is fits


def test_layers_that_see_a_chunk_and_have_experts_in_turn(tmp_path):
    model = model_of(tmp_path, mixtures.LLAMA4_MAVERICK)
    a_position = 2 * 8 * 128 * 2
    assert kv_bytes_read(model, 100_000) == a_position * (36 * 8192 + 12 * 100_000)
    names = {spec.name for spec in model.specs}
    assert {"layers.0.gate_up", "layers.1.experts.gate_up", "layers.1.shared.down"} <= names
    assert not {"layers.0.experts.gate_up", "layers.1.gate_up"} & names
    assert (model.config, model.is_part, model.family) == (None, True, "llama4_text")


def test_columns_wake_more_experts(tmp_path):
    model = model_of(tmp_path, mixtures.QWEN3_30B_A3B)
    mixture = model.mixture
    assert mixture is not None
    experts = next(s for s in model.specs if s.name == "layers.0.experts.down")
    router = next(s for s in model.specs if s.name == "layers.0.router")
    assert mixture.share_read(experts, 1) == pytest.approx(8 / 128)
    assert mixture.share_read(experts, 2) == pytest.approx(1 - (120 / 128) ** 2)
    assert mixture.share_read(experts, 8) * 128 / 8 == pytest.approx(6.45, abs=0.01)
    assert mixture.share_read(router, 8) == 1
    one, eight = (step_cost(model, SIXTEEN_BIT, 1, queries=n) for n in (1, 8))
    assert one.weight_bytes < eight.weight_bytes < 8 * one.weight_bytes
    assert eight.flops == pytest.approx(8 * one.flops)


def test_four_billion_active_in_fp8_have_the_limit_of_two_dense_in_fp16(tmp_path):
    """The published rule, on a mixture whose head is small and whose experts are most of it."""
    values = {
        **mixtures.QWEN3_30B_A3B, "vocab_size": 1000, "num_hidden_layers": 60,
        "moe_intermediate_size": 1000,
    }  # fmt: skip
    model = model_of(tmp_path, values)
    h200 = find_hardware("H200")
    moe = speed_limit(weight_bytes(model, find_precision("fp8")), h200.bandwidth, 8)
    dense_bytes = active_parameters(model) // 2 * 2
    assert moe == pytest.approx(speed_limit(dense_bytes, h200.bandwidth, 8), rel=0.01)


def test_layers_that_slide(tmp_path):
    a_position = 2 * 8 * 64 * 2
    seen = 18 * a_position * (10_000 + 128)
    assert kv_bytes_read(model_of(tmp_path, mixtures.GPT_OSS_120B), 10_000) == seen
    sliding = model_of(tmp_path, {**mixtures.MIXTRAL_8X7B, "sliding_window": 4096})
    assert kv_bytes_read(sliding, 10_000) == 4096 * 131_072, "every layer, without layer_types"


def test_layers_without_experts(tmp_path):
    values = {**mixtures.QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    names = {s.name for s in model_of(tmp_path, values).specs}
    assert {"layers.0.gate_up", "layers.1.gate_up", "layers.3.experts.gate_up"} <= names
    assert "layers.1.experts.gate_up" not in names
    glm = {s.name for s in model_of(tmp_path, mixtures.GLM_45_AIR).specs}
    assert {"layers.0.down", "layers.1.shared.down", "layers.1.experts.down"} <= glm
    assert "layers.0.experts.down" not in glm


# Heads as Qwen3-235B-A22B has them.
SIXTEEN_TO_ONE = {
    **mixtures.QWEN3_30B_A3B, "num_attention_heads": 64, "num_key_value_heads": 4
}  # fmt: skip


@pytest.mark.parametrize("values", [mixtures.QWEN3_30B_A3B, mixtures.MIXTRAL_8X7B, SIXTEEN_TO_ONE])
def test_what_runs_in_the_decode_kernel(values, tmp_path):
    """In 16 bits and in codes, on one GPU and several; how fast was measured in 16 bits on one."""
    subject = Subject(model_of(tmp_path, values), find_hardware("H200"), 8192)
    kinds = [SIXTEEN_BIT, *map(find_precision, ("fp8", "int4", "fp4"))]
    rows = reaches(subject, kinds, [1, 8])
    assert {(row.precision.name, row.obstacle) for row in rows} == {
        ("fp16/bf16", ""), ("fp8", ""), ("int4", ""), ("fp4", "no fp4 weights"),
    }  # fmt: skip
    assert find_shape_obstacle(subject) == ""
    measured = [(row.precision.name, row.gpus) for row in rows if row.measured]
    assert measured == [("fp16/bf16", 1)]


def test_experts_are_planned_for_the_reference_on_other_gpus(tmp_path):
    model = model_of(tmp_path, mixtures.QWEN3_30B_A3B)
    for name, arch in (("A100 80GB", "sm_80"), ("B200", "sm_100a")):
        subject = Subject(model, find_hardware(name), 8192)
        rows = reaches(subject, [SIXTEEN_BIT], [8])
        assert [row.obstacle for row in rows] == ["reference only"]
        assert f"a mixture of experts on {arch}" in find_shape_obstacle(subject)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (mixtures.OLMOE_1B_7B, "norms over all heads of queries and keys"),
        ({**mixtures.QWEN3_30B_A3B, "num_key_value_heads": 1}, "32 query heads to a KV head"),
    ],
)  # fmt: skip
def test_what_runs_on_the_reference_alone(values, named, tmp_path):
    subject = Subject(model_of(tmp_path, values), find_hardware("H200"), 8192)
    rows = reaches(subject, [SIXTEEN_BIT, find_precision("int4")], [1, 8])
    obstacles = {row.obstacle for row in rows}
    assert "reference only" in obstacles
    assert "" not in obstacles
    assert f"does not support {named}" in find_shape_obstacle(subject)


def test_it_is_planned_for_and_does_not_run(tmp_path):
    model = model_of(tmp_path, mixtures.DEEPSEEK_V2_LITE)
    subject = Subject(model, find_hardware("H200"), 8192)
    rows = reaches(subject, [SIXTEEN_BIT], [1, 8])
    assert [row.obstacle for row in rows] == ["not this family", "not this family"]
    assert "runs the family 'deepseek_v2'" in find_shape_obstacle(subject)
    assert rows[0].weights_bytes == 2 * parameters(model.specs)
    assert not rows[0].measured


def test_the_text_part_of_a_dense_model(tmp_path):
    text = {**LLAMA_31_8B, "model_type": "llama"}
    whole = model_of(tmp_path, {"model_type": "some_vision", "text_config": text})
    assert parameters(whole.specs) == 8_030_261_248
    (row,) = reaches(Subject(whole, find_hardware("H200"), 8192), [SIXTEEN_BIT], [1])
    assert (row.obstacle, row.measured) == ("no text parts", False)
    with pytest.raises(UnsupportedField, match=r"text_config\.new_field"):
        model_of(tmp_path, {"text_config": {**text, "new_field": 1}})
    with pytest.raises(MissingField, match=r"text_config\.model_type"):
        model_of(tmp_path, {"model_type": "some_vision", "text_config": {}})
    with pytest.raises(WrongType, match="text_config"):
        model_of(tmp_path, {"model_type": "some_vision", "text_config": "none"})


def test_what_is_no_model_to_plan_for(tmp_path):
    with pytest.raises(UnknownFamily, match=r"mamba.*gpt_oss.*llama"):
        model_of(tmp_path, {"model_type": "mamba"})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model_type": "?"}, "model_type"),
        (mixtures.GPT_OSS_120B, "num_experts_per_tok"),
        (mixtures.DEEPSEEK_V2_LITE, "q_lora_rank"),
        (mixtures.DEEPSEEK_V2_LITE, "n_shared_experts"),
        (mixtures.DEEPSEEK_V3, "first_k_dense_replace"),
        (mixtures.QWEN15_MOE, "shared_expert_intermediate_size"),
        (mixtures.MIXTRAL_8X7B, "num_local_experts"),
    ],
)
def test_a_field_that_is_not_there_is_named(tmp_path, values, field):
    with pytest.raises(MissingField, match=field):
        model_of(tmp_path, {name: value for name, value in values.items() if name != field})


@pytest.mark.parametrize(
    ("values", "field", "given"),
    [
        (mixtures.DEEPSEEK_V3, "num_zero_experts", 128),
        (mixtures.LLAMA4_SCOUT["text_config"], "cross_attention_layers", [3, 7]),
        (mixtures.MINIMAX_M2, "use_sliding_window", True),
        (mixtures.QWEN3_30B_A3B, "shared_expert_intermediate_size", 768),
        (mixtures.QWEN3_30B_A3B, "num_experts_per_tok", 129),
        (mixtures.MINIMAX_M2, "attn_type_list", [0] * 62),
        (mixtures.GPT_OSS_120B, "experts_per_token", 8),
        (mixtures.QWEN3_30B_A3B, "num_local_experts", 64),
        (mixtures.LLAMA4_SCOUT["text_config"], "no_rope_layers", [1, 0]),
    ],
)
def test_a_field_that_may_change_sizes_is_refused_by_name(tmp_path, values, field, given):
    with pytest.raises(ConfigError, match=field):
        model_of(tmp_path, {**values, field: given})
