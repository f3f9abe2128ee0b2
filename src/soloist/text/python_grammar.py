"""A function's call in Python, held to a JSON schema of its arguments; read by `python_calls.py`.

    weather(city='Zürich', days=[1, 2])

Arguments and keys come in the order of the schema. Of an object that may have further properties
only those come that the schema names.
"""

import json
import keyword
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from soloist.errors import BadGrammar
from soloist.text.rules import Rules, written

Schema = Mapping[str, Any]

_SAYS_NOTHING = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$defs", "definitions", "$schema", "$id",
}  # fmt: skip
# By type, keywords that are kept to; those of numbers are llguidance's to judge.
_KNOWN: dict[str, set[str]] = {
    "string": {"minLength", "maxLength"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_NUMBERS = ("integer", "number")
_PYTHON_TYPES = {
    "string": str, "boolean": bool, "null": NoneType, "array": list, "object": dict,
}  # fmt: skip
_TYPES = (*_KNOWN, *_NUMBERS)

# One character between quotes. All that has to be escaped can be; nothing else is.
_CHARACTER = r"([^{quote}\\\x00-\x1f\x7f]|\\[\\'\"nrt]|\\x[01][0-9a-f])"
# What a float holds, so that no number reads as infinite.
_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/"
_INTEGER = r"/-?(0|[1-9][0-9]{0,18})/"


class PythonCall:
    """Rules of one function's call.

    Args:
        rules: gain what is needed.
        name: begins the names of these rules; nobody else's begin so.
        schema: of the arguments.
    """

    def __init__(self, rules: Rules, name: str, schema: Schema) -> None:
        self._rules, self._name, self._root = rules, name, schema
        self._referred: dict[str, str] = {}
        self._num_lists = 0

    def call(self, function: str) -> str:
        """The call as a rule says it.

        Raises:
            BadGrammar: a name that Python does not have, or a schema that cannot be kept to.
        """
        _check_name(function, function.split("."))
        schema, referred = self._root, set()
        while "$ref" in schema and str(schema["$ref"]) not in referred:
            referred.add(str(schema["$ref"]))
            schema = self._target(schema, "the arguments")
        if schema.get("type") != "object":
            raise BadGrammar("arguments of a Python call are an object; type has to be 'object'")
        self._check(schema, {"type", *_KNOWN["object"]}, "the arguments")
        for key in _of(schema, "properties", dict, "the arguments"):
            _check_name(key, [key])
        members = self._members(schema, "the arguments", lambda key: f"{key}=")
        return f'{_text(function + "(")} {members} ")"'

    # --- lists of members -------------------------------------------------------------------------

    def _members(self, schema: Schema, place: str, spelled: Any) -> str:  # noqa: ANN401 - str → str
        """Arguments, or what stands between braces: the required ones, and others or not."""
        properties = _of(schema, "properties", dict, place)
        required = set(map(str, _of(schema, "required", list, place)))
        if absent := sorted(required - set(properties)):
            raise BadGrammar(f"{absent[0]!r} of {place} is required, but not in properties")
        members = [
            (f"{_text(spelled(key))} {self._value(value, repr(key))}", key in required)
            for key, value in properties.items()
        ]
        return self._listed(members) if members else ""

    def _listed(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in order with commas between them; those that are not required may be left out.

        Rule `…_n` is what may follow where the first n are over and one of them was there.
        """
        self._num_lists += 1
        name, begins = f"{self._name}_list_{self._num_lists}", []
        for n in range(len(members), 0, -1):
            member, is_required = members[n - 1]
            after = f"{name}_{n}" if n < len(members) else ""
            one = f'", " {member}'
            self._rules.add(f"{name}_{n - 1}", f"{one if is_required else f'({one})?'} {after}")
        for n, (member, is_required) in enumerate(members, 1):
            begins.append(f"{member} {f'{name}_{n}' if n < len(members) else ''}")
            if is_required:
                break
        can_be_empty = not any(is_required for _, is_required in members)
        return f"({' | '.join(begins)}){'?' if can_be_empty else ''}"

    # --- values -----------------------------------------------------------------------------------

    def _value(self, schema: object, place: str) -> str:
        """A literal that keeps to a schema; in brackets where that is several things."""
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise BadGrammar(f"{place} has a schema that is no object")
        if "$ref" in schema:
            return self._reference(schema, place)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._combined(schema, several, place)
        if "const" in schema or "enum" in schema:
            return self._one_of(schema, place)
        if "type" not in schema and _guessed(schema) is None:
            self._check(schema, (), place)
            return self._anything()
        kinds = _types(schema, _guessed(schema), place)
        if not set(kinds) & set(_NUMBERS):
            self._check(schema, {"type"}.union(*(_KNOWN[kind] for kind in kinds)), place)
        return _either(self._typed(kind, schema, place, kinds) for kind in kinds)

    def _typed(self, kind: str, schema: Schema, place: str, kinds: Sequence[str]) -> str:
        match kind:
            case "string":
                return self._string(schema, place)
            case "boolean":
                return '("True" | "False")'
            case "null":
                return '"None"'
            case "array":
                return self._array(schema, place)
            case "object":
                return self._object(schema, place)
        others = set().union(*(_KNOWN.get(other, set()) for other in kinds))
        own = {k: v for k, v in schema.items() if k not in _SAYS_NOTHING | others | {"type"}}
        if own:
            # A number is written in Python as in JSON.
            return f"%json {json.dumps(written({'type': kind, **own}))}"
        pattern = _INTEGER if kind == "integer" else _NUMBER
        return self._rules.add(f"PYTHON_{kind.upper()}", pattern)

    def _string(self, schema: Schema, place: str) -> str:
        low, high = _bounds(schema, "minLength", "maxLength", place)
        count = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
        kinds = [f"{q}{_CHARACTER.replace('{quote}', q)}{count}{q}" for q in ("'", '"')]
        pattern = f"/{'|'.join(kinds)}/"
        return self._rules.add("PYTHON_TEXT", pattern) if count == "*" else pattern

    def _array(self, schema: Schema, place: str) -> str:
        low, high = _bounds(schema, "minItems", "maxItems", place)
        if high == 0:
            return '("[" "]")'
        item = self._value(schema.get("items", {}), f"an item of {place}")
        most = "" if high is None else high - 1
        further = "" if high == 1 else f'(", " {item}){{{max(0, low - 1)},{most}}}'
        items = f"{item} {further}"
        return f'("[" {items} "]")' if low else f'("[" ({items})? "]")'

    def _object(self, schema: Schema, place: str) -> str:
        more = schema.get("additionalProperties", True)
        if _of(schema, "properties", dict, place) or more is False:
            members = self._members(schema, place, lambda key: f"{key!r}: ")
        elif required := _of(schema, "required", list, place):
            raise BadGrammar(f"{required[0]!r} of {place} is required, but not in properties")
        else:
            key, value = self._string({}, place), self._value(more, f"a value of {place}")
            members = f'({key} ": " {value} (", " {key} ": " {value})*)?'
        return f'("{{" {members} "}}")'

    def _anything(self) -> str:
        """Any literal."""
        rule = "python_value"
        text = self._string({}, "")
        number = self._rules.add("PYTHON_NUMBER", _NUMBER)
        kinds = [
            text, number, '"True"', '"False"', '"None"', f'"[" ({rule} (", " {rule})*)? "]"',
            f'"{{" ({text} ": " {rule} (", " {text} ": " {rule})*)? "}}"',
        ]  # fmt: skip
        return self._rules.add(rule, " | ".join(kinds))

    def _one_of(self, schema: Schema, place: str) -> str:
        self._check(schema, ("const", "enum", "type"), place)
        kinds = _types(schema, list(_TYPES), place)
        values = _of(schema, "enum", list, place) if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [value for value in values if _same(value, schema["const"])]
        fitting = [value for value in values if any(_is_of(value, kind) for kind in kinds)]
        if not fitting:
            raise BadGrammar(f"{place} allows no value")
        return _either(_text(repr(value)) for value in fitting)

    def _combined(self, schema: Schema, keyword_: str, place: str) -> str:
        self._check(schema, (keyword_,), place)
        kinds = schema[keyword_]
        if not isinstance(kinds, list) or not kinds:
            raise BadGrammar(f"{keyword_} of {place} is no list of schemas")
        if keyword_ == "allOf" and len(kinds) > 1:
            raise BadGrammar(f"allOf of {place} has several schemas; Python calls support one")
        if keyword_ == "oneOf" and len(kinds) > 1 and not _are_apart(kinds):
            raise BadGrammar(
                f"oneOf of {place} has schemas that may overlap; use anyOf or different types"
            )
        return _either(self._value(kind, place) for kind in kinds)

    # --- references -------------------------------------------------------------------------------

    def _reference(self, schema: Schema, place: str) -> str:
        name = str(schema["$ref"])
        if name not in self._referred:
            rule = self._referred[name] = f"{self._name}_ref_{len(self._referred)}"
            # Known before its rule is made: a schema may hold itself.
            self._rules.add(rule, self._value(self._target(schema, place), place))
        return self._referred[name]

    def _target(self, schema: Schema, place: str) -> Schema:
        self._check(schema, ("$ref",), place)
        found: Any = self._root
        path = schema["$ref"]
        if not isinstance(path, str) or not path.startswith("#/"):
            raise BadGrammar(f"$ref of {place} does not begin with '#/', so it cannot be resolved")
        for step in path[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or found is schema:
            raise BadGrammar(f"$ref of {place}: there is no {path!r}")
        return found

    def _check(self, schema: Schema, known: Iterable[str], place: str) -> None:
        """Refuse keywords that would be left out."""
        if unknown := sorted(set(schema) - _SAYS_NOTHING - set(known)):
            raise BadGrammar(f"{unknown[0]} of {place} is not supported in Python calls")


def _text(literal: str) -> str:
    return json.dumps(literal)


def _of(schema: Schema, key: str, kind: type, place: str) -> Any:  # noqa: ANN401 - a list or a dict
    """What a keyword says, or nothing."""
    given = schema.get(key, kind())
    if not isinstance(given, kind):
        raise BadGrammar(f"{key} of {place} is no {'list' if kind is list else 'object'}")
    return given


def _bounds(schema: Schema, least: str, most: str, place: str) -> tuple[int, int | None]:
    """Two counts; of the second, None where there is none."""
    counts = []
    for key in (least, most):
        given = schema.get(key)
        if given is not None and (not _is_of(given, "integer") or given < 0):
            raise BadGrammar(f"{key} of {place} is no whole number of at least 0")
        counts.append(None if given is None else int(given))
    low, high = counts[0] or 0, counts[1]
    if high is not None and low > high:
        raise BadGrammar(f"{place} allows no value: {least} is above {most}")
    return low, high


def _either(kinds: Iterable[str]) -> str:
    given = list(dict.fromkeys(kinds))
    return given[0] if len(given) == 1 else f"({' | '.join(given)})"


def _check_name(name: str, words: Iterable[str]) -> None:
    for word in words:
        if not (word.isascii() and word.isidentifier()) or keyword.iskeyword(word):
            raise BadGrammar(f"{name!r} is no Python identifier; this model writes calls in Python")


def _types(schema: Schema, default: object, place: str) -> list[str]:
    """What a schema says of a value's type."""
    given = schema.get("type", default)
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not kinds or not all(kind in _TYPES for kind in kinds):
        raise BadGrammar(f"{place} has a type that is none of {', '.join(_TYPES)}")
    return kinds


def _guessed(schema: Schema) -> str | None:
    """The type of a schema that says it by its keywords alone."""
    return next((kind for kind, known in _KNOWN.items() if known & set(schema)), None)


def _is_of(value: object, kind: str) -> bool:
    if kind in _PYTHON_TYPES:
        return isinstance(value, _PYTHON_TYPES[kind])
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (kind == "number" or is_whole)


def _same(a: object, b: object) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _are_apart(kinds: Sequence[object]) -> bool:
    """Whether no value keeps to two of these schemas, as far as their types say."""
    types = [kind.get("type") if isinstance(kind, Mapping) else None for kind in kinds]
    named = [kind for kind in types if isinstance(kind, str)]
    both_numbers = set(named) >= set(_NUMBERS)
    return len(set(named)) == len(kinds) and not both_numbers
