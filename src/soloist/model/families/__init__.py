"""The families that Soloist loads: one file each, one row of the table.

A family file has the first two of these names, and may have the others:

    read(fields)     config.json → ModelConfig, refusing what it does not implement
    tensors(config)  ModelConfig → the tensors of a checkpoint
    IGNORED          patterns of checkpoint tensors that carry no weights
    ignored(config)  further ones, which depend on the model
"""

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from soloist.errors import MissingField, UnknownFamily, WrongType
from soloist.gguf.names import is_gguf
from soloist.model.config import ModelConfig
from soloist.model.foreign import require_not_mlx
from soloist.model.quantization import FIELDS as QUANTIZATION_FIELDS
from soloist.model.reading import Fields, read_json
from soloist.model.tensors import TensorSpec


class _Module(Protocol):
    """A family's file."""

    def read(self, fields: Fields) -> ModelConfig: ...

    def tensors(self, config: ModelConfig) -> tuple[TensorSpec, ...]: ...


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one `model_type`: its file, imported when a model is of the family."""

    file: str

    def read(self, fields: Fields) -> ModelConfig:
        """What config.json says."""
        return self._module.read(fields)

    def tensors(self, config: ModelConfig) -> tuple[TensorSpec, ...]:
        """Those of a checkpoint."""
        return self._module.tensors(config)

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        """Patterns of a checkpoint's tensors that carry no weights."""
        always: tuple[str, ...] = getattr(self._module, "IGNORED", ())
        of_model = getattr(self._module, "ignored", None)
        return always if of_model is None else (*always, *of_model(config))

    @property
    def _module(self) -> _Module:
        return cast("_Module", import_module(f"soloist.model.families.{self.file}"))


FAMILIES = {
    "llama": Family("llama"),
    "mistral": Family("mistral"),
    "mistral3": Family("mistral3"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "smollm3": Family("smollm3"),
    "phi3": Family("phi3"),
    "granite": Family("granite"),
    "olmo2": Family("olmo2"),
    "glm": Family("glm"),
    "glm4": Family("glm4"),
    "qwen3_moe": Family("qwen3_moe"),
    "qwen2_moe": Family("qwen2_moe"),
    "olmoe": Family("olmoe"),
    "mixtral": Family("mixtral"),
    "glm4_moe": Family("glm4_moe"),
    "gemma3": Family("gemma3"),
    "gemma3_text": Family("gemma3_text"),
    "laneformer": Family("laneformer"),
    "laneformer_tp": Family("laneformer"),
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
    from soloist.gguf.splits import read_gguf
    from soloist.model.gguf.configuration import as_config
    from soloist.model.gguf.rope_freqs import with_rope_freqs

    gguf = read_gguf(path)
    values = as_config(gguf, accepted)
    fields = Fields(values, str(path), values["model_type"])
    config = FAMILIES[fields.family].read(fields)
    fields.refuse_rest()
    return with_rope_freqs(gguf, config)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The tensors that `config` calls for."""
    return FAMILIES[config.family].tensors(config)
