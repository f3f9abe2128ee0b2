"""Encodes a long text window by window, with exactly the ids of encoding it whole.

The library takes 100 to 300 bytes for each byte of a text that it encodes at once, holds Python's
lock meanwhile, and cannot stop early. A window costs the same however long the text is.

Windows meet between two words of the tokenizer's pre-tokenizer. A pattern without look-behind finds
its words from left to right, and what it finds after a word does not depend on what came before. So
a window that begins where a word begins has the words of the whole text, but for the last ones,
which the next window reads again. Knows tokenizers, not models.

An agent sends its whole conversation with every step. Windows begin at the same characters as long
as a text begins alike, so those of the step before are found among the latest ones.
"""

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import tokenizers

from soloist.text.decoder import steps_of

# In a pattern: look-behind, anchors and borders of words ask what came before.
_LOOKS_BACK = re.compile(r"\(\?<|\\[bBAGKyY]|(?<![\[\\])\^")

# Characters: long enough to make the fixed cost of a window small, short enough to encode in 10 ms.
_WINDOW = 16_384
# Words and characters at a window's end that are read again: what its cut end may have changed. No
# pattern looks further than over runs of one kind of character, and each run is a word or two.
_UNSURE_WORDS, _UNSURE_CHARACTERS = 16, 512
# Windows that are kept: 8 million characters, in some 20 to 50 MB.
_KEPT_WINDOWS = 512


class _Window(NamedTuple):
    ids: "array[int]"  # of its sure words
    num_characters: int  # of these


class Pieces:
    """Splits the encoding of long texts, where a tokenizer allows it.

    Args:
        backend: the tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._longest_added = max(
            (len(token.content) for token in backend.get_added_tokens_decoder().values()), default=0
        )
        self.is_exact = _is_exact(backend)
        self._kept = lru_cache(_KEPT_WINDOWS)(self._encode)

    def split(self, text: str, window: int | None = None) -> Iterator[list[int]]:
        """The ids of `text` without special tokens around it, some at a time.

        Args:
            text: of any length.
            window: characters to encode at once, unless a word or an added token needs more;
                default: as many as are quickest.
        """
        unsure = max(_UNSURE_CHARACTERS, 2 * self._longest_added)
        size, start = max(window or _WINDOW, 4 * unsure), 0
        width = size
        while len(text) - start > width and self.is_exact:
            # Wider ones are seldom, and kept they would take as much memory as a client likes.
            encode = self._kept if width == size else self._encode
            found = encode(text[start : start + width], width - unsure)
            if found is None:  # one endless word: what holds it whole says what it is
                width *= 2
                continue
            yield found.ids.tolist()
            start += found.num_characters
            width = size
        yield self._backend.encode(text[start:], add_special_tokens=False).ids

    def _encode(self, text: str, most_characters: int) -> _Window | None:
        """One window's sure words, in so many characters; None if no word ends there."""
        found = self._backend.encode(text, add_special_tokens=False)
        cut = _last_sure_word(found, most_characters)
        if cut is None:
            return None
        return _Window(array("I", found.ids[:cut]), found.offsets[cut][0])


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """Characters of a text that one token stands for, at most; None where there is no such number.

    A text may be normalised to a shorter one, tokens may take the blanks around them, and unknown
    characters in a row may become one token.
    """
    model = json.loads(backend.model.__getstate__())
    is_whole = model["type"] == "BPE" and (
        model.get("unk_token") is None or model.get("byte_fallback", False)
    )
    if not is_whole or backend.normalizer is not None or _takes_blanks(backend):
        return None
    return max(map(len, backend.get_vocab()), default=1)


def _last_sure_word(found: tokenizers.Encoding, most_characters: int) -> int | None:
    """The last token that begins a word before the unsure ones; None if no word does."""
    words, offsets = found.word_ids, found.offsets
    starts = [i for i, (one, next_) in enumerate(pairwise(words), 1) if one != next_]
    for i in reversed(starts[:-_UNSURE_WORDS]):
        if offsets[i][0] <= most_characters:
            return i
    return None


def _is_exact(backend: tokenizers.Tokenizer) -> bool:
    """Whether the ids after a word's start depend on nothing before it."""
    if backend.normalizer is not None or backend.pre_tokenizer is None:
        return False
    if _takes_blanks(backend):
        return False
    stages = steps_of(json.loads(backend.pre_tokenizer.__getstate__()))
    patterns = [stage for stage in stages if not _maps_bytes_only(stage)]
    # With several patterns a word's start for the last may lie inside a word of the first.
    return len(patterns) == 1 and _looks_ahead_only(patterns[0])


def _takes_blanks(backend: tokenizers.Tokenizer) -> bool:
    """Whether an added token depends on what stands beside it."""
    added = backend.get_added_tokens_decoder().values()
    return any(token.lstrip or token.rstrip or token.single_word for token in added)


def _maps_bytes_only(stage: Mapping[str, Any]) -> bool:
    is_byte_level = stage["type"] == "ByteLevel" and not stage["add_prefix_space"]
    return is_byte_level and not stage.get("use_regex", True)


def _looks_ahead_only(stage: Mapping[str, Any]) -> bool:
    match stage:
        case {"type": "ByteLevel", "add_prefix_space": False}:  # its own pattern, GPT-2's
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
            return not stage["invert"] and not _LOOKS_BACK.search(pattern)
    return False
