"""From what a user types to a model's files: a path, a shipped model or a hub id.

A model is a folder with config.json and safetensors, or a GGUF file. Where there are several of
these, a colon and a part of the name say which: 'FOLDER:Q4_K_M', 'owner/name:Q4_K_M'.
"""

import glob
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from soloist.errors import (
    AdapterNotFound,
    CheckpointError,
    DownloadFailed,
    MissingFile,
    ModelNotFound,
)
from soloist.files import is_there
from soloist.gguf.names import SUFFIX, first_of, is_gguf, stem_of
from soloist.model.foreign import ADAPTER_FILE, hint_for, require_no_adapter
from soloist.model.gguf.choosing import choose, models_in, parts
from soloist.model.hub_files import download, fetch_head, names_in, names_under
from soloist.model.shards import INDEX_FILE, SINGLE_FILE, weight_names

SHIPPED = ("etude", "etude-draft")
CONFIG_FILE = "config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# What Soloist reads beside the weights. tokenizer.model only tells that a conversion is needed, and
# an adapter's configuration that there is no model.
DESCRIPTION = (
    CONFIG_FILE, "generation_config.json", "hf_quant_config.json", INDEX_FILE, "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "chat_template.jinja", "additional_chat_templates/*.jinja", ADAPTER_FILE,
)  # fmt: skip
_OTHER_REPOSITORY = (
    "the repository may hold the model in another format, such as ONNX: look at its files "
    "on the hub, and take the one with safetensors that it names as base model"
)


def find_model(
    given: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    wanted: Sequence[str] | None = None,
) -> Path:
    """The folder of a model, or its GGUF file; fetched from the hub if `given` is a hub id.

    Args:
        given: a folder, a GGUF file, the name of a shipped model, or 'owner/name' on the hub; of a
            folder or hub id with several GGUF files, a colon and a part of the name follow.
        revision: branch, tag or commit on the hub.
        offline: use only what the local hub cache holds.
        wanted: patterns of the files to fetch from the hub; None fetches what Soloist reads. A GGUF
            file is always fetched whole.

    Raises:
        CheckpointError: nothing of that name, an empty folder, several GGUF files, or a failed
            download.
    """
    if (found := _on_disk(given)) is not None:
        return found
    base, tag = split_tag(given)
    if tag is not None and (folder := _folder(base)) is not None:
        return folder / choose(base, _names(folder), tag)
    if given in SHIPPED:
        return _checked(shipped_folder(given))
    if not is_hub_id(base) or base.lower().endswith(SUFFIX):  # rather a file that is not there
        raise ModelNotFound(given, SHIPPED)
    if tag is not None:
        described = download(base, revision, DESCRIPTION, offline=offline)
        return _fetched(base, described, tag, offline=offline)
    described = download(given, revision, wanted or DESCRIPTION, offline=offline)
    if not is_there(described / CONFIG_FILE) and is_in_gguf(given, described, offline=offline):
        return _fetched(given, described, None, offline=offline)
    folder = _checked(described, _OTHER_REPOSITORY)
    if wanted is not None:
        return folder
    # The index says which weights belong to the model; others stay where they are.
    files = [*DESCRIPTION, *map(glob.escape, weight_names(folder))]
    whole = download(given, folder.name, files, offline=offline)
    if not _has_weights(whole) and is_in_gguf(given, whole, offline=offline):
        return _fetched(given, whole, None, offline=offline)
    return whole


def config_file(model: Path) -> Path:
    """The file that says what a model is, of a folder or of a GGUF file."""
    return model if is_gguf(model) else model / CONFIG_FILE


def split_tag(given: str) -> tuple[str, str | None]:
    """What comes before the last colon and after it; nothing after it where there is none."""
    base, colon, tag = given.rpartition(":")
    return (base, tag) if colon and base and tag else (given, None)


def is_in_gguf(hub_id: str, snapshot: Path, *, offline: bool) -> bool:
    """Whether a repository holds GGUF files."""
    return bool(models_in(names_in(hub_id, snapshot, offline=offline)))


def gguf_names(hub_id: str, snapshot: Path, tag: str | None, *, offline: bool) -> list[str]:
    """The names of the files of the GGUF model that is meant, in its repository.

    Raises:
        GgufChoice: there is none, or there are several.
    """
    return parts(choose(hub_id, names_in(hub_id, snapshot, offline=offline), tag))


def find_adapter(given: str, *, offline: bool = False) -> Path:
    """The folder of an adapter, fetched from the hub if `given` is a hub id.

    Args:
        given: a folder, or 'owner/name' on the hub.
        offline: use only what the local hub cache holds.

    Raises:
        CheckpointError: nothing of that name, a folder without an adapter, or a failed download.
    """
    try:
        path = Path(given).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or the home of nobody
        raise AdapterNotFound(given) from error
    if is_file:
        raise CheckpointError(
            f"{given} is a file; an adapter is a folder that holds {ADAPTER_FILE} and "
            f"{ADAPTER_WEIGHTS}",
            f"give the folder: {path.parent}",
        )
    if not (given and is_folder):
        if not is_hub_id(given):
            raise AdapterNotFound(given)
        path = download(given, None, (ADAPTER_FILE, ADAPTER_WEIGHTS), offline=offline)
    if not is_there(path / ADAPTER_FILE):
        found = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
        hint = "give the folder or repository that peft's save_pretrained wrote"
        if CONFIG_FILE in found:
            hint = f"{given} holds a whole model: give it as MODEL"
        if not found:
            raise CheckpointError(f"{given} holds no {ADAPTER_FILE}, so it is no adapter", hint)
        raise MissingFile(str(path), ADAPTER_FILE, found, hint)
    return path


def is_hub_id(given: str) -> bool:
    """Whether it has the form 'owner/name'; a folder of that name goes first."""
    return _HUB_ID.fullmatch(given) is not None


def name_of(given: str) -> str:
    """What a model or an adapter is called: a hub id as it is, others by their last name."""
    path = Path(given)
    if path.is_file():
        return stem_of(path.name)
    base, tag = split_tag(given)
    folder = path if tag is None or path.is_dir() else Path(base)
    if not folder.is_dir():
        return given
    name = folder.resolve().name
    return name if folder == path else f"{name}:{tag}"


def shipped_folder(name: str) -> Path:
    """Where the files of a shipped model are."""
    return Path(__file__).parent.parent / "models" / name


def _on_disk(given: str) -> Path | None:
    """A folder or file of that name."""
    try:
        path = Path(given).expanduser()
        is_folder, is_other = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or the home of nobody
        raise ModelNotFound(given, SHIPPED) from error
    if given and is_folder:
        return _local(path)
    if is_other and is_gguf(path):
        first = path.with_name(first_of(path.name))
        return first if is_there(first) else path
    if path.is_file():
        raise CheckpointError(
            f"{given} is a file; a model is a folder that holds {CONFIG_FILE} and *.safetensors, "
            "or a GGUF file",
            f"give the folder: {path.parent}",
        )
    return None


def _folder(given: str) -> Path | None:
    path = Path(given).expanduser()
    return path if path.is_dir() else None


def _names(folder: Path) -> list[str]:
    """Of the files in a folder, without those below it."""
    return sorted(path.name for path in folder.iterdir())


def _local(folder: Path) -> Path:
    """A folder, or its only GGUF file where there is nothing else."""
    names = _names(folder)
    is_whole = is_there(folder / CONFIG_FILE) and _has_weights(folder)
    if not is_whole and models_in(names):
        return folder / choose(str(folder), names, None)
    return _checked(folder)


def require_readable(hub_id: str, snapshot: Path, name: str) -> None:
    """Refuse a GGUF file of the hub before it is fetched, where its first bytes say enough.

    Raises:
        CheckpointError: its architecture, or a type of its tensors, is not read.
    """
    if (snapshot / name).exists():
        return
    from soloist.model.gguf.promise import HEAD_BYTES, require_promising

    with suppress(DownloadFailed):  # fetching all of it will say so
        head, num_bytes = fetch_head(hub_id, snapshot, name, HEAD_BYTES)
        require_promising(f"{hub_id}/{name}", head, num_bytes)


def require_config(folder: Path) -> None:
    """Refuse a folder of the hub that holds no model.

    Raises:
        MissingFile: it has no config.json.
    """
    _checked(folder, _OTHER_REPOSITORY)


def _checked(folder: Path, hint: str = "") -> Path:
    if not is_there(folder / CONFIG_FILE):
        found = _names(folder) if folder.is_dir() else []
        require_no_adapter(folder, found)
        raise MissingFile(str(folder), CONFIG_FILE, found, hint_for(found) or hint)
    return folder


def _has_weights(folder: Path) -> bool:
    return is_there(folder / SINGLE_FILE) or is_there(folder / INDEX_FILE)


def _fetched(hub_id: str, snapshot: Path, tag: str | None, *, offline: bool) -> Path:
    """A repository's GGUF file in the cache, of several the first."""
    names = gguf_names(hub_id, snapshot, tag, offline=offline)
    if not offline:
        require_readable(hub_id, snapshot, names[0])
    folder = download(hub_id, snapshot.name, list(map(glob.escape, names)), offline=offline)
    if missing := set(names) - set(names_under(folder)):
        raise MissingFile(str(folder), min(missing), names_under(folder))
    return folder / names[0]
