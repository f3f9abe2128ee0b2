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
    for words in ("12.8 M parameters", "4.8 TB/s", "exchanges first", "yes", "no: no fp8 weights"):
        assert words in done.out
    assert "4.44 TB/s read" in done.out
    assert "int4" not in done.out.split("assumed:")[0]  # 320 values are no groups of 128


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
    assert "9.54 GB more than the 24 GB" in done.err
    assert "fp16/bf16 on 2 GPUs" in done.err


def test_some_rows_too_large_are_shown(soloist):
    options = ("--hardware", "RTX 4090", "--context", 131072)
    done = soloist("plan", "--config", SHAPES / "llama-3.1-8b.json", *options)
    assert done.status == 0
    assert "no: 9.54 GB a GPU short" in done.out
    assert "capacity first: fp16/bf16 on 1 GPU" in done.out
    assert "what fits on RTX 4090: fp16/bf16 on 2 GPUs" in done.out


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("--hardware", "abacus"), "RTX 3090, RTX 4090"),
        (("--hardware", "H200", "--gpus", 3), "1, 2, 4, 8"),
        (("--hardware", "H200", "--precision", "fp2"), "fp16, bf16, fp8, int4, fp4"),
        (("--hardware", "H200", "--context", 9000), "1 … 8,192"),
        (("--hardware", "H200", "--config", SHAPES / "qwen3-8b.json"), "--config"),
        (("--hardware", "H200", "--precision", "int4"), "fp16/bf16, fp8, fp4"),
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
