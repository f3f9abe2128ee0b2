"""From a vocabulary of a GGUF file to a tokenizer of the package `tokenizers`."""

from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from soloist.errors import TokenizerError, quoted
from soloist.text.gguf.splitting import SPLITTINGS
from soloist.text.gguf.vocabulary import Kind, Vocabulary

_SPACE_MARK = "▁"


def build(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The tokenizer that a vocabulary describes.

    Raises:
        TokenizerError: it names a way to split text that is not known, or merges that it has no
            tokens for.
    """
    is_byte_level = vocabulary.model == "gpt2"
    try:
        made = _byte_level(vocabulary) if is_byte_level else _sentence_piece(vocabulary)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(
            f"{vocabulary.file}: its tokens and merges make no tokenizer: {error}",
            "the file is damaged; download it again",
        ) from error
    made.add_special_tokens(_added(vocabulary, Kind.CONTROL, Kind.UNKNOWN))
    made.add_tokens(_added(vocabulary, Kind.USER_DEFINED))
    return made


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    splitting = SPLITTINGS.get(vocabulary.pre)
    if splitting is None:
        given = quoted(vocabulary.pre) if vocabulary.pre else "absent"
        raise TokenizerError(
            f"{vocabulary.file}: 'tokenizer.ggml.pre' is {given}, so it is not known how text "
            f"falls into words (allowed: {', '.join(SPLITTINGS)})",
            "use a newer GGUF file of this model, or its safetensors checkpoint",
        )
    merges = [_pair(vocabulary, merge) for merge in vocabulary.merges]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=_usable(vocabulary, {left + right for left, right in merges}),
            merges=merges,
            ignore_merges=splitting.whole_words,
        )
    )
    if splitting.composes:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = splitting.steps()
    made.decoder = decoders.ByteLevel()
    _surround(made, vocabulary, begins=splitting.begins)
    return made


def _sentence_piece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Space marks before words: at the start, and after each special token, as in llama.cpp."""
    unknown, prefix = vocabulary.ids.get("unknown"), vocabulary.flags.get("add_space_prefix", True)
    usable = _usable(vocabulary, ())
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=usable,
            merges=_merges_of(vocabulary, usable),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks = normalizers.Replace(" ", _SPACE_MARK)
    made.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), marks]) if prefix else marks
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    _surround(made, vocabulary, begins=True)
    return made


def _usable(vocabulary: Vocabulary, merged: Iterable[str]) -> dict[str, int]:
    """Ids by token, without those that only fill the vocabulary up."""
    needed = set(merged)
    return {
        token: token_id
        for token_id, (token, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        )
        if token and (kind != Kind.UNUSED or token in needed)
    }


def _pair(vocabulary: Vocabulary, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise TokenizerError(
            f"{vocabulary.file}: {quoted(merge)} in 'tokenizer.ggml.merges' is no pair of tokens",
            "the file is damaged; download it again",
        )
    return left, right


def _merges_of(vocabulary: Vocabulary, usable: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the token with the highest score first.

    SentencePiece joins the neighbours whose token has the highest score; a list of merges in that
    order does the same. Of equal ones the one with the longer left part goes first, as in the
    tokenizer.json files that transformers derives from such models.
    """
    found = []
    for token, token_id in usable.items():
        if vocabulary.kinds[token_id] not in (Kind.NORMAL, Kind.USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                found.append((-vocabulary.scores[token_id], -cut, -len(right), left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added(vocabulary: Vocabulary, *kinds: Kind) -> list[AddedToken]:
    """Tokens that text is searched for before it falls into words."""
    return [
        AddedToken(token, normalized=False, special=Kind.USER_DEFINED not in kinds)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in kinds and token
    ]


def _surround(made: tokenizers.Tokenizer, vocabulary: Vocabulary, *, begins: bool) -> None:
    """Tokens around a text, as the file says; a token before it as its kind has it, otherwise."""
    wanted = {
        "bos": vocabulary.flags.get("add_bos_token", begins),
        "eos": vocabulary.flags.get("add_eos_token", False),
    }
    used = [name for name, is_wanted in wanted.items() if is_wanted and name in vocabulary.ids]
    if not used:
        return
    pieces = [*(name for name in used if name == "bos"), "$A", *(n for n in used if n == "eos")]
    made.post_processor = processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, "$B:1"],
        special_tokens=[
            {
                "id": name,
                "ids": [vocabulary.ids[name]],
                "tokens": [vocabulary.tokens[vocabulary.ids[name]]],
            }
            for name in used
        ],
    )
