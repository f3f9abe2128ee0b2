"""Sizes and limits against published and hand-worked arithmetic."""

import json
from pathlib import Path

import pytest

from soloist.errors import SettingError
from soloist.model.families import read_config, tensors
from soloist.planning.bounds import (
    Kind,
    attention_flops,
    kv_bytes_held,
    kv_bytes_read,
    speed_limit,
    step_cost,
    weight_bytes,
)
from soloist.planning.hardware import find_hardware
from soloist.planning.precision import (
    PRECISIONS,
    can_store,
    find_precision,
    is_quantised,
    stored_bytes,
    weights_bytes,
)
from soloist.planning.reading import read_model
from unit.model.configurations import LANEFORMER_2B, LLAMA_31_8B, written

# Llama 3.1 8B by hand: hidden 4,096, FFN 14,336, 32 layers, 32 / 8 heads of 128, 128,256 tokens.
LAYER_MATRICES = 4096 * (6144 + 4096) + 3 * 4096 * 14336
EMBEDDING = 128_256 * 4096
NORMS = 65 * 4096


@pytest.fixture
def llama(tmp_path: Path):
    return read_model(written(tmp_path, LLAMA_31_8B))


@pytest.mark.parametrize(
    ("parameters", "bits", "hardware", "tokens_per_s"),
    [
        (2.0e9, 16, "H200", 7_680),  # 8 × 4.8e12 × 0.8 / 4e9: published as about 7,700
        (2.0e9, 16, "MI300X", 8_480),  # 8 × 5.3e12 × 0.8 / 4e9: published as about 8,400
        (4.0e9, 8, "H200", 7_680),  # 4B active of a mixture of experts, in FP8
        (32.0e9, 4, "H200", 1_920),  # 32B active in FP4: published as about 2,000
    ],
)
def test_published_limits_of_eight_gpus_at_80_percent(parameters, bits, hardware, tokens_per_s):
    bandwidth = 0.8 * find_hardware(hardware).bandwidth
    num_bytes = stored_bytes(int(parameters), bits)
    assert speed_limit(num_bytes, bandwidth, 8) == pytest.approx(tokens_per_s)


def test_a_limit_grows_with_gpus_and_falls_with_bytes():
    assert speed_limit(4 * 10**9, 4.8e12, 1) == pytest.approx(1200)
    assert speed_limit(4 * 10**9, 4.8e12, 4) == pytest.approx(4800)
    assert speed_limit(8 * 10**9, 4.8e12, 1) == pytest.approx(600)


def test_stored_bytes_round_up():
    assert stored_bytes(1000, 16) == 2000
    assert stored_bytes(3, 4) == 2
    assert stored_bytes(128, 4 + 16 / 128) == 64 + 2
    assert stored_bytes(32, 4 + 8 / 32) == 16 + 1
    assert stored_bytes(128 * 128, 8 + 32 / 128**2) == 128 * 128 + 4


def test_sizes_of_llama_8b_in_16_bits(llama):
    specs = llama.specs
    fp16 = find_precision("fp16")
    every = 32 * LAYER_MATRICES + 2 * EMBEDDING + NORMS
    assert weights_bytes(specs, fp16) == 2 * every == 16_060_522_496
    # One row of the embedding is read, so none of it counts.
    assert weight_bytes(llama, fp16) == 2 * (every - EMBEDDING)


def test_only_the_matrices_of_layers_shrink(llama):
    specs = llama.specs
    rest = 2 * (2 * EMBEDDING + NORMS)
    assert weights_bytes(specs, find_precision("int4")) == 32 * LAYER_MATRICES * 33 // 64 + rest
    assert weights_bytes(specs, find_precision("fp4")) == 32 * LAYER_MATRICES * 17 // 32 + rest
    assert sum(is_quantised(s) for s in specs) == 4 * 32


def test_matrices_of_lanes_shrink_too(tmp_path):
    model = read_model(written(tmp_path, LANEFORMER_2B))
    assert sum(is_quantised(s) for s in model.specs) == 4 * model.num_layers
    assert step_cost(model, PRECISIONS[0], 100).kind is Kind.LANES


def test_keys_and_values(llama):
    assert kv_bytes_held(llama, 1) == 2 * 2 * 8 * 128 * 32 == 131_072
    assert kv_bytes_read(llama, 1000) == 131_072_000


def test_layers_that_slide_read_their_window_and_hold_everything(tmp_path):
    sliding = {**LLAMA_31_8B, "model_type": "mistral", "sliding_window": 4096}
    for name in ("rope_scaling", "attention_bias", "mlp_bias"):
        sliding.pop(name)
    model = read_model(written(tmp_path, sliding))
    assert kv_bytes_read(model, 100) == 100 * 131_072
    assert kv_bytes_read(model, 10_000) == 4096 * 131_072
    assert kv_bytes_held(model, 10_000) == 10_000 * 131_072
    assert attention_flops(model, 10_000) == attention_flops(model, 4096)


def test_cost_of_a_step(llama):
    cost = step_cost(llama, find_precision("bf16"), 1000)
    streamed = 32 * LAYER_MATRICES + EMBEDDING + NORMS
    assert cost.num_bytes == 2 * streamed + 131_072_000
    assert cost.flops == 2 * streamed + 4 * 32 * 128 * 1000 * 32
    assert (cost.layers, cost.kind) == (32, Kind.DENSE)


def test_rows_must_divide_into_groups(llama):
    specs = llama.specs
    assert all(can_store(specs, precision) for precision in PRECISIONS)
    etude = Path(__file__).parents[3] / "src/soloist/models/etude/config.json"
    assert json.loads(etude.read_text())["hidden_size"] == 320  # 2.5 groups of 128
    specs = tensors(read_config(etude))
    assert all(can_store(specs, precision) for precision in PRECISIONS)
    made = sum(
        spec.num_values * (4 + 16 / (128 if spec.shape[-1] % 128 == 0 else 64)) / 8
        for spec in specs
        if is_quantised(spec)
    )
    rest = sum(2 * spec.num_values for spec in specs if not is_quantised(spec))
    assert weights_bytes(specs, find_precision("int4")) == made + rest


def test_rows_that_no_group_divides(tmp_path):
    model = read_model(written(tmp_path, {**LLAMA_31_8B, "intermediate_size": 14_352}))
    stored = [p.name for p in PRECISIONS if can_store(model.specs, p)]
    assert stored == ["fp16/bf16", "fp8"]


def test_unknown_precision():
    with pytest.raises(SettingError, match=r"int2.*fp16, bf16, fp8, int4, fp4"):
        find_precision("int2")
