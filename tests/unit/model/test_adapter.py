"""Adapters that do not fit, contradict themselves or ask for something else: one paragraph each."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from soloist.errors import (
    AdapterMismatch,
    AdapterNotFound,
    AdapterOnCodes,
    CheckpointError,
    ConfigError,
    MissingField,
    MissingFile,
    NotAModel,
    SettingError,
    SoloistError,
    TruncatedFile,
    UnsupportedAdapter,
    WrongType,
)
from soloist.model.adapter import Adapter, open_adapter
from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.families import read_config, tensors
from soloist.model.folder import find_adapter, find_model
from unit.model.adapters import WRAPPED, factors, modules_of, write_adapter
from unit.model.configurations import LANEFORMER_2B
from unit.model.tiny import described, random_tensors, write_single
from unit.weights.formats import FORMATS

ENDS = ("q_proj", "down_proj")
Q = f"{WRAPPED}model.layers.0.self_attn.q_proj"


def opened(
    folder: Path,
    held: Callable[[dict[str, Tensor]], object] = lambda _: None,
    *,
    changes: dict[str, Any] | None = None,
    **fields: Any,
) -> Adapter:
    """A tiny model's adapter, whose tensors and fields were changed."""
    _, specs = described(folder / "model", **(changes or {}))
    base = random_tensors(specs)
    write_single(folder / "model", base)
    made = factors(base, modules_of(base, *ENDS))
    held(made)
    write_adapter(folder / "adapter", made, **fields)
    checkpoint = open_checkpoint(folder / "model")
    checkpoint.check(specs)
    return open_adapter(folder / "adapter", checkpoint, specs)


def refused(kind: type[SoloistError], *given: Any, **more: Any) -> str:
    with pytest.raises(kind) as caught:
        opened(*given, **more)
    assert type(caught.value) is kind
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def test_facts_of_one_that_fits(tmp_path) -> None:
    adapter = opened(tmp_path)
    assert len(adapter.changes) == 4
    assert adapter.ranks == (4,)
    assert adapter.num_bytes == 4 * 2 * 4 * (12 + 24 + 20 + 12)
    (change,) = {c.low_rank.scale for c in adapter.changes.values() if c.low_rank is not None}
    assert change == 4.0


@pytest.mark.parametrize(
    "targets",
    [
        ["self_attn.q_proj", "mlp.down_proj"], r".*\.(q|down)_proj",
        [f"model.layers.{i}.{m}" for i in (0, 1) for m in ("self_attn.q_proj", "mlp.down_proj")],
    ],
)  # fmt: skip
def test_targets_are_names_ends_or_a_pattern(tmp_path, targets) -> None:
    assert len(opened(tmp_path, target_modules=targets).changes) == 4


def only(layer: int, made: dict[str, Tensor]) -> None:
    for name in [name for name in made if f".layers.{layer}." not in name]:
        del made[name]


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [1]}, {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"exclude_modules": r"model\.layers\.0\..*"},
        {"exclude_modules": ["layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]},
    ],
)  # fmt: skip
def test_some_layers(tmp_path, fields) -> None:
    adapter = opened(tmp_path, lambda made: only(1, made), **fields)
    assert len(adapter.changes) == 2
    assert all(".layers.1." in name for name in adapter.changes)


def test_fields_that_change_nothing(tmp_path) -> None:
    opened(
        tmp_path, task_type=None, init_lora_weights="gaussian", a_new_kind=None, another=False,
        one_more={}, auto_mapping={"base_model_class": "LlamaForCausalLM"}, lora_dropout=0.5,
        eva_config={"rho": 2.0},
    )  # fmt: skip


# --- another kind of adapter ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3'.*allowed: LORA"),
        ({"bias": "lora_only"}, "'bias' is 'lora_only'.*'none'"),
        ({"lora_bias": True}, "'lora_bias' is True.*False"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is True"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16'.*allowed: True, False, 'gauss"),
        ({"init_lora_weights": "olora"}, "'olora'"),
        ({"use_qalora": True}, "'use_qalora' is True.*absent or null"),
        ({"alora_invocation_tokens": [1]}, r"'alora_invocation_tokens' is \[1\]"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices'"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication'"),
        ({"target_parameters": ["x"]}, "'target_parameters'"),
        ({"a_new_kind": {"x": 1}}, "'a_new_kind' is"),
        ({"target_modules": ["q_proj", "c_attn"]}, "'target_modules' is 'c_attn'.*up_proj"),
        ({"target_modules": "h.*"}, r"'target_modules' is 'h\.\*'"),
        ({"modules_to_save": ["score"]}, "'modules_to_save' is 'score'"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "'layers_to_transform'"),
    ],
)
def test_what_is_not_merged_is_named(tmp_path, fields, words) -> None:
    with pytest.raises(UnsupportedAdapter, match=words) as caught:
        opened(tmp_path, **fields)
    assert "merge_and_unload" in caught.value.hint
    assert "adapter_config.json" in caught.value.message


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("field", ["target_modules", "modules_to_save"])
def test_a_tied_head_and_its_embedding_are_left_alone(tmp_path, field, name) -> None:
    names = [*ENDS, name] if field == "target_modules" else [name]
    seen = refused(
        UnsupportedAdapter, tmp_path, changes={"tie_word_embeddings": True}, **{field: names}
    )
    assert f"'{field}' is '{name}'" in seen
    assert "one matrix in this model" in seen


