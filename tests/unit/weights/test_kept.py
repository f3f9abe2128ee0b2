"""A model's tensors in every format: kept as stored, or as numbers, and nothing read twice."""

from pathlib import Path

import pytest
import torch

from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.quantization.matrices import joined, may_be_quantised
from soloist.model.quantized import COLUMNS
from soloist.weights.numbers import numbers
from soloist.weights.reading import Forms, LoadProgress, load_weights, read_tensors
from unit.model.tiny import described, write_shards
from unit.weights.formats import FORMATS, Format

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip

# Tensors of which not all sources are quantised alike.
APART = {
    "fp8-listed": {"layers.0.qkv", "layers.0.gate_up", "layers.0.down", "layers.1.qkv"},
    "fbgemm": {"layers.0.attention_output", "layers.1.attention_output"},
    "modelopt": {"layers.1.gate_up", "layers.1.down"},
    "pack-quantized-8": {"layers.0.gate_up", "layers.1.gate_up"},
    "awq-listed": {f"layers.0.{name}" for name in ("qkv", "attention_output", "gate_up", "down")},
    "gptq-dynamic": {"layers.1.gate_up", "layers.1.down"},
    "gptq-orders": {f"layers.{i}.{name}" for i in (0, 1) for name in ("qkv", "gate_up")},
}
HEADS = {"fp8-blocks-head", "pack-quantized-zeros", "gptq-8-v2", "gptq-ordered-zeros"}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_kept_parts_are_the_numbers(form: Format, tmp_path: Path) -> None:
    _, specs = described(tmp_path, **SIZES, quantization_config=form.config)
    for name, text in form.files.items():
        (tmp_path / name).write_text(text)
    generator = torch.Generator().manual_seed(1)
    stored, wanted = {}, {}
    for spec in specs:
        for source in spec.sources:
            values = torch.randn(source.shape, generator=generator)
            tensors, wanted[source.name] = (
                form.of(source.name.removesuffix(".weight"), values)
                if may_be_quantised(spec)
                else ({source.name: values}, values)
            )
            stored |= tensors
    write_shards(tmp_path, stored)  # a matrix's parts lie in several files
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.check(specs)

    seen = load_weights(checkpoint, specs, Dtype.FP32, CPU)
    for spec in specs:
        assert torch.equal(seen[spec.name], torch.cat([wanted[s.name] for s in spec.sources]))

    found = {spec.name: joined(checkpoint.quantization, spec) for spec in specs}
    keep = {name: quantized for name, quantized in found.items() if quantized is not None}
    matrices = {spec.name for spec in specs if may_be_quantised(spec)} - {"head"}
    assert keep.keys() - {"head"} == matrices - APART.get(form.name, set())
    assert ("head" in keep) is (form.name in HEADS)

    told: list[LoadProgress] = []
    parts = dict(read_tensors(checkpoint, specs, Dtype.FP32, CPU, told.append, forms=Forms(keep)))
    assert parts.keys() == {
        name + part for name in seen for part in (keep[name].parts if name in keep else ("",))
    }
    for name, values in seen.items():
        if name in keep:
            own = {part: parts[name + part] for part in keep[name].parts}
            assert keep[name].permuted is form.name.startswith("gptq-order")
            rows = (own[part] for part in keep[name].parts if part != COLUMNS)
            assert all(part.shape[0] == values.shape[0] for part in rows)
            values_again = numbers(keep[name], own)
        else:
            values_again = parts[name]
        assert torch.equal(values_again, values), name
    total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    assert told[-1].done_bytes == told[-1].total_bytes == total
