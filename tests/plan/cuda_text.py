"""Runs functions of one expression that the plan writes for CUDA, in Python."""

import re
from collections.abc import Callable

_FUNCTION = re.compile(r"u32 (\w+)\(([^)]*)\) \{ return (.*?); \}")


def functions(text: str) -> dict[str, Callable[..., int]]:
    """By name; numbers are unsigned integers, and the functions may call each other."""
    found: dict[str, Callable[..., int]] = {}
    for name, given, result in _FUNCTION.findall(text):
        arguments = ", ".join(argument.split()[-1] for argument in given.split(", "))
        expression = re.sub(r"\b(\d+)u\b", r"\1", result).replace("/", "//")
        found[name] = eval(f"lambda {arguments}: {expression}", found)  # noqa: S307 - our own text
    return found
