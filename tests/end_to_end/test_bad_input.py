"""Everything a user can get wrong ends in one paragraph, a hint and a non-zero status."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from soloist.bench.subject import shape_dtype
from soloist.cli import main
from soloist.engine import engine as engine_module
from soloist.errors import SettingError


def assert_refused(outcome: Any, *facts: str, status: int = 2) -> None:
    assert outcome.status == status
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    told, _, error = outcome.err.partition("error: ")
    assert told == "" or (told.count("\n") == 1 and "loaded" in told)
    message, _, hint = error.partition("\n\nhint: ")
    assert message
    assert "\n" not in message, "one paragraph"
    assert hint.strip()
    for fact in facts:
        assert fact in outcome.err


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name, value in fields.items():
        if value is ...:
            del config[name]
        else:
            config[name] = value
    file.write_text(json.dumps(config))


def change_tensor(folder: Path, name: str, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file({k: v for k, v in tensors.items() if v is not None}, file)


def ask(soloist: Any, model: object, *more: object) -> Any:
    return soloist("run", model, "--prompt", "def f():", "-n", 2, "--device", "cpu", *more)


def test_missing_folder(soloist, tmp_path):
    assert_refused(ask(soloist, tmp_path / "nothing"), "nothing", "etude")


def test_empty_folder(soloist, tmp_path):
    assert_refused(ask(soloist, tmp_path), "is empty", "config.json")


def test_folder_without_config(soloist, etude):
    (etude / "config.json").unlink()
    assert_refused(ask(soloist, etude), "config.json", "model.safetensors")


def test_file_instead_of_folder(soloist, etude):
    assert_refused(ask(soloist, etude / "config.json"), "is a file")


def test_hub_model_that_is_not_cached_offline(soloist, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert_refused(ask(soloist, "nobody/nothing"), "nobody/nothing", "local cache")


def test_unknown_family(soloist, etude):
    change_config(etude, model_type="mamba2")
    assert_refused(ask(soloist, etude), "mamba2", "qwen3")


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "rms_norm_eps"])
def test_config_with_a_missing_field(soloist, etude, field):
    change_config(etude, **{field: ...})
    assert_refused(ask(soloist, etude), field)


@pytest.mark.parametrize("value", ["wide", -1, 1.5, True, [128]])
def test_config_with_a_mistyped_field(soloist, etude, value):
    change_config(etude, hidden_size=value)
    assert_refused(ask(soloist, etude), "hidden_size", repr(value), "whole number")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attn_logit_softcapping", 50.0),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
    ],
)
def test_config_with_an_unsupported_field(soloist, etude, field, value):
    change_config(etude, **{field: value})
    if field == "rope_scaling":
        change_config(etude, rope_parameters=None, rope_theta=1e5)
    assert_refused(ask(soloist, etude), field.removesuffix("_scaling"))


def test_an_unknown_field_passes_once_it_is_accepted(soloist, etude, tmp_path):
    change_config(etude, made_by="me")
    assert_refused(ask(soloist, etude), "--accept-field made_by")
    accepted = ask(soloist, etude, "--accept-field", "made_by")
    assert accepted.status == 0
    assert "accepted fields: made_by" in accepted.err
    told = soloist("info", etude, "--accept-field", "made_by")
    assert "accepted fields" in told.out
    planned = soloist("plan", etude, "--hardware", "H200", "--accept-field", "made_by")
    assert planned.status == 0
    assert "accepted fields of config.json: made_by" in planned.err
    more = ("--weights", "int8", "-o", tmp_path / "copy", "--accept-field", "made_by")
    assert soloist("quantize", etude, *more).status == 0
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["made_by"] == "me"
    more = ("--prompt-tokens", 4, "--runs", 1, "--prefix", "cold", "--device", "cpu")
    measured = soloist("bench", "prefill", etude, *more, "--accept-field", "made_by")
    assert measured.status == 0


def test_a_known_field_does_not_pass(soloist, etude):
    assert_refused(ask(soloist, etude, "--accept-field", "hidden_size"), "'hidden_size'")
    change_config(etude, hidden_act="gelu")
    assert_refused(ask(soloist, etude, "--accept-field", "hidden_act"), "does not accept it")
    shape = ("bench", "decode", "--shape", etude / "config.json", "--accept-field", "x")
    assert_refused(soloist(*shape), "--accept-field", "only without --shape")


def test_a_plan_of_a_file_that_is_not_there(soloist, etude):
    refused = soloist("plan", "--config", etude / "missing.json", "--hardware", "H200")
    assert_refused(refused, "--config", "missing.json", "that exists")
    refused = soloist("plan", "--config", etude, "--hardware", "H200")
    assert_refused(refused, str(etude / "config.json"))


def test_an_eos_id_outside_the_vocabulary(soloist, etude):
    (etude / "generation_config.json").write_text('{"eos_token_id": 10000000}')
    assert_refused(ask(soloist, etude), "generation_config.json", "eos_token_id", "10000000")
    assert_refused(soloist("info", etude), "eos_token_id", "10000000")


def test_names_out_of_files_cannot_steer_the_terminal(soloist, etude):
    change_config(etude, **{"\x1b[2Jfield": "\x1b]0;title\x07"})
    outcome = ask(soloist, etude)
    assert_refused(outcome, "'\\x1b[2Jfield' is '\\x1b]0;title\\x07'")
    assert "\x1b" not in outcome.err


def test_a_folders_name_cannot_steer_the_terminal(soloist, etude):
    renamed = etude.rename(etude.parent / "\x1b[31mred")
    for outcome in (soloist("info", renamed), soloist("plan", renamed, "--hardware", "H200")):
        assert outcome.status == 0
        assert "\x1b" not in outcome.out
        assert "\\x1b[31mred" in outcome.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk(soloist, etude, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        outcome = soloist("info", etude)
        monkeypatch.undo()
        assert_refused(outcome, "the output cannot be written: No space left", status=3)
        with suppress(OSError):
            full.close()
    outcome = soloist("bench", "bandwidth", "--device", "cpu", "-o", "/dev/full")
    assert_refused(outcome, "/dev/full cannot be written: No space left", status=3)


def test_an_output_that_is_a_folder(soloist, tmp_path):
    outcome = soloist("bench", "bandwidth", "--device", "cpu", "-o", tmp_path)
    assert_refused(outcome, f"{tmp_path} cannot be written: Is a directory", status=3)


def test_config_that_is_not_json(soloist, etude):
    (etude / "config.json").write_text("{")
    assert_refused(ask(soloist, etude), "config.json", "JSON")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_safetensors(soloist, etude, kept):
    file = etude / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert_refused(ask(soloist, etude), "model.safetensors", "damaged")


def test_missing_shard(soloist, etude):
    tensors = load_file(etude / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, etude / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (etude / "model.safetensors.index.json").write_text(json.dumps(index))
    (etude / "model.safetensors").unlink()
    assert ask(soloist, etude).status == 0
    (etude / "model-00002-of-00002.safetensors").unlink()
    assert_refused(ask(soloist, etude), "model-00002-of-00002.safetensors")


def test_tensor_of_the_wrong_shape(soloist, etude):
    change_tensor(etude, "model.norm.weight", lambda t: t[:-1].clone())
    assert_refused(ask(soloist, etude), "model.norm.weight", "shape")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_tensor_with_values_that_are_not_finite(soloist, etude, bad):
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[7] = bad
        return tensor

    change_tensor(etude, "model.layers.0.mlp.up_proj.weight", spoil)
    assert_refused(ask(soloist, etude), "model.layers.0.mlp.up_proj.weight", "1 NaN")


def test_tensor_that_is_missing(soloist, etude):
    change_tensor(etude, "model.norm.weight", lambda _: None)
    assert_refused(ask(soloist, etude), "model.norm.weight", "lacks")


def test_tokenizer_missing(soloist, etude):
    (etude / "tokenizer.json").unlink()
    assert_refused(ask(soloist, etude), "tokenizer.json")


def test_prompt_longer_than_the_context(soloist):
    outcome = soloist("run", "etude-draft", "--prompt", "x = 1\n" * 40, "--context", 50, "-n", 1)
    assert_refused(outcome, "context holds 50", "not truncated")


def test_more_new_tokens_than_room(soloist):
    outcome = soloist("run", "etude-draft", "--prompt", "x = 1", "--context", 50, "-n", 60)
    assert_refused(outcome, "60 new tokens", "at most")


def test_empty_prompt(soloist):
    assert_refused(soloist("run", "etude-draft", "--prompt", ""), "prompt is empty")
    assert_refused(soloist("run", "etude-draft", "--prompt", "-", stdin=b""), "prompt is empty")


def test_prompt_that_is_not_utf8(soloist):
    assert_refused(soloist("run", "etude-draft", "--prompt", "-", stdin=b"\xff\xfe"), "UTF-8")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "1", "--top-p", "1.5"), "top_p"),
        (("--temperature", "1", "--top-k", "0"), "top_k"),
        (("--top-k", "40"), "top_k"),
        (("--seed", "7"), "seed"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--repetition-penalty", "0"), "repetition_penalty"),
        (("--stop", ""), "stop"),
        (("--logit-bias", "999999:1"), "999999"),
        (("--logit-bias", "x"), "logit-bias"),
    ],
)
def test_contradictory_or_impossible_sampling(soloist, options, named):
    assert_refused(soloist("run", "etude-draft", "--prompt", "x", *options), named)


def test_model_larger_than_memory(soloist, monkeypatch):
    monkeypatch.setattr(engine_module, "available_memory_bytes", lambda: 301 * 10**6)
    assert_refused(ask(soloist, "etude"), "nothing was allocated", "billion parameters", status=3)


def test_context_larger_than_memory_names_the_one_that_fits(soloist, monkeypatch):
    monkeypatch.setattr(engine_module, "available_memory_bytes", lambda: 400 * 10**6)
    outcome = ask(soloist, "etude", "--context", 65_536)
    assert_refused(outcome, "--context", status=3)
    fitting = outcome.err.rsplit("--context ", 1)[1].strip()
    assert ask(soloist, "etude", "--context", fitting).status == 0


@pytest.mark.parametrize("context", [0, 65_537])
def test_context_outside_the_model(soloist, context):
    assert_refused(ask(soloist, "etude-draft", "--context", context), "context", "65,536")


def test_device_that_is_not_there(soloist):
    assert_refused(
        soloist("run", "etude-draft", "-p", "x", "--device", "cuda:9"), "cuda:9", "cpu", status=3
    )


SHAPE = Path(__file__).parents[2] / "src/soloist/models/etude/config.json"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("etude-draft", "--device", "cpu", "--columns", 2), ("--columns", "on a GPU only")),
        (("etude-draft", "--columns", 9), ("--columns", "at most 8")),
        (("--columns", 2, "--against", "transformers"), ("--against", "--columns")),
        (("etude-draft", "--sequences", 9), ("--sequences", "at most 8")),
        (("--sequences", 3, "--prompt-tokens", 2), ("--sequences", "at most 2", "beginnings")),
        (("--sequences", 2, "--columns", 2), ("--columns", "--sequences")),
        (("--sequences", 2, "--against", "transformers"), ("--against", "--sequences")),
        (("--sequences", 2, "--text", "story.txt"), ("--text", "--sequences")),
        (("--sequences", 0), ("--sequences", "0")),
        (("--context", 100), ("--context", "--shape")),
        (("etude", "--shape", SHAPE), ("MODEL", "etude")),
        (("--shape", SHAPE, "--against", "transformers"), ("--against",)),
        (("--shape", SHAPE, "--columns", 3, "--sequences", 3), ("--columns", "9", "8")),
        (("--shape", SHAPE, "--columns", 0), ("--columns", "0")),
        (("--shape", SHAPE, "--context", 0), ("--context", "0")),
        (("--shape", SHAPE, "--context", 65_500), ("--context", "65,536")),
        (("--shape", SHAPE, "--new-tokens", 5000), ("--new-tokens", "4096")),
        (("--shape", SHAPE, "--device", "cpu", "--columns", 2), ("--columns", "on a GPU only")),
        (("--shape", SHAPE, "--device", "cpu", "--sequences", 2), ("--sequences", "GPU only")),
        (("--shape", "nowhere.json"), ("nowhere.json",)),
    ],
)
def test_shapes_that_cannot_be_measured(soloist, options, named):
    assert_refused(soloist("bench", "decode", *options), *named)


def test_a_shape_has_16_bits_on_a_gpu():
    with pytest.raises(SettingError, match="--precision") as caught:
        shape_dtype("fp32", torch.device("cuda:0"))
    assert "bf16" in caught.value.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
@pytest.mark.parametrize("device", [(), ("--device", "cuda")], ids=["auto", "cuda"])
@pytest.mark.parametrize(
    ("command", "otherwise"),
    [
        (("trace", "--shape", SHAPE), "soloist trace --from"),
        (("trace", "--shape", SHAPE, "--ablations"), "soloist trace --from"),
        (("trace", "etude"), "soloist trace --from"),
    ],
)
def test_what_needs_a_gpu_without_one(soloist, command, otherwise, device):
    outcome = soloist(*command, *device)
    assert_refused(outcome, "'cuda'", "available: cpu", "needs an NVIDIA GPU", otherwise, status=3)
    assert "leave --device out" not in outcome.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--from", "a.json", "--shape", SHAPE), ("--shape", "--from")),
        (("etude", "--from", "a.json"), ("MODEL", "--from")),
        (("--from", "a.json", "--round", 4), ("--round", "--from")),
        (("--from", "nowhere.json"), ("nowhere.json", "soloist trace MODEL")),
        (("--from", SHAPE), ("config.json", "not a trace")),
        (("etude", "--shape", SHAPE), ("MODEL", "--shape")),
        (("--context", 100), ("--context", "--shape")),
        (("--ablations", "--picture", "x.svg"), ("--picture", "--ablations")),
        (("--round", 0), ("--round", "at least 1")),
        (("--round", 5000), ("--round", "4000")),
        (("--device", "cpu"), ("--device", "cuda")),
        (("--shape", SHAPE, "--precision", "fp8"), ("--precision", "bf16")),
        (("--from", "a.json", "--weights", "int4"), ("--weights", "--from")),
        (("--head-weights", "int3"), ("--head-weights", "int3", "int4")),
    ],
)
def test_traces_that_cannot_be_made(soloist, options, named):
    assert_refused(soloist("trace", *options), *named)


def test_accuracy_against_what_is_not_there(soloist):
    asked = ("bench", "accuracy", "etude-draft", "--against")
    assert_refused(soloist(*asked, "vllm"), "'vllm'", "transformers, unquantised")
    assert_refused(soloist(*asked, "unquantised"), "only with --weights", "--weights int4")


def test_unknown_precision(soloist):
    assert_refused(ask(soloist, "etude-draft", "--precision", "int3"), "int3", "bf16")


def test_setting_that_makes_no_sense(soloist, monkeypatch):
    monkeypatch.setenv("SOLOIST_THREADS", "many")
    assert_refused(ask(soloist, "etude-draft"), "SOLOIST_THREADS", "many")


def test_model_without_a_chat_template(soloist, etude):
    file = etude / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    (etude / "chat_template.jinja").unlink(missing_ok=True)
    assert_refused(soloist("chat", etude, stdin=b"hello\n"), "chat template")


def test_fill_in_the_middle_without_its_tokens(soloist, etude):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = etude / name
        file.write_text(file.read_text().replace("fim_", "gap_"))
    assert_refused(ask(soloist, etude, "--suffix", "return x"), "fill")


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(Exception, match="is empty"):
        main(["run", str(tmp_path), "--prompt", "x", "--debug"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gpus", 3), "--gpus is '3' (allowed: 1, 2, 4, 8, auto)"),
        (("--gpus", 2, "--device", "cpu"), "--gpus is 2 (allowed: 1 or auto without a GPU)"),
    ],
)
def test_numbers_of_gpus(soloist, options, told) -> None:
    done = soloist("run", "etude-draft", "-p", "x", "-n", 1, *options)
    assert done.status == 2
    assert told in done.err
