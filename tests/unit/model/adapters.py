"""Adapters in peft's form for a model of `tiny`, written without peft."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FIELDS: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "auto_mapping": None,
    "base_model_name_or_path": "owner/base", "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "down_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
WRAPPED = "base_model.model."


def factors(
    base: dict[str, Tensor], modules: Iterable[str], rank: int = 4, seed: int = 1
) -> dict[str, Tensor]:
    """A and B of modules, whose matrices are in `base`, as an adapter's file has them."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for module in modules:
        rows, columns = base[f"{module}.weight"].shape
        made[f"{WRAPPED}{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        made[f"{WRAPPED}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return made


def modules_of(base: dict[str, Tensor], *ends: str) -> list[str]:
    """Modules whose names end so."""
    names = (name.removesuffix(".weight") for name in base if name.endswith(".weight"))
    return [name for name in names if name.endswith(ends)]


def write_adapter(folder: Path, held: dict[str, Tensor], **fields: Any) -> Path:
    """Both files; fields beside those that peft writes by default."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(FIELDS | fields))
    save_file(held, folder / "adapter_model.safetensors")
    return folder
