"""Answers without a model: any token that a grammar allows, drawn at random."""

import random
from collections.abc import Callable

import numpy as np

from soloist.text import Tokenizer
from soloist.text.grammar import Grammar

Look = Callable[[list[int], np.ndarray], None]


def ids_of(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def walk(
    grammar: Grammar,
    seed: int,
    most: int = 150,
    look: Look = lambda *_: None,
    *,
    at_once: bool = True,
) -> tuple[list[int], bool]:
    """Tokens, and whether they are a whole answer.

    look: shown what is forced and what is allowed, at every step.
    at_once: take what is forced without looking at what is allowed.
    """
    draw, matcher, made = random.Random(seed), grammar.start(), []
    while not matcher.is_complete and len(made) < most:
        forced = matcher.forced()
        look(forced, matcher.allowed())
        if forced and at_once:
            made += forced
            for token_id in forced:
                matcher.take(token_id)
            continue
        allowed = ids_of(matcher.allowed())
        if not allowed or (matcher.may_end and draw.random() < 0.3):
            break
        made.append(draw.choice(allowed))
        matcher.take(made[-1])
    return made, matcher.may_end


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
