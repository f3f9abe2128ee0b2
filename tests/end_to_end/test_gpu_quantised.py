"""Quantised weights on the decode kernel: near the reference, from a folder and when rounded."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from end_to_end.test_quantised import quantise
from plan.shapes import SHAPES
from soloist.bench.agreement import forced_logits
from soloist.bench.subject import rounded_shape, shape_on_gpu, shape_placement
from soloist.engine import Engine, EngineConfig
from soloist.engine import engine as engine_module
from soloist.engine.kernel import KernelModel
from soloist.engine.memory import Staging
from soloist.engine.reference import ReferenceModel
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.folder import shipped_folder
from soloist.model.quantized import AT_LOAD, Codes
from soloist.weights.choice import Rounding
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, plan_export
from unit.weights.formats import FORMATS

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
# Relative error of all logits: activations are rounded, and sums of products to 16 bits.
MOST_ERROR = 0.05
INT8 = Codes.INT8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Codes, Path]:
    """étude, with a head in int8."""
    made = {codes: tmp_path_factory.mktemp(codes.value) / "etude" for codes in AT_LOAD.values()}
    for codes, folder in made.items():
        write_export(plan_export(shipped_folder("etude"), Asked(codes, INT8)), folder)
    return made


def ids_of(vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (TOKENS,), generator=generator).tolist()


def load(model: object, **asked: object) -> Engine:
    config = EngineConfig(str(model), "cuda", context_tokens=256, prepare=False)
    return Engine.load(replace(config, **asked))  # type: ignore[arg-type]


def logits_of(engine: Engine, columns: int = 1) -> Tensor:
    """[T, V] of the kernel, from `columns` positions at a time."""
    assert isinstance(engine.model, KernelModel)
    vocab = engine.config.vocab_size
    return forced_logits(engine.model.decoder, vocab, ids_of(vocab), columns, TOKENS).clone()


@cache
def wanted(codes: Codes) -> Tensor:
    """[T, V] of the reference, in fp32 with the numbers that the codes stand for."""
    return reference_logits("etude", weights=codes, head_weights=INT8)


def reference_logits(folder: object, **asked: object) -> Tensor:
    config = EngineConfig(str(folder), "cpu", "fp32", context_tokens=256)
    model = Engine.load(replace(config, **asked)).model  # type: ignore[arg-type]
    assert isinstance(model, ReferenceModel)
    reference = model.reference
    ids = torch.tensor(ids_of(8192))
    logits = reference.forward(ids, 0, reference.new_cache(TOKENS), "all")
    assert logits is not None
    return logits.clone()


def require_near(seen: Tensor, wanted_logits: Codes | Tensor, rows: slice = slice(None)) -> None:
    right = wanted(wanted_logits) if isinstance(wanted_logits, Codes) else wanted_logits
    right = right[rows]
    assert (seen.float().cpu() - right).norm() / right.norm() < MOST_ERROR


def prompt_logits(engine: Engine) -> Tensor:
    """Of a prompt's last token, by prefill."""
    assert isinstance(engine.model, KernelModel)
    ids = ids_of(engine.config.vocab_size)
    logits = engine.model.prefill.run(ids, 0, engine.model.page_tables[0])
    assert logits is not None
    return logits.clone()


@pytest.mark.parametrize("codes", list(AT_LOAD.values()))
def test_a_folder_and_rounding_give_the_same_bits(codes: Codes, folders: dict[Codes, Path]) -> None:
    folder = load(folders[codes])
    assert folder.report.executor == "decode kernel"
    assert folder.report.weights == f"{codes.value}+int8 head"
    seen = logits_of(folder)
    require_near(seen, codes)
    assert torch.equal(logits_of(folder, 8), seen)
    require_near(prompt_logits(folder), codes, slice(-1, None))
    rounded = load("etude", weights=codes, head_weights=INT8)
    assert torch.equal(logits_of(rounded), seen)
    assert torch.equal(prompt_logits(rounded), prompt_logits(folder))


# GPTQ's act-order: with one order for q, k and v, and for gate and up, and with orders that differ.
ORDERED = {
    "gptq-ordered": "int4-permuted+int4",
    "gptq-ordered-zeros": "int8-permuted+int8",
    "gptq-orders": "bf16+int4-permuted+int4",
}


@pytest.fixture(scope="module", params=ORDERED)
def ordered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """étude's draft model, as act-order leaves it; the tied head stays as it is."""
    folder = tmp_path_factory.mktemp("ordered") / request.param
    shutil.copytree(shipped_folder("etude-draft"), folder)
    form = next(form for form in FORMATS if form.name == request.param)
    if form.config is not None:
        form = replace(form, config={k: v for k, v in form.config.items() if k != "lm_head"})
    quantise(folder, form)
    return folder


