"""The kernel that makes rows of packed matrices, compiled by g++, against unpacking by torch."""

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from interpreter.lane_models import configured
from interpreter.quantised import FORMATS, alike, formats_of, quantised
from plan.shapes import SHAPES as SHAPES_OF_MODELS
from soloist.jit.compiler import compile_source, require_clean
from soloist.jit.source import Source
from soloist.megakernel.gpu import TYPICAL, Gpu
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.partition import RowOrder
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.prefill import unpacked_matrices
from soloist.prefill.fragments import fragments, halves_table
from soloist.prefill.unpacked_matrices import (
    ENTRY,
    UnpackedMatrices,
    more_rows,
    unpack_source,
    unpack_sources,
)
from soloist.weights.packed import pack_weights
from soloist.weights.random import random_weights
from soloist.weights.sharding import shard_all
from soloist.weights.unpacking import Unpacked, tables_of_columns
from unit.prefill.models import model
from unit.prefill.packed_matrices import KINDS, SHAPES, Packed, Shape, packed_matrix
from unit.prefill.packed_on_host import built_unpack

CPU = torch.device("cpu")
HOPPER = Gpu("sm_90a", 5, 227 * 1024)
HEADS = Attention(4, 2, 32)
# Columns that are part of a step, and an odd vocabulary.
DENSE = model(*[HEADS] * 2, ffn=104, hidden_size=64, vocab_size=203)
FINE: Shape = (184, 520, RowOrder.FINELY_PAIRED, 5, 2)
UNTOUCHED = 0x1234


class OnHost:
    """`Kernels` of the same source, one thread after the other."""

    folder: Path
    libraries: ClassVar[dict[Source, ctypes.CDLL]] = {}

    def __init__(self, source: Source, entries: tuple[str, ...], *_: object) -> None:
        assert entries == (ENTRY,)
        if source not in self.libraries:
            place = self.folder / str(len(self.libraries))
            self.libraries[source] = built_unpack(source, place)
        self.library = self.libraries[source]

    def launch(self, _: str, blocks: int, args: tuple, stream: int, threads: int) -> None:
        assert (stream, threads) == (0, 256)
        self.library.run_unpack(*args, blocks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    OnHost.libraries.clear()
    return tmp_path_factory.mktemp("unpacking")


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    OnHost.folder = folder
    monkeypatch.setattr(unpacked_matrices, "Kernels", OnHost)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("shape", [*SHAPES.values(), FINE], ids=[*SHAPES, "by four rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_numbers_that_unpacking_gives(kind: str, shape: Shape, dtype: Dtype) -> None:
    """Bit by bit, and nothing is written behind them."""
    case = packed_matrix(kind, shape, dtype)
    require_numbers(case, OnHost(unpack_source(case.operation.matrix, dtype), (ENTRY,)))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_older_gpus_compute_the_same(kind: str, tmp_path: Path) -> None:
    """They have neither sums of pairs in bf16 nor a conversion of FP8."""
    case = packed_matrix(kind, SHAPES["halves left over"])
    kernel = OnHost.__new__(OnHost)
    kernel.library = built_unpack(unpack_source(case.operation.matrix, Dtype.BF16), tmp_path, 800)
    require_numbers(case, kernel)


def require_numbers(case: Packed, kernel: OnHost) -> None:
    matrix, image = case.operation.matrix, case.image.contiguous()
    found = fragments(case.plan.shape, case.operation, image.shape[1], gated=False)
    words = halves_table(half for fragment in found for half in fragment)
    table = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    out = torch.full((matrix.rows + 1, matrix.columns), UNTOUCHED, dtype=torch.int16)
    places = (image.data_ptr(), table.data_ptr(), None, out.data_ptr())
    numbers = (matrix.rows, matrix.columns, more_rows(matrix))
    kernel.launch(
        ENTRY, len(found), (*map(ctypes.c_void_p, places), *map(ctypes.c_uint32, numbers)), 0, 256
    )
    assert (out[-1] == UNTOUCHED).all()
    assert torch.equal(out[:-1].view(case.numbers.dtype), case.numbers)


def packed(
    config: ModelConfig, kind: str | None, ranks: int = 1, rank: int = 0
) -> tuple[Plan, PackedWeights]:
    """A rank's share."""
    drawn = random_weights(tensors(config), Dtype.BF16, CPU)
    held = {n: x.to(torch.bfloat16) if x.ndim == 2 else x.float() for n, x in drawn.items()}
    names = [n for n in held if n.startswith("layers") and not n.endswith("norm")]
    stored = {} if kind is None else alike(config, kind, names)
    parts, _ = quantised(held, stored)
    plan = make_plan(config, Dtype.BF16, HOPPER, ranks, formats_of(stored))
    return plan, pack_weights(plan, shard_all(plan.part_of(rank), parts), CPU)


def require_same(plan: Plan, weights: PackedWeights) -> None:
    """All matrices of a rank, by the kernel and by torch, one after the other."""
    own = UnpackedMatrices(plan, weights, tables_of_columns(plan, weights), None)
    wanted = Unpacked(plan, weights)
    layers = range(plan.shape.num_layers)
    names = [f"layers.{i}.{n}" for i in layers for n in plan.image.layer(i).in_blocks]
    for name in [*names, "embedding", "head"]:
        seen = own(name)
        assert torch.equal(seen, wanted(name)), name
        assert seen.is_contiguous()


@pytest.mark.few(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", [None, "int4", "fp8-block", "int4-permuted", "int8-permuted"])
def test_matrices_of_a_model_come_back(kind: str | None, tied: bool) -> None:
    require_same(*packed(replace(DENSE, tied_head=tied), kind))


@pytest.mark.parametrize("kind", [None, "int4"])
@pytest.mark.parametrize("rank", [0, 1])
def test_matrices_of_a_share_come_back(rank: int, kind: str | None) -> None:
    config = model(*[Attention(8, 4, 64)] * 2, ffn=256, hidden_size=128, vocab_size=204)
    plan, weights = packed(config, kind, 2, rank)
    orders = {op.matrix.order for k in plan.image.kinds for op in k.operations.values()}
    assert RowOrder.FINELY_PAIRED in orders
    require_same(plan, weights)


@pytest.mark.parametrize("name", ["mean of lanes", "vocabulary slices", "tied"])
def test_matrices_of_lanes_come_back(name: str, tmp_path: Path) -> None:
    _, plan, drawn = configured(name, tmp_path, 1, blocks=2)
    held = {n: x.bfloat16() if x.ndim == 2 else x for n, x in drawn.items()}
    require_same(plan, pack_weights(plan, shard_all(plan.part_of(0), held), CPU))


@pytest.mark.few(24)
@pytest.mark.parametrize("arch", TYPICAL)
@pytest.mark.parametrize("kind", [None, *FORMATS])
def test_it_compiles_without_spilling(kind: str | None, arch: str) -> None:
    config = read_config(SHAPES_OF_MODELS["llama-3.2-1b"])
    names = [spec.name for spec in tensors(config) if spec.is_layer_matrix]
    stored = {} if kind is None else formats_of(alike(config, kind, names))
    for source in unpack_sources(make_plan(config, Dtype.BF16, TYPICAL[arch], 1, stored)):
        require_clean(compile_source(source, arch), ENTRY, 0, 0)
