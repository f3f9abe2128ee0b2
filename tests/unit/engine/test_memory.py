"""The sum of all parts, the longest context that fits, and refusals that name it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreter.mixtures import MIXTURES
from plan.shapes import SMALL, small_plan
from soloist.device import HEADROOM_BYTES
from soloist.engine.memory import Footprint, require_host_memory, stage
from soloist.errors import OutOfMemory, gigabytes
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.memory import workspace_bytes
from soloist.model.config import Attention
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.quantized import AT_LOAD, Codes
from soloist.parallel.share import Share
from soloist.prefill.buffers import num_bytes
from soloist.prefill.page_form import SPLIT_KEYS, PageForm
from soloist.prefill.part import Part
from soloist.prefill.products import Products
from soloist.prefill.runner import Prefill
from soloist.weights.choice import Rounding, rounding_of
from soloist.weights.formats import formats_of
from soloist.weights.memory import parts_bytes, row_bytes
from soloist.weights.packed import pack_weights
from soloist.weights.random import random_weights
from soloist.weights.unpacking import UnpackedExperts, routers_of
from unit.model.configurations import LLAMA_31_8B, PUBLISHED, QWEN3_17B, written
from unit.prefill.models import model

CPU = torch.device("cpu")


def footprint(folder: Path, values: dict[str, Any], dtype: Dtype) -> Footprint:
    config = read_config(written(folder, values))
    return Footprint(config, tensors(config), dtype)


@pytest.mark.parametrize("name", PUBLISHED)
def test_more_of_anything_needs_more(name: str, tmp_path: Path) -> None:
    bf16, fp32 = (footprint(tmp_path, PUBLISHED[name], d) for d in (Dtype.BF16, Dtype.FP32))
    base = bf16.estimate(1000)
    assert base.total_bytes == base.weights_bytes + base.kv_bytes + base.scratch_bytes
    assert bf16.estimate(1001).total_bytes > base.total_bytes
    assert fp32.estimate(1000).total_bytes > base.total_bytes


@given(
    name=st.sampled_from(["llama-3.2-1b", "laneformer-2b", "mistral-7b-v0.1", "qwen3-1.7b"]),
    dtype=st.sampled_from(list(Dtype)),
    gigabytes_there=st.floats(0.1, 80),
)
@settings(max_examples=60, deadline=None)
def test_the_named_context_fits_and_one_more_does_not(
    name: str,
    dtype: Dtype,
    gigabytes_there: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    needs = footprint(tmp_path_factory.mktemp("config"), PUBLISHED[name], dtype)
    there, most = int(gigabytes_there * 1e9), needs.config.context_tokens
    longest = needs.fitting_context(there)
    assert 0 <= longest <= most
    assert needs.fitting_context(there + 10**8) >= longest
    if longest:
        needs.require(longest, there)
    if longest < most:
        with pytest.raises(OutOfMemory) as caught:
            needs.require(longest + 1, there)
        if longest:
            assert caught.value.hint.endswith(f"--context {longest}")


def test_refusals_name_what_fits(tmp_path: Path) -> None:
    def refusal(dtype: Dtype, there: int) -> OutOfMemory:
        with pytest.raises(OutOfMemory) as caught:
            footprint(tmp_path, LLAMA_31_8B, dtype).require(131072, there)
        assert "nothing was allocated" in caught.value.message
        assert gigabytes(there) in caught.value.message
        assert caught.value.available_bytes == there < caught.value.needed_bytes
        return caught.value

    shorter = refusal(Dtype.BF16, 20 * 10**9)
    assert "weights 16.1 GB" in shorter.message
    assert "--context" in shorter.hint
    other = refusal(Dtype.FP32, 20 * 10**9)
    assert "--precision bf16 --context" in other.hint
    assert "billion parameters fit in bf16" in refusal(Dtype.BF16, 10 * 10**9).hint
    assert refusal(Dtype.BF16, 0).hint


def test_the_sum_includes_the_reserve(tmp_path: Path) -> None:
    needs = footprint(tmp_path, QWEN3_17B, Dtype.FP32)
    needed_bytes = needs.estimate(100).needed_bytes
    assert needed_bytes == needs.estimate(100).total_bytes + HEADROOM_BYTES
    needs.require(100, needed_bytes)
    with pytest.raises(OutOfMemory):
        needs.require(100, needed_bytes - 1)


@pytest.mark.parametrize("tied", [False, True])
def test_of_the_kernel_what_is_packed_and_pooled_is_counted(tied: bool) -> None:
    config = replace(SMALL, tied_head=tied)
    plan, specs = small_plan(config, 13), tensors(config)
    needs = Footprint(config, specs, Dtype.BF16, plan).estimate(65)
    weights = random_weights(specs, Dtype.BF16, CPU)
    vectors = {name: values.float() for name, values in weights.items() if "norm" in name}
    packed = pack_weights(plan, weights, CPU)
    held = [packed.image, *([] if packed.embedding is None else [packed.embedding])]
    assert needs.weights_bytes == num_bytes(*held)
    pool = PagePool(config.num_layers, 2, 32, 2, torch.bfloat16, CPU)
    assert needs.kv_bytes == num_bytes(pool.tensor)
    part = Part(Share(config, 1, 0), weights.__getitem__, vectors, pool, most_tokens=128)
    assert needs.scratch_bytes > workspace_bytes(plan) + part.num_bytes


@pytest.mark.parametrize("tokens", [65, 100_000])
def test_attention_from_pages_has_sums_of_splits_and_gathers_nothing(tokens: int) -> None:
    specs, plan = tensors(SMALL), small_plan(SMALL, 13)
    gathering, from_pages = (
        Footprint(SMALL, specs, Dtype.BF16, plan, page_attention=on).estimate(tokens)
        for on in (False, True)
    )
    gathered = 3 * gathering.kv_bytes // SMALL.num_layers
    pages = -(-tokens // PAGE_POSITIONS)
    partials = PageForm(plan.kv_layout, plan.shape.group, plan.dtype).partials_bytes(pages)
    assert (partials > 0) == (tokens > SPLIT_KEYS)
    assert gathering.scratch_bytes - gathered == from_pages.scratch_bytes - partials
    assert from_pages.kv_bytes == gathering.kv_bytes


def test_the_host_holds_weights_and_the_reserve() -> None:
    require_host_memory(10**9, 10**9 + HEADROOM_BYTES)
    with pytest.raises(OutOfMemory, match="on the host"):
        require_host_memory(10**9, 10**9 + HEADROOM_BYTES - 1)


# Quantised weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", [None, *AT_LOAD.values()])
def test_packing_is_staged_by_the_room_there_is(codes: Codes | None) -> None:
    config = model(*[Attention(8, 4, 64)] * 2, hidden_size=256, ffn=512, vocab_size=1000)
    specs = tensors(config)
    stored = rounding_of(specs, Rounding(codes), Dtype.BF16)
    plan = replace(small_plan(config, 9), formats=formats_of(stored, config))
    parts, rows = parts_bytes(specs, Dtype.BF16, plan.formats), row_bytes(specs, Dtype.BF16)
    assert (parts < rows) is (codes is not None)

    def staged(room_bytes: int) -> tuple[bool, bool]:
        found = stage(specs, Dtype.BF16, plan, room_bytes)
        assert found.bytes == parts
        return found.on_host, found.keeps_rows

    assert staged(rows) == (False, True)
    assert staged(rows - 1) == (codes is None, False)
    assert not stage(specs, Dtype.BF16, plan, rows, unpacks=True).keeps_rows
    assert staged(parts - 1) == (True, False)
    assert stage(specs, Dtype.FP32, None, 0).on_host is False


def test_experts_wait_nowhere_and_no_rows_of_them_are_kept() -> None:
    """They are packed as they are read: there has to be room for all else, or none at all."""
    config = MIXTURES["softmax"]
    specs = tensors(config)
    plan = small_plan(config, 7)
    whole = row_bytes(specs, Dtype.BF16)
    rest = row_bytes([spec for spec in specs if spec.expert is None], Dtype.BF16)
    assert rest < whole / 2

    def staged(room_bytes: int) -> tuple[int, bool, bool]:
        found = stage(specs, Dtype.BF16, plan, room_bytes)
        return found.bytes, found.on_host, found.keeps_rows

    assert staged(rest) == (rest, False, True)
    assert staged(rest - 1) == (rest, True, False)
    of_reference = stage(specs, Dtype.BF16, None, 0)
    assert (of_reference.bytes, of_reference.on_host) == (whole, False)


def test_of_mixtures_buffers_and_unpacked_experts_are_counted() -> None:
    config = MIXTURES["softmax"]
    plan, specs = small_plan(config, 7), tensors(config)
    needs = Footprint(config, specs, Dtype.BF16, plan).estimate(100)
    weights = random_weights(specs, Dtype.BF16, CPU)
    own = dict(weights)
    packed = pack_weights(plan, weights, CPU)
    assert packed.experts is not None
    assert packed.embedding is not None
    held = num_bytes(packed.image, packed.experts, packed.embedding)
    routers = [x for name, x in own.items() if name.endswith("router")]
    assert plan.routes_early
    # Of each expert a row for the stream, and one for what attention gives, in fp32.
    attended = plan.shape.query_heads * plan.shape.head_dim
    vectors_bytes = sum(4 * len(x) * (x.shape[1] + attended) for x in routers)
    assert needs.weights_bytes == held + vectors_bytes
    vectors = {name: x.float() for name, x in own.items() if "norm" in name}
    unpacked = UnpackedExperts(plan, packed)
    pool = PagePool(config.num_layers, 2, 32, 2, torch.bfloat16, CPU)
    part = Part(
        Share(config, 1, 0), Products(own.__getitem__, unpacked),
        vectors | routers_of(plan, packed), pool, most_tokens=128,
    )  # fmt: skip
    Prefill([part]).run(list(range(100)), 0, [0, 1])
    held = part.num_bytes + unpacked.num_bytes
    assert needs.scratch_bytes > workspace_bytes(plan) + held


def test_an_estimate_counts_packed_bytes() -> None:
    config = model(*[Attention(8, 4, 64)] * 2, hidden_size=256, ffn=512, vocab_size=1000)
    specs = tensors(config)
    plain = small_plan(config, 9)
    stored = rounding_of(specs, Rounding(Codes.INT4, Codes.INT4), Dtype.BF16)
    int4 = replace(plain, formats=formats_of(stored, config))
    needs, fewer = (Footprint(config, specs, Dtype.BF16, p).estimate(64) for p in (plain, int4))
    assert fewer.weights_bytes < 0.6 * needs.weights_bytes
    assert fewer.scratch_bytes > needs.scratch_bytes, "numbers are made some rows at a time"
