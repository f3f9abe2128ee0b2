"""A mixture of experts from the command line: what is said of it, where it runs, refusals."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file

from soloist.engine import Engine, EngineConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import shipped_folder
from soloist.sampling import SamplingParams
from soloist.weights.random import random_weights

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32,
    "num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "vocab_size": 8192,
    "torch_dtype": "bfloat16", "eos_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
# Of families with an MLP that all tokens take beside experts.
WITH_SHARED = {
    "qwen2_moe": {
        "model_type": "qwen2_moe", "hidden_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 128,
        "num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "vocab_size": 8192, "torch_dtype": "bfloat16", "eos_token_id": 0,
        "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "hidden_size": 256, "num_hidden_layers": 3, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 2, "moe_intermediate_size": 128,
        "intermediate_size": 512, "n_routed_experts": 16, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.5,
        "attention_bias": True, "use_qk_norm": True, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "vocab_size": 8192, "torch_dtype": "bfloat16", "eos_token_id": 0,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
TOTAL = 8192 * 64 + 3 * (64 * 256 + 128 * 64 + 2 * 64 + 2 * 32 + 16 * 64 + 16 * 3 * 64 * 32) + 64
IDLE = 3 * 13 * 3 * 64 * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_mixture(tmp_path / "mixture")


def write_mixture(
    made: Path, config: Mapping[str, object] = MappingProxyType(CONFIG), **changed: int
) -> Path:
    """A folder with random weights in bf16, and étude's tokenizer."""
    made.mkdir()
    for file in shipped_folder("etude").iterdir():
        if file.is_file():
            shutil.copy(file, made)
    (made / "config.json").write_text(json.dumps({**config, **changed}))
    specs = tensors(read_config(made / "config.json"))
    weights = random_weights(specs, Dtype.BF16, torch.device("cpu"))
    stored = {}
    for spec in specs:
        rows = [source.shape[0] for source in spec.sources]
        parts = weights[spec.name].to(torch.bfloat16).split(rows)
        stored |= {s.name: x.clone() for s, x in zip(spec.sources, parts, strict=True)}
    save_file(stored, made / "model.safetensors")
    return made


def test_info_counts_what_a_token_needs(soloist, folder):
    facts = json.loads(soloist("info", folder, "--json").out)
    assert (facts["parameters"], facts["active_parameters"]) == (TOTAL, TOTAL - IDLE)
    assert facts["experts"] == "3 of 16 for a token"
    in_fp16, in_bf16 = facts["by_precision"]["fp16"], facts["by_precision"]["bf16"]
    routers = 3 * 16 * 64  # in fp32
    assert in_fp16["weights_bytes"] == 2 * (TOTAL + routers)
    assert in_fp16["streamed_bytes_per_token"] == 2 * (TOTAL - IDLE + routers)
    assert (in_fp16["experts_in_files"], in_bf16["experts_in_files"]) == (False, True)
    experts = 2 * 3 * 16 * 3 * 64 * 32
    assert in_fp16["memory_bytes"] - in_bf16["memory_bytes"] == experts
    told = soloist("info", folder).out
    assert "3 of 16 for a token" in told
    assert "on a CPU, where experts stay in the files" in told


@pytest.mark.parametrize(
    "options", [(), ("--precision", "bf16"), ("--weights", "int8"), ("--precision", "fp16")]
)
def test_it_runs(soloist, folder, options):
    run = ("run", folder, "--prompt", "def f(x):", "-n", "6", "-t", "0", "--device", "cpu")
    outcome = soloist(*run, *options)
    assert outcome.status == 0, outcome.err
    assert outcome.out


def test_plan_says_where_it_runs(soloist, folder):
    outcome = soloist("plan", folder, "--hardware", "H200", "--json")
    rows = json.loads(outcome.out)
    assert (rows["parameters"], rows["active_parameters"]) == (TOTAL, TOTAL - IDLE)
    assert {row["runs"] for row in rows["rows"] if row["gpus"] == 1} == {True, False}
    told = soloist("plan", folder, "--hardware", "H200", "--gpus", "1", "--precision", "bf16").out
    assert "reference" not in told
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1,
        "num_attention_heads": 17}))  # fmt: skip
    told = soloist("plan", "--config", folder / "config.json", "--hardware", "H200").out
    assert "no: reference only" in told
    assert "the decode kernel does not support 17 query heads to a KV head" in told


