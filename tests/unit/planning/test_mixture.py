"""Sizes of mixtures of experts against what their makers publish, and sums by hand."""

import json
from pathlib import Path

import pytest

from soloist.errors import MissingField, UnknownFamily
from soloist.model.tensors import parameters
from soloist.planning.bounds import kv_bytes_read, speed_limit, step_cost
from soloist.planning.hardware import find_hardware
from soloist.planning.mixture import active_parameters, read_model
from soloist.planning.precision import SIXTEEN_BIT, find_precision
from soloist.planning.reach import Subject, find_shape_obstacle, reaches

# Published sizes of Qwen3-30B-A3B, Mixtral 8x7B, gpt-oss-120b and GLM-4.5-Air.
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "sliding_window": None,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "sliding_window": None,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
GLM_45_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def model_of(folder: Path, values: dict):
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return read_model(file)


@pytest.mark.parametrize(
    ("values", "billions", "active"),
    [
        (QWEN3_30B_A3B, 30.5, 3.35),
        (MIXTRAL_8X7B, 46.7, 12.9),
        (GPT_OSS_120B, 116.8, 5.7),  # published without the embedding: 5.1
        (GLM_45_AIR, 106.8, 13.3),  # published with the layer that drafts: 106 and 12
    ],
    ids=["qwen3", "mixtral", "gpt-oss", "glm"],
)
def test_published_sizes(tmp_path, values, billions, active):
    model = model_of(tmp_path, values)
    assert parameters(model.specs) / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_parameters(model) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_step_reads_the_experts_it_chooses(tmp_path):
    model = model_of(tmp_path, QWEN3_30B_A3B)
    cost = step_cost(model.config, model.specs, SIXTEEN_BIT, 1000, mixture=model.mixture)
    h, layers = 2048, 48
    attention = h * (32 + 2 * 4) * 128 + h * 32 * 128
    of_layer = attention + 128 * h + 2 * h + 8 * 3 * h * 768
    streamed = layers * of_layer + 151936 * h + h
    assert cost.weight_bytes == 2 * streamed
    assert cost.kv_bytes == 1000 * 2 * 4 * 128 * 2 * layers
    assert cost.exchanging_layers is None, "what experts wait for was not measured"
    assert cost.flops == 2 * streamed + 4 * 32 * 128 * 1000 * layers


def test_columns_wake_more_experts(tmp_path):
    model = model_of(tmp_path, QWEN3_30B_A3B)
    mixture = model.mixture
    assert mixture is not None
    experts = next(s for s in model.specs if s.name == "layers.0.experts.down")
    router = next(s for s in model.specs if s.name == "layers.0.router")
    assert mixture.share_read(experts, 1) == pytest.approx(8 / 128)
    assert mixture.share_read(experts, 2) == pytest.approx(1 - (120 / 128) ** 2)
    assert mixture.share_read(experts, 8) * 128 / 8 == pytest.approx(6.45, abs=0.01)
    assert mixture.share_read(router, 8) == 1
    one, eight = (
        step_cost(model.config, model.specs, SIXTEEN_BIT, 1, mixture=mixture, columns=n)
        for n in (1, 8)
    )
    assert one.weight_bytes < eight.weight_bytes < 8 * one.weight_bytes
    assert eight.flops == pytest.approx(8 * one.flops)


def test_four_billion_active_in_fp8_have_the_limit_of_two_dense_in_fp16(tmp_path):
    """The published rule, on a mixture whose head is small and whose experts are most of it."""
    values = {
        **QWEN3_30B_A3B, "vocab_size": 1000, "num_hidden_layers": 60,
        "moe_intermediate_size": 1000,
    }  # fmt: skip
    model = model_of(tmp_path, values)
    active = active_parameters(model)
    cost = step_cost(
        model.config, model.specs, find_precision("fp8"), 1, mixture=model.mixture
    )  # fmt: skip
    h200 = find_hardware("H200")
    moe = speed_limit(cost.weight_bytes, h200.bandwidth, 8)
    assert moe == pytest.approx(speed_limit(active // 2 * 2, h200.bandwidth, 8), rel=0.01)


def test_layers_that_slide(tmp_path):
    config = model_of(tmp_path, GPT_OSS_120B).config
    a_position = 2 * 8 * 64 * 2
    assert kv_bytes_read(config, 10_000) == 18 * a_position * (10_000 + 128)


def test_layers_without_experts(tmp_path):
    values = {**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    names = {s.name for s in model_of(tmp_path, values).specs}
    assert {"layers.0.gate_up", "layers.1.gate_up", "layers.3.experts.gate_up"} <= names
    assert "layers.1.experts.gate_up" not in names
    glm = {s.name for s in model_of(tmp_path, GLM_45_AIR).specs}
    assert {"layers.0.down", "layers.1.shared.down", "layers.1.experts.down"} <= glm
    assert "layers.0.experts.down" not in glm


def test_it_is_planned_for_and_does_not_run(tmp_path):
    model = model_of(tmp_path, QWEN3_30B_A3B)
    subject = Subject(model.config, model.specs, find_hardware("H200"), 8192, model.mixture)
    rows = reaches(subject, [SIXTEEN_BIT], [1, 8])
    assert [row.obstacle for row in rows] == ["no experts", "no experts"]
    assert "mixture of experts" in find_shape_obstacle(subject)
    assert rows[0].weights_bytes == 2 * parameters(model.specs)
    assert not rows[0].measured


def test_what_is_no_model_to_plan_for(tmp_path):
    with pytest.raises(UnknownFamily, match=r"mamba.*gpt_oss.*llama"):
        model_of(tmp_path, {"model_type": "mamba"})
    with pytest.raises(MissingField, match="num_experts_per_tok"):
        model_of(tmp_path, {k: v for k, v in GPT_OSS_120B.items() if k != "num_experts_per_tok"})
    with pytest.raises(MissingField, match="model_type"):
        model_of(tmp_path, {})
