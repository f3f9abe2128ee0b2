"""Long texts, encoded window by window, have the ids of encoding them whole."""

import random
import tracemalloc
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from soloist.model.folder import find_model
from soloist.text import Tokenizer, pieces
from soloist.text.pieces import Pieces, longest_token

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = Path(__file__).read_text("utf-8")

# Whatever a pattern may treat in its own way, runs longer than a window included.
BITS = [
    "a", "foo", "bar", " ", "  ", "\n", "\r\n", "\t", "1", "23", "4567", "é", "🦀", "你好", ".",
    ",", "((", "'s", "'LL", " \n", "\u00a0", "<|im_end|>", "<|im", "_", "x" * 50, " " * 70,
    "\n" * 40, " \n" * 30, "." * 60, "'", "-", "x" * 900, " " * 900,
]  # fmt: skip


def trained(pre_tokenizer) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>"],
        show_progress=False,
    )
    made.train_from_iterator([CORPUS], trainer)
    return made


def llama3() -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(pre_tokenizers.Sequence([split, bytes_only]))


def gpt2() -> tokenizers.Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def etude() -> tokenizers.Tokenizer:
    return Tokenizer.from_folder(find_model("etude"))._backend


@pytest.mark.parametrize("make", [llama3, gpt2, etude])
def test_windows_change_no_id(make, monkeypatch) -> None:
    monkeypatch.setattr(pieces, "_WINDOW", 600)
    monkeypatch.setattr(pieces, "_UNSURE_CHARACTERS", 100)
    backend, rng, num_pieces = make(), random.Random(7), 0
    split = Pieces(backend)
    assert split.is_exact
    for _ in range(100):
        kinds = rng.sample(BITS, rng.randrange(1, len(BITS)))
        text = "".join(rng.choice(kinds) for _ in range(rng.randrange(100, 400)))
        found = list(split.split(text))
        num_pieces += len(found)
        whole = backend.encode(text, add_special_tokens=False).ids
        assert [token_id for piece in found for token_id in piece] == whole
    assert num_pieces > 300


def test_a_text_that_goes_on_is_encoded_from_where_it_went_on(monkeypatch) -> None:
    monkeypatch.setattr(pieces, "_WINDOW", 2100)
    backend, read = etude(), []

    class Counted:
        def __getattr__(self, name):
            return getattr(backend, name)

        def encode(self, text, **options):
            read.append(len(text))
            return backend.encode(text, **options)

    own, rng = Pieces(Counted()), random.Random(3)
    bits = [bit for bit in BITS if len(bit) < 500]  # no window has to be wider
    text, sums = "".join(rng.choices(bits, k=3000)), []
    for _ in range(4):
        read.clear()
        assert [i for part in own.split(text) for i in part] == backend.encode(text).ids
        sums.append(sum(read))
        text += "".join(rng.choices(bits, k=100))
    assert sums[0] > 20_000
    assert all(count < 12_000 for count in sums[1:])


def test_what_depends_on_the_text_before_is_encoded_whole() -> None:
    with_prefix = trained(pre_tokenizers.ByteLevel(add_prefix_space=True))
    normalised, stripping, sentence = gpt2(), gpt2(), gpt2()
    normalised.normalizer = normalizers.NFC()
    stripping.add_special_tokens([AddedToken("<x>", lstrip=True)])
    sentence.pre_tokenizer = pre_tokenizers.Metaspace()
    behind = trained(pre_tokenizers.Split(Regex(r"(?<=a)b|."), "isolated"))
    for backend in (with_prefix, normalised, stripping, sentence, behind):
        split = Pieces(backend)
        assert not split.is_exact
        text = "a b  c\n" * 5000
        assert [*split.split(text)] == [backend.encode(text, add_special_tokens=False).ids]


def test_encoding_ends_where_a_prompt_cannot_fit() -> None:
    tokenizer = Tokenizer.from_folder(find_model("etude"))
    ids = tokenizer.encode("def f(x):\n    return x\n" * 100_000, most_tokens=5000)
    assert 5000 < len(ids) < 20_000
    assert tokenizer.encode("def f", most_tokens=1) == tokenizer.encode("def f")


def test_special_tokens_stand_around_a_long_text_once() -> None:
    backend = gpt2()
    end = backend.token_to_id("<|im_end|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_end|> $A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    tokenizer, text = Tokenizer(backend), "some words, and more\n" * 4000
    assert tokenizer.encode(text) == backend.encode(text).ids
    bare = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == bare


def test_no_token_is_longer_than_told() -> None:
    backend = llama3()
    longest = longest_token(backend)
    assert longest is not None
    assert longest >= max(len(backend.decode([i])) for i in range(backend.get_vocab_size()))
    tokenizer = Tokenizer(backend)
    for text in (CORPUS, "x" * 10_000, " " * 10_000, "你好🦀" * 1000):
        assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    backend.normalizer = normalizers.Strip()
    assert longest_token(backend) is None


def test_memory_does_not_grow_with_the_text() -> None:
    """Python's own part of it: ids and offsets; the library's is freed with each window."""
    split = Pieces(etude())
    tracemalloc.start()
    try:
        for _ in split.split("value = compute(argument)\n" * 20_000):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20
