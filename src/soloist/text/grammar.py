"""Which tokens a grammar allows next: llguidance on the tokenizer of a model.

`answers.py` writes grammars; nothing here knows what they are for. The state of one answer is a
`Matcher`; it satisfies `soloist.sampling.constraint.Constraint`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from soloist.errors import BadGrammar, GrammarFailed
from soloist.text.tokenizer import Tokenizer

# What one grammar may take; a mask that reaches the last two takes some 15 ms by llguidance.
_MOST_SYMBOLS, _MOST_FUEL, _MOST_ITEMS = 500_000, 30_000, 20_000
# What its words may take: some 20 for each to be compiled, and 2 or 3 for each byte of a text that
# is forced on an answer, which takes a microsecond in which Python's lock is held: `(ab){1000000}`
# is a short pattern. Texts that stand in the grammar bring what they need, up to a bound.
_LEXER_FUEL, _LEXER_FUEL_OF_QUOTE, _LEXER_FUEL_OF_CHARACTER = 20_000, 10, 2
_MOST_PAID_CHARACTERS = 50_000
# Each byte of one text takes the longer, the longer the text is.
_LONGEST_TEXT = 4096
_LARK_TEXT = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


class Grammars:
    """Compiles grammars for one model, from any thread.

    The tokenizer's tree of bytes is built with the first one, in 0.02 s for étude's 8,192 tokens.

    Args:
        tokenizer: of the model.
        vocab_size: V, logits the model gives; tokens that only one of the two knows never come.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = Lock()
        self._built: llguidance.LLTokenizer | None = None

    def compile(self, source: str) -> "Grammar":
        """A grammar in llguidance's own form: Lark, or JSON that holds several.

        Raises:
            BadGrammar: it is none, or too large.
        """
        limits = llguidance.LLParserLimits(
            max_grammar_size=_MOST_SYMBOLS,
            initial_lexer_fuel=_lexer_fuel(source),
            step_lexer_fuel=_MOST_FUEL,
            step_max_items=_MOST_ITEMS,
            verbose_errors=False,
        )
        tree = self._tree()
        matcher = llguidance.LLMatcher(tree, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise BadGrammar(matcher.get_error().strip())
        return Grammar(matcher, tree, self._vocab_size)

    def check(self, source: str) -> None:
        """Compile a grammar and begin an answer: what is too much for the first step is told now.

        Raises:
            BadGrammar: it is none, or too large, or no answer of it can begin.
        """
        matcher = self.compile(source).start()
        try:
            forced, words = matcher.forced(), matcher.allowed()
            if not forced and words.any():
                word = int(words.nonzero()[0][0])
                forced = [32 * word + (int(words[word]) & -int(words[word])).bit_length() - 1]
            for token_id in forced:
                matcher.take(token_id)
            if not matcher.is_complete:
                matcher.allowed()
        except GrammarFailed as error:
            raise BadGrammar(error.reason) from error

    def _tree(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._built is None:
                tokens = _Tokens(self._tokenizer)
                self._built = llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens))
            return self._built


def _lexer_fuel(source: str) -> int:
    """What the words of a grammar may take.

    Raises:
        BadGrammar: a text in it is too long.
    """
    lengths = [len(text) for grammar in json.loads(source)["grammars"] for text in _texts(grammar)]
    if (longest := max(lengths, default=0)) > _LONGEST_TEXT:
        raise BadGrammar(
            f"a text in it has {longest:,} characters (allowed: at most {_LONGEST_TEXT:,})"
        )
    paid = min(sum(lengths), _MOST_PAID_CHARACTERS)
    quotes = source.count('"')
    return _LEXER_FUEL + _LEXER_FUEL_OF_QUOTE * quotes + _LEXER_FUEL_OF_CHARACTER * paid


def _texts(grammar: Mapping[str, Any]) -> Iterator[str]:
    """Texts that an answer holds as they stand in one of llguidance's grammars."""
    yield from (found[1] for found in _LARK_TEXT.finditer(grammar.get("lark_grammar", "")))
    left: list[tuple[object, bool]] = [(grammar.get("json_schema"), False)]
    while left:
        item, is_answer = left.pop()
        match item:
            case str() if is_answer:
                yield item
            case list():
                left += [(value, is_answer) for value in item]
            case dict():
                left += [(v, is_answer or name in ("const", "enum")) for name, v in item.items()]


class _Tokens:
    """The tokenizer as llguidance asks for it: the bytes that Soloist shows for each token.

    llguidance reads tokenizer.json by itself too, but takes the space marks of some kinds of
    tokenizers for characters.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode_start = tokenizer.encode_start
        special = tokenizer.special_ids
        # Which tokens end an answer is for the sampler to say; this one does not exist.
        self.eos_token_id = tokenizer.vocab_size
        self.special_token_ids = [*sorted(special), self.eos_token_id]
        self.tokens = [
            (tokenizer.token(i) or "").encode() if i in special else tokenizer.token_bytes(i)
            for i in range(tokenizer.vocab_size)
        ]
        self.tokens.append(b"<the end>")

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that is forced, or the first of them: the rest is asked for later."""
        return self._encode_start(text)


class Grammar:
    """A grammar that was compiled; `start` begins an answer."""

    def __init__(
        self, matcher: llguidance.LLMatcher, tree: llguidance.LLTokenizer, vocab_size: int
    ) -> None:
        self._matcher, self._tree, self._vocab_size = matcher, tree, vocab_size

    def start(self) -> "Matcher":
        """The state of an answer that is still empty."""
        return Matcher(self._matcher.deep_copy(), self._tree, self._vocab_size)


class Matcher:
    """One answer: what was taken, and what the grammar allows after it.

    Raises GrammarFailed from every method that looks at the grammar, where a limit is reached.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, tree: llguidance.LLTokenizer, vocab_size: int
    ) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._num_taken = 0
        self._buffer = np.zeros(-(-tree.vocab_size // 32), np.uint32)
        self._end = tree.eos_token

    @property
    def may_end(self) -> bool:
        """Whether the grammar accepts the answer as it is."""
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether it does, and nothing may be appended."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def allowed(self) -> NDArray[np.uint32]:
        """Bits [ceil(V / 32)] of the tokens that may come next; none where nothing may."""
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        self._check()
        count = min(len(words), len(self._buffer))
        words[:count] = self._buffer[:count]
        if left := self._vocab_size % 32:
            words[-1] &= np.uint32((1 << left) - 1)
        if self._end < self._vocab_size:
            words[self._end // 32] &= ~np.uint32(1 << self._end % 32)
        return words

    def forced(self) -> list[int]:
        """Tokens that must come next: those that the tokenizer makes of the forced text.

        Of a long text only the first; what follows is known once they are taken.
        """
        if self._matcher.is_stopped():
            return []
        found = self._matcher.compute_ff_tokens()
        self._check()
        return found

    def take(self, token_id: int) -> None:
        """Append a token; refuses one that is not allowed."""
        self._matcher.consume_token(token_id)
        self._check()
        self._num_taken += 1

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        self._matcher.rollback(num_tokens)
        self._check()
        self._num_taken -= num_tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            told = self._matcher.get_error().partition("\n")[0]
            raise GrammarFailed(self._num_taken, told)
