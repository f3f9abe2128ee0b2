"""Checkpoint files: what is damaged, absent or too much is named before anything is computed."""

import json
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from soloist.errors import (
    CheckpointError,
    ConfigError,
    IndexMismatch,
    MissingFile,
    MissingTensor,
    NotAFile,
    NotAModel,
    NotFinite,
    TruncatedFile,
    UnexpectedTensor,
    UserError,
    WrongShape,
)
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families.llama import IGNORED
from soloist.model.tensors import TensorSpec
from soloist.model.torch_types import Weights
from soloist.weights.random import random_weights
from soloist.weights.reading import LoadProgress, load_weights
from unit.model.tiny import described, random_tensors, write_shards, write_single

CPU = torch.device("cpu")


def load(folder: Path, specs: tuple[TensorSpec, ...], dtype: Dtype = Dtype.FP32) -> Weights:
    checkpoint = open_checkpoint(folder)
    checkpoint.check(specs)
    return load_weights(checkpoint, specs, dtype, CPU)


@pytest.fixture
def specs(tmp_path: Path) -> tuple[TensorSpec, ...]:
    return described(tmp_path)[1]


@pytest.fixture
def stored(specs: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    return random_tensors(specs)


# --- what loads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_tensors_are_joined_in_order(
    shards: int, specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    if shards == 1:
        write_single(tmp_path, stored)
    else:
        write_shards(tmp_path, stored, shards)
    weights = load(tmp_path, specs)
    assert weights.keys() == {spec.name for spec in specs}
    attention = "model.layers.1.self_attn."
    parts = [stored[f"{attention}{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(weights["layers.1.qkv"], torch.cat(parts))
    parts = [stored[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(weights["layers.0.gate_up"], torch.cat(parts))
    for spec in specs:
        assert weights[spec.name].shape == spec.shape


def test_a_checkpoint_knows_its_size_and_type(
    specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    half = {k: v.bfloat16() if v.dim() > 1 else v for k, v in stored.items()}
    files = write_shards(tmp_path, half)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dtype is Dtype.BF16
    assert checkpoint.files == files
    assert checkpoint.num_bytes == sum(f.stat().st_size for f in files)
    weights = load_weights(checkpoint, specs, Dtype.FP32, CPU)
    assert torch.equal(weights["embedding"], half["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda d: d.value)
def test_progress_ends_at_the_whole(
    dtype: Dtype, specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    write_single(tmp_path, stored)
    seen: list[LoadProgress] = []
    weights = load_weights(open_checkpoint(tmp_path), specs, dtype, CPU, seen.append)
    assert {w.dtype for w in weights.values()} == {
        {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}[dtype]
    }
    done = [p.done_bytes for p in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == 4 * sum(t.numel() for t in stored.values())
    assert seen[-1].gb_per_s > 0


def test_a_tied_head_may_be_stored_once_more(tmp_path: Path) -> None:
    _, specs = described(tmp_path, tie_word_embeddings=True)
    stored = random_tensors(specs)
    assert "lm_head.weight" not in stored
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    write_shards(tmp_path, stored)
    assert "head" not in load(tmp_path, specs)
    stored["lm_head.weight"][5, 3] += 1
    write_shards(tmp_path, stored)
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*differs.*embed_tokens"):
        load(tmp_path, specs)
    stored["lm_head.weight"] = torch.zeros(3, 12)
    write_shards(tmp_path, stored)
    with pytest.raises(WrongShape, match="lm_head"):
        load(tmp_path, specs)


def test_old_rope_tables_are_passed_over(
    specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    stored["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    write_single(tmp_path, stored)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.check(specs, IGNORED)
    with pytest.raises(UnexpectedTensor, match="inv_freq"):
        checkpoint.check(specs)


def test_random_weights_fit_the_specs(specs: tuple[TensorSpec, ...]) -> None:
    weights = random_weights(specs, Dtype.BF16, CPU, seed=4)
    assert {k: tuple(v.shape) for k, v in weights.items()} == {s.name: s.shape for s in specs}
    again = random_weights(specs, Dtype.BF16, CPU, seed=4)
    assert all(torch.equal(weights[k], again[k]) for k in weights)
    assert all((weights[s.name] == 1).all() for s in specs if s.name.endswith("norm"))


# --- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 9, 100, -5000, -1])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shard"])
def test_cut_files_are_named(
    length: int, sharded: bool, stored: dict[str, Tensor], tmp_path: Path
) -> None:
    file = write_shards(tmp_path, stored)[1] if sharded else write_single(tmp_path, stored)
    content = file.read_bytes()
    file.write_bytes(content[:length])
    with pytest.raises(TruncatedFile, match=file.name) as caught:
        open_checkpoint(tmp_path)
    assert f"{len(content[:length]):,} bytes" in str(caught.value)
    assert "download this file again" in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff" * 20,
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]}}',
    ],
    ids=["cut", "list", "bytes", "no tensor", "wrong length"],
)
def test_garbage_headers_are_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0" * 8)
    with pytest.raises(TruncatedFile, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_garbage_behind_the_last_tensor_is_refused(
    stored: dict[str, Tensor], tmp_path: Path
) -> None:
    file = write_single(tmp_path, stored)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(TruncatedFile):
        open_checkpoint(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(TruncatedFile, match="no tensors"):
        open_checkpoint(tmp_path)


# --- absent files --------------------------------------------------------------------------------


def test_a_missing_shard_is_named(stored: dict[str, Tensor], tmp_path: Path) -> None:
    files = write_shards(tmp_path, stored)
    files[1].unlink()
    with pytest.raises(MissingFile, match="model-00002-of-00003") as caught:
        open_checkpoint(tmp_path)
    assert "one of 3" in str(caught.value)
    assert files[0].name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("pytorch_model.bin", "save_pretrained"),
        ("pytorch_model-00001-of-00002.bin", "save_pretrained"),
        ("consolidated.00.pth", "the version for transformers"),
        ("consolidated.safetensors", "the version for transformers"),
        ("mmproj-f16.gguf", "a GGUF file of the model itself"),
        ("decoder_model.onnx", "ONNX"),
        ("weights.00.npz", "MLX"),
        ("flax_model.msgpack", "is in a format that Soloist does not load"),
    ],
)
def test_other_formats_are_named_with_what_to_do(name: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a.txt").touch()
    with pytest.raises(MissingFile, match=r"model\.safetensors") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint.startswith(f"{name} ")
    assert advice in caught.value.hint


@pytest.mark.parametrize("content", [b'{"base_model_name_or_path": "owner/base\\u001b"}', b"{"])
def test_an_adapter_is_named_with_its_model(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotAModel, match=r"holds an adapter.*not a whole model") as caught:
        open_checkpoint(tmp_path)
    assert "with --adapter" in caught.value.hint
    assert ("of 'owner/base\\x1b'" in caught.value.message) is (content != b"{")


def test_an_empty_folder_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="is empty"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../model.safetensors"}}',
        b'{"weight_map": {"a": "/model.safetensors"}}',
        b'{"weight_map": {"a": ""}}',
        b'{"weight_map": {"a": "a\\u0000b"}}',
        b'{"weight_map": {"a": "\\ud800"}}',
        b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}',
    ],
)
def test_a_damaged_index_is_refused(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_two_checkpoints_in_one_folder_are_refused(
    stored: dict[str, Tensor], tmp_path: Path
) -> None:
    write_shards(tmp_path, stored)
    write_single(tmp_path, stored)
    with pytest.raises(CheckpointError, match="both"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(stored: dict[str, Tensor], tmp_path: Path) -> None:
    files = write_shards(tmp_path, stored)
    save_file(stored, files[2])
    with pytest.raises(CheckpointError, match=r"is both in .* and in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["another shard", "a shard without it"])
def test_an_index_that_contradicts_its_shards_is_refused(
    place: str, stored: dict[str, Tensor], tmp_path: Path
) -> None:
    write_shards(tmp_path, stored)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = sorted(index["weight_map"])
    if place == "another shard":
        index["weight_map"][names[0]] = index["weight_map"][names[1]]
        told = f"'{names[0]}' is in model-00002-of-00003.safetensors, but it is in model-00001"
    else:
        index["weight_map"]["more"] = index["weight_map"][names[0]]
        told = "'more' is in model-00001-of-00003.safetensors, but no shard holds it"
    file.write_text(json.dumps(index))
    with pytest.raises(IndexMismatch, match=told):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_a_files_place_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(NotAFile, match="is a pipe"):
        open_checkpoint(tmp_path)


def test_a_pipe_in_a_shards_place_is_refused(stored: dict[str, Tensor], tmp_path: Path) -> None:
    shard = write_shards(tmp_path, stored)[1]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(NotAFile, match=r"00002-of-00003\.safetensors is a pipe"):
        open_checkpoint(tmp_path)


# --- against the configuration -------------------------------------------------------------------


def test_missing_tensors_are_named(
    specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        del stored[name]
    write_single(tmp_path, stored)
    with pytest.raises(MissingTensor, match=r"lacks 2 tensors.*lm_head.weight.*up_proj"):
        load(tmp_path, specs)


def test_unexpected_tensors_are_named(
    specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    for i in range(5):
        stored[f"model.layers.{i}.self_attn.q_proj.bias"] = torch.zeros(24)
    write_shards(tmp_path, stored)
    with pytest.raises(UnexpectedTensor, match=r"holds 5 tensors .*q_proj.bias.* and 2 more"):
        load(tmp_path, specs)


@pytest.mark.parametrize("shape", [(12, 24, 1), (24, 12), (12, 23), (288,), ()])
def test_wrong_shapes_are_named(
    shape: tuple[int, ...],
    specs: tuple[TensorSpec, ...],
    stored: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    assert stored[name].shape == (12, 24)
    stored[name] = torch.zeros(shape)
    write_single(tmp_path, stored)
    with pytest.raises(WrongShape, match=name) as caught:
        load(tmp_path, specs)
    assert str(list(shape)) in str(caught.value)
    assert "[12, 24]" in str(caught.value)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shard"])
def test_values_that_are_not_finite_are_named(
    value: float,
    sharded: bool,
    specs: tuple[TensorSpec, ...],
    stored: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    stored[name][3, 5] = value
    stored[name][7, 0] = -value
    (write_shards if sharded else write_single)(tmp_path, stored)
    with pytest.raises(NotFinite, match=name) as caught:
        load(tmp_path, specs)
    assert "2 NaN or infinite values among 96" in str(caught.value)


def test_values_that_a_16_bit_type_cannot_hold_are_named(
    specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    stored["model.norm.weight"][2] = 1e6
    write_single(tmp_path, stored)
    load(tmp_path, specs, Dtype.BF16)
    with pytest.raises(NotFinite, match=r"model\.norm\.weight"):
        load(tmp_path, specs, Dtype.FP16)


def test_a_sum_beyond_fp32_is_no_damage(
    specs: tuple[TensorSpec, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    stored["model.norm.weight"][:] = 3e38
    write_single(tmp_path, stored)
    assert (load(tmp_path, specs)["final_norm"] == torch.tensor(3e38)).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("every", [False, True], ids=["one tensor", "most tensors"])
def test_quantised_checkpoints_are_refused(
    dtype: torch.dtype,
    every: bool,
    specs: tuple[TensorSpec, ...],
    stored: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    one = "model.layers.0.mlp.down_proj.weight"
    write_single(tmp_path, {k: v.to(dtype) if every or k == one else v for k, v in stored.items()})
    with pytest.raises(CheckpointError, match="supported: F32, BF16, F16"):
        load(tmp_path, specs)
    checkpoint = open_checkpoint(tmp_path)
    if every:
        with pytest.raises(CheckpointError, match="unquantised"):
            _ = checkpoint.dtype


def test_every_refusal_is_the_users_to_mend(stored: dict[str, Tensor], tmp_path: Path) -> None:
    """Whatever happens to one byte of a header, opening raises only what a user is shown."""
    file = write_single(tmp_path, {"model.norm.weight": stored["model.norm.weight"]})
    content = file.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for i in range(header):
        for flip in (0x01, 0x80):
            file.write_bytes(content[:i] + bytes([content[i] ^ flip]) + content[i + 1 :])
            with suppress(UserError):
                open_checkpoint(tmp_path)
