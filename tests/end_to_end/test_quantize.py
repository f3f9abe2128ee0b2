"""`soloist quantize` from the command line: the folder, the table, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from soloist.model.checkpoint import open_checkpoint
from soloist.model.folder import find_model
from soloist.model.quantized import AT_LOAD


@pytest.mark.parametrize(
    ("weights", "stored"),
    [("int4", "int4 g64, int4 g128"), ("int8", "int8"), ("fp8", "fp8")],
)
def test_a_copy_of_etude(soloist, tmp_path, weights, stored) -> None:
    out = tmp_path / "copy"
    outcome = soloist("quantize", "etude", "-o", out, "--weights", weights)
    assert outcome.status == 0
    assert f"{out} · 1 file of weights · compressed-tensors, " in outcome.err
    headings, layers, rest, total = (line.split("  ") for line in outcome.out.splitlines())
    assert [word.strip() for word in headings if word.strip()] == [
        "weights", "tensors", "stored as", "before", "after",
    ]  # fmt: skip
    cells = [[word.strip() for word in line if word.strip()] for line in (layers, rest, total)]
    assert cells[0][:4] == ["matrices of layers", "56", stored, "20.3 MB"]
    assert cells[1] == ["everything else", "34", "bf16", "5.26 MB", "5.26 MB"]
    assert cells[2][:3] == ["total", "90", "25.6 MB"]
    source = find_model("etude")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    plain, made = (load_file(folder / "model.safetensors") for folder in (source, out))
    kept = [name for name in plain if "_proj" not in name]
    assert len(kept) == 34
    for name in kept:
        assert torch.equal(plain[name].view(torch.int16), made[name].view(torch.int16))


def test_facts_for_programs(soloist, tmp_path) -> None:
    out = tmp_path / "copy"
    outcome = soloist(
        "quantize", "etude-draft", "-o", out, "--weights", "int4", "--head-weights", "fp8",
        "--group", "32", "--json",
    )  # fmt: skip
    assert outcome.status == 0
    facts = json.loads(outcome.out)
    assert facts["folder"] == str(out)
    assert facts["format"] == "mixed-precision"
    assert facts["files"] == ["model.safetensors"]
    layers, head, rest = facts["parts"]
    assert (layers["part"], layers["stored_as"]) == ("matrices of layers", ["int4 g32"])
    assert (head["part"], head["tensors"], head["before_bytes"]) == ("LM head", 1, 0)
    written = sum(part["after_bytes"] for part in (layers, head, rest))
    assert written < open_checkpoint(out).num_bytes < written + 20_000


def test_a_tied_head_in_the_table(soloist, tmp_path) -> None:
    outcome = soloist(
        "quantize", "etude-draft", "-o", tmp_path / "copy", "--weights", "int8",
        "--head-weights", "int8",
    )  # fmt: skip
    (head,) = [line for line in outcome.out.splitlines() if line.startswith("LM head")]
    assert " tied " in head


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (("--weights", "int3"), ("--weights is 'int3'", ", ".join(AT_LOAD))),
        (("--weights", "int4", "--head-weights", "fp4"), ("--head-weights is 'fp4'", "fp8")),
        (("--weights", "int4", "--group", "48"), ("--group is '48'", "128, 64, 32")),
        (("--weights", "int8", "--group", "64"), ("--group is '64'", "only with int4")),
        ((), ("--weights is 'missing'", "int4, int8, fp8")),
    ],
)
def test_options_that_are_refused(soloist, tmp_path, options, facts) -> None:
    outcome = soloist("quantize", "etude", "-o", tmp_path / "copy", *options)
    assert outcome.status == 2
    assert outcome.out == ""
    assert all(fact in outcome.err for fact in facts)
    assert "hint: " in outcome.err
    assert not (tmp_path / "copy").exists()


def test_a_folder_must_be_named_and_empty(soloist, etude) -> None:
    outcome = soloist("quantize", "etude", "--weights", "int4")
    assert outcome.status == 2
    assert "--output is 'missing' (allowed: a new or empty folder)" in outcome.err
    outcome = soloist("quantize", "etude", "--weights", "int4", "-o", etude)
    assert outcome.status == 2
    assert "this one holds NOTICE.md, README.md, chat_template.jinja, …" in outcome.err


def test_a_copy_is_not_quantised_again(soloist, tmp_path) -> None:
    soloist("quantize", "etude-draft", "--weights", "int4", "-o", tmp_path / "copy")
    outcome = soloist("quantize", tmp_path / "copy", "--weights", "int8", "-o", tmp_path / "b")
    assert outcome.status == 2
    assert "is quantised already (config.json has a quantization_config of" in outcome.err


def test_help_lists_the_command(soloist) -> None:
    assert "quantize" in soloist("--help").out
    told = soloist("quantize", "--help").out
    assert "compressed-tensors" in told
    assert "--head-weights" in told
