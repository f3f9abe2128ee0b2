"""Quantised checkpoints: what their configuration says, one file a method. Pure: no torch.

    fields      typed reading, with refusals by name
    names       lists of modules, as each library matches them
    patterns    regular expressions, and how long one may take
    scheme      one way to store a matrix: tensors, shapes, types
    fp8, modelopt, compressed_tensors, awq, gptq, auto_round
                quantization_config → a scheme for each module
    gguf        the type of a tensor → a scheme
    matrices    the schemes held against the tensors that there are

`soloist.weights.decoding` reads the tensors. What comes out is `soloist.model.quantized`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soloist.errors import ConfigError, UnsupportedQuantization, WrongType
from soloist.model.folder import CONFIG_FILE
from soloist.model.quantization.fields import QuantizationFields
from soloist.model.reading import read_json

if TYPE_CHECKING:
    from soloist.model.quantization.scheme import Method

# Where the function is that reads a method, in a file that is imported for models of the method.
METHODS: Mapping[str, str] = {
    "compressed-tensors": "compressed_tensors.read",
    "fp8": "fp8.read",
    "fbgemm_fp8": "fp8.read_fbgemm",
    "modelopt": "modelopt.read",
    "awq": "awq.read",
    "gptq": "gptq.read",
    "auto-round": "auto_round.read",
    "intel/auto-round": "auto_round.read",  # what early versions wrote
}
HF_QUANT_CONFIG = "hf_quant_config.json"

# Older files of compressed-tensors have the second name.
FIELDS = ("quantization_config", "compression_config")


def read_quantization(
    folder: Path, config: Mapping[str, Any], name_of_config: str = CONFIG_FILE
) -> "Method | None":
    """What a folder's files say of its quantisation; None where nothing is quantised.

    Args:
        folder: of the model.
        config: its config.json.
        name_of_config: the name of that file, if another.

    Raises:
        ConfigError: the method is not known, or a field asks for something that is not read.
    """
    file = folder / name_of_config
    given = [name for name in FIELDS if config.get(name) is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{file} has both {' and '.join(given)} (allowed: one of the two)",
            "remove the one that does not belong to these weights",
        )
    name = given[0] if given else None
    own = folder / HF_QUANT_CONFIG
    if name is None:
        return _read_own(own) if own.exists() else None
    values = config[name]
    if not isinstance(values, dict):
        raise WrongType(str(file), name, values, "an object")
    method = values.get("quant_method", "compressed-tensors" if name == FIELDS[1] else None)
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedQuantization(str(file), f"{name}.quant_method", method, ", ".join(METHODS))
    if own.exists() and method != "modelopt":
        raise ConfigError(
            f"{file} says that weights are quantised by {method}, but {own.name} beside it that "
            "they are by modelopt (allowed: one of the two)",
            "remove the file that does not belong to these weights",
        )
    if own.exists():
        from soloist.model.quantization import modelopt

        _require_same(modelopt.algorithm(values), file, modelopt.algorithm(read_json(own)), own)
    return _reader(method)(QuantizationFields(values, str(file), method, f"{name}."))


def _reader(method: str) -> "Callable[[QuantizationFields], Method]":
    module, _, function = METHODS[method].partition(".")
    found = import_module(f"soloist.model.quantization.{module}")
    reader: Callable[[QuantizationFields], Method] = getattr(found, function)
    return reader


def _require_same(algorithm: object, file: Path, other: object, own: Path) -> None:
    if algorithm != other:
        raise ConfigError(
            f"{file} says that weights are quantised by {algorithm!r}, but {own.name} beside it "
            f"says {other!r} (allowed: the same in both)",
            "remove the file that does not belong to these weights",
        )


def _read_own(file: Path) -> "Method | None":
    values = read_json(file)
    inner = values.get("quantization")
    if not isinstance(inner, dict):
        raise ConfigError(f"{file} has no usable 'quantization'", "download the file again")
    if inner.get("quant_algo") is None:
        return None
    return _reader("modelopt")(QuantizationFields(inner, str(file), "modelopt", "quantization."))
