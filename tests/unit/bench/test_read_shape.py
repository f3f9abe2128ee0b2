"""A shape is quantised as its config.json says, whether or not there are weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from soloist.bench.subject import read_shape, shape_on_cpu
from soloist.errors import (
    ConfigError,
    GroupMismatch,
    SettingError,
    UnsupportedQuantization,
)
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes, Quantized
from soloist.weights.choice import Rounding

SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"
FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                "symmetric": True,
            },
        }
    },
}  # fmt: skip
KINDS = {
    "fp8-block": (FP8_BLOCKS, Quantized(Codes.FP8, 128, Dtype.BF16, scale_rows=128)),
    "gptq": (GPTQ, Quantized(Codes.INT4, 128, Dtype.BF16)),
    "awq": (AWQ, Quantized(Codes.INT4, 64, Dtype.BF16, has_zeros=True)),
    "compressed-tensors": (PACKED, Quantized(Codes.INT4, 32, Dtype.BF16)),
}


def written(folder: Path, quantization: Any) -> Path:
    """A small model's configuration."""
    fields = json.loads((SHAPES / "qwen3-1.7b.json").read_text(encoding="utf-8"))
    fields |= {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 203,
        "tie_word_embeddings": False, "quantization_config": quantization,
    }  # fmt: skip
    file = folder / "small.json"
    file.write_text(json.dumps(fields), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_codes_and_a_head_that_nobody_names_is_not(name: str, tmp_path: Path) -> None:
    quantization, meant = KINDS[name]
    shape = read_shape(written(tmp_path, quantization), Dtype.BF16)
    assert shape.stored == {
        f"layers.{i}.{matrix}": meant
        for i in range(2)
        for matrix in ("qkv", "attention_output", "gate_up", "down")
    }
    assert shape.label(shape_on_cpu(shape, 16)) == ("fp8-block" if name == "fp8-block" else "int4")


def test_the_blocks_of_a_mixture_are_those_of_its_experts() -> None:
    shape = read_shape(SHAPES / "qwen3-30b-a3b-fp8.json", Dtype.BF16)
    assert set(shape.stored.values()) == {KINDS["fp8-block"][1]}
    experts = {f"layers.47.experts.127.{matrix}" for matrix in ("gate_up", "down")}
    assert experts < shape.stored.keys()
    assert len(shape.stored) == 48 * (2 + 2 * 128), "no router, and no head"
    plain = read_shape(SHAPES / "qwen3-30b-a3b.json", Dtype.BF16)
    assert (plain.config, plain.specs, plain.stored) == (shape.config, shape.specs, {})


def test_what_is_codes_already_is_not_rounded(tmp_path: Path) -> None:
    """A head that the configuration leaves in 16 bits may be."""
    file = written(tmp_path, FP8_BLOCKS)
    with pytest.raises(SettingError, match=r"--weights is 'int4'.*configuration says how"):
        read_shape(file, Dtype.BF16, Rounding(Codes.INT4))
    head = Rounding(None, Codes.INT8)
    shape = read_shape(file, Dtype.BF16, head)
    assert shape.stored.keys() - read_shape(file, Dtype.BF16).stored.keys() == {"head"}
    assert shape.label(shape_on_cpu(shape, 16)) == "fp8-block+int8 head"
    named = PACKED | {"ignore": [], "config_groups": {
        "all": PACKED["config_groups"]["group_0"] | {"targets": ["re:.*proj", "lm_head"]}
    }}  # fmt: skip
    quantised = written(tmp_path, named)
    assert "head" in read_shape(quantised, Dtype.BF16).stored
    with pytest.raises(SettingError, match=r"--head-weights is 'int8'.*configuration says how"):
        read_shape(quantised, Dtype.BF16, head)


@pytest.mark.parametrize(
    ("quantization", "error", "told"),
    [
        ({"quant_method": "mxfp4"}, UnsupportedQuantization, "mxfp4"),
        (AWQ | {"group_size": 96}, GroupMismatch, "groups of 96"),
        (GPTQ | {"desc_act": True}, ConfigError, "order only weights say"),
        ("fp8", ConfigError, "quantization_config"),
    ],
    ids=["method", "group", "order", "type"],
)
def test_what_cannot_be_drawn_is_refused(
    quantization: Any, error: type[Exception], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        read_shape(written(tmp_path, quantization), Dtype.BF16)
