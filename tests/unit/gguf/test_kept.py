"""What the decode kernel keeps of a GGUF file: codes and scales as they are stored."""

from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.weights.choice import Rounding, choose
from soloist.weights.formats import formats_of
from soloist.weights.numbers import as_numbers
from soloist.weights.reading import Forms, load_weights
from unit.gguf.writing import write
from unit.model.tiny import described, random_tensors

WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
MATRICES = ["layers.0.qkv", "layers.0.attention_output", "layers.0.gate_up", "layers.0.down"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("Q8_0", [*MATRICES, "head"]), ("Q4_0", [*MATRICES, "head"]),
        ("Q4_1", []), ("Q4_K", []), ("Q6_K", []), ("BF16", []),
    ],
)  # fmt: skip
def test_parts_stand_for_the_same_numbers(kind: str, kept: list[str], tmp_path: Path) -> None:
    config, specs = described(tmp_path, **WIDE)
    sizes = {
        "model_type": "llama", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, **WIDE,
    }  # fmt: skip
    file = write(tmp_path / "m.gguf", sizes, random_tensors(specs), kind)
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
        assert own[".scales"].dtype is torch.float16
