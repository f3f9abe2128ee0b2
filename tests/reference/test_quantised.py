"""Models in every quantised format against transformers with the numbers that they stand for."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from reference.compare import assert_close
from reference.oracle import Case, build, load, oracle_logits, prompt, run
from unit.weights.formats import FORMATS, Format

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FUSED = {name: value for name, value in SIZES.items() if name != "head_dim"}
EXPERTS = {**SIZES, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_hidden_layers": 3}
QWEN_MOE = {**EXPERTS, "num_experts": 4, "mlp_only_layers": [1]}
GLM_MOE = {**EXPERTS, "n_routed_experts": 4}
MIXTRAL = {**SIZES, "intermediate_size": 32, "num_local_experts": 3}
CASES = [
    Case("quantised", "llama", SIZES),
    Case("quantised", "qwen3", SIZES),
    Case("quantised", "phi3", FUSED),
    Case("quantised", "qwen3_moe", QWEN_MOE),
]
# Other names of experts, and shared ones; of the ways to name matrices each once.
OF_EXPERTS = [
    Case("quantised", "mixtral", MIXTRAL),
    Case("quantised", "glm4_moe", GLM_MOE),
    Case("quantised", "qwen2_moe", {**QWEN_MOE, "shared_expert_intermediate_size": 32}),
]
_EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
# Which half of the stacked gates and ups a matrix is.
_HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def put(oracle: PreTrainedModel, name: str, numbers: torch.Tensor) -> None:
    """Into the oracle's parameter, which holds experts of a layer together."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        oracle.get_parameter(name).copy_(numbers)
        return
    layer, expert, matrix = found.groups()
    experts = oracle.get_submodule(f"{layer}.mlp.experts")
    if (half := _HALVES.get(matrix)) is None:
        experts.down_proj[int(expert)] = numbers
    else:
        experts.gate_up_proj[int(expert)].chunk(2)[half].copy_(numbers)


def write(case: Case, form: Format, folder: Path) -> torch.Tensor:
    """A random model in this format; what transformers makes of its numbers for 40 tokens."""
    oracle = build(case)
    oracle.save_pretrained(folder)
    stored = {}
    with torch.no_grad():
        for name, values in load_file(folder / "model.safetensors").items():
            module = name.removesuffix(".weight")
            if name.endswith(("_proj.weight", "lm_head.weight")) or _EXPERT.fullmatch(name):
                tensors, numbers = form.of(module, values)
                put(oracle, name, numbers)
                stored |= tensors
            else:
                stored[name] = values
    values = json.loads((folder / "config.json").read_text())
    values["dtype"] = "float16"
    if form.config is not None:
        values["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(values))
    for name, text in form.files.items():
        (folder / name).write_text(text)
    save_file(stored, folder / "model.safetensors")
    return oracle_logits(oracle, prompt(40, 64))


@pytest.mark.few(14)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.family)
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_logits_are_those_of_the_numbers(case: Case, form: Format, tmp_path: Path) -> None:
    wanted = write(case, form, tmp_path)
    seen = run(load(tmp_path), prompt(40, 64), [25, 15])
    assert_close(seen, wanted, "transformers", form.name)


@pytest.mark.parametrize("case", OF_EXPERTS, ids=lambda c: c.family)
@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq", "pack-quantized"])
def test_experts_of_every_family(case: Case, name: str, tmp_path: Path) -> None:
    (form,) = [form for form in FORMATS if form.name == name]
    wanted = write(case, form, tmp_path)
    seen = run(load(tmp_path), prompt(40, 64), [25, 15])
    assert_close(seen, wanted, "transformers", form.name)


@pytest.mark.parametrize("keeps_gates", [False, True])
def test_gate_of_awq_means_routers(keeps_gates: bool, tmp_path: Path) -> None:
    """AutoAWQ looks for a part of a name, others for the end of it: the tensors know who wrote."""
    (form,) = [form for form in FORMATS if form.name == "awq"]
    config = {**(form.config or {}), "modules_to_not_convert": ["gate", "lm_head"]}
    others = {**form.others, **({"gate_proj": None} if keeps_gates else {})}
    case = Case("awq", "qwen3_moe", QWEN_MOE)
    wanted = write(case, replace(form, config=config, others=others), tmp_path)
    seen = run(load(tmp_path), prompt(40, 64), [25, 15])
    assert_close(seen, wanted, "transformers", "gate")
