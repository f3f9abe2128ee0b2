"""Which files are GGUF files, and which of them belong together: by names and first bytes alone."""

import re
from pathlib import Path
from typing import Final

MAGIC: Final = b"GGUF"
SUFFIX: Final = ".gguf"

MOST_FILES: Final = 10_000  # of one model

_NUMBERED = re.compile(
    r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE
)


def is_gguf(path: Path) -> bool:
    """Whether a path is meant as a GGUF file: by its ending, or by its first bytes."""
    if path.suffix.lower() == SUFFIX:
        return not path.is_dir()
    if not path.is_file():
        return False
    try:
        with path.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def first_of(name: str) -> str:
    """The name of the first file that a file belongs to; its own where it is no part."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return name
    return f"{found['stem']}-{1:05}-of-{found['count']}{found['suffix']}"


def parts_of(name: str) -> list[str]:
    """The names of all files that a file belongs to; its own where it is no part."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return [name]
    count = min(int(found["count"]), MOST_FILES)
    return [
        f"{found['stem']}-{i:05}-of-{found['count']}{found['suffix']}" for i in range(1, count + 1)
    ]


def stem_of(name: str) -> str:
    """A file's name without the numbers of a part and without its ending."""
    found = _NUMBERED.fullmatch(name)
    return Path(name).stem if found is None else found["stem"]
