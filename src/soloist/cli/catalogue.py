"""`soloist pull`, `list` and `rm`: models of the hub's cache, from download to removal."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from soloist.cli.fitting import Fit, find_fit
from soloist.cli.machine import Machine, read_machine
from soloist.cli.tables import show_table
from soloist.cli.terminal import print_json, status
from soloist.errors import CheckpointError, SettingError, UserError, gigabytes
from soloist.gguf.names import SUFFIX
from soloist.model.families import read_config
from soloist.model.folder import (
    CONFIG_FILE,
    DESCRIPTION,
    SHIPPED,
    gguf_names,
    is_hub_id,
    is_in_gguf,
    require_config,
    require_readable,
    shipped_folder,
    split_tag,
)
from soloist.model.gguf.choosing import choose, distinct_tags
from soloist.model.hub_cache import (
    CachedModel,
    cached_models,
    freed_bytes,
    remove,
    remove_gguf,
)
from soloist.model.hub_files import download, names_in
from soloist.model.shards import SINGLE_FILE, weight_names
from soloist.model.transfer import Missing, fetch, find_missing
from soloist.settings import read_settings


@dataclass(frozen=True, slots=True)
class Entry:
    """One model on disk.

    Attributes:
        model: what other commands call it.
        revision: the commit that was fetched last; None for a shipped model.
        revisions: how many commits of it are on disk.
        bytes: on disk.
        is_complete: all files that Soloist reads are there.
        fit: what this machine makes of it.
    """

    model: str
    revision: str | None
    revisions: int
    bytes: int
    is_complete: bool
    fit: Fit


def pull(model: str, revision: str | None) -> None:
    """Fetch what Soloist reads of a hub model.

    Its configuration comes first: a family that is not supported costs no download of weights.

    Raises:
        UserError: it is no hub id, or cannot be run or fetched.
        DiskFull: it does not fit; no weights were fetched.
    """
    hub_id, tag = split_tag(model)
    if not is_hub_id(hub_id):
        raise SettingError(
            "MODEL", model, "a hub id of the form owner/name, or owner/name:Q4_K_M",
            "a folder or a file needs no download",
        )  # fmt: skip
    if Path(hub_id).is_dir():
        raise UserError(
            f"'{model}' is a folder here, which goes before the hub's model of that name",
            "change to another folder and run the command again",
        )
    if read_settings().hub_offline:
        raise SettingError("HF_HUB_OFFLINE", 1, "0, to reach the hub", "unset HF_HUB_OFFLINE")
    snapshot = download(hub_id, revision, DESCRIPTION, offline=False)
    names = _wanted(hub_id, snapshot, tag)
    missing = find_missing(hub_id, snapshot, names)
    if missing:
        snapshot.mkdir(parents=True, exist_ok=True)  # of GGUF alone nothing lies there yet
        status(_intention(model, missing))
        with _bytes_bar(missing) as advance:
            fetch(hub_id, snapshot, missing, advance)
    machine = read_machine()
    cached = next(found for found in cached_models() if found.hub_id == hub_id)
    ours = _gguf(cached, names[0], model, machine) if _is_gguf(names) else _entry(cached, machine)
    status(f"{model} · {gigabytes(ours.bytes)} on disk · {ours.fit.in_words}")


def _wanted(hub_id: str, snapshot: Path, tag: str | None) -> list[str]:
    """Files of weights to fetch; of a folder once its configuration was read."""
    if tag is None and (snapshot / CONFIG_FILE).is_file():
        read_config(snapshot / CONFIG_FILE)
        names = weight_names(snapshot)
        if names != [SINGLE_FILE] or SINGLE_FILE in names_in(hub_id, snapshot, offline=False):
            return names
    if tag is not None or is_in_gguf(hub_id, snapshot, offline=False):
        names = gguf_names(hub_id, snapshot, tag, offline=False)
        require_readable(hub_id, snapshot, names[0])
        return names
    require_config(snapshot)
    return weight_names(snapshot)


def _is_gguf(names: Sequence[str]) -> bool:
    return names[0].lower().endswith(SUFFIX)


def _intention(model: str, missing: Sequence[Missing]) -> str:
    total = sum(file.size_bytes for file in missing)
    arrived = sum(file.arrived_bytes for file in missing)
    goes_on = f" · goes on after {gigabytes(arrived)}" if arrived else ""
    plural = "s" * (len(missing) > 1)
    return f"{model} · {len(missing)} file{plural} of weights, {gigabytes(total)}{goes_on}"


@contextmanager
def _bytes_bar(missing: Sequence[Missing]) -> Iterator[Callable[[int], None]]:
    """Bytes, rate and time left where stderr is a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(file.size_bytes for file in missing))
        yield lambda num_bytes: bar.update(task, advance=num_bytes)


