"""Which files hold a model's weights, by the names that the folder gives them."""

import os
from collections.abc import Iterable
from pathlib import Path

from soloist.errors import ConfigError
from soloist.files import is_there
from soloist.model.reading import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# The longest name of a file, in bytes, that common file systems have.
_LONGEST_NAME = 255


def weight_places(folder: Path) -> dict[str, str]:
    """Which file holds which tensor, as the index says; empty where there is no index.

    Raises:
        ConfigError: the index lists no plain file names.
    """
    index = folder / INDEX_FILE
    if not is_there(index):
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not _are_file_names(weight_map.values()):
        raise ConfigError(
            f"{index} has no usable 'weight_map' (allowed: for each tensor the name of a file "
            f"beside it, of at most {_LONGEST_NAME} bytes)",
            "download the file again",
        )
    return weight_map


def weight_names(folder: Path) -> list[str]:
    """The shards that the index lists, or the single file; they need not be there.

    Raises:
        ConfigError: as from `weight_places`.
    """
    return sorted(set(weight_places(folder).values())) or [SINGLE_FILE]


def _are_file_names(values: Iterable[object]) -> bool:
    """At least one value, and each the plain name of a file beside the index."""
    values = list(values)
    return bool(values) and all(isinstance(v, str) and _is_file_name(v) for v in values)


def _is_file_name(name: str) -> bool:
    if name != Path(name).name or not name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:  # half a character
        return False
