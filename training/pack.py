"""Turn documents into token streams: separators, fill-in-the-middle and windows.

Half of the documents are cut into segments and rearranged as prefix, suffix, middle at random
character positions. A new draw is made each epoch, so text seen again comes in another shape.
"""

from __future__ import annotations

import random

import numpy as np
from tokenizers import Tokenizer

END, PREFIX, MIDDLE, SUFFIX = (
    f"<|{name}|>" for name in ("endoftext", "fim_prefix", "fim_middle", "fim_suffix")
)
FIM_SHARE = 0.5
# Of one rearranged segment: its three parts then mostly share one window of 2,048 tokens.
SEGMENT_CHARACTERS = (400, 6000)


def rearrange(text: str, draw: random.Random) -> list[str]:
    """Cut a text into segments and order each as prefix, suffix, middle, marked and ended."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        length = draw.randint(*SEGMENT_CHARACTERS)
        segment = text[start : start + length]
        start += length
        low, high = sorted((draw.randint(0, len(segment)), draw.randint(0, len(segment))))
        # Half of the holes are short, as an editor's completions are.
        if draw.random() < 0.5:
            high = min(high, low + draw.randint(1, 200))
        pieces += [PREFIX, segment[:low], SUFFIX, segment[high:], MIDDLE, segment[low:high], END]
    return pieces


def encode(
    tokenizer: Tokenizer, texts: list[str], seed: int, fim_share: float = FIM_SHARE
) -> np.ndarray:
    """Return all texts as one uint16 token stream [T]; parts of a document are encoded apart."""
    draw = random.Random(seed)  # noqa: S311
    specials = {name: tokenizer.token_to_id(name) for name in (END, PREFIX, MIDDLE, SUFFIX)}
    stream: list[np.ndarray] = []
    batch: list[str] = []

    def flush() -> None:
        plain = [piece for piece in batch if piece not in specials]
        # Text that happens to spell a special token is text, hence encode_special_tokens.
        encoded = iter(tokenizer.encode_batch_fast(plain, add_special_tokens=False))
        for piece in batch:
            ids = [specials[piece]] if piece in specials else next(encoded).ids
            stream.append(np.asarray(ids, dtype=np.uint16))
        batch.clear()

    tokenizer.encode_special_tokens = True
    for text in texts:
        batch += rearrange(text, draw) if draw.random() < fim_share else [text, END]
        if len(batch) > 20_000:
            flush()
    flush()
    return np.concatenate(stream)


def windows(stream: np.ndarray, length: int, seed: int | None) -> np.ndarray:
    """Cut a stream into [num_windows, length + 1], neighbours sharing one token.

    A seed shuffles the windows and shifts the cuts, so that a document does not meet the same
    borders each epoch.
    """
    draw = None if seed is None else np.random.default_rng(seed)
    start = 0 if draw is None else int(draw.integers(length))
    num_windows = (len(stream) - 1 - start) // length
    starts = start + length * np.arange(num_windows)
    if draw is not None:
        draw.shuffle(starts)
    return stream[starts[:, None] + np.arange(length + 1)]
