"""Tool calls as a list of Python calls, which some Llama templates ask for, read while written.

    [weather(city='Zürich', days=[1, 2]), time()]

Arguments have names, and their values are literals, each told as JSON at its end.
"""

import ast
import json

from soloist.text.calls import SPACE, Progress, Reader

_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""


class PythonReader(Reader):
    """Reads a list of calls, its opening bracket included."""

    def __init__(self) -> None:
        super().__init__()
        self._stage = self._at_start
        self._word = ""
        self._num_values = 0
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def _at_start(self, character: str) -> None:
        self.failed = character != "["
        self._stage = self._in_name

    def _in_name(self, character: str) -> Progress | None:
        """A function's name, up to its bracket."""
        if (name := self._named(character, "(")) is None:
            return None
        self._num_values, self._stage = 0, self._in_key
        return Progress(name, "")

    def _in_key(self, character: str) -> Progress | None:
        """An argument's name, or the end of the call."""
        if character == ")" and not self._word:
            return self._end("}" if self._num_values else "{}")
        if (key := self._named(character, "=")) is None:
            return None
        self._depth, self._quote, self._stage = 0, "", self._in_value
        before = ", " if self._num_values else "{"
        self._num_values += 1
        return Progress(None, f"{before}{json.dumps(key)}: ")

    def _named(self, character: str, end: str) -> str | None:
        """A name with dots, once `end` comes."""
        if character == end:
            name, self._word = self._word.strip(), ""
            self.failed = not all(part.isidentifier() for part in name.split("."))
            return None if self.failed else name
        if character not in SPACE or self._word:
            self._word += character
            self.failed = not (character.isidentifier() or character in SPACE + ".0123456789")
        return None

    def _in_value(self, character: str) -> Progress | None:
        if self._quote:
            self._take_in_text(character)
        elif character in _QUOTES:
            self._quote = character
        elif character in _OPEN:
            self._depth += 1
        elif self._depth == 0 and character in ",)":
            return self._end_value(character)
        elif character in _CLOSE:
            self._depth -= 1
        self._word += character
        return None

    def _take_in_text(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._quote = ""

    def _end_value(self, character: str) -> Progress:
        value, self._word = json_of_literal(self._word), ""
        self.failed, self._stage = value is None, self._in_key
        if value is None:
            return Progress(None, "")
        return self._end(value + "}") if character == ")" else Progress(None, value)

    def _end(self, arguments: str) -> Progress:
        self.num_read += 1
        self.text = ""
        self._stage = self._between
        return Progress(None, arguments)

    def _between(self, character: str) -> None:
        if character == "]":
            self.is_complete = True
        elif character == ",":
            self._stage = self._in_name
        else:
            self.failed = character not in SPACE


def json_of_literal(text: str) -> str | None:
    """A Python literal as JSON; None if it is no literal that JSON has a value for."""
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
