"""Text to measure with: real Python, the same everywhere. Pure."""

import argparse
import inspect
from pathlib import Path

from soloist.errors import UserError

# About so many, whatever the tokenizer.
CHARACTERS_PER_TOKEN = 4


def python_text() -> str:
    """A module of the standard library."""
    return inspect.getsource(argparse)


def text_of(file: Path | None) -> str:
    """What a file holds, or that module. Raises UserError where it cannot be read as text."""
    if file is None:
        return python_text()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}", "name a file of text") from error


def python_characters(count: int) -> str:
    """The first `count` characters of it, again and again."""
    text = python_text()
    return (text * (count // len(text) + 1))[:count]
