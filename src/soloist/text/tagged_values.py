"""Qwen3-Coder's tool calls, values between tags, read while they are written.

    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>

A value is a text, or JSON where the function's schema says that it is none. Texts are told as they
are written, other values at their end.
"""

import json
from collections.abc import Set as AbstractSet

from soloist.text.calls import SPACE, Progress, Reader
from soloist.text.markers import may_become
from soloist.text.python_calls import json_of_literal

FUNCTION = "<function="
_PARAMETER, _END_PARAMETER, _END_FUNCTION = "<parameter=", "</parameter>", "</function>"
_ENDS = ("\n" + _END_PARAMETER, _END_PARAMETER)


class TaggedValuesReader(Reader):
    """Reads one call.

    Args:
        is_open: whether its first tag was read up to the name.
        json_parameters: (function, parameter) of values that are no texts.
    """

    def __init__(
        self, *, is_open: bool, json_parameters: AbstractSet[tuple[str, str]] = frozenset()
    ) -> None:
        super().__init__()
        self._json_parameters = json_parameters
        self._stage = self._in_function if is_open else self._before_function
        self._tag = self._function = ""
        self._num_values = 0
        self._held = ""
        self._is_text = self._is_begun = False

    def _tag_at(self, character: str, *tags: str) -> str | None:
        """The tag that is whole now, white space before it left out."""
        self._tag = (self._tag + character).lstrip(SPACE)
        if self._tag in tags:
            whole, self._tag = self._tag, ""
            return whole
        self.failed = not any(tag.startswith(self._tag) for tag in tags)
        return None

    def _before_function(self, character: str) -> None:
        if self._tag_at(character, FUNCTION):
            self._stage = self._in_function

    def _in_function(self, character: str) -> Progress | None:
        if (name := self._name(character)) is None:
            return None
        self._function, self._stage = name, self._between
        return Progress(name, "")

    def _name(self, character: str) -> str | None:
        """Characters up to '>' are a name."""
        if character != ">":
            self._tag += character
            self.failed = character in SPACE + "<"
            return None
        name, self._tag = self._tag, ""
        self.failed = not name
        return name or None

    def _between(self, character: str) -> Progress | None:
        """Parameters of the function, or its end."""
        tag = self._tag_at(character, _PARAMETER, _END_FUNCTION)
        if tag == _PARAMETER:
            self._stage = self._in_key
        if tag != _END_FUNCTION:
            return None
        self.num_read, self.is_complete = 1, True
        return Progress(None, "}" if self._num_values else "{}")

    def _in_key(self, character: str) -> Progress | None:
        if (key := self._name(character)) is None:
            return None
        self._is_text = (self._function, key) not in self._json_parameters
        self._held, self._is_begun, self._stage = "", False, self._in_value
        before = ", " if self._num_values else "{"
        self._num_values += 1
        return Progress(None, f"{before}{_quoted(key)}: " + ('"' if self._is_text else ""))

    def _in_value(self, character: str) -> Progress | None:
        # A line break next to a tag belongs to the tag.
        if not self._is_begun:
            self._is_begun = True
            if character == "\n":
                return None
        self._held += character
        if self._held.endswith(_END_PARAMETER):
            rest = self._held.removesuffix(_END_PARAMETER).removesuffix("\n")
            self._stage = self._between
            return Progress(None, _quoted(rest)[1:] if self._is_text else _json_of(rest))
        if not self._is_text:
            return None
        safe = len(self._held) - may_become(self._held, _ENDS)
        told, self._held = self._held[:safe], self._held[safe:]
        return Progress(None, _quoted(told)[1:-1])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_of(text: str) -> str:
    """A value as JSON: as it was written, or as Python has it, or as a text."""
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return json_of_literal(text) or _quoted(text)
    return text.strip()


def _refuse(name: str) -> None:
    raise ValueError(name)
