"""Passes that are left and gone on with: neither other work nor other threads change a bit."""

import threading
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference.lanes import FIELDS, random_tensors, write
from reference.oracle import Case, build, prompt, save
from soloist.model.checkpoint import open_checkpoint
from soloist.model.config import Activation
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.reference.blocks import activate
from soloist.reference.build import build_reference
from soloist.reference.cache import KVCache, Scratch
from soloist.reference.device import LogitRows, Reference
from soloist.reference.passes import Pass
from soloist.reference.reading import Readers, Reading
from soloist.reference.threads import Threads
from soloist.weights.reading import load_weights

WINDOWED = Case(
    "windowed",
    "qwen3",
    {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 30,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
)
CAPACITY, PASS_TOKENS = 128, 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    fields = {**FIELDS, "swa_layers": [0, 3], "sliding_window": 30}
    return {
        "dense": save(build(WINDOWED), WINDOWED, tmp_path_factory.mktemp("dense")),
        "lanes": write(fields, random_tensors(fields), tmp_path_factory.mktemp("lanes")),
    }


@pytest.fixture(params=["dense", "lanes"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def in_dtype(folder: Path, dtype: Dtype) -> Reference:
    config = read_config(folder / "config.json")
    weights = load_weights(
        open_checkpoint(folder), tensors(config), dtype, torch.device("cpu")
    )  # fmt: skip
    return build_reference(config, weights)


class Busy:
    """A watch that finds others on one of two cores, or on none."""

    def __init__(self, others: float, num_cores: int = 2) -> None:
        self.others_now, self.num_cores = others, num_cores

    def others(self) -> float:
        return self.others_now


def stored(cache: KVCache, stop: int) -> list[Tensor]:
    return [x.clone() for i in range(cache.num_blocks) for x in cache.view(i, 0, stop)]


def in_order(
    model: Reference, ids: Tensor, cache: KVCache, pass_tokens: int, rows: LogitRows = "all"
) -> Tensor:
    """The definition: pass by pass, each without a break; logits of these rows."""
    found = []
    for start in range(0, len(ids), pass_tokens):
        is_last = start + pass_tokens >= len(ids)
        logits = model.forward(
            ids[start : start + pass_tokens], start, cache,
            rows if is_last or rows == "all" else "none",
        )  # fmt: skip
        if logits is not None:
            found.append(logits.clone())
    return torch.cat(found)


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def readers(model: Reference, most: int, others: float) -> Readers:
    return Readers(model, Threads(most, Busy(others, most)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda d: d.value)
def test_what_comes_between_two_blocks_changes_no_bit(folder: Path, dtype: Dtype) -> None:
    model = in_dtype(folder, dtype)
    ids = [prompt(60, model.config.vocab_size, seed) for seed in range(3)]
    wanted = []
    for one in ids:
        cache = model.new_cache(CAPACITY)
        logits = model.forward(one, 0, cache, "all")
        assert logits is not None
        wanted.append([logits.clone(), *stored(cache, 60)])
    caches = [model.new_cache(CAPACITY) for _ in ids]
    passes = [model.begin(one, 0, cache, "all") for one, cache in zip(ids, caches, strict=True)]
    scratch, rows = Scratch(model.device), {}
    with torch.inference_mode():
        while not all(one.is_over for one in passes):
            for i, one in enumerate(passes):
                if not one.is_over:
                    one.advance(scratch)
                    if one.logits is not None:
                        rows[i] = one.logits.clone()
                model.forward(ids[i][:1], 60, caches[i])  # a step of its own length, beyond
    for i, cache in enumerate(caches):
        assert same([rows[i], *stored(cache, 60)], wanted[i])


@pytest.mark.parametrize(("num_threads", "others"), [(1, 0), (2, 0), (2, 1), (4, 1)])
@pytest.mark.parametrize("bound_s", [0.0, 60.0], ids=["one part", "unbounded"])
@pytest.mark.parametrize("rows", ["last", "all"])
def test_readers_side_by_side_have_the_bits_of_one(
    folder: Path, num_threads: int, others: float, bound_s: float, rows: LogitRows
) -> None:
    model = in_dtype(folder, Dtype.FP32)
    ids = prompt(117, model.config.vocab_size, 5)
    cache = model.new_cache(CAPACITY)
    wanted = [in_order(model, ids, cache, PASS_TOKENS, rows), *stored(cache, 117)]
    crew, cache = readers(model, num_threads, others), model.new_cache(CAPACITY)
    reading = Reading(model, cache, ids.tolist(), 0, PASS_TOKENS, rows)  # type: ignore[arg-type]
    done: list[Pass] = []
    while not reading.is_over:
        done += crew.advance(reading, time.perf_counter() + bound_s)
    assert [one.position for one in done] == [0, 32, 64, 96]
    found = torch.cat([one.logits for one in done if one.logits is not None])
    assert same([found, *stored(cache, 117)], wanted)


def test_a_reader_that_fails_ends_the_others(folder: Path, monkeypatch) -> None:
    model = in_dtype(folder, Dtype.FP32)
    ids = prompt(120, model.config.vocab_size, 6).tolist()
    reading = Reading(model, model.new_cache(CAPACITY), ids, 0, PASS_TOKENS)
    advance, main = Pass.advance, threading.current_thread()

    def fail_elsewhere(self: Pass, scratch: Scratch) -> None:
        if threading.current_thread() is not main:
            raise ValueError("a block failed")
        time.sleep(0.001)
        advance(self, scratch)

    monkeypatch.setattr(Pass, "advance", fail_elsewhere)
    with pytest.raises(ValueError, match="a block failed"):
        readers(model, 2, 1.0).advance(reading, time.perf_counter() + 60)


def test_threads_that_others_leave() -> None:
    def free(most: int, num_cores: int, others: float) -> int:
        return Threads(most, Busy(others, num_cores)).num_free  # type: ignore[arg-type]

    assert [free(2, 2, others) for others in (0, 0.3, 0.7, 1, 1.9, 2)] == [2, 2, 1, 1, 1, 1]
    assert [free(16, 16, others) for others in (0, 1, 5.2)] == [16, 15, 11]
    # Two threads for each physical core: one core of others leaves enough.
    assert [free(4, 8, others) for others in (1, 4, 5)] == [4, 4, 3]
    assert free(1, 8, 8) == 1


@pytest.mark.parametrize("same_bits", [True, False])
def test_a_library_whose_bits_depend_on_threads_gets_one(
    monkeypatch: pytest.MonkeyPatch, same_bits: bool
) -> None:
    monkeypatch.setattr("soloist.reference.threads._same_bits", lambda _: same_bits)
    threads, used = Threads(4, Busy(0, 4)), {}  # type: ignore[arg-type]
    try:
        for num_tokens, num_threads in product((1, 16, 128), (1, 2, 4)):
            threads.use(num_tokens, num_threads)
            used[num_tokens, num_threads] = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    of_one, of_many = ([used[n, t] for t in (1, 2, 4)] for n in (1, 128))
    assert (of_one, of_many) == (([1, 2, 4],) * 2 if same_bits else ([1] * 3,) * 2)
    assert used[16, 4] == (2 if same_bits else 1)


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16], ids=lambda d: d.value)
def test_the_number_of_threads_changes_no_bit(dtype: Dtype) -> None:
    """Libraries cut rows between threads, and few rows go through other kernels than many."""
    generator = torch.Generator().manual_seed(0)
    torch_dtype = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16}[dtype]
    threads = Threads(4, Busy(0, 4))  # type: ignore[arg-type]
    weights = [
        torch.randn(shape, generator=generator).to(torch_dtype)
        for shape in ((320, 768), (320, 1792), (896, 320))
    ]
    try:
        # Products in 16 bits are slow on many a CPU.
        counts = range(1, 129) if dtype is Dtype.FP32 else (*range(1, 34), *range(40, 129, 8))
        for count in counts:
            for weight in weights:
                x = torch.randn(count, weight.shape[0], generator=generator).to(torch_dtype)
                found = []
                for num_threads in (1, 2, 3, 4):
                    threads.use(count, num_threads)
                    found.append(torch.mm(x, weight))
                for num_threads, one in enumerate(found[1:], 2):
                    assert torch.equal(one, found[0]), f"{count} rows on {num_threads} threads"
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_number_of_threads_changes_no_bit_of_an_activation(activation: Activation) -> None:
    """A row that two threads share has other bits where it is cut."""
    generator = torch.Generator().manual_seed(0)
    try:
        for count, width in ((40, 2432), (64, 2432), (100, 2432), (127, 1001), (1, 100_000)):
            gate_up, found = torch.randn(count, 2 * width, generator=generator), []
            for num_threads in (1, 2, 3, 4):
                torch.set_num_threads(num_threads)
                found.append(gate_up.clone()[:, :width])
                activate(found[-1], activation)
            for num_threads, one in enumerate(found[1:], 2):
                assert torch.equal(one, found[0]), f"{count} × {width} on {num_threads} threads"
            alone = gate_up[-1:, :width]
            activate(alone, activation)
            assert torch.equal(alone[0], found[0][-1]), "nor does the number of rows"
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
def test_a_cpu_without_products_in_16_bits_is_no_less_exact(
    folder: Path, dtype: Dtype, monkeypatch
) -> None:
    ids = prompt(90, 60, 7)
    exact = in_dtype(folder, Dtype.FP32)
    wanted = in_order(exact, ids, exact.new_cache(CAPACITY), 90)
    errors = {}
    for is_quick in (True, False):
        monkeypatch.setattr("soloist.reference.blocks.is_quick", lambda _, q=is_quick: q)
        model = in_dtype(folder, dtype)
        rows = in_order(model, ids, model.new_cache(CAPACITY), 90)
        errors[is_quick] = (rows - wanted).norm() / wanted.norm()
    assert 0 < errors[False] < 1.2 * errors[True]
