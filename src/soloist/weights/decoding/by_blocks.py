"""GGUF's blocks: codes of 32 or 256 columns of a row, beside what they share.

Source: the blocks' structures and `dequantize_row_…` of ggml; gguf-py's `quants` has the same.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from soloist.errors import NotFinite
from soloist.gguf.tensor_types import BY_NAME
from soloist.model.quantization.matrices import StoredMatrix
from soloist.model.quantization.scheme import Role
from soloist.model.quantized import OFFSETS, SCALES, SUPER_OFFSETS, SUPER_SCALES
from soloist.weights.decoding.parts import Decoded

# Parts of blocks [N, B, …], by the ends of their names.
_Parts = dict[str, Tensor]


def decode(matrix: StoredMatrix, tensors: Mapping[Role, Tensor]) -> Decoded:
    """Parts of all rows, or of those that the bytes are of.

    Raises:
        NotFinite: scales or offsets are NaN or infinite.
    """
    name = matrix.scheme.name
    blocks = tensors[Role.CODES].unflatten(1, (-1, BY_NAME[name].num_bytes))
    parts = {part: values.flatten(1) for part, values in _READERS[name](blocks).items()}
    for values in parts.values():
        if values.is_floating_point() and (bad := int((~torch.isfinite(values)).sum())):
            raise NotFinite(matrix.tensors[Role.CODES].shown, bad, values.numel())
    return Decoded(matrix.quantized, {part: parts[part] for part in matrix.quantized.parts})


def _q8_0(blocks: Tensor) -> _Parts:
    return {"": blocks[..., 2:].contiguous().view(torch.int8), SCALES: _fp16(blocks, 0)}


def _q4_0(blocks: Tensor) -> _Parts:
    return {"": _in_pairs(blocks[..., 2:]), SCALES: _fp16(blocks, 0)}


def _q4_1(blocks: Tensor) -> _Parts:
    codes = _in_pairs(blocks[..., 4:])
    return {"": codes, SCALES: _fp16(blocks, 0), OFFSETS: _fp16(blocks, 2)}


def _q4_k(blocks: Tensor) -> _Parts:
    # Bytes 32 i … 32 i + 31 hold sub-block 2 i in their low halves, 2 i + 1 in their high ones.
    codes = _in_pairs(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return {"": codes, **_with_minima(blocks)}


def _q5_k(blocks: Tensor) -> _Parts:
    quads = blocks[..., 48:].unflatten(-1, (4, 1, 32))
    low = torch.cat((quads & 15, quads >> 4), dim=-2).flatten(-3, -2)  # [N, B, 8, 32]
    high = blocks[..., None, 16:48] >> _shifts(blocks, 8, 1) & 1
    return {"": (low | high << 4).flatten(-2).view(torch.int8), **_with_minima(blocks)}


def _q6_k(blocks: Tensor) -> _Parts:
    # Each half of the columns has 64 bytes of low bits and 32 bytes with four pairs of high bits.
    quads = blocks[..., :128].unflatten(-1, (2, 2, 32))
    low = torch.cat((quads & 15, quads >> 4), dim=-2)  # [N, B, 2, 4, 32]
    pairs = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    high = pairs >> _shifts(blocks, 4, 2) & 3
    codes = (low | high << 4).sub_(32).flatten(-3).view(torch.int8)
    within = blocks[..., 192:208].contiguous().view(torch.int8)
    return {"": codes, SCALES: within, SUPER_SCALES: _fp16(blocks, 208)}


_READERS: Mapping[str, Callable[[Tensor], _Parts]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def _with_minima(blocks: Tensor) -> _Parts:
    """Eight pairs of six bits, for sub-blocks, and two fp16. Minima are taken off."""
    packed = blocks[..., 4:16].unflatten(-1, (3, 4))
    first, second, rest = packed.unbind(-2)  # [N, B, 4]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1).view(torch.int8)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    return {
        SCALES: scales,
        OFFSETS: minima,
        SUPER_SCALES: _fp16(blocks, 0),
        SUPER_OFFSETS: _fp16(blocks, 2),
    }


def _fp16(blocks: Tensor, start: int) -> Tensor:
    """One number [N, B, 1] of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _shifts(blocks: Tensor, count: int, bits: int) -> Tensor:
    return torch.arange(0, count * bits, bits, dtype=torch.uint8, device=blocks.device)[:, None]


def _in_pairs(quads: Tensor) -> Tensor:
    """Bytes [..., W] that hold column l and column l + W, as bytes of neighbours.

    The first half of the result has what was in the low halves of bytes.
    """
    even, odd = quads[..., ::2], quads[..., 1::2]
    return torch.cat((even & 15 | odd << 4, even >> 4 | odd & 0xF0), dim=-1)
