"""Quantised matrices reach every rank's image with the numbers that they stand for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interpreter import quantised
from interpreter.quantised import FORMATS
from plan.shapes import LANEFORMER, SHAPES
from soloist.engine import support as support_module
from soloist.engine.support import support_on
from soloist.errors import SettingError, ShapeUnsupported
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.checkpoint import open_checkpoint
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.families.dense import decoder_tensors
from soloist.model.folder import CONFIG_FILE, shipped_folder
from soloist.model.quantized import AT_LOAD, COLUMNS, Codes, Quantized
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.parallel.share import part_of
from soloist.weights import packing as packing_module
from soloist.weights.choice import Rounding, choose, require_matrices, rounding_of
from soloist.weights.distribution import distribute
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, plan_export
from soloist.weights.formats import formats_of
from soloist.weights.loading import Destination, Source, load_ranks, regrouped
from soloist.weights.memory import packed_bytes, row_bytes, stored_bytes, unpacking_bytes
from soloist.weights.numbers import as_numbers
from soloist.weights.packed import pack_weights
from soloist.weights.random import random_weights
from soloist.weights.sharding import shard_all
from soloist.weights.unpacking import Unpacked, parts_to_rows
from unit.prefill.models import model

CPU = torch.device("cpu")
H200 = ((9, 0), 132, 227 * 1024)
INT4 = Quantized(Codes.INT4, 128, Dtype.BF16)
BLOCKS = Quantized(Codes.FP8, 128, Dtype.FP32, scale_rows=128)
DENSE = model(*[Attention(8, 4, 64)] * 2, hidden_size=256, ffn=512, vocab_size=1000)
LLAMA = "llama-3.1-8b"


def alike(config: ModelConfig, one: Quantized) -> dict[str, Quantized]:
    """All matrices, and the head if it is untied."""
    return {
        spec.name: one for spec in decoder_tensors(config)
        if spec.is_layer_matrix or spec.name == "head"
    }  # fmt: skip


# Which formats -----------------------------------------------------------------------------------


def test_one_rank_takes_matrices_as_they_are() -> None:
    stored = alike(DENSE, INT4)
    formats = formats_of(stored, DENSE)
    assert formats.keys() == stored.keys()
    assert {(one.group, one.meaning) for one in formats.values()} == {(128, INT4)}


@pytest.mark.parametrize(
    ("one", "ranks", "groups"),
    [
        # Heads of 64 columns are dealt to ranks, and 512 neurons.
        (INT4, 2, {"qkv": 128, "attention_output": 64, "down": 128}),
        (INT4, 8, {"qkv": 128, "attention_output": 64, "down": 64}),
        (Quantized(Codes.INT8, 0, Dtype.BF16), 4, {"attention_output": 64, "down": 128}),
        (Quantized(Codes.INT8, 0, Dtype.BF16), 1, {"attention_output": 512, "down": 512}),
        (BLOCKS, 8, {"gate_up": 128, "down": 64}),
        (Quantized(Codes.INT4, 16, Dtype.BF16), 1, {"qkv": None}),
        (Quantized(Codes.INT4, 48, Dtype.BF16), 2, {"qkv": None}),
    ],
)
def test_groups_that_ranks_can_have(one: Quantized, ranks: int, groups: dict[str, int]) -> None:
    formats = formats_of(alike(DENSE, one), DENSE, ranks)
    for name, group in groups.items():
        found = formats.get(f"layers.1.{name}")
        assert (found and found.group) == group
        if found and ranks > 1:
            assert found.meaning == replace(one, group=group)


@pytest.mark.parametrize("kind", [kind for kind, one in FORMATS.items() if one.super_block])
def test_super_blocks_are_not_cut(kind: str) -> None:
    """Ranks that would have a part of one read numbers; other matrices stay codes."""
    config, one = read_config(SHAPES[LLAMA]), FORMATS[kind]
    for ranks in (1, 2, 8):
        formats = formats_of(alike(config, one), config, ranks)
        assert {found.meaning for found in formats.values()} == {one}
        names = {name.rpartition(".")[2] for name in formats}
        # Heads of 128 columns are dealt to ranks.
        cut = set() if ranks == 1 else {"attention_output"}
        assert names == {"qkv", "attention_output", "gate_up", "down", "head"} - cut
    narrow = model(*[Attention(8, 4, 64)] * 2, hidden_size=256, ffn=768, vocab_size=1000)
    assert "layers.0.down" not in formats_of(alike(narrow, one), narrow, 2)
    assert "layers.0.down" in formats_of(alike(narrow, one), narrow, 1)


def test_other_matrices_stay_numbers() -> None:
    tied = replace(DENSE, tied_head=True)
    stored = {"embedding": INT4, "head": INT4, "layers.0.latents": INT4, "layers.0.down": INT4}
    assert list(formats_of(stored, tied)) == ["layers.0.down"]
    narrow = model(*[Attention(4, 2, 32)] * 2, hidden_size=96, ffn=48, vocab_size=200)
    assert "layers.0.down" not in formats_of(alike(narrow, replace(INT4, group=32)), narrow, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("one", [INT4, BLOCKS, Quantized(Codes.INT8, 0, Dtype.BF16, True)])
def test_public_models_get_plans(one: Quantized, ranks: int) -> None:
    config = read_config(SHAPES[LLAMA])
    plain = support_on(*H200, config, Dtype.BF16, ranks).plan
    plan = support_on(*H200, config, Dtype.BF16, ranks, alike(config, one)).plan
    assert plain is not None
    assert plan is not None
    assert plan.formats.keys() == alike(config, one).keys()
    share = one.codes.bits / 16
    assert share < plan.image.streamed_bytes / plain.image.streamed_bytes < 1.12 * share
    specs = tensors(plan.share)
    kept = stored_bytes(specs, Dtype.BF16, plan.formats)
    assert kept < row_bytes(specs, Dtype.BF16)
    table = plan.model.vocab_size * plan.model.hidden_size * 2
    looked_up = plan.share.vocab_size * plan.share.hidden_size * 2  # as `specs` have it
    # Blocks of the busiest one's size, in which eight ranks' few rows do not lie evenly.
    assert 1 <= (packed_bytes(plan) - table) / (kept - looked_up) < 1.16
    assert unpacking_bytes(plan, specs) > unpacking_bytes(plain, specs)


def test_a_refusal_is_that_of_numbers() -> None:
    found = support_on(*H200, DENSE, Dtype.FP32, 1, alike(DENSE, INT4))
    assert found.plan is None
    assert "fp32" in found.refusal
    assert not found.formats


# Their way to the ranks ---------------------------------------------------------------------------


def random_parts(config: ModelConfig, stored: dict[str, Quantized]) -> Weights:
    """Codes, scales and zeros without any pattern."""
    generator = torch.Generator().manual_seed(5)

    def bytes_of(rows: int, columns: int, high: int) -> torch.Tensor:
        drawn = torch.randint(high, (rows, columns), generator=generator)
        return drawn.to(torch.uint8)

    weights = {}
    for spec in decoder_tensors(config):
        one = stored.get(spec.name)
        if one is None:
            weights[spec.name] = torch.randn(spec.shape, generator=generator).bfloat16()
            continue
        if one.super_block:
            for part, values in quantised.random_parts(*spec.shape, one).items():
                weights[spec.name + part] = values
            continue
        rows, columns = spec.shape
        dtype = {Codes.INT4: torch.uint8, Codes.INT8: torch.int8}.get(
            one.codes, torch.float8_e4m3fn
        )
        width, high = columns * one.codes.bits // 8, 126 if one.codes is Codes.FP8 else 256
        weights[spec.name] = bytes_of(rows, width, high).view(dtype)
        shared = (-(-rows // one.scale_rows), one.groups(columns))
        scales = (0.5 + torch.rand(shared, generator=generator)).to(TORCH_DTYPES[one.scale_dtype])
        scales = scales.repeat_interleave(one.scale_rows, 0)[:rows]
        weights[f"{spec.name}.scales"] = scales
        if one.has_zeros:
            zeros = bytes_of(rows, one.groups(columns), 16)
            weights[f"{spec.name}.zeros"] = zeros.view(dtype)
        if one.permuted:
            order = torch.randperm(columns, generator=generator)
            weights[spec.name + COLUMNS] = order.to(torch.uint16)
    return weights


def rows_of(config: ModelConfig, weights: Weights, stored: dict[str, Quantized]) -> Weights:
    """The numbers of everything."""
    found = {}
    for spec in decoder_tensors(config):
        one = stored.get(spec.name)
        parts = {p: weights[spec.name + p] for p in (one.parts if one else ("",))}
        found[spec.name] = as_numbers(one, parts, Dtype.BF16) if one else parts[""]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("attention", "one"),
    [
        (Attention(8, 4, 64), INT4),
        (Attention(8, 4, 64), replace(INT4, has_zeros=True)),
        (Attention(6, 2, 32), replace(INT4, group=64, scale_dtype=Dtype.FP16)),
        (Attention(8, 8, 96), Quantized(Codes.INT8, 0, Dtype.BF16)),
        (Attention(8, 1, 128), Quantized(Codes.INT8, 128, Dtype.BF16, has_zeros=True)),
        (Attention(4, 2, 64), BLOCKS),
        (Attention(4, 2, 128), Quantized(Codes.FP8, 0, Dtype.BF16)),
        (Attention(8, 4, 64), replace(INT4, group=64, permuted=True)),
        (Attention(6, 2, 32), Quantized(Codes.INT8, 32, Dtype.FP16, True, permuted=True)),
        (Attention(8, 4, 64), FORMATS["super-int4"]),
        (Attention(6, 2, 32), FORMATS["super-mixed"]),
    ],
    ids=[
        "int4",
        "zeros",
        "few-heads",
        "int8",
        "one-kv-head",
        "blocks",
        "fp8",
        "permuted",
        "permuted-zeros",
        "super-blocks",
        "mixed super-blocks",
    ],
)
def test_shards_of_parts_are_shards_of_numbers(
    attention: Attention, one: Quantized, ranks: int
) -> None:
    hidden_size = 512 if one.super_block else 384  # whole super-blocks
    config = model(*[attention] * 2, hidden_size=hidden_size, ffn=640, vocab_size=1003)
    stored = alike(config, one)
    formats = formats_of(stored, config, ranks)
    found = {name.rpartition(".")[2] for name in formats}
    assert found >= {"qkv", "gate_up", "head"}
    # Ranks have some of its columns each, which lie in no order of their own.
    # Super-blocks are not cut, and heads have less than one.
    assert ("attention_output" in found) is (ranks == 1 or not (one.permuted or one.super_block))
    given = random_parts(config, stored)
    wanted = rows_of(config, given, stored)
    # What the kernel does not take was read as numbers.
    for name in stored.keys() - formats.keys():
        for part in one.parts:
            del given[name + part]
        given[name] = wanted[name]
    specs = decoder_tensors(config)
    read = regrouped(list(given.items()), specs, stored, formats)
    shares = distribute(read, config, [CPU] * ranks, stays_on_host=True)
    plan = make_plan(config, Dtype.BF16, replace(TYPICAL["sm_90a"], num_sms=9), ranks, formats)
    for rank, own in enumerate(shares):
        rows = shard_all(part_of(config, ranks, rank), wanted)
        kept = dict(own)
        packed = pack_weights(plan, own, CPU)
        assert not own, "everything was taken"
        parts_to_rows(plan, kept)
        unpacked = Unpacked(plan, packed)
        assert kept.keys() == rows.keys()
        for name, values in rows.items():
            assert torch.equal(kept[name], values), name
            if values.ndim == 2:
                assert torch.equal(unpacked(name), values), name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("codes", list(AT_LOAD.values()))
def test_rounding_on_loading_gives_the_bits_of_the_folder(
    codes: Codes, ranks: int, tmp_path: Path
) -> None:
    plain, made = shipped_folder("etude-draft"), tmp_path / "made"
    write_export(plan_export(plain, Asked(codes, Codes.INT8)), made)
    found = []
    for folder, to in ((plain, Rounding(codes, Codes.INT8)), (made, Rounding())):
        config, checkpoint = read_config(folder / CONFIG_FILE), open_checkpoint(folder)
        chosen = choose(checkpoint, config, tensors(config), to)
        formats = formats_of(chosen.stored, chosen.config, ranks)
        source = Source(checkpoint, chosen.config, chosen.specs, chosen.stored, chosen.rounding)
        kept = Destination((CPU,) * ranks, Dtype.FP16, True, False, formats)
        numbers = Destination((CPU,), Dtype.FP32, False, False)
        found.append(
            (formats, [load_ranks(source, to, lambda _: None)[0] for to in (kept, numbers)])
        )
    (formats, loaded), (folder_formats, from_folder) = found
    assert formats == folder_formats
    assert len(formats) == 3 * 4 + 1
    for seen, wanted in zip(
        [*loaded[0], *loaded[1]], [*from_folder[0], *from_folder[1]], strict=True
    ):
        assert seen.keys() == wanted.keys()
        for name, values in seen.items():
            assert values.dtype is wanted[name].dtype
            assert torch.equal(values.view(torch.uint8), wanted[name].view(torch.uint8)), name


def test_what_shapes_are_rounded_to() -> None:
    found = rounding_of(decoder_tensors(DENSE), Rounding(Codes.INT4, Codes.INT8), Dtype.BF16)
    assert found == {
        **alike(DENSE, INT4), "head": Quantized(Codes.INT8, 0, Dtype.BF16),
    }  # fmt: skip
    assert not rounding_of(decoder_tensors(DENSE), Rounding(), Dtype.BF16)


@pytest.mark.parametrize("to", [Rounding(Codes.INT4), Rounding(head=Codes.INT8)])
def test_matrices_of_three_dimensions_are_refused(to: Rounding) -> None:
    config = read_config(LANEFORMER)
    with pytest.raises(SettingError, match=r"weights is 'int.*laneformer.* have 3 dimensions"):
        require_matrices(config.family, tensors(config), to)
    require_matrices(config.family, tensors(config), Rounding())


@pytest.mark.parametrize("one", [INT4, *(Quantized(c, 0, Dtype.BF16) for c in AT_LOAD.values())])
def test_random_codes_stand_for_numbers_of_the_size_of_random_ones(one: Quantized) -> None:
    stored = alike(DENSE, one)
    weights = random_weights(decoder_tensors(DENSE), Dtype.BF16, CPU, stored=stored)
    again = random_weights(decoder_tensors(DENSE), Dtype.BF16, CPU, stored=stored)
    plain = random_weights(decoder_tensors(DENSE), Dtype.BF16, CPU)
    for name, values in weights.items():
        assert torch.equal(values.view(torch.uint8), again[name].view(torch.uint8))
    for name, values in rows_of(DENSE, weights, stored).items():
        assert values.shape == plain[name].shape
        assert values.isfinite().all()
        if name in stored:
            numbers = values.float()
            assert numbers.std().item() == pytest.approx(plain[name].float().std().item(), rel=0.05)
            assert abs(numbers.mean().item()) < 0.02 * numbers.std().item()


def test_matrices_are_in_16_bits_where_no_plan_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*given: object, **named: object) -> object:
        if len(given) > 4 and given[4]:
            raise ShapeUnsupported("formats", "none")
        return make_plan(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(support_module, "make_plan", refusing)
    found = support_on(*H200, DENSE, Dtype.BF16, 1, alike(DENSE, INT4))
    assert found.plan is not None
    assert not found.formats
    assert not found.refusal


@pytest.mark.parametrize("one", [INT4, BLOCKS])
def test_packing_some_blocks_at_a_time_gives_the_same_image(
    one: Quantized, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = alike(DENSE, one)
    plan = make_plan(
        DENSE, Dtype.BF16, replace(TYPICAL["sm_90a"], num_sms=9), 1, formats_of(stored, DENSE)
    )
    given = random_parts(DENSE, stored)
    whole = pack_weights(plan, dict(given), CPU)
    monkeypatch.setattr(packing_module, "VALUES_AT_ONCE", 1)
    assert torch.equal(pack_weights(plan, dict(given), CPU).image, whole.image)
    rows = Unpacked(plan, whole)
    for name, values in rows_of(DENSE, given, stored).items():
        if name in stored:
            assert torch.equal(rows(name), values), name
