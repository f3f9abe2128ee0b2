"""Adapters merged: the sum of the definition, and the bytes of a folder that holds the sum."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from soloist.errors import NotFinite
from soloist.model.adapter import Adapter, open_adapter
from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes
from soloist.model.tensors import TensorSpec
from soloist.weights import merging
from soloist.weights.choice import Rounding, choose
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, plan_export
from soloist.weights.loading import Destination, Source, load_ranks
from soloist.weights.memory import merging_bytes
from soloist.weights.reading import Forms, load_weights
from unit.model.adapters import WRAPPED, factors, modules_of, write_adapter
from unit.model.tiny import described, random_tensors, write_single

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 31,
}  # fmt: skip
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Made:
    """A tiny model and an adapter for it."""

    def __init__(
        self, folder: Path, ends: tuple[str, ...], dtype: torch.dtype = torch.float32, **fields: Any
    ) -> None:
        self.folder = folder / "model"
        self.config, self.specs = described(self.folder, **SIZES)
        self.base = {name: v.to(dtype) for name, v in random_tensors(self.specs).items()}
        write_single(self.folder, self.base)
        self.modules = modules_of(self.base, *ends)
        self.held = factors(self.base, self.modules)
        self.fields = {"target_modules": list(ends), **fields}
        self.place = folder / "adapter"

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.folder)

    def adapter(self) -> Adapter:
        write_adapter(self.place, self.held, **self.fields)
        return open_adapter(self.place, self.checkpoint, self.specs)

    def delta(self, module: str) -> Tensor:
        """B · A by the definition, in fp64."""
        a, b = (self.held[f"{WRAPPED}{module}.lora_{x}.weight"].double() for x in "AB")
        return b @ a

    def loaded(self, dtype: Dtype = Dtype.FP32) -> dict[str, Tensor]:
        forms = Forms(adapter=self.adapter())
        return load_weights(self.checkpoint, self.specs, dtype, CPU, forms=forms)

    def joined(self, sources: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the engine out of those of a file."""
        return {
            spec.name: torch.cat([sources[source.name] for source in spec.sources])
            for spec in self.specs
        }


