"""The script that times variants of the kernel in turn: what a variant sets, and for how long."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plan.shapes import etude
from soloist.errors import SettingError
from soloist.jit.source import CUDA_ROOT
from soloist.megakernel import kernel
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.megakernel.plan import make_plan
from soloist.megakernel.tuning import HOPPER
from soloist.model.dtype import Dtype
from soloist.model.folder import find_model
from soloist.model.quantized import Codes

HOPPER_GPU = TYPICAL["sm_90a"]
SHAPE = Path(__file__).parents[3] / "benchmarks" / "shapes" / "llama-3.2-1b.json"


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("variants")


def test_a_variant_is_in_force_as_long_as_it_says(variants, tmp_path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "decode.cu").write_text("// other")
    plan = make_plan(etude(), Dtype.BF16, HOPPER_GPU)
    plain = kernel.decode_sources(plan, Build())[0]
    given = f"copies_in_flight=2,routes_early=False,kExchangeCopies=8,cuda={tmp_path}"
    with variants.read_variant(given).in_force():
        assert HOPPER_GPU.architecture.tuning.copies_in_flight == 2
        assert not HOPPER_GPU.architecture.tuning.routes_early
        changed = kernel.decode_sources(make_plan(etude(), Dtype.BF16, HOPPER_GPU), Build())[0]
    assert changed.text == "// other"
    assert "kExchangeCopies = 8;" in changed.header
    assert HOPPER_GPU.architecture.tuning is HOPPER
    again = kernel.decode_sources(plan, Build())[0]
    assert (again.root, again.header) == (CUDA_ROOT, plain.header)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("copies=2", "--variant copies=2: allowed are a constant kNAME, cuda, copies_in_flight"),
        ("copies_in_flight=few", "--variant copies_in_flight=few: a value like 3 is expected"),
        ("cuda=nowhere", "--variant cuda=nowhere: a copy of src/soloist/cuda is expected"),
    ],
)
def test_what_cannot_be_set_is_refused(variants, given, told) -> None:
    with pytest.raises(SystemExit) as refused:
        variants.read_variant(given)
    assert str(refused.value).startswith(told)


def test_a_subject_names_weights_and_head(variants) -> None:
    name, shape = variants.read_subject(f"{SHAPE}:fp8-block:int8", "bf16")
    assert name == "llama-3.2-1b:fp8-block:int8"
    assert not shape.config.tied_head
    kinds = {name.rpartition(".")[2]: kind for name, kind in shape.stored.items()}
    assert (kinds["head"].codes, kinds["head"].scale_rows) == (Codes.INT8, 1)
    assert (kinds["down"].codes, kinds["down"].scale_rows) == (Codes.FP8, 128)
    name, shape = variants.read_subject(str(SHAPE), "bf16")
    assert (name, shape.stored) == ("llama-3.2-1b", {})
    with pytest.raises(SystemExit, match=r"with one of fp8-block, int4, int8, fp8$"):
        variants.read_subject(f"{SHAPE}:int3", "bf16")


class _Launches:
    """In a decoder's stead: of as many rounds as are asked for, all with the same tokens."""

    def __init__(self, token: int, order: list[tuple[int, int]]) -> None:
        self.plan = make_plan(etude(), Dtype.BF16, HOPPER_GPU)
        self._token, self._order = token, order

    def start(self, queries: list[Query], rounds: int) -> None:
        self._order.append((self._token, len(queries)))
        self._made = [[self._token] * len(queries)] * rounds

    def tokens(self) -> Iterator[list[int]]:
        yield from self._made


def test_launches_are_shuffled_and_other_tokens_are_told(variants, capsys) -> None:
    order: list[tuple[int, int]] = []
    given = ["", "copies_in_flight=2", "copies_in_flight=1"]
    loaded = [
        (variants.read_variant(name), _Launches(token, order))
        for name, token in zip(given, (7, 7, 8), strict=True)
    ]
    asked = argparse.Namespace(
        columns=[1, 8], turns=3, launches=1, rounds=4, rest=0.0, temperature=0.0
    )
    variants._time_from(128, "a model", loaded, torch.device("cpu"), asked)
    told = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1] for line in told[::4]] == [
        " 1 columns from position 128 on", " 8 columns from position 128 on",
    ]  # fmt: skip
    assert ["other tokens" in line for line in told] == [False, False, False, True] * 2
    turns = [order[i : i + 6] for i in range(0, len(order), 6)]
    assert len(turns) == 4
    assert len({tuple(turn) for turn in turns}) > 1
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)


@pytest.mark.gpu
def test_variants_are_timed_in_turn(variants, capsys) -> None:
    config = Path(find_model("etude")) / "config.json"
    few = ["--rounds", "16", "--turns", "2", "--launches", "1"]
    asked = ["--variant", "copies_in_flight=2", "--columns", "1", "8", "--temperature", "1"]
    assert variants.main([f"{config}:int4", *few, *asked]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1].split()[0] for line in told[::3]] == ["1", "8"]
    assert [line.rsplit(maxsplit=1)[-1] for line in told[2::3]] == ["copies_in_flight=2"] * 2


def test_a_subject_is_quantised_as_its_configuration_says(variants) -> None:
    name, shape = variants.read_subject(str(SHAPE.with_name("qwen3-30b-a3b-fp8.json")), "bf16")
    assert name == "qwen3-30b-a3b-fp8"
    plain = str(SHAPE.with_name("qwen3-30b-a3b.json"))
    assert shape.stored == variants.read_subject(f"{plain}:fp8-block", "bf16")[1].stored
    with pytest.raises(SettingError, match="configuration says how"):
        variants.read_subject(str(SHAPE.with_name("qwen3-30b-a3b-fp8.json:int4")), "bf16")
