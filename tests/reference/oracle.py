"""Tiny random transformers models, saved as people have them and loaded the way Soloist loads."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.folder import config_file, find_model
from soloist.reference.build import build_reference
from soloist.reference.device import Reference
from soloist.weights.reading import load_weights

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}

# Families whose configuration has the language model in `text_config`: type of that, and of the
# vision tower's.
NESTED = {"mistral3": ("mistral", "pixtral"), "gemma3": ("gemma3_text", "siglip_vision_model")}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Families that store the scales of norms less 1.
OFFSET_NORMS = ("gemma3", "gemma3_text")


@dataclass(frozen=True)
class Case:
    """One model to compare.

    Attributes:
        name: for the test id.
        family: model_type.
        fields: configuration, on top of `TINY`.
        old_rope: config.json spells rope as `rope_theta` and `rope_scaling` with `type`; of two
            kinds of layers, that of sliding ones as `rope_local_base_freq`.
        sharded: several files with an index.
    """

    name: str
    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    old_rope: bool = False
    sharded: bool = False

    @property
    def id(self) -> str:
        """For pytest."""
        return f"{self.family}-{self.name}"


def build(case: Case, seed: int = 0) -> PreTrainedModel:
    """The oracle in fp32, every parameter random: biases away from 0, norm scales away from 1."""
    fields = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, **TINY, **case.fields}
    auto: Any = AutoModelForCausalLM
    if case.family in NESTED:
        text, vision = NESTED[case.family]
        tied = fields.get("tie_word_embeddings", case.family == "gemma3")
        fields = {
            "text_config": {**fields, "model_type": text},
            "vision_config": {**VISION, "model_type": vision},
            "tie_word_embeddings": tied,
        }
        auto = AutoModelForImageTextToText
    config = AutoConfig.for_model(case.family, **fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(
            config,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if name.endswith("norm.weight"):
                parameter.mul_(0.3).add_(0.0 if case.family in OFFSET_NORMS else 1.0)
            elif name.endswith("bias"):
                parameter.mul_(0.5)
            elif "embed_tokens" not in name or config.tie_word_embeddings:
                parameter.mul_(parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of a router
                buffer.normal_(generator=generator).mul_(0.3)
    assert model.dtype is torch.float32
    return model


def save(model: PreTrainedModel, case: Case, folder: Path) -> Path:
    """Write config.json and safetensors files."""
    model.save_pretrained(folder, max_shard_size="8KB" if case.sharded else "1GB")
    assert len(list(folder.glob("*.safetensors"))) > 1 if case.sharded else True
    if case.old_rope:
        path = folder / "config.json"
        whole = json.loads(path.read_text())
        values = whole.get("text_config", whole)
        rules = values.pop("rope_parameters")
        if "full_attention" in rules:
            values["rope_local_base_freq"] = rules["sliding_attention"]["rope_theta"]
            rules = rules["full_attention"]
        values["rope_theta"] = rules.pop("rope_theta")
        kind = rules.pop("rope_type")
        values["rope_scaling"] = None if kind == "default" else {"type": kind, **rules}
        path.write_text(json.dumps(whole))
    return folder


def load(folder: Path, dtype: Dtype = Dtype.FP32) -> Reference:
    """Through the same steps as the engine."""
    found = find_model(str(folder))
    config = read_config(config_file(found))
    specs = tensors(config)
    checkpoint = open_checkpoint(found)
    checkpoint.check(specs, FAMILIES[config.family].ignored(config))
    return build_reference(config, load_weights(checkpoint, specs, dtype, torch.device("cpu")))


def prompt(num_tokens: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Random token ids [T]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator)


def oracle_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [T, V] of one plain forward pass in fp32."""
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0].float()


def run(model: Reference, ids: Tensor, chunks: list[int], capacity: int | None = None) -> Tensor:
    """Logits [T, V] of a sequence that is fed in pieces of these lengths."""
    assert sum(chunks) == len(ids), "the chunks make up the prompt"
    cache = model.new_cache(capacity or len(ids))
    rows, position = [], 0
    for count in chunks:
        part = ids[position : position + count]
        logits = model.forward(part, position, cache, "all")
        assert logits is not None
        rows.append(logits.clone())
        position += count
    return torch.cat(rows)
