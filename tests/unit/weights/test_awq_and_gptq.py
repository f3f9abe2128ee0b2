"""AWQ, GPTQ and AutoRound against their formats' definitions, spelled out number by number."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from soloist.errors import QuantizationMismatch, WrongShape
from soloist.model.dtype import Dtype
from soloist.model.quantization.column_order import column_order
from soloist.model.quantization.matrices import joined
from soloist.model.quantized import COLUMNS, SCALES, Codes, Quantized
from soloist.weights.numbers import unpacked
from unit.weights.formats import awq, gptq, matrix
from unit.weights.quantised import both_ways, kept, of, read, same_bits, spec, write

AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq"}
ORDERED = {**GPTQ, "bits": 4, "group_size": 32, "desc_act": True}


# --- AWQ -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq(group: int, dtype: torch.dtype, tmp_path: Path) -> None:
    m = matrix(24, 128, group, dtype=dtype)
    checkpoint = write(tmp_path, {**AWQ, "group_size": group}, of("a", awq(m)))
    quantized = both_ways(checkpoint, spec(m.shape), m.numbers)
    ours = {torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16, torch.float32: Dtype.FP32}
    assert quantized == Quantized(Codes.INT4, max(group, 0), ours[dtype], has_zeros=True)


def test_awq_without_zeros_has_eights(tmp_path: Path) -> None:
    m = matrix(16, 64, 32, sym=True)
    config = {**AWQ, "group_size": 32, "zero_point": False}
    checkpoint = write(tmp_path, config, of("a", awq(m)))
    assert not both_ways(checkpoint, spec(m.shape), m.numbers).has_zeros
    checkpoint = write(tmp_path, config, of("a", awq(matrix(16, 64, 32))))
    with pytest.raises(QuantizationMismatch, match=r"'a.qzeros'.*zeros from 0 to 15.*8 everywhere"):
        read(checkpoint, spec(m.shape), torch.float32)


# --- GPTQ ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_groups", [True, False], ids=["g_idx", "no g_idx"])
@pytest.mark.parametrize("sym", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("stored", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(
    bits: int, group: int, stored: str, offset: int, sym: bool, has_groups: bool, tmp_path: Path
) -> None:
    m = matrix(16, 128, group, bits, sym=sym, least=offset)
    config = {
        **GPTQ, "bits": bits, "group_size": group, "sym": sym, "checkpoint_format": stored,
    }  # fmt: skip
    tensors = of("a", gptq(m, offset, has_groups=has_groups))
    checkpoint = write(tmp_path, config, tensors)
    quantized = both_ways(checkpoint, spec(m.shape), m.numbers)
    assert quantized.has_zeros is not sym
    assert quantized.codes is (Codes.INT4 if bits == 4 else Codes.INT8)


def test_a_borrow_between_zeros_comes_back(tmp_path: Path) -> None:
    """A zero of 0 less 1, taken off whole words as GPTQModel does it, borrows from the next."""
    m = matrix(16, 64, 32, least=0, seed=5)
    assert any(0 in row for row in m.zeros)
    tensors = gptq(m, 0)
    tensors["qzeros"] = tensors["qzeros"] - 0x11111111
    config = {**GPTQ, "bits": 4, "group_size": 32, "sym": False}
    both_ways(write(tmp_path, config, of("a", tensors)), spec(m.shape), m.numbers)


def test_the_wrong_version_of_a_symmetric_file_is_noticed(tmp_path: Path) -> None:
    m = matrix(16, 64, 32, sym=True)
    config = {**GPTQ, "bits": 4, "group_size": 32, "sym": True}
    checkpoint = write(tmp_path, config, of("a", gptq(m, 0)))
    with pytest.raises(QuantizationMismatch, match=r"zeros from 9 to 9.*8 everywhere"):
        read(checkpoint, spec(m.shape), torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, -1])
def test_columns_in_the_order_of_activations(bits: int, group: int, tmp_path: Path) -> None:
    m = matrix(16, 128, group, bits, least=1, shuffled=True)
    config = {**GPTQ, "bits": bits, "group_size": group, "sym": False, "desc_act": True}
    checkpoint = write(tmp_path, config, of("a", gptq(m)))
    quantized = both_ways(checkpoint, spec(m.shape), m.numbers)
    assert quantized.permuted is (group != -1)  # one group has no order


def test_codes_are_kept_by_group(tmp_path: Path) -> None:
    """Columns of a group come one after the other, as they followed each other before."""
    m = matrix(8, 96, 32, least=1, shuffled=True)
    checkpoint = write(tmp_path, {**ORDERED, "sym": False}, of("a", gptq(m)))
    _, parts = kept(checkpoint, spec(m.shape))
    order = sorted(range(96), key=lambda k: (m.of[k], k))
    assert parts[COLUMNS].tolist() == order
    assert unpacked(parts[""]).tolist() == [[row[k] for k in order] for row in m.codes]
    assert torch.equal(parts[SCALES], m.scales)


def test_sources_of_one_order_are_one_matrix(tmp_path: Path) -> None:
    """q, k and v have the same inputs, and so the same order; any other one is no one matrix."""
    first, second = (matrix(16, 64, 32, least=1, shuffled=True, seed=seed) for seed in (1, 2))
    second = replace(second, of=first.of)
    tensors = of("a", gptq(first)) | of("b", gptq(second))
    config, both = {**ORDERED, "sym": False}, spec(*[(16, 64)] * 2)
    wanted = torch.cat([first.numbers, second.numbers])
    assert both_ways(write(tmp_path, config, tensors), both, wanted).permuted
    for of_another in (first.of[::-1], sorted(first.of)):
        second = replace(second, of=of_another)
        checkpoint = write(tmp_path, config, tensors | of("b", gptq(second)))
        assert joined(checkpoint.quantization, both) is None
        wanted = torch.cat([first.numbers, second.numbers])
        same_bits(read(checkpoint, both, torch.float32), wanted)


def test_an_order_that_is_allowed_but_not_there(tmp_path: Path) -> None:
    m = matrix(16, 64, 32, least=1)
    checkpoint = write(tmp_path, {**ORDERED, "sym": False}, of("a", gptq(m)))
    assert not both_ways(checkpoint, spec(m.shape), m.numbers).permuted


def test_groups_of_several_sizes_are_numbers(tmp_path: Path) -> None:
    m = matrix(16, 64, 32, least=1)
    m = replace(m, of=[0] * 33 + [1] * 31)
    checkpoint = write(tmp_path, {**ORDERED, "sym": False}, of("a", gptq(m)))
    assert joined(checkpoint.quantization, spec(m.shape)) is None
    same_bits(read(checkpoint, spec(m.shape), torch.float32), m.numbers)


@pytest.mark.parametrize("columns", [1 << 16, (1 << 16) + 32])
def test_a_table_names_so_many_columns(columns: int) -> None:
    groups = torch.arange(columns).flip(0).int().numpy() // 32
    assert (column_order(groups, 32) is None) is (columns > 1 << 16)


def test_an_order_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    m = matrix(16, 64, 32, least=1, shuffled=True)
    config = {**GPTQ, "bits": 4, "group_size": 32, "sym": False}
    checkpoint = write(tmp_path, config, of("a", gptq(m)))
    with pytest.raises(QuantizationMismatch, match=r"a.g_idx.*order.*consecutive"):
        read(checkpoint, spec(m.shape), torch.float32)


@pytest.mark.parametrize(("given", "told"), [(2, "0 … 2"), (-1, "-1 … 1")])
def test_groups_that_are_not_there_are_refused(given: int, told: str, tmp_path: Path) -> None:
    m = matrix(16, 64, 32, least=1)
    tensors = gptq(m)
    tensors["g_idx"][3] = given
    checkpoint = write(tmp_path, {**ORDERED, "sym": False}, of("a", tensors))
    assert joined(checkpoint.quantization, spec(m.shape)) is None
    with pytest.raises(QuantizationMismatch, match=f"groups {told}.*0 … 1"):
        read(checkpoint, spec(m.shape), torch.float32)


def test_an_order_of_other_columns_is_refused(tmp_path: Path) -> None:
    m = matrix(16, 64, 32, least=1, shuffled=True)
    tensors = gptq(m)
    tensors["g_idx"] = tensors["g_idx"][:-1]
    checkpoint = write(tmp_path, {**ORDERED, "sym": False}, of("a", tensors))
    with pytest.raises(WrongShape, match=r"a.g_idx.*63.*64"):
        checkpoint.check([spec(m.shape)])


def test_dynamic_overrides(tmp_path: Path) -> None:
    """The first pattern that matches decides, '-:' leaves a module in 16 bits."""
    plain, wide, usual = (
        torch.randn(16, 64),
        matrix(16, 64, 64, 8, least=1),
        matrix(16, 64, 32, least=1, seed=1),
    )
    config = {
        **GPTQ, "bits": 4, "group_size": 32, "sym": False, "lm_head": False,
        "dynamic": {"-:a": {}, "+:b$": {"bits": 8, "group_size": 64}, "b": {"bits": 4}},
    }  # fmt: skip
    tensors = {"a.weight": plain} | of("b", gptq(wide)) | of("c", gptq(usual))
    checkpoint, both = write(tmp_path, config, tensors), spec(*[(16, 64)] * 3)
    wanted = torch.cat([plain, wide.numbers, usual.numbers])
    same_bits(read(checkpoint, both, torch.float32), wanted)
    assert joined(checkpoint.quantization, both) is None


# --- AutoRound -----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [None, "auto_round:auto_gptq", "auto_round:gptq"])
def test_auto_round_like_gptq(packing: str | None, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
        "autoround_version": "0.9.1", "iters": 200, "extra_config": {
            "b": {"bits": 8, "group_size": -1, "sym": False}, "c": {"bits": 16, "data_type": "fp"},
        },
    }  # fmt: skip
    config |= {} if packing is None else {"packing_format": packing}
    small, large = matrix(16, 64, 32, sym=True), matrix(16, 64, -1, 8, least=1)
    tensors = of("a", gptq(small, has_groups=False)) | of("b", gptq(large))
    tensors["c.weight"] = torch.randn(16, 64)
    checkpoint, both = write(tmp_path, config, tensors), spec(*[(16, 64)] * 3)
    wanted = torch.cat([small.numbers, large.numbers, tensors["c.weight"]])
    same_bits(read(checkpoint, both, torch.float32), wanted)


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq"])
def test_auto_round_like_awq(packing: str, tmp_path: Path) -> None:
    config = {
        "quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False,
        "packing_format": packing,
    }  # fmt: skip
    m = matrix(16, 128, 64)
    both_ways(write(tmp_path, config, of("a", awq(m))), spec(m.shape), m.numbers)


# --- any sizes -----------------------------------------------------------------------------------


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 5), groups=st.integers(1, 4), group=st.sampled_from([8, 24, 32]),
    bits=st.sampled_from([4, 8]), is_awq=st.booleans(), parts=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_sizes_and_sources(
    rows: int, groups: int, group: int, bits: int, is_awq: bool, parts: int, seed: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Sources below each other are one matrix, bit for bit."""
    bits = 4 if is_awq else bits
    ms = [
        matrix(8 * (rows + i), groups * group, group, bits, least=1, seed=seed + i)
        for i in range(parts)
    ]
    config = {**AWQ, "group_size": group} if is_awq else {
        **GPTQ, "bits": bits, "group_size": group, "sym": False,
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, m in zip("abc", ms, strict=False):
        tensors |= of(name, awq(m) if is_awq else gptq(m))
    checkpoint = write(tmp_path, config, tensors)
    both_ways(checkpoint, spec(*[m.shape for m in ms]), torch.cat([m.numbers for m in ms]))
