"""Models in the hub's cache on this disk: which there are, and how to remove one."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import CacheNotFound

from soloist.errors import CheckpointError, ConfigError
from soloist.model.folder import CONFIG_FILE
from soloist.model.gguf.choosing import choose, models_in, parts
from soloist.model.hub_files import names_under
from soloist.model.shards import weight_names


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One repository of the cache that holds a model, or the beginning of one.

    Attributes:
        hub_id: 'owner/name'.
        place: its folder in the cache.
        snapshot: the folder of the revision that was fetched last; None where none is usable.
        revisions: commits that are there.
        num_bytes: of all files on disk, with those of broken downloads.
        is_complete: the configuration and all weights are there, or a GGUF model is.
        ggufs: GGUF models of the snapshot: of each the name of its file, of several the first.
    """

    hub_id: str
    place: Path
    snapshot: Path | None
    revisions: tuple[str, ...]
    num_bytes: int
    is_complete: bool
    ggufs: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        """Whether there is a model beside the GGUF models, or the beginning of one."""
        has_config = self.snapshot is not None and (self.snapshot / CONFIG_FILE).is_file()
        return not self.ggufs or (has_config and _has_weights(self.snapshot))

    def gguf_files(self, name: str) -> list[Path]:
        """The files of one of its GGUF models."""
        assert self.snapshot is not None, "GGUF models lie in a snapshot"
        return [self.snapshot / part for part in parts(name)]


def cache_folder() -> Path:
    """Where the hub's client keeps models."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_models() -> list[CachedModel]:
    """All repositories with a config.json, GGUF models or a started download, by name."""
    folder = cache_folder()
    places = sorted(folder.glob("models--*--*")) if folder.is_dir() else []
    found = [_read(place) for place in places if place.is_dir() and not place.is_symlink()]
    return [m for m in found if m.snapshot is not None or _parts(m.place)]


def remove(model: CachedModel) -> None:
    """Delete all revisions of a model; a file that other models share stays.

    Raises:
        CheckpointError: the folder is not in the cache, or could not be deleted.
    """
    if model.place.is_symlink() or model.place.resolve().parent != cache_folder().resolve():
        raise CheckpointError(f"{model.place} is not in the hub's cache, {cache_folder()}")
    if (deletion := _deletion(model)) is not None:
        deletion.execute()
    if model.place.exists():  # a download that never got so far
        shutil.rmtree(model.place, ignore_errors=True)
    if model.place.exists():
        raise CheckpointError(f"{model.place} could not be deleted", "check its permissions")
    shutil.rmtree(cache_folder() / ".locks" / model.place.name, ignore_errors=True)


def remove_gguf(model: CachedModel, tag: str) -> None:
    """Delete one GGUF model of a repository, and all of it where nothing else is there.

    Raises:
        GgufChoice: it holds no such model, or several.
        CheckpointError: as from `remove`.
    """
    name = choose(model.hub_id, model.ggufs, tag)
    if len(model.ggufs) == 1 and not model.is_folder:
        remove(model)
        return
    for file in model.gguf_files(name):
        blob = file.resolve()
        file.unlink()
        if not _is_linked(model, blob):
            blob.unlink(missing_ok=True)


def _is_linked(model: CachedModel, blob: Path) -> bool:
    """Whether another revision has the same file."""
    return any(file.resolve() == blob for file in (model.place / "snapshots").rglob("*"))


def freed_bytes(model: CachedModel) -> int:
    """What `remove` makes free; less than the model's size where models share files."""
    parts = sum(part.lstat().st_size for part in _parts(model.place))
    deletion = _deletion(model)
    return model.num_bytes if deletion is None else deletion.expected_freed_size + parts


def _deletion(model: CachedModel) -> huggingface_hub.DeleteCacheStrategy | None:
    """The hub's own way to delete a repository; None for what it does not take for one."""
    try:
        scan = huggingface_hub.scan_cache_dir(cache_folder())
    except CacheNotFound:
        return None
    # Copies of a repository have the same commits: only this one may be in sight.
    ours = frozenset(r for r in scan.repos if r.repo_path.resolve() == model.place.resolve())
    commits = [revision.commit_hash for repo in ours for revision in repo.revisions]
    return replace(scan, repos=ours).delete_revisions(*commits) if commits else None


def _read(place: Path) -> CachedModel:
    snapshots = place / "snapshots"
    usable = [s for s in snapshots.glob("*") if (s / CONFIG_FILE).is_file() or _ggufs(s)]
    usable.sort(key=lambda s: s.stat().st_mtime)
    snapshot = usable[-1] if usable else None
    ggufs = () if snapshot is None else _ggufs(snapshot)
    blobs = {blob.resolve() for blob in (place / "blobs").glob("*") if blob.is_file()}
    # Where a system has no links, files lie in the snapshots themselves.
    plain = [f for f in snapshots.rglob("*") if f.is_file() and not f.is_symlink()]
    return CachedModel(
        hub_id=place.name.removeprefix("models--").replace("--", "/", 1),
        place=place,
        snapshot=snapshot,
        revisions=tuple(sorted(s.name for s in snapshots.glob("*"))),
        num_bytes=sum(file.stat().st_size for file in [*blobs, *plain]),
        is_complete=snapshot is not None and (bool(ggufs) or _has_weights(snapshot)),
        ggufs=ggufs,
    )


def _ggufs(snapshot: Path) -> tuple[str, ...]:
    return tuple(models_in(names_under(snapshot)))


def _parts(place: Path) -> list[Path]:
    return sorted((place / "blobs").glob("*.incomplete"))


def _has_weights(snapshot: Path | None) -> bool:
    if snapshot is None:
        return False
    try:
        return all((snapshot / name).is_file() for name in weight_names(snapshot))
    except ConfigError:  # whoever reads the model says what is wrong
        return True
