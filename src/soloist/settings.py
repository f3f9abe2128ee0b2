"""The only reader of the environment: three names, read when asked for, refused when malformed."""

import os
from dataclasses import dataclass

from soloist.errors import SettingError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment decides.

    Attributes:
        threads: CPU threads for the reference device; None lets the machine decide.
        hub_offline: never reach for the hub; models come from folders and the local hub cache.
        debug: show tracebacks instead of one-paragraph errors.
    """

    threads: int | None = None
    hub_offline: bool = False
    debug: bool = False


def read_settings() -> Settings:
    """Settings from SOLOIST_THREADS, SOLOIST_DEBUG and the hub's own HF_HUB_OFFLINE."""
    threads = os.environ.get("SOLOIST_THREADS")
    if threads is not None and (not threads.isdecimal() or int(threads) < 1):
        raise SettingError("SOLOIST_THREADS", threads, "a whole number of at least 1")
    return Settings(
        threads=int(threads) if threads else None,
        hub_offline=_switch("HF_HUB_OFFLINE"),
        debug=_switch("SOLOIST_DEBUG"),
    )


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0").lower()
    if value not in {"", "0", "1", "true", "false", "yes", "no", "on", "off"}:
        raise SettingError(name, value, "0 or 1")
    return value in {"1", "true", "yes", "on"}
