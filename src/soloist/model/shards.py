"""Which files hold a model's weights, by the names that the folder gives them."""

from collections.abc import Iterable
from pathlib import Path

from soloist.errors import ConfigError
from soloist.model.reading import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_names(folder: Path) -> list[str]:
    """The shards that the index lists, or the single file; they need not be there.

    Raises:
        ConfigError: the index lists no plain file names.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not _are_file_names(weight_map.values()):
        raise ConfigError(f"{index} has no usable 'weight_map'", "download the file again")
    return sorted(set(weight_map.values()))


def _are_file_names(values: Iterable[object]) -> bool:
    """At least one value, and each the plain name of a file beside the index."""
    values = list(values)
    return bool(values) and all(isinstance(v, str) and v == Path(v).name != "" for v in values)
