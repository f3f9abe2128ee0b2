"""Commands on a folder of quantised weights."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from unit.weights.formats import FORMATS, Format

FEW = [form for form in FORMATS if form.name in ("fp8-blocks", "pack-quantized")]


def quantise(folder: Path, form: Format, *, as_numbers: bool = False) -> None:
    """The shipped draft model in this format, or the numbers that it then stands for."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        tensors, numbers = form.of(name.removesuffix(".weight"), stored.pop(name).float())
        stored |= {name: numbers} if as_numbers else tensors
    save_file(stored, folder / "model.safetensors")
    if not as_numbers:
        config["quantization_config"] = form.config
        (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(params=FEW, ids=lambda form: form.name)
def form(request) -> Format:
    return request.param


def test_run_makes_the_text_of_the_numbers(soloist, etude, form):
    def tokens() -> list[int]:
        done = soloist("run", etude, "-p", "def f():", "-n", 12, "--device", "cpu", "--json")
        return json.loads(done.out)["token_ids"]

    before = load_file(etude / "model.safetensors")
    quantise(etude, form)
    seen = tokens()
    save_file(before, etude / "model.safetensors")
    config = json.loads((etude / "config.json").read_text())
    del config["quantization_config"]
    (etude / "config.json").write_text(json.dumps(config))
    quantise(etude, form, as_numbers=True)
    assert seen == tokens()
    assert len(seen) == 12


def test_info_says_the_format(soloist, etude, form):
    unquantised = json.loads(soloist("info", etude, "--json").out)
    quantise(etude, form)
    shown = soloist("info", etude)
    assert shown.status == 0
    (row,) = [line for line in shown.out.splitlines() if line.lstrip().startswith("weights")]
    assert "21 of 21 matrices" in row
    assert {"fp8-blocks": "fp8 (fp8: blocks of 48 × 40)"}.get(
        form.name, "int4 (pack-quantized: groups of 32)"
    ) in row
    assert "others bf16" in row
    facts = json.loads(soloist("info", etude, "--json").out)
    assert facts["stored_as"] == "bf16"
    # Blocks of 40 columns are none that the kernel reads.
    plain = facts["by_precision"]["bf16"]["streamed_bytes_per_token"]
    if form.name == "fp8-blocks":
        assert facts["kernel_bytes_per_token"] is None
    else:
        assert 0.5 * plain < facts["kernel_bytes_per_token"] < 0.8 * plain  # most is the embedding
        assert "as they are stored" in shown.out
    assert unquantised["kernel_bytes_per_token"] is None
    assert facts["checkpoint_bytes"] < unquantised["checkpoint_bytes"]
    assert facts["parameters"] == unquantised["parameters"]
    assert facts["by_precision"].keys() == unquantised["by_precision"].keys()
    for name, one in facts["by_precision"].items():
        assert one["weights_bytes"] == unquantised["by_precision"][name]["weights_bytes"]


def test_plan_reads_the_folder(soloist, etude, form):
    quantise(etude, form)
    done = soloist("plan", etude, "--hardware", "H200")
    assert done.status == 0, done.err
    assert "int4" in done.out


@pytest.mark.parametrize("command", ["run", "info"])
def test_a_format_that_is_not_read(soloist, etude, command):
    form = next(form for form in FEW if form.name == "pack-quantized")
    quantise(etude, form)
    config = json.loads((etude / "config.json").read_text())
    config["quantization_config"]["format"] = "nvfp4-pack-quantized"
    (etude / "config.json").write_text(json.dumps(config))
    options = ("--prompt", "a", "--device", "cpu") if command == "run" else ()
    done = soloist(command, etude, *options)
    assert done.status == 2
    assert done.out == ""
    message, _, hint = done.err.partition("\n\nhint: ")
    for fact in ("quantization_config.format", "nvfp4-pack-quantized", "pack-quantized, float-q"):
        assert fact in message
    assert "docs/formats.md" in hint
