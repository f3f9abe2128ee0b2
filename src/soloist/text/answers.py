"""Grammars of whole answers, in llguidance's dialect of Lark: a form, and what stands before it.

JSON is written as Python's `json.dumps` writes it, which is what chat templates show to models: a
space after each comma and colon, no other white space. So the text between values is forced, and a
small model cannot lose itself in blanks. `x-guidance` in a schema may say otherwise.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from soloist.text.parts import CALL, END_CALL, END_THINK, THINK, CallFormat

_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Next to a mark.
_BLANKS = r"/[ \n]{0,4}/"
_ANY = r"(.|\n)*"

Schema = Mapping[str, Any]
# One of llguidance's grammars, as JSON.
Form = Mapping[str, Any]

# Whether reasoning stands before an answer's form: none, some that has begun, perhaps some.
Reasoning = Literal["none", "begun", "perhaps"]


def json_form(schema: Schema) -> Form:
    """A JSON value that a schema accepts."""
    return {"json_schema": _written(schema)}


def object_form() -> Form:
    """Any JSON object."""
    return json_form({"type": "object"})


def regex_form(pattern: str) -> Form:
    """A text that a pattern matches as a whole, in the syntax of Rust's regular expressions."""
    # Between slashes in one line: those of the pattern are escaped, unless they are so already.
    shown = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    escaped = re.sub(r"\\.|/|\n", lambda x: shown.get(x[0], x[0]), pattern, flags=re.DOTALL)
    return {"lark_grammar": f"start: /{escaped}/"}


def choice_form(choices: Sequence[str]) -> Form:
    """One of several texts."""
    return {"lark_grammar": "start: " + " | ".join(map(json.dumps, choices))}


def lark_form(grammar: str) -> Form:
    """What a grammar accepts; its first rule is `start`."""
    return {"lark_grammar": grammar}


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that may be called; a schema of its arguments, which are an object."""

    name: str
    parameters: Schema


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls as a model writes them.

    Attributes:
        style: the model's way.
        functions: those that may be called, at least one.
        is_forced: the answer is calls; otherwise text may stand before, between and behind them.
        several: more than one call is allowed.
    """

    style: CallFormat
    functions: tuple[Function, ...]
    is_forced: bool
    several: bool


def answer_grammar(reasoning: Reasoning, form: Form | None, calls: Calls | None = None) -> str:
    """A grammar for `Grammars.compile`: reasoning, then calls or the form.

    Args:
        reasoning: what stands before.
        form: of the answer; None where only calls matter.
        calls: that may come instead of the form, or must.
    """
    rules: dict[str, str] = {}
    kinds = []
    if calls is not None:
        kinds.append(_add_calls(rules, calls, is_alone=form is None))
    if form is not None:
        kinds.append("@answer")
    before = ""
    if reasoning != "none":
        begin = "" if reasoning == "begun" else rf"[ \n]{{0,4}}{THINK}"
        rules["reasoning[lazy]"] = f"/{begin}{_ANY}{_escaped(END_THINK)}/"
        rules["BLANKS"] = _BLANKS
        before = "reasoning BLANKS " if reasoning == "begun" else "(reasoning BLANKS)? "
    rules = {"start": f"{before}({' | '.join(kinds)})", **rules}
    lark = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
    grammars = [{"name": "main", "lark_grammar": lark}]
    if form is not None:
        grammars.append({"name": "answer", **form})
    return json.dumps({"grammars": grammars})


def _add_calls(rules: dict[str, str], calls: Calls, *, is_alone: bool) -> str:
    """Add rules; return the name of the one that calls as a whole follow.

    Where calls are not forced, text may stand beside them if they are alone; otherwise the form of
    the answer stands instead of them.
    """
    names = []
    for index, function in enumerate(calls.functions):
        names.append(f"function_{index}")
        rules[names[-1]] = _function(calls.style, function)
    rules["function"] = " | ".join(names)
    if calls.style == "bare":
        rules["call"], between = "function", '"; "'
    else:
        begin, end = json.dumps(CALL + "\n"), json.dumps("\n" + END_CALL)
        rules["call"], between = f"{begin} function {end}", r'"\n"'
    rules["calls"] = f"call ({between} call)*" if calls.several else "call"
    if calls.is_forced or not is_alone:
        return "calls"
    if calls.style == "bare":
        # Text that does not begin as a call would.
        rules["TEXT"] = rf"/([^ \t\r\n;{{]{_ANY})?/"
        rules["free"] = "calls | TEXT"
    else:
        mark = _escaped(CALL)
        rules["BLANKS"] = _BLANKS
        rules["before[lazy]"] = f"/{_ANY}{mark}/"
        rules["called"] = f'before BLANKS function BLANKS "{END_CALL}"'
        rules["TEXT"] = f"/{_ANY}/ & ~/{_ANY}{mark}{_ANY}/"
        rules["free"] = "called* TEXT" if calls.several else "called? TEXT"
        del rules["call"], rules["calls"]
    return "free"


def _function(style: CallFormat, function: Function) -> str:
    key = "parameters" if style == "bare" else "arguments"
    begin = f'{{"name": {json.dumps(function.name)}, "{key}": '
    schema = dict(function.parameters)
    if "type" not in schema and "$ref" not in schema:
        schema["type"] = "object"
    return f'{json.dumps(begin)} %json {json.dumps(_written(schema))} "}}"'


def _written(schema: Schema) -> dict[str, Any]:
    """The schema with how JSON is written, and without leave to skip what is not understood."""
    asked = schema.get("x-guidance")
    more = asked if isinstance(asked, Mapping) else {}
    return {**schema, "x-guidance": {**_WRITTEN, **more, "lenient": False}}


def _escaped(mark: str) -> str:
    return mark.replace("/", r"\/")
