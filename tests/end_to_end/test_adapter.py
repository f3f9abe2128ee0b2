"""`--adapter` on the command line: the tokens of a merged folder, what is said, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from unit.model.adapters import WRAPPED, factors, modules_of, write_adapter

ENDS = ["q_proj", "v_proj", "up_proj", "down_proj"]


@pytest.fixture
def adapter(etude, tmp_path) -> Path:
    base = load_file(etude / "model.safetensors")
    held = {name: v * 0.15 for name, v in factors(base, modules_of(base, *ENDS)).items()}
    return write_adapter(tmp_path / "more", held, target_modules=ENDS)


@pytest.fixture
def merged(etude, adapter, tmp_path) -> Path:
    """The model and the adapter as one folder, by the definition."""
    folder = tmp_path / "merged"
    folder.mkdir()
    for file in etude.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    base, held = load_file(etude / "model.safetensors"), load_file(adapter / WEIGHTS)
    for name in [name for name in held if "lora_A" in name]:
        a, b = held[name].double(), held[name.replace("lora_A", "lora_B")].double()
        module = name.removeprefix(WRAPPED).replace("lora_A.", "")
        base[module] = (base[module].double() + 4 * b @ a).float().bfloat16()
    save_file(base, folder / "model.safetensors")
    return folder


WEIGHTS = "adapter_model.safetensors"


def tokens(soloist, *words: object, device: str = "cpu") -> list[int]:
    done = soloist(
        "run", *words, "-p", "def f(x):", "-n", 12, "--device", device, "--ignore-eos", "--json"
    )
    assert done.status == 0, done.err
    return json.loads(done.out)["token_ids"]


@pytest.mark.parametrize(
    "options",
    [("--precision", "bf16"), ("--weights", "int4", "--head-weights", "int8")],
    ids=["bf16", "rounded"],
)
def test_the_tokens_of_a_merged_folder(soloist, etude, adapter, merged, options):
    seen = tokens(soloist, etude, "--adapter", adapter, *options)
    assert seen == tokens(soloist, merged, *options)
    assert seen != tokens(soloist, etude, *options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--weights", "int4")], ids=["bf16", "int4"])
def test_the_decode_kernel_has_the_merged_weights(soloist, etude, adapter, merged, options):
    """Files are on their way to the GPU before the adapter is merged there."""
    seen = tokens(soloist, etude, "--adapter", adapter, *options, device="cuda")
    assert seen == tokens(soloist, merged, *options, device="cuda")
    assert seen != tokens(soloist, etude, *options, device="cuda")


def test_a_quantised_copy_of_both(soloist, etude, adapter, merged, tmp_path):
    for name, words in (("seen", (etude, "--adapter", adapter)), ("wanted", (merged,))):
        done = soloist("quantize", *words, "--weights", "int8", "-o", tmp_path / name)
        assert done.status == 0, done.err
    seen, wanted = (tmp_path / name / "model.safetensors" for name in ("seen", "wanted"))
    assert seen.read_bytes() == wanted.read_bytes()


def test_what_was_merged_is_said(soloist, etude, adapter):
    done = soloist("run", etude, "-p", "a", "-n", 1, "--device", "cpu", "--adapter", adapter)
    assert done.err.startswith("model + adapter more · qwen3 · ")
    done = soloist("chat", etude, "--device", "cpu", "--adapter", adapter, stdin=b"/exit\n")
    assert "model + adapter more" in done.err
    words = ("-p", "a", "-n", 1, "--device", "cpu", "--json")
    assert json.loads(soloist("run", etude, *words, "--adapter", adapter).out)["adapter"] == "more"
    assert json.loads(soloist("run", etude, *words).out)["adapter"] is None


def test_facts_without_loading(soloist, etude, adapter):
    facts = json.loads(soloist("info", etude, "--adapter", adapter, "--json").out)["adapter"]
    size = (adapter / WEIGHTS).stat().st_size
    assert facts["name"] == "more"
    assert facts["ranks"] == [4]
    assert 0.9 * size < facts["bytes"] < size
    shown = soloist("info", etude, "--adapter", adapter).out
    assert f"of rank 4, changes {facts['tensors']} tensors" in shown
    assert json.loads(soloist("info", etude, "--json").out)["adapter"] is None


def test_a_measurement_names_both(soloist, etude, adapter):
    words = ("bench", "decode", etude, "--adapter", adapter, "--device", "cpu")
    sizes = ("--prompt-tokens", 8, "--new-tokens", 4, "--runs", 1, "--json")
    (row,) = json.loads(soloist(*words, *sizes).out)
    assert row["shape"] == "model + more"
    done = soloist(*words, "--against", "transformers")
    assert done.status == 2
    assert "only without --adapter" in done.err
    shape = ("bench", "decode", "--shape", etude / "config.json", "--adapter", adapter)
    assert "only without --shape" in soloist(*shape).err


@pytest.mark.parametrize("command", ["run", "info", "quantize"])
def test_what_does_not_fit_ends_in_one_paragraph(soloist, etude, adapter, tmp_path, command):
    held = load_file(adapter / WEIGHTS)
    name = next(name for name in held if "lora_A" in name)
    save_file(held | {name: torch.ones(4, 16)}, adapter / WEIGHTS)
    more = {
        "run": ("-p", "a", "--device", "cpu"),
        "info": (),
        "quantize": ("--weights", "int8", "-o", tmp_path / "out"),
    }
    done = soloist(command, etude, "--adapter", adapter, *more[command])
    assert (done.status, done.out) == (2, "")
    assert "has shape [4, 16]; the model and adapter_config.json call for" in done.err
    assert done.err.count("\n\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["run", "quantize"])
def test_numbers_that_are_not_finite_are_told_before_loading(
    soloist, etude, adapter, tmp_path, command, monkeypatch
):
    held = load_file(adapter / WEIGHTS)
    name = next(name for name in held if "lora_B" in name)
    held[name][0, 0] = float("nan")
    save_file(held, adapter / WEIGHTS)
    monkeypatch.setattr("soloist.engine.engine.load_ranks", None)
    monkeypatch.setattr("soloist.weights.export._write_weights", None)
    more = ("-p", "a") if command == "run" else ("--weights", "int8", "-o", tmp_path / "out")
    done = soloist(command, etude, "--adapter", adapter, *more)
    assert done.status == 2
    assert "lora_B.weight' holds 1 NaN or infinite values" in done.err


def test_an_adapter_in_the_models_place(soloist, adapter):
    done = soloist("run", adapter, "-p", "a")
    assert done.status == 2
    assert "with --adapter" in done.err
