"""compressed-tensors' formats against the library, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from soloist.model.quantized import Codes
from unit.weights.formats import Matrix, matrix, word
from unit.weights.quantised import both_ways, of, spec, write

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def scales_shape(arguments: dict[str, Any], rows: int, columns: int) -> tuple[int, ...]:
    match arguments["strategy"]:
        case "tensor":
            return (1,)
        case "channel":
            return (rows, 1)
        case "group":
            return (rows, columns // arguments["group_size"])
    down, across = arguments["block_structure"]
    return (-(-rows // down), -(-columns // across))


def compressed(
    name: str, arguments: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """What the library stores of a random matrix, and what it makes of that again."""
    generator = torch.Generator().manual_seed(seed)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    size = scales_shape(arguments, *shape)
    state = {
        "weight": torch.randn(shape, generator=generator).to(dtype),
        "weight_scale": (torch.rand(size, generator=generator) * 0.2 + 0.01).to(dtype),
    }
    half = 2 ** (arguments["num_bits"] - 1)
    zeros = torch.randint(-half, half, size, generator=generator, dtype=torch.int8)
    state["weight_zero_point"] = zeros * (not arguments["symmetric"])
    compressor = BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(state, scheme)
    stored.pop("weight_zero_point", None) if arguments["symmetric"] else None
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


def config(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def arguments(bits: int, kind: str, strategy: str, symmetric: bool, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **more,
    }  # fmt: skip


CASES = [
    *(
        ("pack-quantized", arguments(bits, "int", strategy, symmetric, **more))
        for bits in (4, 8)
        for symmetric in (True, False)
        for strategy, more in [
            ("group", {"group_size": 32}),
            ("group", {"group_size": 64}),
            ("group", {"group_size": 128}),
            ("channel", {}),
        ]
    ),
    *(
        (name, arguments(8, kind, strategy, symmetric, **more))
        for name, kind in [
            ("float-quantized", "float"),
            ("naive-quantized", "float"),
            ("naive-quantized", "int"),
            ("int-quantized", "int"),
        ]
        for symmetric in ([True, False] if kind == "int" else [True])
        for strategy, more in [
            ("tensor", {}),
            ("channel", {}),
            ("group", {"group_size": 64}),
            ("block", {"block_structure": [128, 128]}),
            ("block", {"block_structure": [16, 48]}),
        ]
    ),
]


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    name, a = case
    size = a.get("group_size") or a.get("block_structure") or ""
    return f"{name}-{a['num_bits']}-{a['type']}-{a['strategy']}{size}-{a['symmetric']}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_numbers_are_the_librarys(
    case: tuple[str, dict[str, Any]], dtype: torch.dtype, tmp_path: Path
) -> None:
    name, given_arguments = case
    for i, shape in enumerate([(19, 128), (160, 384)]):
        stored, wanted = compressed(name, given_arguments, shape, dtype, i)
        checkpoint = write(tmp_path, config(name, given_arguments), of("a", stored))
        quantized = both_ways(checkpoint, spec(shape), wanted)
        assert quantized.has_zeros is not given_arguments["symmetric"]
        assert quantized.codes is {
            ("int", 4): Codes.INT4, ("int", 8): Codes.INT8, ("float", 8): Codes.FP8,
        }[given_arguments["type"], given_arguments["num_bits"]]  # fmt: skip


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 90),
    down=st.integers(1, 50),
    across=st.integers(1, 70),
    seed=st.integers(0, 2**20),
)
def test_ragged_blocks(
    rows: int, columns: int, down: int, across: int, seed: int, tmp_path: Path
) -> None:
    if down == 1 and columns % across:
        return  # groups of a row have to divide it
    name = "float-quantized"
    blocks = arguments(8, "float", "block", True, block_structure=[down, across])
    stored, wanted = compressed(name, blocks, (rows, columns), torch.float32, seed)
    checkpoint = write(tmp_path, config(name, blocks), of("a", stored))
    assert both_ways(checkpoint, spec((rows, columns)), wanted).scale_rows == down


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(9, 40),  # the library fails where zeros of a column fill one word only
    groups=st.integers(1, 4),
    group=st.sampled_from([2, 8, 32]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_packed_sizes_that_fill_no_word(
    rows: int, groups: int, group: int, bits: int, symmetric: bool, seed: int, tmp_path: Path
) -> None:
    name, shape = "pack-quantized", (rows, groups * group)
    packed = arguments(bits, "int", "group", symmetric, group_size=group)
    stored, wanted = compressed(name, packed, shape, torch.float16, seed)
    both_ways(write(tmp_path, config(name, packed), of("a", stored)), spec(shape), wanted)


def packed(m: Matrix) -> dict[str, Tensor]:
    """Consecutive columns in a word of codes, consecutive rows in one of zeros."""
    (rows, columns), groups = m.shape, m.scales.shape[1]
    zeros = [[line[g] for line in m.zeros] for g in range(groups)]

    def words(fields: list[int]) -> list[int]:
        return [word(fields[i : i + 8], 4) for i in range(0, len(fields), 8)]

    return {
        "weight_packed": torch.tensor([words(line) for line in m.codes], dtype=torch.int32),
        "weight_zero_point": torch.tensor(
            [words(line) for line in zeros], dtype=torch.int32
        ).t().contiguous(),
        "weight_scale": m.scales,
        "weight_shape": torch.tensor([rows, columns]),
        "weight_g_idx": torch.tensor(m.of, dtype=torch.int32),
    }  # fmt: skip


@pytest.mark.parametrize("order", ["group", "dynamic"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_columns_in_groups_of_their_own(shuffled: bool, order: str, tmp_path: Path) -> None:
    """Old files of `actorder: group`: weight_g_idx says which column is in which group."""
    m = matrix(11, 64, 32, shuffled=shuffled)
    group = arguments(4, "int", "group", False, group_size=32, actorder=order)
    checkpoint = write(tmp_path, config("pack-quantized", group), of("a", packed(m)))
    assert both_ways(checkpoint, spec(m.shape), m.numbers).permuted is shuffled


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_other_orders_of_quantising_change_no_file(order: Any, tmp_path: Path) -> None:
    m = matrix(11, 64, 32)
    group = arguments(4, "int", "group", False, group_size=32, actorder=order)
    tensors = packed(m)
    del tensors["weight_g_idx"]
    checkpoint = write(tmp_path, config("pack-quantized", group), of("a", tensors))
    both_ways(checkpoint, spec(m.shape), m.numbers)
