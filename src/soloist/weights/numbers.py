"""What quantised tensors stand for: (code - zero) · scale, in fp32. Torch, any device.

Where there are offsets, code · scale + offset. Of scales within scales a group's is the product of
an integer and a number of 16 bits, which fp32 holds exactly.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
from soloist.model.torch_types import TORCH_DTYPES

# Zero of a matrix without zeros of its own.
_MIDDLE = {Codes.INT4: 8.0}
# In fp32 at a time, where they are wanted in fewer bits.
_NUMBERS_AT_ONCE = 1 << 22


def numbers(
    quantized: Quantized, parts: Mapping[str, Tensor], groups: Tensor | None = None
) -> Tensor:
    """The matrix [N, K], or the rows of it that `parts` have, with columns in its own order.

    Args:
        quantized: what they mean.
        parts: codes, scales, zeros, offsets and the table of columns by the end of their names.
        groups: [K], of each column; None where groups follow each other.
    """
    values = _widened(unpacked(parts[""]) if quantized.codes is Codes.INT4 else parts[""])
    if quantized.has_zeros:
        _with_shared(torch.Tensor.sub_, values, parts[ZEROS], quantized.group, groups)
    elif not quantized.has_offsets and (middle := _MIDDLE.get(quantized.codes)) is not None:
        values -= middle
    if quantized.super_block:
        _with_super_blocks(quantized, parts, values)
        return values
    _with_shared(torch.Tensor.mul_, values, parts[SCALES], quantized.group, groups)
    if quantized.has_offsets:
        _with_shared(torch.Tensor.add_, values, parts[OFFSETS], quantized.group, groups)
    if quantized.permuted:
        return torch.empty_like(values).index_copy_(1, parts[COLUMNS].long(), values)
    return values


def write_numbers(
    quantized: Quantized,
    parts: Mapping[str, Tensor],
    out: Tensor,
    groups: Tensor | None = None,
) -> None:
    """The same, rounded into `out` [N, K], some rows after the other."""
    step = max(1, _NUMBERS_AT_ONCE // out.shape[1])
    for start in range(0, out.shape[0], step):
        rows = {
            part: values if part == COLUMNS else values[start : start + step]
            for part, values in parts.items()
        }
        out[start : start + step].copy_(numbers(quantized, rows, groups))


def as_numbers(quantized: Quantized, parts: Mapping[str, Tensor], dtype: Dtype) -> Tensor:
    """The whole matrix in a precision, where its parts are."""
    codes = parts[""]
    columns = codes.shape[1] * (8 // quantized.codes.bits)
    out = torch.empty(codes.shape[0], columns, dtype=TORCH_DTYPES[dtype], device=codes.device)
    write_numbers(quantized, parts, out)
    return out


def _with_super_blocks(quantized: Quantized, parts: Mapping[str, Tensor], values: Tensor) -> None:
    """Codes [N, K] become numbers, in place."""

    def of_groups(within: Tensor, of_super_blocks: Tensor, group: int) -> Tensor:
        wide = of_super_blocks.float().repeat_interleave(quantized.super_block // group, 1)
        return wide[:, : within.shape[1]].mul_(within)

    scales = of_groups(parts[SCALES], parts[SUPER_SCALES], quantized.group)
    _with_shared(torch.Tensor.mul_, values, scales, quantized.group, None)
    if quantized.has_offsets:
        offsets = of_groups(parts[OFFSETS], parts[SUPER_OFFSETS], OFFSET_COLUMNS)
        _with_shared(torch.Tensor.sub_, values, offsets, OFFSET_COLUMNS, None)


def widened(given: Quantized, parts: Mapping[str, Tensor], to: Quantized) -> Mapping[str, Tensor]:
    """Parts of a matrix as those of one of the `widest` kinds, with the same numbers."""
    if not to.super_block:
        return parts
    made = dict(parts)
    if given.codes is not to.codes and given.codes is Codes.INT4:
        made[""] = unpacked(parts[""]).view(torch.int8)
    if given.group != to.group:
        made[SCALES] = parts[SCALES].repeat_interleave(given.group // to.group, 1)
    if to.has_offsets and not given.has_offsets:
        supers = parts[SUPER_SCALES]
        each = to.super_block // OFFSET_COLUMNS
        made[SUPER_OFFSETS] = torch.zeros_like(supers)
        made[OFFSETS] = supers.new_zeros(
            (supers.shape[0], supers.shape[1] * each), dtype=torch.uint8
        )
    return made


def _with_shared(
    change: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    shared: Tensor,
    group: int,
    groups: Tensor | None,
) -> None:
    """Change `values` [N, K] in place by what their groups share, [N, G]."""
    wide, columns = shared.to(torch.float32), values.shape[1]
    if groups is not None:
        change(values, wide.index_select(1, groups))
    elif wide.shape[1] == 1:
        change(values, wide)
    elif columns % group:
        change(values, wide.repeat_interleave(group, 1)[:, :columns])
    else:
        change(values.unflatten(1, (-1, group)), wide[..., None])


def _widened(codes: Tensor) -> Tensor:
    """Codes as fp32. FP8 on a CPU by a table: torch's conversion there takes six times as long."""
    if codes.dtype is not torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(torch.float32)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def unpacked(codes: Tensor) -> Tensor:
    """Two codes of a byte [N, K / 2] as one each, uint8 [N, K]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def packed(codes: Tensor) -> Tensor:
    """The inverse of `unpacked`, of uint8 below 16."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)
