"""Mistral's tool calls, behind the mark [TOOL_CALLS], read while they are written; Granite's too.

There are three forms: a list of JSON objects, one such object, and a name with arguments behind
[ARGS], between which an id may stand. The last form repeats the mark for each call.
"""

from soloist.text.calls import SPACE, CallReader, Progress, Reader, Value

ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"

# No function's name is longer; what is, is text.
_MOST_NAME = 256


class ListedReader(Reader):
    """Reads what follows the mark."""

    def __init__(self) -> None:
        super().__init__()
        self._stage = self._at_start
        self._is_list = False
        self._call = CallReader()
        self._value = Value()

    def _at_start(self, character: str) -> Progress | None:
        if character == "[":
            self._is_list, self._stage = True, self._between
        elif character == "{":
            return self._begin(character)
        elif character not in SPACE:
            self._stage = self._in_name
        return None

    def _between(self, character: str) -> Progress | None:
        """Objects of the list."""
        if character == "{":
            return self._begin(character)
        if character == "]" and self.num_read:
            self.is_complete = True
        elif character not in SPACE + ",":
            self.failed = True
        return None

    def _begin(self, character: str) -> Progress:
        self._call, self._stage = CallReader(), self._in_object
        return self._in_object(character)

    def _in_object(self, character: str) -> Progress:
        progress = self._call.take(character)
        self.failed = self._call.failed
        if self._call.is_complete:
            self._end()
        return progress

    def _in_name(self, character: str) -> Progress | None:
        if character == "{":
            name = self.text[:-1].partition(CALL_ID)[0].removesuffix(ARGUMENTS).strip()
            self.failed = not name or any(mark in name for mark in "[]" + SPACE)
            self._value, self._stage = Value(), self._in_arguments
            told = self._in_arguments(character)
            return None if self.failed else Progress(name, told.arguments)
        self.failed = len(self.text) > _MOST_NAME
        return None

    def _in_arguments(self, character: str) -> Progress:
        self._value.take(character)
        if self._value.has_ended:
            self._end()
        return Progress(None, character)

    def _end(self) -> None:
        self.num_read += 1
        self.text = ""
        self._stage = self._between
        self.is_complete = not self._is_list
