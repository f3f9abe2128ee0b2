"""Matrices that are quantised as `Quantized` says, and the numbers that they then stand for."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.megakernel.weight_format import WeightFormat, quantized_format
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.quantized import COLUMNS, SCALES, ZEROS, Codes, Quantized
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.numbers import numbers, packed

# What the kernel reads, by a name for tests: every width of a group, every type of scales.
FORMATS = {
    "int4": Quantized(Codes.INT4, 128, Dtype.BF16),
    "int4-wide": Quantized(Codes.INT4, 0, Dtype.FP16),
    "int4-zeros": Quantized(Codes.INT4, 32, Dtype.FP16, has_zeros=True),
    "int4-zeros-64": Quantized(Codes.INT4, 64, Dtype.BF16, has_zeros=True),
    "int4-permuted": Quantized(Codes.INT4, 32, Dtype.FP16, permuted=True),
    "int8": Quantized(Codes.INT8, 0, Dtype.BF16),
    "int8-zeros": Quantized(Codes.INT8, 32, Dtype.FP32, has_zeros=True),
    "int8-permuted": Quantized(Codes.INT8, 64, Dtype.FP16, has_zeros=True, permuted=True),
    "fp8": Quantized(Codes.FP8, 0, Dtype.BF16),
    "fp8-32": Quantized(Codes.FP8, 32, Dtype.FP16),
    "fp8-block": Quantized(Codes.FP8, 128, Dtype.FP32, scale_rows=128),
}
_LEAST = {Codes.INT4: 0.0, Codes.INT8: -128.0, Codes.FP8: -448.0}
_MOST = {Codes.INT4: 15.0, Codes.INT8: 127.0, Codes.FP8: 448.0}


def matrices_of(config: ModelConfig) -> list[str]:
    """All but the embedding."""
    names = ("qkv", "attention_output", "gate_up", "down")
    return [*(f"layers.{i}.{name}" for i in range(config.num_layers) for name in names), "head"]


def formats_of(stored: Mapping[str, Quantized]) -> dict[str, WeightFormat]:
    """As a plan takes them."""
    return {name: quantized_format(quantized) for name, quantized in stored.items()}


def parts_of(values: Tensor, to: Quantized) -> dict[str, Tensor]:
    """Codes, scales and zeros of a matrix [N, K], rounded to nearest; columns in a random order."""
    order = _order(values.shape[1])
    if to.permuted:
        values = values[:, order.long()]
    columns, groups = values.shape[1], to.groups(values.shape[1])
    width, least, most = to.group or columns, _LEAST[to.codes], _MOST[to.codes]
    grouped = pad(values.float(), (0, groups * width - columns)).unflatten(1, (groups, width))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    low, high = (_of_blocks(x, to.scale_rows) for x in (low, -high))
    high = -high
    if to.has_zeros:
        scales = (high - low) / (most - least)
    else:
        scales = torch.maximum(high, -low) / ((most - least) / 2)
    scales = scales.clamp(min=1e-6).to(TORCH_DTYPES[to.scale_dtype])
    each = scales.float()[..., None]
    zeros = (least - low[..., None] / each).round().clamp(least, most)
    if not to.has_zeros:
        zeros = torch.full_like(zeros, 8.0 if to.codes is Codes.INT4 else 0.0)
    codes = grouped / each + zeros
    codes = codes if to.codes is Codes.FP8 else codes.round()
    codes = codes.clamp(least, most).flatten(1)[:, :columns]
    parts = {"": _stored(codes, to.codes), SCALES: scales}
    if to.has_zeros:
        zero = torch.uint8 if to.codes is Codes.INT4 else torch.int8
        parts[ZEROS] = zeros[..., 0].to(zero)
    return parts | ({COLUMNS: order} if to.permuted else {})


def random_parts(rows: int, columns: int, to: Quantized, seed: int = 0) -> dict[str, Tensor]:
    """Every code there is, scales and zeros of all sizes; of FP8 no code that is no number."""
    draw = torch.Generator().manual_seed(seed)
    groups = to.groups(columns)
    if to.codes is Codes.FP8:
        codes = torch.randint(0, 254, (rows, columns), generator=draw)
        codes = codes + (codes > 0x7E)
        stored = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        some = torch.randint(0, 2**to.codes.bits, (rows, columns), generator=draw)
        stored = _stored(some + int(_LEAST[to.codes]), to.codes)
    scales = torch.rand(rows, groups, generator=draw) + 0.5
    scales = scales[torch.arange(rows) // to.scale_rows * to.scale_rows]
    parts = {"": stored, SCALES: scales.to(TORCH_DTYPES[to.scale_dtype])}
    if to.has_zeros:
        is_int4 = to.codes is Codes.INT4
        least, most, zero = (0, 17, torch.uint8) if is_int4 else (-128, 128, torch.int8)
        parts[ZEROS] = torch.randint(least, most, (rows, groups), generator=draw).to(zero)
    return parts | ({COLUMNS: _order(columns)} if to.permuted else {})


def quantised(weights: Weights, stored: Mapping[str, Quantized]) -> tuple[Weights, Weights]:
    """(tensors as the kernel takes them, the numbers that they stand for)."""
    parts, meant = dict(weights), dict(weights)
    for name, quantized in stored.items():
        own = parts_of(parts.pop(name), quantized)
        parts |= {name + part: values for part, values in own.items()}
        meant[name] = numbers(quantized, own)
    return parts, meant


def alike(
    config: ModelConfig, kind: str, names: Iterable[str] | None = None
) -> dict[str, Quantized]:
    """One of FORMATS for all matrices, or for some."""
    return dict.fromkeys(names or matrices_of(config), FORMATS[kind])


def _order(columns: int) -> Tensor:
    """A table of columns."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return order.to(torch.uint16)


def _of_blocks(low: Tensor, rows: int) -> Tensor:
    """The smallest of each block of rows, for each of them."""
    blocks = pad(low, (0, 0, 0, -low.shape[0] % rows)).unflatten(0, (-1, rows)).amin(1)
    return blocks.repeat_interleave(rows, 0)[: low.shape[0]]


def _stored(codes: Tensor, kind: Codes) -> Tensor:
    if kind is Codes.INT4:
        return packed(codes.to(torch.uint8))
    return codes.to(torch.int8 if kind is Codes.INT8 else torch.float8_e4m3fn)
