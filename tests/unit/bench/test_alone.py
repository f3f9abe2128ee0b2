"""The script that times one rank alone: what it sets in the kernel's header."""

import importlib
from pathlib import Path

import pytest

from plan.shapes import etude
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import Build, header
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype

BUILD = Build(alone=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("alone")


def test_constants_of_a_variant_are_set(alone) -> None:
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"], 8)
    plain, seen = (
        header(plan, BUILD).splitlines(),
        alone.with_constants(plan, BUILD, "kCopies=5,kExchangeCopies=8"),
    )
    changed = [line.strip() for line in seen.splitlines() if line not in plain]
    assert changed == [
        "constexpr unsigned kExchangeCopies = 8;",
        "static constexpr unsigned kCopies = 5;",
    ]
    assert alone.with_constants(plan, BUILD, "").splitlines() == plain


def test_what_is_no_constant_is_refused(alone) -> None:
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"], 8)
    with pytest.raises(SystemExit, match="no constant of the kernel's header is called 'kCopy'"):
        alone.with_constants(plan, BUILD, "kCopy=2")
