"""One tool call that a model writes as a JSON object, read while it is written.

The object has a name, and arguments under one of two names. Nothing here raises: what is no call is
`failed`, and whoever reads gives its text to the user as it is.
"""

import json
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_OPEN, _CLOSE = "{[", "}]"


@dataclass(frozen=True, slots=True)
class Progress:
    """What some characters of a call told.

    Attributes:
        name: of the function, once, as soon as it is known.
        arguments: the next piece of their JSON text.
    """

    name: str | None
    arguments: str


class _Value:
    """Characters of one JSON value, to its end."""

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, character: str) -> bool:
        """Whether `character` belongs to the value."""
        if self.has_ended or (self._is_scalar and character in ",}]" + _SPACE):
            self.has_ended = True
            return False
        self.text += character
        if self._in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string = True
        elif character in _OPEN:
            self._depth += 1
        elif character in _CLOSE:
            self._depth -= 1
            self.has_ended = self._depth <= 0
        return True

    def _take_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.has_ended = self._depth == 0

    @property
    def _is_scalar(self) -> bool:
        return bool(self.text) and self.text[0] not in '"{['


class CallReader:
    """Reads one call.

    Attributes:
        text: every character taken.
        name: of the function, once known.
        arguments: JSON text of what was told so far.
        is_complete: whether the object has ended as a call should.
        failed: whether it cannot be a call any more.
    """

    def __init__(self) -> None:
        self.text = self.arguments = ""
        self.name: str | None = None
        self.is_complete = self.failed = False
        self._stage = self._before_object
        self._key: str | None = None
        self._value = _Value()
        self._waiting = ""  # arguments that came before the name

    def take(self, character: str) -> Progress:
        """Read on; the caller stops when it `is_complete` or `failed`."""
        name, told = self.name, len(self.arguments)
        self.text += character
        self._stage(character)
        return Progress(self.name if name is None else None, self.arguments[told:])

    def _before_object(self, character: str) -> None:
        if character == "{":
            self._stage = self._before_key
        elif character not in _SPACE:
            self.failed = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._value = _Value()
            self._value.take(character)
            self._stage = self._in_key
        elif character == "}":
            self._end()
        elif character not in _SPACE + ",":
            self.failed = True

    def _in_key(self, character: str) -> None:
        self._value.take(character)
        if self._value.has_ended:
            self._key = _parsed_text(self._value.text)
            self._stage = self._before_value

    def _before_value(self, character: str) -> None:
        if character in _SPACE + ":":
            return
        self._value = _Value()
        self._stage = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        is_part = self._value.take(character)
        # A text is told at its end only: it may be arguments written as a text.
        if is_part and self._key in _ARGUMENTS and self._value.text[0] != '"':
            self._tell(character)
        if self._value.has_ended:
            self._end_value()
            self._stage = self._before_key
            if not is_part:
                self._before_key(character)

    def _end_value(self) -> None:
        text = self._value.text
        if self._key == "name":
            self.name = _parsed_text(text) or None
            self.failed = not self.name
            waiting, self._waiting = self._waiting, ""
            self._tell(waiting)
        elif self._key in _ARGUMENTS and text[0] == '"':
            self._tell(_parsed_text(text) or text)

    def _tell(self, arguments: str) -> None:
        if self.name is None:
            self._waiting += arguments
        else:
            self.arguments += arguments

    def _end(self) -> None:
        if self.name is None:
            self.failed = True
            return
        if not self.arguments:
            self._tell("{}")
        self.is_complete = True


def _parsed_text(quoted: str) -> str | None:
    try:
        value = json.loads(quoted)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, str) else None