@pytest.mark.parametrize("family", WITH_SHARED)
def test_families_with_shared_experts_run_in_the_kernel(soloist, family, tmp_path):
    folder = write_mixture(tmp_path / "mixture", WITH_SHARED[family])
    run = ("run", folder, "--prompt", "def f(x):", "-n", "6", "-t", "0", "--device", "cpu")
    outcome = soloist(*run)
    assert outcome.status == 0, outcome.err
    for weights in ("bf16", "fp8", "int4"):
        planned = ("plan", folder, "--hardware", "H200", "--precision", weights)
        assert "reference" not in soloist(*planned).out
    elsewhere = soloist("plan", "--config", folder / "config.json", "--hardware", "A100 80GB").out
    assert "no: reference only" in elsewhere


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_experts_per_tok": 17}, "'num_experts_per_tok' is 17, expected at most the 16"),
        ({"num_experts": 17}, "mlp.experts.16"),
        ({"num_experts": 15}, "mlp.experts.15"),
        ({"router_temperature": 2.0}, "'router_temperature'"),
        ({"moe_intermediate_size": 31}, "mlp.experts.0"),
    ],
)
def test_what_does_not_fit_is_named_before_loading(soloist, folder, fields, named):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    for command in ("info", "run"):
        options = ("--prompt", "x") if command == "run" else ()
        outcome = soloist(command, folder, *options)
        assert outcome.status != 0
        assert named in outcome.err
        assert "hint:" in outcome.err


def test_a_missing_expert_is_named(soloist, folder):
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(stored, folder / "model.safetensors")
    outcome = soloist("run", folder, "--prompt", "x")
    assert outcome.status != 0
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in outcome.err


def test_no_quantised_copies_are_made(soloist, folder, tmp_path):
    outcome = soloist("quantize", folder, "-o", tmp_path / "copy", "--weights", "int4")
    assert outcome.status != 0
    assert "has mixtures of experts" in outcome.err
    assert not (tmp_path / "copy").exists()


@pytest.mark.gpu
def test_a_gpu_runs_fp32_on_the_reference_and_says_so(folder):
    """Its products may round otherwise, so the first tokens of fp32 are compared."""
    params = SamplingParams(max_tokens=12, temperature=0.0)
    texts = []
    for device in ("cpu", "cuda"):
        engine = Engine.load(EngineConfig(str(folder), device=device, precision="fp32"))
        assert engine.report.executor == "reference"
        ids: list[int] = []
        for event in engine.generate("def f(x):", params):
            ids += getattr(event, "token_ids", ())
        texts.append(ids)
        if device == "cuda":
            assert "fp32 weights" in engine.report.refusal
    assert texts[0] == texts[1]


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_accuracy_beside_transformers(soloist, tmp_path, weights):
    """On the weights as stored, transformers has the experts' numbers too."""
    shape, file = tmp_path / "mixture.json", tmp_path / "rows.json"
    shape.write_text(json.dumps(CONFIG))
    rounding = () if weights == "bf16" else ("--weights", weights)
    done = soloist(
        "bench", "accuracy", "--shape", shape, "--positions", 100, "--device", "cpu",
        "--precision", "bf16", "--against", "transformers", *rounding, "-o", file,
    )  # fmt: skip
    assert done.status == 0, done.err
    ours, theirs = json.loads(file.read_text())
    assert (ours["engine"], theirs["engine"]) == ("soloist, reference", "transformers forward")
    for row in (ours, theirs):
        assert row["shape"] == "mixture"
        assert row["weights"] == weights
        # One of 16 experts that is chosen otherwise costs more than all rounding.
        assert 1e-7 < row["mean_kl"] < 0.02, "bf16 is near fp32, and not it"
        assert row["top_1_agreement"] > 0.8


def test_accuracy_refuses_a_tokenizer_of_another_vocabulary(soloist, tmp_path):
    small = write_mixture(tmp_path / "small", vocab_size=512)
    done = soloist("bench", "accuracy", small, "--positions", 50, "--device", "cpu")
    assert done.status == 2, done.err
    assert "outside the vocabulary (0 … 511)" in done.err
    assert "the ids of this model's tokenizer" in done.err


GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def memory_group() -> Iterator[tuple[Path, Path]]:
    """A control group of Linux, and the file for how much memory its processes may have."""
    parent, name = GROUPS / "memory", "memory.limit_in_bytes"
    if not parent.is_dir():
        parent, name = GROUPS, "memory.max"
    group = parent / f"soloist-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group for memory: {error}")
    try:
        if not (group / name).exists():
            pytest.skip("control groups have no limit of memory here")
        yield group, group / name
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_file_larger_than_the_memory_runs(tmp_path, memory_group):
    """The limit counts what the system keeps of files, too. 16-bit experts stay in them."""
    group, limit = memory_group
    folder = write_mixture(
        tmp_path / "large", CONFIG, hidden_size=512, moe_intermediate_size=512, num_experts=128,
        num_hidden_layers=4, head_dim=64, num_attention_heads=8,
    )  # fmt: skip
    allowed = 600 * 2**20
    assert (folder / "model.safetensors").stat().st_size > 1.3 * allowed
    command = [sys.executable, "-m", "soloist", "run", str(folder), "--device", "cpu"]
    command += ["--precision", "bf16", "-p", "def f(x):", "-n", "40", "-t", "0"]
    free = subprocess.run(command, capture_output=True, text=True, check=True)
    limit.write_text(str(allowed))
    within = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command]
    held = subprocess.run(within, capture_output=True, text=True, check=False)
    assert held.returncode == 0, held.stderr
    assert held.stdout == free.stdout != ""
