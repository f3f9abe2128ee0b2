"""Adapters that peft itself trains, saves and merges; skipped where the package is absent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from soloist.model.adapter import open_adapter
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.weights.reading import Forms, load_weights

peft = pytest.importorskip("peft")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "stabilised": {"target_modules": "all-linear", "use_rslora": True, "r": 5, "lora_alpha": 7},
    "patterns": {
        "target_modules": r".*\.(q|k|up)_proj",
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 7},
        "alpha_pattern": {r"^model\.layers\.0\..*q_proj": 3, "k_proj": 99},
    },
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "layers": {"target_modules": ["v_proj", "gate_proj"], "layers_to_transform": [0, 2]},
    "a layer": {"target_modules": ["v_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": r".*layers\.0.*"},
    "embedding": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "whole": {
        "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_the_merge_is_pefts(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, place = tmp_path / "base", tmp_path / "adapter"
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    model.save_pretrained(base)
    asked = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **KINDS[kind]}
    trained = peft.get_peft_model(model, peft.LoraConfig(**asked))
    for values in (p for p in trained.parameters() if p.requires_grad):
        values.data += 0.3 * torch.randn_like(values)
    trained.save_pretrained(place)

    plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = peft.PeftModel.from_pretrained(plain, place).merge_and_unload().state_dict()
    specs, checkpoint = tensors(read_config(base / "config.json")), open_checkpoint(base)
    forms = Forms(adapter=open_adapter(place, checkpoint, specs))
    seen = load_weights(checkpoint, specs, Dtype.FP32, torch.device("cpu"), forms=forms)
    for spec in specs:
        joined = torch.cat([wanted[source.name] for source in spec.sources])
        torch.testing.assert_close(seen[spec.name], joined, rtol=1e-6, atol=5e-6)
