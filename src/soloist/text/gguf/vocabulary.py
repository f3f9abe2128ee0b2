"""A vocabulary as a GGUF file's metadata has it: every field checked, nothing built yet."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from soloist.errors import MissingField, TokenizerError, WrongType, quoted
from soloist.gguf.splits import read_gguf

_PREFIX: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
_TEMPLATES: Final = "tokenizer.chat_templates"
# Far above the longest there are, runs of some hundred blanks: merges are sought in all of them.
_MOST_CHARACTERS = 4_096

# Names of special tokens in templates, and in keys.
_NAMED: Final = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator",
    "pad_token": "padding", "mask_token": "mask",
}  # fmt: skip
_ENDING = ("eos", "eot", "eom")
# Tokens that end answers in the families that are read, whatever a file says.
_ENDS: Final = frozenset(
    """
    <|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <end_of_turn> </s>
    <｜end▁of▁sentence｜>
    """.split()  # noqa: SIM905 - as a list it would be as many lines
)


class Kind(IntEnum):
    """What a token is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, and how text becomes some of them.

    Attributes:
        file: it is from.
        model: 'gpt2' (byte-level, with merges) or 'llama' (SentencePiece's, with scores).
        pre: how a byte-level tokenizer splits text into words.
        tokens: by id.
        kinds: of each token, as numbers of `Kind`; others there may be mean a normal one.
        merges: of a byte-level tokenizer, the first first.
        scores: of a SentencePiece tokenizer, one for each token.
        ids: of special tokens, by the names that keys have: 'bos', 'eos', 'unknown', ….
        flags: what the file says of `add_bos_token` and the like; absent where it says nothing.
    """

    file: str
    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]
    ids: Mapping[str, int]
    flags: Mapping[str, bool]

    @property
    def special_texts(self) -> dict[str, str]:
        """The text of each named token, as chat templates see it."""
        return {name: self.tokens[self.ids[key]] for name, key in _NAMED.items() if key in self.ids}

    @property
    def ending_ids(self) -> frozenset[int]:
        """Ids that end generation: those that the file names, and well-known ones."""
        marks = {Kind.CONTROL, Kind.USER_DEFINED}
        known = [
            token_id
            for token_id, token in enumerate(self.tokens)
            if token in _ENDS and self.kinds[token_id] in marks
        ]
        return frozenset([*known, *(self.ids[key] for key in _ENDING if key in self.ids)])


def read_vocabulary(file: Path) -> Vocabulary:
    """The vocabulary of a model's file.

    Raises:
        CheckpointError: the file cannot be read.
        MissingField, WrongType, TokenizerError: a field is absent, mistyped or contradicts others.
    """
    values = _Values(str(file), read_gguf(file).metadata)
    model = values.text("model")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{file}: '{_PREFIX}model' is {quoted(model)}, a kind of tokenizer that Soloist does "
            "not read from GGUF (allowed: gpt2, llama)",
            "use the model's safetensors checkpoint, which has tokenizer.json",
        )
    tokens = values.items("tokens", str)
    if not tokens:
        raise MissingField(str(file), f"{_PREFIX}tokens", "a list of texts")
    longest = max(tokens, key=len)
    if len(longest) > _MOST_CHARACTERS:
        raise TokenizerError(
            f"{file}: a token of '{_PREFIX}tokens' has {len(longest):,} characters (allowed: up to "
            f"{_MOST_CHARACTERS:,})",
            "the file is damaged; download it again",
        )
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise TokenizerError(
            f"{file}: token {quoted(twice)} has two ids",
            "the file was made by a broken tool; take another one of this model",
        )
    kinds = values.items("token_type", int, len(tokens)) or [Kind.NORMAL] * len(tokens)
    scores = values.items("scores", float, len(tokens)) if model == "llama" else []
    if model == "llama" and not scores:
        raise MissingField(str(file), f"{_PREFIX}scores", "a number for each token")
    return Vocabulary(
        file=str(file),
        model=model,
        pre=values.text("pre", "") if model == "gpt2" else "",
        tokens=tokens,
        kinds=kinds,
        merges=values.items("merges", str) if model == "gpt2" else [],
        scores=scores,
        ids=values.ids((*_NAMED.values(), *_ENDING), len(tokens)),
        flags=values.flags(("add_bos_token", "add_eos_token", "add_space_prefix")),
    )


def read_templates(file: Path) -> dict[str, str]:
    """The chat templates of a model's file by name; empty where it has none.

    Raises:
        CheckpointError: the file cannot be read.
        WrongType: one is no text.
    """
    metadata = read_gguf(file).metadata
    listed = metadata.get(_TEMPLATES, [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise WrongType(str(file), _TEMPLATES, listed, "a list of texts")
    keys = {"default": _TEMPLATE, **{name: f"{_TEMPLATE}.{name}" for name in listed}}
    found = {name: metadata[key] for name, key in keys.items() if key in metadata}
    for name, template in found.items():
        if not isinstance(template, str):
            raise WrongType(str(file), keys[name], template, "a text")
    return found


class _Values:
    """Typed reading of the keys about a tokenizer."""

    def __init__(self, file: str, metadata: Mapping[str, Any]) -> None:
        self._file, self._metadata = file, metadata

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + name, default)
        if value is None:
            raise MissingField(self._file, _PREFIX + name, "a text")
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def items(self, name: str, kind: type, count: int | None = None) -> list[Any]:
        """A list, of one item for each token where `count` says so; empty where there is none."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return []
        told = {str: "texts", int: "whole numbers", float: "numbers"}[kind]
        # All entries of a list have the same type.
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            raise self._wrong(name, value, f"a list of {told}")
        if count is not None and len(value) != count:
            raise self._wrong(name, f"{len(value):,} {told}", f"{count:,}, one for each token")
        return value

    def ids(self, names: tuple[str, ...], count: int) -> dict[str, int]:
        found = {}
        for name in names:
            key = f"{name}_token_id"
            value = self._metadata.get(_PREFIX + key)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value < count:
                raise self._wrong(key, value, f"the id of a token, 0 … {count - 1}")
            found[name] = value
        return found

    def flags(self, names: tuple[str, ...]) -> dict[str, bool]:
        found = {}
        for name in names:
            value = self._metadata.get(_PREFIX + name)
            if value is None:
                continue
            if not isinstance(value, bool):
                raise self._wrong(name, value, "true or false")
            found[name] = value
        return found

    def _wrong(self, name: str, value: object, expected: str) -> WrongType:
        return WrongType(self._file, _PREFIX + name, value, expected)