def show_list(*, as_json: bool) -> None:
    """Print the models on this disk; nothing is loaded."""
    machine = read_machine()
    entries = [entry for model in cached_models() for entry in _entries(model, machine)]
    entries += [_shipped(name, machine) for name in SHIPPED]
    if as_json:
        print_json({"machine": asdict(machine), "models": [asdict(entry) for entry in entries]})
        return
    show_table(
        ("model", "on disk", "weights", "fits", "runs on"),
        [
            (e.model, gigabytes(e.bytes), e.fit.weights, e.fit.fits_in_words, e.fit.runs_in_words)
            for e in entries
        ],
    )
    print(machine.in_words)


def _entries(model: CachedModel, machine: Machine) -> list[Entry]:
    """The repository as a folder, if it is one, and each of its GGUF models."""
    found = [_entry(model, machine)] if model.is_folder else []
    tags = distinct_tags(model.ggufs)
    return found + [
        _gguf(model, name, f"{model.hub_id}:{tag}", machine) for name, tag in tags.items()
    ]


def _gguf(model: CachedModel, name: str, shown: str, machine: Machine) -> Entry:
    files = model.gguf_files(name)
    assert model.snapshot is not None, "GGUF models lie in a snapshot"
    return Entry(
        shown,
        model.snapshot.name,
        len(model.revisions),
        sum(file.stat().st_size for file in files),
        True,
        find_fit(files[0], machine),
    )


def _entry(model: CachedModel, machine: Machine) -> Entry:
    snapshot = model.snapshot
    if snapshot is None or not model.is_complete:
        fit = Fit(obstacle=f"incomplete; soloist pull {model.hub_id} goes on")
    else:
        fit = find_fit(snapshot, machine)
    commit = None if snapshot is None else snapshot.name
    return Entry(
        model.hub_id, commit, len(model.revisions), model.num_bytes, model.is_complete, fit
    )


def _shipped(name: str, machine: Machine) -> Entry:
    folder = shipped_folder(name)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Entry(name, None, 1, num_bytes, True, find_fit(folder, machine))


def take_away(model: str, *, without_asking: bool) -> None:
    """Remove a model from the cache, after a question.

    Raises:
        UserError: it is not in the cache, or nobody is there to ask.
    """
    known = {m.hub_id: m for m in cached_models()}
    hub_id, tag = split_tag(model)
    if tag is not None and hub_id in known:
        _take_gguf_away(known[hub_id], tag, without_asking=without_asking)
        return
    if model not in known:
        raise CheckpointError(
            f"no model '{model}' in the hub's cache (it holds: {', '.join(known) or 'none'})",
            "soloist list shows what can be removed; folders and shipped models stay",
        )
    found = known[model]
    freed = gigabytes(freed_bytes(found))
    count = len(found.revisions)
    status(f"{found.place} · {count} revision{'s' * (count != 1)} · {freed} become free")
    if not without_asking and not _confirmed(model):
        status("nothing was removed")
        return
    remove(found)
    status(f"removed {model}, {freed} are free")


def _take_gguf_away(model: CachedModel, tag: str, *, without_asking: bool) -> None:
    name = choose(model.hub_id, model.ggufs, tag)
    freed = gigabytes(sum(file.stat().st_size for file in model.gguf_files(name)))
    status(f"{model.place} · {name} · {freed} become free")
    if not without_asking and not _confirmed(f"{model.hub_id}:{tag}"):
        status("nothing was removed")
        return
    remove_gguf(model, name)
    status(f"removed {name} of {model.hub_id}, {freed} are free")


def _confirmed(model: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(
            f"removing '{model}' needs a yes, and stdin is no terminal", "add --yes to remove it"
        )
    sys.stderr.write(f"remove {model}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
