"""Tool calls that a model writes, read while it writes them; here the call that is a JSON object.

The object has a name, and arguments under one of two names. Nothing raises: what is no call is
`failed`, and whoever reads gives its text to the user as it is.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
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


class Reader:
    """Reads the calls of one section, from behind its opening mark to its end.

    A reader's stage takes the next character, and may set another one.

    Attributes:
        text: characters of the call that is being read.
        num_read: calls that have ended.
        is_complete: whether the section has ended as it should.
        failed: whether the call cannot be one any more.
    """

    _stage: Callable[[str], Progress | None]

    def __init__(self) -> None:
        self.text = ""
        self.num_read = 0
        self.is_complete = self.failed = False

    def take(self, character: str) -> Progress:
        """Read on; the caller stops when it `is_complete` or `failed`."""
        self.text += character
        return self._stage(character) or Progress(None, "")


class Value:
    """Characters of one JSON value, to its end."""

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, character: str) -> bool:
        """Whether `character` belongs to the value."""
        if self.has_ended or (self._is_scalar and character in ",}]" + SPACE):
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


class CallReader(Reader):
    """Reads one call.

    Attributes:
        name: of the function, once known.
        arguments: JSON text of what was told so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.arguments = ""
        self._stage = self._before_object
        self._key: str | None = None
        self._value = Value()
        self._waiting = ""  # arguments that came before the name

    def take(self, character: str) -> Progress:
        """See Reader."""
        name, told = self.name, len(self.arguments)
        self.text += character
        self._stage(character)
        return Progress(self.name if name is None else None, self.arguments[told:])

    def _before_object(self, character: str) -> None:
        if character == "{":
            self._stage = self._before_key
        elif character not in SPACE:
            self.failed = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._value = Value()
            self._value.take(character)
            self._stage = self._in_key
        elif character == "}":
            self._end()
        elif character not in SPACE + ",":
            self.failed = True

    def _in_key(self, character: str) -> None:
        self._value.take(character)
        if self._value.has_ended:
            self._key = _parsed_text(self._value.text)
            self._stage = self._before_value

    def _before_value(self, character: str) -> None:
        if character in SPACE + ":":
            return
        self._value = Value()
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
        self.num_read, self.is_complete = 1, True


def _parsed_text(quoted: str) -> str | None:
    try:
        value = json.loads(quoted)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, str) else None
