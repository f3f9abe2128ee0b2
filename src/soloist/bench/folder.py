"""A shape as a model folder: random weights on disk, so that any engine loads them like a model."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from soloist.bench.caches import free
from soloist.bench.subject import shape_dtype, shape_name
from soloist.engine.config import Precision
from soloist.model.checkpoint import INDEX_FILE
from soloist.model.families import read_config, tensors
from soloist.model.folder import CONFIG_FILE, shipped_folder
from soloist.model.quantization import FIELDS as QUANTIZATION_FIELDS
from soloist.model.reading import read_json
from soloist.model.tensors import TensorSpec
from soloist.weights.random import random_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHARD_BYTES = 2 * 10**9


@contextmanager
def random_model(shape: Path, precision: Precision, device: torch.device) -> Iterator[Path]:
    """A folder with a checkpoint of this shape, and étude's tokenizer: its ids are the lowest.

    The same shape, precision and kind of device give the same weights. The folder has the shape's
    name and lasts as long as the context.

    Args:
        shape: a config.json.
        precision: to store: 'bf16', 'fp16', or 'auto' for bf16.
        device: where numbers are drawn.

    Raises:
        SettingError, ConfigError: the shape or the precision cannot be used.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / shape_name(shape)
        folder.mkdir()
        _fill(folder, shape, precision, device)
        free(device)
        yield folder


def _fill(folder: Path, shape: Path, precision: Precision, device: torch.device) -> None:
    dtype, specs = shape_dtype(precision), tensors(read_config(shape))
    _write_config(shape, folder / CONFIG_FILE)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(shipped_folder("etude") / name, folder / name)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for i, spec in enumerate(specs):
        (values,) = random_weights([spec], dtype, device, seed=i).values()
        shard.update(_sources(spec, values.cpu()))
        if sum(x.numel() * x.element_size() for x in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def _write_config(shape: Path, file: Path) -> None:
    """The shape's, without a quantisation that the random weights do not have."""
    values = {k: v for k, v in read_json(shape).items() if k not in QUANTIZATION_FIELDS}
    file.write_text(json.dumps(values), encoding="utf-8")


def _sources(spec: TensorSpec, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of ours as the checkpoint's tensors that it is made of."""
    sizes = [source.shape[spec.axis] for source in spec.sources]
    parts = torch.split(values, sizes, dim=spec.axis)
    return {s.name: part.contiguous() for s, part in zip(spec.sources, parts, strict=True)}
