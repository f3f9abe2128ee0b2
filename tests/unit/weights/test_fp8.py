"""FP8 files against transformers where it reads them on a CPU, and against the definition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from soloist.model.dtype import Dtype
from soloist.model.quantization.matrices import joined
from soloist.model.quantized import SCALES, Codes, Quantized
from unit.weights.quantised import both_ways, kept, of, read, same_bits, spec, write

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def codes(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Any bytes but those of NaN."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    found[(found & 0x7F) == 0x7F] = 0x7E
    return found.view(torch.float8_e4m3fn)


def scales(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100)
    return (torch.rand(shape, generator=generator) * 0.1 + 1e-3).to(dtype)


def literal(values: Tensor, by: Tensor, down: int, across: int) -> Tensor:
    """Number [n, k] is code [n, k] · scale [n // down, k // across]."""
    wanted = torch.empty(values.shape)
    wide = values.float()
    for n in range(values.shape[0]):
        for k in range(values.shape[1]):
            wanted[n, k] = wide[n, k] * by[n // down, k // across].float()
    return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_blocks_are_what_transformers_makes_of_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = {"weight": codes((256, 384)), "weight_scale_inv": scales((2, 3))}
    wanted = Fp8Dequantize(None)._dequantize_one(*stored.values(), output_dtype=dtype)
    quantized = both_ways(write(tmp_path, BLOCKS, of("a", stored)), spec((256, 384)), wanted)
    assert quantized == Quantized(Codes.FP8, 128, Dtype.FP32, scale_rows=128)
    assert quantized.label == "fp8-block"


def test_last_blocks_may_be_ragged(tmp_path: Path) -> None:
    stored = {"weight": codes((140, 200)), "weight_scale_inv": scales((2, 2))}
    wanted = literal(stored["weight"], stored["weight_scale_inv"], 128, 128)
    both_ways(write(tmp_path, BLOCKS, of("a", stored)), spec((140, 200)), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_in_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {"weight": codes((30, 140)), "weight_scale_inv": scales((1, 2), dtype=dtype)}
    wanted = literal(stored["weight"], stored["weight_scale_inv"], 128, 128)
    quantized = both_ways(write(tmp_path, BLOCKS, of("a", stored)), spec((30, 140)), wanted)
    assert quantized.scale_dtype is {
        torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16,
    }[dtype]  # fmt: skip


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """E8M0: a byte is an exponent, less 127."""
    exponents = torch.tensor([[110, 127], [0, 130]], dtype=torch.uint8)
    stored = {
        "weight": codes((150, 129)),
        "weight_scale_inv": exponents.view(torch.float8_e8m0fnu),
    }
    wanted = literal(stored["weight"], 2.0 ** (exponents.double() - 127), 128, 128)
    config = {**BLOCKS, "scale_fmt": "ue8m0"}
    quantized = both_ways(write(tmp_path, config, of("a", stored)), spec((150, 129)), wanted)
    assert quantized.scale_dtype is Dtype.FP32


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**BLOCKS, "weight_block_size": None, "activation_scheme": "static"}, "weight_scale_inv"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale"),
    ],
    ids=["null", "AutoFP8", "modelopt"],
)
def test_one_scale_a_matrix(
    config: dict[str, Any], name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    stored = {"weight": codes((24, 36)), name: scales(shape), "input_scale": scales(())}
    wanted = literal(stored["weight"], stored[name].reshape(1, 1), 24, 36)
    quantized = both_ways(write(tmp_path, config, of("a", stored)), spec((24, 36)), wanted)
    assert quantized == Quantized(Codes.FP8, 0, Dtype.FP32)


@pytest.mark.parametrize("shape", [(24, 1), (24,)], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ],
    ids=["fbgemm", "modelopt"],
)
def test_a_scale_a_row(config: dict[str, Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    stored = {"weight": codes((24, 36)), "weight_scale": scales(shape)}
    wanted = literal(stored["weight"], stored["weight_scale"].reshape(24, 1), 1, 36)
    both_ways(write(tmp_path, config, of("a", stored)), spec((24, 36)), wanted)


def test_a_file_of_model_optimizer_beside_the_configuration(tmp_path: Path) -> None:
    stored = {"weight": codes((24, 36)), "weight_scale": scales(())}
    (tmp_path / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", '
        '"kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "b*"]}}'
    )
    others = {"b.weight": torch.randn(8, 36), "a.k_scale": scales(()), "a.v_scale": scales((1,))}
    checkpoint = write(tmp_path, None, of("a", stored) | others)
    wanted = literal(stored["weight"], stored["weight_scale"].reshape(1, 1), 24, 36)
    both = spec((24, 36), (8, 36))
    assert joined(checkpoint.quantization, both) is None
    same_bits(read(checkpoint, both, torch.float32), torch.cat([wanted, others["b.weight"]]))


# --- sources that are one tensor -----------------------------------------------------------------


def three(config: dict[str, Any], shapes: list[tuple[int, int]], tmp_path: Path, **by: Any) -> Any:
    tensors = {}
    for i, (name, shape) in enumerate(zip("abc", shapes, strict=False)):
        suffix, sizes = by["of"](shape)
        own = {"weight": codes(shape, i), suffix: scales(sizes, i)}
        tensors |= of(name, own)
    return write(tmp_path, config, tensors), tensors


def in_blocks(shape: tuple[int, int]) -> tuple[str, tuple[int, ...]]:
    return "weight_scale_inv", (-(-shape[0] // 128), -(-shape[1] // 128))


@pytest.mark.parametrize(
    ("rows", "shared"),
    [((256, 128, 128), 128), ((256, 64, 64), 64), ((128, 32, 128), 32), ((128, 33, 7), 1),
     ((128, 128, 5), 128)],
)  # fmt: skip
def test_blocks_below_each_other(rows: tuple[int, ...], shared: int, tmp_path: Path) -> None:
    """The whole remembers how many rows from the first on share scales, everywhere."""
    shapes = [(n, 160) for n in rows]
    checkpoint, tensors = three(BLOCKS, shapes, tmp_path, of=in_blocks)
    wanted = [
        literal(tensors[f"{n}.weight"], tensors[f"{n}.weight_scale_inv"], 128, 128) for n in "abc"
    ]
    quantized = both_ways(checkpoint, spec(*shapes), torch.cat(wanted))
    assert quantized.scale_rows == shared
    _, parts = kept(checkpoint, spec(*shapes))
    for start in range(0, sum(rows), shared):
        block = parts[SCALES][start : start + shared]
        assert torch.equal(block, block[:1].expand_as(block))


def test_a_scale_a_matrix_becomes_one_a_row(tmp_path: Path) -> None:
    config, shapes = {"quant_method": "modelopt", "quant_algo": "FP8"}, [(8, 12), (4, 12), (4, 12)]
    checkpoint, tensors = three(config, shapes, tmp_path, of=lambda _: ("weight_scale", ()))
    both = spec(*shapes)
    wanted = [
        literal(tensors[f"{n}.weight"], tensors[f"{n}.weight_scale"].reshape(1, 1), 12, 12)
        for n in "abc"
    ]
    assert both_ways(checkpoint, both, torch.cat(wanted)) == Quantized(Codes.FP8, 0, Dtype.FP32)
    _, parts = kept(checkpoint, both)
    assert parts[SCALES].flatten().unique_consecutive(return_counts=True)[1].tolist() == [8, 4, 4]


def test_scales_of_two_types_are_not_joined(tmp_path: Path) -> None:
    tensors = of("a", {"weight": codes((8, 12)), "weight_scale_inv": scales((1, 1))})
    half = scales((1, 1), dtype=torch.bfloat16)
    tensors |= of("b", {"weight": codes((4, 12)), "weight_scale_inv": half})
    checkpoint = write(tmp_path, BLOCKS, tensors)
    both = spec((8, 12), (4, 12))
    assert joined(checkpoint.quantization, both) is None
    wanted = [
        literal(tensors[f"{n}.weight"], tensors[f"{n}.weight_scale_inv"], 128, 128) for n in "ab"
    ]
    same_bits(read(checkpoint, both, torch.float32), torch.cat(wanted))


def test_nothing_is_joined_without_quantisation() -> None:
    assert joined(None, spec((8, 12))) is None
