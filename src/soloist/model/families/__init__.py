"""The families that Soloist loads: one file each, one row of the table.

A family file has two functions and one tuple:

    read(fields)     config.json → ModelConfig, refusing what it does not implement
    tensors(config)  ModelConfig → the tensors of a checkpoint
    IGNORED          patterns of checkpoint tensors that carry no weights
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from soloist.errors import MissingField, UnknownFamily, WrongType
from soloist.gguf.header import is_gguf
from soloist.gguf.splits import read_gguf
from soloist.model.config import ModelConfig
from soloist.model.families import (
    gemma3,
    gemma3_text,
    glm,
    glm4,
    granite,
    laneformer,
    llama,
    mistral,
    mistral3,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from soloist.model.foreign import require_not_mlx
from soloist.model.gguf.configuration import as_config
from soloist.model.gguf.rope_freqs import with_rope_freqs
from soloist.model.quantization import FIELDS as QUANTIZATION_FIELDS
from soloist.model.reading import Fields, read_json
from soloist.model.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one `model_type`."""

    read: Callable[[Fields], ModelConfig]
    tensors: Callable[[ModelConfig], tuple[TensorSpec, ...]]
    ignored: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family(llama.read, llama.tensors, llama.IGNORED),
    "mistral": Family(mistral.read, mistral.tensors),
    "mistral3": Family(mistral3.read, mistral3.tensors, mistral3.IGNORED),
    "qwen2": Family(qwen2.read, qwen2.tensors),
    "qwen3": Family(qwen3.read, qwen3.tensors),
    "smollm3": Family(smollm3.read, smollm3.tensors),
    "phi3": Family(phi3.read, phi3.tensors),
    "granite": Family(granite.read, granite.tensors),
    "olmo2": Family(olmo2.read, olmo2.tensors),
    "glm": Family(glm.read, glm.tensors),
    "glm4": Family(glm4.read, glm4.tensors),
    "gemma3": Family(gemma3.read, gemma3.tensors, gemma3.IGNORED),
    "gemma3_text": Family(gemma3_text.read, gemma3_text.tensors),
    "laneformer": Family(laneformer.read, laneformer.tensors),
    "laneformer_tp": Family(laneformer.read, laneformer.tensors),
}


def read_config(path: Path, accepted: Collection[str] = ()) -> ModelConfig:
    """The model that a `config.json` or a GGUF file describes.

    Args:
        path: the file.
        accepted: fields that may be there although the family does not know them; a field inside
            another as 'outer.inner'.

    Raises:
        NotAModel: the weights are in the format of MLX.
        ConfigError: the file is damaged, its family unknown, or a field is missing, mistyped or
            asks for something that the family does not implement; or an accepted field is none
            that is unknown.
        CheckpointError: the GGUF file cannot be read.
    """
    if is_gguf(path):
        return _read_gguf(path, accepted)
    values = read_json(path)
    model_type = values.get("model_type")
    if model_type is None:
        raise MissingField(str(path), "model_type", f"one of {', '.join(FAMILIES)}")
    if not isinstance(model_type, str):
        raise WrongType(str(path), "model_type", model_type, f"one of {', '.join(FAMILIES)}")
    if model_type not in FAMILIES:
        raise UnknownFamily(str(path), model_type, FAMILIES)
    require_not_mlx(str(path), values)
    fields = Fields(values, str(path), model_type, accepted=accepted)
    config = FAMILIES[model_type].read(fields)
    fields.ignore(*QUANTIZATION_FIELDS)  # read with the checkpoint, which they describe
    fields.refuse_rest()
    fields.require_passed()
    return config


def _read_gguf(path: Path, accepted: Collection[str]) -> ModelConfig:
    gguf = read_gguf(path)
    values = as_config(gguf, accepted)
    fields = Fields(values, str(path), values["model_type"])
    config = FAMILIES[fields.family].read(fields)
    fields.refuse_rest()
    return with_rope_freqs(gguf, config)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The tensors that `config` calls for."""
    return FAMILIES[config.family].tensors(config)
