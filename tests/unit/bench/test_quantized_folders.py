"""Folders as other libraries write them: what Soloist reads of each is what the library reads."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import Tensor

from soloist.engine import Engine, EngineConfig
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.weights.reading import load_weights

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SHAPE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
LABELS = {
    "bf16": "bf16", "int4": "int4", "int4-int8-head": "int4+int8 head", "int8": "int8",
    "fp8": "fp8", "fp8-block": "fp8-block",
}  # fmt: skip
# Of the largest number that shares a scale; of FP8 what three bits of a fraction lose.
STEPS = {"int4": 1 / 15, "int8": 1 / 255, "fp8": 2**-4, "fp8-block": 2**-4, "bf16": 0}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPE))
    return importlib.import_module("quantized_folders")


def files(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def by_library(folder: Path) -> dict[str, Tensor]:
    """Matrices by their modules, as whoever wrote the form reads them."""
    stored, config = files(folder), json.loads((folder / "config.json").read_text())
    given = config.get("quantization_config")
    modules: dict[str, dict[str, Tensor]] = {}
    for name, values in stored.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = values
    if given is None:
        return {module: parts["weight"].float() for module, parts in modules.items()}
    if given["quant_method"] == "fp8":
        return {
            module: parts["weight"].float()
            * parts["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            for module, parts in modules.items()
            if "weight_scale_inv" in parts
        }
    given = QuantizationConfig.model_validate(given)
    compressor = BaseCompressor.get_value_from_registry(given.format)
    schemes = {
        module: given.config_groups["group_1" if module == "lm_head" else "group_0"]
        for module, parts in modules.items()
        if "weight_scale" in parts
    }
    return {
        module: compressor.decompress(modules[module], scheme)["weight"].float()
        for module, scheme in schemes.items()
    }


@pytest.mark.parametrize(
    ("form", "label", "step"),
    [("gguf-Q8_0", "int8", 1 / 254), ("gguf-Q4_0", "int4", 1 / 8), ("gguf-Q4_K_M", "int4", 1 / 15)],
)
def test_gguf_files(script, tmp_path: Path, form: str, label: str, step: float) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPE | {"intermediate_size": 512}))
    folders = [tmp_path / name / "tiny" for name in (form, "bf16")]
    script.main(["--shapes", str(tmp_path), *map(str, folders)])
    engine = Engine.load(EngineConfig(str(folders[0]), "cpu", "bf16"))
    assert engine.report.weights.startswith(label)
    specs = tensors(read_config(folders[1] / "config.json"))
    file = folders[0] / "tiny.gguf"
    seen = load_weights(open_checkpoint(file), specs, Dtype.FP32, torch.device("cpu"))
    wanted = load_weights(open_checkpoint(folders[1]), specs, Dtype.FP32, torch.device("cpu"))
    for spec in specs:
        lost = (seen[spec.name] - wanted[spec.name]).abs().max()
        assert lost <= step * wanted[spec.name].abs().max(), spec.name


@pytest.mark.parametrize("form", LABELS)
def test_numbers_and_label(script, tmp_path: Path, form: str) -> None:
    folders = {f: tmp_path / f / "tiny" for f in {form, "bf16"}}
    script.main(["--shapes", str(tmp_path), *map(str, folders.values())])
    folder = folders[form]
    engine = Engine.load(EngineConfig(str(folder), "cpu", "bf16"))
    assert engine.report.weights == LABELS[form]
    assert engine.report.folder.name == "tiny", "rows name the shape"
    config = read_config(folder / "config.json")
    assert config.tied_head is (form != "int4-int8-head"), "a file's head is quantised beside it"
    specs = tensors(config)
    seen = load_weights(open_checkpoint(folder), specs, Dtype.BF16, torch.device("cpu"))
    wanted, plain = by_library(folder), by_library(folders["bf16"])
    found = 0
    for spec in specs:
        if not spec.is_layer_matrix and spec.name != "head":
            continue
        codes = "int8" if spec.name == "head" else form.removesuffix("-int8-head")
        parts = seen[spec.name].split([source.shape[0] for source in spec.sources])
        for source, part in zip(spec.sources, parts, strict=True):
            module, found = source.name.removesuffix(".weight"), found + 1
            assert torch.equal(part, wanted[module].bfloat16())
            if module in plain:
                lost = (part.float() - plain[module]).abs().max() / plain[module].abs().max()
                assert lost <= STEPS[codes] + 2**-8
                assert bool(lost > 0) is (form != "bf16")
    assert found == 7 + (form == "int4-int8-head")


def test_one_channel_is_far_larger(script, tmp_path: Path) -> None:
    folder = tmp_path / "bf16" / "tiny-outliers"
    script.main(["--shapes", str(tmp_path), str(folder)])
    stored = files(folder)
    for name in ("input_layernorm", "post_attention_layernorm", "mlp.up_proj"):
        rows = stored[f"model.layers.0.{name}.weight"].float()
        sizes = rows.reshape(len(rows), -1).square().mean(1).sqrt()
        others = sizes[torch.arange(len(sizes)) != sizes.argmax()]
        assert 50 < sizes.max() / others.max() < 200, name


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("int5/tiny", "'int5' (allowed: bf16, int4"),
        ("int4/huge", "'huge' (allowed: tiny)"),
        ("int4/tiny", "remove it"),
        ("gguf-Q8_0/tiny-outliers", "not for GGUF files"),
    ],
)
def test_folders_that_are_not_written(script, tmp_path: Path, place: str, named: str) -> None:
    (tmp_path / "int4" / "tiny").mkdir(parents=True)
    with pytest.raises(SystemExit) as refused:
        script.main(["--shapes", str(tmp_path), str(tmp_path / place)])
    assert named in str(refused.value)
    assert list((tmp_path / "int4" / "tiny").iterdir()) == []
