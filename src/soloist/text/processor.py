"""The text side of a model: what turns a request into a checked prompt. No weights, no device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from soloist.errors import (
    BadTokenId,
    EmptyPrompt,
    PredictionTooLong,
    PromptTooLong,
    TokenizerError,
)
from soloist.text.files import read_default_tokens
from soloist.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from soloist.text.chat import ChatTemplate
    from soloist.text.grammar import Grammars

# Prompts that are too long by less are encoded to their end, so that an error can say by how much.
_COUNTED_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """All that a processor is made of, small enough to send to another process.

    Attributes:
        folder: of the model.
        vocab_size: V, logits the model gives.
        context_tokens: room for prompt and answer.
        templates: chat templates by name, instead of the folder's.
    """

    folder: Path
    vocab_size: int
    context_tokens: int
    templates: Mapping[str, str] | None = None


class Processor:
    """Tokenizer, chat template and grammars of one model, and the bounds of its prompts.

    Attributes:
        files: what it was made of.
        tokenizer: of the model.
        vocab_size: V.
        context_tokens: room for prompt and answer.
        most_tokens: where encoding a prompt may end: it cannot fit any more.
        default_tokens: most tokens of an answer that nobody limits, if the model's files say so.
    """

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer | None = None) -> None:
        """Read `files`, but for a tokenizer that was read before.

        Raises:
            TokenizerError: the files are damaged, or a token that ends answers is none of the
                model's.
        """
        self.files = files
        self.tokenizer = tokenizer or Tokenizer.from_folder(files.folder)
        self.vocab_size, self.context_tokens = files.vocab_size, files.context_tokens
        _check_eos(self.tokenizer, files.vocab_size)
        self.default_tokens = read_default_tokens(files.folder)
        self.most_tokens = max(_COUNTED_TOKENS, 2 * files.context_tokens)

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The model's own template.

        Raises:
            TokenizerError: it has none.
        """
        from soloist.text.chat import ChatTemplate

        if self.files.templates is not None:
            return ChatTemplate(self.files.templates)
        return ChatTemplate.from_folder(self.files.folder)

    @cached_property
    def grammars(self) -> "Grammars":
        """Compiles what answers must look like, for this model's tokens."""
        from soloist.text.grammar import Grammars

        return Grammars(self.tokenizer, self.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text that may be a prompt; one that cannot fit is not encoded to its end.

        Raises:
            PromptTooLong: it does not fit the context.
            RequestError: half a character.
        """
        self.check_length(text)
        ids = self.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, most_tokens=self.most_tokens
        )
        self._check_least(len(ids), self.most_tokens)
        return ids

    def encode_prediction(self, text: str) -> list[int]:
        """The ids of a text that an answer is expected to repeat.

        Raises:
            PredictionTooLong: no answer could be so long.
            RequestError: half a character.
        """
        least, most = self.tokenizer.least_tokens(text), self.context_tokens
        if least > most:
            raise PredictionTooLong(least, most, is_least=True)
        ids = self.tokenizer.encode_inside(text, self.most_tokens)
        if len(ids) > most:
            raise PredictionTooLong(len(ids), most, is_least=len(ids) > self.most_tokens)
        return ids

    def check_length(self, text: str) -> None:
        """Refuse a text that cannot fit the context, however few tokens it may have.

        Raises:
            PromptTooLong: it does not.
        """
        self._check_least(self.tokenizer.least_tokens(text), self.context_tokens)

    def _check_least(self, num_tokens: int, most: int) -> None:
        if num_tokens > most:
            raise PromptTooLong(num_tokens, 1, self.context_tokens, is_least=True)

    def fim_prompt(self, prefix: str, suffix: str) -> list[int]:
        """The prompt for what belongs between two texts.

        Raises:
            PromptTooLong: the two do not fit the context.
            TokenizerError: the model knows no marks for a gap.
        """
        self.check_length(prefix)
        self.check_length(suffix)
        ids = self.tokenizer.fim_prompt(prefix, suffix, self.most_tokens)
        self._check_least(len(ids), self.most_tokens)
        return ids

    def check_prompt(self, prompt_ids: Sequence[int], new_tokens: int) -> None:
        """Refuse a prompt that cannot be answered with so many tokens.

        Raises:
            RequestError: it is empty or too long, or a token id is outside the vocabulary.
        """
        if not prompt_ids:
            raise EmptyPrompt
        if new_tokens > self.context_tokens - len(prompt_ids):
            raise PromptTooLong(len(prompt_ids), new_tokens, self.context_tokens)
        for token_id in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise BadTokenId("prompt", token_id, self.vocab_size)


def _check_eos(tokenizer: Tokenizer, vocab_size: int) -> None:
    for token_id in sorted(tokenizer.eos_ids):
        if token_id >= vocab_size:
            raise TokenizerError(
                f"the token that ends answers has id {token_id}, outside the model's vocabulary "
                f"(0 … {vocab_size - 1})",
                "tokenizer and weights are of different models; take both from one checkpoint",
            )
