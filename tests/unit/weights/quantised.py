"""Quantised matrices on disk, one or a few at a time, read the way a model's are."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.quantization.matrices import joined
from soloist.model.quantized import COLUMNS, Quantized
from soloist.model.tensors import Source, TensorSpec
from soloist.model.torch_types import TORCH_DTYPES
from soloist.weights.numbers import numbers
from soloist.weights.reading import Forms, read_tensors

CPU = torch.device("cpu")


def write(folder: Path, config: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Checkpoint:
    """A checkpoint of these tensors that says of itself that it is quantised like that."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    values = {"torch_dtype": "bfloat16", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    return open_checkpoint(folder)


def spec(*shapes: tuple[int, int], names: str = "abc") -> TensorSpec:
    """A tensor whose sources are 'a.weight', 'b.weight', …"""
    sources = zip(names, shapes, strict=False)
    return TensorSpec("layers.0.qkv", tuple(Source(f"{n}.weight", s) for n, s in sources))


def of(module: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{module}.{suffix}": values for suffix, values in tensors.items()}


def read(checkpoint: Checkpoint, one: TensorSpec, dtype: torch.dtype) -> Tensor:
    """The numbers, after everything was checked."""
    checkpoint.check([one])
    ours = next(ours for ours, theirs in TORCH_DTYPES.items() if theirs is dtype)
    (found,) = read_tensors(checkpoint, [one], ours, CPU)
    assert found[0] == one.name
    return found[1]


def kept(checkpoint: Checkpoint, one: TensorSpec) -> tuple[Quantized, dict[str, Tensor]]:
    """What the tensor is, and its parts as they come."""
    quantized = joined(checkpoint.quantization, one)
    assert quantized is not None
    forms = Forms(keep={one.name: quantized})
    parts = dict(read_tensors(checkpoint, [one], Dtype.FP32, CPU, forms=forms))
    assert list(parts) == [one.name + part for part in quantized.parts]
    return quantized, {name.removeprefix(one.name): values for name, values in parts.items()}


def same_bits(seen: Tensor, wanted: Tensor) -> None:
    assert seen.dtype is wanted.dtype
    assert seen.shape == wanted.shape
    assert torch.equal(seen.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def both_ways(checkpoint: Checkpoint, one: TensorSpec, wanted: Tensor) -> Quantized:
    """Read as numbers, and kept and turned into numbers; both are `wanted`, bit for bit."""
    same_bits(read(checkpoint, one, wanted.dtype), wanted)
    quantized, parts = kept(checkpoint, one)
    rows, columns = one.shape
    width = columns // 2 if quantized.codes == "int4" else columns
    assert parts[""].shape == (rows, width)
    for part in quantized.parts[1:]:
        of_part = (columns,) if part == COLUMNS else (rows, quantized.groups(columns))
        assert parts[part].shape == of_part
    same_bits(numbers(quantized, parts).to(wanted.dtype), wanted)
    return quantized
