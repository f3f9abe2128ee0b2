"""Small tokenizers, trained here, of all kinds that Soloist streams, and model folders of them."""

# ruff: noqa: S106 – texts of many scripts are meant, and a token is no password

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "def main(path):\n    return [line.strip() for line in open(path)]\n",
    "The quick brown fox jumps over the lazy dog. What's it to you?\n\n",
    "你好，世界。今天天气很好。 Zażółć gęślą jaźń — déjà vu café",
    '😀😃 👩‍👩‍👧 नमस्ते שלום مرحبا e\u0301 <b>bold</b> & "quoted"',
] * 4
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", special=False), AddedToken("日本", special=False)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """BPE with a space mark and byte tokens, written as in the tokenizer.json of Llama 2."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIALS, *BYTE_TOKENS],
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return tokenizer


@pytest.fixture(scope="session")
def unigram() -> Tokenizer:
    """Unigram with byte tokens and a Metaspace decoder."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    pieces = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"]]
    tokenizer = Tokenizer(
        models.Unigram(
            pieces[:150] + [(token, 0.0) for token in BYTE_TOKENS], unk_id=0, byte_fallback=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model folder: `folder(tokenizer, tokenizer_config={…}, generation_config={…})`."""

    def write(tokenizer: Tokenizer | None = None, **files: object) -> Path:
        if tokenizer is not None:
            tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return write
