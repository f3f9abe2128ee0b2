"""Takes a model's text apart while it grows: reasoning, content and tool calls.

How the pieces are cut changes nothing. Only what may become a marker is held back, and no text is
lost: what looked like a call and is none is content, with a warning. White space next to a marker
belongs to the marker.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from soloist.text.calls import CallReader, Reader
from soloist.text.listed_calls import ARGUMENTS, CALL_ID, ListedReader
from soloist.text.markers import first_of, may_become
from soloist.text.python_calls import PythonReader
from soloist.text.tagged_values import FUNCTION, TaggedValuesReader

# What stands around reasoning: of most models, and of Mistral's.
THINK, END_THINK = "<think>", "</think>"
MISTRAL_THINK, MISTRAL_END_THINK = "[THINK]", "[/THINK]"
CALL, END_CALL = "<tool_call>", "</tool_call>"
CALLS = "[TOOL_CALLS]"
GRANITE_CALLS = "<|tool_call|>"

_BETWEEN = " \t\r\n;"  # bare calls

CallFormat = Literal["tagged", "bare", "listed", "marked", "values", "python"]

# What opens calls within a text, what an answer that is calls begins with, what may close them.
_OPENERS: dict[CallFormat | None, tuple[str, ...]] = {
    "tagged": (CALL,), "listed": (CALLS,), "marked": (GRANITE_CALLS,), "values": (CALL, FUNCTION),
}  # fmt: skip
_STARTS: dict[CallFormat | None, str] = {"bare": "{", "python": "["}
_CLOSERS: dict[CallFormat | None, str] = {"tagged": END_CALL, "values": END_CALL}


@dataclass(frozen=True, slots=True)
class PartFormat:
    """What a model's template says about its answers.

    Attributes:
        calls: `tagged`, a JSON object between <tool_call> and </tool_call> (Qwen, SmolLM3, Hermes);
            `values`, between the same a function with each value between tags (Qwen3-Coder);
            `listed`, JSON behind [TOOL_CALLS] (Mistral); `marked`, a JSON list behind <|tool_call|>
            (Granite); `bare`, an answer that is a JSON object
            (Llama 3.1 and later); `python`, one that is a list of Python calls (Llama); None
            without.
        thinks: whether reasoning stands between marks.
        json_parameters: (function, parameter) of values between tags that are no texts.
        think: the mark before reasoning.
        end_think: the mark behind it.
    """

    calls: CallFormat | None
    thinks: bool
    json_parameters: AbstractSet[tuple[str, str]] = frozenset()
    think: str = THINK
    end_think: str = END_THINK

    @property
    def marks(self) -> tuple[str, ...]:
        """All that is looked for in a text, which must not be left out of it."""
        calls = _OPENERS.get(self.calls, ())
        if self.calls == "listed":
            calls += (ARGUMENTS, CALL_ID)
        closers = (END_CALL,) if self.calls in _CLOSERS else ()
        return (*calls, *closers, *((self.think, self.end_think) if self.thinks else ()))


@dataclass(frozen=True, slots=True)
class Part:
    """The next piece of one kind.

    Attributes:
        kind: of the text; a `call` names a function, `arguments` go on with its JSON text.
        text: of the piece.
        call: which call, counted from 0.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0


def format_of(template: str) -> PartFormat:
    """What answers look like, judged by the source of the chat template."""
    calls: CallFormat | None = None
    if CALLS in template:
        calls = "listed"
    elif GRANITE_CALLS in template:
        calls = "marked"
    elif FUNCTION in template and "<parameter=" in template:
        calls = "values"
    elif CALL in template and FUNCTION not in template:
        calls = "tagged"
    elif "[func_name1(" in template:
        calls = "python"
    elif '"parameters": ' in template and "<|python_tag|>" in template:
        calls = "bare"
    if MISTRAL_THINK in template or MISTRAL_END_THINK in template:
        return PartFormat(calls, True, think=MISTRAL_THINK, end_think=MISTRAL_END_THINK)
    return PartFormat(calls, THINK in template or END_THINK in template)


