"""Models in GGUF against transformers: the same function as the checkpoint that the file is of."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from reference.compare import assert_close
from reference.oracle import Case, build, load, oracle_logits, prompt, run
from soloist.errors import MissingTensor
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.weights.reading import load_weights
from unit.gguf.writing import TYPES, encoded, tensors_of, write

# Rows of 256 numbers everywhere, so that every type fits.
WIDE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
CASES = [
    Case("plain", "llama"),
    Case("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("tied", "llama", {"tie_word_embeddings": True, "head_dim": 10}),
    Case("biases", "qwen2"),
    Case("head", "qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    Case("plain", "smollm3", {"num_hidden_layers": 5}),
]


def config_of(oracle: Any, family: str) -> dict[str, Any]:
    values = json.loads(oracle.config.to_json_string(use_diff=False))
    rope = values.get("rope_parameters") or {}
    return {"model_type": family, "rope_theta": rope.get("rope_theta", 10_000.0), **{
        name: value for name, value in values.items() if isinstance(value, int | float)
    }, "num_key_value_heads": oracle.config.num_key_value_heads,
        "head_dim": oracle.config.head_dim if hasattr(oracle.config, "head_dim") else
        oracle.config.hidden_size // oracle.config.num_attention_heads}  # fmt: skip


def written(
    case: Case, file: Path, type_of: Any = "F32", metadata: Any = None, **given: Any
) -> torch.Tensor:
    """A random model as a GGUF file; what transformers makes of 40 tokens."""
    oracle = build(case)
    write(file, config_of(oracle, case.family), tensors_of(oracle), type_of, metadata, **given)
    return oracle_logits(oracle, prompt(40, oracle.config.vocab_size))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_logits_are_those_of_the_checkpoint(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    wanted = written(case, file)
    size = read_config(file).vocab_size
    assert_close(run(load(file), prompt(40, size), [25, 15]), wanted, "transformers", case.id)


def test_llama_3_rope_is_read_from_its_divisors(tmp_path: Path) -> None:
    case = Case("rope", "llama", {"rope_parameters": LLAMA3, "head_dim": 32})
    oracle = build(case)
    inverse = oracle.model.rotary_emb.inv_freq.double()
    plain = 500_000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    freqs = {"rope_freqs.weight": (plain / inverse).float().numpy()}
    file = tmp_path / "model.gguf"
    wanted = written(case, file, more=freqs)
    assert_close(run(load(file), prompt(40, 61), [25, 15]), wanted, "transformers", "llama3")
    values = config_of(oracle, "llama")
    write(file, values, tensors_of(oracle))
    without = run(load(file), prompt(40, 61), [25, 15])
    assert (without - wanted).abs().max() > 0.1


@pytest.mark.parametrize("rule", ["linear", "yarn"])
def test_scaled_rope(rule: str, tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"rope_type": rule, "rope_theta": 10_000.0, "factor": 4.0}
    keys: dict[str, Any] = {
        "qwen2.rope.scaling.type": rule,
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
    }
    if rule == "yarn":
        scaling["original_max_position_embeddings"] = 128
    file = tmp_path / "model.gguf"
    wanted = written(Case(rule, "qwen2", {"rope_parameters": scaling}), file, metadata=keys)
    assert_close(run(load(file), prompt(40, 61), [25, 15]), wanted, "transformers", rule)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_have_the_bits_of_gguf_py(family: str, kind: str, tmp_path: Path) -> None:
    """All matrices, the embedding among them; of llama with its rows in order again."""
    oracle = build(Case("wide", family, WIDE | {"tie_word_embeddings": True}))
    file = tmp_path / "model.gguf"
    stored = tensors_of(oracle)
    write(file, config_of(oracle, family), stored, kind)
    specs = tensors(read_config(file))
    found = open_checkpoint(file)
    found.check(specs)
    seen = load_weights(found, specs, Dtype.FP32, torch.device("cpu"))
    number = gguf.GGMLQuantizationType[kind]
    for spec in specs:
        parts = [stored[source.name].numpy() for source in spec.sources]
        if parts[0].ndim == 2:
            parts = [gguf.quants.dequantize(encoded(part, number), number) for part in parts]
        wanted = np.concatenate(parts)
        assert np.array_equal(seen[spec.name].numpy().view("u4"), wanted.view("u4")), spec.name


def test_parts_and_mixed_types(tmp_path: Path) -> None:
    """As llama.cpp mixes them, over several files."""
    oracle = build(Case("wide", "llama", WIDE))
    stored = tensors_of(oracle)

    def kind(name: str) -> str:
        short = name.split(".")[-2]
        return {"v_proj": "Q6_K", "embed_tokens": "Q6_K", "lm_head": "Q8_0"}.get(short, "Q4_K")

    values = config_of(oracle, "llama")
    whole = write(tmp_path / "whole.gguf", values, stored, kind)
    write(tmp_path / "m.gguf", values, stored, kind, split_max_tensors=5)
    first, *others = sorted(tmp_path.glob("m-*.gguf"))
    assert len(others) > 2
    ids = prompt(40, 40)
    assert torch.equal(run(load(first), ids, [25, 15]), run(load(whole), ids, [25, 15]))
    assert open_checkpoint(first).num_bytes > 0


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
MIXTURES = [
    Case("experts", "qwen3_moe", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    Case("experts", "qwen2_moe", {
        **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 20,
    }),
    Case("experts", "olmoe", {"num_experts": 3, "num_experts_per_tok": 2,
                              "num_key_value_heads": 3}),
    Case("experts", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2,
                                "tie_word_embeddings": True}),
    Case("experts", "glm4_moe", {
        **EXPERTS, "n_routed_experts": 4, "routed_scaling_factor": 2.5, "use_qk_norm": True,
        "attention_bias": True, "n_shared_experts": 2,
    }),
]  # fmt: skip


def mixture_file(
    case: Case, file: Path, type_of: Any = "F32"
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random mixture as a GGUF file, and what it was made of."""
    oracle = build(case)
    stored, values, metadata = tensors_of(oracle), config_of(oracle, case.family), {}
    if case.family == "mixtral":
        for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            stored = {name.replace(ours, theirs): array for name, array in stored.items()}
        stored = {name.replace(".mlp.", ".block_sparse_moe."): a for name, a in stored.items()}
    if case.family == "glm4_moe":
        values |= {"rotary_dim": values["head_dim"] // 2}
        metadata = {
            "glm4moe.expert_weights_norm": True, "glm4moe.expert_gating_func": 2,
            "glm4moe.block_count": values["num_hidden_layers"] + 1,
            "glm4moe.nextn_predict_layers": 1,
        }  # fmt: skip
        last = f"blk.{values['num_hidden_layers']}"  # drafts, and is left out
        more = {
            f"{last}.{name}.weight": np.ones(24, np.float32)
            for name in ("attn_norm", "nextn.enorm")
        }
        write(file, values, stored, type_of, metadata, more)
    else:
        write(file, values, stored, type_of)
    return oracle, stored


@pytest.mark.parametrize("case", MIXTURES, ids=lambda c: c.id)
def test_experts_are_those_of_the_checkpoint(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    oracle, _ = mixture_file(case, file)
    wanted = oracle_logits(oracle, prompt(40, 61))
    assert_close(run(load(file), prompt(40, 61), [25, 15]), wanted, "transformers", case.id)


@pytest.mark.parametrize("kind", TYPES)
def test_experts_have_the_bits_of_gguf_py(kind: str, tmp_path: Path) -> None:
    sizes = {**MIXTURES[0].fields, **WIDE, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    case = Case("wide", "qwen3_moe", sizes)
    file = tmp_path / "model.gguf"
    _, stored = mixture_file(case, file, kind)
    specs = tensors(read_config(file))
    found = open_checkpoint(file)
    found.check(specs)
    seen = load_weights(found, specs, Dtype.FP32, torch.device("cpu"))
    number = gguf.GGMLQuantizationType[kind]
    for expert in range(4):
        parts = [
            gguf.quants.dequantize(encoded(values[expert].numpy(), number), number)
            for part in ("gate", "up", "down")
            if (values := stored[f"model.layers.0.mlp.experts.0.{part}_proj.weight"]) is not None
        ]
        at = f"layers.0.experts.{expert}."
        for name, wanted in (("gate_up", np.concatenate(parts[:2])), ("down", parts[2])):
            assert np.array_equal(seen[at + name].numpy().view("u4"), wanted.view("u4")), name


def test_an_expert_that_is_missing_is_named_as_the_file_does(tmp_path: Path) -> None:
    case, file = MIXTURES[0], tmp_path / "model.gguf"
    oracle = build(case)
    stored = tensors_of(oracle)
    at = "model.layers.1.mlp.experts.0.up_proj.weight"
    stored[at] = stored[at][:3]
    write(file, config_of(oracle, case.family), stored)
    with pytest.raises(MissingTensor, match=r"blk\.1\.ffn_up_exps\.weight"):
        open_checkpoint(file).check(tensors(read_config(file)))
