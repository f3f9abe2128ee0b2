"""From what a user types to a folder of files: a path, a shipped model or a hub id."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from soloist.errors import (
    AdapterNotFound,
    CheckpointError,
    DownloadFailed,
    MissingFile,
    ModelNotFound,
)
from soloist.files import is_there
from soloist.model.foreign import ADAPTER_FILE, hint_for, require_no_adapter
from soloist.model.shards import INDEX_FILE, weight_names

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
    "the repository may hold the model in another format, such as GGUF or ONNX: look at its files "
    "on the hub, and take the one with safetensors that it names as base model"
)


def find_model(
    given: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    wanted: Sequence[str] | None = None,
) -> Path:
    """The folder of a model, fetched from the hub if `given` is a hub id.

    Args:
        given: a folder, the name of a shipped model, or 'owner/name' on the hub.
        revision: branch, tag or commit on the hub.
        offline: use only what the local hub cache holds.
        wanted: patterns of the files to fetch from the hub; None fetches what Soloist reads.

    Raises:
        CheckpointError: nothing of that name, an empty folder, or a failed download.
    """
    try:
        path = Path(given).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or the home of nobody
        raise ModelNotFound(given, SHIPPED) from error
    if given and is_folder:
        return _checked(path)
    if is_file:
        raise CheckpointError(
            f"{given} is a file; a model is a folder that holds {CONFIG_FILE} and *.safetensors",
            f"give the folder: {path.parent}",
        )
    if given in SHIPPED:
        return _checked(shipped_folder(given))
    if not is_hub_id(given):
        raise ModelNotFound(given, SHIPPED)
    if wanted is not None:
        return _checked(_download(given, revision, wanted, offline=offline), _OTHER_REPOSITORY)
    # The index says which weights belong to the model; others stay where they are.
    described = _download(given, revision, DESCRIPTION, offline=offline)
    folder = _checked(described, _OTHER_REPOSITORY)
    files = [*DESCRIPTION, *map(glob.escape, weight_names(folder))]
    return _download(given, folder.name, files, offline=offline)


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
        path = _download(given, None, (ADAPTER_FILE, ADAPTER_WEIGHTS), offline=offline)
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
    """What a model or an adapter is called: a hub id as it is, a folder by its last name."""
    folder = Path(given)
    return folder.resolve().name if folder.is_dir() else given


def shipped_folder(name: str) -> Path:
    """Where the files of a shipped model are."""
    return Path(__file__).parent.parent / "models" / name


def _checked(folder: Path, hint: str = "") -> Path:
    if not is_there(folder / CONFIG_FILE):
        found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        require_no_adapter(folder, found)
        raise MissingFile(str(folder), CONFIG_FILE, found, hint_for(found) or hint)
    return folder


def _download(hub_id: str, revision: str | None, wanted: Sequence[str], *, offline: bool) -> Path:
    # Slow to import, and most models are folders.
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(wanted),
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError as error:
        reason = "it is not in the local cache" + ("" if offline else " and the hub is unreachable")
        raise DownloadFailed(hub_id, reason) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip() or type(error).__name__
        raise DownloadFailed(hub_id, reason.splitlines()[0]) from error
