"""Reads the `decoder` of a tokenizer.json and starts exact streams of it.

Only decoders whose text can be given out piece by piece are accepted: byte-level ones and those of
the SentencePiece kind. It knows tokens as text, never ids.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from soloist.errors import TokenizerError
from soloist.text.detokenizer import (
    BYTE_TOKEN,
    ByteLevel,
    ByteRuns,
    Detokenizer,
    Metaspace,
    Replaced,
    StartStripped,
    Step,
    byte_level_bytes,
)

_JOINING = {"ByteLevel", "Fuse"}


class Decoder:
    """What tokenizer.json says about decoding."""

    def __init__(self, description: Mapping[str, Any], file: str) -> None:
        """Take the `decoder` object of `file`; refuse one that has no exact stream."""
        self._file = file
        self._steps = steps_of(description)
        self._kinds = {step["type"] for step in self._steps}
        if not self._kinds & {"ByteLevel", "Replace", "Metaspace"}:
            raise self._refusal(", ".join(sorted(self._kinds)) or "none at all")
        self._makers = list(self._step_makers())

    def start(self) -> Detokenizer:
        """A fresh stream."""
        return Detokenizer([make() for make in self._makers])

    def token_bytes(self, token: str) -> bytes:
        """The bytes that one token adds to a text, away from the text's start."""
        if "ByteLevel" in self._kinds:
            return byte_level_bytes(token)
        if "ByteFallback" in self._kinds and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for step in self._steps:
            match step:
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    token = token.replace(old, new)
                case {"type": "Metaspace", "replacement": mark}:
                    token = token.replace(mark, " ")
        return token.encode()

    def _step_makers(self) -> Iterator[Callable[[], Step]]:
        joined = False
        for step in self._steps:
            match step:
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if not joined:
                    yield partial(Replaced, old, new)
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if (
                    not joined
                ):
                    yield partial(Metaspace, mark, prepended=scheme != "never")
                case {"type": "ByteFallback"} if not joined:
                    yield ByteRuns
                case {"type": "ByteLevel"} if not joined:
                    yield ByteLevel
                case {"type": "Strip", "content": content, "start": count, "stop": 0} if joined:
                    yield partial(StartStripped, content, count)
                case {"type": "Fuse"}:
                    pass  # joins the tokens, which a stream does anyway
                case _:
                    raise self._refusal(str(step))
            joined = joined or step["type"] in _JOINING

    def _refusal(self, seen: str) -> TokenizerError:
        return TokenizerError(
            f"{self._file}: decoder '{seen}' is not supported (supported: ByteLevel, or Metaspace "
            "or Replace, then ByteFallback, Fuse and Strip at the start)",
            "Soloist could not decode tokens exactly; use a model with a supported decoder",
        )


def steps_of(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a decoder or of a pre-tokenizer, those of sequences one by one."""
    if description["type"] != "Sequence":
        return [description]
    parts = description.get("decoders") or description.get("pretokenizers") or []
    return [step for part in parts for step in steps_of(part)]
