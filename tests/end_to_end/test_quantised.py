"""Commands on a folder of quantised weights."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from end_to_end.test_bad_input import assert_refused, change_config, change_tensor
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


Q = "model.layers.0.self_attn.q_proj"


def packed(**weights: object) -> dict[str, object]:
    """The configuration of `quantise`, with other fields of its weights."""
    (form,) = (form for form in FEW if form.name == "pack-quantized")
    config = json.loads(json.dumps(form.config))
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (packed(group_size=0), ("weights.group_size", "0", "above 0")),
        (packed(group_size=2**31), ("weights.group_size", "2147483648", "at most")),
        (packed(group_size="128"), ("weights.group_size", "'128'", "a whole number")),
        (packed(strategy="channel"), ("weights.group_size", "32", "absent in strategy channel")),
        (packed(num_bits="4"), ("weights.num_bits", "'4'", "4, 8")),
        (packed() | {"ignore": [r"re:(\w+\.?)+X"]}, ("ignore", "a repeat within a repeat")),
        (packed() | {"ignore": ["y" * 5000, 1]}, ("ignore", "yyy…", "a list of names")),
        ({"quant_method": "awq"}, (Q, "weight_packed in I32", "qweight of int4 (awq")),
    ],
    ids=lambda value: None if isinstance(value, dict) else " ".join(value)[:30],
)
def test_configurations_that_cannot_be_used(soloist, etude, monkeypatch, config, facts):
    monkeypatch.setattr("soloist.engine.engine.load_ranks", None)  # refused before
    quantise(etude, next(form for form in FEW if form.name == "pack-quantized"))
    change_config(etude, quantization_config=config)
    for command in (("info",), ("run", "-p", "a", "--device", "cpu")):
        outcome = soloist(command[0], etude, *command[1:])
        assert_refused(outcome, *facts)
        assert len(outcome.err) < 1000


@pytest.mark.parametrize(
    ("name", "change", "facts"),
    [
        ("weight_scale", lambda t: t.fill_(float("nan")), ("NaN or infinite",)),
        ("weight_shape", lambda t: t + 1, ("config.json calls for",)),
        ("weight_scale", lambda t: t[:, :1].clone(), ("has shape", "calls for")),
        ("weight_packed", lambda _: None, ("calls for weight_packed of int4",)),
        ("weight_packed", lambda t: t.to(float), ("F64", "I32")),
    ],
    ids=["nan", "another shape", "too few scales", "no codes", "codes in fp64"],
)
def test_parts_that_cannot_be_used(soloist, etude, name, change, facts):
    quantise(etude, next(form for form in FEW if form.name == "pack-quantized"))
    change_tensor(etude, f"{Q}.{name}", change)
    outcome = soloist("run", etude, "-p", "a", "-n", 1, "--device", "cpu")
    assert_refused(outcome, Q, *facts)
