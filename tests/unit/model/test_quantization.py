"""Quantised files that cannot be used: each is refused by name, before anything is allocated."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from soloist.errors import (
    CheckpointError,
    ConfigError,
    GroupMismatch,
    MissingField,
    MissingTensor,
    NotFinite,
    QuantizationMismatch,
    SoloistError,
    TruncatedFile,
    UnexpectedTensor,
    UnsupportedQuantization,
    UserError,
    WrongShape,
    WrongType,
)
from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families.llama import IGNORED
from soloist.model.quantization import read_quantization
from soloist.model.quantization.matrices import describe, in_words
from soloist.model.tensors import TensorSpec
from soloist.weights.reading import load_weights
from unit.model.tiny import described
from unit.weights.formats import FORMATS, Format

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip
CPU = torch.device("cpu")
BY_NAME = {form.name: form for form in FORMATS}
_STORED: dict[str, dict[str, Tensor]] = {}
Q = "model.layers.0.self_attn.q_proj"


def write(
    form: Format, folder: Path, change: Callable[[dict[str, Tensor]], None] = lambda _: None,
    dtype: str | None = "float16", **fields: Any,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """A random model in this format; `fields` change its quantization_config."""
    config = None if form.config is None else {**form.config, **fields}
    tied = {"tie_word_embeddings": True} if "tied" in fields else {}
    config = None if config is None else {k: v for k, v in config.items() if k != "tied"}
    _, specs = described(folder, **SIZES, **tied, torch_dtype=dtype, quantization_config=config)
    if form.name not in _STORED:
        _STORED[form.name] = random_tensors(form, specs)
    stored = {name: tensor.clone() for name, tensor in _STORED[form.name].items()}
    change(stored)
    save_file(stored, folder / "model.safetensors")
    for name, text in form.files.items():
        (folder / name).write_text(text)
    return specs


def random_tensors(form: Format, specs: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    for spec in specs:
        for source in spec.sources:
            values = torch.randn(source.shape, generator=generator) * 0.1
            module = source.name.removesuffix(".weight")
            if spec.name != "embedding" and values.dim() == 2:
                stored |= form.of(module, values)[0]
            else:
                stored[source.name] = values
    return stored


def checked(folder: Path, specs: tuple[TensorSpec, ...]) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    checkpoint.check(specs, IGNORED)
    return checkpoint


def refused(
    kind: type[SoloistError], folder: Path, specs: tuple[TensorSpec, ...], *facts: str,
    loads: bool = False,
) -> None:  # fmt: skip
    """One paragraph and a hint; `loads`: found once tensors are read, otherwise before."""
    if loads:
        checkpoint = checked(folder, specs)
        with pytest.raises(kind) as caught:
            load_weights(checkpoint, specs, Dtype.BF16, CPU)
    else:
        with pytest.raises(kind) as caught:
            checked(folder, specs)
    assert issubclass(kind, UserError)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    for fact in facts:
        assert fact in caught.value.message, caught.value.message


# --- what loads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_a_models_type_is_its_16_bit_one(form: Format, tmp_path: Path) -> None:
    specs = write(form, tmp_path)
    assert checked(tmp_path, specs).dtype is Dtype.FP16


@pytest.mark.parametrize(
    ("dtype", "norms", "wanted"),
    [
        ("bfloat16", torch.float16, Dtype.BF16),
        (None, torch.float16, Dtype.FP16),
        (None, torch.bfloat16, Dtype.BF16),
        ("float32", torch.float16, Dtype.FP16),
        ("float32", torch.float32, Dtype.BF16),
    ],
)
def test_the_type_comes_from_the_configuration_or_from_norms(
    dtype: str | None, norms: torch.dtype, wanted: Dtype, tmp_path: Path
) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored |= {n: t.to(norms) for n, t in stored.items() if n.endswith("norm.weight")}

    specs = write(BY_NAME["fp8-blocks"], tmp_path, change, dtype=dtype)
    assert checked(tmp_path, specs).dtype is wanted


def test_what_was_found_out_about_activations_is_passed_over(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        for suffix in ("input_scale", "output_scale", "k_scale", "input_zero_point"):
            stored[f"{Q}.{suffix}"] = torch.ones(1)
        stored["model.layers.0.self_attn.k_scale"] = torch.ones(())
        stored["model.layers.0.self_attn.kv_cache_scale"] = torch.ones(())

    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    specs = write(BY_NAME["float-quantized"], tmp_path, change, kv_cache_scheme=scheme)
    checked(tmp_path, specs)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fp8-blocks", "fp8 (fp8: blocks of 48 × 40), 7 of 8 matrices"),
        ("fp8-matrix", "fp8 (fp8: one scale a matrix), 7 of 8 matrices"),
        ("fbgemm", "fp8 (fbgemm_fp8: one scale a row), 6 of 8 matrices"),
        ("awq", "int4 (awq: groups of 32 and zeros), 7 of 8 matrices"),
        (
            "gptq-dynamic",
            "int4 (gptq: groups of 32), 6 of 8 matrices; "
            "int8 (gptq: one scale a row), 1 of 8 matrices",
        ),
    ],
)
def test_formats_in_words(name: str, wanted: str, tmp_path: Path) -> None:
    specs = write(BY_NAME[name], tmp_path)
    quantization = checked(tmp_path, specs).quantization
    assert quantization is not None
    assert describe(quantization, specs) == wanted


Q_AND_HEAD = ("model.layers.0.self_attn.q_proj", "lm_head")
PUBLISHED = {
    "Qwen3-8B-FP8": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
         "weight_block_size": [128, 128]},
        ("fp8 (fp8: blocks of 128 × 128)", None),
    ),
    "Meta-Llama-3-8B-Instruct-FP8": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        ("fp8 (fp8: blocks of 128 × 128)", "fp8 (fp8: one scale a matrix)"),
    ),
    "Meta-Llama-3.1-8B-Instruct-FP8": (
        {"config_groups": {"group_0": {
            "input_activations": {
                "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "tensor",
                "symmetric": True, "type": "float"},
            "output_activations": None, "targets": ["Linear"],
            "weights": {
                "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "tensor",
                "symmetric": True, "type": "float"}}},
         "format": "float-quantized", "global_compression_ratio": 1.463, "ignore": ["lm_head"],
         "kv_cache_scheme": None, "quant_method": "compressed-tensors",
         "quantization_status": "frozen"},
        ("fp8 (float-quantized: one scale a matrix)", None),
    ),
    "Llama-3.1-8B-quantized.w4a16": (
        {"config_groups": {"group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": "weight", "block_structure": None, "dynamic": False,
                "group_size": 128, "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                "scale_dtype": None, "strategy": "group", "symmetric": True, "type": "int",
                "zp_dtype": None}}},
         "format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
         "quant_method": "compressed-tensors", "quantization_status": "compressed",
         "sparsity_config": {}, "transform_config": {}, "version": "0.12.2"},
        ("int4 (pack-quantized: groups of 128)", None),
    ),
    "Mistral-7B-AWQ": (
        {"backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None,
         "fuse_max_seq_len": None, "group_size": 128, "modules_to_fuse": None,
         "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
         "zero_point": True},
        ("int4 (awq: groups of 128 and zeros)", None),
    ),
    "Llama-2-7B-GPTQ": (
        {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
         "damp_percent": 0.1, "dataset": None, "desc_act": True, "exllama_config": {"version": 1},
         "group_size": 64, "max_input_length": None, "model_file_base_name": "model",
         "model_name_or_path": "", "model_seqlen": None, "quant_method": "gptq",
         "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
         "pad_token_id": None, "static_groups": False, "sym": True, "tokenizer": None,
         "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
        ("int4 (gptq: groups of 64)", None),
    ),
    "Qwen3-8B-gptqmodel-8bit": (
        {"bits": 8, "checkpoint_format": "gptq", "desc_act": False, "dynamic": None,
         "group_size": 32, "hyb_act": False, "lm_head": False, "pack_dtype": "int32",
         "meta": {"damp_percent": 0.01, "quantizer": ["gptqmodel:4.0"]}, "quant_method": "gptq",
         "sym": True},
        ("int8 (gptq: groups of 32)", None),
    ),
    "Qwen2.5-7B-int4-inc": (
        {"amp": True, "autoround_version": "0.4.7", "batch_size": 8, "bits": 4,
         "block_name_to_quantize": None, "data_type": "int", "dataset": "NeelNanda/pile-10k",
         "enable_minmax_tuning": True, "enable_norm_bias_tuning": False,
         "enable_quanted_input": True, "gradient_accumulate_steps": 1, "group_size": 128,
         "iters": 1000, "low_gpu_mem_usage": True, "lr": 0.001, "minmax_lr": 0.001,
         "nsamples": 512, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round",
         "scale_dtype": "torch.float16", "seqlen": 2048, "sym": True,
         "to_quant_block_names": None},
        ("int4 (auto-round: groups of 128)", None),
    ),
    "Llama-3.1-8B-Instruct-FP8": (
        {"config_groups": {"group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"]}},
         "ignore": ["lm_head"], "quant_algo": "FP8", "quant_method": "modelopt",
         "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
         "producer": {"name": "modelopt", "version": "0.35.0"}},
        ("fp8 (modelopt FP8: one scale a matrix)", None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_understood(name: str, tmp_path: Path) -> None:
    """For the first layer and the head, the first and the last way that they may be stored."""
    config, (first, head) = PUBLISHED[name]
    method = read_quantization(tmp_path, {"quantization_config": config})
    assert method is not None
    q, last = (method(module) for module in Q_AND_HEAD)
    assert q[0] is not None
    assert in_words(q[0]) == first
    assert q[0].reordered is (name == "Llama-2-7B-GPTQ")
    if name == "Meta-Llama-3-8B-Instruct-FP8":
        assert q[1] is not None
        assert in_words(q[1]) == head
        assert last == (None,)
    else:
        assert head is last[-1] is None


# --- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8-blocks", "pack-quantized", "awq", "gptq"])
def test_truncated(name: str, tmp_path: Path) -> None:
    specs = write(BY_NAME[name], tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    refused(TruncatedFile, tmp_path, specs, "model.safetensors", "damaged")


@pytest.mark.parametrize(
    ("name", "codes", "scales"),
    [
        ("fp8-blocks", "weight", "weight_scale_inv"),
        ("float-quantized", "weight", "weight_scale"),
        ("int-quantized", "weight", "weight_scale"),
        ("pack-quantized", "weight_packed", "weight_scale"),
        ("awq", "qweight", "scales"),
        ("gptq", "qweight", "scales"),
    ],
)
def test_swapped(name: str, codes: str, scales: str, tmp_path: Path) -> None:
    """Codes under the scales' name and the reverse, and shapes exchanged."""

    def tensors(stored: dict[str, Tensor]) -> None:
        one, other = f"{Q}.{codes}", f"{Q}.{scales}"
        stored[one], stored[other] = stored[other], stored[one]

    def shapes(stored: dict[str, Tensor]) -> None:
        one, other = stored[f"{Q}.{codes}"], stored[f"{Q}.{scales}"]
        stored[f"{Q}.{codes}"] = torch.zeros(other.shape, dtype=one.dtype)
        stored[f"{Q}.{scales}"] = torch.ones(one.shape, dtype=other.dtype)

    for change in (tensors, shapes):
        specs = write(BY_NAME[name], tmp_path, change)
        refused(WrongShape, tmp_path, specs, f"'{Q}.{codes}'", "has shape", "calls for")


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("fp8-blocks", "weight_scale_inv"),
        ("fp8-blocks-head", "weight_scale_inv"),
        ("modelopt-file", "weight_scale"),
        ("int-quantized", "weight_zero_point"),
        ("pack-quantized", "weight_shape"),
        ("pack-quantized", "weight_scale"),
        ("pack-quantized-zeros", "weight_zero_point"),
        ("awq", "qzeros"),
        ("gptq", "scales"),
        ("gptq-ordered", "g_idx"),
    ],
)
def test_missing_parts(name: str, absent: str, tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        del stored[f"{Q}.{absent}"]
        del stored["model.layers.0.mlp.down_proj." + absent]

    specs = write(BY_NAME[name], tmp_path, change)
    refused(MissingTensor, tmp_path, specs, "lacks 2 tensors", f"{Q}.{absent}", "mlp.down_proj")


@pytest.mark.parametrize("name", ["fp8-blocks", "pack-quantized", "awq", "gptq"])
def test_a_missing_matrix(name: str, tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        for one in [one for one in stored if one.startswith(f"{Q}.")]:
            del stored[one]

    specs = write(BY_NAME[name], tmp_path, change)
    refused(MissingTensor, tmp_path, specs, "lacks 1 tensor ", f"{Q}.")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("awq", {"group_size": 40}),
        ("gptq", {"group_size": 40}),
        ("auto-round", {"group_size": 128}),
    ],
)
def test_groups_that_do_not_divide(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    specs = write(BY_NAME[name], tmp_path, **fields)
    size = fields["group_size"]
    refused(
        GroupMismatch, tmp_path, specs, f"'{Q}'", "64 columns", f"groups of {size}",
        f"a multiple of {size}",
    )  # fmt: skip


def test_groups_of_compressed_tensors_that_do_not_divide(tmp_path: Path) -> None:
    form = BY_NAME["pack-quantized"]
    assert form.config is not None
    groups = json.loads(json.dumps(form.config["config_groups"]))
    groups["group_0"]["weights"]["group_size"] = 48
    specs = write(form, tmp_path, config_groups=groups)
    refused(GroupMismatch, tmp_path, specs, "64 columns", "pack-quantized", "groups of 48")


def test_rows_that_fill_no_words(tmp_path: Path) -> None:
    specs = write(BY_NAME["gptq"], tmp_path)
    odd = TensorSpec("head", (type(specs[0].sources[0])("lm_head.weight", (63, 64)),))

    def change(stored: dict[str, Tensor]) -> None:
        stored["lm_head.qweight"] = torch.zeros(8, 63, dtype=torch.int32)
        del stored["lm_head.weight"]

    specs = write(BY_NAME["gptq"], tmp_path, change)
    specs = (*(spec for spec in specs if spec.name != "head"), odd)
    refused(GroupMismatch, tmp_path, specs, "63 rows", "a multiple of 8")


def test_groups_of_another_size_than_the_tensors(tmp_path: Path) -> None:
    specs = write(BY_NAME["awq"], tmp_path, group_size=16)
    refused(WrongShape, tmp_path, specs, f"'{Q}.scales'", "[2, 64]", "[4, 64]")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("fp8-blocks", "weight_scale_inv"),
        ("modelopt", "weight_scale"),
        ("int-quantized", "weight_scale"),
        ("pack-quantized", "weight_scale"),
        ("awq", "scales"),
        ("gptq", "scales"),
    ],
)
def test_scales_that_are_not_finite(name: str, scales: str, bad: float, tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{Q}.{scales}"].view(-1)[0] = bad

    specs = write(BY_NAME[name], tmp_path, change)
    refused(NotFinite, tmp_path, specs, f"'{Q}.{scales}'", "1 NaN or infinite", loads=True)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_codes_that_are_not_numbers(byte: int, tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{Q}.weight"].view(torch.uint8)[3, 5] = byte

    specs = write(BY_NAME["fp8-blocks"], tmp_path, change)
    refused(NotFinite, tmp_path, specs, f"'{Q}.weight'", "1 NaN", loads=True)


def test_numbers_too_large_for_the_precision(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{Q}.weight_scale_inv"][:] = 1e36

    specs = write(BY_NAME["fp8-blocks"], tmp_path, change)
    refused(NotFinite, tmp_path, specs, f"'{Q}.weight'", loads=True)


# --- files that say one thing and hold another ---------------------------------------------------


def test_a_matrix_in_16_bits_that_should_be_quantised(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        for name in [name for name in stored if name.startswith(f"{Q}.")]:
            del stored[name]
        stored[f"{Q}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)

    for name, wanted in [
        ("fp8-blocks", "weight of fp8"),
        ("pack-quantized", "weight_packed of int4 (pack-quantized"),
        ("awq", "qweight of int4 (awq"),
    ]:
        specs = write(BY_NAME[name], tmp_path, change)
        refused(
            QuantizationMismatch, tmp_path, specs, f"'{Q}'", "weight in BF16", f"calls for {wanted}"
        )


@pytest.mark.parametrize(
    ("name", "fields", "held"),
    [
        ("fp8-blocks", {"modules_to_not_convert": ["q_proj"]}, "weight in F8_E4M3"),
        ("pack-quantized", {"ignore": ["re:.*q_proj"]}, "weight_packed in I32"),
        ("awq", {"modules_to_not_convert": ["self_attn"]}, "qweight in I32"),
        ("gptq", {"dynamic": {"-:.*q_proj": {}}}, "qweight in I32"),
        ("modelopt", {"ignore": ["lm_head", "*self_attn*", "*mlp*"]}, "weight in F8_E4M3"),
    ],
)
def test_a_quantised_matrix_that_should_be_in_16_bits(
    name: str, fields: dict[str, Any], held: str, tmp_path: Path
) -> None:
    form = BY_NAME[name]
    if name == "modelopt":
        form = Format("all of it", form.config, form.store, {"lm_head": None})
    specs = write(form, tmp_path, **fields)
    refused(QuantizationMismatch, tmp_path, specs, f"'{Q}'", held, "calls for weight in 16 bits")


def test_another_methods_tensors(tmp_path: Path) -> None:
    form = BY_NAME["pack-quantized"]
    other = Format("mixed up", BY_NAME["awq"].config, form.store, {"lm_head": None})
    specs = write(other, tmp_path)
    refused(
        QuantizationMismatch, tmp_path, specs, "weight_packed in I32", "calls for qweight of int4"
    )


def test_tensors_of_another_type(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{Q}.weight"] = torch.zeros(64, 64, dtype=torch.int8)

    specs = write(BY_NAME["fp8-blocks"], tmp_path, change)
    refused(QuantizationMismatch, tmp_path, specs, f"'{Q}.weight'", "with I8", "for F8_E4M3")


def test_a_quantisation_that_the_configuration_does_not_mention(tmp_path: Path) -> None:
    form = BY_NAME["fp8-blocks"]
    specs = write(Format("unsaid", None, form.store, form.others), tmp_path)
    refused(CheckpointError, tmp_path, specs)


def test_a_shape_inside_the_file_that_is_another(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{Q}.weight_shape"] = torch.tensor([64, 63])

    specs = write(BY_NAME["pack-quantized"], tmp_path, change)
    refused(WrongShape, tmp_path, specs, f"'{Q}.weight'", "[64, 63]", "[64, 64]", loads=True)


def test_a_quantised_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored["lm_head.qweight"] = torch.zeros(8, 64, dtype=torch.int32)

    specs = write(BY_NAME["gptq"], tmp_path, change, tied=True)
    refused(UnexpectedTensor, tmp_path, specs, "lm_head.qweight")


def test_a_quantised_embedding(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        name = "model.embed_tokens.weight"
        stored[name] = stored[name].to(torch.float8_e4m3fn)

    specs = write(BY_NAME["fp8-blocks"], tmp_path, change)
    refused(CheckpointError, tmp_path, specs, "F8_E4M3", "supported: F32, BF16, F16")


def test_zeros_of_a_symmetric_format_are_too_much(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{Q}.weight_zero_point"] = torch.zeros(64, 1, dtype=torch.int8)

    specs = write(BY_NAME["float-quantized"], tmp_path, change)
    refused(UnexpectedTensor, tmp_path, specs, "weight_zero_point")


def test_two_configurations_that_disagree(tmp_path: Path) -> None:
    form = BY_NAME["fp8-blocks"]
    specs = write(form, tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    refused(ConfigError, tmp_path, specs, "fp8", "hf_quant_config.json", "one of the two")


def test_two_accounts_of_model_optimizer_that_disagree(tmp_path: Path) -> None:
    specs = write(BY_NAME["modelopt"], tmp_path)
    file = tmp_path / "hf_quant_config.json"
    file.write_text('{"quantization": {"quant_algo": "FP8"}}')
    checked(tmp_path, specs)
    file.write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    refused(ConfigError, tmp_path, specs, "'FP8'", "'NVFP4'", "the same in both")


def test_two_fields_for_one_quantisation(tmp_path: Path) -> None:
    specs = write(BY_NAME["awq"], tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"compression_config": ct()}))
    refused(ConfigError, tmp_path, specs, "quantization_config and compression_config")


def test_a_tensor_with_an_endless_name(tmp_path: Path) -> None:
    specs = write(
        BY_NAME["awq"], tmp_path, lambda stored: stored.update({"y" * 5000: torch.ones(1)})
    )
    refused(UnexpectedTensor, tmp_path, specs, "holds 1 tensor ", "yyy…")
    with pytest.raises(UnexpectedTensor) as caught:
        checked(tmp_path, specs)
    assert len(caught.value.message) < 500


def test_a_head_that_should_be_in_16_bits(tmp_path: Path) -> None:
    specs = write(BY_NAME["gptq-8-v2"], tmp_path, lm_head=False)
    refused(QuantizationMismatch, tmp_path, specs, "'lm_head'", "qweight in I32", "in 16 bits")
    specs = write(BY_NAME["gptq"], tmp_path, lm_head=True)
    refused(QuantizationMismatch, tmp_path, specs, "'lm_head'", "weight in F32", "qweight of int4")


def test_biases_of_zeros_add_nothing(tmp_path: Path) -> None:
    """AutoGPTQ once stored them for every matrix."""

    def zeros(stored: dict[str, Tensor]) -> None:
        stored[f"{Q}.bias"] = torch.zeros(64, dtype=torch.float16)

    def one(stored: dict[str, Tensor]) -> None:
        zeros(stored)
        stored[f"{Q}.bias"][3] = 0.5

    form = BY_NAME["gptq"]
    checked(tmp_path, write(form, tmp_path, zeros))
    refused(UnexpectedTensor, tmp_path, write(form, tmp_path, one), f"{Q}.bias")
    plain = Format("not quantised", None, lambda weight: ({"weight": weight}, weight))
    refused(UnexpectedTensor, tmp_path, write(plain, tmp_path, zeros), f"{Q}.bias")


# --- what is not read ----------------------------------------------------------------------------


def ct(**fields: Any) -> dict[str, Any]:
    form = BY_NAME["pack-quantized"]
    assert form.config is not None
    return {**form.config, **fields}


def weights(**fields: Any) -> dict[str, Any]:
    found = ct()
    one = found["config_groups"]["group_0"]
    groups = {"group_0": {**one, "weights": {**one["weights"], **fields}}}
    return {**found, "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "field", "value", "allowed"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method", "bitsandbytes", "compressed-tensors"),
        ({"quant_method": "mxfp4"}, "quant_method", "mxfp4", "awq, gptq"),
        ({"quant_method": "exl3"}, "quant_method", "exl3", "fp8"),
        ({"bits": 4}, "quant_method", "None", "gptq"),
        (ct(format="nvfp4-pack-quantized"), "format", "nvfp4-pack-quantized", "pack-quantized"),
        (ct(format="mxfp4-pack-quantized"), "format", "mxfp4", "float-quantized"),
        (ct(format="mxfp8-quantized"), "format", "mxfp8", "float-quantized"),
        (ct(format="marlin-24"), "format", "marlin-24", "int-quantized"),
        (ct(format="sparse-24-bitmask"), "format", "sparse-24-bitmask", "naive-quantized"),
        (ct(sparsity_config={"format": "sparse-24"}), "sparsity_config.format", "24", "dense"),
        (ct(transform_config={"config_groups": {"R1": {}}}), "transform_config", "R1", "{}"),
        (ct(quantization_status="calibration"), "zation_status", "calibration", "compressed"),
        (ct(made_up=1), "made_up", "1", "absent"),
        (weights(num_bits=3), "num_bits", "3", "4, 8"),
        (weights(type="float"), "type", "float", "int in pack-quantized"),
        (weights(strategy="tensor_group"), "strategy", "tensor_group", "group"),
        (weights(strategy="block"), "strategy", "block", "channel"),
        (weights(strategy="channel"), "group_size", "32", "absent in strategy channel"),
        (weights(block_structure=[8, 8]), "block_structure", "8, 8", "absent in strategy group"),
        (ct(transform_config={"made_up": 1}), "transform_config.made_up", "1", "absent"),
        (ct(sparsity_config={"made_up": 1}), "sparsity_config.made_up", "1", "absent"),
        (weights(dynamic=True), "dynamic", "True", "False"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype", "fp4", "fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "e5m2", "e4m3"),
        ({"quant_method": "fp8", "modules_to_convert": ["x"]}, "modules_to_convert", "x", "empty"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo", "NVFP4", "FP8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo", "W4A16", "FP8"),
        ({"quant_method": "awq", "version": "gemv"}, "version", "gemv", "gemm"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "version", "gemv_fast", "gemm"),
        ({"quant_method": "awq", "version": "marlin"}, "version", "marlin", "gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits", "8", "4"),
        ({"quant_method": "awq", "group_size": 0}, "group_size", "0", "above 0"),
        ({"quant_method": "awq", "group_size": 64, "q_group_size": 128}, "q_group_size", "128",
         "64, as group_size says"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True}, "bits", "3", "4, 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format", "marlin",
         "gptq_v2"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format", "True", "False"),
        ({"quant_method": "gptq", "pack_dtype": "int8"}, "pack_dtype", "int8", "int32"),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 32}, "bits", "2", "4, 8"),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "packing_format",
         "auto_round", "auto_round:auto_gptq"),
        ({"quant_method": "auto-round", "backend": "auto_round:exllamav2"}, "backend",
         "auto_round:exllamav2", "auto_round:auto_awq"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type", "mx_fp", "int"),
    ],
    ids=lambda v: None if isinstance(v, dict) else str(v),
)  # fmt: skip
def test_other_quantisations_are_refused_by_name(
    config: dict[str, Any], field: str, value: str, allowed: str, tmp_path: Path
) -> None:
    specs = write(BY_NAME["awq"], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    refused(UnsupportedQuantization, tmp_path, specs, f"{field}'", value, allowed, "config.json")
    with pytest.raises(UnsupportedQuantization, match="does not read") as caught:
        open_checkpoint(tmp_path)
    assert "docs/formats.md" in caught.value.hint
    assert field in caught.value.field


@pytest.mark.parametrize(
    ("config", "kind", "field"),
    [
        ("fp8", WrongType, "quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, WrongType, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, WrongType, "weight_block_size"),
        ({"quant_method": "fp8", "modules_to_not_convert": "x"}, WrongType, "modules_to_not_conv"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, WrongType, "modules_to_not_c"),
        (ct(ignore=["re:["]), WrongType, "ignore"),
        (ct(ignore=[r"re:(\w+\.?)+X"]), WrongType, "a repeat within a repeat"),
        (ct(ignore="y" * 5000), WrongType, "yyy…, expected a list"),
        (ct(config_groups={}), MissingField, "config_groups"),
        (ct(config_groups=[]), WrongType, "config_groups"),
        (ct(format="mixed-precision"), MissingField, "config_groups.group_0.format"),
        (weights(group_size="wide"), WrongType, "group_size"),
        (weights(group_size=-1), WrongType, "group_size"),
        (weights(symmetric="yes"), WrongType, "symmetric"),
        ({"quant_method": "modelopt"}, MissingField, "quant_algo"),
        ({"quant_method": "gptq", "group_size": 32, "sym": True}, MissingField, "bits"),
        ({"quant_method": "gptq", "bits": 4, "sym": True}, MissingField, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": 1}, WrongType, "sym"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "dynamic": {"(": {}}},
         WrongType, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "dynamic": {"a": 8}},
         WrongType, "dynamic"),
    ],
    ids=str,
)  # fmt: skip
def test_damaged_configurations(
    config: object, kind: type[SoloistError], field: str, tmp_path: Path
) -> None:
    specs = write(BY_NAME["awq"], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    refused(kind, tmp_path, specs, field)


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization": 3}', "{}"])
def test_a_damaged_file_of_model_optimizer(text: str, tmp_path: Path) -> None:
    specs = write(BY_NAME["modelopt-file"], tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(text)
    refused(ConfigError, tmp_path, specs, "hf_quant_config.json")


def test_every_format_loads(tmp_path: Path) -> None:
    """Which the tests above stand on."""
    for form in FORMATS:
        specs = write(form, tmp_path)
        load_weights(checked(tmp_path, specs), specs, Dtype.BF16, CPU)
        assert load_file(tmp_path / "model.safetensors")
        for name in form.files:
            (tmp_path / name).unlink()


# --- anything ------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


def places(value: object) -> list[tuple[Any, Any]]:
    """Every object or list in a value, with one of its keys."""
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    return [place for key, inner in items for place in [(value, key), *places(inner)]]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(form=st.sampled_from(FORMATS), draw=st.randoms(), other=ANYTHING)
def test_any_other_value_is_read_or_refused(
    form: Format, draw: Random, other: object, tmp_path: Path
) -> None:
    config = copy.deepcopy(form.config) or {"quant_method": "modelopt", "quant_algo": "FP8"}
    holder, key = draw.choice(places(config))
    holder[key] = other
    with suppress(UserError):
        method = read_quantization(tmp_path, {"quantization_config": config})
        assert method is not None
        for module in (*Q_AND_HEAD, "model.layers.1.mlp.down_proj"):
            for scheme in method(module):
                if scheme is not None:
                    assert in_words(scheme)
                    assert scheme.parts((64, 96), module)
