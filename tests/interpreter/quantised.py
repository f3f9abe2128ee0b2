"""Matrices that are quantised as `Quantized` says, and the numbers that they then stand for."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.megakernel.program import products_of, tensor_of
from soloist.megakernel.weight_format import WeightFormat, quantized_format
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.quantized import (
    COLUMNS,
    OFFSET_COLUMNS,
    OFFSETS,
    SCALES,
    SUPER_OFFSETS,
    SUPER_SCALES,
    ZEROS,
    Codes,
    Quantized,
)
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
    "int4-offsets": Quantized(Codes.INT4, 32, Dtype.FP16, has_offsets=True),
    "super-int4": Quantized(Codes.INT4, 32, Dtype.FP16, has_offsets=True, super_block=256),
    "super-int6": Quantized(Codes.INT6, 16, Dtype.FP16, super_block=256),
    "super-int6-offset": Quantized(Codes.INT6, 32, Dtype.FP16, has_offsets=True, super_block=256),
    "super-mixed": Quantized(Codes.INT6, 16, Dtype.FP16, has_offsets=True, super_block=256),
    "fp8": Quantized(Codes.FP8, 0, Dtype.BF16),
    "fp8-32": Quantized(Codes.FP8, 32, Dtype.FP16),
    "fp8-block": Quantized(Codes.FP8, 128, Dtype.FP32, scale_rows=128),
}
_LEAST = {Codes.INT4: 0.0, Codes.INT6: -32.0, Codes.INT8: -128.0, Codes.FP8: -448.0}
_MOST = {Codes.INT4: 15.0, Codes.INT6: 31.0, Codes.INT8: 127.0, Codes.FP8: 448.0}


def matrices_of(config: ModelConfig) -> list[str]:
    """All but the embedding and routers."""
    found = []
    for i, layer in enumerate(config.layers):
        experts = range(1 if layer.router is None else layer.router.num_experts)
        for product in products_of(layer):
            own = [tensor_of(layer, i, product.name, expert) for expert in experts]
            found += dict.fromkeys(own)
    return [*found, "head"]


def formats_of(stored: Mapping[str, Quantized]) -> dict[str, WeightFormat]:
    """As a plan takes them."""
    return {name: quantized_format(quantized) for name, quantized in stored.items()}


def parts_of(values: Tensor, to: Quantized) -> dict[str, Tensor]:
    """Codes, scales and zeros of a matrix [N, K], rounded to nearest; columns in a random order."""
    if to.super_block:
        return _super_blocks_of(values, to)
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
    if to.has_offsets:
        scales = ((high - low) / (most - least)).clamp(min=1e-6).to(TORCH_DTYPES[to.scale_dtype])
        offsets = low.to(scales.dtype)
        each = scales.float()[..., None]
        zeros = -offsets.float()[..., None] / each
    elif not to.has_zeros:
        zeros = torch.full_like(zeros, 8.0 if to.codes is Codes.INT4 else 0.0)
    codes = grouped / each + zeros
    codes = codes if to.codes is Codes.FP8 else codes.round()
    codes = codes.clamp(least, most).flatten(1)[:, :columns]
    parts = {"": _stored(codes, to.codes), SCALES: scales}
    if to.has_offsets:
        return parts | {OFFSETS: offsets}
    if to.has_zeros:
        zero = torch.uint8 if to.codes is Codes.INT4 else torch.int8
        parts[ZEROS] = zeros[..., 0].to(zero)
    return parts | ({COLUMNS: order} if to.permuted else {})


def _super_blocks_of(values: Tensor, to: Quantized) -> dict[str, Tensor]:
    """Rounded to nearest as blocks of K-quants: scales of groups, then integers of these."""
    columns, least, most = values.shape[1], _LEAST[to.codes], _MOST[to.codes]
    grouped = pad(values.float(), (0, -columns % to.super_block)).unflatten(1, (-1, to.group))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if to.has_offsets:
        each = OFFSET_COLUMNS // to.group
        low, high = (
            f(x.unflatten(1, (-1, each)), 2) for f, x in ((torch.amin, low), (torch.amax, high))
        )
        scales = ((high - low) / (most - max(least, 0))).repeat_interleave(each, 1)
    else:
        scales = torch.maximum(high / most, low / least)
    within, supers = _within(scales, to.super_block // to.group)
    whole = within.float() * supers.float().repeat_interleave(to.super_block // to.group, 1)
    parts = {SCALES: within.to(torch.int8), SUPER_SCALES: supers}
    if to.has_offsets:
        of_offsets = to.super_block // OFFSET_COLUMNS
        offsets, own = _within(-low, of_offsets)
        parts |= {OFFSETS: offsets.to(torch.uint8), SUPER_OFFSETS: own}
        taken = offsets.float() * own.float().repeat_interleave(of_offsets, 1)
        grouped = grouped + taken.repeat_interleave(each, 1)[..., None]
    codes = (grouped / whole.clamp(min=1e-9)[..., None]).round().clamp(least, most)
    codes = _stored(codes.flatten(1)[:, :columns], to.codes)
    sizes = {
        SCALES: to.group, OFFSETS: OFFSET_COLUMNS,
        SUPER_SCALES: to.super_block, SUPER_OFFSETS: to.super_block,
    }  # fmt: skip
    cut = {part: values[:, : -(-columns // sizes[part])] for part, values in parts.items()}
    return {part: {"": codes, **cut}[part] for part in to.parts}


def _within(values: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Integers up to 63 and the numbers of super-blocks, of values that are not negative."""
    blocks = values.unflatten(1, (-1, each))
    supers = (blocks.amax(2) / 63).clamp(min=1e-6).half()
    return (blocks / supers.float()[..., None]).round().clamp(0, 63).flatten(1), supers


