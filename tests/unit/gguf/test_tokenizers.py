"""Tokenizers from metadata: against the tokenizer.json that it was made of, and transformers."""

import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from soloist.errors import MissingField, TokenizerError, WrongType
from soloist.model.folder import shipped_folder
from soloist.text import Tokenizer
from soloist.text.chat import ChatTemplate
from soloist.text.files import read_eos_ids
from soloist.text.gguf.splitting import SPLITTINGS
from unit.gguf.writing import add, tokenizer_of

TEXTS = [
    "",
    "def read(path):\n    '''Zeilen — 12345 äöü e\u0301 😀'''\n\n\treturn  path[1:]  # it's\r\n",
    "<think>Hello</think>  WORLD it'S 1234567 x_1 camelCase HTTPServer",
    " <|im_start|>user\nhi<|im_end|>\n  ",
    "   leading and trailing   \n\n\n   \u3000全角 テキスト ١٢٣ 中文",
]


def write(folder: Path, keys: dict[str, Any], architecture: str = "llama") -> Path:
    """A file with metadata and one small tensor."""
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    for key, value in keys.items():
        if value is not None:
            add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a small byte-level tokenizer, trained on the texts."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    made.train_from_iterator(TEXTS * 3, trainer)
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    folder = tmp_path_factory.mktemp("byte_level")
    made.save(str(folder / "tokenizer.json"))
    keys = tokenizer_of(folder, "qwen2")
    return {**keys, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 0}


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe", "qwen2", "tekken"])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(
    text: str, pre: str, byte_level: dict[str, Any], tmp_path: Path
) -> None:
    keys = byte_level | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": True}
    sizes = {
        "block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8,
        "attention.head_count": 1, "attention.head_count_kv": 1,
    }  # fmt: skip
    file = write(tmp_path, keys | {f"llama.{name}": value for name, value in sizes.items()})
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = Tokenizer.from_folder(file)
    # Two things that these tokenizers do and transformers' reader of GGUF does not.
    oracle.backend_tokenizer.model.ignore_merges = pre in {"llama-bpe", "tekken"}
    given = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == oracle(given, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=False) == given
    assert ours.encode(text)[:1] == [0]
    assert ours.special_ids == {0, 1, 2}


def test_each_name_of_a_split_makes_a_tokenizer(byte_level: dict[str, Any], tmp_path: Path) -> None:
    for pre in SPLITTINGS:
        ours = Tokenizer.from_folder(write(tmp_path, byte_level | {"tokenizer.ggml.pre": pre}))
        assert ours.decode(ours.encode(TEXTS[4]), skip_special_tokens=True) == TEXTS[4]
    digits = {
        pre: len(Tokenizer.from_folder(
            write(tmp_path, byte_level | {"tokenizer.ggml.pre": pre})
        ).encode("777777", add_special_tokens=False))
        for pre in ("qwen2", "smollm")
    }  # fmt: skip
    assert digits == {"qwen2": 6, "smollm": 6}


def test_a_shipped_tokenizer_comes_back(tmp_path: Path) -> None:
    """Étude's own split is in no GGUF file; within words its ids are the same."""
    keys = tokenizer_of(shipped_folder("etude"), "llama-bpe")
    keys["tokenizer.ggml.eos_token_id"] = 0
    ours = Tokenizer.from_folder(write(tmp_path, keys))
    theirs = Tokenizer.from_folder(shipped_folder("etude"))
    assert ours.vocab_size == theirs.vocab_size
    assert ours.special_ids == theirs.special_ids
    assert ours.fills_in
    for word in ("return", " self._read_lines(path)", "<|im_start|>user\n", " 12"):
        assert ours.encode(word) == theirs.encode(word)
    assert ours.eos_ids == {0, 7}  # and the end of a message


def test_tokens_around_a_text_and_those_that_end_answers(
    byte_level: dict[str, Any], tmp_path: Path
) -> None:
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ours = Tokenizer.from_folder(write(tmp_path, byte_level | both))
    assert ours.encode("a")[0] == 0
    assert ours.encode("a")[-1] == 2
    assert (ours.bos_id, ours.special_tokens["eos_token"]) == (0, "<|im_end|>")
    assert ours.eos_ids == {0, 2} == read_eos_ids(tmp_path / "model.gguf")
    assert Tokenizer.from_folder(write(tmp_path, byte_level)).encode("a")[0] != 0
    llama = byte_level | {"tokenizer.ggml.pre": "llama-bpe"}
    assert Tokenizer.from_folder(write(tmp_path, llama)).encode("a")[0] == 0  # as Llama 3 has it
    none = {"tokenizer.ggml.add_bos_token": False}
    assert Tokenizer.from_folder(write(tmp_path, llama | none)).encode("a")[0] != 0


