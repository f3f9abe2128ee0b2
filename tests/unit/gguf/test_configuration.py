"""Metadata → the configuration that the family's config.json would give; the rest is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from soloist.errors import (
    BadGguf,
    CheckpointError,
    ConfigError,
    MissingField,
    MissingTensor,
    NotAcceptable,
    UnexpectedTensor,
    UnknownField,
    UnsupportedField,
    UnsupportedGguf,
    WrongShape,
    WrongType,
)
from soloist.gguf.splits import read_gguf
from soloist.model.checkpoint import open_checkpoint
from soloist.model.families import read_config, tensors
from soloist.model.gguf.tensors import stored_tensors
from soloist.planning.reading import read_model
from unit.gguf.writing import write
from unit.model.tiny import described, random_tensors

SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 31,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
}  # fmt: skip


def file_of(
    folder: Path,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """The tiny model in GGUF; its tensors are those of the sizes that were not changed."""
    config, specs = described(folder / "described", rms_norm_eps=1e-5)
    assert config.hidden_size == 12
    stored = {k: v for k, v in random_tensors(specs).items() if k not in without}
    return write(folder / "m.gguf", SIZES | changes, stored, "F32", metadata, more)


def test_it_is_the_config_of_the_checkpoint(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    wanted, _ = described(tmp_path / "described", rms_norm_eps=1e-5)
    seen = read_config(file)
    assert seen == wanted  # decimals as config.json has them, not as fp32 rounds them
    assert read_model(file) == read_model(tmp_path / "described" / "config.json")
    open_checkpoint(file).check(tensors(seen))


def test_an_absent_head_is_tied(tmp_path: Path) -> None:
    file = file_of(tmp_path, without=("lm_head.weight",))
    assert read_config(file).tied_head


def test_a_size_for_each_layer_that_is_always_the_same(tmp_path: Path) -> None:
    changes = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [20, 20]}
    assert read_config(file_of(tmp_path, changes)) == read_config(file_of(tmp_path / "b"))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no architecture": ({"general.architecture": None}, MissingField, "general.architecture"),
    "family": (
        {"general.architecture": "gemma3"}, UnsupportedGguf, "'gemma3'.*allowed: llama, qwen2",
    ),
    "steering": ({"general.architecture": "\x1b[2J"}, UnsupportedGguf, r"\\x1b\[2J"),
    "adapter": ({"general.type": "adapter"}, UnsupportedGguf, "'general.type' is 'adapter'"),
    "no layers": ({"llama.block_count": None}, MissingField, "'llama.block_count'"),
    "too many layers": ({"llama.block_count": 4_000_000}, WrongType, "4000000"),
    "text": ({"llama.embedding_length": "12"}, WrongType, "'llama.embedding_length' is '12'"),
    "negative": ({"llama.embedding_length": 0}, WrongType, "at least 1"),
    "heads": ({"llama.attention.head_count_kv": 4}, ConfigError, "divisor of 6"),
    "layers differ": (
        {"llama.attention.head_count_kv": [2, 3]}, UnsupportedField, "the same in all layers",
    ),
    "partial rope": (
        {"llama.rope.dimension_count": 2}, UnsupportedField, "'llama.rope.dimension_count' is 2",
    ),
    "value length": ({"llama.attention.value_length": 8}, UnsupportedField, "value_length' is 8"),
    "experts alone": ({"llama.expert_count": 8}, MissingField, "llama.expert_used_count"),
    "too few experts": (
        {"llama.expert_count": 2, "llama.expert_used_count": 3}, WrongType, "the 2 experts",
    ),
    "another router": (
        {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_gating_func": 2},
        UnsupportedField, "'llama.expert_gating_func' is 2",
    ),
    "experts elsewhere": (
        {"llama.expert_used_count": 2}, UnsupportedField, "'llama.expert_used_count' is 2",
    ),
    "window": ({"llama.attention.sliding_window": 16}, UnsupportedField, "sliding_window"),
    "unknown": ({"llama.twist": 1.5}, UnknownField, "'llama.twist' is 1.5"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, UnsupportedField, "'longrope'"),
    "no factor": ({"llama.rope.scaling.type": "yarn"}, MissingField, "rope.scaling.factor"),
    "no length": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
        MissingField, "original_context_length",
    ),
    "temperature": (
        {"llama.rope.scaling.attn_factor": 0.5}, UnsupportedField, "attn_factor' is 0.5",
    ),
    "no tokens": ({"tokenizer.ggml.model": "gpt2"}, MissingField, "'tokenizer.ggml.tokens'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    metadata, error, words = REFUSED[name]
    family = {"general.architecture": None}
    changed = {k: v for k, v in metadata.items() if k not in family}
    file = file_of(tmp_path, changed)
    if "general.architecture" in metadata:
        file.write_bytes(with_architecture(file.read_bytes(), metadata["general.architecture"]))
    with pytest.raises(error, match=words) as caught:
        read_config(file)
    assert str(file) in str(caught.value)
    assert "\x1b" not in str(caught.value)


def with_architecture(data: bytes, name: str | None) -> bytes:
    """Another architecture in place of llama, or another key in place of the architecture's."""
    if name is None:
        return data.replace(b"general.architecture", b"general.Architecture", 1)
    wanted, given = (len(x).to_bytes(8, "little") + x.encode() for x in ("llama", name))
    found = data.replace(wanted, given, 1)
    return found + bytes(64)  # tensors end later in the file, which nobody looks at


