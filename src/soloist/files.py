"""Small files, read and written: nothing but files is read, and nothing in them is trusted.

Knows no model. Who calls it says in errors of its own what is wrong with the file's contents.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from soloist.errors import NotAFile, NotWritten

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

# Objects and lists inside each other. Configurations have a handful; functions that call themselves
# for each level, such as the one that writes a value into an error, end at some hundreds.
MOST_LEVELS = 64
_TOO_DEEP = f"its objects and lists are nested too deeply (allowed: {MOST_LEVELS} levels)"


def require_file(path: Path) -> None:
    """Refuse what is no regular file: reading a pipe or a terminal would wait for ever.

    Raises:
        NotAFile: it is a folder, a pipe, a socket or a device.
        OSError: it is not there, or a link to nothing.
    """
    mode = path.stat().st_mode
    for test, kind in _KINDS:
        if test(mode):
            raise NotAFile(str(path), kind)


def is_there(path: Path) -> bool:
    """Whether a folder has such an entry, be it a link to nothing or no file."""
    return os.path.lexists(path)


def parsed_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        NotAFile: there is something else in its place.
        ValueError: saying what is wrong with the contents.
        OSError: it cannot be read.
    """
    require_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    if _is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"it holds a JSON {kind}, expected an object")  # noqa: TRY004 - of a file
    return value


def write_text(path: Path, text: str) -> None:
    """Write a file, replacing it, in a folder that is made where it is missing.

    Raises:
        NotWritten: there is no room, or no such place to write to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NotWritten(str(path), error.strerror or str(error)) from error


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner: list[object] = []
        for outer in level:
            if isinstance(outer, dict):
                inner += outer.values()
            elif isinstance(outer, list):
                inner += outer
        level = inner
    return bool(level)
