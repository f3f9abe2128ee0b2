"""Text to token ids and back, equal to what transformers makes of the same model folder.

Reads tokenizer.json and the small files beside it, or a GGUF file's metadata. Knows neither models
nor requests.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import models

from soloist.errors import MissingFile, RequestError, TokenizerError, quoted
from soloist.files import is_there
from soloist.gguf.names import is_gguf
from soloist.text.decoder import Decoder
from soloist.text.detokenizer import Detokenizer
from soloist.text.files import (
    SpecialTokens,
    read_eos_ids,
    read_json,
    read_special_tokens,
    require_readable,
)
from soloist.text.metaspace import SPACE_MARK, follow_llama_class
from soloist.text.pieces import Pieces, longest_token

# Characters that are encoded at once where only the beginning is asked for.
_START = 2048

# Marks before prefix, suffix and middle, one row per way of spelling them.
_FIM_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        vocab_size: one more than the largest token id.
        special_tokens: special token by name (`bos_token`, …), as chat templates see it.
        special_ids: ids that `decode` leaves out unless told otherwise.
        eos_ids: ids that end generation; empty if the model names none.
        bos_id: the id of `bos_token`, if the model names one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        file: str = "tokenizer.json",
    ) -> None:
        """Wrap a `tokenizers` tokenizer; `file` is its name in errors."""
        if backend.decoder is None:
            raise TokenizerError(
                f"{file} has no decoder, so its tokens cannot be turned back into text",
                "download the file again",
            )
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._file = file
        self._pieces = Pieces(backend)
        self._decoder = Decoder(json.loads(backend.decoder.__getstate__()), file)
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(), *(token_id + 1 for token_id in added)])
        self.bos_id = self._named_id("bos_token")
        self.eos_ids = frozenset(eos_ids)
        if not self.eos_ids and (eos_id := self._named_id("eos_token")) is not None:
            self.eos_ids = frozenset([eos_id])

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a model's folder or GGUF file.

        As in transformers, a beginning-of-sequence token is added only if the post-processor of
        tokenizer.json adds one; `add_bos_token` in tokenizer_config.json has no say.
        `eos_ids` come from generation_config.json, else config.json, else `eos_token`. A GGUF
        file's metadata says all of this, and is taken at its word.
        """
        if is_gguf(path):
            return cls._from_gguf(path)
        file = path / "tokenizer.json"
        if not is_there(file):
            raise _no_tokenizer(path)
        backend = _read_backend(file)
        follow_llama_class(backend, path)
        special = read_special_tokens(path)
        _add_missing(backend, special, file)
        config = read_json(path / "tokenizer_config.json")
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        if config.get("clean_up_tokenization_spaces") and not isinstance(backend.model, models.BPE):
            raise TokenizerError(
                f"{path / 'tokenizer_config.json'}: clean_up_tokenization_spaces is true, which is "
                "supported for BPE tokenizers only (there it has no effect)",
                "set it to false if the model's text needs no cleaning",
            )
        eos_ids = read_eos_ids(path)
        return cls(backend, special_tokens=special.texts, eos_ids=eos_ids, file=str(file))

    @classmethod
    def _from_gguf(cls, file: Path) -> "Tokenizer":
        from soloist.text.gguf.backend import build
        from soloist.text.gguf.vocabulary import read_vocabulary

        vocabulary = read_vocabulary(file)
        return cls(
            build(vocabulary),
            special_tokens=vocabulary.special_texts,
            eos_ids=vocabulary.ending_ids,
            file=str(file),
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> list[int]:
        """The ids of `text`. A special token written out in it becomes that token.

        A rendered chat prompt holds its own special tokens: encode it with
        `add_special_tokens=False`, or models with a beginning-of-sequence token get two.

        Args:
            text: of any length.
            add_special_tokens: around the text, as the tokenizer's files say.
            most_tokens: encoding may end once there are more than so many. The caller asked for
                at most so many; the ids are not all of the text then.
        """
        _check_characters(text)
        before, after = self._around if add_special_tokens else ([], [])
        ids = list(before)
        for piece in self._pieces.split(text):
            ids += piece
            if most_tokens is not None and len(ids) > most_tokens:
                return ids
        return ids + after

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Ids before and after any text that is encoded with special tokens."""
        if not self._backend.num_special_tokens_to_add(is_pair=False):
            return [], []
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a").ids
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these encode `text`; found without encoding it."""
        return 0 if self._longest is None else -(-len(text) // self._longest)

    @cached_property
    def _longest(self) -> int | None:
        return longest_token(self._backend)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one token, None for an id without one."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text, away from the text's start."""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._decoder.token_bytes(token)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled `text`, if there is one."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental twin of `decode`, fed with the spellings of tokens."""
        return self._decoder.start()

    def fim_prompt(self, prefix: str, suffix: str, most_tokens: int | None = None) -> list[int]:
        """The prompt to which a model answers with what belongs between `prefix` and `suffix`.

        Args:
            prefix: text before the gap.
            suffix: text after it.
            most_tokens: as of `encode`, of either text.
        """
        prefix_mark, suffix_mark, middle_mark = self._fim_ids()
        start = self.encode("")[:1]
        return [
            *(start if start == [self.bos_id] else []),
            prefix_mark,
            *self.encode(prefix, add_special_tokens=False, most_tokens=most_tokens),
            suffix_mark,
            *self.encode_inside(suffix, most_tokens),
            middle_mark,
        ]

    def encode_inside(self, text: str, most_tokens: int | None = None) -> list[int]:
        """The ids of `text` without the space that a tokenizer may put at a text's start."""
        return self._inside(
            text, lambda t: self.encode(t, add_special_tokens=False, most_tokens=most_tokens)
        )

    def _inside(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        newline = self.encode("\n", add_special_tokens=False)
        if not (newline and (self.token(newline[0]) or "").startswith(SPACE_MARK)):
            return encode(text)
        ids = encode("\n" + text)
        return ids[len(newline) :] if ids[: len(newline)] == newline else encode(text)

    def encode_start(self, text: str) -> list[int]:
        """The first ids of `encode_inside`: of a long text, those of some 2,048 characters.

        Of a text that is one word to the tokenizer, 4,096 characters count as the whole of it.
        """
        if len(text) <= _START:
            return self.encode_inside(text)
        return self._inside(text[: 2 * _START], lambda t: next(self._pieces.split(t, _START)))

    @property
    def fills_in(self) -> bool:
        """Whether the model knows marks for a prefix, a suffix and the gap between them."""
        return self._find_fim_ids() is not None

    def _find_fim_ids(self) -> list[int] | None:
        for marks in _FIM_MARKS:
            ids = [self._backend.token_to_id(mark) for mark in marks]
            if (known := [token_id for token_id in ids if token_id is not None]) == ids:
                return known
        return None

    def _fim_ids(self) -> list[int]:
        if (ids := self._find_fim_ids()) is not None:
            return ids
        raise TokenizerError(
            f"{self._file} has no fill-in-the-middle tokens (known: "
            f"{'; '.join(' '.join(marks) for marks in _FIM_MARKS)})",
            "give only a prefix, or use a code model trained to fill in the middle",
        )

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds half a surrogate pair at position {error.start}, not a character",
            "decode the text as UTF-8 or UTF-16 before passing it on",
        ) from error


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    require_readable(file)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        read_json(file)  # says where the file is cut off, if it is
        raise TokenizerError(
            f"{file} is damaged or of a kind that tokenizers {tokenizers.__version__} cannot read: "
            f"{error}",
            "download the file again, or update the package tokenizers",
        ) from error


def _add_missing(backend: tokenizers.Tokenizer, special: SpecialTokens, file: Path) -> None:
    """Add the tokens that only the files beside tokenizer.json know."""
    present = backend.get_added_tokens_decoder()
    rules = {repr(token) for token in present.values()}
    tokens = [token for _, token in sorted(special.added.items()) if repr(token) not in rules]
    seen = {token.content for token in [*present.values(), *tokens]}
    further = [*special.named.values(), *special.extra]
    backend.add_tokens(tokens + [token for token in further if token.content not in seen])
    for token_id, token in special.added.items():
        if (given := backend.token_to_id(token.content)) != token_id:
            raise TokenizerError(
                f"{file.parent}: token {quoted(token.content)} has id {token_id} beside "
                f"tokenizer.json but {given} with it",
                "the files are from different tokenizers; take them from one source",
            )


def _no_tokenizer(folder: Path) -> MissingFile | TokenizerError:
    if not folder.is_dir():
        return TokenizerError(
            f"{folder} is not a folder", "give the folder that holds tokenizer.json"
        )
    found = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith(".model") or name == "tekken.json" for name in found):
        hint = (
            "the tokenizer is there in another format; load it once with transformers' "
            "AutoTokenizer and save it with save_pretrained, which writes tokenizer.json"
        )
        return MissingFile(str(folder), "tokenizer.json", found, hint)
    return MissingFile(str(folder), "tokenizer.json", found)