def require_close(seen: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert seen.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(seen[name].double(), values.double(), rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [({}, 4.0), ({"use_rslora": True}, 8.0), ({"lora_alpha": 3}, 0.75)],
    ids=["plain", "stabilised", "alpha"],
)
def test_the_sum_is_that_of_the_definition(tmp_path, fields, scale) -> None:
    made = Made(tmp_path, ("q_proj", "down_proj"), **fields)
    wanted = {name: values.double() for name, values in made.base.items()}
    for module in made.modules:
        wanted[f"{module}.weight"] += scale * made.delta(module)
    assert len(made.modules) == 4
    require_close(made.loaded(), made.joined(wanted))


@pytest.mark.parametrize("ends", [LINEAR, ("q_proj",)], ids=["all", "one of three"])
def test_factors_reach_their_part_of_a_joined_matrix(tmp_path, ends) -> None:
    made = Made(tmp_path, ends)
    plain = load_weights(made.checkpoint, made.specs, Dtype.FP32, CPU)
    seen = made.loaded()
    touched = {name for name in plain if not torch.equal(plain[name], seen[name])}
    if ends == LINEAR:
        assert touched == {spec.name for spec in made.specs if spec.is_layer_matrix}
    else:
        assert touched == {"layers.0.qkv", "layers.1.qkv"}
        assert torch.equal(plain["layers.0.qkv"][128:], seen["layers.0.qkv"][128:])


def test_patterns_set_ranks_and_scales(tmp_path) -> None:
    made = Made(
        tmp_path, ("q_proj", "up_proj"),
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={r"^model\.layers\.0\..*": 1, "up_proj": 10, "q_proj": 5},
    )  # fmt: skip
    made.held |= factors(made.base, ["model.layers.1.self_attn.q_proj"], rank=2)
    wanted = {name: values.double() for name, values in made.base.items()}
    for module in made.modules:
        rank = 2 if module == "model.layers.1.self_attn.q_proj" else 4
        alpha = 1 if ".0." in module else 10 if "up" in module else 5
        wanted[f"{module}.weight"] += alpha / rank * made.delta(module)
    require_close(made.loaded(), made.joined(wanted))


def test_dora_gives_rows_their_lengths(tmp_path) -> None:
    made = Made(tmp_path, ("q_proj", "down_proj"), use_dora=True)
    wanted = {name: values.double() for name, values in made.base.items()}
    for module in made.modules:
        rows = wanted[f"{module}.weight"] + 4 * made.delta(module)
        lengths = torch.rand(len(rows), generator=torch.Generator().manual_seed(len(rows)))
        made.held[f"{WRAPPED}{module}.lora_magnitude_vector"] = lengths
        wanted[f"{module}.weight"] = rows / rows.norm(dim=1, keepdim=True) * lengths[:, None]
    require_close(made.loaded(), made.joined(wanted))


def test_an_embedding_and_a_head_of_their_own(tmp_path) -> None:
    """peft stores both matrices beside their factors, which belong to the embedding's transpose."""
    made = Made(tmp_path, ("lm_head",))
    table = "model.embed_tokens"
    made.fields["target_modules"] = ["lm_head", "embed_tokens"]
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(4, 31, generator=generator), torch.randn(64, 4, generator=generator)
    made.held |= {
        f"{WRAPPED}{table}.lora_embedding_A": a,
        f"{WRAPPED}{table}.lora_embedding_B": b,
        f"{WRAPPED}{table}.base_layer.weight": made.base[f"{table}.weight"] + 1,
        f"{WRAPPED}lm_head.base_layer.weight": made.base["lm_head.weight"].clone(),
    }
    wanted = {name: values.double() for name, values in made.base.items()}
    wanted["lm_head.weight"] += 4 * made.delta("lm_head")
    wanted[f"{table}.weight"] += 1 + 4 * (b.double() @ a.double()).T
    require_close(made.loaded(), made.joined(wanted))


def test_modules_that_were_trained_as_a_whole(tmp_path) -> None:
    made = Made(tmp_path, ("q_proj",), torch.bfloat16, modules_to_save=["lm_head", "norm"])
    # peft takes every module whose name ends so: norms of layers are called 'input_layernorm'.
    whole = [n for n in made.base if n.endswith(("lm_head.weight", "norm.weight"))]
    assert len(whole) == 6
    for name in whole:
        made.held[WRAPPED + name] = torch.rand(made.base[name].shape)  # in fp32, as it is trained
    seen = made.loaded()
    wanted = made.joined(made.base | {n: made.held[WRAPPED + n] for n in whole})
    for name in ("head", "final_norm", "layers.0.mlp_norm"):
        assert torch.equal(seen[name], wanted[name].bfloat16().float())


def test_rows_at_a_time_change_nothing(tmp_path, monkeypatch) -> None:
    made = Made(tmp_path, LINEAR, torch.bfloat16)
    whole = made.loaded()
    monkeypatch.setattr(merging, "MERGED_AT_ONCE", 200)
    some = made.loaded()
    assert all(torch.equal(whole[name], some[name]) for name in whole)


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda d: d.value)
def test_it_is_rounded_once_to_the_type_of_the_files(tmp_path, dtype) -> None:
    """So every precision of a run has the numbers of a merged folder."""
    made = Made(tmp_path, ("q_proj",), torch.bfloat16)
    made.held = {name: values * 2**-9 for name, values in made.held.items()}
    seen = made.loaded(dtype)["layers.0.qkv"][:128]
    module = "model.layers.0.self_attn.q_proj"
    exact = made.base[f"{module}.weight"].double() + 4 * made.delta(module)
    wanted = exact.float().bfloat16()
    assert not torch.equal(wanted, made.base[f"{module}.weight"])
    assert torch.equal(seen, wanted.to(seen.dtype))


# --- one place on the way of a weight ------------------------------------------------------------


def merged_folder(made: Made, folder: Path) -> Path:
    """The model with what the adapter makes of it, as a folder."""
    described(folder, **SIZES)
    adapter = made.adapter()
    stored = {
        name: merging.merged(name, values, adapter.changes[name], CPU)
        if name in adapter.changes
        else values
        for name, values in load_file(made.folder / "model.safetensors").items()
    }
    write_single(folder, stored)
    return folder


def source(
    folder: Path, config: ModelConfig, specs: tuple[TensorSpec, ...], to: Rounding
) -> Source:
    checkpoint = open_checkpoint(folder)
    chosen = choose(checkpoint, config, specs, to)
    return Source(checkpoint, chosen.config, chosen.specs, chosen.stored, chosen.rounding)


