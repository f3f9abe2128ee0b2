"""A model's files and an adapter's, held against each other before the model is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from soloist.engine.config import EngineConfig
from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.folder import config_file, find_adapter
from soloist.model.tensors import TensorSpec
from soloist.text.files import read_eos_ids
from soloist.weights.choice import Chosen, choose

if TYPE_CHECKING:
    from soloist.model.adapter import Adapter


def open_model(folder: Path, asked: EngineConfig) -> tuple[Checkpoint, Chosen]:
    """A model's files, held against its configuration, and what becomes of its matrices.

    Raises:
        UserError: they cannot be used, or not as asked.
    """
    config = read_config(config_file(folder), asked.accepted_fields)
    if asked.context_tokens is not None:
        # Not the context that fits: what a model computes must not depend on free memory.
        config = config.for_context(asked.context_tokens)
    read_eos_ids(folder, config.vocab_size)  # refuses others before weights are read
    specs = tensors(config)
    checkpoint = open_checkpoint(folder)
    checkpoint.check(specs, FAMILIES[config.family].ignored(config))
    return checkpoint, choose(checkpoint, config, specs, asked.rounding)


def open_adapter_of(
    asked: EngineConfig, checkpoint: Checkpoint, specs: tuple[TensorSpec, ...], *, offline: bool
) -> "Adapter | None":
    """The adapter that is asked for, held against the model's files; its numbers are read.

    Args:
        asked: names it, or none.
        checkpoint: of the model.
        specs: of the model's files.
        offline: use only what the local hub cache holds.

    Raises:
        UserError: it cannot be used, or belongs to another model.
    """
    if asked.adapter is None:
        return None
    from soloist.model.adapter import open_adapter
    from soloist.weights.merging import require_numbers

    folder = find_adapter(asked.adapter, offline=offline)
    adapter = open_adapter(folder, checkpoint, specs)
    require_numbers(adapter)
    return adapter


def adapter_files(asked: EngineConfig, *, offline: bool) -> list[Path]:
    """An adapter's weights and configuration; none without an adapter."""
    if asked.adapter is None:
        return []
    folder = find_adapter(asked.adapter, offline=offline)
    return sorted(f for f in folder.iterdir() if f.suffix in {".safetensors", ".json"})