def random_parts(rows: int, columns: int, to: Quantized, seed: int = 0) -> dict[str, Tensor]:
    """Every code there is, scales and zeros of all sizes; of FP8 no code that is no number."""
    draw = torch.Generator().manual_seed(seed)
    groups = to.groups(columns)
    if to.super_block:
        return _random_super_blocks(rows, columns, to, draw)
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
    if to.has_offsets:
        offsets = torch.randn(rows, groups, generator=draw)
        return parts | {OFFSETS: offsets.to(parts[SCALES].dtype)}
    if to.has_zeros:
        is_int4 = to.codes is Codes.INT4
        least, most, zero = (0, 17, torch.uint8) if is_int4 else (-128, 128, torch.int8)
        parts[ZEROS] = torch.randint(least, most, (rows, groups), generator=draw).to(zero)
    return parts | ({COLUMNS: _order(columns)} if to.permuted else {})


def _random_super_blocks(
    rows: int, columns: int, to: Quantized, draw: torch.Generator
) -> dict[str, Tensor]:
    """Scales of both signs in groups of 16; otherwise six bits, as K-quants have them."""

    def some(low: int, high: int, each: int) -> Tensor:
        return torch.randint(low, high, (rows, -(-columns // each)), generator=draw)

    def halves() -> Tensor:
        return (torch.rand(rows, -(-columns // to.super_block), generator=draw) + 0.5).half()

    least, most = int(_LEAST[to.codes]), int(_MOST[to.codes])
    lowest, highest = (0, 64) if to.group == OFFSET_COLUMNS else (-128, 128)
    parts = {
        "": _stored(some(least, most + 1, 1), to.codes),
        SCALES: some(lowest, highest, to.group).to(torch.int8),
        OFFSETS: some(0, 64, OFFSET_COLUMNS).to(torch.uint8),
        SUPER_SCALES: halves(),
        SUPER_OFFSETS: halves(),
    }
    return {part: parts[part] for part in to.parts}


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


def as_q4_k_m(config: ModelConfig) -> dict[str, Quantized]:
    """As llama.cpp mixes them: v, down and the head have six bits, in half of the layers."""
    stored, layers = alike(config, "super-int4"), config.num_layers
    ends = layers // 8
    for i in range(layers):
        if i < ends or i >= layers - ends or (i - ends) % 3 == 2:
            stored[f"layers.{i}.qkv"] = FORMATS["super-mixed"]
            stored[f"layers.{i}.down"] = FORMATS["super-int6"]
    return stored | {"head": FORMATS["super-int6"]}


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
    return codes.to(torch.float8_e4m3fn if kind is Codes.FP8 else torch.int8)