def test_padding_of_the_vocabulary_is_no_text(byte_level: dict[str, Any], tmp_path: Path) -> None:
    tokens, kinds = (byte_level[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    more = {
        "tokenizer.ggml.tokens": [*tokens, "[PAD0]"], "tokenizer.ggml.token_type": [*kinds, 5],
    }  # fmt: skip
    ours = Tokenizer.from_folder(write(tmp_path, byte_level | more))
    assert ours.decode([len(tokens)]) == ""


PIECES = [
    ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("[INST]", 0.0, 4),
    *((f"<0x{i:02X}>", 0.0, 6) for i in range(256)),
    *((piece, -float(rank), 1) for rank, piece in enumerate(
        ["▁t", "he", "▁the", "in", "▁a", "ing", "er", "▁▁", "▁c", "at", "▁cat", "aa", "aaa"]
    )),
    *((letter, -1000.0 - i, 1) for i, letter in enumerate("▁theinrgcaäö")),
]  # fmt: skip
SENTENCE_PIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [piece for piece, _, _ in PIECES],
    "tokenizer.ggml.scores": [score for _, score, _ in PIECES],
    "tokenizer.ggml.token_type": [kind for _, _, kind in PIECES],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def by_score(text: str) -> list[int]:
    """SentencePiece's algorithm spelled out: the best neighbours join, the first of equal ones."""
    ids = {piece: i for i, (piece, _, _) in enumerate(PIECES)}
    scores = {piece: score for piece, score, kind in PIECES if kind == 1}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in pairwise(symbols)]
        known = [(-scores[pair], i) for i, pair in enumerate(pairs) if pair in scores]
        if not known:
            break
        _, at = min(known)
        symbols[at : at + 2] = [pairs[at]]
    found = []
    for symbol in symbols:
        missing = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        found += [ids[symbol]] if symbol in ids else missing
    return found


@pytest.mark.parametrize("text", ["the cat", "  eating in the rain", "über ä\n", "caat aaing", ""])
def test_sentence_piece_joins_by_score(text: str, tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write(tmp_path, SENTENCE_PIECE))
    prefix = " " if text else ""
    assert ours.encode(text) == [1, *by_score(prefix + text)]
    assert ours.decode(ours.encode(text)) == text
    streamed = ours.detokenizer()
    tokens = [ours.token(i) or "" for i in ours.encode(text, add_special_tokens=False)]
    assert streamed.push(tokens) + streamed.finish() == text


def test_sentence_piece_puts_a_space_after_each_marked_token(tmp_path: Path) -> None:
    """As llama.cpp does, and the tokenizers of such models did when these were trained."""
    ours = Tokenizer.from_folder(write(tmp_path, SENTENCE_PIECE))
    assert ours.encode("[INST]the", add_special_tokens=False) == [3, *by_score(" the")]
    assert ours.special_ids == {0, 1, 2}
    without = SENTENCE_PIECE | {"tokenizer.ggml.add_space_prefix": False}
    ours = Tokenizer.from_folder(write(tmp_path, without))
    assert ours.encode("the", add_special_tokens=False) == by_score("the")


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"model": "bert"}, TokenizerError, "model' is 'bert'.*allowed: gpt2, llama"),
    "no kind": ({"model": None}, MissingField, "tokenizer.ggml.model"),
    "no split": ({"pre": None}, TokenizerError, "pre' is absent.*allowed: llama-bpe"),
    "other split": ({"pre": "\x1b[2J"}, TokenizerError, r"pre' is '\\x1b\[2J'"),
    "kinds": ({"token_type": [1, 1]}, WrongType, "'2 whole numbers', expected .*one for each"),
    "tokens": ({"tokens": [1, 2]}, WrongType, "expected a list of texts"),
    "same tokens": ({"tokens": ["a", "a"], "token_type": [1, 1]}, TokenizerError, "two ids"),
    "long token": (
        {"tokens": ["a" * 5000, "b"], "token_type": [1, 1]}, TokenizerError, "5,000 characters",
    ),
    "no pair": ({"merges": ["ab"]}, TokenizerError, "'ab'.*is no pair"),
    "unknown pair": ({"merges": ["x yz"]}, TokenizerError, "make no tokenizer"),
    "end": ({"eos_token_id": 10_000}, WrongType, "eos_token_id' is 10000, expected the id"),
    "flag": ({"add_bos_token": 1}, WrongType, "add_bos_token' is 1, expected true or false"),
    "scores": ({"model": "llama"}, MissingField, "'tokenizer.ggml.scores'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_tokenizer_is_refused(
    name: str, byte_level: dict[str, Any], tmp_path: Path
) -> None:
    changes, error, words = BAD[name]
    keys = byte_level | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(error, match=words) as caught:
        Tokenizer.from_folder(write(tmp_path, keys))
    assert "model.gguf" in str(caught.value)


def test_templates_are_those_of_the_metadata(byte_level: dict[str, Any], tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "tokenizer.chat_template": "{{ eos_token }}{{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools | length }}",
    }
    chat = ChatTemplate.from_folder(write(tmp_path, byte_level | keys))
    messages = [{"role": "user", "content": "hi"}]
    assert chat.names == ("default", "tool_use")
    assert chat.render(messages) == "<|im_end|>hi"
    assert chat.render(messages, tools=[{"type": "function"}]) == "1"
    with pytest.raises(TokenizerError, match="has no chat template"):
        ChatTemplate.from_folder(write(tmp_path, byte_level))
    broken = byte_level | {"tokenizer.chat_template": 7}
    with pytest.raises(WrongType, match=r"'tokenizer\.chat_template' is 7"):
        ChatTemplate.from_folder(write(tmp_path, broken))
