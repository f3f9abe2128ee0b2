"""Log probabilities in the two shapes that OpenAI's clients know."""

from collections.abc import Sequence

from soloist.sampling.logprobs import TokenLogprobs
from soloist.text import Tokenizer


def for_chat(
    tokenizer: Tokenizer, token_ids: Sequence[int], shown: Sequence[TokenLogprobs]
) -> dict[str, object]:
    """`choices[].logprobs` of a chat; tokens without log probabilities at the end are left out."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = [
        entry(token_id, one.chosen) | {"top_logprobs": [entry(*top) for top in one.top]}
        for token_id, one in zip(token_ids, shown, strict=False)
    ]
    return {"content": content, "refusal": None}


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
