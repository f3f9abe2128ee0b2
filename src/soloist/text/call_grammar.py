"""Tool calls as rules of a grammar: for every way to write them, by their schemas.

`parts.py` and its readers read what comes of these.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soloist.errors import BadGrammar
from soloist.text.listed_calls import ARGUMENTS
from soloist.text.parts import CALL, CALLS, END_CALL, GRANITE_CALLS, CallFormat
from soloist.text.python_grammar import PythonCall
from soloist.text.rules import Rules, written
from soloist.text.tagged_values import FUNCTION

# What stands before calls; before others CALL does.
_MARKS: Mapping[CallFormat, str] = {"listed": CALLS, "marked": GRANITE_CALLS}

# Keywords that say no more than that a value is a text.
_OF_ANY_TEXT = {"type", "title", "description", "default", "examples", "deprecated", "$comment"}


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that may be called; a schema of its arguments, which are an object."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls as a model writes them.

    Attributes:
        style: the model's way.
        functions: those that may be called, at least one.
        is_forced: the answer is calls; otherwise text may stand before, between and behind them.
        several: more than one call is allowed.
        names_arguments: of `listed` calls, whether they are a name and arguments behind a mark.
    """

    style: CallFormat
    functions: tuple[Function, ...]
    is_forced: bool
    several: bool
    names_arguments: bool = False


def add_calls(rules: Rules, calls: Calls, *, is_alone: bool) -> str:
    """Add rules; return the name of the one that calls as a whole follow.

    Where calls are not forced, text may stand beside them if they are alone; otherwise the form of
    the answer stands instead of them.

    Raises:
        BadGrammar: a schema that this way to write calls cannot keep to.
    """
    names = [
        rules.add(f"function_{n}", _function(rules, calls, function, f"function_{n}"))
        for n, function in enumerate(calls.functions)
    ]
    one = rules.add("function", " | ".join(names))
    opener, inside, closer, between = _frame(rules, calls, one)
    is_free = is_alone and not calls.is_forced
    if not is_free:
        call = f"{opener} {inside} {closer}"
        repeated = f"{call} ({between} {call})*" if calls.several else call
        return rules.add("calls", repeated if between is not None else call)
    if not opener:
        # Text that does not begin as a call would.
        repeats = calls.several and between is not None
        calling = f"{inside} ({between} {inside})*" if repeats else inside
        start = r"\[" if calls.style == "python" else "{"
        plain = rules.add("PLAIN", rf"/([^ \t\r\n;{start}](.|\n)*)?/")
        return rules.add("free", f"{calling} | {plain}")
    mark = _MARKS.get(calls.style, CALL)
    blank = rules.blanks()
    calling = rules.add("called", f"{rules.up_to(mark)} {blank} {inside.strip()} {blank} {closer}")
    count = "*" if calls.several else "?"
    return rules.add("free", f"{calling}{count} {rules.without(mark)}")


def _frame(rules: Rules, calls: Calls, one: str) -> tuple[str, str, str, str | None]:
    """What opens calls, stands inside, closes them; what stands between, None where none follow."""
    match calls.style:
        case "bare":
            return "", one, "", '"; "'
        case "listed" if calls.names_arguments:
            return rules.spelled(CALLS), one, "", ""
        case "listed" | "marked" | "python":
            inside = f'"[" {one} (", " {one})* "]"' if calls.several else f'"[" {one} "]"'
            mark = _MARKS.get(calls.style)
            opener = "" if mark is None else f'{rules.spelled(mark)} " "?'
            return opener, inside, "", None
        case "tagged" | "values":
            begin, end = rules.spelled(CALL), rules.spelled(END_CALL)
            return f'{begin} "\\n"', one, f'"\\n" {end}', '"\\n"'


def _function(rules: Rules, calls: Calls, function: Function, rule: str) -> str:
    """What the rule of one function's call says."""
    name, schema = function.name, dict(function.parameters)
    if "type" not in schema and "$ref" not in schema:
        schema["type"] = "object"
    if calls.style == "values":
        return _values(rules, name, schema)
    if calls.style == "python":
        return PythonCall(rules, rule, schema).call(name)
    arguments = f"%json {json.dumps(written(schema))}"
    if calls.style == "listed" and calls.names_arguments:
        return f"{json.dumps(name)} {rules.spelled(ARGUMENTS)} {arguments}"
    key = "parameters" if calls.style == "bare" else "arguments"
    begin = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{json.dumps(begin)} {arguments} "}}"'


def _values(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    """A function with a tag for each value, in the order of the schema."""
    parts = [json.dumps(f"{FUNCTION}{name}>\n")]
    required = schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for key, value in schema.get("properties", {}).items():
        tagged = _tagged_value(rules, key, value, shared)
        parts.append(tagged if key in required else f"({tagged})?")
    return " ".join([*parts, '"</function>"'])


def _tagged_value(
    rules: Rules, key: str, schema: Mapping[str, Any], shared: Mapping[str, Any]
) -> str:
    begin, end = json.dumps(f"<parameter={key}>\n"), "\n</parameter>"
    match schema:
        case {"enum": list(texts)} if texts and all(isinstance(x, str) for x in texts):
            choices = " | ".join(map(json.dumps, texts))
            return f"{begin} ({choices}) {json.dumps(end + chr(10))}"
        case {"type": "string"} if set(schema) <= _OF_ANY_TEXT:
            return f'{begin} {rules.up_to(end)} "\\n"'
        case {"type": "string"}:
            told = ", ".join(sorted(set(schema) - _OF_ANY_TEXT))
            raise BadGrammar(
                f"this model writes texts between tags, where {told} of '{key}' is not supported"
            )
    return f"{begin} %json {json.dumps(written({**schema, **shared}))} {json.dumps(end + chr(10))}"
