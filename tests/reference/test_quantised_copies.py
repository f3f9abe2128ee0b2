"""Quantised folders against compressed-tensors, the library that defines their format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from soloist.model.dtype import Dtype
from soloist.model.folder import shipped_folder
from soloist.model.quantized import SCALES, Codes, Quantized
from soloist.weights.compressed_tensors import stored
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, plan_export
from soloist.weights.quantizing import quantize

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_name

ETUDE = shipped_folder("etude-draft")
SCHEMES: dict[Codes, tuple[dict[str, Any], str]] = {
    Codes.INT4: (
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
        "pack-quantized",
    ),
    Codes.INT8: ({"num_bits": 8, "type": "int", "strategy": "channel"}, "pack-quantized"),
    Codes.FP8: ({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
}
CHOICES = [
    Asked(Codes.INT4), Asked(Codes.INT8), Asked(Codes.FP8), Asked(Codes.INT4, Codes.INT8),
    Asked(Codes.INT4, Codes.FP8), Asked(Codes.FP8, Codes.FP8), Asked(Codes.INT4, group=32),
]  # fmt: skip


def label(value: object) -> str:
    if isinstance(value, Asked):
        return f"{value.layers}-{value.head}-{value.group}"
    return str(getattr(value, "value", value))


def drawn(dtype: torch.dtype) -> Tensor:
    """Weights of many sizes, with zeros and an outlier."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(96, 256, generator=generator) * 0.02
    values *= torch.logspace(-2, 2, 96).unsqueeze(1)
    values[3] = 0
    values[5, :64] = 0
    values[7, 9] = 3.0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=label)
@pytest.mark.parametrize("codes", SCHEMES, ids=label)
def test_scales_and_codes_have_the_library_s_bits(codes: Codes, dtype: Dtype) -> None:
    fields, form = SCHEMES[codes]
    values = drawn(torch.bfloat16 if dtype is Dtype.BF16 else torch.float16)
    args = QuantizationArgs(symmetric=True, **fields)
    group = fields.get("group_size", 0)
    grouped = values.unflatten(1, (-1, group or values.shape[1]))
    scales, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), args)
    made = quantize(values, Quantized(codes, group, dtype))
    assert torch.equal(made[SCALES], scales)
    # In fp32, as its kernel for GPUs divides: on a CPU it rounds ratios to 16 bits first.
    compressor = BaseCompressor.get_value_from_registry(form)
    theirs = compressor.compress(
        {"weight": values.float(), "weight_scale": scales.float()},
        QuantizationScheme(targets=["Linear"], weights=args),
    )
    ours = stored("m", made, Quantized(codes, group, dtype))
    assert {f"m.{name}" for name in theirs} == ours.keys()
    for name, tensor in theirs.items():
        if name != "weight_scale":
            assert tensor.dtype is ours[f"m.{name}"].dtype
            assert torch.equal(tensor.view(torch.uint8), ours[f"m.{name}"].view(torch.uint8))


@pytest.fixture(scope="module", params=CHOICES, ids=label)
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped draft model, quantised."""
    output = tmp_path_factory.mktemp("copy") / "model"
    write_export(plan_export(ETUDE, request.param), output)
    return output


def config_of(folder: Path) -> QuantizationConfig:
    fields = json.loads((folder / "config.json").read_text())["quantization_config"]
    return QuantizationConfig.model_validate(fields)


def scheme_of(config: QuantizationConfig, module: str) -> QuantizationScheme:
    """The one whose targets name the module, or else the class of all."""
    groups = list(config.config_groups.values())
    named = [g for g in groups if any(match_name(module, target) for target in g.targets)]
    assert len(named) <= 1, "no module has two schemes"
    (found,) = named or [g for g in groups if "Linear" in g.targets]
    return found


def test_the_library_reads_config_json(copy: Path) -> None:
    config = config_of(copy)
    assert config.quantization_status == QuantizationStatus.COMPRESSED
    formats = {group.format for group in config.config_groups.values()}
    assert config.format == (formats.pop() if len(formats) == 1 else "mixed-precision")


def decompressed(folder: Path) -> dict[str, tuple[Tensor, Tensor, QuantizationArgs]]:
    """Of each quantised module: numbers in fp32 by the library, scales of each, and how."""
    config, made = config_of(folder), load_file(folder / "model.safetensors")
    found = {}
    for name in [name for name in made if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        scheme = scheme_of(config, module)
        parts = {
            own.rpartition(".")[2]: values
            for own, values in made.items()
            if own.rpartition(".")[0] == module
        }
        parts["weight_scale"] = scales = parts["weight_scale"].float()
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        weight = compressor.decompress(parts, scheme)["weight"]
        wide = scales.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)
        found[module] = (weight, wide, scheme.weights)
    return found


def test_the_library_s_numbers_are_near_the_16_bit_weights(copy: Path) -> None:
    plain = load_file(ETUDE / "model.safetensors")
    found = decompressed(copy)
    kinds = [name.removesuffix(".weight") for name in plain if name.endswith("_proj.weight")]
    assert found.keys() - {"lm_head"} == set(kinds)
    for module, (weight, scales, args) in found.items():
        source = "model.embed_tokens" if module == "lm_head" else module
        wanted = plain[f"{source}.weight"].float()
        off = (weight - wanted).abs()
        if args.type == "float":
            assert (off <= wanted.abs() * (2**-4 + 2**-8) + scales * 2**-10).all()
        else:
            assert (off <= scales * (0.5 + 2 ** (args.num_bits - 9))).all()


def test_transformers_runs_the_folder(copy: Path) -> None:
    model, told = AutoModelForCausalLM.from_pretrained(
        copy, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    plain = AutoModelForCausalLM.from_pretrained(ETUDE, dtype=torch.float32)
    for module, (weight, _, _) in decompressed(copy).items():
        plain.get_submodule(module).weight = torch.nn.Parameter(weight)
    tokens = torch.arange(1, 33).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, atol=1e-3, rtol=0)
