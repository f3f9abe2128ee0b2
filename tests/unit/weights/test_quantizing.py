"""Rounding to nearest: the parts, their types and how near they are."""

import pytest
import torch
from torch import Tensor

from soloist.model.dtype import Dtype
from soloist.model.quantized import SCALES, Codes, Quantized
from soloist.weights import quantizing
from soloist.weights.quantizing import quantize

INT4 = Quantized(Codes.INT4, 32, Dtype.BF16)
INT8 = Quantized(Codes.INT8, 0, Dtype.BF16)
FP8 = Quantized(Codes.FP8, 0, Dtype.BF16)


def numbers(parts: dict[str, Tensor], quantized: Quantized, columns: int) -> Tensor:
    """What the parts stand for, by the definition and number by number."""
    codes, scales = parts[""], parts[SCALES].float()
    if quantized.codes is Codes.INT4:
        wide = codes.int()
        codes = torch.stack((wide & 15, wide >> 4), dim=2).flatten(1) - 8
    group = quantized.group or columns
    return codes.float() * scales.repeat_interleave(group, dim=1)[:, :columns]


def weights(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)


def test_four_bits_by_hand() -> None:
    values = torch.zeros(1, 32)
    values[0, :6] = torch.tensor([7.5, -7.5, 1.0, 1.5, 2.5, -0.4])
    made = quantize(values, INT4)
    assert made[SCALES].tolist() == [[1.0]]
    # The range has no 8, so 7.5 becomes 7; ties go to the even code.
    codes = [7, -8, 1, 2, 2, 0] + [0] * 26
    stored = [code + 8 for code in codes]
    assert made[""].tolist() == [
        [low | high << 4 for low, high in zip(stored[0::2], stored[1::2], strict=True)]
    ]
    assert (made[""].dtype, made[SCALES].dtype) == (torch.uint8, torch.bfloat16)


def test_eight_bits_by_hand() -> None:
    values = torch.tensor([[127.5, -127.5, 100.4, -100.5, 0.0]])
    made = quantize(values, INT8)
    assert made[SCALES].tolist() == [[1.0]]
    assert made[""].tolist() == [[127, -128, 100, -100, 0]]
    assert made[""].dtype is torch.int8


def test_fp8_by_hand() -> None:
    values = torch.tensor([[448.0, -447.0, 1.0, 1.06, 0.0]])
    made = quantize(values, FP8)
    assert made[SCALES].tolist() == [[1.0]]
    assert made[""].float().tolist() == [[448.0, -448.0, 1.0, 1.0, 0.0]]
    assert made[""].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("quantized", [INT4, INT8, FP8], ids=lambda q: q.codes.value)
def test_no_number_is_further_off_than_its_code_allows(quantized, dtype) -> None:
    quantized = Quantized(quantized.codes, quantized.group, dtype)
    torch_dtype = torch.bfloat16 if dtype is Dtype.BF16 else torch.float16
    values = weights(64, 256, torch_dtype)
    made = quantize(values, quantized)
    assert made[SCALES].dtype is torch_dtype
    assert made[SCALES].shape == (64, 8 if quantized.group else 1)
    off = (numbers(made, quantized, 256) - values.float()).abs()
    scales = made[SCALES].float().repeat_interleave(256 // made[SCALES].shape[1], dim=1)
    # Half a step, and for the largest of a group what rounding of its scale cuts off.
    slack = 7.5 * 2**-8 if quantized.codes is Codes.INT4 else 127.5 * 2**-8
    if quantized.codes is Codes.FP8:
        bound = values.float().abs() * (2**-4 + 2**-8) + scales * 2**-10
    else:
        bound = scales * (0.5 + slack)
    assert (off <= bound).all()


def test_a_scale_is_rounded_before_codes_are_chosen() -> None:
    values = torch.full((1, 32), 0.3)
    values[0, 0] = 1.0
    made = quantize(values, INT4)
    scale = torch.tensor(1.0 / 7.5).bfloat16().float()
    assert made[SCALES].item() == scale.item()
    assert made[""][0, 1].item() & 15 == 8 + round(0.3 / scale.item())


@pytest.mark.parametrize("quantized", [INT4, INT8, FP8], ids=lambda q: q.codes.value)
def test_zeros_stay_zeros(quantized) -> None:
    values = weights(4, 64)
    values[1] = 0
    values[2, :32] = 0
    made = quantize(values, quantized)
    assert (made[SCALES] > 0).all()
    back = numbers(made, quantized, 64)
    assert (back[1] == 0).all()
    assert (back[2, :32] == 0).all()


@pytest.mark.parametrize("quantized", [INT4, INT8, FP8], ids=lambda q: q.codes.value)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_shows_in_its_scale(quantized, bad) -> None:
    values = weights(3, 64)
    values[1, 5] = bad
    finite = quantize(values, quantized)[SCALES].isfinite()
    assert not finite[1, 0]
    assert finite.sum() == finite.numel() - 1


def test_the_last_group_of_a_row_may_have_fewer() -> None:
    values = weights(5, 40)
    made = quantize(values, INT4)
    assert made[""].shape == (5, 20)
    assert made[SCALES].shape == (5, 2)
    alone = quantize(values[:, 32:], INT4)
    assert torch.equal(made[""][:, 16:], alone[""])
    assert torch.equal(made[SCALES][:, 1:], alone[SCALES])


@pytest.mark.parametrize("quantized", [INT4, INT8, FP8], ids=lambda q: q.codes.value)
def test_how_many_rows_are_taken_at_a_time_changes_nothing(quantized, monkeypatch) -> None:
    values = weights(7, 64)
    whole = quantize(values, quantized)
    monkeypatch.setattr(quantizing, "_VALUES_AT_ONCE", 128)
    some = quantize(values, quantized)
    for part in quantized.parts:
        assert torch.equal(whole[part].view(torch.uint8), some[part].view(torch.uint8))
