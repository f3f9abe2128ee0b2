"""What to do about a folder that holds a model in a form that Soloist does not read.

Looks at names of files and at a few fields. Knows no family.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soloist.errors import CheckpointError, ConfigError, NotAModel, quoted
from soloist.model.reading import read_json

ADAPTER_FILE = "adapter_config.json"

# Names of files in other formats, and what to do; the first that matches counts.
_FORMATS = (
    (
        r"(.*[-._])?mmproj.*\.gguf",
        "only turns images into tokens for a model; get a GGUF file of the model itself",
    ),
    (
        r"pytorch_model.*\.bin",
        "is an older checkpoint of PyTorch; load it once with transformers "
        "(AutoModelForCausalLM.from_pretrained) and save it with save_pretrained, which writes "
        "safetensors",
    ),
    (
        r"(consolidated.*\.(pth|safetensors)|params\.json)",
        "is in the format of the model's maker; get the version for transformers, which has "
        "config.json and model*.safetensors",
    ),
    (r".*\.onnx", "is a graph for ONNX Runtime; get the safetensors checkpoint of its base model"),
    (
        r"(weights.*\.npz|weights\.safetensors)",
        "is in the format of MLX; get the safetensors checkpoint of its base model",
    ),
    (
        r".*\.(bin|pt|pth|h5|msgpack|npz)",
        "is in a format that Soloist does not load; get the safetensors version",
    ),
)


def hint_for(found: Sequence[str]) -> str:
    """What to do about a folder with these files and no weights that are read; often nothing."""
    for pattern, advice in _FORMATS:
        for name in sorted(found):
            if re.fullmatch(pattern, name):
                return f"{name} {advice}"
    return ""


def require_no_adapter(folder: Path, found: Sequence[str]) -> None:
    """Refuse a folder that holds what was learned on top of a model, and not the model.

    Args:
        folder: without weights that are read.
        found: names of its files.

    Raises:
        NotAModel: naming the model that it belongs to, where the file does.
    """
    if ADAPTER_FILE not in found:
        return
    try:
        base = read_json(folder / ADAPTER_FILE).get("base_model_name_or_path")
    except (ConfigError, CheckpointError):
        base = None
    named = f" of {quoted(base)}" if isinstance(base, str) and base else ""
    raise NotAModel(
        f"{folder} holds an adapter{named}, not a whole model ({ADAPTER_FILE} is there, and no "
        "model.safetensors)",
        "give the model that it belongs to, and this folder with --adapter, which merges the two "
        "while they are loaded",
    )


def require_not_mlx(file: str, values: Mapping[str, Any]) -> None:
    """Refuse a config.json whose weights are quantised for MLX.

    Raises:
        NotAModel: they are.
    """
    given = values.get("quantization")
    if isinstance(given, dict) and {"group_size", "bits"} <= given.keys():
        raise NotAModel(
            f"{file}: field 'quantization' says that the weights are quantised in the format of "
            "MLX, which Soloist does not read",
            "get the 16-bit checkpoint of its base model; --weights int4 rounds it while it loads",
        )
