"""A folder of quantised weights: its tensors, files and config.json, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from soloist.errors import (
    AlreadyQuantized,
    CheckpointError,
    DiskFull,
    NoGroupFits,
    NotFinite,
    SettingError,
    SoloistError,
    UserError,
)
from soloist.model.quantized import AT_LOAD, Codes
from soloist.weights import export
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, Part, plan_export
from soloist.weights.reading import LoadProgress
from soloist.weights.writing import Entry, SafetensorsFile
from unit.model.configurations import LANEFORMER_2B
from unit.model.tiny import described, random_tensors, write_shards, write_single

# Rows of 64 numbers, of 128 (output) and of 96 (down).
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 31,
}  # fmt: skip
LAYER = "model.layers.1."


def make(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Tensor]:
    """Write a tiny model in 16 bits; its tensors."""
    _, specs = described(folder, **{**SIZES, **changes})
    stored = {name: values.to(dtype) for name, values in random_tensors(specs).items()}
    write_single(folder, stored)
    return stored


def quantised(folder: Path, output: Path, asked: Asked) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for file in write_export(plan_export(folder, asked), output):
        made |= load_file(file)
    return made


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, fields: dict[str, Any]) -> None:
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | fields))


def bits(values: Tensor) -> Tensor:
    return values.contiguous().flatten().view(torch.uint8)


# --- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_four_bits_as_others_write_them(tmp_path, dtype) -> None:
    plain = make(tmp_path / "plain", dtype)
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT4))
    q, o, down = f"{LAYER}self_attn.q_proj", f"{LAYER}self_attn.o_proj", f"{LAYER}mlp.down_proj"
    seen = {
        name: (made[name].dtype, list(made[name].shape))
        for module in (q, o, down)
        for name in made
        if name.startswith(module)
    }
    assert seen == {
        f"{q}.weight_packed": (torch.int32, [128, 8]),
        f"{q}.weight_scale": (dtype, [128, 1]),
        f"{q}.weight_shape": (torch.int64, [2]),
        f"{o}.weight_packed": (torch.int32, [64, 16]),
        f"{o}.weight_scale": (dtype, [64, 1]),
        f"{o}.weight_shape": (torch.int64, [2]),
        f"{down}.weight_packed": (torch.int32, [64, 12]),
        f"{down}.weight_scale": (dtype, [64, 3]),
        f"{down}.weight_shape": (torch.int64, [2]),
    }
    assert made[f"{down}.weight_shape"].tolist() == [64, 96]
    # The first code of a word lies in its lowest bits, with 8 added.
    word = made[f"{q}.weight_packed"][3, 2].item()
    row, scale = plain[f"{q}.weight"][3].float(), made[f"{q}.weight_scale"][3, 0].float()
    codes = [(word >> 4 * i & 15) - 8 for i in range(8)]
    assert codes == (row[16:24] / scale).clamp(-8, 7).round().int().tolist()


def test_int8_is_packed_too(tmp_path) -> None:
    plain = make(tmp_path / "plain")
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT8))
    gate = f"{LAYER}mlp.gate_proj"
    packed, scales = made[f"{gate}.weight_packed"], made[f"{gate}.weight_scale"]
    assert (packed.dtype, list(packed.shape)) == (torch.int32, [96, 16])
    assert (scales.dtype, list(scales.shape)) == (torch.bfloat16, [96, 1])
    assert made[f"{gate}.weight_shape"].tolist() == [96, 64]
    codes = packed.view(torch.uint8).int() - 128
    wanted = (plain[f"{gate}.weight"].float() / scales.float()).clamp(-128, 127).round().int()
    assert torch.equal(codes, wanted)


def test_rows_of_int8_end_at_a_word(tmp_path) -> None:
    make(tmp_path / "plain", intermediate_size=21)
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT8))
    assert list(made[f"{LAYER}mlp.down_proj.weight_packed"].shape) == [64, 6]
    assert made[f"{LAYER}mlp.down_proj.weight_shape"].tolist() == [64, 21]


def test_fp8_keeps_the_names_and_adds_scales(tmp_path) -> None:
    plain = make(tmp_path / "plain")
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.FP8))
    up = f"{LAYER}mlp.up_proj"
    assert [name for name in sorted(made) if name.startswith(up)] == [
        f"{up}.weight", f"{up}.weight_scale",
    ]  # fmt: skip
    assert made[f"{up}.weight"].dtype is torch.float8_e4m3fn
    assert list(made[f"{up}.weight_scale"].shape) == [96, 1]
    back = made[f"{up}.weight"].float() * made[f"{up}.weight_scale"].float()
    torch.testing.assert_close(back, plain[f"{up}.weight"].float(), rtol=2**-4 + 2**-8, atol=1e-4)


@pytest.mark.parametrize("codes", list(AT_LOAD.values()))
@pytest.mark.parametrize("head", [None, *AT_LOAD.values()])
@pytest.mark.parametrize("tied", [False, True])
def test_everything_else_keeps_its_bytes(tmp_path, codes, head, tied) -> None:
    plain = make(tmp_path / "plain", tie_word_embeddings=tied, attention_bias=True)
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(codes, head))
    coded = {name.removesuffix(".weight"): codes for name in plain if "_proj.weight" in name}
    if head is not None:
        coded["lm_head"] = head
    kept = [name for name in plain if name.removesuffix(".weight") not in coded]
    assert {"model.embed_tokens.weight", f"{LAYER}self_attn.q_proj.bias"} < set(kept)
    assert ("lm_head.weight" in kept) == (head is None and not tied)
    for name in kept:
        assert made[name].dtype is plain[name].dtype
        assert torch.equal(bits(made[name]), bits(plain[name]))
    parts = {
        Codes.INT4: ("weight_packed", "weight_scale", "weight_shape"),
        Codes.INT8: ("weight_packed", "weight_scale", "weight_shape"),
        Codes.FP8: ("weight", "weight_scale"),
    }
    others = {f"{module}.{part}" for module, own in coded.items() for part in parts[own]}
    assert made.keys() == set(kept) | others


def test_a_tied_head_is_untied_where_it_is_quantised(tmp_path) -> None:
    plain = make(tmp_path / "plain", tie_word_embeddings=True)
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT4, Codes.INT8))
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    scales = made["lm_head.weight_scale"].float()
    codes = made["lm_head.weight_packed"].view(torch.uint8).int() - 128
    embedding = plain["model.embed_tokens.weight"].float()
    assert ((codes * scales - embedding).abs() <= scales).all()
    kept = quantised(tmp_path / "plain", tmp_path / "tied", Asked(Codes.INT4))
    assert config_of(tmp_path / "tied")["tie_word_embeddings"] is True
    assert "lm_head.weight_packed" not in kept


def test_a_tied_head_that_is_stored_twice(tmp_path) -> None:
    plain = make(tmp_path / "plain", tie_word_embeddings=True)
    plain["lm_head.weight"] = plain["model.embed_tokens.weight"].clone()
    write_single(tmp_path / "plain", plain)
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.FP8, Codes.FP8))
    assert made["lm_head.weight"].dtype is torch.float8_e4m3fn
    kept = quantised(tmp_path / "plain", tmp_path / "kept", Asked(Codes.FP8))
    assert torch.equal(bits(kept["lm_head.weight"]), bits(plain["lm_head.weight"]))


@pytest.mark.parametrize("shards", [1, 3])
def test_large_models_have_several_files_and_an_index(tmp_path, monkeypatch, shards) -> None:
    plain = make(tmp_path / "plain")
    if shards > 1:
        (tmp_path / "plain" / "model.safetensors").unlink()
        write_shards(tmp_path / "plain", plain, shards)
    whole = quantised(tmp_path / "plain", tmp_path / "whole", Asked(Codes.INT4))
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()
    monkeypatch.setattr(export, "MOST_FILE_BYTES", 20_000)
    files = write_export(plan_export(tmp_path / "plain", Asked(Codes.INT4)), tmp_path / "out")
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in whole.values())
    for file in files:
        assert file.stat().st_size < 25_000
        for name, values in load_file(file).items():
            assert index["weight_map"][name] == file.name
            assert torch.equal(bits(values), bits(whole[name]))
    parts = {name.rpartition(".")[0]: file for name, file in index["weight_map"].items()}
    assert all(parts[name.rpartition(".")[0]] == file for name, file in index["weight_map"].items())


def test_each_tensor_is_aligned_to_its_numbers(tmp_path) -> None:
    make(tmp_path / "plain", vocab_size=31, intermediate_size=21)
    write_export(plan_export(tmp_path / "plain", Asked(Codes.FP8)), tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert length % 8 == 0
    sizes = {"F8_E4M3": 1, "BF16": 2}
    for entry in header.values():
        assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - 8 - length


def test_files_beside_the_weights_come_along(tmp_path) -> None:
    plain = tmp_path / "plain"
    make(plain)
    (plain / "additional_chat_templates").mkdir()
    wanted = {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
        "tokenizer.model", "merges.txt", "LICENSE", "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
    for name in wanted:
        (plain / name).write_text(name)
    for name in ("pytorch_model.bin", "README.md", "modeling.py"):
        (plain / name).write_text(name)
    write_export(plan_export(plain, Asked(Codes.INT8)), tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    names = {str(path.relative_to(tmp_path / "out")) for path in files}
    assert names == wanted | {"config.json", "model.safetensors"}
    for name in wanted:
        assert (tmp_path / "out" / name).read_text() == name


def test_progress_ends_with_all_bytes_that_are_read(tmp_path) -> None:
    make(tmp_path / "plain")
    seen: list[LoadProgress] = []
    plan = plan_export(tmp_path / "plain", Asked(Codes.INT4))
    write_export(plan, tmp_path / "out", seen.append)
    assert len(seen) == len(plan.pieces)
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert plan.num_bytes <= (tmp_path / "out" / "model.safetensors").stat().st_size


def test_sizes_are_those_of_the_files(tmp_path) -> None:
    plain = make(tmp_path / "plain", tie_word_embeddings=True)
    plan = plan_export(tmp_path / "plain", Asked(Codes.INT4, Codes.FP8))
    sizes = {size.part: size for size in plan.sizes()}
    assert sum(size.before_bytes for size in sizes.values()) == sum(
        values.nbytes for values in plain.values()
    )
    assert sum(size.after_bytes for size in sizes.values()) == plan.num_bytes
    assert sizes[Part.HEAD].before_bytes == 0
    assert sizes[Part.HEAD].stored_as == ("fp8",)
    assert sizes[Part.LAYERS].stored_as == ("int4 g64", "int4 g128", "int4 g32")
    assert sizes[Part.LAYERS].tensors == 14


# --- config.json ---------------------------------------------------------------------------------


def weights_of(**fields: Any) -> dict[str, Any]:
    return {"symmetric": True, "dynamic": False, **fields}


def test_config_of_one_form(tmp_path) -> None:
    make(tmp_path / "plain")
    before = config_of(tmp_path / "plain")
    write_export(plan_export(tmp_path / "plain", Asked(Codes.INT8)), tmp_path / "out")
    after = config_of(tmp_path / "out")
    told = after.pop("quantization_config")
    assert after == before
    assert told == {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": weights_of(num_bits=8, type="int", strategy="channel", group_size=None),
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def test_config_of_groups_that_differ(tmp_path) -> None:
    make(tmp_path / "plain")
    plan = plan_export(tmp_path / "plain", Asked(Codes.INT4))
    told = plan.config["quantization_config"]
    assert told["format"] == plan.format == "pack-quantized"
    found = {
        group["weights"]["group_size"]: group["targets"] for group in told["config_groups"].values()
    }
    assert found == {
        64: [rf"re:.*\.{name}_proj$" for name in ("q", "k", "v", "gate", "up")],
        128: [r"re:.*\.o_proj$"],
        32: [r"re:.*\.down_proj$"],
    }
    small = plan_export(tmp_path / "plain", Asked(Codes.INT4, group=32))
    (group,) = small.config["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"] == weights_of(num_bits=4, type="int", strategy="group", group_size=32)


def test_config_of_a_head_of_its_own_form(tmp_path) -> None:
    make(tmp_path / "plain")
    plan = plan_export(tmp_path / "plain", Asked(Codes.INT8, Codes.FP8))
    told = plan.config["quantization_config"]
    assert told["format"] == "mixed-precision"
    assert told["ignore"] == []
    layers, head = told["config_groups"].values()
    kinds = ("q", "k", "v", "o", "gate", "up", "down")
    assert layers["targets"] == [rf"re:.*\.{name}_proj$" for name in kinds]
    assert layers["format"] == "pack-quantized"
    assert head["targets"] == ["lm_head"]
    assert head["format"] == "float-quantized"
    assert head["weights"] == weights_of(
        num_bits=8, type="float", strategy="channel", group_size=None
    )
    same = plan_export(tmp_path / "plain", Asked(Codes.FP8, Codes.FP8))
    (group,) = same.config["quantization_config"]["config_groups"].values()
    assert group["targets"][-1] == "lm_head"
    assert "Linear" not in group["targets"]


# --- what is refused -----------------------------------------------------------------------------


def refused(kind: type[SoloistError], folder: Path, asked: Asked, output: Path) -> str:
    with pytest.raises(kind) as error:
        write_export(plan_export(folder, asked), output)
    assert error.value.hint
    return error.value.message


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("quantization_config", {"quant_method": "awq"}, "a quantization_config of awq"),
        ("compression_config", {}, "a compression_config"),
    ],
)
def test_a_model_that_is_quantised_already(tmp_path, field, value, told) -> None:
    make(tmp_path)
    change_config(tmp_path, {field: value})
    message = refused(AlreadyQuantized, tmp_path, Asked(Codes.INT4), tmp_path / "out")
    assert message == (
        f"{tmp_path} is quantised already (config.json has {told}); only a checkpoint in bf16 or "
        "fp16 can be quantised"
    )


def test_a_model_with_another_tool_s_account(tmp_path) -> None:
    make(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    message = refused(AlreadyQuantized, tmp_path, Asked(Codes.INT4), tmp_path / "out")
    assert "it holds hf_quant_config.json" in message


def test_what_was_written_is_refused_as_a_source(tmp_path) -> None:
    make(tmp_path / "plain")
    quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT4))
    message = refused(AlreadyQuantized, tmp_path / "out", Asked(Codes.INT4), tmp_path / "again")
    assert "compressed-tensors" in message


def test_codes_without_an_account(tmp_path) -> None:
    stored = make(tmp_path)
    name = f"{LAYER}mlp.up_proj.weight"
    write_single(tmp_path, stored | {name: stored[name].to(torch.float8_e4m3fn)})
    message = refused(CheckpointError, tmp_path, Asked(Codes.INT4), tmp_path / "out")
    assert "F8_E4M3" in message


def test_a_model_in_fp32(tmp_path) -> None:
    make(tmp_path, torch.float32)
    message = refused(CheckpointError, tmp_path, Asked(Codes.INT4), tmp_path / "out")
    assert message == (
        f"tensor 'model.layers.0.self_attn.q_proj.weight' of {tmp_path} is stored in fp32 "
        "(allowed: bf16 or fp16)"
    )


def test_norms_may_be_in_fp32(tmp_path) -> None:
    stored = make(tmp_path / "plain")
    stored["model.norm.weight"] = stored["model.norm.weight"].float() + 1e-7
    write_single(tmp_path / "plain", stored)
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT4))
    assert torch.equal(made["model.norm.weight"], stored["model.norm.weight"])


def test_rows_that_no_group_divides(tmp_path) -> None:
    make(tmp_path, intermediate_size=100)
    message = refused(NoGroupFits, tmp_path, Asked(Codes.INT4), tmp_path / "out")
    assert message == (
        "tensor 'model.layers.0.mlp.down_proj.weight' has rows of 100 numbers, which do not "
        "divide into groups of 128, 64 or 32 for int4 (allowed: a multiple of 32)"
    )
    assert not (tmp_path / "out").exists()


def test_a_laneformer(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LANEFORMER_2B))
    message = refused(CheckpointError, tmp_path, Asked(Codes.INT4), tmp_path / "out")
    assert message == (
        "the family 'laneformer' keeps 'model.layers.0.attention.wq.weight' in 3 dimensions, "
        "[8, 384, 3072]; compressed-tensors stores only matrices (allowed: 2 dimensions)"
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_leave_nothing_behind(tmp_path, bad) -> None:
    stored = make(tmp_path)
    stored[f"{LAYER}mlp.down_proj.weight"][3, 4] = bad
    write_single(tmp_path, stored)
    message = refused(NotFinite, tmp_path, Asked(Codes.INT8), tmp_path / "out")
    assert message == (
        f"tensor '{LAYER}mlp.down_proj.weight' holds 1 NaN or infinite values among 6,144"
    )
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something(tmp_path) -> None:
    make(tmp_path / "plain")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("a", "b", "c", "d"):
        (out / name).touch()
    message = refused(SettingError, tmp_path / "plain", Asked(Codes.INT4), out)
    assert message == (
        f"--output is '{out}' (allowed: a new or empty folder; this one holds a, b, c, …)"
    )
    assert sorted(path.name for path in out.iterdir()) == ["a", "b", "c", "d"]


def test_a_file_as_folder(tmp_path) -> None:
    make(tmp_path / "plain")
    (tmp_path / "out").write_text("mine")
    message = refused(SettingError, tmp_path / "plain", Asked(Codes.INT4), tmp_path / "out")
    assert message.endswith("(allowed: a new or empty folder; this is a file)")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_empty_folder_and_one_that_is_not_there(tmp_path) -> None:
    make(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "some" / "where"):
        assert quantised(tmp_path / "plain", out, Asked(Codes.FP8))


def test_a_disk_without_room(tmp_path, monkeypatch) -> None:
    make(tmp_path / "plain")
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    message = refused(DiskFull, tmp_path / "plain", Asked(Codes.INT4), tmp_path / "out")
    assert message.startswith(f"{tmp_path / 'out'} needs ")
    assert message.endswith("but its disk has 1 kB free; nothing was written")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path) -> None:
    make(tmp_path / "plain")
    (tmp_path / "file").touch()
    asked = Asked(Codes.INT4)
    message = refused(UserError, tmp_path / "plain", asked, tmp_path / "file" / "out")
    assert message == f"{tmp_path / 'file' / 'out'} cannot be written: Not a directory"


def test_what_was_begun_is_removed_when_writing_fails(tmp_path, monkeypatch) -> None:
    make(tmp_path / "plain")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "quantize", fail)
    with pytest.raises(KeyboardInterrupt):
        quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT4))
    assert not (tmp_path / "out").exists()


# --- the file itself -----------------------------------------------------------------------------


def test_tensors_are_written_in_any_order(tmp_path) -> None:
    entries = [Entry("b", "F8_E4M3", (3,)), Entry("a", "I64", (2,)), Entry("c", "F32", ())]
    with SafetensorsFile(tmp_path / "f", entries) as file:
        file.write("c", memoryview(torch.tensor([1.5]).numpy()))
        file.write("b", memoryview(b"\x38\x40\x00"))
        file.write("a", memoryview(torch.tensor([4, -5]).numpy()))
    with safe_open(tmp_path / "f", framework="pt") as opened:
        assert opened.get_tensor("a").tolist() == [4, -5]
        assert opened.get_tensor("b").float().tolist() == [1.0, 2.0, 0.0]
        assert opened.get_tensor("c").item() == 1.5


def test_a_tensor_that_is_forgotten_is_our_mistake(tmp_path) -> None:
    with pytest.raises(AssertionError, match="never written"):
        SafetensorsFile(tmp_path / "f", [Entry("a", "I64", (2,))]).__exit__(None, None, None)


def test_files_are_those_that_the_library_writes(tmp_path) -> None:
    """Byte for byte, where the tensors are the same."""
    stored = make(tmp_path / "plain")
    made = quantised(tmp_path / "plain", tmp_path / "out", Asked(Codes.INT4))
    assert stored.keys() != made.keys()
    save_file(made, tmp_path / "library", metadata={"format": "pt"})
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "library").read_bytes()
