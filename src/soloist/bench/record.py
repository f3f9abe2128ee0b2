"""Result files: a JSON list of `rows`, written and read, and where a row comes from."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

from soloist.bench.rows import AnyRow
from soloist.errors import UserError
from soloist.files import write_text


def write(file: Path, rows: Sequence[AnyRow]) -> None:
    """Write rows to `file`, replacing it.

    Raises:
        NotWritten: it cannot be written.
    """
    text = json.dumps([asdict(row) for row in rows], indent=2)
    write_text(file, text + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Rows of a result file, as they are in it.

    Raises:
        UserError: the file is not there, or not such a file.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{file} cannot be read: {reason}", _WHERE_FROM) from error
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}", _WHERE_FROM) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file} is not a list of result rows", _WHERE_FROM)
    return rows


_WHERE_FROM = "make a result file with soloist bench … --output FILE"


class Origin(TypedDict):
    """Where a row comes from: fields that the rows of every bench have."""

    versions: dict[str, str]
    commit: str
    command: str
    date: str


def origin(*packages: str) -> Origin:
    """Of a row that is made now, with the versions of these packages."""
    return {
        "versions": versions(*packages), "commit": commit(), "command": command(), "date": now(),
    }  # fmt: skip


def versions(*packages: str) -> dict[str, str]:
    """Python's and each package's version."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def command() -> str:
    """The command line as a user types it; keys are not shown."""
    words = ["soloist", *sys.argv[1:]]
    for i, word in enumerate(words):
        name, is_joined, _ = word.partition("=")
        if name == "--api-key":
            if is_joined:
                words[i] = f"{name}=…"
            elif i + 1 < len(words):
                words[i + 1] = "…"
    return shlex.join(words)


def commit() -> str:
    """Short hash of the source tree this module runs from; 'unknown' outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(  # noqa: S603 - fixed words
            ["git", "-C", str(folder), *words],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
