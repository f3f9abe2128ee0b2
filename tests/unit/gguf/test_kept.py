"""What the decode kernel keeps of a GGUF file: codes and scales as they are stored."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.weights.choice import Rounding, choose
from soloist.weights.formats import formats_of
from soloist.weights.loading import Destination, Source, load_ranks
from soloist.weights.numbers import as_numbers
from soloist.weights.packed import pack_weights
from soloist.weights.reading import Forms, load_weights
from soloist.weights.unpacking import Unpacked
from unit.gguf.writing import TypeOf, write
from unit.model.tiny import described, random_tensors

WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
MATRICES = ["layers.0.qkv", "layers.0.attention_output", "layers.0.gate_up", "layers.0.down"]
CPU = torch.device("cpu")


def mixed(name: str) -> str:
    """Q4_K_M: v, down and the head have more bits."""
    short = name.split(".")[-2]
    return "Q6_K" if short in ("v_proj", "down_proj", "lm_head") else "Q4_K"


def half_mixed(name: str) -> str:
    """v has blocks of another sort, which no kind joins with those of q and k."""
    return "Q8_0" if name.split(".")[-2] == "v_proj" else "Q4_K"


def written(folder: Path, kind: str | TypeOf) -> Path:
    _, specs = described(folder, **WIDE)
    sizes = {
        "model_type": "llama", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, **WIDE,
    }  # fmt: skip
    return write(folder / "m.gguf", sizes, random_tensors(specs), kind)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("Q8_0", [*MATRICES, "head"]), ("Q4_0", [*MATRICES, "head"]),
        ("Q4_1", [*MATRICES, "head"]), ("BF16", []),
        *((kind, [*MATRICES, "head"]) for kind in ("Q4_K", "Q5_K", "Q6_K")),
        (mixed, [*MATRICES, "head"]),
        (half_mixed, [name for name in [*MATRICES, "head"] if name != "layers.0.qkv"]),
    ],
    ids=lambda given: given.__name__ if callable(given) else None,
)  # fmt: skip
def test_parts_stand_for_the_same_numbers(
    kind: str | TypeOf, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some rows after the other.
    monkeypatch.setattr("soloist.weights.reading._BLOCKS_AT_ONCE", 1 << 13)
    file = written(tmp_path, kind)
    config, specs = read_config(file), tensors(read_config(file))
    checkpoint = open_checkpoint(file)
    chosen = choose(checkpoint, config, specs, Rounding())
    formats = formats_of(chosen.stored, config)
    assert sorted(formats) == sorted(kept)
    numbers = load_weights(checkpoint, specs, Dtype.FP32, CPU)
    keep = {name: chosen.stored[name] for name in formats}
    parts = load_weights(checkpoint, specs, Dtype.FP32, CPU, forms=Forms(keep))
    for name, quantized in keep.items():
        own = {part: parts[name + part] for part in quantized.parts}
        assert torch.equal(as_numbers(quantized, own, Dtype.FP32), numbers[name])
        assert own[".super_scales" if quantized.super_block else ".scales"].dtype is torch.float16


@pytest.mark.parametrize(
    "kind", ["Q4_1", "Q5_K", mixed], ids=lambda given: given.__name__ if callable(given) else given
)
def test_the_kernels_image_has_the_numbers_of_the_file(kind: str | TypeOf, tmp_path: Path) -> None:
    """From the file over a rank's parts to packed bytes, and back to rows as prompts read them."""
    file = written(tmp_path, kind)
    config, specs, checkpoint = read_config(file), tensors(read_config(file)), open_checkpoint(file)
    chosen = choose(checkpoint, config, specs, Rounding())
    formats = formats_of(chosen.stored, config)
    source = Source(checkpoint, chosen.config, chosen.specs, chosen.stored)
    kept = Destination((CPU,), Dtype.BF16, True, False, formats)
    (parts,), _ = load_ranks(source, kept, lambda _: None)
    (rows,), _ = load_ranks(source, Destination((CPU,), Dtype.BF16, True, False), lambda _: None)
    gpu = replace(TYPICAL["sm_90a"], num_sms=9)
    plan = make_plan(chosen.config, Dtype.BF16, gpu, formats=formats)
    unpacked = Unpacked(plan, pack_weights(plan, parts, CPU))
    for name in formats:
        assert torch.equal(unpacked(name), rows[name])
