"""Whether a module's name is on a list, as each library that wrote such lists matches them."""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from soloist.errors import WrongType
from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.patterns import compile_bounded

IsListed = Callable[[str], bool]

# Expressions that can be alternatives of one.
_PLAIN = re.compile(r"[\w.-]+")
# A name up to here is a whole one: 'layers.1' is in 'layers.1.mlp', not in 'layers.11'.
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def read_names(fields: QuantizationFields, name: str) -> tuple[str, ...]:
    """A list of names; empty where it is absent or null.

    Raises:
        WrongType: it is something else.
    """
    return tuple(fields.strings(name))


def by_transformers(fields: QuantizationFields, name: str) -> IsListed:
    """A regular expression for the beginning of the module's name, or the end of it."""
    keys = read_names(fields, name)
    # Mixtures have hundreds of keys for ten thousands of modules: plain ones become one pattern.
    plain = [key for key in keys if _PLAIN.fullmatch(key)]
    expressions = [
        *(key for key in keys if key not in plain),
        *(["|".join(plain)] if plain else []),
    ]
    patterns = [compiled(fields, name, f"(?:{key}){_BOUNDARY}") for key in expressions]
    return lambda module: (
        any(pattern.match(module) for pattern in patterns) or module.endswith(keys)
    )


def by_compressed_tensors(fields: QuantizationFields, name: str) -> IsListed:
    """The whole name, or after 're:' a regular expression for its beginning; or its class."""
    return matcher(fields, name, read_names(fields, name))


def matcher(fields: QuantizationFields, name: str, given: Sequence[str]) -> IsListed:
    """As `by_compressed_tensors`, of entries that were read already."""
    patterns = [
        compiled(fields, name, entry.removeprefix("re:"))
        for entry in given
        if entry.startswith("re:")
    ]
    return lambda module: (
        module in given or "Linear" in given or any(pattern.match(module) for pattern in patterns)
    )


def by_wildcards(fields: QuantizationFields, name: str) -> IsListed:
    """A name with '*' for anything: of the module, or of one that it is a part of."""
    keys = read_names(fields, name)
    return lambda module: any(
        fnmatchcase(module, key) or module.startswith(f"{key}.") for key in keys
    )


def by_substring(
    fields: QuantizationFields, name: str, is_meant: Callable[[str], bool] = lambda _: True
) -> IsListed:
    """Some part of the module's name, of those entries that are meant."""
    keys = tuple(filter(is_meant, read_names(fields, name)))
    return lambda module: any(key in module for key in keys)


def compiled(fields: QuantizationFields, name: str, pattern: str) -> re.Pattern[str]:
    """A regular expression out of a field.

    Raises:
        WrongType: it is none, or one that may take long.
    """
    try:
        return compile_bounded(pattern)
    except ValueError as error:
        raise WrongType(
            fields.file, fields.path(name), pattern, f"a regular expression ({error})"
        ) from error