@pytest.mark.parametrize("rounding", [None, Codes.INT4, Codes.FP8], ids=["plain", "int4", "fp8"])
@pytest.mark.parametrize(("ranks", "for_kernel"), [(1, False), (1, True), (2, True)])
def test_every_rank_has_the_bytes_of_a_merged_folder(tmp_path, ranks, for_kernel, rounding) -> None:
    made = Made(tmp_path, LINEAR, torch.bfloat16)
    folder = merged_folder(made, tmp_path / "merged")
    to = Destination((CPU,) * ranks, Dtype.BF16, for_kernel=for_kernel, stays_on_host=False)
    with_adapter = replace(
        source(made.folder, made.config, made.specs, Rounding(rounding)), adapter=made.adapter()
    )
    merged = source(folder, made.config, made.specs, Rounding(rounding))
    seen, wanted = (load_ranks(given, to, lambda _: None)[0] for given in (with_adapter, merged))
    plain = load_ranks(replace(with_adapter, adapter=None), to, lambda _: None)[0]
    for own, others, before in zip(seen, wanted, plain, strict=True):
        assert own.keys() == others.keys()
        assert all(torch.equal(own[name], others[name]) for name in others)
        assert not torch.equal(own["layers.0.qkv"], before["layers.0.qkv"])


def test_a_quantised_copy_has_the_bytes_of_a_merged_folders(tmp_path) -> None:
    made = Made(tmp_path, ("q_proj", "lm_head"), torch.bfloat16)
    made.adapter()
    asked = Asked(Codes.INT4)
    (seen,) = write_export(plan_export(made.folder, asked, made.place), tmp_path / "seen")
    folder = merged_folder(made, tmp_path / "merged")
    (wanted,) = write_export(plan_export(folder, asked), tmp_path / "wanted")
    assert seen.read_bytes() == wanted.read_bytes()
    (plain,) = write_export(plan_export(made.folder, asked), tmp_path / "plain")
    assert seen.read_bytes() != plain.read_bytes()


def test_an_upload_is_merged_as_well(tmp_path) -> None:
    """Where files lie in a GPU's memory, their tensors are views, which must not change."""
    made = Made(tmp_path, ("q_proj",), torch.bfloat16)
    held = load_file(made.folder / "model.safetensors")
    before = {name: values.clone() for name, values in held.items()}

    class Uploaded:
        def __enter__(self) -> "Uploaded":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def get_tensor(self, name: str) -> Tensor:
            return held[name]

    forms = Forms(adapter=made.adapter())
    seen = load_weights(
        made.checkpoint, made.specs, Dtype.BF16, CPU, open_with=lambda _: Uploaded(), forms=forms
    )
    assert torch.equal(seen["layers.1.qkv"], made.loaded(Dtype.BF16)["layers.1.qkv"])
    assert all(torch.equal(held[name], before[name]) for name in held)


# --- numbers and memory --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_found_before_weights_are_read(tmp_path, bad) -> None:
    made = Made(tmp_path, ("q_proj",))
    name = f"{WRAPPED}model.layers.1.self_attn.q_proj.lora_B.weight"
    made.held[name][3, 1] = bad
    with pytest.raises(NotFinite, match=r"layers\.1\.self_attn\.q_proj\.lora_B.*1 NaN or inf"):
        merging.require_numbers(made.adapter())


def test_a_sum_beyond_the_type_of_the_files_is_told(tmp_path) -> None:
    made = Made(tmp_path, ("q_proj",), torch.float16, lora_alpha=10**6)
    with pytest.raises(NotFinite, match=r"q_proj\.weight merged with the adapter"):
        made.loaded()


def test_what_merging_takes_is_counted(tmp_path) -> None:
    assert merging_bytes(None) == 0
    small = merging_bytes(Made(tmp_path / "one", ("q_proj",)).adapter())
    large = merging_bytes(Made(tmp_path / "two", ("q_proj", "down_proj")).adapter())
    # down [64, 96] is smaller than q [128, 64], which sets what is needed at a time.
    assert small == large == 4 * 128 * 64 + 12 * 4 * (128 + 64) + 28 * merging.MERGED_AT_ONCE