def test_a_tied_head_is_no_matrix_of_a_layer(tmp_path) -> None:
    changes = {"tie_word_embeddings": True}
    seen = refused(AdapterMismatch, tmp_path, changes=changes, target_modules="all-linear")
    assert "gate_proj.lora_A.weight' is missing" in seen  # not one of the head


def test_lengths_of_an_embedding(tmp_path) -> None:
    seen = refused(UnsupportedAdapter, tmp_path, target_modules=["embed_tokens"], use_dora=True)
    assert "'use_dora' is True" in seen


# --- files that contradict each other or the model -----------------------------------------------


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda made: made.update({new: made.pop(old)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.pop(f"{Q}.lora_A.weight"), r"q_proj\.lora_A\.weight' is missing"),
        (lambda made: made.pop(f"{Q}.lora_B.weight"), r"q_proj\.lora_B\.weight' is missing"),
        (lambda made: only(1, made), r"layers\.0.*lora_A\.weight' is missing"),
        (
            renamed(f"{Q}.lora_A.weight", f"{Q}.lora_A.default.weight"),
            r"lora_A\.default\.weight' belongs to no module",
        ),
        (
            renamed(f"{Q}.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_A.weight"),
            "belongs to no module.*base_model.model",
        ),
        (
            lambda made: made.update({f"{WRAPPED}score.weight": torch.ones(2, 12)}),
            r"score\.weight' belongs to no module",
        ),
        (
            lambda made: made.update({f"{WRAPPED}model.layers.9.mlp.down_proj.lora_A.weight": Q9}),
            r"layers\.9.*belongs to no module",
        ),
        (
            lambda made: made.update({f"{WRAPPED}model.norm.weight": torch.ones(12)}),
            r"norm\.weight' is there, but modules_to_save",
        ),
        (
            lambda made: made.update(
                {
                    name.replace("q_proj", "k_proj"): values.clone()
                    for name, values in made.items()
                    if "q_proj" in name
                }
            ),
            r"factors of 'model\.layers\.0\.self_attn\.k_proj', which target_modules",
        ),
        (
            lambda made: made.update(
                {
                    f"{WRAPPED}model.layers.0.self_attn.q_proj.{end}weight": torch.ones(24, 12)
                    for end in ("", "base_layer.")
                }
            ),
            r"it holds '.*q_proj\.(base_layer\.)?weight' and '.*q_proj\.",
        ),
        (
            lambda made: made.update({f"{Q}.lora_magnitude_vector": torch.ones(24)}),
            "lora_magnitude_vector' is there",
        ),
        (
            lambda made: made.update({f"{Q}.lora_B.weight": torch.ones(24, 3)}),
            r"has shape \[24, 3\]; the model and adapter_config.json call for \[24, 4\]",
        ),
        (
            lambda made: made.update({f"{Q}.lora_A.weight": torch.ones(4, 16)}),
            r"has shape \[4, 16\].*\[4, 12\]",
        ),
        (
            lambda made: made.update({f"{Q}.lora_A.weight": torch.ones(4, 12, dtype=torch.int8)}),
            "stored as I8",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, words) -> None:
    seen = refused(AdapterMismatch, tmp_path, change)
    assert re.search(words, seen), seen
    assert "adapter_model.safetensors" in seen


Q9 = torch.ones(4, 20)


def test_the_model_that_it_was_trained_on_is_named(tmp_path) -> None:
    with pytest.raises(AdapterMismatch) as caught:
        opened(tmp_path, lambda made: made.pop(f"{Q}.lora_A.weight"))
    assert "'owner/base'" in caught.value.hint


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 8}, r"has shape \[4, 20\].*\[8, 20\]"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj\.lora_A.*has shape \[4, 12\].*\[2, 12\]"),
        ({"use_dora": True}, "lora_magnitude_vector' is missing"),
        ({"modules_to_save": ["lm_head"]}, r"lm_head\.weight' is missing"),
        ({"target_modules": [*ENDS, "v_proj"]}, r"v_proj\.lora_A\.weight' is missing"),
        ({"target_modules": ["q_proj"]}, "which target_modules in adapter_config.json"),
    ],
)
def test_fields_that_contradict_the_tensors(tmp_path, fields, words) -> None:
    seen = refused(AdapterMismatch, tmp_path, **fields)
    assert re.search(words, seen), seen


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"r": None}, MissingField), ({"r": 0}, WrongType), ({"r": 1.5}, WrongType),
        ({"lora_alpha": None}, MissingField), ({"lora_alpha": -1}, WrongType),
        ({"lora_alpha": float("nan")}, WrongType), ({"peft_type": None}, MissingField),
        ({"target_modules": None}, WrongType), ({"target_modules": []}, WrongType),
        ({"target_modules": [1]}, WrongType), ({"target_modules": "("}, WrongType),
        ({"target_modules": r"(\w+\.?)+X"}, WrongType), ({"use_dora": "yes"}, WrongType),
        ({"rank_pattern": {"(a*)*": 2}}, WrongType), ({"rank_pattern": {"q": "2"}}, WrongType),
        ({"alpha_pattern": []}, WrongType), ({"modules_to_save": "lm_head"}, WrongType),
        ({"exclude_modules": 3}, WrongType), ({"layers_to_transform": [-1]}, WrongType),
    ],
)  # fmt: skip
def test_fields_of_a_wrong_type(tmp_path, fields, kind) -> None:
    refused(kind, tmp_path, **fields)