@pytest.mark.parametrize("keep_rows", [True, False], ids=["rows", "unpacked"])
def test_columns_in_an_order_of_their_own(
    keep_rows: bool, ordered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes stay codes, and prompts see the columns in the order that the matrix has."""
    staging = Staging(1, on_host=False, keeps_rows=keep_rows)
    monkeypatch.setattr(engine_module, "stage", lambda *_, **__: staging)
    engine, right = load(ordered, precision="bf16"), reference_logits(ordered)
    assert engine.report.executor == "decode kernel"
    assert engine.report.weights == ORDERED[ordered.name]
    seen = logits_of(engine)
    require_near(seen, right)
    assert torch.equal(logits_of(engine, 8), seen)
    require_near(prompt_logits(engine), right, slice(-1, None))


def test_columns_in_an_order_of_their_own_on_ranks(ordered: Path) -> None:
    """The output of attention, of which ranks have some columns, is in 16 bits."""
    engine = load(ordered, precision="bf16", rank_devices=(0, 0))
    right = reference_logits(ordered)
    require_near(logits_of(engine), right)
    require_near(prompt_logits(engine), right, slice(-1, None))


@pytest.mark.parametrize("on_host", [False, True], ids=["gpu", "host"])
@pytest.mark.parametrize("codes", list(AT_LOAD.values()))
def test_without_room_for_rows(
    codes: Codes, on_host: bool, folders: dict[Codes, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts unpack matrices to the numbers that rows would have had."""
    rows = load(folders[codes])
    staging = Staging(1, on_host=on_host, keeps_rows=False)
    monkeypatch.setattr(engine_module, "stage", lambda *_, **__: staging)
    unpacked = load(folders[codes])
    assert torch.equal(logits_of(unpacked), logits_of(rows))
    assert torch.equal(prompt_logits(unpacked), prompt_logits(rows))


@pytest.mark.parametrize(("codes", "ranks"), [(Codes.INT4, 4), (Codes.FP8, 2)])
def test_ranks_of_one_gpu(codes: Codes, ranks: int, folders: dict[Codes, Path]) -> None:
    engine = load(folders[codes], rank_devices=(0,) * ranks)
    assert engine.report.weights == f"{codes.value}+int8 head"
    require_near(logits_of(engine), codes)
    require_near(prompt_logits(engine), codes, slice(-1, None))


def test_a_head_alone_is_rounded_beside_its_embedding() -> None:
    engine = load("etude", head_weights=Codes.FP8)
    assert engine.report.weights == "bf16+fp8 head"
    assert not engine.config.tied_head
    plain = logits_of(load("etude"))
    assert (logits_of(engine) - plain).norm() / plain.norm() < MOST_ERROR


def test_run_and_the_bench(soloist) -> None:
    """Rounded on loading, and a shape's random codes, with kernels that are there already."""
    options = ("--weights", "int4", "--head-weights", "int8", "--device", "cuda")
    done = soloist("run", "etude", "-p", "def f(x):", "-n", 16, *options)
    assert done.status == 0, done.err
    assert "weights int4 (groups of 64 and 128), head int8 (one scale a row)" in done.err
    shape = shipped_folder("etude") / "config.json"
    sizes = ("--prompt-tokens", 64, "--new-tokens", 32, "--runs", 1)
    done = soloist("bench", "decode", "--shape", shape, *sizes, *options, "--json")
    assert done.status == 0, done.err
    (row,) = json.loads(done.out)
    assert row["weights"] == "int4+int8 head"
    in_16_bits = 2 * 12.8e6
    assert 0.2 < row["streamed_bytes_per_token"] / in_16_bits < 0.5


@pytest.mark.parametrize(
    ("shape", "codes", "head"),
    [
        ("qwen3-1.7b", Codes.INT4, None),
        ("qwen3-1.7b", Codes.FP8, None),
        ("laneformer-2b-as-llama", Codes.INT4, None),
        # Two groups of tiles of the head, for each of which activations are converted anew.
        ("laneformer-2b-as-llama", Codes.FP8, Codes.FP8),
        # Neurons of many tiles, of which most are published within the last turn.
        ("llama-3.1-8b-8-layers", Codes.INT4, None),
        ("llama-3.1-8b-8-layers", Codes.INT8, None),
    ],
)
def test_bits_in_every_launch_and_for_all_columns(
    shape: str, codes: Codes, head: Codes | None
) -> None:
    """Many layers and launches: a slot that is copied to too early shows in one of hundreds."""
    file = SHAPES[shape]
    stored = rounded_shape(read_config(file), Dtype.BF16, Rounding(codes, head))
    placed = shape_placement(file, "bf16", torch.device("cuda:0"), "cuda", 1)
    model = shape_on_gpu(stored, 256, placed)
    ids, vocab = ids_of(stored.config.vocab_size)[:64], stored.config.vocab_size
    alone = forced_logits(model.decoder, vocab, ids, 1, 64).clone()
    assert torch.isfinite(alone).all()
    for launch in range(20):
        columns = (8, 8, 5, 1)[launch % 4]
        seen = forced_logits(model.decoder, vocab, ids, columns, (64, 1)[launch % 2])
        assert torch.equal(seen, alone), f"launch {launch} of {columns} columns"
