"""Models written to folders: random weights, or numbers that others read in 16 bits."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from soloist.bench.caches import free
from soloist.bench.subject import shape_dtype, shape_name
from soloist.engine.config import Precision
from soloist.errors import SettingError
from soloist.model.checkpoint import Checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import CONFIG_FILE, shipped_folder
from soloist.model.quantization import FIELDS as QUANTIZATION_FIELDS
from soloist.model.reading import read_json
from soloist.model.shards import INDEX_FILE
from soloist.model.tensors import TensorSpec, head_name
from soloist.weights.choice import Chosen
from soloist.weights.random import random_weights
from soloist.weights.reading import Forms, read_tensors

_NAMES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SHARD_BYTES = 10**9
# Files that are written at once, while the next tensors are drawn.
_WRITERS = 4


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
    dtype, specs = shape_dtype(precision), tensors(read_config(shape))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / shape_name(shape)
        write_model(folder, plain_config(shape), random_tensors(specs, dtype, device))
        free(device)
        yield folder


@contextmanager
def numbers_model(
    folder: Path, checkpoint: Checkpoint, chosen: Chosen, dtype: Dtype, device: torch.device
) -> Iterator[Path]:
    """A copy of a quantised model in 16 bits, of the numbers that its codes stand for.

    It has étude's tokenizer. A head that was untied is a tensor of its own.

    Args:
        folder: of the model.
        checkpoint: its files.
        chosen: what becomes of them.
        dtype: that numbers are rounded to.
        device: where they are computed.
    """
    if not folder.is_dir():
        raise SettingError("--against", "transformers", "only for a folder, not for a GGUF file")
    config = plain_config(folder / CONFIG_FILE)
    config |= {"tie_word_embeddings": chosen.config.tied_head, "torch_dtype": _NAMES[dtype]}
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent) / folder.name
        write_model(copy, config, _numbers(checkpoint, chosen, dtype, device))
        free(device)
        yield copy


def _numbers(
    checkpoint: Checkpoint, chosen: Chosen, dtype: Dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    specs = {spec.name: spec for spec in chosen.specs}
    forms = Forms(rounding=chosen.rounding)
    for name, values in read_tensors(checkpoint, chosen.specs, dtype, device, forms=forms):
        if name == "head":  # it may come from the embedding's tensor
            yield head_name(chosen.specs), values
        else:
            yield from sources(specs[name], values)


def write_model(
    folder: Path, config: Mapping[str, Any], stored: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a folder with étude's tokenizer. Its config.json comes last: then all is there.

    Args:
        folder: a new one; its parents are made.
        config: of config.json.
        stored: names and tensors of the files, on any device, one after the other.
    """
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(shipped_folder("etude") / name, folder / name)
    places: dict[str, str] = {}
    files: list[Future[None]] = []
    with ThreadPoolExecutor(_WRITERS) as pool:
        for shard in _shards(stored):
            name = f"model-{len(files) + 1:05}.safetensors"
            if len(files) >= _WRITERS:
                files[-_WRITERS].result()  # the host has room for so many
            files.append(pool.submit(save_file, shard, folder / name, {"format": "pt"}))
            places |= dict.fromkeys(shard, name)
    for file in files:
        file.result()
    index = {"metadata": {}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def _shards(stored: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """What goes into each file, on the host."""
    shard: dict[str, torch.Tensor] = {}
    for name, values in stored:
        shard[name] = values.cpu().contiguous()
        if sum(x.nbytes for x in shard.values()) >= _SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def plain_config(shape: Path) -> dict[str, Any]:
    """A config.json without a quantisation, which 16-bit weights do not have."""
    return {k: v for k, v in read_json(shape).items() if k not in QUANTIZATION_FIELDS}


def random_tensors(
    specs: Iterable[TensorSpec], dtype: Dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights as a checkpoint's tensors, one after the other."""
    for i, spec in enumerate(specs):
        (values,) = random_weights([spec], dtype, device, seed=i).values()
        yield from sources(spec, values)


def sources(spec: TensorSpec, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of ours as the checkpoint's tensors that it is made of."""
    sizes = [source.shape[spec.axis] for source in spec.sources]
    parts = torch.split(values, sizes, dim=spec.axis)
    yield from zip((source.name for source in spec.sources), parts, strict=True)
