"""Text to measure with: real Python, the same everywhere. Pure."""

import argparse
import inspect

# About so many, whatever the tokenizer.
CHARACTERS_PER_TOKEN = 4


def python_text() -> str:
    """A module of the standard library."""
    return inspect.getsource(argparse)


def python_characters(count: int) -> str:
    """The first `count` characters of it, again and again."""
    text = python_text()
    return (text * (count // len(text) + 1))[:count]
