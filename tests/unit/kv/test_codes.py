"""Keys and values in 8 and 4 bits: what codes stand for, and that no position needs another."""

import numpy as np
import pytest
import torch
from torch import Tensor

from soloist.errors import SettingError
from soloist.kv.codes import codes_of, numbers_of
from soloist.model.config import Attention
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from unit.prefill.models import model

NAMES = pytest.mark.parametrize("name", KV_FORMATS)
DIM = 64


def heads(*shape: int, seed: int = 0) -> Tensor:
    """Of very different sizes, with an outlier in each."""
    x = torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed))
    x[..., 5] *= 20
    return x * torch.logspace(-6, 6, x[..., 0].numel()).view(*shape, 1)


def back(x: Tensor, name: KvName, dtype: torch.dtype = torch.float32) -> Tensor:
    stored = KV_FORMATS[name](DIM)
    return numbers_of(*codes_of(x, stored), stored, dtype)


@NAMES
def test_a_number_is_a_code_times_a_scale(name: KvName) -> None:
    """Each code by hand, in exact arithmetic."""
    stored, x = KV_FORMATS[name](DIM), heads(3, 4)
    codes, scales = codes_of(x, stored)
    assert codes.numel() + 2 * scales.numel() == 12 * stored.num_bytes(DIM)
    raw = codes.numpy()
    if name == "int4":
        pairs = np.stack((raw & 15, raw >> 4), -1).reshape(3, 4, DIM)
        values = pairs.astype(np.float64) - 8
    elif name == "int8":
        values = raw.astype(np.float64)
    else:
        signs, exponents, fractions = raw >> 7, raw >> 3 & 15, raw & 7
        small = fractions / 8 * 2.0**-6
        large = (1 + fractions / 8) * 2.0 ** (exponents.astype(np.float64) - 7)
        values = np.where(exponents == 0, small, large) * np.where(signs, -1, 1)
    groups = values.reshape(3, 4, -1, stored.scale_values)
    wanted = groups * scales.double().numpy()[..., None]
    assert (
        numbers_of(codes, scales, stored, torch.float32).numpy() == wanted.reshape(x.shape)
    ).all()


@NAMES
def test_rounding_is_to_the_nearest_code(name: KvName) -> None:
    x = heads(50)
    groups = (x - back(x, name)).abs().view(50, -1, KV_FORMATS[name](DIM).scale_values)
    most = x.abs().view_as(groups).amax(-1, keepdim=True)
    if name == "fp8":  # three bits behind the first, and steps of 2^-9 near 0
        bound = torch.maximum(x.abs().view_as(groups) / 16, most / 448 * 2**-10)
    elif name == "int8":
        bound = most / 127 / 2
    else:  # what lies opposite of the furthest number may lose a step more
        bound = most / 8
    assert (groups <= bound * 1.01).all()


def test_in_4_bits_the_furthest_number_has_the_code_that_has_no_opposite() -> None:
    for sign in (1, -1):
        x = torch.linspace(-0.5, 0.5, DIM).view(1, DIM).clone()
        x[0, 3], x[0, 40] = 3.0 * sign, -2.0 * sign
        found = back(x, "int4")
        assert found[0, 3] == 3.0 * sign
        assert found[0, 40] == -2.0 * sign


@NAMES
def test_a_head_depends_on_no_other(name: KvName) -> None:
    x = heads(4, 9)
    whole = back(x, name)
    for head in range(4):
        for position in range(9):
            alone = back(x[head : head + 1, position : position + 1].clone(), name)
            assert torch.equal(alone[0, 0], whole[head, position])
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(back(turned, name), whole)


@NAMES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_the_product_rounded_once(name: KvName, dtype: torch.dtype) -> None:
    x = heads(20).clamp(-1000, 1000).to(dtype)
    assert torch.equal(back(x, name, dtype), back(x, name).to(dtype))


@NAMES
def test_nothing_becomes_nothing_and_what_is_broken_stays_broken(name: KvName) -> None:
    x = torch.zeros(3, DIM)
    x[1] = 1e-45
    x[2, 7] = torch.nan
    found = back(x, name)
    assert not found[:2].any()
    assert found[2, 7].isnan()


def test_what_cannot_be_stored_so_is_refused() -> None:
    small, mixed = model(Attention(4, 2, 16)), model(Attention(4, 2, 64), Attention(4, 2, 32))
    assert kv_format("int8", small, Dtype.FP32).num_bytes(16) == 18
    assert kv_format(None, mixed, Dtype.BF16).is_plain
    with pytest.raises(SettingError, match="multiple of 32 numbers; this model's have 16"):
        kv_format("int4", small, Dtype.FP32)
    with pytest.raises(SettingError, match="one size in all layers"):
        kv_format("int8", mixed, Dtype.FP32)
    with pytest.raises(SettingError, match="int8, fp8, int4"):
        kv_format("int3", small, Dtype.FP32)  # type: ignore[arg-type]
