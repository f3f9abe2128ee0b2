"""Blocks of every type against gguf-py's own numbers, bit for bit."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from soloist.errors import NotFinite, ShapeUnsupported
from soloist.megakernel.weight_format import quantized_format
from soloist.model.quantization.gguf import SCHEMES
from soloist.model.quantization.matrices import StoredMatrix, meaning
from soloist.model.quantization.scheme import Role
from soloist.model.quantized import widest
from soloist.model.stored import Place, StoredTensor
from soloist.model.tensors import Source
from soloist.weights.decoding import decode
from soloist.weights.numbers import numbers, widened

# Where each type's blocks have 16-bit floats.
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
ROWS, BLOCKS = 24, 5


def random_blocks(name: str) -> np.ndarray:
    """Any bytes; only 16-bit floats are finite, subnormal ones and both zeros among them."""
    rng = np.random.default_rng(len(name))
    num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    raw = rng.integers(0, 256, (ROWS, BLOCKS, num_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        half = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)
        half[~np.isfinite(half)] = -0.37
        half[0, :2, 0] = (0.0, -0.0)
        raw[..., at : at + 2] = half.view(np.uint8)
    return raw.reshape(ROWS, -1)


def matrix(name: str) -> StoredMatrix:
    columns = BLOCKS * GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]
    shape = (ROWS, columns)
    stored = StoredTensor("x.weight", Path("x.gguf"), shape, name, Place("blk.0.x.weight", 0, 0))
    scheme = SCHEMES[name]
    assert scheme.inner_scales is not None
    source = Source("x.weight", shape)
    return StoredMatrix(source, scheme, {Role.CODES: stored}, meaning(scheme, scheme.inner_scales))


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_have_the_bits_of_gguf_py(name: str) -> None:
    raw = random_blocks(name)
    wanted = quants.dequantize(raw, GGMLQuantizationType[name])
    found = decode(matrix(name), {Role.CODES: torch.from_numpy(raw)})
    assert tuple(found.parts) == found.quantized.parts
    seen = numbers(found.quantized, found.parts).numpy()
    assert np.array_equal(seen.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_that_are_not_finite_are_refused(name: str) -> None:
    raw = random_blocks(name)
    at = HALVES[name][-1]
    raw[1, at : at + 2] = (0x00, 0x7C)
    with pytest.raises(NotFinite, match=r"'blk\.0\.x\.weight'"):
        decode(matrix(name), {Role.CODES: torch.from_numpy(raw)})


def test_the_kernel_keeps_what_its_formats_hold() -> None:
    """All of GGUF's types of blocks that are read."""
    kept = {}
    for name in SCHEMES:
        with suppress(ShapeUnsupported):
            kept[name] = quantized_format(matrix(name).quantized).reader
    assert kept == {
        "Q8_0": "Int8<ScaleType::kFp16, 32u, false>",
        "Q4_0": "Int4<ScaleType::kFp16, 32u, false>",
        "Q4_1": "Int4Offsets<ScaleType::kFp16, 32u>",
        "Q4_K": "SuperBlocks<4u, 32u, true>",
        "Q5_K": "SuperBlocks<6u, 32u, true>",
        "Q6_K": "SuperBlocks<6u, 16u, false>",
    }


@pytest.mark.parametrize(
    ("names", "reader"),
    [
        (("Q4_K", "Q6_K"), "SuperBlocks<6u, 16u, true>"),
        (("Q5_K", "Q4_K"), "SuperBlocks<6u, 32u, true>"),
        (("Q4_K", "Q5_K", "Q6_K"), "SuperBlocks<6u, 16u, true>"),
    ],
)
def test_rows_of_several_k_quants_become_one_kind(names: tuple[str, ...], reader: str) -> None:
    """q and k in Q4_K beside v in Q6_K: not a number changes."""
    to = widest({matrix(name).quantized for name in names})
    assert to is not None
    assert quantized_format(to).reader == reader
    for name in names:
        blocks = torch.from_numpy(random_blocks(name))
        found = decode(matrix(name), {Role.CODES: blocks})
        made = widened(found.quantized, found.parts, to)
        assert tuple(part for part in to.parts if part in made) == to.parts
        assert torch.equal(numbers(to, made), numbers(found.quantized, found.parts))


@pytest.mark.parametrize("other", ["Q8_0", "Q4_0", "Q4_1"])
def test_other_kinds_do_not_mix(other: str) -> None:
    assert widest({matrix("Q4_K").quantized, matrix(other).quantized}) is None