class PartReader:
    """Reads one answer.

    Attributes:
        num_calls: calls so far.
        warning: what was not understood, if anything.

    Args:
        style: what to look for.
        prompt: its end tells whether the answer begins within reasoning.
    """

    def __init__(self, style: PartFormat, prompt: str = "") -> None:
        self.num_calls, self.warning = 0, ""
        self._style = style
        self._held = ""
        self._reader: Reader | None = None
        self._opener = ""
        self._is_thinking = style.thinks and prompt.rstrip().endswith(style.think)
        # Whether a marker was the last thing: white space behind it is its own.
        self._is_bare = self._is_thinking
        self._has_content = False
        self._space = ""  # before the latest marker, should it be none

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain."""
        if self._is_plain and not self._held:
            return [Part("content", text)] if text else []
        parts: list[Part] = []
        self._held += text
        while self._step(parts):
            pass
        return _joined(parts)

    def finish(self) -> list[Part]:
        """The rest, now that no more text comes."""
        parts: list[Part] = []
        if self._reader is not None and not self._reader.is_complete:
            self._give_up(parts, "a tool call has no end")
        held, self._held = self._held, ""
        if self._reader is None:
            self._emit(parts, held, is_last=True)
        return _joined(parts)

    def _step(self, parts: list[Part]) -> bool:
        """Take the next thing out of what is held; whether to look again."""
        if self._reader is not None:
            return self._read_call(self._reader, parts)
        if self._may_be_bare_call():
            lead = self._held.lstrip(_BETWEEN if self.num_calls else None)
            if lead.startswith(_STARTS[self._style.calls]):
                self._held = lead
                self._begin_call("")
            if not lead or self._reader is not None:
                return bool(lead)
        markers = self._markers()
        at, marker = first_of(self._held, markers)
        if marker is None:
            safe = len(self._held) - may_become(self._held, markers)
            text, self._held = self._held[:safe], self._held[safe:]
            self._emit(parts, text, is_last=False)
            return False
        before, self._held = self._held[:at], self._held[at + len(marker) :]
        text = before.rstrip()
        self._emit(parts, text, is_last=False)
        self._is_bare, self._space = True, before[len(text) :]
        if self._style.thinks and marker in (self._style.think, self._style.end_think):
            self._is_thinking = marker == self._style.think
        else:
            self._begin_call(marker)
        return True

    def _markers(self) -> tuple[str, ...]:
        think = self._style.think
        if self._is_thinking:
            return (self._style.end_think,)
        # Reasoning comes first, or it is none.
        lead = self._held.lstrip()[: len(think)]
        may_think = self._style.thinks and not self._has_content and think.startswith(lead)
        return ((think,) if may_think else ()) + _OPENERS.get(self._style.calls, ())

    @property
    def _is_plain(self) -> bool:
        """Whether all that comes is content."""
        return (
            self._reader is None
            and self._style.calls not in _OPENERS
            and not self._is_thinking
            and (self._has_content or not (self._style.thinks or self._style.calls))
        )

    def _may_be_bare_call(self) -> bool:
        return self._style.calls in _STARTS and not self._is_thinking and not self._has_content

    def _begin_call(self, opener: str) -> None:
        self._opener = opener
        match self._style.calls:
            case "listed" | "marked":
                self._reader = ListedReader()
            case "values":
                self._reader = TaggedValuesReader(
                    is_open=opener == FUNCTION, json_parameters=self._style.json_parameters
                )
            case "python":
                self._reader = PythonReader()
            case _:
                self._reader = CallReader()

    def _read_call(self, reader: Reader, parts: list[Part]) -> bool:
        used = 0
        while used < len(self._held) and not (reader.is_complete or reader.failed):
            told = reader.take(self._held[used])
            used += 1
            if told.name is not None:
                parts.append(Part("call", told.name, self.num_calls))
                self.num_calls += 1
            if told.arguments:
                parts.append(Part("arguments", told.arguments, self.num_calls - 1))
        self._held = self._held[used:]
        if reader.failed:
            self._give_up(parts, "a tool call is not written as this model writes them")
            return True
        return reader.is_complete and self._end_call()

    def _end_call(self) -> bool:
        """Behind complete calls: take their end marker; whether to look again."""
        if closer := _CLOSERS.get(self._style.calls):
            rest = self._held.lstrip()
            if closer.startswith(rest) and rest != closer:
                return False  # it may still come
            self._held = rest.removeprefix(closer)
        self._reader, self._is_bare = None, True
        return True

    def _give_up(self, parts: list[Part], why: str) -> None:
        reader = self._reader
        assert reader is not None, "there is a call"
        self._reader = None
        self.warning = f"{why}; it is given as text"
        mark = "" if reader.num_read else self._space + self._opener
        self._has_content, self._is_bare = True, False
        if text := mark + reader.text:
            parts.append(Part("content", text))

    def _emit(self, parts: list[Part], text: str, *, is_last: bool) -> None:
        """Text between markers."""
        if self._is_bare:
            text = text.lstrip()
        if not text:
            return
        # What ends in white space may be followed by a marker, to which it then belongs.
        shown = text if is_last or self._is_plain else text.rstrip()
        if not is_last:
            self._held = text[len(shown) :] + self._held
        if not shown:
            return
        self._is_bare = False
        self._has_content |= not self._is_thinking
        parts.append(Part("reasoning" if self._is_thinking else "content", shown))


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind together."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and _go_on(last, part):
            joined[-1] = Part(part.kind, last.text + part.text, part.call)
        else:
            joined.append(part)
    return joined


def _go_on(last: Part, part: Part) -> bool:
    return part.kind != "call" and (last.kind, last.call) == (part.kind, part.call)
