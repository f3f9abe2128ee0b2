"""The decode kernel compiles for every family and architecture, within shared memory."""

import importlib.util
from pathlib import Path

import pytest

from interpreter.models import CASES
from plan.shapes import PUBLIC, etude
from soloist.jit.compiler import Resources, compile_source
from soloist.jit.source import Source
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import ABLATIONS, Build, header
from soloist.megakernel.plan import THREADS, Plan, make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from unit.model.configurations import MISTRAL_7B, QWEN25_05B, SMOLLM3_3B, written

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("nvidia") is None,
    reason="needs cuda-bindings and nvidia-cuda-nvrtc",
)

# A thread's registers that may be written to local memory, by architecture; others are not tuned.
SPILL_LIMIT_BYTES = {"sm_90a": 64}
# The same with the sampler inside, whose call leaves the rest fewer predicates.
SAMPLING_SPILL_LIMIT_BYTES = {"sm_90a": 96}
# Threads of a block times registers of each must fit the SM's register file.
REGISTERS = 64 * 1024

FILES = {"mistral-7b": MISTRAL_7B, "smollm3-3b": SMOLLM3_3B, "qwen2.5-0.5b": QWEN25_05B}
# One of every family, head dimension, bias and norm; each takes two seconds and more.
FEW = [
    ("etude", "sm_90a"), ("etude", "sm_100"), ("etude", "sm_120"),
    ("llama-untied-biases-32", "sm_90a"),
    ("mistral-window-96", "sm_120"),
    ("qwen2-bias-tied-64", "sm_90a"),
    ("smollm3-nope-64", "sm_100"),
    ("llama-3.2-1b", "sm_90a"),
    ("qwen3-1.7b", "sm_90a"),
    ("laneformer-2b-as-llama", "sm_90a"),
    ("llama-3.1-8b", "sm_90a"),
]  # fmt: skip
# Those that sample beside.
SAMPLING = [
    ("etude", "sm_90a"), ("etude", "sm_100"), ("etude", "sm_120"), ("llama-3.1-8b", "sm_90a"),
]  # fmt: skip
ALL = [(name, arch) for name in (*CASES, *PUBLIC, *FILES, "etude") for arch in TYPICAL]


def configured(name: str, folder: Path) -> ModelConfig:
    if name == "etude":
        return etude()
    if name in PUBLIC:
        return PUBLIC[name]
    values = FILES[name] if name in FILES else CASES[name][0]
    return read_config(written(folder, values))


def compiled(text: str, arch: str) -> tuple[Resources, tuple[str, ...]]:
    report = compile_source(Source("kernels/decode.cu", text), arch).report
    return report.entries["decode"], report.warnings


def require_sound(plan: Plan, *, samples: bool = False) -> None:
    resources, warnings = compiled(header(plan, Build(samples=samples)), plan.gpu.arch)
    assert warnings == ()
    shared = plan.shared_bytes + resources.static_shared_bytes
    assert shared <= plan.gpu.shared_bytes, f"{shared:,} bytes of shared memory"
    assert resources.registers * THREADS <= REGISTERS
    limits = SAMPLING_SPILL_LIMIT_BYTES if samples else SPILL_LIMIT_BYTES
    limit = limits.get(plan.gpu.arch)
    if limit is not None:
        assert resources.spill_store_bytes <= limit, f"{resources} (allowed: {limit} bytes)"


@pytest.mark.parametrize(("name", "arch"), FEW, ids=map("-".join, FEW))
def test_compiles_cleanly(name: str, arch: str, tmp_path: Path) -> None:
    require_sound(make_plan(configured(name, tmp_path), Dtype.BF16, TYPICAL[arch]))


@pytest.mark.parametrize(("name", "arch"), SAMPLING, ids=map("-".join, SAMPLING))
def test_compiles_with_sampling(name: str, arch: str, tmp_path: Path) -> None:
    plan = make_plan(configured(name, tmp_path), Dtype.BF16, TYPICAL[arch])
    require_sound(plan, samples=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"),
    [x for x in ALL if x not in SAMPLING],
    ids=["-".join(x) for x in ALL if x not in SAMPLING],
)
def test_compiles_with_sampling_everywhere(name: str, arch: str, tmp_path: Path) -> None:
    plan = make_plan(configured(name, tmp_path), Dtype.BF16, TYPICAL[arch])
    require_sound(plan, samples=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"),
    [x for x in ALL if x not in FEW],
    ids=["-".join(x) for x in ALL if x not in FEW],
)
def test_compiles_everywhere(name: str, arch: str, tmp_path: Path) -> None:
    require_sound(make_plan(configured(name, tmp_path), Dtype.BF16, TYPICAL[arch]))


@pytest.mark.parametrize(
    "build",
    [
        Build(trace_round=3),
        Build(silent_block=3, stuck_ns=10**8),
        *(Build(ablation=ablation) for ablation in ABLATIONS.values() if ablation),
    ],
    ids=["trace", "silent", *(name for name in ABLATIONS if name != "none")],
)
def test_builds_for_looking_inside_compile(build: Build) -> None:
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"])
    resources, warnings = compiled(header(plan, build), "sm_90a")
    assert warnings == ()
    assert resources.registers * THREADS <= REGISTERS


@pytest.mark.slow
@pytest.mark.parametrize("arch", TYPICAL)
def test_fp16_compiles(arch: str) -> None:
    require_sound(make_plan(etude(), Dtype.FP16, TYPICAL[arch]))
