"""The only reader of the environment: a few names, read when asked for, refused when malformed."""

import os
from dataclasses import dataclass
from pathlib import Path

from soloist.errors import SettingError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment decides.

    Attributes:
        threads: CPU threads for the reference device; None lets the machine decide.
        hub_offline: never reach for the hub; models come from folders and the local hub cache.
        debug: show tracebacks instead of one-paragraph errors.
        cache: where compiled kernels are kept; None where nobody says and no home is known.
    """

    threads: int | None = None
    hub_offline: bool = False
    debug: bool = False
    cache: Path | None = None


def read_settings() -> Settings:
    """Settings from SOLOIST_THREADS, SOLOIST_DEBUG, SOLOIST_CACHE and the hub's own HF_HUB_OFFLINE.

    SOLOIST_CACHE defaults to `soloist` in XDG_CACHE_HOME or ~/.cache.
    """
    threads = os.environ.get("SOLOIST_THREADS")
    if threads is not None and (not threads.isdecimal() or int(threads) < 1):
        raise SettingError("SOLOIST_THREADS", threads, "a whole number of at least 1")
    return Settings(
        threads=int(threads) if threads else None,
        hub_offline=_switch("HF_HUB_OFFLINE"),
        debug=_switch("SOLOIST_DEBUG"),
        cache=_cache(),
    )


def environment_with_cache(cache: Path) -> dict[str, str]:
    """This process's environment, for a child that keeps its compiled kernels in `cache`."""
    return {**os.environ, "SOLOIST_CACHE": str(cache)}


def environment_of_preparation() -> dict[str, str]:
    """This process's environment, for the one that reads requests: it has one thread and forks."""
    package = str(Path(__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{package}{os.pathsep}{known}" if known else package,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }


def _cache() -> Path | None:
    if (given := os.environ.get("SOLOIST_CACHE")) is not None:
        if not (folder := _expanded(given)).is_absolute():
            raise SettingError("SOLOIST_CACHE", given, "an absolute path")
        return folder
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))  # its standard says to ignore relative ones
    base = shared if shared.is_absolute() else _expanded("~/.cache")
    return base / "soloist" if base.is_absolute() else None


def _expanded(path: str) -> Path:
    """`path` with its ~ resolved; as it is where that home is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0").lower()
    if value not in {"", "0", "1", "true", "false", "yes", "no", "on", "off"}:
        raise SettingError(name, value, "0 or 1")
    return value in {"1", "true", "yes", "on"}
