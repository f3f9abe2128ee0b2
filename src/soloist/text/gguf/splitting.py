"""How byte-level tokenizers split text into words, by the name in `tokenizer.ggml.pre`.

A name stands for one tokenizer that llama.cpp's converter met. The patterns are those of the
tokenizers themselves, as their own tokenizer.json has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS_AND_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS_AND_BLANKS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS_AND_BLANKS}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """What one name stands for.

    Attributes:
        pattern: of words; empty for GPT-2's, which the byte-level step has itself.
        digits: each digit is a word of its own, before anything else.
        composes: text is normalised to NFC first.
        whole_words: a word that is a token stays one, whatever merges say.
        begins: a text gets a token before it where the file does not say.
    """

    pattern: str = ""
    digits: bool = False
    composes: bool = False
    whole_words: bool = False
    begins: bool = False

    def steps(self) -> pre_tokenizers.PreTokenizer:
        """The same for the package `tokenizers`."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.pattern)
        return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level


_LLAMA_3 = Splitting(_LLAMA3, whole_words=True, begins=True)
_QWEN_2 = Splitting(_QWEN2, composes=True)
_GPT_2 = Splitting()
_DIGITS = Splitting(digits=True)

SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA_3),
    # Of Smaug and of SmolLM3, which took Llama 3's pattern.
    **dict.fromkeys(("smaug-bpe", "dbrx"), Splitting(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), _QWEN_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "a.x-4.0"), _GPT_2),
    "tekken": Splitting(_TEKKEN, whole_words=True, begins=True),
}