def test_an_unknown_key_can_be_accepted(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"llama.twist": 1.5, "general.author": "x", "other.key": 3})
    assert read_config(file, ["llama.twist"]) == read_config(file_of(tmp_path / "b"))
    with pytest.raises(NotAcceptable, match=r"llama\.block_count"):
        read_config(file, ["llama.twist", "llama.block_count"])


def checked(file: Path) -> None:
    config = read_config(file)
    open_checkpoint(file).check(tensors(config))


def test_tensors_are_held_against_the_metadata(tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match=r"its metadata calls for: blk\.1\.ffn_up\.weight"):
        checked(file_of(tmp_path / "a", without=("model.layers.1.mlp.up_proj.weight",)))
    with pytest.raises(WrongShape, match=r"'token_embd\.weight' has shape \[31, 12\], its metad"):
        checked(file_of(tmp_path / "b", vocab_size=32))
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((3, 12), np.float32)}
    with pytest.raises(UnexpectedTensor, match=r"account for: blk\.0\.ffn_gate_inp\.weight"):
        checked(file_of(tmp_path / "c", more=extra))
    foreign = {"model.norm.weight": np.zeros(12, np.float32)}
    with pytest.raises(BadGguf, match=r"which GGUF calls 'output_norm\.weight'"):
        checked(file_of(tmp_path / "d", more=foreign))


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (np.ones(3, np.float32), BadGguf, r"of shape \[3\], not F32 of shape \[2\]"),
        (np.ones(2, np.float16), BadGguf, "is F16 of shape"),
        (np.array([1, 0], np.float32), BadGguf, "holds 0"),
        (np.array([1, np.nan], np.float32), BadGguf, "positive numbers"),
    ],
)
def test_divisors_of_rope_that_cannot_be_used(
    values: Any, error: type[CheckpointError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        read_config(file_of(tmp_path, more={"rope_freqs.weight": values}))


def test_divisors_of_rope_beside_another_rule(tmp_path: Path) -> None:
    more = {"rope_freqs.weight": np.ones(2, np.float32)}
    with pytest.raises(UnsupportedGguf, match="the rule of rope"):
        read_config(file_of(tmp_path, {"llama.rope.scaling.factor": 2.0}, more=more))


def test_rows_are_those_of_heads(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"llama.attention.head_count": 5})
    with pytest.raises(BadGguf, match="not those of 5 heads"):
        stored_tensors(read_gguf(file))


def test_the_type_of_16_bit_matrices_stays(tmp_path: Path) -> None:
    """Files keep vectors in fp32 whatever their matrices are in."""
    _, specs = described(tmp_path / "described")
    stored = random_tensors(specs)
    for kind, wanted in (("F16", "fp16"), ("BF16", "bf16"), ("F32", "fp32")):
        file = write(tmp_path / f"{kind}.gguf", SIZES, stored, kind)
        assert open_checkpoint(file).dtype.value == wanted
    wide = {"hidden_size": 32, "head_dim": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    _, specs = described(tmp_path / "wide", intermediate_size=32, **wide)
    stored = {k: torch.ones_like(v) for k, v in random_tensors(specs).items()}
    sizes = SIZES | wide | {"intermediate_size": 32}
    for plain, wanted in (("F16", "fp16"), ("Q4_0", "bf16")):
        file = write(
            tmp_path / f"Q8_0-{plain}.gguf", sizes, stored,
            lambda name, plain=plain: plain if "lm_head" in name else "Q8_0",
        )  # fmt: skip
        assert open_checkpoint(file).dtype.value == wanted
