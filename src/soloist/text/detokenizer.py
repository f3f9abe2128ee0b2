"""Turns tokens into text piece by piece, exactly as the decoder in tokenizer.json does at once.

A decoder is a sequence of steps. Each step here is the incremental twin of one in `tokenizers`:
what all pushes and the final `finish` return, joined, is what that step makes of the whole list.
It knows tokens as text, never ids.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")
_REPLACEMENT = "\ufffd"


class Step(ABC):
    """One step of a decoder with its state in one stream."""

    @abstractmethod
    def push(self, tokens: list[str]) -> list[str]:
        """Take the next tokens; return those that are settled."""

    def finish(self) -> list[str]:
        """Return what waited for a token that will not come."""
        return []


class Detokenizer:
    """The state of one stream through all steps of a decoder."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def push(self, tokens: list[str]) -> str:
        """Text that `tokens` settle. Unfinished characters wait for the next push."""
        for step in self._steps:
            tokens = step.push(tokens)
        return "".join(tokens)

    def finish(self) -> str:
        """The rest of the text. Nothing may be pushed afterwards."""
        tokens: list[str] = []
        for step in self._steps:
            tokens = step.push(tokens) + step.finish()
        return "".join(tokens)


class Replaced(Step):
    """Replaces one string by another within each token."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def push(self, tokens: list[str]) -> list[str]:
        """See Step."""
        return [token.replace(self._old, self._new) for token in tokens]


class Metaspace(Step):
    """Turns the space mark into spaces; the first token loses its marks if one was prepended."""

    def __init__(self, mark: str, *, prepended: bool) -> None:
        self._mark, self._at_start = mark, prepended

    def push(self, tokens: list[str]) -> list[str]:
        """See Step."""
        spaced = [token.replace(self._mark, " ") for token in tokens]
        if self._at_start and tokens:
            spaced[0] = tokens[0].replace(self._mark, "")
            self._at_start = False
        return spaced


class ByteRuns(Step):
    """Joins runs of byte tokens `<0xE4>` into characters.

    A run waits for its end: if any part of it is not UTF-8, decoding turns every byte of the run
    into a replacement character, so no character of a run is certain before the run is over.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, tokens: list[str]) -> list[str]:
        """See Step."""
        settled: list[str] = []
        for token in tokens:
            if match := BYTE_TOKEN.fullmatch(token):
                self._run.append(int(match[1], 16))
            else:
                settled += self.finish()
                settled.append(token)
        return settled

    def finish(self) -> list[str]:
        """See Step."""
        if not self._run:
            return []
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return [_REPLACEMENT * len(run)]


class ByteLevel(Step):
    """Reads each token as bytes (one letter of the byte alphabet each) and joins them as UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[str]) -> list[str]:
        """See Step."""
        text = self._utf8.decode(b"".join(map(byte_level_bytes, tokens)))
        # Python waits for the third byte of a surrogate, which is no character whatever it is.
        waiting = self._utf8.getstate()[0]
        if waiting[:1] == b"\xed" and waiting[1:] >= b"\xa0":
            text += self._utf8.decode(b"", final=True)
        return [text]

    def finish(self) -> list[str]:
        """See Step."""
        return [self._utf8.decode(b"", final=True)]


class StartStripped(Step):
    """Takes up to `count` leading characters equal to `content` off the text."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count

    def push(self, tokens: list[str]) -> list[str]:
        """See Step."""
        text = "".join(tokens)
        while self._count and text:
            if not text.startswith(self._content):
                self._count = 0
                break
            text = text[1:]
            self._count -= 1
        return [text]


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one outside the byte alphabet stands for its own text."""
    try:
        return bytes(map(_BYTE_OF_LETTER.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte by letter: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_LETTER = _byte_alphabet()
