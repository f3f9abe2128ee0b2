"""Log probabilities in the shapes that OpenAI's clients know."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soloist.sampling.logprobs import TokenLogprobs
from soloist.text import Tokenizer


def for_chat(
    tokenizer: Tokenizer, token_ids: Sequence[int], shown: Sequence[TokenLogprobs]
) -> dict[str, object]:
    """`choices[].logprobs` of a chat."""
    return {"content": entries(tokenizer, token_ids, shown), "refusal": None}


def entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], shown: Sequence[TokenLogprobs]
) -> list[dict[str, object]]:
    """One for each token; those without log probabilities at the end are left out."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    return [
        entry(token_id, one.chosen) | {"top_logprobs": [entry(*top) for top in one.top]}
        for token_id, one in zip(token_ids, shown, strict=False)
    ]


def for_completion(
    tokenizer: Tokenizer, token_ids: Sequence[int], shown: Sequence[TokenLogprobs], offset: int
) -> tuple[dict[str, object], int]:
    """`choices[].logprobs` of a completion.

    Args:
        tokenizer: spells tokens.
        token_ids: tokens; the last may have no log probabilities.
        shown: of the tokens.
        offset: characters before the first one.

    Returns:
        The object, and characters before the next token.
    """

    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode(errors="replace")

    pairs = list(zip(token_ids, shown, strict=False))
    tokens, offsets = [], []
    for token_id, _ in pairs:
        tokens.append(text(token_id))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [one.chosen for _, one in pairs],
        "top_logprobs": [{text(i): value for i, value in one.top} for _, one in pairs],
        "text_offset": offsets,
    }, offset


def for_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], shown: Sequence[TokenLogprobs], text: str
) -> dict[str, object]:
    """The same of an echoed prompt, whose first token has no log probability.

    Args:
        tokenizer: spells tokens.
        token_ids: of the prompt.
        shown: of its tokens but the first.
        text: that is echoed. Marks that the tokenizer puts before it have no place in it.
    """
    special = tokenizer.special_ids

    def spelled(token_id: int) -> bytes:
        known = (tokenizer.token(token_id) or "").encode() if token_id in special else b""
        return known or tokenizer.token_bytes(token_id)

    def name(token_id: int) -> str:
        return spelled(token_id).decode(errors="replace")

    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [None, *(one.chosen for one in shown)],
        "top_logprobs": [None, *({name(i): value for i, value in one.top} for one in shown)],
        "text_offset": offsets(text, [spelled(token_id) for token_id in token_ids]),
    }


def offsets(text: str, pieces: Iterable[bytes]) -> list[int]:
    """Characters that begin before each piece of a text; pieces that are not in it take no room."""
    whole, at, num_characters, found = text.encode(), 0, 0, []
    for piece in pieces:
        found.append(num_characters)
        # Some tokenizers begin a text with a space of their own.
        for given in (piece, piece.removeprefix(b" ")):
            if whole.startswith(given, at):
                at += len(given)
                num_characters += sum(byte & 0xC0 != 0x80 for byte in given)
                break
    return found


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Log probabilities of two parts of a completion as those of one."""
    return {key: [*values, *after[key]] for key, values in before.items()}