def test_a_family_whose_matrices_have_lanes(tmp_path) -> None:
    opened(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LANEFORMER_2B))
    specs = tensors(read_config(tmp_path / "config.json"))
    with pytest.raises(SettingError, match=r"--adapter is .*whose matrices have 3 dimensions"):
        open_adapter(tmp_path / "adapter", Checkpoint(tmp_path, {}), specs)


# --- folders -------------------------------------------------------------------------------------


def test_folders_without_the_files(tmp_path) -> None:
    with pytest.raises(AdapterNotFound, match="no adapter 'x'"):
        find_adapter("x")
    with pytest.raises(AdapterNotFound):
        find_adapter("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(MissingFile, match=r"no adapter_config\.json") as caught:
        find_adapter(str(tmp_path / "model"))
    assert "give it as MODEL" in caught.value.hint
    with pytest.raises(CheckpointError, match="is a file; an adapter is a folder"):
        find_adapter(str(tmp_path / "model" / "config.json"))


@pytest.mark.parametrize("other", [None, "adapter_model.bin"])
def test_a_folder_without_weights(tmp_path, other) -> None:
    opened(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    if other is None:
        file.unlink()
    else:
        file.rename(file.with_name(other))
    assert find_adapter(str(tmp_path / "adapter")) == tmp_path / "adapter"
    with pytest.raises(MissingFile, match=r"no adapter_model\.safetensors") as caught:
        open_again(tmp_path)
    assert ("is an older form" in caught.value.hint) is (other is not None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adapter_model.safetensors", TruncatedFile), ("adapter_config.json", ConfigError)],
)
def test_files_that_are_cut_off(tmp_path, name, kind) -> None:
    opened(tmp_path)
    file = tmp_path / "adapter" / name
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(kind, match=name):
        open_again(tmp_path)


def open_again(folder: Path) -> Adapter:
    _, specs = described(folder / "model")
    return open_adapter(folder / "adapter", open_checkpoint(folder / "model"), specs)


def test_an_adapter_in_a_models_place_says_which_option_takes_it(tmp_path) -> None:
    opened(tmp_path)
    with pytest.raises(NotAModel, match="an adapter of 'owner/base'") as caught:
        find_model(str(tmp_path / "adapter"))
    assert "with --adapter" in caught.value.hint


# --- quantised models ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_16_bits", [False, True])
def test_a_matrix_of_codes_is_refused_and_one_in_16_bits_is_not(tmp_path, in_16_bits) -> None:
    form = next(form for form in FORMATS if form.name == "fp8-listed")
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    _, specs = described(tmp_path / "model", **sizes, quantization_config=form.config)
    base, stored = random_tensors(specs), {}
    for name, values in base.items():
        is_matrix = values.dim() == 2 and "embed" not in name
        tensors = form.of(name.removesuffix(".weight"), values)[0] if is_matrix else {name: values}
        stored |= tensors
    save_file(stored, tmp_path / "model" / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model")
    checkpoint.check(specs)
    plain = {
        source.name
        for spec in specs
        for source, matrix in zip(spec.sources, checkpoint.matrices(spec), strict=True)
        if matrix is None and "layers" in source.name and "_proj" in source.name
    }
    assert plain
    chosen = min(n for n in base if "_proj.weight" in n and (n in plain) is in_16_bits)
    module = chosen.removesuffix(".weight")
    write_adapter(tmp_path / "adapter", factors(base, [module]), target_modules=[module])
    if in_16_bits:
        assert set(open_adapter(tmp_path / "adapter", checkpoint, specs).changes) == {chosen}
        return
    with pytest.raises(AdapterOnCodes, match="which the model stores as fp8") as caught:
        open_adapter(tmp_path / "adapter", checkpoint, specs)
    assert "16-bit checkpoint" in caught.value.hint
