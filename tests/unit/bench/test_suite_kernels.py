"""A suite's kernels are those that its commands run, without their folders."""

import importlib
import json
from pathlib import Path

import pytest

from soloist.engine.compiling import kernel_sources
from soloist.engine.config import EngineConfig
from soloist.engine.opening import open_model
from soloist.engine.support import support_of
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import Plan
from soloist.model.dtype import Dtype
from unit.bench.test_quantized_folders import BENCHMARKS, SHAPE


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The script, for which a small shape is public."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPE))
    module = importlib.import_module("suite_kernels")
    monkeypatch.setattr(module, "SHAPES", tmp_path)
    return module


def plan_of(folder: Path) -> Plan:
    """Of files that are there."""
    checkpoint, chosen = open_model(folder, EngineConfig(str(folder)))
    gpu = TYPICAL["sm_90a"]
    plan = support_of(gpu, chosen.config, checkpoint.dtype, 1, chosen.stored).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("form", ["bf16", "int4", "int4-int8-head", "int8", "fp8", "fp8-block"])
def test_kernels_are_those_of_the_folder(script, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "build" / "quantized" / form / "tiny"
    folders = importlib.import_module("quantized_folders")
    folders.write(folder, tmp_path)
    command = f"bench decode build/quantized/{form}/tiny --prompt-tokens 8 --columns 8"
    ((seen, plan),) = script.plans([command])
    assert seen == command
    assert list(kernel_sources(plan)) == list(kernel_sources(plan_of(folder)))


def test_options_of_a_shape(script) -> None:
    shape = "--shape benchmarks/shapes/llama-3.2-1b.json"
    found = script.plans(
        [
            f"bench decode {shape} --prompt-tokens 128 --precision fp16 --gpus 2",
            f"bench prefill {shape} --weights int4 --head-weights int8",
            f"bench decode {shape} --kv fp8",
        ]
    )
    ranks, rounded, coded = (plan for _, plan in found)
    assert (ranks.dtype, ranks.ranks, ranks.formats) == (Dtype.FP16, 2, {})
    assert (rounded.dtype, rounded.ranks) == (Dtype.BF16, 1)
    assert rounded.formats["head"].name == "int8"
    assert rounded.formats["layers.0.down"].name == "int4"
    assert coded.kv.name == "fp8"


def test_commands_that_it_knows_no_plan_of(script) -> None:
    commands = [
        "bench decode etude --prompt-tokens 8", "bench decode build/quantized/gguf-Q8_0/tiny",
        "bench bandwidth --device cuda", "bench decode build/quantized/int4/tiny --device cpu",
    ]  # fmt: skip
    assert list(script.plans(commands)) == [(command, None) for command in commands]


def test_all_is_compiled_once(script, tmp_path, monkeypatch, capsys) -> None:
    commands = ("bench decode build/quantized/int4/tiny", "bench bandwidth")
    record = importlib.import_module("record")
    files = {"a.json": record.File(commands)}
    compiled = []

    def compile_kernels(plan: Plan, cache: Path, *_: object) -> tuple[()]:
        compiled.append((plan, cache))
        return ()

    monkeypatch.setattr(script, "compile_kernels", compile_kernels)
    monkeypatch.setattr(record, "SUITES", {"here": files})
    assert script.main(["here", "-o", str(tmp_path / "kernels")]) == 0
    assert [cache for _, cache in compiled] == [tmp_path / "kernels"]
    assert capsys.readouterr().out.splitlines() == [
        "0 kernels, 0 of them new: soloist bench decode build/quantized/int4/tiny",
        "left out: soloist bench bandwidth",
    ]
    with pytest.raises(SystemExit):
        script.main(["here", "--only", "c.json", "-o", str(tmp_path)])
