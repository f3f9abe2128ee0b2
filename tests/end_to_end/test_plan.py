"""`soloist plan`: a shipped model and a configuration, on hardware that need not be there."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from soloist.cli import planning
from soloist.errors import CudaMissing

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


def test_etude_on_h200_waits_for_exchanges(soloist):
    done = soloist("plan", "etude", "--hardware", "H200")
    assert done.status == 0, done.err
    for words in ("12.8 M parameters", "4.8 TB/s", "exchanges first", "yes", "no: no fp4 weights"):
        assert words in done.out
    assert "4.44 TB/s read" in done.out
    assert "int4" in done.out.split("assumed:")[0]
    assert "left out" not in done.out


def test_rows_that_no_group_divides(soloist, tmp_path):
    config = json.loads((SHAPES / "llama-3.1-8b.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"intermediate_size": 14_352}))
    done = soloist("plan", "--config", file, "--hardware", "H200")
    assert done.status == 0, done.err
    assert "int4" not in done.out.split("assumed:")[0]
    assert "left out: int4, with a scale for 32 weights" in done.out
    done = soloist("plan", "--config", file, "--hardware", "H200", "--precision", "int4")
    assert done.status == 2
    assert "fp16/bf16, fp8" in done.err


def test_a_configuration_as_json(soloist):
    file = SHAPES / "llama-3.1-8b.json"
    done = soloist("plan", "--config", file, "--hardware", "h200", "--context", 4096, "--json")
    facts = json.loads(done.out)
    assert facts["model"] == "llama-3.1-8b"
    assert facts["hardware"]["bandwidth_bytes_per_s"] == 4.8e12
    assert [(r["precision"], r["gpus"]) for r in facts["rows"]] == [
        (precision, gpus)
        for precision in ("fp16/bf16", "fp8", "int4", "fp4")
        for gpus in (1, 2, 4, 8)
    ]
    one, *_, eight = facts["rows"][:4]
    assert one["first_wall"] == "bandwidth"
    assert one["runs"]
    assert one["expected_from"] == "measured"
    assert one["limit_tokens_per_s"] == pytest.approx(4.8e12 / one["bytes_per_token"], abs=0.1)
    assert eight["limit_tokens_per_s"] == pytest.approx(8 * one["limit_tokens_per_s"], abs=1)
    assert eight["expected_tokens_per_s"] < 8 * one["expected_tokens_per_s"]
    assert eight["runs"]


def test_one_row_on_announced_hardware(soloist):
    options = ("--hardware", "rubin", "--gpus", 8, "--precision", "fp8")
    done = soloist("plan", "--config", SHAPES / "qwen3-8b.json", *options)
    assert done.status == 0, done.err
    for words in ("Rubin (announced)", "FLOP/s not stated", "(assumed)", "nothing was measured"):
        assert words in done.out
    assert "int4" not in done.out


def test_a_model_too_large_is_refused_with_what_fits(soloist):
    done = soloist(
        "plan", "--config", SHAPES / "llama-3.1-8b.json", "--hardware", "RTX 4090",
        "--gpus", 1, "--precision", "bf16", "--context", 131072,
    )  # fmt: skip
    assert done.status == 3
    assert "9.54 GB more than a GPU's 24 GB" in done.err
    assert "fp16/bf16 on 2 GPUs" in done.err


def test_some_rows_too_large_are_shown(soloist):
    options = ("--hardware", "RTX 4090", "--context", 131072)
    done = soloist("plan", "--config", SHAPES / "llama-3.1-8b.json", *options)
    assert done.status == 0
    assert "no: 9.54 GB a GPU short" in done.out
    assert "capacity first: fp16/bf16 on 1 GPU" in done.out
    assert "what fits on RTX 4090: fp16/bf16 on 2 GPUs" in done.out


def test_costs_show_their_arithmetic(soloist):
    options = ("--config", SHAPES / "llama-3.1-8b.json", "--hardware", "H200", "--gpus", 2)
    paid = ("--price", 3.5, "--utilisation", 0.5, "--step", "1000/100", "--api-price", "0.5/1.5")
    done = soloist("plan", *options, "--precision", "bf16", *paid)
    assert done.status == 0, done.err
    facts = json.loads(soloist("plan", *options, "--precision", "bf16", *paid, "--json").out)
    (row,) = facts["rows"]
    cost = row["cost"]
    by_hand = 1000 / row["expected_tokens_per_s"] * 7 / 3600 / 0.5
    assert cost["thousand_tokens"] == pytest.approx(by_hand, rel=1e-3)
    assert cost["api_step"] == pytest.approx(1000 * 0.5e-6 + 100 * 1.5e-6)
    assert cost["step_speculating"] < cost["step"]
    for words in ("× 7 an hour / 3600 / 0.5 =", f"{cost['step']:.3g}", "1,000 × 0.5 + 100 × 1.5"):
        assert words in done.out


def test_speculation_is_assumed_unless_told(soloist):
    options = ("plan", "--config", SHAPES / "llama-3.1-8b.json", "--hardware", "H200")
    done = soloist(*options, "--gpus", 1, "--precision", "bf16")
    assert "each is accepted with probability a = 30% if all before it are (assumed" in done.out
    drafting = ("--draft", SHAPES / "llama-3.2-1b.json", "--drafts", 3, "--acceptance", 0.8)
    facts = json.loads(soloist(*options, *drafting, "--json").out)
    speculation, row = facts["speculation"], facts["rows"][0]
    assert (speculation["drafts"], speculation["acceptance_from"]) == (3, "given")
    assert speculation["tokens_per_round"] == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert speculation["draft_parameters"] == 1_235_814_400
    assert row["speculating_tokens_per_s"] > 1.5 * row["expected_tokens_per_s"]
    named = soloist(*options, "--draft", "etude")
    assert "12.8 M parameters" in named.out


def test_a_mixture_of_experts(soloist, tmp_path):
    from unit.planning.mixtures import QWEN3_30B_A3B

    file = tmp_path / "qwen3-30b-a3b.json"
    file.write_text(json.dumps(QWEN3_30B_A3B))
    done = soloist("plan", "--config", file, "--hardware", "H200")
    assert done.status == 0, done.err
    for words in (
        "30.5 B parameters (3.35 B for a token)",
        "its own 8 of 128 experts",
        "with experts, in µs a layer, in which all but experts streams: 12.8 on 1",
    ):
        assert words in done.out
    assert "reference only" not in done.out
    rows = json.loads(soloist("plan", "--config", file, "--hardware", "H200", "--json").out)["rows"]
    runs = {row["precision"] for row in rows if row["runs"]}
    assert runs == {"fp16/bf16", "fp8", "int4"}
    known = {(r["precision"], r["gpus"]) for r in rows if r["expected_from"] == "measured"}
    assert known == {("fp16/bf16", 1), ("fp16/bf16", 2)}


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("--hardware", "H200", "--drafts", 8), "1 … 7"),
        (("--hardware", "H200", "--acceptance", 2), "--acceptance"),
        (("--hardware", "H200", "--utilisation", 0.5), "--price"),
        (("--hardware", "H200", "--price", 1, "--step", "1000"), "PROMPT/NEW"),
        (("--hardware", "H200", "--price", 1, "--api-price", "x"), "--api-price"),
        (("--hardware", "abacus"), "RTX 3090, RTX 4090"),
        (("--hardware", "H200", "--gpus", 3), "1, 2, 4, 8"),
        (("--hardware", "H200", "--precision", "fp2"), "fp16, bf16, fp8, int4, fp4"),
        (("--hardware", "H200", "--context", 70_000), "1 … 65,536"),
        (("--hardware", "H200", "--config", SHAPES / "qwen3-8b.json"), "--config"),
    ],
)
def test_what_cannot_be_used_is_refused(soloist, options, fact):
    done = soloist("plan", "etude", *options)
    assert done.status == 2
    assert fact in done.err
    assert "hint: " in done.err


def fake_driver(name: bytes, count: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuInit=lambda _: (0,),
        cuDeviceGetCount=lambda: (0, count),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetName=lambda size, _: (0, name.ljust(size, b"\0")),
    )


def test_the_machine_s_own_gpu(soloist, monkeypatch):
    monkeypatch.setattr(planning, "driver", lambda: fake_driver(b"NVIDIA H200"))
    assert "H200 · 141 GB" in soloist("plan", "etude").out


def test_a_gpu_without_figures(soloist, monkeypatch):
    monkeypatch.setattr(planning, "driver", lambda: fake_driver(b"NVIDIA T4"))
    done = soloist("plan", "etude")
    assert done.status == 3
    assert "NVIDIA T4" in done.err
    assert "--hardware" in done.err


def test_no_gpu(soloist, monkeypatch):
    def missing() -> None:
        raise CudaMissing("the NVIDIA driver (libcuda)", "not found", "install it")

    monkeypatch.setattr(planning, "driver", missing)
    assert "no GPU was found" in soloist("plan", "etude").err
    monkeypatch.setattr(planning, "driver", lambda: fake_driver(b"", count=0))
    assert "shows no GPU" in soloist("plan", "etude").err


@pytest.mark.gpu
def test_the_gpu_at_hand_is_named_or_refused(soloist):
    done = soloist("plan", "etude")
    assert done.status == 0 or "there are no figures for this machine's" in done.err
