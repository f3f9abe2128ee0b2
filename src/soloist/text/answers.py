"""Grammars of whole answers, in llguidance's dialect of Lark: reasoning, then calls or a form.

JSON is written as Python's `json.dumps` writes it, which is what chat templates show to models: a
space after each comma and colon, no other white space. So the text between values is forced, and a
small model cannot lose itself in blanks. `x-guidance` in a schema may say otherwise.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from soloist.text.call_grammar import Calls, add_calls
from soloist.text.parts import END_THINK, THINK
from soloist.text.rules import Rules, written

# One of llguidance's grammars, as JSON.
Form = Mapping[str, Any]

# Whether reasoning stands before an answer's form: none, some that has begun, perhaps some.
Reasoning = Literal["none", "begun", "perhaps"]


def json_form(schema: Mapping[str, Any]) -> Form:
    """A JSON value that a schema accepts."""
    return {"json_schema": written(schema)}


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
    # One word to the lexer: thousands of them would be too many.
    return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))}


def lark_form(grammar: str) -> Form:
    """What a grammar accepts; its first rule is `start`."""
    return {"lark_grammar": grammar}


def answer_grammar(
    form: Form | None,
    calls: Calls | None = None,
    reasoning: Reasoning = "none",
    special: Mapping[str, int] = {},
    marks: tuple[str, str] = (THINK, END_THINK),
) -> str:
    """A grammar for `Grammars.compile`.

    Args:
        form: of the answer; None where only calls matter.
        calls: that may come instead of the form, or must, or beside any text.
        reasoning: what stands before.
        special: ids of those marks that are special tokens.
        marks: what stands around reasoning.
    """
    rules = Rules(special)
    kinds = [] if form is None else ["@answer"]
    if calls is not None:
        kinds.insert(0, add_calls(rules, calls, is_alone=form is None))
    before = ""
    if reasoning != "none":
        begin = "" if reasoning == "begun" else rules.spelled(marks[0])
        before = f"{begin} {rules.up_to(marks[1])} {rules.blanks()}"
        before = f"{before} " if reasoning == "begun" else f"({before})? "
    lark = f"start: {before}({' | '.join(kinds)})\n{rules.text()}"
    grammars = [{"name": "main", "lark_grammar": lark}]
    if form is not None:
        grammars.append({"name": "answer", **form})
    return json.dumps({"grammars": grammars})
