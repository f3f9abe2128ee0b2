"""Train the 8192-entry byte-level BPE tokenizer and write it the way transformers loads it.

Writes tokenizer.json, tokenizer_config.json and chat_template.jinja. No normalizer, so every text
round-trips.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from documents import read_documents

VOCABULARY = 8192
SPECIALS = [
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|reserved_{index}|>" for index in range(8)),
]
# In order: line ends with the blank before them; indentation whole, so a prompt that ends in
# indentation meets the pieces seen in training; words with one leading mark; digits by three;
# marks with the line end after them; the rest. English contractions would split 'data' in code.
PIECES = r"\s*[\r\n]+|[ \t]{2,}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
# Copied as it is: a conversation as commented Python.
CHAT_TEMPLATE = Path(__file__).parent / "templates" / "chat_template.jinja"


def train(texts: Iterator[str]) -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    return tokenizer


def settings() -> dict[str, object]:
    """Give the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 65536,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": SPECIALS[1:],
    }


def sample(documents: Path, every: int) -> Iterator[str]:
    """Yield every n-th training text."""
    for index, document in enumerate(read_documents(documents, "train")):
        if index % every == 0:
            yield document.text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--every", type=int, default=2, help="train on every n-th document")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    tokenizer = train(sample(arguments.documents, arguments.every))
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    (arguments.out / "tokenizer_config.json").write_text(
        json.dumps(settings(), indent=2) + "\n", encoding="utf-8"
    )
    shutil.copy(CHAT_TEMPLATE, arguments.out)

    size = tokens = 0
    for document in read_documents(arguments.documents, "validation"):
        ids = tokenizer.encode(document.text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == document.text, document.path
        size += len(document.text.encode("utf-8"))
        tokens += len(ids)
    print(
        f"validation files round-trip: {size} bytes, {tokens} tokens, "
        f"{size / tokens:.3f} bytes per token"
    )


if __name__ == "__main__":
    main()
