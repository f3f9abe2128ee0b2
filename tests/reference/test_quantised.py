"""Models in every quantised format against transformers with the numbers that they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reference.compare import assert_close
from reference.oracle import Case, build, load, oracle_logits, prompt, run
from unit.weights.formats import FORMATS, Format

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FUSED = {name: value for name, value in SIZES.items() if name != "head_dim"}
CASES = [
    Case("quantised", "llama", SIZES),
    Case("quantised", "qwen3", SIZES),
    Case("quantised", "phi3", FUSED),
]


def write(case: Case, form: Format, folder: Path) -> torch.Tensor:
    """A random model in this format; what transformers makes of its numbers for 40 tokens."""
    oracle = build(case)
    stored = {}
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            module = name.removesuffix(".weight")
            if name.endswith(("_proj.weight", "lm_head.weight")):
                tensors, numbers = form.of(module, parameter.detach().clone())
                parameter.copy_(numbers)
                stored |= tensors
            else:
                stored[name] = parameter.detach().clone()
    oracle.config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["dtype"] = "float16"
    if form.config is not None:
        values["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(values))
    for name, text in form.files.items():
        (folder / name).write_text(text)
    save_file(stored, folder / "model.safetensors")
    return oracle_logits(oracle, prompt(40, 64))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.family)
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_logits_are_those_of_the_numbers(case: Case, form: Format, tmp_path: Path) -> None:
    wanted = write(case, form, tmp_path)
    seen = run(load(tmp_path), prompt(40, 64), [25, 15])
    assert_close(seen, wanted, "transformers", form.name)
